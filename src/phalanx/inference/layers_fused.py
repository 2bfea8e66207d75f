"""Triton kernels for scoring: convolutions with what stands behind them.

Images are [M, C] rows with C contiguous (channels_last) and C a multiple of eight, handed over as
C // 8 so that loads stay 16 bytes wide. Offsets are 32 bits wide.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0913, PLR0917  (kernels take pointers and sizes one by one)

import triton
import triton.language as tl

_NONE, _RELU, _SILU, _RELU6, _RAW = (tl.constexpr(i) for i in range(5))


@triton.jit
def _activate(z, ACT: tl.constexpr):
    """The activation of float32 values."""
    if ACT == _RELU:
        z = tl.maximum(z, 0.0)
    if ACT == _RELU6:
        z = tl.minimum(tl.maximum(z, 0.0), 6.0)
    if ACT == _SILU:
        z = z / (1.0 + tl.exp(-z))
    return z


@triton.jit
def _finish(acc, bias, add, out, m, n, M, N, ADD: tl.constexpr, ACT: tl.constexpr):
    """Store the activation of acc + bias (+ add); _RAW: acc itself."""
    okn = n < N
    ok, o = (m < M)[:, None] & okn[None, :], m[:, None] * N + n[None, :]
    if ACT != _RAW:
        acc += tl.load(bias + n, mask=okn, other=0.0)[None, :]
    if ADD:
        acc += tl.load(add + o, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + o, _activate(acc, ACT).to(out.dtype.element_ty), mask=ok)


@triton.jit
def _add_split(acc, part, count, m, n, M, N, split, SPLITS, BM: tl.constexpr, BN: tl.constexpr):
    """The sum over all splits in the last program to come, and whether this is the one.

    Always added in the same order. The counter is left at zero for the next kernel.
    """
    ok, o = (m < M)[:, None] & (n < N)[None, :], m[:, None] * N + n[None, :]
    tl.store(part + split * M * N + o, acc, mask=ok)
    tl.debug_barrier()
    last = tl.atomic_add(count, 1, sem="acq_rel") == SPLITS - 1
    if last:
        acc = tl.zeros((BM, BN), tl.float32)
        for i in range(SPLITS):
            acc += tl.load(part + i * M * N + o, mask=ok, other=0.0, cache_modifier=".cg")
        tl.store(count, 0)
    return acc, last


@triton.jit(do_not_specialize=["M", "H", "W", "HO", "WO"])
def convolve(
    x, w, bias, add, gate, out, part, count, M, H, W, HO, WO,
    C: tl.constexpr, N: tl.constexpr, PITCH: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr, GROUPED: tl.constexpr, GATE: tl.constexpr,
    ADD: tl.constexpr, ACT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """out [M, N] = act(conv(x * gate, w) + bias + add) as a product over KH * KW shifted views.

    w is [N, KH, KW, C]; a view has C channels of pixels that are PITCH apart. GROUPED: BN channels
    see the same BN channels of x only, and C = BK = BN. GATE: one factor for each image and
    channel. SPLITS programs share the sum of one tile.
    """
    STEPS: tl.constexpr = (C + BK - 1) // BK
    ALL: tl.constexpr = KH * KW * STEPS
    WHOLE: tl.constexpr = C % BK == 0
    blocks: tl.constexpr = (N + BN - 1) // BN
    row, column, split = tl.program_id(0) // blocks, tl.program_id(0) % blocks, tl.program_id(1)
    m, n = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
    inside, okn = m < M, n < N
    image, h, wide = m // (HO * WO), (m // WO) % HO, m % WO
    top, left = h * STRIDE - PAD, wide * STRIDE - PAD
    place = ((image * H + top) * W + left) * PITCH
    if GROUPED:
        place += column * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(split * ALL // SPLITS, (split + 1) * ALL // SPLITS):
        tap, k = step // STEPS, (step % STEPS) * BK + tl.arange(0, BK)
        down, right = tap // KW, tap % KW
        ok = inside
        if PAD > 0:
            ok = ok & (top + down >= 0) & (top + down < H)
            ok = ok & (left + right >= 0) & (left + right < W)
        source = (place + (down * W + right) * PITCH)[:, None] + k[None, :]
        target = n[:, None] * (KH * KW * C) + (tap * C + k)[None, :]
        if WHOLE:
            rows = tl.load(x + source, mask=ok[:, None], other=0.0)
            weights = tl.load(w + target, mask=okn[:, None], other=0.0)
        else:
            okk = (k < C)[None, :]
            rows = tl.load(x + source, mask=ok[:, None] & okk, other=0.0)
            weights = tl.load(w + target, mask=okn[:, None] & okk, other=0.0)
        if GATE:
            factor = gate + image[:, None] * C + k[None, :]
            rows *= tl.load(factor, mask=ok[:, None] & (k < C)[None, :], other=0.0)
        acc = tl.dot(rows, tl.trans(weights), acc)
    if SPLITS > 1:
        counter = count + tl.program_id(0)
        acc, is_last = _add_split(acc, part, counter, m, n, M, N, split, SPLITS, BM, BN)
        if is_last:
            _finish(acc, bias, add, out, m, n, M, N, ADD, ACT)
    else:
        _finish(acc, bias, add, out, m, n, M, N, ADD, ACT)


@triton.jit(do_not_specialize=["M", "P"])
def convolve_rows(
    x, w, bias, add, out, M, N, P, K: tl.constexpr, ADD: tl.constexpr, ACT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """1x1 of few channels: programs keep their weights and walk over every P-th block of rows."""
    blocks = N // BN
    column, first = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    n, k = column * BN + tl.arange(0, BN), tl.arange(0, K)
    weights = tl.trans(tl.load(w + n[:, None] * K + k[None, :]))
    shift = tl.load(bias + n)[None, :]
    for row in tl.range(first, tl.cdiv(M, BM), P, num_stages=DEPTH):
        m = row * BM + tl.arange(0, BM)
        ok, o = (m < M)[:, None], m[:, None] * N + n[None, :]
        if ADD:
            added = tl.load(add + o, mask=ok, other=0.0)
        rows = tl.load(x + m[:, None] * K + k[None, :], mask=ok, other=0.0)
        acc = tl.dot(rows, weights) + shift
        if ADD:
            acc += added.to(tl.float32)
        tl.store(out + o, _activate(acc, ACT).to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["M", "P"])
def convolve_ahead(
    x, w, bias, add, out, M, N, K, P, ADD: tl.constexpr, ACT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
    FLAT: tl.constexpr,
):  # fmt: skip
    """1x1 of many channels by P programs that walk over the tiles; x and w are descriptors.

    The copy engine fetches both factors and, FLAT, those of the next tile during the epilogue of
    this one. EARLY: what is added is asked for before the product.
    """
    blocks = tl.cdiv(N, BN)
    late = tl.program_id(0) - P  # the epilogue counts anew: what it shares would take registers
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BM) * blocks, P, flatten=FLAT):
        top, side = (tile // blocks) * BM, (tile % blocks) * BN
        if ADD & EARLY:
            m0, n0 = top + tl.arange(0, BM), side + tl.arange(0, BN)
            place = m0[:, None] * N + n0[None, :]
            added = tl.load(add + place, mask=(m0 < M)[:, None], other=0.0)
        acc = tl.zeros((BM, BN), tl.float32)
        for k0 in range(0, K, BK):
            acc = tl.dot(x.load([top, k0]), tl.trans(w.load([side, k0])), acc)
        late += P
        m = (late // blocks) * BM + tl.arange(0, BM)
        n = (late % blocks) * BN + tl.arange(0, BN)
        ok, o = (m < M)[:, None], m[:, None] * N + n[None, :]
        if ADD & (not EARLY):
            added = tl.load(add + o, mask=ok, other=0.0)
        acc += tl.load(bias + n)[None, :]
        if ADD:
            acc += added.to(tl.float32)
        tl.store(out + o, _activate(acc, ACT).to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["M", "C8"])
def shift_and_activate(
    x, bias, add, out, M, C8, ADD: tl.constexpr, ACT: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """act(x + bias + add), behind a convolution of a library."""
    C = C8 * 8
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    ok, o = (m < M)[:, None] & (c < C)[None, :], m[:, None] * C + c[None, :]
    value = tl.load(x + o, mask=ok, other=0.0).to(tl.float32)
    _finish(value, bias, add, out, m, c, M, C, ADD, ACT)


@triton.jit(do_not_specialize=["M", "C8", "H", "W", "HO", "WO"])
def activate_and_pool(
    x, bias, out, M, C8, H, W, HO, WO, ACT: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The 3x3 max-pool of stride 2 of act(x + bias), padded by one."""
    C = C8 * 8
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    okc, n, h, w = c < C, m // (HO * WO), (m // WO) % HO, m % WO
    best = tl.full((BM, BC), float("-inf"), tl.float32)
    for i in tl.static_range(3):
        for j in tl.static_range(3):
            row, column = 2 * h - 1 + i, 2 * w - 1 + j
            ok = (m < M) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
            o = ((n * H + row) * W + column)[:, None] * C + c[None, :]
            value = tl.load(x + o, mask=ok[:, None] & okc[None, :], other=float("-inf"))
            best = tl.maximum(best, value.to(tl.float32))
    # the activations grow with their input: the largest first gives the same
    best = _activate(best + tl.load(bias + c, mask=okc, other=0.0)[None, :], ACT)
    o, ok = m[:, None] * C + c[None, :], (m < M)[:, None] & okc[None, :]
    tl.store(out + o, best.to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["M", "H", "W", "HO", "WO", "LEFT"])
