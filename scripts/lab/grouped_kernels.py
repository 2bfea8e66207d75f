"""Grouped 3x3 convolutions in Triton that grouped_variants.py compares; images are channels_last.

A pack is J channels of the operand and JO of the result: whole groups, whose weights are one
block-diagonal matrix, made by `pack_weight` of grouped_cases.py (for an input's gradient transposed
and with its taps reversed). G packs are one batched product, of which each warp takes its share
(mma from registers); with G = 1 the product is a plain one (wgmma, if it has 64 rows).

`walk` and its relatives load a row of pixels three times, once for each column of the kernel, and
use it for three rows of results, which stay in registers: 3 loads where `tile` has 9. PRE: what
becomes of the operand on the load; 1: relu(x * scale + shift), v's last two rows; 2: a norm's
gradient a * x + b * x2 + c, u's last three. POST: column sums; 1: of the result and of its square;
2: of the result where relu(gate) > 0 and of that times the gate's input (a norm's backward sums).
"""
# ruff: noqa: PLR0913, PLR0915, PLR0917  (kernels take pointers and sizes one by one)
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

_PLAIN = ["N", "H", "W", "EDGE", "EACH"]  # not specialised: layers share compiled kernels


@triton.jit
def _spread(rows, columns, G: tl.constexpr):
    """[M, J], or [G, M, J] of several packs, from rows [M] and columns [J] or [G, J]."""
    if G == 1:
        return rows[:, None] + columns[None, :]
    else:
        return rows[None, :, None] + columns[:, None, :]


@triton.jit
def _spread_rows(rows, G: tl.constexpr):
    """Rows [M] in a shape that broadcasts with a tile."""
    if G == 1:
        return rows[:, None]
    else:
        return rows[None, :, None]


@triton.jit
def _load_channels(v, row, columns, C, G: tl.constexpr):
    """A row of vectors by channel, in a shape that broadcasts with a tile."""
    found = tl.load(v + row * C + columns)
    if G == 1:
        return found[None, :]
    else:
        return found[:, None, :]


