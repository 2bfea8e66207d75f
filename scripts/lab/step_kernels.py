"""Triton kernels of a ResNet-50 step whose 1x1 convolutions know their BatchNorm beforehand.

A convolution c = x W^T of 1x1 followed by BatchNorm needs no pass over c: with the Gram matrix
G = x^T x and the sums s of x's columns,

    mean(c) = W s / M        var(c) = diag(W Cov W^T),  Cov = G / M - s s^T / M^2

so that normalise, residual and ReLU fit into the product's epilogue and c is never stored. With g
the gradient behind the norm and r = g^T x (the weight gradient's own product), backward neither
reads c nor writes its gradient:

    sum(g c) = rowsum(r * W)
    dW       = scale * (r - sum(g) s^T / M - rstd * dgamma * T),  T = W Cov
    dx       = g (scale W) + x Q + const,  Q = W^T diag(b) W,  b = -scale * rstd * dgamma / M

Activations are [M, C] with C contiguous (channels_last), offsets are 32 bits wide: M * C < 2**31.
Per-channel vectors lie in rows of one buffer. forward: mean, rstd, scale, shift; backward: dgamma,
dbeta, a, b, c, where the gradient of a norm's input is a * gradient + b * input + c.
"""
# ruff: noqa: PLR0913, PLR0917, PLR0915, PLR0912, C901  (kernels take pointers and sizes one by one)

import os
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EPS, MOMENTUM = 1e-5, 0.1
MOST_ROWS = 1056  # of partial sums that one program adds up
RATE = 0.01  # low enough for any variant to learn one batch by heart without a schedule
Tile = dict[str, int]


def make_tiles(names: str, *rows: tuple[int, ...]) -> list[Tile]:
    """Launch parameters by name, one dict a row; the last two columns are warps and stages."""
    keys = [*names.split(), "num_warps", "num_stages"]
    return [dict(zip(keys, row, strict=True)) for row in rows]


# The first row is what checks and the interpreter use: it fits every layer.
NORM_TILES = make_tiles(
    "BM BC",
    *((32, 64, 4, 3), (64, 64, 4, 3), (16, 64, 4, 3), (128, 64, 8, 3), (64, 32, 4, 3)),
    *((128, 32, 4, 3), (16, 128, 4, 3), (32, 128, 8, 3), (8, 256, 4, 3)),
)
GEMM_TILES = make_tiles(
    "BM BN BK EARLY",
    *((128, 64, 64, 1, 4, 3), (64, 64, 64, 1, 4, 3), (128, 64, 64, 0, 4, 3)),
    *((64, 128, 64, 1, 4, 2), (64, 128, 64, 0, 4, 3), (128, 128, 64, 1, 8, 3)),
    *((128, 128, 64, 0, 8, 3), (128, 128, 64, 0, 8, 4), (128, 256, 64, 0, 8, 3)),
    *((64, 128, 64, 1, 4, 3), (64, 64, 64, 0, 4, 4)),
)
# OCCUPANCY: programs a multiprocessor. The last column is how many blocks of rows are under way.
ROWS_TILES = make_tiles(
    "BM BN OCCUPANCY",
    *((64, 64, 4, 4, 3), (64, 128, 2, 8, 3), (128, 64, 3, 4, 2), (64, 64, 4, 4, 2)),
    *((64, 64, 3, 4, 4), (64, 128, 2, 4, 3), (128, 64, 2, 4, 3), (128, 64, 2, 8, 3)),
    *((128, 128, 1, 8, 3), (128, 128, 1, 16, 3), (64, 256, 1, 8, 3)),
)
# OCCUPANCY 0: a program for every tile. The last column is how many blocks of K are under way.
AHEAD_TILES = make_tiles(
    "BM BN BK EARLY OCCUPANCY",
    *((128, 64, 64, 1, 0, 4, 3), (128, 64, 64, 1, 2, 4, 4), (128, 128, 64, 1, 0, 8, 3)),
    *((128, 128, 64, 1, 1, 8, 4), (128, 128, 64, 0, 1, 8, 4), (128, 256, 64, 0, 0, 8, 3)),
    *((128, 256, 64, 0, 1, 8, 3), (128, 64, 64, 0, 0, 4, 3)),
)
REGISTERS = 65536  # of a multiprocessor
WIDEST_AHEAD = 28  # pixels; wider layers have few channels, and gemm_rows is near the floor
SHARED_MEMORY = 227 * 1024  # bytes for one program of an H100 or H200
FINISH_TILES = make_tiles("BG BC", (64, 16, 4, 3), (256, 16, 8, 3), (128, 8, 4, 3), (512, 8, 8, 3))
SUM_TILES = make_tiles("BR BC", (32, 64, 4, 3), (128, 32, 8, 3), (256, 16, 8, 3), (64, 64, 8, 3))
COVARIANCE_TILES = make_tiles("BN BK", (32, 64, 4, 3), (32, 32, 4, 3), (16, 64, 4, 3))
VECTOR_TILES = make_tiles("BN BK", (16, 64, 4, 3), (4, 64, 4, 3), (8, 64, 4, 3), (16, 64, 8, 3))
GRADIENT_TILES = [{"BG": 32, **t} for t in VECTOR_TILES] + [{"BG": 128, **t} for t in VECTOR_TILES]
INPUT_TILES = make_tiles("BN BK", (128, 32, 4, 3), (64, 32, 4, 3), (64, 64, 4, 3), (128, 64, 8, 3))
FINISHED_TILES = make_tiles(
    "BM BC BG",
    *((32, 64, 64, 4, 3), (64, 64, 64, 4, 3), (16, 64, 64, 4, 3), (128, 64, 64, 8, 3)),
    *((16, 128, 32, 4, 3), (32, 128, 32, 8, 3)),
)
HALF_INPUT_TILES = make_tiles("BN BK", (128, 32, 4, 3), (256, 32, 4, 2), (128, 64, 4, 3))
OUTER_TILES = make_tiles(
    "BM BX BY",
    *((64, 64, 64, 4, 3), (128, 64, 64, 4, 3), (64, 128, 64, 4, 3), (64, 128, 128, 8, 3)),
    *((128, 128, 128, 8, 2), (64, 256, 64, 8, 3)),
)


# --- norms, ReLU, pool, update: an earlier prototype's kernels ---


@triton.jit
def norm_statistics(x, s, M, C, G, BM: tl.constexpr, BC: tl.constexpr):
    """Partial sums of x and x * x, one row for each of G programs."""
    c, g = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1)
    total, square = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    for r in range(g * BM, M, G * BM):
        m = r + tl.arange(0, BM)
        v = tl.load(x + m[:, None] * C + c[None, :], mask=(m < M)[:, None], other=0.0)
        v = v.to(tl.float32)
        total += v
        square += v * v
    tl.store(s + g * C + c, tl.sum(total, 0))
    tl.store(s + (G + g) * C + c, tl.sum(square, 0))