def gather_squares(x, out, M, H, W, HO, WO, LEFT, SN, SC, SH, SW, BM: tl.constexpr):
    """Squares of 2 x 2 pixels of 3 channels as one pixel of 16 channels, the last four zero.

    Output pixel (h, w) is the square at 2 (h - LEFT), 2 (w - LEFT); zero beyond the image.
    """
    m, k = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, 16)
    n, h, w = m // (HO * WO), (m // WO) % HO, m % WO
    row, column = (2 * (h - LEFT))[:, None] + k // 6, (2 * (w - LEFT))[:, None] + (k % 6) // 3
    ok = (m < M)[:, None] & (k < 12) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    o = n[:, None] * SN + row * SH + column * SW + (k % 3) * SC
    value = tl.load(x + o, mask=ok, other=0.0)
    place = m[:, None] * 16 + k[None, :]
    tl.store(out + place, value.to(out.dtype.element_ty), mask=(m < M)[:, None])


@triton.jit(do_not_specialize=["H", "W", "HO", "WO", "C8", "PARTS"])
def filter_channels(
    x, w, bias, out, sums, H, W, HO, WO, C8, PARTS,
    KS: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, ACT: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """A depthwise convolution with bias and activation; w is [KS, KS, C].

    A program takes every PARTS-th block of an image's pixels, and writes what they sum up to as a
    row of sums [images, PARTS, C].
    """
    C, image, part = C8 * 8, tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    okc = c < C
    shift = tl.load(bias + c, mask=okc, other=0.0)[None, :]
    total = tl.zeros((BM, BC), tl.float32)
    for block in range(part, tl.cdiv(HO * WO, BM), PARTS):
        m = block * BM + tl.arange(0, BM)
        top, left = (m // WO) * STRIDE - PAD, (m % WO) * STRIDE - PAD
        inside = m < HO * WO
        start = ((image * H + top) * W + left)[:, None] * C + c[None, :]
        acc = tl.zeros((BM, BC), tl.float32)
        for i in tl.static_range(KS):
            for j in tl.static_range(KS):
                ok = inside & (top + i >= 0) & (top + i < H) & (left + j >= 0) & (left + j < W)
                value = tl.load(x + start + (i * W + j) * C, mask=ok[:, None] & okc, other=0.0)
                weight = tl.load(w + (i * KS + j) * C + c, mask=okc, other=0.0)
                acc += value.to(tl.float32) * weight.to(tl.float32)[None, :]
        acc = _activate(acc + shift, ACT)
        ok, o = inside[:, None] & okc[None, :], (image * HO * WO + m)[:, None] * C + c[None, :]
        tl.store(out + o, acc.to(out.dtype.element_ty), mask=ok)
        total += tl.where(inside[:, None], acc, 0.0)
    tl.store(sums + (image * PARTS + part) * C + c, tl.sum(total, 0), mask=okc)


@triton.jit(do_not_specialize=["PARTS", "PIXELS", "C8", "S"])
def squeeze(
    sums, w, bias, squeezed, PARTS, PIXELS, C8, S,
    BP: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """squeezed [images, S] = silu(w mean + bias), BS values of an image a program; w is [S, C]."""
    C, image, p = C8 * 8, tl.program_id(0), tl.arange(0, BP)
    s = tl.program_id(1) * BS + tl.arange(0, BS)
    oks, acc = s < S, tl.zeros((BS, BC), tl.float32)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        okc, total = c < C, tl.zeros((BP, BC), tl.float32)
        for p0 in range(0, PARTS, BP):
            place = (image * PARTS + p0 + p)[:, None] * C + c[None, :]
            ok = (p0 + p < PARTS)[:, None] & okc[None, :]
            total += tl.load(sums + place, mask=ok, other=0.0)
        mean = tl.sum(total, 0) / PIXELS
        ok = oks[:, None] & okc[None, :]
        weight = tl.load(w + s[:, None] * C + c[None, :], mask=ok, other=0.0).to(tl.float32)
        acc += weight * mean[None, :]
    value = _activate(tl.sum(acc, 1) + tl.load(bias + s, mask=oks, other=0.0), _SILU)
    tl.store(squeezed + image * S + s, value, mask=oks)


@triton.jit(do_not_specialize=["C8", "S"])
def excite(squeezed, w, bias, gate, C8, S, BC: tl.constexpr, BS: tl.constexpr):
    """gate [images, C] = sigmoid(w squeezed + bias), BC channels of an image; w is [C, S]."""
    C, image, s = C8 * 8, tl.program_id(0), tl.arange(0, BS)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    okc, oks = c < C, s < S
    value = tl.load(squeezed + image * S + s, mask=oks, other=0.0)
    ok = okc[:, None] & oks[None, :]
    weight = tl.load(w + c[:, None] * S + s[None, :], mask=ok, other=0.0).to(tl.float32)
    z = tl.sum(weight * value[None, :], 1) + tl.load(bias + c, mask=okc, other=0.0)
    factor = 1.0 / (1.0 + tl.exp(-z))
    tl.store(gate + image * C + c, factor.to(gate.dtype.element_ty), mask=okc)


@triton.jit(do_not_specialize=["PIXELS", "C8"])
def average_pixels(x, out, PIXELS, C8, BM: tl.constexpr, BC: tl.constexpr):
    """The mean over an image's pixels of [images, PIXELS, C]."""
    C = C8 * 8
    c, image = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1)
    total = tl.zeros((BM, BC), tl.float32)
    for r in range(0, PIXELS, BM):
        m = r + tl.arange(0, BM)
        ok, o = (m < PIXELS)[:, None] & (c < C)[None, :], (image * PIXELS + m)[:, None] * C
        total += tl.load(x + o + c[None, :], mask=ok, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / PIXELS
    tl.store(out + image * C + c, mean.to(out.dtype.element_ty), mask=c < C)
