"""Triton kernels for scoring: convolutions with their epilogues.

Images are matrices [M, C] with C contiguous (channels_last) and a multiple of eight, passed as
C // 8 so that loads stay 16 bytes wide. Offsets are 32-bit.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0913, PLR0917  (kernels take pointers and sizes one by one)

import triton
import triton.language as tl

_NONE, _RELU, SILU, _RELU6, _RAW = (tl.constexpr(i) for i in range(5))


@triton.jit
def activate(z, ACT: tl.constexpr):
    """The activation of float32 values."""
    if ACT == _RELU:
        z = tl.maximum(z, 0.0)
    if ACT == _RELU6:
        z = tl.minimum(tl.maximum(z, 0.0), 6.0)
    if ACT == SILU:
        root = tl.rsqrt(1.0 + tl.exp2(z * -1.4426950408889634))  # twice as fast as a division
        z *= root * root
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
    tl.store(out + o, activate(acc, ACT).to(out.dtype.element_ty), mask=ok)


@triton.jit
def _add_split(acc, part, count, m, n, M, N, split, SPLITS, BM: tl.constexpr, BN: tl.constexpr):
    """The sum over all splits, in the last program to arrive, and whether this is that program.

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


@triton.jit
def _find_rows(row, M, PIXELS, GATE: tl.constexpr, BM: tl.constexpr):
    """The output rows of a tile, M for none; GATE: all of one image, the second result."""
    m, image = row * BM + tl.arange(0, BM), 0
    if GATE:
        each = tl.cdiv(PIXELS, BM)
        image = row // each
        m -= image * each * BM
        m = tl.where(m < PIXELS, image * PIXELS + m, M)
    return m, image


@triton.jit
def _find_corners(m, H, W, HO, WO, TAPS: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr):
    """Row, column and index of the first pixel of each output's window; of a plain GEMM, m."""
    top, left, offsets = m, m, m
    if (TAPS > 1) | (STRIDE > 1) | (PAD > 0):
        image, h, w = m // (HO * WO), (m // WO) % HO, m % WO
        top, left = h * STRIDE - PAD, w * STRIDE - PAD
        offsets = (image * H + top) * W + left
    return top, left, offsets


@triton.jit(do_not_specialize=["M", "H", "W", "HO", "WO"])
def convolve(
    x, w, bias, add, gate, out, part, count, M, H, W, HO, WO,
    C: tl.constexpr, N: tl.constexpr, PITCH: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr, GROUPED: tl.constexpr, GATE: tl.constexpr,
    ADD: tl.constexpr, ACT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """out [M, N] = act(conv(x * gate, w) + bias + add): implicit GEMM over KH * KW shifted views.

    w is [N, KH, KW, C]; a view has C channels of pixels that are PITCH apart. GROUPED: BN channels
    read the same BN channels of x only, and C = BK = BN. GATE: one factor for each image and
    channel; a tile's rows are of one image. Split-K: SPLITS programs share the sum of one tile.
    """
    STEPS: tl.constexpr = (C + BK - 1) // BK
    ALL: tl.constexpr = KH * KW * STEPS
    WHOLE: tl.constexpr = C % BK == 0
    blocks: tl.constexpr = (N + BN - 1) // BN
    row, column, split = tl.program_id(0) // blocks, tl.program_id(0) % blocks, tl.program_id(1)
    n = column * BN + tl.arange(0, BN)
    m, image = _find_rows(row, M, HO * WO, GATE, BM)
    inside, okn = m < M, n < N
    top, left, offsets = _find_corners(m, H, W, HO, WO, KH * KW, STRIDE, PAD)
    offsets *= PITCH
    if GROUPED:
        offsets += column * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(split * ALL // SPLITS, (split + 1) * ALL // SPLITS):
        if KH * KW == 1:
            tap, k = 0, step * BK + tl.arange(0, BK)
        else:
            tap, k = step // STEPS, (step % STEPS) * BK + tl.arange(0, BK)
        down, right = tap // KW, tap % KW
        ok = inside
        if PAD > 0:
            ok = ok & (top + down >= 0) & (top + down < H)
            ok = ok & (left + right >= 0) & (left + right < W)
        source = (offsets + (down * W + right) * PITCH)[:, None] + k[None, :]
        target = n[:, None] * (KH * KW * C) + (tap * C + k)[None, :]
        if WHOLE:
            rows = tl.load(x + source, mask=ok[:, None], other=0.0)
            weights = tl.load(w + target, mask=okn[:, None], other=0.0)
        else:
            okk = (k < C)[None, :]
            rows = tl.load(x + source, mask=ok[:, None] & okk, other=0.0)
            weights = tl.load(w + target, mask=okn[:, None] & okk, other=0.0)
        if GATE:
            rows *= tl.load(gate + image * C + k, mask=k < C, other=0.0)[None, :]
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
    """1x1 of few channels: persistent programs keep their weights and loop over blocks of rows."""
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
        tl.store(out + o, activate(acc, ACT).to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["M", "P"])
def convolve_tma(
    x, w, bias, add, out, M, N, K, P, ADD: tl.constexpr, ACT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
    FLAT: tl.constexpr,
):  # fmt: skip
    """1x1 of many channels by P programs that loop over the tiles; x and w: tensor descriptors.

    TMA loads both operands and, with FLAT, those of the next tile during the epilogue of this one.
    EARLY: `add` is loaded before the product.
    """
    blocks = tl.cdiv(N, BN)
    late = tl.program_id(0) - P  # the epilogue recomputes its tile: a shared index takes registers
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BM) * blocks, P, flatten=FLAT):
        top, side = (tile // blocks) * BM, (tile % blocks) * BN
        if ADD & EARLY:
            m0, n0 = top + tl.arange(0, BM), side + tl.arange(0, BN)
            offsets = m0[:, None] * N + n0[None, :]
            added = tl.load(add + offsets, mask=(m0 < M)[:, None], other=0.0)
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
        tl.store(out + o, activate(acc, ACT).to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["M", "C8"])
def shift_and_activate(
    x, bias, add, out, M, C8, ADD: tl.constexpr, ACT: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """act(x + bias + add), after a convolution by cuDNN."""
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
    # the activations are monotonic: after the maximum they give the same
    best = activate(best + tl.load(bias + c, mask=okc, other=0.0)[None, :], ACT)
    o, ok = m[:, None] * C + c[None, :], (m < M)[:, None] & okc[None, :]
    tl.store(out + o, best.to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["M", "H", "W", "HO", "WO", "LEFT"])
def space_to_depth(x, out, M, H, W, HO, WO, LEFT, SN, SC, SH, SW, BM: tl.constexpr):
    """Space-to-depth: 2 x 2 pixels of 3 channels become one of 16 channels, the last four zero.

    Output pixel (h, w) is the block at 2 (h - LEFT), 2 (w - LEFT); zero beyond the image.
    """
    m, k = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, 16)
    n, h, w = m // (HO * WO), (m // WO) % HO, m % WO
    row, column = (2 * (h - LEFT))[:, None] + k // 6, (2 * (w - LEFT))[:, None] + (k % 6) // 3
    ok = (m < M)[:, None] & (k < 12) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    o = n[:, None] * SN + row * SH + column * SW + (k % 3) * SC
    value = tl.load(x + o, mask=ok, other=0.0)
    offsets = m[:, None] * 16 + k[None, :]
    tl.store(out + offsets, value.to(out.dtype.element_ty), mask=(m < M)[:, None])


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