@triton.jit
def _find_channels(block, G: tl.constexpr, J: tl.constexpr, JO: tl.constexpr):
    """The channels of a block's results, and of their operand."""
    if G == 1:
        first = block * JO
        return first + tl.arange(0, JO), first // J * J + tl.arange(0, J)
    else:
        packs = (block * G + tl.arange(0, G)) * JO
        results = packs[:, None] + tl.arange(0, JO)[None, :]
        return results, (packs // J * J)[:, None] + tl.arange(0, J)[None, :]


@triton.jit
def _load_weight(
    w, block, C, TAP: tl.constexpr, G: tl.constexpr, J: tl.constexpr, JO: tl.constexpr
):  # fmt: skip
    """The packed weights of a tap, from memory [9, packs, J, JO]."""
    rows = tl.arange(0, J)[:, None] * JO + tl.arange(0, JO)[None, :]
    first = TAP * (C // JO) + block * G
    if G == 1:
        return tl.load(w + first * (J * JO) + rows)
    else:
        packs = (first + tl.arange(0, G)) * (J * JO)
        return tl.load(w + packs[:, None, None] + rows[None, :, :])


@triton.jit
def _load_vectors(p, k, C, PRE: tl.constexpr, G: tl.constexpr):
    """The three vectors of PRE."""
    if PRE == 1:
        scale, shift = _load_channels(p, 2, k, C, G), _load_channels(p, 3, k, C, G)
        return scale, shift, 0.0
    elif PRE == 2:
        scale, slope = _load_channels(p, 2, k, C, G), _load_channels(p, 3, k, C, G)
        return scale, slope, _load_channels(p, 4, k, C, G)
    else:
        return 0.0, 0.0, 0.0


@triton.jit
def _load_operand(x, x2, at, ok, first, second, third, PRE: tl.constexpr):
    """The operand, zero where not ok."""
    value = tl.load(x + at, mask=ok, other=0.0)
    if PRE == 1:
        found = tl.maximum(value.to(tl.float32) * first + second, 0.0)
        value = tl.where(ok, found, 0.0).to(value.dtype)
    if PRE == 2:
        other = tl.load(x2 + at, mask=ok, other=0.0).to(tl.float32)
        found = value.to(tl.float32) * first + other * second + third
        value = tl.where(ok, found, 0.0).to(value.dtype)
    return value


@triton.jit
def _add_three(value, top, middle, bottom, before, here, after):
    """A row's part in the results of the rows before it, at it and after it."""
    before = tl.dot(value, bottom, before)
    here = tl.dot(value, middle, here)
    return before, here, tl.dot(value, top, after)


@triton.jit
def _multiply_transposed(x, d, acc, G: tl.constexpr):
    """acc + x^T d."""
    if G == 1:
        return tl.dot(tl.trans(x), d, acc)
    else:
        return tl.dot(tl.permute(x, (0, 2, 1)), d, acc)


@triton.jit
def _new_tile(G: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Zeros."""
    if G == 1:
        return tl.zeros((M, N), tl.float32)
    else:
        return tl.zeros((G, M, N), tl.float32)


@triton.jit
def _new_sums(G: tl.constexpr, M: tl.constexpr, N: tl.constexpr, POST: tl.constexpr):
    """Zeros for the sums of `_finish_rows`."""
    if POST == 2:
        return _new_tile(G, M, N)
    elif G == 1:
        return tl.zeros((64, N), tl.float32)
    else:
        return tl.zeros((G, 16, N), tl.float32)


@triton.jit
def _fold_rows(value, G: tl.constexpr):
    """A tile's rows added up to 16, or 64 for four warps: within threads, without exchange."""
    if G == 1:
        shape: tl.constexpr = (value.shape[0] // 64, 64, value.shape[1])
        return tl.sum(tl.reshape(value, shape), 0)
    else:
        packs: tl.constexpr = (G, value.shape[1] // 16, 16, value.shape[2])
        return tl.sum(tl.reshape(value, packs), 1)


@triton.jit
def _finish_rows(
    result, out, gate, first, second, total, square, at, ok, POST: tl.constexpr, G: tl.constexpr
):
    """Store results, and add to their sums."""
    half = result.to(out.dtype.element_ty)
    tl.store(out + at, half, mask=ok)
    if POST == 1:
        kept = tl.where(ok, result, 0.0)
        total += _fold_rows(kept, G)
        square += _fold_rows(kept * kept, G)
    if POST == 2:
        factor = tl.load(gate + at, mask=ok, other=0.0).to(tl.float32)
        kept = tl.where(ok & (factor * first + second > 0), half.to(tl.float32), 0.0)
        total += kept  # in this layout, threads would have to exchange values to fold rows
        square += kept * factor
    return total, square


@triton.jit
def _store_sums(s, total, square, first, P, n, C, POST: tl.constexpr, G: tl.constexpr):
    """A program's row of the partial sums [2, P, C]."""
    if POST > 0:
        axis: tl.constexpr = 0 if G == 1 else 1
        tl.store(s + first * C + n, tl.sum(total, axis))
        tl.store(s + (P + first) * C + n, tl.sum(square, axis))


@triton.jit
def _store_weight(
    out, acc, first, n, k, C, EACH, TAP: tl.constexpr, G: tl.constexpr
):  # fmt: skip
    """The diagonal blocks of a tap's gradient: [P, out, 9, each]."""
    if G == 1:
        k, n = k[:, None], n[None, :]
    else:
        k, n = k[:, :, None], n[:, None, :]
    at = (n * 9 + TAP) * EACH + k % EACH
    tl.store(out + first * C * 9 * EACH + at, acc, mask=k // EACH == n // EACH)


@triton.jit(do_not_specialize=_PLAIN)
def walk(
    x, x2, p, w, out, gate, gv, s, N, H, W, EDGE, C, EACH,
    PRE: tl.constexpr, POST: tl.constexpr,
    G: tl.constexpr, J: tl.constexpr, JO: tl.constexpr, M: tl.constexpr, WAVES: tl.constexpr,
):  # fmt: skip
    """Stride 1: a program walks down M pixels of a row (EDGE or M of an image, or of several)."""
    blocks = C // (G * JO)
    block, first, P = tl.program_id(0) % blocks, tl.program_id(0) // blocks, tl.num_programs(0)
    P = P // blocks
    n, k = _find_channels(block, G, J, JO)
    w0, w1 = _load_weight(w, block, C, 0, G, J, JO), _load_weight(w, block, C, 1, G, J, JO)
    w2, w3 = _load_weight(w, block, C, 2, G, J, JO), _load_weight(w, block, C, 3, G, J, JO)
    w4, w5 = _load_weight(w, block, C, 4, G, J, JO), _load_weight(w, block, C, 5, G, J, JO)
    w6, w7 = _load_weight(w, block, C, 6, G, J, JO), _load_weight(w, block, C, 7, G, J, JO)
    w8 = _load_weight(w, block, C, 8, G, J, JO)
    a, b, c = _load_vectors(p, k, C, PRE, G)
    ga, gb, _ = _load_vectors(gv, n, C, POST // 2, G)
    total, square = _new_sums(G, M, JO, POST), _new_sums(G, M, JO, POST)
    width = tl.minimum(EDGE, M)
    images, tiles = M // width, tl.cdiv(W, width)
    share = tl.cdiv(tl.cdiv(N, images) * tiles - first, P)
    m = tl.arange(0, M)
    before, here = _new_tile(G, M, JO), _new_tile(G, M, JO)
    for t in range(0, share * (H + 1)):
        unit, r = first + t // (H + 1) * P, t % (H + 1)
        image, column = unit // tiles * images + m // width, unit % tiles * width + m % width
        pixel, ok = (image * H + r) * W + column, (image < N) & (r < H)
        after = _new_tile(G, M, JO)
        sides = _spread_rows(ok & (column > 0) & (column <= W), G)
        value = _load_operand(x, x2, _spread((pixel - 1) * C, k, G), sides, a, b, c, PRE)
        before, here, after = _add_three(value, w0, w3, w6, before, here, after)
        sides = _spread_rows(ok & (column < W), G)
        value = _load_operand(x, x2, _spread(pixel * C, k, G), sides, a, b, c, PRE)
        before, here, after = _add_three(value, w1, w4, w7, before, here, after)
        sides = _spread_rows(ok & (column + 1 < W), G)
        value = _load_operand(x, x2, _spread((pixel + 1) * C, k, G), sides, a, b, c, PRE)
        before, here, after = _add_three(value, w2, w5, w8, before, here, after)
        ok = _spread_rows((image < N) & (r > 0) & (column < W), G)
        at = _spread((pixel - W) * C, n, G)
        total, square = _finish_rows(
            before, out, gate, ga, gb, total, square, at, ok, POST, G
        )  # fmt: skip
        before, here = here, after
    _store_sums(s, total, square, first, P, n, C, POST, G)


@triton.jit
def _find_tap(image, y, x, H, W, DY: tl.constexpr, DX: tl.constexpr):
    """The pixel beside (y, x), and whether it is in the image."""
    y, x = y + DY, x + DX
    return (image * H + y) * W + x, (y >= 0) & (y < H) & (x >= 0) & (x < W)


@triton.jit(do_not_specialize=_PLAIN)
def tile(
    x, x2, p, w, out, gate, gv, s, N, H, W, EDGE, C, EACH,
    PRE: tl.constexpr, POST: tl.constexpr, STRIDE: tl.constexpr,
    G: tl.constexpr, J: tl.constexpr, JO: tl.constexpr, M: tl.constexpr, WAVES: tl.constexpr,
):  # fmt: skip
    """Any stride: M pixels of the result at a time, and a load for each tap."""
    blocks = C // (G * JO)
    block, first, P = tl.program_id(0) % blocks, tl.program_id(0) // blocks, tl.num_programs(0)
    P = P // blocks
    n, k = _find_channels(block, G, J, JO)
    w0, w1 = _load_weight(w, block, C, 0, G, J, JO), _load_weight(w, block, C, 1, G, J, JO)
    w2, w3 = _load_weight(w, block, C, 2, G, J, JO), _load_weight(w, block, C, 3, G, J, JO)
    w4, w5 = _load_weight(w, block, C, 4, G, J, JO), _load_weight(w, block, C, 5, G, J, JO)
    w6, w7 = _load_weight(w, block, C, 6, G, J, JO), _load_weight(w, block, C, 7, G, J, JO)
    w8 = _load_weight(w, block, C, 8, G, J, JO)
    a, b, c = _load_vectors(p, k, C, PRE, G)
    ga, gb, _ = _load_vectors(gv, n, C, POST // 2, G)
    total, square = _new_sums(G, M, JO, POST), _new_sums(G, M, JO, POST)
    ho, wo = H // STRIDE, W // STRIDE
    pixels = N * ho * wo
    for start in range(first * M, pixels, P * M):
        o = start + tl.arange(0, M)
        image, y, column = o // (ho * wo), o // wo % ho * STRIDE, o % wo * STRIDE
        acc = _new_tile(G, M, JO)
        taps = (w0, w1, w2, w3, w4, w5, w6, w7, w8)
        for tap in tl.static_range(9):
            pixel, ok = _find_tap(image, y, column, H, W, tap // 3 - 1, tap % 3 - 1)
            ok = _spread_rows(ok & (o < pixels), G)
            value = _load_operand(x, x2, _spread(pixel * C, k, G), ok, a, b, c, PRE)
            acc = tl.dot(value, taps[tap], acc)
        at, ok = _spread(o * C, n, G), _spread_rows(o < pixels, G)
        total, square = _finish_rows(acc, out, gate, ga, gb, total, square, at, ok, POST, G)
    _store_sums(s, total, square, first, P, n, C, POST, G)


@triton.jit(do_not_specialize=_PLAIN)
def strided_back(
    x, x2, p, w, out, gate, gv, s, N, H, W, EDGE, C, EACH,
    PRE: tl.constexpr, POST: tl.constexpr,
    G: tl.constexpr, J: tl.constexpr, JO: tl.constexpr, M: tl.constexpr, WAVES: tl.constexpr,
):  # fmt: skip
    """The input's gradient at stride 2: from 2 x 2 pixels of [H, W] to 2 x 2 of [2 H, 2 W]."""
    blocks = C // (G * JO)
    block, first, P = tl.program_id(0) % blocks, tl.program_id(0) // blocks, tl.num_programs(0)
    P = P // blocks
    n, k = _find_channels(block, G, J, JO)
    w0, w1 = _load_weight(w, block, C, 0, G, J, JO), _load_weight(w, block, C, 1, G, J, JO)
    w2, w3 = _load_weight(w, block, C, 2, G, J, JO), _load_weight(w, block, C, 3, G, J, JO)
    w4, w5 = _load_weight(w, block, C, 4, G, J, JO), _load_weight(w, block, C, 5, G, J, JO)
    w6, w7 = _load_weight(w, block, C, 6, G, J, JO), _load_weight(w, block, C, 7, G, J, JO)
    w8 = _load_weight(w, block, C, 8, G, J, JO)
    a, b, c = _load_vectors(p, k, C, PRE, G)
    ga, gb, _ = _load_vectors(gv, n, C, POST // 2, G)
    total, square = _new_sums(G, M, JO, POST), _new_sums(G, M, JO, POST)
    pixels = N * H * W
    for start in range(first * M, pixels, P * M):
        o = start + tl.arange(0, M)
        image, y, column = o // (H * W), o // W % H, o % W
        inside, right, below = o < pixels, column + 1 < W, y + 1 < H
        ok = _spread_rows(inside, G)
        d0 = _load_operand(x, x2, _spread(o * C, k, G), ok, a, b, c, PRE)
        ok = _spread_rows(inside & right, G)
        d1 = _load_operand(x, x2, _spread((o + 1) * C, k, G), ok, a, b, c, PRE)
        ok = _spread_rows(inside & below, G)
        d2 = _load_operand(x, x2, _spread((o + W) * C, k, G), ok, a, b, c, PRE)
        ok = _spread_rows(inside & below & right, G)
        d3 = _load_operand(x, x2, _spread((o + W + 1) * C, k, G), ok, a, b, c, PRE)
        ok, corner = _spread_rows(inside, G), ((image * H + y) * 2 * W + column) * 2
        for part in tl.static_range(4):  # w[8 - tap] belongs to a tap of the convolution
            acc = _new_tile(G, M, JO)
            if part == 0:
                acc = tl.dot(d0, w4, acc)
            if part == 1:
                acc = tl.dot(d0, w3, acc)
                acc = tl.dot(d1, w5, acc)
            if part == 2:
                acc = tl.dot(d0, w1, acc)
                acc = tl.dot(d2, w7, acc)
            if part == 3:
                acc = tl.dot(d0, w0, acc)
                acc = tl.dot(d1, w2, acc)
                acc = tl.dot(d2, w6, acc)
                acc = tl.dot(d3, w8, acc)
            at = _spread((corner + part // 2 * 2 * W + part % 2) * C, n, G)
            total, square = _finish_rows(acc, out, gate, ga, gb, total, square, at, ok, POST, G)
    _store_sums(s, total, square, first, P, n, C, POST, G)


@triton.jit(do_not_specialize=_PLAIN)
def weight_walk(
    x, v, dy, b, u, out, N, H, W, EDGE, C, EACH,
    PRE: tl.constexpr,
    G: tl.constexpr, J: tl.constexpr, JO: tl.constexpr, M: tl.constexpr, WAVES: tl.constexpr,
):  # fmt: skip
    """The weight's gradient at stride 1: a row of x, three times, with three rows of dy."""
    blocks = C // (G * JO)
    block, first, P = tl.program_id(0) % blocks, tl.program_id(0) // blocks, tl.num_programs(0)
    P = P // blocks
    n, k = _find_channels(block, G, J, JO)
    va, vb, vc = _load_vectors(v, k, C, PRE, G)
    ua, ub, uc = _load_vectors(u, n, C, 2 * PRE, G)
    width = tl.minimum(EDGE, M)
    images, tiles = M // width, tl.cdiv(W, width)
    share = tl.cdiv(tl.cdiv(N, images) * tiles - first, P)
    m = tl.arange(0, M)
    a0, a1, a2 = _new_tile(G, J, JO), _new_tile(G, J, JO), _new_tile(G, J, JO)
    a3, a4, a5 = _new_tile(G, J, JO), _new_tile(G, J, JO), _new_tile(G, J, JO)
    a6, a7, a8 = _new_tile(G, J, JO), _new_tile(G, J, JO), _new_tile(G, J, JO)
    before = _new_tile(G, M, JO).to(dy.dtype.element_ty)
    here = before
    for t in range(0, share * (H + 1)):
        unit, r = first + t // (H + 1) * P, t % (H + 1)
        image, column = unit // tiles * images + m // width, unit % tiles * width + m % width
        pixel, ok = (image * H + r) * W + column, image < N
        sides = _spread_rows(ok & (r < H) & (column < W), G)
        after = _load_operand(dy, b, _spread(pixel * C, n, G), sides, ua, ub, uc, 2 * PRE)
        pixel, ok = pixel - W, ok & (r > 0)
        sides = _spread_rows(ok & (column > 0) & (column <= W), G)
        value = _load_operand(x, x, _spread((pixel - 1) * C, k, G), sides, va, vb, vc, PRE)
        a0 = _multiply_transposed(value, after, a0, G)
        a3 = _multiply_transposed(value, here, a3, G)
        a6 = _multiply_transposed(value, before, a6, G)
        sides = _spread_rows(ok & (column < W), G)
        value = _load_operand(x, x, _spread(pixel * C, k, G), sides, va, vb, vc, PRE)
        a1 = _multiply_transposed(value, after, a1, G)
        a4 = _multiply_transposed(value, here, a4, G)
        a7 = _multiply_transposed(value, before, a7, G)
        sides = _spread_rows(ok & (column + 1 < W), G)
        value = _load_operand(x, x, _spread((pixel + 1) * C, k, G), sides, va, vb, vc, PRE)
        a2 = _multiply_transposed(value, after, a2, G)
        a5 = _multiply_transposed(value, here, a5, G)
        a8 = _multiply_transposed(value, before, a8, G)
        before, here = here, after
    _store_weight(out, a0, first, n, k, C, EACH, 0, G)
    _store_weight(out, a1, first, n, k, C, EACH, 1, G)
    _store_weight(out, a2, first, n, k, C, EACH, 2, G)
    _store_weight(out, a3, first, n, k, C, EACH, 3, G)
    _store_weight(out, a4, first, n, k, C, EACH, 4, G)
    _store_weight(out, a5, first, n, k, C, EACH, 5, G)
    _store_weight(out, a6, first, n, k, C, EACH, 6, G)
    _store_weight(out, a7, first, n, k, C, EACH, 7, G)
    _store_weight(out, a8, first, n, k, C, EACH, 8, G)


@triton.jit(do_not_specialize=_PLAIN)
def weight_tile(
    x, v, dy, b, u, out, N, H, W, EDGE, C, EACH,
    PRE: tl.constexpr, STRIDE: tl.constexpr,
    G: tl.constexpr, J: tl.constexpr, JO: tl.constexpr, M: tl.constexpr, WAVES: tl.constexpr,
):  # fmt: skip
    """The weight's gradient at any stride: M pixels of dy at a time, and a load of x for a tap.

    A program has the three taps of a row of the kernel.
    """
    blocks = C // (G * JO) * 3
    block, first, P = tl.program_id(0) % blocks, tl.program_id(0) // blocks, tl.num_programs(0)
    P, row = P // blocks, block % 3
    n, k = _find_channels(block // 3, G, J, JO)
    va, vb, vc = _load_vectors(v, k, C, PRE, G)
    ua, ub, uc = _load_vectors(u, n, C, 2 * PRE, G)
    ho, wo = H // STRIDE, W // STRIDE
    pixels = N * ho * wo
    a0, a1, a2 = _new_tile(G, J, JO), _new_tile(G, J, JO), _new_tile(G, J, JO)
    for start in range(first * M, pixels, P * M):
        o = start + tl.arange(0, M)
        image, y, column = o // (ho * wo), o // wo % ho * STRIDE + row - 1, o % wo * STRIDE
        ok = _spread_rows(o < pixels, G)
        d = _load_operand(dy, b, _spread(o * C, n, G), ok, ua, ub, uc, 2 * PRE)
        pixel, ok = _find_tap(image, y, column, H, W, 0, -1)
        ok = _spread_rows(ok & (o < pixels), G)
        value = _load_operand(x, x, _spread(pixel * C, k, G), ok, va, vb, vc, PRE)
        a0 = _multiply_transposed(value, d, a0, G)
        pixel, ok = _find_tap(image, y, column, H, W, 0, 0)
        ok = _spread_rows(ok & (o < pixels), G)
        value = _load_operand(x, x, _spread(pixel * C, k, G), ok, va, vb, vc, PRE)
        a1 = _multiply_transposed(value, d, a1, G)
        pixel, ok = _find_tap(image, y, column, H, W, 0, 1)
        ok = _spread_rows(ok & (o < pixels), G)
        value = _load_operand(x, x, _spread(pixel * C, k, G), ok, va, vb, vc, PRE)
        a2 = _multiply_transposed(value, d, a2, G)
    out += row * 3 * EACH
    _store_weight(out, a0, first, n, k, C, EACH, 0, G)
    _store_weight(out, a1, first, n, k, C, EACH, 1, G)
    _store_weight(out, a2, first, n, k, C, EACH, 2, G)


@triton.jit
def _add_six(d, x, top, middle, bottom, dx, dw, G: tl.constexpr):
    """A row of dy's part in three rows of dx and in three taps of dw; x: the three rows."""
    below, here, above = dx
    first, second, third = dw
    x0, x1, x2 = x
    below, here = tl.dot(d, top, below), tl.dot(d, middle, here)
    above = tl.dot(d, bottom, above)
    first = _multiply_transposed(x0, d, first, G)
    second = _multiply_transposed(x1, d, second, G)
    third = _multiply_transposed(x2, d, third, G)
    return (below, here, above), (first, second, third)


@triton.jit(do_not_specialize=_PLAIN)
def pair(
    x, v, dy, b, u, w, out, dw, gate, s, N, H, W, EDGE, C, EACH,
    PRE: tl.constexpr, POST: tl.constexpr,
    G: tl.constexpr, J: tl.constexpr, M: tl.constexpr, WAVES: tl.constexpr,
):  # fmt: skip
    """Both gradients at stride 1: a row of dy, three times, with three rows of x and of dx."""
    blocks = C // (G * J)
    block, first, P = tl.program_id(0) % blocks, tl.program_id(0) // blocks, tl.num_programs(0)
    P = P // blocks
    n, _ = _find_channels(block, G, J, J)
    w0, w1 = _load_weight(w, block, C, 8, G, J, J), _load_weight(w, block, C, 7, G, J, J)
    w2, w3 = _load_weight(w, block, C, 6, G, J, J), _load_weight(w, block, C, 5, G, J, J)
    w4, w5 = _load_weight(w, block, C, 4, G, J, J), _load_weight(w, block, C, 3, G, J, J)
    w6, w7 = _load_weight(w, block, C, 2, G, J, J), _load_weight(w, block, C, 1, G, J, J)
    w8 = _load_weight(w, block, C, 0, G, J, J)
    va, vb, vc = _load_vectors(v, n, C, PRE, G)
    ua, ub, uc = _load_vectors(u, n, C, 2 * PRE, G)
    ga, gb, _ = _load_vectors(v, n, C, POST // 2, G)
    total, square = _new_sums(G, M, J, POST), _new_sums(G, M, J, POST)
    width = tl.minimum(EDGE, M)
    images, tiles = M // width, tl.cdiv(W, width)
    share = tl.cdiv(tl.cdiv(N, images) * tiles - first, P)
    m = tl.arange(0, M)
    zero = _new_tile(G, J, J)
    left, middle, right = (zero, zero, zero), (zero, zero, zero), (zero, zero, zero)
    d0, d1 = _new_tile(G, M, J), _new_tile(G, M, J)
    x0 = d0.to(x.dtype.element_ty)
    x1 = x0
    for t in range(0, share * (H + 2)):
        unit, r = first + t // (H + 2) * P, t % (H + 2)
        image, column = unit // tiles * images + m // width, unit % tiles * width + m % width
        pixel, ok = (image * H + r) * W + column, (image < N) & (column < W)
        at, sides = _spread(pixel * C, n, G), _spread_rows(ok & (r < H), G)
        x2 = _load_operand(x, x, at, sides, va, vb, vc, PRE)
        pixel, ok = pixel - W, (image < N) & (r > 0) & (r <= H)
        sides = _spread_rows(ok & (column + 1 < W), G)
        d = _load_operand(dy, b, _spread((pixel + 1) * C, n, G), sides, ua, ub, uc, 2 * PRE)
        dx = (d0, d1, _new_tile(G, M, J))
        dx, left = _add_six(d, (x0, x1, x2), w0, w3, w6, dx, left, G)
        sides = _spread_rows(ok & (column < W), G)
        d = _load_operand(dy, b, _spread(pixel * C, n, G), sides, ua, ub, uc, 2 * PRE)
        dx, middle = _add_six(d, (x0, x1, x2), w1, w4, w7, dx, middle, G)
        sides = _spread_rows(ok & (column > 0) & (column <= W), G)
        d = _load_operand(dy, b, _spread((pixel - 1) * C, n, G), sides, ua, ub, uc, 2 * PRE)
        dx, right = _add_six(d, (x0, x1, x2), w2, w5, w8, dx, right, G)
        result, d0, d1 = dx
        ok = _spread_rows((image < N) & (r > 1) & (column < W), G)
        at = _spread((pixel - W) * C, n, G)
        total, square = _finish_rows(
            result, out, gate, ga, gb, total, square, at, ok, POST, G
        )  # fmt: skip
        x0, x1 = x1, x2
    _store_sums(s, total, square, first, P, n, C, POST, G)
    _store_weight(dw, left[0], first, n, n, C, EACH, 0, G)
    _store_weight(dw, middle[0], first, n, n, C, EACH, 1, G)
    _store_weight(dw, right[0], first, n, n, C, EACH, 2, G)
    _store_weight(dw, left[1], first, n, n, C, EACH, 3, G)
    _store_weight(dw, middle[1], first, n, n, C, EACH, 4, G)
    _store_weight(dw, right[1], first, n, n, C, EACH, 5, G)
    _store_weight(dw, left[2], first, n, n, C, EACH, 6, G)
    _store_weight(dw, middle[2], first, n, n, C, EACH, 7, G)
    _store_weight(dw, right[2], first, n, n, C, EACH, 8, G)
