"""Triton kernels for scoring inverted residual blocks: depthwise convolutions, squeeze-and-excite.

Images and offsets are as in `layers_fused`.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0913, PLR0917  (kernels take pointers and sizes one by one)

import triton
import triton.language as tl

from phalanx.inference.layers_fused import SILU, activate


@triton.jit
def _add_tap(acc, value, w, c, okc, C, j, i: tl.constexpr, KS: tl.constexpr):
    """acc + value times the weight at (i, j), if that exists."""
    if (i >= 0) & (i < KS):
        weight = tl.load(w + (i * KS + j) * C + c, mask=okc, other=0.0).to(tl.float32)
        acc += value * weight[None, :]
    return acc


@triton.jit
def _add_column(
    accs, x, w, start, top, left, inside, c, okc, H, W, C, j,
    KS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """accs plus the contribution of column j of all windows to a strip's four output rows."""
    a0, a1, a2, a3 = accs
    seen = inside & (left + j >= 0) & (left + j < W)
    for i in tl.static_range(3 * STRIDE + KS):
        ok = (seen & (top + i >= 0) & (top + i < H))[:, None] & okc[None, :]
        value = tl.load(x + start + (i * W + j) * C, mask=ok, other=0.0).to(tl.float32)
        a0 = _add_tap(a0, value, w, c, okc, C, j, i, KS)
        a1 = _add_tap(a1, value, w, c, okc, C, j, i - STRIDE, KS)
        a2 = _add_tap(a2, value, w, c, okc, C, j, i - 2 * STRIDE, KS)
        a3 = _add_tap(a3, value, w, c, okc, C, j, i - 3 * STRIDE, KS)
    return a0, a1, a2, a3


@triton.jit
def _store_row(acc, shift, out, total, offsets, ok, okc, ACT: tl.constexpr):
    """Store the activation of a row of pixels; returns the total including it."""
    acc = activate(acc + shift, ACT)
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=ok[:, None] & okc[None, :])
    return total + tl.where(ok[:, None], acc, 0.0)


@triton.jit(do_not_specialize=["H", "W", "HO", "WO", "C8", "PARTS"])
def depthwise_strips(
    x, w, bias, out, sums, H, W, HO, WO, C8, PARTS,
    KS: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, ACT: tl.constexpr,
    LOOP: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """A depthwise convolution with bias and activation; w is [KS, KS, C].

    A strip is four pixels of a column, so that pixels which their windows share are loaded once. A
    program takes every PARTS-th block of an image's strips, and writes their sum as a row of sums
    [images, PARTS, C]. LOOP: a loop over a window's columns, not unrolled, which takes half the
    registers.
    """
    C, image, part = C8 * 8, tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    okc, strips = c < C, tl.cdiv(HO, 4) * WO
    shift = tl.load(bias + c, mask=okc, other=0.0)[None, :]
    total = tl.zeros((BM, BC), tl.float32)
    for block in range(part, tl.cdiv(strips, BM), PARTS):
        m = block * BM + tl.arange(0, BM)
        row, column, inside = (m // WO) * 4, m % WO, m < strips
        top, left = row * STRIDE - PAD, column * STRIDE - PAD
        start = ((image * H + top) * W + left)[:, None] * C + c[None, :]
        zero = tl.zeros((BM, BC), tl.float32)
        accs = (zero, zero, zero, zero)
        if LOOP:
            for j in range(KS):
                accs = _add_column(
                    accs, x, w, start, top, left, inside, c, okc, H, W, C, j, KS, STRIDE
                )
        else:
            for j in tl.static_range(KS):
                accs = _add_column(
                    accs, x, w, start, top, left, inside, c, okc, H, W, C, j, KS, STRIDE
                )
        offsets = ((image * HO + row) * WO + column)[:, None] * C + c[None, :]
        for r in tl.static_range(4):
            ok = inside & (row + r < HO)
            total = _store_row(accs[r], shift, out, total, offsets + r * WO * C, ok, okc, ACT)
    tl.store(sums + (image * PARTS + part) * C + c, tl.sum(total, 0), mask=okc)


@triton.jit(do_not_specialize=["PARTS", "C8"])
def add_sums(sums, totals, PARTS, C8, BP: tl.constexpr, BC: tl.constexpr):
    """totals [images, C] of sums [images, PARTS, C], BC channels of an image per program."""
    C, image, p = C8 * 8, tl.program_id(0), tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    okc, total = c < C, tl.zeros((BP, BC), tl.float32)
    for p0 in range(0, PARTS, BP):
        offsets = (image * PARTS + p0 + p)[:, None] * C + c[None, :]
        total += tl.load(sums + offsets, mask=(p0 + p < PARTS)[:, None] & okc[None, :], other=0.0)
    tl.store(totals + image * C + c, tl.sum(total, 0), mask=okc)


@triton.jit(do_not_specialize=["PIXELS", "C8", "S"])
def squeeze(totals, w, bias, squeezed, PIXELS, C8, S, BC: tl.constexpr, BS: tl.constexpr):
    """squeezed [images, S] = silu(w mean + bias), BS values per program; w is [S, C]."""
    C, image = C8 * 8, tl.program_id(0)
    s = tl.program_id(1) * BS + tl.arange(0, BS)
    oks, acc = s < S, tl.zeros((BS, BC), tl.float32)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        okc = c < C
        mean = tl.load(totals + image * C + c, mask=okc, other=0.0) / PIXELS
        ok = oks[:, None] & okc[None, :]
        weight = tl.load(w + s[:, None] * C + c[None, :], mask=ok, other=0.0).to(tl.float32)
        acc += weight * mean[None, :]
    value = activate(tl.sum(acc, 1) + tl.load(bias + s, mask=oks, other=0.0), SILU)
    tl.store(squeezed + image * S + s, value, mask=oks)


@triton.jit(do_not_specialize=["C8", "S"])
def excite(squeezed, w, bias, gate, C8, S, BC: tl.constexpr, BS: tl.constexpr):
    """gate [images, C] = sigmoid(w squeezed + bias), BC channels per program; w is [C, S]."""
    C, image, s = C8 * 8, tl.program_id(0), tl.arange(0, BS)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    okc, oks = c < C, s < S
    value = tl.load(squeezed + image * S + s, mask=oks, other=0.0)
    ok = okc[:, None] & oks[None, :]
    weight = tl.load(w + c[:, None] * S + s[None, :], mask=ok, other=0.0).to(tl.float32)
    z = tl.sum(weight * value[None, :], 1) + tl.load(bias + c, mask=okc, other=0.0)
    factor = 1.0 / (1.0 + tl.exp(-z))
    tl.store(gate + image * C + c, factor.to(gate.dtype.element_ty), mask=okc)
