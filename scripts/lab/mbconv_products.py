"""Triton products of an EfficientNet step: 1x1 convolutions with what stands around them.

    expand:        c = x w^T and the sums of c for its norm
    expand_back:   dc = a ds + b c + const, c computed anew; dx = dc w (+ add), dw = dc^T x
    project:       p = (silu(norm(d)) * gate) w^T and the sums of p for its norm
    project_back:  dt = dp w, its sums by image, dw = dp^T (silu(norm(d)) * gate)

With STEM the rows of x are gathered from the image: the first convolution.

Programs keep weights and partial sums and walk over the rows. Narrow channels are multiples of
eight, handed over by eighths (K8, P8); blocks are powers of two around them.
"""
# ruff: noqa: PLR0913, PLR0917  (kernels take sizes one by one)

import triton
import triton.language as tl
from mbconv_kernels import load_affine, silu_parts
from step_kernels import add_own_rows


@triton.jit
def load_patches(x, m, k, M, H, W):
    """Rows of 3 x 3 x 3 pixels around every second pixel of NHWC images, zero beyond the edges."""
    ho, wo = H // 2, W // 2
    n, h, w = m // (ho * wo), (m // wo) % ho, m % wo
    row, column = (2 * h - 1)[:, None] + (k // 9)[None, :], (2 * w - 1)[:, None]
    column = column + ((k % 9) // 3)[None, :]
    ok = (m < M)[:, None] & (k < 27)[None, :] & (row >= 0) & (column >= 0)
    ok = ok & (row < H) & (column < W)
    o = ((n[:, None] * H + row) * W + column) * 3 + (k % 3)[None, :]
    return tl.load(x + o, mask=ok, other=0.0)


@triton.jit
def load_rows(x, m, k, M, K, H, W, STEM: tl.constexpr):
    """Rows m of x [M, K], or of the patches of an image."""
    if STEM:
        return load_patches(x, m, k, M, H, W)
    else:
        ok = (m < M)[:, None] & (k < K)[None, :]
        return tl.load(x + m[:, None] * K + k[None, :], mask=ok, other=0.0)


@triton.jit(do_not_specialize=["M", "K8", "K", "G", "H", "W"])
def expand(
    x, w, y, s, M, K8, K, E, G, H, W,
    STEM: tl.constexpr, KP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DEPTH: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """y = x w^T with the sums s [2, G, E] of y and y * y."""
    e, g, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1), tl.arange(0, KP)
    width = K
    if not STEM:
        width = K8 * 8
    ok = (e < E)[:, None] & (k < width)[None, :]
    weights = tl.trans(tl.load(w + e[:, None] * width + k[None, :], mask=ok, other=0.0))
    total, square = tl.zeros((WARPS, 8, BN), tl.float32), tl.zeros((WARPS, 8, BN), tl.float32)
    for row in tl.range(g, tl.cdiv(M, BM), G, num_stages=DEPTH):
        m = row * BM + tl.arange(0, BM)
        rows = load_rows(x, m, k, M, width, H, W, STEM)
        result = tl.dot(rows, weights).to(y.dtype.element_ty)
        o = m[:, None] * E + e[None, :]
        tl.store(y + o, result, mask=(m < M)[:, None] & (e < E)[None, :])
        exact = result.to(tl.float32)
        total += add_own_rows(exact, BM, BN, WARPS)
        square += add_own_rows(exact * exact, BM, BN, WARPS)
    tl.store(s + g * E + e, tl.sum(tl.sum(total, 1), 0), mask=e < E)
    tl.store(s + (G + g) * E + e, tl.sum(tl.sum(square, 1), 0), mask=e < E)


@triton.jit
def load_weights(w, first, width, E, k, BN: tl.constexpr):
    """Rows of w [E, width] from `first` on."""
    e = first + tl.arange(0, BN)
    ok = (e < E)[:, None] & (k < width)[None, :]
    return tl.load(w + e[:, None] * width + k[None, :], mask=ok, other=0.0)


@triton.jit
def close_part(ds, rows, weights, u, m, first, M, E, BN: tl.constexpr):
    """dc of the columns from `first` on, rounded."""
    e = first + tl.arange(0, BN)
    oke = e < E
    raw = tl.dot(rows, tl.trans(weights))
    d = tl.load(ds + m[:, None] * E + e[None, :], mask=(m < M)[:, None] & oke[None, :], other=0.0)
    d = d.to(tl.float32) * tl.load(u + e, mask=oke, other=0.0)[None, :]
    d += raw * tl.load(u + E + e, mask=oke, other=0.0)[None, :]
    d += tl.load(u + 2 * E + e, mask=oke, other=0.0)[None, :]
    return tl.where((m < M)[:, None], d, 0.0).to(weights.dtype)


@triton.jit(do_not_specialize=["M", "K8", "K", "G", "H", "W"])
def expand_back(
    ds, x, w, u, add, dx, dw, M, K8, K, E, G, H, W,
    STEM: tl.constexpr, ADD: tl.constexpr, KP: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr,
    BM: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """dx [M, K] and partial weight gradients dw [G, E, K]; E lies in two blocks, N1 and N2."""
    g, k = tl.program_id(0), tl.arange(0, KP)
    width = K
    if not STEM:
        width = K8 * 8
    w1 = load_weights(w, 0, width, E, k, N1)
    dw1 = tl.zeros((N1, KP), tl.float32)
    if N2:
        w2 = load_weights(w, N1, width, E, k, N2)
        dw2 = tl.zeros((N2, KP), tl.float32)
    for row in tl.range(g, tl.cdiv(M, BM), G, num_stages=DEPTH):
        m = row * BM + tl.arange(0, BM)
        rows = load_rows(x, m, k, M, width, H, W, STEM)
        part = close_part(ds, rows, w1, u, m, 0, M, E, N1)
        dw1 = tl.dot(tl.trans(part), rows, dw1)
        if not STEM:
            d = tl.dot(part, w1)
        if N2:
            part2 = close_part(ds, rows, w2, u, m, N1, M, E, N2)
            dw2 = tl.dot(tl.trans(part2), rows, dw2)
            d = tl.dot(part2, w2, d)
        if not STEM:
            o, ok = m[:, None] * width + k[None, :], (m < M)[:, None] & (k < width)[None, :]
            if ADD:
                d += tl.load(add + o, mask=ok, other=0.0).to(tl.float32)
            tl.store(dx + o, d.to(dx.dtype.element_ty), mask=ok)
    e = tl.arange(0, N1)
    ok = (e < E)[:, None] & (k < width)[None, :]
    tl.store(dw + (g * E + e)[:, None] * width + k[None, :], dw1, mask=ok)
    if N2:
        e2 = N1 + tl.arange(0, N2)
        ok = (e2 < E)[:, None] & (k < width)[None, :]
        tl.store(dw + (g * E + e2)[:, None] * width + k[None, :], dw2, mask=ok)


@triton.jit(do_not_specialize=["M", "PIXELS", "P8", "G"])
def project(
    d, v, gate, w, p, s, M, PIXELS, D, P8, G,
    PP: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """p = (silu(norm(d)) * gate) w^T with the sums s [2, G, P] of p and p * p."""
    P, g, j = P8 * 8, tl.program_id(0), tl.arange(0, PP)
    total, square = tl.zeros((WARPS, 8, PP), tl.float32), tl.zeros((WARPS, 8, PP), tl.float32)
    for row in range(g, tl.cdiv(M, BM), G):
        m = row * BM + tl.arange(0, BM)
        n, acc = m // PIXELS, tl.zeros((BM, PP), tl.float32)
        for k0 in range(0, D, BK):
            k = k0 + tl.arange(0, BK)
            okk = k < D
            ok = (m < M)[:, None] & okk[None, :]
            value = tl.load(d + m[:, None] * D + k[None, :], mask=ok, other=0.0).to(tl.float32)
            scale, shift = load_affine(v, k, D, okk)
            act, _ = silu_parts(value, scale, shift)
            act *= tl.load(gate + n[:, None] * D + k[None, :], mask=ok, other=0.0)
            okw = (j < P)[:, None] & okk[None, :]
            weights = tl.load(w + j[:, None] * D + k[None, :], mask=okw, other=0.0)
            act = tl.where(ok, act, 0.0).to(weights.dtype)
            acc = tl.dot(act, tl.trans(weights), acc)
        result = acc.to(p.dtype.element_ty)
        ok = (m < M)[:, None] & (j < P)[None, :]
        tl.store(p + m[:, None] * P + j[None, :], result, mask=ok)
        exact = result.to(tl.float32)
        total += add_own_rows(exact, BM, PP, WARPS)
        square += add_own_rows(exact * exact, BM, PP, WARPS)
    tl.store(s + g * P + j, tl.sum(tl.sum(total, 1), 0), mask=j < P)
    tl.store(s + (G + g) * P + j, tl.sum(tl.sum(square, 1), 0), mask=j < P)


@triton.jit(do_not_specialize=["N", "PIXELS", "P8", "G", "SPLIT"])
def project_back(
    dp, d, v, gate, w, dt, t, dw, N, PIXELS, D, P8, G, SPLIT,
    PP: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dt = dp w with its tables t [3, SPLIT, N, D], and partial weight gradients dw [G, P, D]."""
    P, g, j = P8 * 8, tl.program_id(1), tl.arange(0, PP)
    c, rows, plane = tl.program_id(0) * BC + tl.arange(0, BC), PIXELS // SPLIT, SPLIT * N * D
    okc = c < D
    okw = (j < P)[:, None] & okc[None, :]
    weights = tl.load(w + j[:, None] * D + c[None, :], mask=okw, other=0.0)
    dweights = tl.zeros((PP, BC), tl.float32)
    scale, shift = load_affine(v, c, D, okc)
    for unit in range(g, N * SPLIT, G):
        n, last = unit // SPLIT, (unit + 1) * rows
        own = tl.load(gate + n * D + c, mask=okc, other=0.0)[None, :]
        s0, s1 = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
        s2 = tl.zeros((BM, BC), tl.float32)
        for r in range(unit * rows, last, BM):
            m = r + tl.arange(0, BM)
            okm = (m < last)[:, None]
            grad = tl.load(dp + m[:, None] * P + j[None, :], mask=okm & (j < P)[None, :], other=0.0)
            o, ok = m[:, None] * D + c[None, :], okm & okc[None, :]
            value = tl.load(d + o, mask=ok, other=0.0).to(tl.float32)
            back = tl.dot(grad, weights).to(dt.dtype.element_ty)
            tl.store(dt + o, back, mask=ok)
            exact = back.to(tl.float32)
            act, slope = silu_parts(value, scale, shift)
            dweights = tl.dot(tl.trans(grad), (act * own).to(weights.dtype), dweights)
            s0 += exact * act
            slope *= exact
            s1 += slope
            s2 += slope * value
        place = ((unit % SPLIT) * N + n) * D + c
        tl.store(t + place, tl.sum(s0, 0), mask=okc)
        tl.store(t + plane + place, tl.sum(s1, 0), mask=okc)
        tl.store(t + 2 * plane + place, tl.sum(s2, 0), mask=okc)
    tl.store(dw + (g * P + j)[:, None] * D + c[None, :], dweights, mask=okw)