@triton.jit
def add_partials(s, c, C, G, BG: tl.constexpr, BC: tl.constexpr):
    """The two sums of one norm from their partial rows."""
    first, second = tl.zeros((BG, BC), tl.float32), tl.zeros((BG, BC), tl.float32)
    for g0 in range(0, G, BG):
        g = g0 + tl.arange(0, BG)
        ok, place = (g < G)[:, None], g[:, None] * C + c[None, :]
        first += tl.load(s + place, mask=ok, other=0.0)
        second += tl.load(s + G * C + place, mask=ok, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def store_forward(v, running, weight, bias, c, mean, var, M, C, eps, momentum):
    """The forward vectors and the running statistics from a mean and a variance."""
    rstd = 1 / tl.sqrt(var + eps)
    scale = tl.load(weight + c) * rstd
    tl.store(v + c, mean)
    tl.store(v + C + c, rstd)
    tl.store(v + 2 * C + c, scale)
    tl.store(v + 3 * C + c, tl.load(bias + c) - mean * scale)
    old, old_var = tl.load(running + c), tl.load(running + C + c)
    tl.store(running + c, old + momentum * (mean - old))
    tl.store(running + C + c, old_var + momentum * (var * (M / (M - 1)) - old_var))


@triton.jit
def finish_statistics(
    s, weight, bias, running, v, M, C, G, eps, momentum, BG: tl.constexpr, BC: tl.constexpr
):
    """Forward vectors from partial sums."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    total, square = add_partials(s, c, C, G, BG, BC)
    mean = total / M
    var = tl.maximum(square / M - mean * mean, 0.0)
    store_forward(v, running, weight, bias, c, mean, var, M, C, eps, momentum)


@triton.jit
def norm_apply(x, res, y, v, M, C, KIND: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """KIND 0: normalise + ReLU. 1: with a residual. 2: normalise only."""
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    o, ok = m[:, None] * C + c[None, :], (m < M)[:, None]
    value = tl.load(x + o, mask=ok, other=0.0).to(tl.float32)
    value = value * tl.load(v + 2 * C + c)[None, :] + tl.load(v + 3 * C + c)[None, :]
    if KIND == 1:
        value += tl.load(res + o, mask=ok, other=0.0).to(tl.float32)
    if KIND != 2:
        value = tl.maximum(value, 0.0)
    tl.store(y + o, value.to(y.dtype.element_ty), mask=ok)


@triton.jit
def norm_reduce(
    dy, dz, x, y, out, v, s, M, C, G, KIND: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr
):
    """Partial sums of the masked gradient and of gradient * x.

    KIND 0: the ReLU mask comes from x. 1: a residual block, the gradient is dy + dz, the mask comes
    from y, and the masked gradient is written. 2: no ReLU.
    """
    c, g = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1)
    scale, shift = tl.load(v + 2 * C + c)[None, :], tl.load(v + 3 * C + c)[None, :]
    total, product = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    for r in range(g * BM, M, G * BM):
        m = r + tl.arange(0, BM)
        o, ok = m[:, None] * C + c[None, :], (m < M)[:, None]
        d = tl.load(dy + o, mask=ok, other=0.0).to(tl.float32)
        value = tl.load(x + o, mask=ok, other=0.0).to(tl.float32)
        if KIND == 1:
            d += tl.load(dz + o, mask=ok, other=0.0).to(tl.float32)
            d = tl.where(tl.load(y + o, mask=ok, other=0.0) > 0, d, 0.0)
            tl.store(out + o, d.to(out.dtype.element_ty), mask=ok)
        if KIND == 0:
            d = tl.where(value * scale + shift > 0, d, 0.0)
        total += d
        product += d * value
    tl.store(s + g * C + c, tl.sum(total, 0))
    tl.store(s + (G + g) * C + c, tl.sum(product, 0))


@triton.jit
def finish_reduce(s, v, u, M, C, G, BG: tl.constexpr, BC: tl.constexpr):
    """Backward vectors from partial sums."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    dbeta, product = add_partials(s, c, C, G, BG, BC)
    store_backward(u, v, c, dbeta, product, M, C)


@triton.jit
def store_backward(u, v, c, dbeta, product, M, C):
    """The backward vectors from the sums of the gradient and of gradient * x."""
    mean, rstd, scale = tl.load(v + c), tl.load(v + C + c), tl.load(v + 2 * C + c)
    dgamma = (product - mean * dbeta) * rstd
    t = scale * rstd * dgamma / M
    tl.store(u + c, dgamma)
    tl.store(u + C + c, dbeta)
    tl.store(u + 2 * C + c, scale)
    tl.store(u + 3 * C + c, -t)
    tl.store(u + 4 * C + c, t * mean - scale * dbeta / M)


@triton.jit
def norm_apply_back(dy, x, dx, v, u, M, C, KIND: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """The gradient of a norm's input. KIND 0 masks dy by the ReLU; others find it masked."""
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    o, ok = m[:, None] * C + c[None, :], (m < M)[:, None]
    d = tl.load(dy + o, mask=ok, other=0.0).to(tl.float32)
    value = tl.load(x + o, mask=ok, other=0.0).to(tl.float32)
    if KIND == 0:
        normal = value * tl.load(v + 2 * C + c)[None, :] + tl.load(v + 3 * C + c)[None, :]
        d = tl.where(normal > 0, d, 0.0)
    d = d * tl.load(u + 2 * C + c)[None, :] + value * tl.load(u + 3 * C + c)[None, :]
    d += tl.load(u + 4 * C + c)[None, :]
    tl.store(dx + o, d.to(dx.dtype.element_ty), mask=ok)


@triton.jit
def pool_forward(
    x, y, at, won, v, M, C, H, W, HO, WO, WON: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr
):
    """Normalise + ReLU + 3x3 max-pool of stride 2; `at` keeps which of the nine won.

    WON keeps the winner's x as well: the norm's backward sums need no other.
    """
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    n, h, w = m // (HO * WO), (m // WO) % HO, m % WO
    scale, shift = tl.load(v + 2 * C + c)[None, :], tl.load(v + 3 * C + c)[None, :]
    best, place = tl.full((BM, BC), -1.0, tl.float32), tl.zeros((BM, BC), tl.int32)
    winner = tl.zeros((BM, BC), tl.float32)
    for i in tl.static_range(3):
        for j in tl.static_range(3):
            row, column = 2 * h - 1 + i, 2 * w - 1 + j
            ok = (m < M) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
            o = ((n * H + row) * W + column)[:, None] * C + c[None, :]
            raw = tl.load(x + o, mask=ok[:, None], other=0.0).to(tl.float32)
            value = tl.where(ok[:, None], tl.maximum(raw * scale + shift, 0.0), -1.0)
            place = tl.where(value > best, i * 3 + j, place)
            if WON:
                winner = tl.where(value > best, raw, winner)
            best = tl.maximum(best, value)
    o = m[:, None] * C + c[None, :]
    tl.store(y + o, best.to(y.dtype.element_ty), mask=(m < M)[:, None])
    tl.store(at + o, place.to(tl.uint8), mask=(m < M)[:, None])
    if WON:
        tl.store(won + o, winner.to(won.dtype.element_ty), mask=(m < M)[:, None])


@triton.jit
def pool_gradient(dp, at, m, M, c, C, H, W, HO, WO, BM: tl.constexpr, BC: tl.constexpr):
    """What reaches the input pixels m through the pool: from one, two or four windows."""
    n, h, w = m // (H * W), (m // W) % H, m % W
    d = tl.zeros((BM, BC), tl.float32)
    for i in tl.static_range(2):
        for j in tl.static_range(2):
            row, column = (h + i) // 2, (w + j) // 2
            ok = (m < M) & (row < HO) & (column < WO)
            if i == 1:
                ok = ok & (h % 2 == 1)
            if j == 1:
                ok = ok & (w % 2 == 1)
            o = ((n * HO + row) * WO + column)[:, None] * C + c[None, :]
            own = (h - 2 * row + 1) * 3 + w - 2 * column + 1
            hit = tl.load(at + o, mask=ok[:, None], other=255).to(tl.int32) == own[:, None]
            d += tl.where(hit, tl.load(dp + o, mask=ok[:, None], other=0.0).to(tl.float32), 0.0)
    return d


@triton.jit
def pool_reduce(dp, at, x, v, s, M, C, G, H, W, HO, WO, BM: tl.constexpr, BC: tl.constexpr):
    """norm_reduce behind the pool."""
    c, g = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1)
    scale, shift = tl.load(v + 2 * C + c)[None, :], tl.load(v + 3 * C + c)[None, :]
    total, product = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    for r in range(g * BM, M, G * BM):
        m = r + tl.arange(0, BM)
        value = tl.load(x + m[:, None] * C + c[None, :], mask=(m < M)[:, None], other=0.0)
        value = value.to(tl.float32)
        d = pool_gradient(dp, at, m, M, c, C, H, W, HO, WO, BM, BC)
        d = tl.where(value * scale + shift > 0, d, 0.0)
        total += d
        product += d * value
    tl.store(s + g * C + c, tl.sum(total, 0))
    tl.store(s + (G + g) * C + c, tl.sum(product, 0))


@triton.jit
def pool_apply_back(dp, at, x, dx, v, u, M, C, H, W, HO, WO, BM: tl.constexpr, BC: tl.constexpr):
    """norm_apply_back behind the pool."""
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    o, ok = m[:, None] * C + c[None, :], (m < M)[:, None]
    value = tl.load(x + o, mask=ok, other=0.0).to(tl.float32)
    d = pool_gradient(dp, at, m, M, c, C, H, W, HO, WO, BM, BC)
    normal = value * tl.load(v + 2 * C + c)[None, :] + tl.load(v + 3 * C + c)[None, :]
    d = tl.where(normal > 0, d, 0.0) * tl.load(u + 2 * C + c)[None, :]
    d += value * tl.load(u + 3 * C + c)[None, :] + tl.load(u + 4 * C + c)[None, :]
    tl.store(dx + o, d.to(dx.dtype.element_ty), mask=ok)


@triton.jit
def pool_apply_quads(dp, at, x, dx, v, u, M, C, HO, WO, BM: tl.constexpr, BC: tl.constexpr):
    """pool_apply_back of 2 HO x 2 WO pixels by quads: four windows reach the four pixels."""
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    h, w = (m // WO) % HO, m % WO
    right, down = (m < M) & (w + 1 < WO), (m < M) & (h + 1 < HO)
    o = m[:, None] * C + c[None, :]
    ok, ok01, ok10, ok11 = (m < M)[:, None], right[:, None], down[:, None], (right & down)[:, None]
    d00 = tl.load(dp + o, mask=ok, other=0.0).to(tl.float32)
    d01 = tl.load(dp + o + C, mask=ok01, other=0.0).to(tl.float32)
    d10 = tl.load(dp + o + WO * C, mask=ok10, other=0.0).to(tl.float32)
    d11 = tl.load(dp + o + (WO + 1) * C, mask=ok11, other=0.0).to(tl.float32)
    a00 = tl.load(at + o, mask=ok, other=255)
    a01 = tl.load(at + o + C, mask=ok01, other=255)
    a10 = tl.load(at + o + WO * C, mask=ok10, other=255)
    a11 = tl.load(at + o + (WO + 1) * C, mask=ok11, other=255)
    scale, shift = tl.load(v + 2 * C + c)[None, :], tl.load(v + 3 * C + c)[None, :]
    by, slope = tl.load(u + 2 * C + c)[None, :], tl.load(u + 3 * C + c)[None, :]
    const = tl.load(u + 4 * C + c)[None, :]
    for p in tl.static_range(2):
        for q in tl.static_range(2):
            pixel = (2 * (m // WO) + p) * (2 * WO) + 2 * w + q
            place = pixel[:, None] * C + c[None, :]
            value = tl.load(x + place, mask=ok, other=0.0).to(tl.float32)
            d = tl.where(a00 == (p + 1) * 3 + q + 1, d00, 0.0)
            if q == 1:
                d += tl.where(a01 == (p + 1) * 3, d01, 0.0)
            if p == 1:
                d += tl.where(a10 == q + 1, d10, 0.0)
            if p + q == 2:
                d += tl.where(a11 == 0, d11, 0.0)
            d = tl.where(value * scale + shift > 0, d, 0.0) * by + value * slope + const
            tl.store(dx + place, d.to(dx.dtype.element_ty), mask=ok)


@triton.jit
def norm_keep(
    x, kept, v, s, M, C, G, H, W,
    NORM: tl.constexpr, STRIDE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """kept = x normalised with ReLU (NORM), or its even pixels (STRIDE 2), and partial sums."""
    c, g = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1)
    if NORM:
        scale, shift = tl.load(v + 2 * C + c)[None, :], tl.load(v + 3 * C + c)[None, :]
    total = tl.zeros((BM, BC), tl.float32)
    for r in range(g * BM, M, G * BM):
        m = r + tl.arange(0, BM)
        ok, source = (m < M)[:, None], m
        if STRIDE == 2:
            ho, wo = (H + 1) // 2, (W + 1) // 2
            source = ((m // (ho * wo)) * H + 2 * ((m // wo) % ho)) * W + 2 * (m % wo)
        value = tl.load(x + source[:, None] * C + c[None, :], mask=ok, other=0.0)
        if NORM:
            value = tl.maximum(value.to(tl.float32) * scale + shift, 0.0)
            value = tl.where(ok, value, 0.0).to(x.dtype.element_ty)
        tl.store(kept + m[:, None] * C + c[None, :], value, mask=ok)
        total += value.to(tl.float32)
    tl.store(s + g * C + c, tl.sum(total, 0))


@triton.jit
def head_gradient(d, y, out, s, M, C, PIXELS, BM: tl.constexpr, BC: tl.constexpr):
    """The mean's gradient d [images, C] spread over the pixels with y > 0, and partial sums."""
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    o, ok = m[:, None] * C + c[None, :], (m < M)[:, None]
    value = tl.load(d + (m // PIXELS)[:, None] * C + c[None, :], mask=ok, other=0.0)
    value = value.to(tl.float32) / PIXELS
    value = tl.where(tl.load(y + o, mask=ok, other=0.0) > 0, value, 0.0)
    tl.store(out + o, value.to(out.dtype.element_ty), mask=ok)
    tl.store(s + tl.program_id(0) * C + c, tl.sum(value, 0))


@triton.jit
def update(p, m, g, q, n, lr, momentum, unscale, B: tl.constexpr):
    """Momentum step of flat float32 weights p; q is their 16-bit copy."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    ok = i < n
    velocity = tl.load(m + i, mask=ok) * momentum + tl.load(g + i, mask=ok) * unscale
    weight = tl.load(p + i, mask=ok) - lr * velocity
    tl.store(m + i, velocity, mask=ok)
    tl.store(p + i, weight, mask=ok)
    tl.store(q + i, weight.to(q.dtype.element_ty), mask=ok)


# --- 1x1 convolutions with their norms inside ---

NONE, RELU, KEEP_POSITIVE, KEEP_BITS, KEEP_NORMAL = 0, 1, 2, 3, 4  # ACT
PLAIN, EVEN_PIXELS = 1, 2  # ADD
SHIFT, SCALE_SHIFT = 1, 2  # AFFINE
TOTAL, WITH_GATE, WITH_SQUARE = 1, 2, 3  # SUMS


def name_gemm(info: Any) -> str:
    """Tells the product's uses apart in a profile."""
    flags = {key: info.constants.get(key) for key in ("PRE", "AFFINE", "ADD", "ACT", "SUMS")}
    return "gemm_" + "_".join(f"{key.lower()}{int(value or 0)}" for key, value in flags.items())


def name_rows(info: Any) -> str:
    """As name_gemm."""
    return name_gemm(info).replace("gemm_", "rows_")


def name_ahead(info: Any) -> str:
    """As name_gemm."""
    return name_gemm(info).replace("gemm_", "ahead_")


def name_outer(info: Any) -> str:
    """Tells Gram matrices and weight gradients apart in a profile."""
    return "outer_gram" if info.constants.get("GRAM") else "outer_weight_gradient"


@triton.jit
def load_added(add, m, n, M, N, H, W, ADD: tl.constexpr):
    """What is added to the pixels m: their own values, or for even ones a smaller image's."""
    if ADD == 1:
        return tl.load(add + m[:, None] * N + n[None, :], mask=(m < M)[:, None], other=0.0)
    image, h, w = m // (H * W), (m // W) % H, m % W
    even = (m < M) & (h % 2 == 0) & (w % 2 == 0)
    source = (image * ((H + 1) // 2) + h // 2) * ((W + 1) // 2) + w // 2
    return tl.load(add + source[:, None] * N + n[None, :], mask=even[:, None], other=0.0)


@triton.jit
def pack_bits(kept, BM: tl.constexpr, BN: tl.constexpr):
    """Bit i of byte j is column 8 i + j of 64: a thread of a product holds all eight of them."""
    kept = tl.reshape(kept.to(tl.int32), (BM, BN // 64, 8, 8))
    kept = tl.sum(kept << tl.arange(0, 8)[None, None, :, None], 2)
    return tl.reshape(kept, (BM, BN // 8)).to(tl.uint8)


@triton.jit
def unpack_bits(packed, BM: tl.constexpr, BN: tl.constexpr):
    """What pack_bits packed, as 0 and 1."""
    packed = tl.reshape(packed.to(tl.int32), (BM, BN // 64, 1, 8))
    return tl.reshape((packed >> tl.arange(0, 8)[None, None, :, None]) & 1, (BM, BN))


@triton.jit
def pack_words(kept, BM: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr):
    """pack_bits as one 64-bit word of 64 columns.

    ROWS: first over the eight bits of a byte, which a thread of a product holds; else first over
    the eight bytes, for a thread that holds eight columns in a row, as one that loads does.
    """
    kept = tl.reshape(kept.to(tl.int64), (BM, BN // 64, 8, 8))
    places = tl.arange(0, 8)[:, None] + 8 * tl.arange(0, 8)[None, :]
    kept = kept << places[None, None, :, :]
    return tl.sum(tl.sum(kept, 2), 2) if ROWS else tl.sum(tl.sum(kept, 3), 2)


@triton.jit
def unpack_words(words, BM: tl.constexpr, BN: tl.constexpr):
    """What pack_words packed, as 0 and 1."""
    places = tl.arange(0, 8)[:, None] + 8 * tl.arange(0, 8)[None, :]
    kept = (words[:, :, None, None] >> places[None, None, :, :]) & 1
    return tl.reshape(kept.to(tl.int32), (BM, BN))


@triton.jit(repr=name_gemm, do_not_specialize=["H", "W"])
def gemm(
    a, b, a2, b2, beta, out, v, add, gate, gv, bits, s, M, N, K, K2, H, W,
    TRANS: tl.constexpr, PRE: tl.constexpr, AFFINE: tl.constexpr, ADD: tl.constexpr,
    ACT: tl.constexpr, BITS: tl.constexpr, SUMS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [M, N] = epilogue(a [M, K] @ b [K, N]), where TRANS b is [N, K].

    In this order: PRE adds beta * (a2 @ b2) first; AFFINE 1 adds v's row 0, 2 applies scale and
    shift of the forward vectors v; ADD 1 adds a tensor, 2 adds one of a quarter of the pixels to
    the even ones; ACT 1 is ReLU (BITS keeps where it let through), 2 keeps where gate > 0, 3 where
    bits say so, 4 where the norm gv of gate is positive; SUMS writes a row of partial sums of
    the result, 2 also of result * gate, 3 also of its squares.
    """
    blocks = tl.cdiv(N, BN)
    row, column = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    m, n = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
    ok, o = (m < M)[:, None], m[:, None] * N + n[None, :]

    byte = m[:, None] * (N // 8) + (column * (BN // 8) + tl.arange(0, BN // 8))[None, :]

    # Asked for before the products, so that they hide the latency; or after, for want of registers.
    if EARLY:
        if ADD > 0:
            added = load_added(add, m, n, M, N, H, W, ADD)
        if (ACT == 2) | (ACT == 4):
            gates = tl.load(gate + o, mask=ok, other=0.0)
        if ACT == 3:
            packed = tl.load(bits + byte, mask=ok, other=0)

    acc = tl.zeros((BM, BN), tl.float32)
    if PRE:
        for k0 in range(0, K2, BK):
            k = k0 + tl.arange(0, BK)
            left = tl.load(a2 + m[:, None] * K2 + k[None, :], mask=ok, other=0.0)
            acc = tl.dot(left, tl.load(b2 + k[:, None] * N + n[None, :]), acc)
        acc = acc * tl.load(beta)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        left = tl.load(a + m[:, None] * K + k[None, :], mask=ok, other=0.0)
        if TRANS:
            right = tl.trans(tl.load(b + n[:, None] * K + k[None, :]))
        else:
            right = tl.load(b + k[:, None] * N + n[None, :])
        acc = tl.dot(left, right, acc)

    if not EARLY:
        if ADD > 0:
            added = load_added(add, m, n, M, N, H, W, ADD)
        if (ACT == 2) | (ACT == 4):
            gates = tl.load(gate + o, mask=ok, other=0.0)
        if ACT == 3:
            packed = tl.load(bits + byte, mask=ok, other=0)
    if AFFINE == 1:
        acc += tl.load(v + n)[None, :]
    if AFFINE == 2:
        acc = acc * tl.load(v + 2 * N + n)[None, :] + tl.load(v + 3 * N + n)[None, :]
    if ADD > 0:
        acc += added.to(tl.float32)
    if ACT == 1:
        acc = tl.maximum(acc, 0.0)
    if ACT == 2:
        acc = tl.where(gates > 0, acc, 0.0)
    if ACT == 3:
        acc = tl.where(unpack_bits(packed, BM, BN) > 0, acc, 0.0)
    if ACT == 4:
        normal = gates.to(tl.float32) * tl.load(gv + 2 * N + n)[None, :]
        acc = tl.where(normal + tl.load(gv + 3 * N + n)[None, :] > 0, acc, 0.0)
    result = acc.to(out.dtype.element_ty)
    tl.store(out + o, result, mask=ok)
    if BITS:
        tl.store(bits + byte, pack_bits(result > 0, BM, BN), mask=ok)
    if SUMS > 0:
        acc = tl.where(ok, acc, 0.0)
        tl.store(s + row * N + n, tl.sum(acc, 0))
        second = s + tl.cdiv(M, BM) * N + row * N + n
        if SUMS == 2:
            tl.store(second, tl.sum(acc * gates.to(tl.float32), 0))
        if SUMS == 3:
            tl.store(second, tl.sum(acc * acc, 0))


@triton.jit
def add_own_rows(acc, BM: tl.constexpr, BN: tl.constexpr, WARPS: tl.constexpr):
    """acc [BM, BN] summed over the rows that one thread holds: [WARPS, 8, BN]."""
    parts = tl.reshape(acc, (BM // (16 * WARPS), WARPS, 2, 8, BN))
    return tl.sum(tl.sum(parts, 2), 0)


@triton.jit(repr=name_rows, do_not_specialize=["H", "W"])
def gemm_rows(
    a, b, a2, b2, beta, out, v, add, gate, gv, bits, s, M, N, P, H, W,
    TRANS: tl.constexpr, PRE: tl.constexpr, AFFINE: tl.constexpr, ADD: tl.constexpr,
    ACT: tl.constexpr, BITS: tl.constexpr, SUMS: tl.constexpr, K: tl.constexpr, K2: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, DEPTH: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """`gemm` by programs that keep their columns of b and walk over every P-th block of rows.

    All loads of a block of rows are asked for DEPTH - 1 blocks ahead. K and K2 are powers of two.
    The partial sums have P rows.
    """
    blocks = tl.cdiv(N, BN)
    column, first = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    n, k = column * BN + tl.arange(0, BN), tl.arange(0, K)
    places = column * (BN // 8) + tl.arange(0, BN // 8)
    if TRANS:
        right = tl.trans(tl.load(b + n[:, None] * K + k[None, :]))
    else:
        right = tl.load(b + k[:, None] * N + n[None, :])
    if PRE:
        k2 = tl.arange(0, K2)
        right2, factor = tl.load(b2 + k2[:, None] * N + n[None, :]), tl.load(beta)
    if AFFINE == 1:
        shift = tl.load(v + n)[None, :]
    if AFFINE == 2:
        scale, shift = tl.load(v + 2 * N + n)[None, :], tl.load(v + 3 * N + n)[None, :]
    if ACT == 4:
        gate_scale, gate_shift = tl.load(gv + 2 * N + n)[None, :], tl.load(gv + 3 * N + n)[None, :]
    total, second = tl.zeros((WARPS, 8, BN), tl.float32), tl.zeros((WARPS, 8, BN), tl.float32)
    for row in tl.range(first, tl.cdiv(M, BM), P, num_stages=DEPTH):
        m = row * BM + tl.arange(0, BM)
        ok, o = (m < M)[:, None], m[:, None] * N + n[None, :]
        byte = m[:, None] * (N // 8) + places[None, :]
        if ADD > 0:
            added = load_added(add, m, n, M, N, H, W, ADD)
        if (ACT == 2) | (ACT == 4):
            gates = tl.load(gate + o, mask=ok, other=0.0)
        if ACT == 3:
            packed = tl.load(bits + byte, mask=ok, other=0)
        left = tl.load(a + m[:, None] * K + k[None, :], mask=ok, other=0.0)
        if PRE:
            left2 = tl.load(a2 + m[:, None] * K2 + k2[None, :], mask=ok, other=0.0)
            acc = tl.dot(left, right, tl.dot(left2, right2) * factor)
        else:
            acc = tl.dot(left, right)
        if AFFINE == 1:
            acc += shift
        if AFFINE == 2:
            acc = acc * scale + shift
        if ADD > 0:
            acc += added.to(tl.float32)
        if ACT == 1:
            acc = tl.maximum(acc, 0.0)
        if ACT == 2:
            acc = tl.where(gates > 0, acc, 0.0)
        if ACT == 3:
            acc = tl.where(unpack_bits(packed, BM, BN) > 0, acc, 0.0)
        if ACT == 4:
            acc = tl.where(gates.to(tl.float32) * gate_scale + gate_shift > 0, acc, 0.0)
        result = acc.to(out.dtype.element_ty)
        tl.store(out + o, result, mask=ok)
        if BITS:
            tl.store(bits + byte, pack_bits(result > 0, BM, BN), mask=ok)
        if SUMS > 0:
            if AFFINE > 0:  # else rows beyond the last are zero
                acc = tl.where(ok, acc, 0.0)
            total += add_own_rows(acc, BM, BN, WARPS)
        if SUMS == 2:
            second += add_own_rows(acc * gates.to(tl.float32), BM, BN, WARPS)
        if SUMS == 3:
            second += add_own_rows(acc * acc, BM, BN, WARPS)
    if SUMS > 0:
        tl.store(s + first * N + n, tl.sum(tl.sum(total, 1), 0))
    if SUMS > 1:
        tl.store(s + (P + first) * N + n, tl.sum(tl.sum(second, 1), 0))


@triton.jit(repr=name_ahead, do_not_specialize=["H", "W"])
def gemm_ahead(
    a, b, a2, b2, beta, out, v, add, gate, gv, bits, s, M, N, K, K2, P, H, W,
    TRANS: tl.constexpr, PRE: tl.constexpr, AFFINE: tl.constexpr, ADD: tl.constexpr,
    ACT: tl.constexpr, BITS: tl.constexpr, SUMS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
    FLAT: tl.constexpr,
):  # fmt: skip
    """`gemm` by P programs that walk over the tiles; a, b, a2 and b2 are descriptors.

    For products of many channels, whose weights fit nowhere: the copy engine fetches both factors
    and, FLAT, those of the next tile during the epilogue of this one.
    """
    blocks = tl.cdiv(N, BN)
    late = tl.program_id(0) - P  # the epilogue counts anew: what it shares would take registers
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BM) * blocks, P, flatten=FLAT):
        top, side = (tile // blocks) * BM, (tile % blocks) * BN
        if EARLY:
            m0, n0 = top + tl.arange(0, BM), side + tl.arange(0, BN)
            ok0 = (m0 < M)[:, None]
            if ADD > 0:
                added = load_added(add, m0, n0, M, N, H, W, ADD)
            if (ACT == 2) | (ACT == 4):
                gates = tl.load(gate + m0[:, None] * N + n0[None, :], mask=ok0, other=0.0)
        acc = tl.zeros((BM, BN), tl.float32)
        if PRE:
            for k0 in range(0, K2, BK):
                acc = tl.dot(a2.load([top, k0]), b2.load([k0, side]), acc)
            acc = acc * tl.load(beta)
        for k0 in range(0, K, BK):
            right = tl.trans(b.load([side, k0])) if TRANS else b.load([k0, side])
            acc = tl.dot(a.load([top, k0]), right, acc)
        late += P
        row, column = late // blocks, late % blocks
        m, n = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
        ok, o = (m < M)[:, None], m[:, None] * N + n[None, :]
        if (ACT == 3) | BITS:
            words = column * (BN // 64) + tl.arange(0, BN // 64)
            word = bits.to(tl.pointer_type(tl.int64)) + m[:, None] * (N // 64) + words[None, :]
        if ACT == 3:
            packed = tl.load(word, mask=ok, other=0)
        if not EARLY:
            if ADD > 0:
                added = load_added(add, m, n, M, N, H, W, ADD)
            if (ACT == 2) | (ACT == 4):
                gates = tl.load(gate + o, mask=ok, other=0.0)
        if AFFINE == 1:
            acc += tl.load(v + n)[None, :]
        if AFFINE == 2:
            acc = acc * tl.load(v + 2 * N + n)[None, :] + tl.load(v + 3 * N + n)[None, :]
        if ADD > 0:
            acc += added.to(tl.float32)
        if ACT == 1:
            acc = tl.maximum(acc, 0.0)
        if ACT == 2:
            acc = tl.where(gates > 0, acc, 0.0)
        if ACT == 3:
            acc = tl.where(unpack_words(packed, BM, BN) > 0, acc, 0.0)
        if ACT == 4:
            normal = gates.to(tl.float32) * tl.load(gv + 2 * N + n)[None, :]
            acc = tl.where(normal + tl.load(gv + 3 * N + n)[None, :] > 0, acc, 0.0)
        result = acc.to(out.dtype.element_ty)
        tl.store(out + o, result, mask=ok)
        if BITS:
            tl.store(word, pack_words(result > 0, BM, BN, EARLY and not FLAT), mask=ok)
        if SUMS > 0:
            acc = tl.where(ok, acc, 0.0)
            tl.store(s + row * N + n, tl.sum(acc, 0))
            second = s + tl.cdiv(M, BM) * N + row * N + n
            if SUMS == 2:
                tl.store(second, tl.sum(acc * gates.to(tl.float32), 0))
            if SUMS == 3:
                tl.store(second, tl.sum(acc * acc, 0))


@triton.jit(repr=name_outer, do_not_specialize=["H", "W"])
def outer(
    x, y, kept, v, p, M, NX, NY, SPLITS, H, W,
    GRAM: tl.constexpr, NORM: tl.constexpr, STRIDE: tl.constexpr, SAME: tl.constexpr,
    BM: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """x^T y over one of SPLITS shares of the M rows, into p [SPLITS, NX (+ 1), NY].

    GRAM: x is y, and one more row of p holds the sums of y. NORM: y is normalised by v first, with
    ReLU, and kept. STRIDE 2: y's rows are the even pixels of H x W ones, and kept. SAME: one tile
    has all columns, so that x's tile is y's.
    """
    blocks = tl.cdiv(NY, BY)
    row, column, split = tl.program_id(0) // blocks, tl.program_id(0) % blocks, tl.program_id(1)
    i, j = row * BX + tl.arange(0, BX), column * BY + tl.arange(0, BY)
    acc, total = tl.zeros((BX, BY), tl.float32), tl.zeros((BY,), tl.float32)
    if NORM:
        scale_x, shift_x = tl.load(v + 2 * NX + i)[None, :], tl.load(v + 3 * NX + i)[None, :]
        scale_y, shift_y = tl.load(v + 2 * NY + j)[None, :], tl.load(v + 3 * NY + j)[None, :]
    for r in range(split * BM, M, SPLITS * BM):
        m = r + tl.arange(0, BM)
        ok, source = (m < M)[:, None], m
        if STRIDE == 2:
            ho, wo = (H + 1) // 2, (W + 1) // 2
            source = ((m // (ho * wo)) * H + 2 * ((m // wo) % ho)) * W + 2 * (m % wo)
        right = tl.load(y + source[:, None] * NY + j[None, :], mask=ok, other=0.0)
        if NORM:
            right = tl.maximum(right.to(tl.float32) * scale_y + shift_y, 0.0)
            right = tl.where(ok, right, 0.0).to(y.dtype.element_ty)
        if SAME:
            left = right
        else:
            left = tl.load(x + source[:, None] * NX + i[None, :], mask=ok, other=0.0)
            if NORM:
                left = tl.maximum(left.to(tl.float32) * scale_x + shift_x, 0.0)
                left = tl.where(ok, left, 0.0).to(x.dtype.element_ty)
        if NORM | (STRIDE == 2):
            tl.store(kept + m[:, None] * NY + j[None, :], right, mask=ok & (row == 0))
        if GRAM:
            total += tl.sum(right.to(tl.float32), 0)
        acc = tl.dot(tl.trans(left), right, acc)
    rows = NX
    if GRAM:
        rows = NX + 1
        tl.store(p + (split * rows + NX) * NY + j, total, mask=(j < NY) & (row == 0))
    tl.store(p + (split * rows + i[:, None]) * NY + j[None, :], acc)


@triton.jit
def sum_rows(p, out, R, C, G, BR: tl.constexpr, BC: tl.constexpr):
    """[P, R, C] to [P, G, C]."""
    c, g, which = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1), tl.program_id(2)
    total = tl.zeros((BR, BC), tl.float32)
    for r0 in range(g * BR, R, G * BR):
        r = r0 + tl.arange(0, BR)
        ok = (r < R)[:, None] & (c < C)[None, :]
        total += tl.load(p + (which * R + r)[:, None] * C + c[None, :], mask=ok, other=0.0)
    tl.store(out + (which * G + g) * C + c, tl.sum(total, 0), mask=c < C)


@triton.jit
def fold_covariance(gram, sums, w, t, M, K, BN: tl.constexpr, BK: tl.constexpr):
    """t = w Cov from a Gram matrix.

    Tensor cores take tf32, which holds a 16-bit weight exactly; Cov goes in as two addends, so
    that the variance is good to about 2**-22.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    j = tl.program_id(1) * BK + tl.arange(0, BK)
    mean_j, acc = tl.load(sums + j) / M, tl.zeros((BN, BK), tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        mean_k = tl.load(sums + k) / M
        cov = tl.load(gram + k[:, None] * K + j[None, :]) / M - mean_k[:, None] * mean_j[None, :]
        high = (cov.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        left = tl.load(w + n[:, None] * K + k[None, :]).to(tl.float32)
        acc = tl.dot(left, high, acc, input_precision="tf32")
        acc = tl.dot(left, cov - high, acc, input_precision="tf32")
    tl.store(t + n[:, None] * K + j[None, :], acc)


@triton.jit
def fold_statistics(
    sums, w, t, weight, bias, running, v, M, N, K, eps, momentum,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Forward vectors of the norm behind x @ w^T from the sums of x and t = w Cov."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    mean, var = tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        own = tl.load(w + n[:, None] * K + k[None, :]).to(tl.float32)
        mean += tl.sum(own * (tl.load(sums + k) / M)[None, :], 1)
        var += tl.sum(own * tl.load(t + n[:, None] * K + k[None, :]), 1)
    var = tl.maximum(var, 0.0)
    store_forward(v, running, weight, bias, n, mean, var, M, N, eps, momentum)


@triton.jit
def fold_gradient(
    raw, s, w, t, sums, v, dw, wa, u, M, N, K, G,
    BG: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Backward vectors u and the weight gradient dw from raw = g^T x; wa = scale * w."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros((BG, BN), tl.float32)
    for g0 in range(0, G, BG):
        g = g0 + tl.arange(0, BG)
        total += tl.load(s + g[:, None] * N + n[None, :], mask=(g < G)[:, None], other=0.0)
    dbeta, product = tl.sum(total, 0), tl.zeros((BN,), tl.float32)
    for k0 in range(0, K, BK):
        o = n[:, None] * K + (k0 + tl.arange(0, BK))[None, :]
        product += tl.sum(tl.load(raw + o) * tl.load(w + o).to(tl.float32), 1)
    mean, rstd, scale = tl.load(v + n), tl.load(v + N + n), tl.load(v + 2 * N + n)
    dgamma = (product - mean * dbeta) * rstd
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        o, mean_k = n[:, None] * K + k[None, :], tl.load(sums + k) / M
        d = tl.load(raw + o) - dbeta[:, None] * mean_k[None, :]
        d -= (rstd * dgamma)[:, None] * tl.load(t + o)
        tl.store(dw + o, scale[:, None] * d)
        tl.store(wa + o, (scale[:, None] * tl.load(w + o).to(tl.float32)).to(wa.dtype.element_ty))
    slope = scale * rstd * dgamma / M
    tl.store(u + n, dgamma)
    tl.store(u + N + n, dbeta)
    tl.store(u + 2 * N + n, scale)
    tl.store(u + 3 * N + n, -slope)
    tl.store(u + 4 * N + n, slope * mean - scale * dbeta / M)


@triton.jit
def fold_input(w, u, q, const, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """q = w^T diag(b) w over the largest |b|, which const's last place keeps; const = c w.

    b is a mean over all pixels and float16 has no room for it: divided by its largest, it has.
    """
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    j = tl.program_id(1) * BK + tl.arange(0, BK)
    largest = tl.zeros((BN,), tl.float32)
    for n0 in range(0, N, BN):
        largest = tl.maximum(largest, tl.abs(tl.load(u + 3 * N + n0 + tl.arange(0, BN))))
    top = tl.maximum(tl.max(largest, 0), 1e-30)
    acc, total = tl.zeros((BK, BK), tl.float32), tl.zeros((BK,), tl.float32)
    for n0 in range(0, N, BN):
        n = n0 + tl.arange(0, BN)
        left = tl.load(w + n[:, None] * K + k[None, :]).to(tl.float32)
        right = tl.load(w + n[:, None] * K + j[None, :]).to(tl.float32)
        total += tl.sum(left * tl.load(u + 4 * N + n)[:, None], 0)
        left = left * (tl.load(u + 3 * N + n) / top)[:, None]
        acc = tl.dot(tl.trans(left), right, acc, input_precision="tf32")
    tl.store(q + k[:, None] * K + j[None, :], acc.to(q.dtype.element_ty))
    first = tl.program_id(1) == 0
    tl.store(const + k, total, mask=(k < K) & first)
    if first & (tl.program_id(0) == 0):
        tl.store(const + K, top)


# --- the same, finished by the last program to come ---


@triton.jit
def is_last(counter, G):
    """Whether G - 1 programs came before this one; then their stores can be read, past L1.

    The counter is left at zero, so that kernels that follow one another can share it.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == G - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def add_fresh(s, c, C, G, BG: tl.constexpr, BC: tl.constexpr):
    """The sum of G rows that other programs of this kernel wrote."""
    total = tl.zeros((BG, BC), tl.float32)
    for g0 in range(0, G, BG):
        g = g0 + tl.arange(0, BG)
        place = s + g[:, None] * C + c[None, :]
        total += tl.load(place, mask=(g < G)[:, None], other=0.0, cache_modifier=".cg")
    return tl.sum(total, 0)


@triton.jit
def norm_statistics_finished(
    x, s, weight, bias, running, v, counters, M, C, G, eps, momentum,
    BM: tl.constexpr, BC: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """norm_statistics and finish_statistics."""
    c, g = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1)
    total, square = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    for r in range(g * BM, M, G * BM):
        m = r + tl.arange(0, BM)
        value = tl.load(x + m[:, None] * C + c[None, :], mask=(m < M)[:, None], other=0.0)
        value = value.to(tl.float32)
        total += value
        square += value * value
    tl.store(s + g * C + c, tl.sum(total, 0))
    tl.store(s + (G + g) * C + c, tl.sum(square, 0))
    if is_last(counters + tl.program_id(0), G):
        mean = add_fresh(s, c, C, G, BG, BC) / M
        var = tl.maximum(add_fresh(s + G * C, c, C, G, BG, BC) / M - mean * mean, 0.0)
        store_forward(v, running, weight, bias, c, mean, var, M, C, eps, momentum)


@triton.jit
def norm_reduce_finished(
    dy, x, v, s, u, counters, M, C, G,
    KIND: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """norm_reduce of KIND 0 or 2, and finish_reduce."""
    c, g = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1)
    scale, shift = tl.load(v + 2 * C + c)[None, :], tl.load(v + 3 * C + c)[None, :]
    total, product = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    for r in range(g * BM, M, G * BM):
        m = r + tl.arange(0, BM)
        o, ok = m[:, None] * C + c[None, :], (m < M)[:, None]
        d = tl.load(dy + o, mask=ok, other=0.0).to(tl.float32)
        value = tl.load(x + o, mask=ok, other=0.0).to(tl.float32)
        if KIND == 0:
            d = tl.where(value * scale + shift > 0, d, 0.0)
        total += d
        product += d * value
    tl.store(s + g * C + c, tl.sum(total, 0))
    tl.store(s + (G + g) * C + c, tl.sum(product, 0))
    if is_last(counters + tl.program_id(0), G):
        dbeta = add_fresh(s, c, C, G, BG, BC)
        store_backward(u, v, c, dbeta, add_fresh(s + G * C, c, C, G, BG, BC), M, C)


@triton.jit
def norm_keep_finished(
    x, kept, v, s, sums, counters, M, C, G, H, W,
    NORM: tl.constexpr, STRIDE: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """norm_keep and the sum of its partial sums."""
    c, g = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1)
    if NORM:
        scale, shift = tl.load(v + 2 * C + c)[None, :], tl.load(v + 3 * C + c)[None, :]
    total = tl.zeros((BM, BC), tl.float32)
    for r in range(g * BM, M, G * BM):
        m = r + tl.arange(0, BM)
        ok, source = (m < M)[:, None], m
        if STRIDE == 2:
            ho, wo = (H + 1) // 2, (W + 1) // 2
            source = ((m // (ho * wo)) * H + 2 * ((m // wo) % ho)) * W + 2 * (m % wo)
        value = tl.load(x + source[:, None] * C + c[None, :], mask=ok, other=0.0)
        if NORM:
            value = tl.maximum(value.to(tl.float32) * scale + shift, 0.0)
            value = tl.where(ok, value, 0.0).to(x.dtype.element_ty)
        tl.store(kept + m[:, None] * C + c[None, :], value, mask=ok)
        total += value.to(tl.float32)
    tl.store(s + g * C + c, tl.sum(total, 0))
    if is_last(counters + tl.program_id(0), G):
        tl.store(sums + c, add_fresh(s, c, C, G, BG, BC))


@triton.jit
def fold_forward(
    gram, sums, w, t, weight, bias, running, v, s, counters, M, N, K, eps, momentum,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """fold_covariance and fold_statistics: the last program of a row of tiles has its vectors."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    j, tiles = tl.program_id(1) * BK + tl.arange(0, BK), tl.cdiv(K, BK)
    mean_j, acc = tl.load(sums + j) / M, tl.zeros((BN, BK), tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        mean_k = tl.load(sums + k) / M
        cov = tl.load(gram + k[:, None] * K + j[None, :]) / M - mean_k[:, None] * mean_j[None, :]
        high = (cov.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        left = tl.load(w + n[:, None] * K + k[None, :]).to(tl.float32)
        acc = tl.dot(left, high, acc, input_precision="tf32")
        acc = tl.dot(left, cov - high, acc, input_precision="tf32")
    tl.store(t + n[:, None] * K + j[None, :], acc)
    own = tl.load(w + n[:, None] * K + j[None, :]).to(tl.float32)
    tl.store(s + tl.program_id(1) * N + n, tl.sum(own * mean_j[None, :], 1))
    tl.store(s + (tiles + tl.program_id(1)) * N + n, tl.sum(own * acc, 1))
    if is_last(counters + tl.program_id(0), tiles):
        mean, var = tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32)
        for i in range(0, tiles):
            mean += tl.load(s + i * N + n, cache_modifier=".cg")
            var += tl.load(s + (tiles + i) * N + n, cache_modifier=".cg")
        var = tl.maximum(var, 0.0)
        store_forward(v, running, weight, bias, n, mean, var, M, N, eps, momentum)


@triton.jit
def fold_input_half(w, u, q, const, K, N: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """fold_input by 16-bit products, and the largest |b| by one load; N is a power of two."""
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    j = tl.program_id(1) * BK + tl.arange(0, BK)
    largest = tl.max(tl.abs(tl.load(u + 3 * N + tl.arange(0, N))), 0)
    top = tl.maximum(largest, 1e-30)
    acc, total = tl.zeros((BK, BK), tl.float32), tl.zeros((BK,), tl.float32)
    for n0 in range(0, N, BN):
        n = n0 + tl.arange(0, BN)
        left = tl.load(w + n[:, None] * K + k[None, :]).to(tl.float32)
        right = tl.load(w + n[:, None] * K + j[None, :])
        total += tl.sum(left * tl.load(u + 4 * N + n)[:, None], 0)
        left = (left * (tl.load(u + 3 * N + n) / top)[:, None]).to(right.dtype)
        acc = tl.dot(tl.trans(left), right, acc)
    tl.store(q + k[:, None] * K + j[None, :], acc.to(q.dtype.element_ty))
    first = tl.program_id(1) == 0
    tl.store(const + k, total, mask=(k < K) & first)
    if first & (tl.program_id(0) == 0):
        tl.store(const + K, top)


# --- launching ---


def time_ms(run: Callable[[], object], repeats: int = 6) -> float:
    """Milliseconds of one run on the device, after two that do not count."""
    run()
    run()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def device_ms(run: Callable[[], object], repeats: int = 8) -> float:
    """As time_ms, from a graph of `repeats` runs: what launching costs the host does not count."""
    run()
    side = measuring_stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        run()
        torch.cuda.synchronize()
        graph.capture_begin()
        try:
            for _ in range(repeats):
                run()
        finally:
            graph.capture_end()
        ms = time_ms(graph.replay, 2) / repeats
    torch.cuda.current_stream().wait_stream(side)
    return ms


@cache
def measuring_stream() -> torch.cuda.Stream:
    """One stream for all measurements, so that libraries keep one workspace for it."""
    return torch.cuda.Stream()


@dataclass(frozen=True)
class Launch:
    """A kernel with everything it needs; `tile` is what tells it from others of the same work."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple
    flags: dict[str, int]
    tile: Tile
    options: dict[str, int]

    @property
    def name(self) -> str:
        """The kernel's."""
        return self.kernel.__name__

    @property
    def ban_key(self) -> str:
        """Names this use of the kernel with this tile."""
        return ban_key(self.kernel, self.flags, self.tile)

    def __call__(self) -> None:
        """Launch."""
        self.kernel[self.grid](*self.args, **self.options)


class Launcher:
    """Runs each kernel with its fastest tile, measured once a shape and kept for every type.

    mode "tune" measures what it has not met; "first" takes the first tile that fits; "record" and
    "record first" run nothing and note what these two would compile.
    """

    def __init__(self) -> None:
        self.mode = "first" if INTERPRETED else "tune"
        self.tiles: dict[str, list[Any]] = {}  # kernel and tile by what is computed
        self.options: dict[str, str] = {}
        self.timings: list[dict[str, Any]] = []
        self.recorded: dict[Any, Callable[[], object]] = {}
        self.banned: set[str] = set()
        self.forced: dict[str, Tile] = {}  # by kernel; for checks of every tile
        self.last_flags: dict[str, int] = {}
        self.rows = False  # whether products may use gemm_rows
        self.ahead = False  # whether products may use gemm_ahead
        self.finish = False  # whether the last program of a sum finishes it
        self.counters: dict[Any, Tensor] = {}
        self.multiprocessors = 132

    def counter(self, like: Tensor) -> Tensor:
        """Zeros that is_last counts with; kernels of one stream share them."""
        if like.device not in self.counters:
            self.counters[like.device] = torch.zeros(256, dtype=torch.int32, device=like.device)
        return self.counters[like.device]

    def run(self, kernel: Any, grid: Any, args: tuple, tiles: list[Tile], **flags: int) -> Tile:
        """Launch over grid(tile); returns the tile that was used."""
        numbers = tuple(value for value in args if isinstance(value, int))
        launches = [Launch(kernel, grid(t), args, flags, t, {**flags, **t}) for t in tiles]
        return self.run_fastest(f"{kernel.__name__} {numbers} {flags}", launches).tile

    def run_fastest(self, key: str, launches: list[Launch]) -> Launch:
        """Run one of several ways to launch the same work; returns it."""
        if self.forced:
            name = launches[-1].name if launches[-1].name in self.forced else launches[0].name
            launches = [x for x in launches if x.name == name]
            if name in self.forced:
                launches = [x for x in launches if x.tile == self.forced[name]] or launches[:1]
                self.last_flags = launches[0].flags
        allowed = [x for x in launches if x.ban_key not in self.banned] or launches
        known = None if self.forced else self.tiles.get(key)
        chosen = next((x for x in allowed if known == [x.name, x.tile]), None)
        chosen = chosen or (allowed[0] if len(allowed) == 1 else None)
        if self.mode.startswith("record"):
            first = [chosen or allowed[0]]
            for each in first if chosen or self.mode == "record first" else allowed:
                self.record(each)
            return first[0]
        if chosen is None and self.mode == "tune":
            chosen = self.tune(key, allowed)
            self.tiles[key] = [chosen.name, chosen.tile]
        chosen = chosen or allowed[0]
        chosen()
        return chosen

    def record(self, launch: Launch) -> None:
        """Note one specialisation: types, alignment and constants decide what is compiled."""
        kinds = tuple(specialisation(value) for value in launch.args)
        key = (launch.name, kinds, tuple(launch.options.items()))
        self.recorded[key] = lambda: launch.kernel.warmup(*launch.args, grid=(1,), **launch.options)

    def tune(self, key: str, launches: list[Launch]) -> Launch:
        """The fastest; one that fails, for lack of shared memory or else, is left out."""
        found: list[tuple[float, Launch]] = []
        for launch in launches:
            try:
                found.append((device_ms(launch), launch))
            except Exception as error:  # noqa: BLE001  a tile that fails must not end the run
                print(f"failed: {key} {launch.tile}: {str(error)[:120]}", flush=True)
        if not found:
            raise RuntimeError(f"no tile works for {key}")
        ms, best = min(found, key=lambda pair: pair[0])
        size = count_bytes(best.args)
        row = {"kernel": key, "tile": {"name": best.name, **best.tile}, "ms": round(ms, 4)}
        row |= {"mb": round(size / 1e6), "tb_per_s": round(size / ms / 1e9, 2)}
        names = dict.fromkeys(launch.name for _, launch in found)
        if len(names) > 1:
            own = {name: min(pair[0] for pair in found if pair[1].name == name) for name in names}
            row["best_ms"] = {name: round(value, 4) for name, value in own.items()}
        self.timings.append(row)
        return best

    def choose(self, key: str, options: dict[str, Callable[[], Any]]) -> Any:
        """What the fastest of several ways to the same result returns; measured once a key."""
        if self.mode != "tune" and key not in self.options:
            return self.first_result(key, options, every=self.mode.startswith("record"))
        if key not in self.options:
            found = {}
            for name, run in options.items():
                try:
                    found[name] = device_ms(run)
                except Exception:  # noqa: BLE001  another way is left
                    print(f"way failed: {key} {name}\n{traceback.format_exc()}", flush=True)
            self.options[key] = min(found, key=lambda name: found[name])
            ms = {name: round(value, 4) for name, value in found.items()}
            self.timings.append({"choice": key, "ms": ms})
        return options[self.options[key]]()

    def fastest(self, key: str, options: dict[str, Callable[[], Any]]) -> str:
        """The name of the fastest of several ways, as `choose` finds it; their results are lost."""
        if self.mode == "tune" and key not in self.options:
            self.choose(key, options)
        elif self.mode.startswith("record"):
            self.first_result(key, options, every=True)
        return self.options.get(key) or next(iter(options))

    def first_result(self, key: str, options: dict[str, Callable[[], Any]], every: bool) -> Any:
        """What the first way that works returns; every one is tried where `every` says so."""
        results = []
        for name, run in options.items():
            try:
                results.append(run())
            except Exception:  # noqa: BLE001  another way is left
                print(f"way failed: {key} {name}\n{traceback.format_exc()}", flush=True)
            if results and not every:
                break
        return results[0]

    def compile_recorded(self, threads: int) -> tuple[int, list[str]]:
        """Compile what was noted, in parallel; returns how many, and what failed."""
        jobs, failed = self.recorded, []
        self.recorded = {}
        with ThreadPoolExecutor(threads) as pool:
            tasks = {key: pool.submit(job) for key, job in jobs.items()}
        for key, task in tasks.items():
            if error := task.exception():
                failed.append(f"{key[0]} {key[2]}: {str(error)[:300]}")
        return len(jobs), failed


def specialisation(value: Any) -> Any:
    """What Triton distinguishes about an argument."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return value == 1, value % 16 == 0
    return type(value).__name__


def count_bytes(args: Iterable[Any]) -> int:
    """Bytes of the tensors a kernel is given, each counted once."""
    plain = [t.base if isinstance(t, TensorDescriptor) else t for t in args]
    tensors = {t.data_ptr(): t.numel() * t.element_size() for t in plain if isinstance(t, Tensor)}
    return sum(tensors.values())


def ban_key(kernel: Any, flags: dict[str, int], tile: Tile) -> str:
    """Names a use of a kernel with one tile."""
    return f"{kernel.__name__} {flags} {tile}"


launcher = Launcher()
ONE_TILE: list[Tile] = [{}]


# --- the kernels as functions of images [N, C, H, W] in channels_last memory ---


def new_image(n: int, c: int, h: int, w: int, like: Tensor, dtype: Any = None) -> Tensor:
    """An empty channels_last image."""
    empty = torch.empty((n, h, w, c), device=like.device, dtype=dtype or like.dtype)
    return empty.permute(0, 3, 1, 2)


def flat(x: Tensor) -> Tensor:
    """The pixels as rows: a view [M, C]."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def floats(*shape: int, like: Tensor) -> Tensor:
    """An empty float32 tensor."""
    return torch.empty(shape, device=like.device)


def narrow_tiles(tiles: list[Tile], **limits: int) -> list[Tile]:
    """The tiles no wider than the layer."""
    return [t for t in tiles if all(t[key] <= limit for key, limit in limits.items())]


def count_groups(m: int, c: int) -> int:
    """Programs that share the rows of a reduction: fewer where one of them finishes it."""
    each = 4 if launcher.finish else 8
    return max(1, min(132 * each * 64 // c, triton.cdiv(m, 128)))


def by_columns(c: int, groups: int) -> Callable[[Tile], tuple[int, int]]:
    """The grid of a reduction."""
    return lambda t: (triton.cdiv(c, t["BC"]), groups)


def by_rows(m: int, c: int) -> Callable[[Tile], tuple[int, int]]:
    """The grid of an elementwise kernel."""
    return lambda t: (triton.cdiv(m, t["BM"]), triton.cdiv(c, t["BC"]))


def statistics(x: Tensor, norm: Any) -> Tensor:
    """Forward vectors of a norm over x."""
    c, m = x.shape[1], x.numel() // x.shape[1]
    groups = count_groups(m, c)
    s = floats(2, groups, c, like=x)
    if launcher.finish:
        v, tiles = floats(4, c, like=x), narrow_tiles(FINISHED_TILES, BC=c)
        args = (x, s, norm.weight, norm.bias, norm.running, v, launcher.counter(x))
        args = (*args, m, c, groups, EPS, MOMENTUM)
        launcher.run(norm_statistics_finished, by_columns(c, groups), args, tiles)
        return v
    tiles = narrow_tiles(NORM_TILES, BC=c)
    launcher.run(norm_statistics, by_columns(c, groups), (x, s, m, c, groups), tiles)
    return finish(s, norm, m)


def finish(s: Tensor, norm: Any, m: int) -> Tensor:
    """Forward vectors from partial sums [2, G, C]."""
    groups, c = s.shape[1:]
    v = floats(4, c, like=s)
    args = (s, norm.weight, norm.bias, norm.running, v, m, c, groups, EPS, MOMENTUM)
    launcher.run(finish_statistics, lambda t: (c // t["BC"],), args, FINISH_TILES)
    return v


def apply_norm(x: Tensor, v: Tensor, kind: int, res: Tensor | None = None) -> Tensor:
    """Normalise, with ReLU and residual as norm_apply's KIND says."""
    c, m = x.shape[1], x.numel() // x.shape[1]
    y = torch.empty_like(x)
    tiles = narrow_tiles(NORM_TILES, BC=c)
    launcher.run(norm_apply, by_rows(m, c), (x, res, y, v, m, c), tiles, KIND=kind)
    return y


def reduce_norm(
    x: Tensor, v: Tensor, kind: int, dy: Tensor, dz: Tensor | None = None, y: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The masked gradient (dy itself unless KIND is 1) and the backward vectors."""
    c, m = x.shape[1], x.numel() // x.shape[1]
    groups = count_groups(m, c)
    if launcher.finish and kind != 1:
        s, u = floats(2, groups, c, like=x), floats(5, c, like=x)
        args: tuple = (dy, x, v, s, u, launcher.counter(x), m, c, groups)
        tiles = narrow_tiles(FINISHED_TILES, BC=c)
        launcher.run(norm_reduce_finished, by_columns(c, groups), args, tiles, KIND=kind)
        return dy, u
    s, out = floats(2, groups, c, like=x), torch.empty_like(x) if kind == 1 else None
    tiles = narrow_tiles(NORM_TILES, BC=c)
    args = (dy, dz, x, y, out, v, s, m, c, groups)
    launcher.run(norm_reduce, by_columns(c, groups), args, tiles, KIND=kind)
    return dy if out is None else out, finish_back(s, v, m)


def finish_back(s: Tensor, v: Tensor, m: int) -> Tensor:
    """Backward vectors from partial sums [2, G, C]."""
    groups, c = s.shape[1:]
    u = floats(5, c, like=s)
    args = (s, v, u, m, c, groups)
    launcher.run(finish_reduce, lambda t: (c // t["BC"],), args, FINISH_TILES)
    return u


def apply_norm_back(dy: Tensor, x: Tensor, v: Tensor, u: Tensor, kind: int) -> Tensor:
    """The gradient of a norm's input."""
    c, m = x.shape[1], x.numel() // x.shape[1]
    dx = torch.empty_like(x)
    tiles = narrow_tiles(NORM_TILES, BC=c)
    launcher.run(norm_apply_back, by_rows(m, c), (dy, x, dx, v, u, m, c), tiles, KIND=kind)
    return dx


def pool(x: Tensor, v: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Normalise + ReLU + max-pool of x, which pixel of each window won and, if wanted, its x."""
    n, c, h, w = x.shape
    ho, wo = (h + 1) // 2, (w + 1) // 2
    y, at = new_image(n, c, ho, wo, x), new_image(n, c, ho, wo, x, torch.uint8)
    won, m = torch.empty_like(y) if keep else None, n * ho * wo
    tiles = narrow_tiles(NORM_TILES, BC=c)
    args = (x, y, at, won, v, m, c, h, w, ho, wo)
    launcher.run(pool_forward, by_rows(m, c), args, tiles, WON=keep)
    return y, at, won


def pool_back(
    dp: Tensor, at: Tensor, won: Tensor | None, x: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of the stem's convolution and the backward vectors of its norm."""
    (n, c, h, w), (ho, wo) = x.shape, at.shape[2:]
    m, pooled, dx = n * h * w, n * ho * wo, torch.empty_like(x)
    tiles = narrow_tiles(NORM_TILES, BC=c)
    if won is None:
        groups = count_groups(m, c)
        s = floats(2, groups, c, like=x)
        args = (dp, at, x, v, s, m, c, groups, h, w, ho, wo)
        launcher.run(pool_reduce, by_columns(c, groups), args, tiles)
    else:
        groups = count_groups(pooled, c)
        s = floats(2, groups, c, like=x)
        args = (dp, None, won, None, None, v, s, pooled, c, groups)
        launcher.run(norm_reduce, by_columns(c, groups), args, tiles, KIND=0)
    u = finish_back(s, v, m)
    if won is not None and (h, w) == (2 * ho, 2 * wo):
        args = (dp, at, x, dx, v, u, pooled, c, ho, wo)
        launcher.run(pool_apply_quads, by_rows(pooled, c), args, tiles)
        return dx, u
    args = (dp, at, x, dx, v, u, m, c, h, w, ho, wo)
    launcher.run(pool_apply_back, by_rows(m, c), args, tiles)
    return dx, u


def head_back(d: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the mean over pixels, masked by y > 0, and its partial sums."""
    n, c, h, w = y.shape
    m, out = n * h * w, torch.empty_like(y)
    s = floats(1, triton.cdiv(m, 32), c, like=y)
    tile = {"BM": 32, "BC": 64}
    launcher.run(head_gradient, by_rows(m, c), (d, y, out, s, m, c, h * w), [tile])
    return out, shorten(s)


def update_weights(p: Tensor, m: Tensor, g: Tensor, q: Tensor, unscale: float) -> None:
    """One step of SGD with momentum over flat buffers."""
    n = p.numel()
    args = (p, m, g, q, n, RATE, 0.9, unscale)
    launcher.run(update, lambda _: (triton.cdiv(n, 2048),), args, ONE_TILE, B=2048)


def add_rows(p: Tensor, groups: int) -> Tensor:
    """[P, R, C] summed to [P, groups, C]."""
    count, rows, c = p.shape
    out = floats(count, groups, c, like=p)
    args = (p, out, rows, c, groups)
    launcher.run(sum_rows, lambda t: (triton.cdiv(c, t["BC"]), groups, count), args, SUM_TILES)
    return out


def shorten(s: Tensor) -> Tensor:
    """Few enough rows of partial sums for one program to add up."""
    return add_rows(s, 64) if s.shape[1] > MOST_ROWS else s


def product(
    a: Tensor,
    b: Tensor,
    *,
    trans: bool = False,
    pre: tuple[Tensor, Tensor, Tensor] | None = None,
    affine: int = 0,
    v: Tensor | None = None,
    add: Tensor | None = None,
    act: int = NONE,
    gate: Tensor | None = None,
    gate_norm: Tensor | None = None,
    bits: Tensor | None = None,
    sums: int = 0,
) -> tuple[Tensor, Tensor]:
    """`gemm` over images: the result, and its partial sums [1 or 2, G, N] (or an empty tensor)."""
    n, k, h, w = a.shape
    width, m = b.shape[0 if trans else 1], n * h * w
    out = new_image(n, width, h, w, a)
    count = 0 if sums == 0 else 1 if sums == TOTAL else 2
    s = floats(count * max(triton.cdiv(m, 64), MOST_ROWS) * width, like=a)  # more than any needs
    a2, b2, beta = pre or (None, None, None)
    k2 = a2.shape[1] if a2 is not None else 0
    adding = 0 if add is None else PLAIN if add.shape == out.shape else EVEN_PIXELS
    flags = {"TRANS": trans, "PRE": pre is not None, "AFFINE": affine, "ADD": adding, "ACT": act}
    flags |= {"BITS": act == RELU and bits is not None, "SUMS": sums}
    tensors = (a, b, a2, b2, beta, out, v, add, gate, gate_norm, bits, s)
    launches = []
    for t in narrow_tiles(GEMM_TILES, BN=width):
        grid = (triton.cdiv(m, t["BM"]) * triton.cdiv(width, t["BN"]),)
        args = (*tensors, m, width, k, k2, h, w)
        launches.append(Launch(gemm, grid, args, flags, t, {**flags, **t}))
    if launcher.rows:
        extra = (add is not None) + (gate is not None)
        launches = rows_launches(tensors, (m, width, k, k2, h, w), extra, flags) + launches
    ways = "gemm or rows" if launcher.rows else "gemm"
    if launcher.ahead:
        ahead = ahead_launches(tensors, (m, width, k, k2, h, w), flags)
        launches, ways = ahead + launches, f"{ways} or ahead" if ahead else ways
    key = f"{ways} {(m, width, k, k2, h, w)} {flags}"
    used = launcher.run_fastest(key, launches)
    rows = used.args[14] if used.kernel is gemm_rows else triton.cdiv(m, used.tile["BM"])
    return out, shorten(s[: count * rows * width].view(count, rows, width)) if count else s


def rows_launches(
    tensors: tuple, sizes: tuple[int, ...], extra: int, flags: dict[str, int]
) -> list[Launch]:
    """Ways to launch gemm_rows that fit; `extra` tensors of the result's size are read."""
    m, width, k, k2, h, w = sizes
    if k & (k - 1) or k2 & (k2 - 1) or k + k2 > 640:
        return []
    launches = []
    for t in narrow_tiles(ROWS_TILES, BN=width):
        bm, bn, depth, warps = t["BM"], t["BN"], t["num_stages"], t["num_warps"]
        block = bm * (k + k2) * depth + bm * bn * (extra * (depth - 1) + 1)
        occupancy = min(t["OCCUPANCY"], SHARED_MEMORY // (2 * ((k + k2) * bn + block)))
        if not occupancy:
            continue
        blocks = triton.cdiv(width, bn)
        walkers = occupancy * launcher.multiprocessors // blocks
        walkers = max(1, min(walkers, triton.cdiv(m, bm)))
        own = {**flags, "K": k, "K2": k2}
        options = {"BM": bm, "BN": bn, "DEPTH": depth, "WARPS": min(warps, bm // 16)}
        options |= {"num_warps": warps, "num_stages": depth}
        registers = REGISTERS // (32 * warps * occupancy) // 8 * 8
        if registers < 255 and not INTERPRETED:  # what one thread can have
            options["maxnreg"] = registers
        args = (*tensors, m, width, walkers, h, w)
        launches.append(Launch(gemm_rows, (blocks * walkers,), args, own, t, {**own, **options}))
    return launches


def describe(matrix: Tensor, *block: int) -> TensorDescriptor:
    """A matrix for the copy engine, fetched in blocks."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), list(block))


def ahead_launches(tensors: tuple, sizes: tuple[int, ...], flags: dict[str, int]) -> list[Launch]:
    """Ways to launch gemm_ahead, for products of many channels."""
    (a, b, a2, b2, *rest), (m, width, k, k2, h, w) = tensors, sizes
    if k < 128 or m < 128 or h > WIDEST_AHEAD:
        return []
    launches = []
    for t in narrow_tiles(AHEAD_TILES, BN=width):
        bm, bn, bk = t["BM"], t["BN"], t["BK"]
        weights = describe(b, bn, bk) if flags["TRANS"] else describe(b, bk, bn)
        factors: tuple = (describe(flat(a), bm, bk), weights, None, None)
        if a2 is not None:
            factors = (*factors[:2], describe(flat(a2), bm, bk), describe(b2, bk, bn))
        tiles, walking = triton.cdiv(m, bm) * triton.cdiv(width, bn), t["OCCUPANCY"] > 0
        programs = tiles
        if walking:
            programs = min(t["OCCUPANCY"] * launcher.multiprocessors, tiles)
        args = (*factors, *rest, m, width, k, k2, programs, h, w)
        own = {key: value for key, value in t.items() if key != "OCCUPANCY"}
        options = {**flags, **own, "FLAT": walking and not flags["PRE"]}
        launches.append(Launch(gemm_ahead, (programs,), args, flags, t, options))
    return launches


def count_splits(m: int, nx: int, ny: int) -> int:
    """Shares of the rows for `outer`: two programs a multiprocessor at tiles of 128."""
    return max(1, min(264 // (triton.cdiv(nx, 128) * triton.cdiv(ny, 128)), triton.cdiv(m, 256)))


def outer_sum(
    x: Tensor, y: Tensor, kept: Tensor | None, v: Tensor | None, stride: int, gram: bool
) -> Tensor:
    """x^T y as float32 [NX (+ 1), NY], see `outer`."""
    (n, ny, h, w), nx = y.shape, x.shape[1]
    m = n * ((h + stride - 1) // stride) * ((w + stride - 1) // stride)
    splits = count_splits(m, nx, ny)
    p = floats(splits, (nx + gram) * ny, like=x)
    launcher.run(
        outer,
        lambda t: (triton.cdiv(nx, t["BX"]) * triton.cdiv(ny, t["BY"]), splits),
        (x, y, kept, v, p, m, nx, ny, splits, h, w),
        [
            {**t, "SAME": gram and nx == t["BX"] == t["BY"]}
            for t in narrow_tiles(OUTER_TILES, BX=nx, BY=ny)
        ],
        **{"GRAM": gram, "NORM": v is not None, "STRIDE": stride},
    )
    return add_rows(p[None], 1).view(nx + gram, ny)


def gram_matrix(
    x: Tensor, v: Tensor | None = None, stride: int = 1, library: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """A 1x1 convolution's input (x normalised by v, or its even pixels), its Gram matrix and sums.

    `library` lets cuBLAS multiply what a kernel of its own normalised, where that is faster.
    """
    n, c, h, w = x.shape
    small = (n, c, (h + stride - 1) // stride, (w + stride - 1) // stride)

    def joined() -> tuple[Tensor, Tensor, Tensor]:
        kept = x if v is None and stride == 1 else new_image(*small, x)
        gram = outer_sum(x, x, None if kept is x else kept, v, stride, True)
        return kept, gram[:-1], gram[-1]

    def separate() -> tuple[Tensor, Tensor, Tensor]:
        kept = new_image(*small, x)
        m = kept.numel() // c
        groups = count_groups(m, c)
        s = floats(1, groups, c, like=x)
        flags = {"NORM": v is not None, "STRIDE": stride}
        if launcher.finish:
            sums, tiles = floats(c, like=x), narrow_tiles(FINISHED_TILES, BC=c)
            args: tuple = (x, kept, v, s, sums, launcher.counter(x), m, c, groups, h, w)
            launcher.run(norm_keep_finished, by_columns(c, groups), args, tiles, **flags)
            return kept, multiply_transposed(flat(kept), flat(kept)), sums
        tiles = narrow_tiles(NORM_TILES, BC=c)
        args = (x, kept, v, s, m, c, groups, h, w)
        launcher.run(norm_keep, by_columns(c, groups), args, tiles, **flags)
        return kept, multiply_transposed(flat(kept), flat(kept)), add_rows(s, 1).view(-1)

    if not library or (v is None and stride == 1):
        return joined()
    key = f"gram matrix {tuple(x.shape)} {stride} {x.dtype}"
    key += " finished" if launcher.finish else ""
    return launcher.choose(key, {"separate": separate, "joined": joined})


def multiply_transposed(x: Tensor, y: Tensor) -> Tensor:
    """x^T y in float32, by the library."""
    if x.is_cuda:
        return torch.mm(x.t(), y, out_dtype=torch.float32)
    return x.float().t() @ y.float()


def fold(gram: Tensor, sums: Tensor, weight: Tensor, norm: Any, m: int) -> tuple[Tensor, Tensor]:
    """Forward vectors of the norm behind a 1x1 convolution, and weight @ Cov."""
    n, k = weight.shape
    v, t = floats(4, n, like=gram), floats(n, k, like=gram)
    grid: Any = lambda t: (n // t["BN"], k // t["BK"])  # noqa: E731
    if launcher.finish:
        s = floats(2 * (k // 32) * n, like=gram)  # more than any tile needs
        args: tuple = (gram, sums, weight, t, norm.weight, norm.bias, norm.running, v, s)
        args = (*args, launcher.counter(gram), m, n, k, EPS, MOMENTUM)
        launcher.run(fold_forward, grid, args, COVARIANCE_TILES)
        return v, t
    args = (gram, sums, weight, t, m, k)
    launcher.run(fold_covariance, grid, args, COVARIANCE_TILES)
    args = (sums, weight, t, norm.weight, norm.bias, norm.running, v, m, n, k, EPS, MOMENTUM)
    launcher.run(fold_statistics, lambda t: (n // t["BN"],), args, VECTOR_TILES)
    return v, t


def raw_weight_gradient(g: Tensor, x: Tensor) -> Tensor:
    """g^T x in float32: cuBLAS or `outer`, whichever is faster at this shape."""
    if not g.is_cuda:
        return outer_sum(g, x, None, None, 1, False)
    rows, columns = flat(g), flat(x)
    options = {
        "cublas": lambda: multiply_transposed(rows, columns),
        "triton": lambda: outer_sum(g, x, None, None, 1, False),
    }
    key = f"weight gradient {tuple(rows.shape)} {columns.shape[1]} {g.dtype}"
    return launcher.choose(key, options)


def fold_back(
    raw: Tensor, s: Tensor, weight: Tensor, saved: tuple[Tensor, Tensor, Tensor], dw: Tensor, m: int
) -> tuple[Tensor, Tensor]:
    """Writes dw; returns scale * weight and the backward vectors. saved: v, t and sums."""
    (n, k), (v, t, sums) = weight.shape, saved
    wa, u = torch.empty_like(weight), floats(5, n, like=raw)
    args = (raw, s, weight, t, sums, v, dw, wa, u, m, n, k, s.shape[1])
    launcher.run(fold_gradient, lambda t: (n // t["BN"],), args, GRADIENT_TILES)
    return wa, u


def fold_back_input(weight: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """What a 1x1 convolution's input gets from its norm: q [K, K], and const [K] with q's scale."""
    n, k = weight.shape
    q, const = weight.new_empty((k, k)), floats(k + 1, like=u)
    grid: Any = lambda t: (k // t["BK"], k // t["BK"])  # noqa: E731
    if launcher.finish:
        tiles, args = narrow_tiles(HALF_INPUT_TILES, BN=n), (weight, u, q, const, k)
        launcher.run(fold_input_half, grid, args, tiles, N=n)
        return q, const
    launcher.run(fold_input, grid, (weight, u, q, const, n, k), INPUT_TILES)
    return q, const
