"""phalanx.fused.stem_ops in Triton."""
# ruff: noqa: PLR0913, PLR0917  (kernels take pointers and sizes one by one)
# mypy: disable-error-code="no-untyped-def"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.fused.stem_ops import find_arranged_edges, find_pooled_edge
from phalanx.kernels.batch_norm import RELU
from phalanx.kernels.choices import CHOICES, make_tiles
from phalanx.kernels.image_layout import new_image
from phalanx.kernels.norm_finish_fused import finish_gradients, finish_group_gradients
from phalanx.kernels.norm_passes_fused import (
    GELU,
    NormSizes,
    activate,
    activate_back,
    find_first_pixel,
    find_offsets,
    find_sizes,
    load_row,
    sum_gradients,
)

_IMAGE_TILES = make_tiles("B", (256, 4, 3), (1024, 4, 3))
_FILTER_TILES = make_tiles("BM", (128, 4, 3), (64, 4, 3))
_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
_POOL_TILES = make_tiles("BM BC", (32, 64, 4, 3), (64, 32, 4, 3), (16, 64, 4, 3))


@triton.jit
def _arrange(x, out, N, H, W, HO, WO, SN, SC, SH, SW, FRONT, QUADS: tl.constexpr, B: tl.constexpr):
    """Each program writes B pixels of the result with all their channels."""
    m = tl.program_id(0) * B + tl.arange(0, B)
    n, i, j = m // (HO * WO), (m // WO) % HO, m % WO
    parts: tl.constexpr = 4 if QUADS else 1
    c = tl.arange(0, 4 * parts)
    channel, part = c % 4, c // 4
    row, column = i[:, None], j[:, None]
    if QUADS:
        row, column = (
            2 * row - FRONT + (part // 2)[None, :],
            2 * column - FRONT + (part % 2)[None, :],
        )
    ok = (n < N)[:, None] & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    o = n.to(tl.int64)[:, None] * SN + row * SH + column * SW + channel[None, :] * SC
    value = tl.load(x + o, mask=ok & (channel < 3)[None, :], other=0.0)
    to = m.to(tl.int64)[:, None] * (4 * parts) + c[None, :]
    tl.store(out + to, value.to(out.dtype.element_ty), mask=(n < N)[:, None] & (c >= 0)[None, :])


def arrange_image_fused(x: Tensor, size: int, half: torch.dtype) -> Tensor:
    """An image laid out for the first convolution."""
    (n, _, h, w), (ho, wo) = x.shape, find_arranged_edges(x, size)
    out = new_image(x, 16 if size else 4, ho, wo, half)
    pixels = n * ho * wo
    args = (x, out, n, h, w, ho, wo, *x.stride(), size // 2 + 1)
    grid = lambda tile: (triton.cdiv(pixels, tile["B"]),)  # noqa: E731
    CHOICES.run(_arrange, grid, args, _IMAGE_TILES, QUADS=bool(size))
    return out


@triton.jit
def _whiten(
    x, weight, out, M, H, W, SN, SC, SH, SW, CO, FN, FC, FH, FW,
    HALF: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """GELU of a 2 x 2 convolution of three channels: an implicit GEMM of K = 16, four of them 0."""
    m, k, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, 16), tl.arange(0, BC)
    i, j, channel = k // 8, (k // 4) % 2, k % 4
    n, h, w = m // ((H - 1) * (W - 1)), (m // (W - 1)) % (H - 1), m % (W - 1)
    row, column = h[:, None] + i[None, :], w[:, None] + j[None, :]
    o = n.to(tl.int64)[:, None] * SN + row * SH + column * SW + channel[None, :] * SC
    left = tl.load(x + o, mask=(m < M)[:, None] & (channel < 3)[None, :], other=0.0).to(HALF)
    own = (i * FH + j * FW + channel * FC)[:, None] + c[None, :] * FN
    ok = (channel < 3)[:, None] & (c < CO)[None, :]
    value = tl.dot(left, tl.load(weight + own, mask=ok, other=0.0).to(HALF))
    to, ok = find_offsets(m, c, M, CO, WIDE)
    tl.store(out + to, activate(value, GELU).to(out.dtype.element_ty), mask=ok)


def whiten_fused(x: Tensor, weight: Tensor, half: torch.dtype) -> Tensor:
    """The filtered image."""
    (n, _, h, w), channels = x.shape, len(weight)
    out, pixels = new_image(x, channels, h - 1, w - 1, half), n * (h - 1) * (w - 1)
    args = (x, weight, out, pixels, h, w, *x.stride(), channels, *weight.stride())
    block = triton.next_power_of_2(channels)
    grid = lambda tile: (triton.cdiv(pixels, tile["BM"]),)  # noqa: E731
    flags = {"HALF": _TYPES[half], "WIDE": out.numel() >= 2**31, "BC": max(16, block)}
    CHOICES.run(_whiten, grid, args, _FILTER_TILES, **flags)
    return out


# --- pool; M, R and the grid as in phalanx.kernels.norm_passes_fused ---


@triton.jit
def _pool(
    x, y, argmax, x_at_max, v, M, C, R, H, W, HO, WO,
    SIZE: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Normalise + ReLU + max-pool, or the pool alone; NaN counts as the maximum."""
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    n, h, w = tl.program_id(2) + m // (HO * WO), (m // WO) % HO, m % WO
    if v is not None:
        scale, shift = load_row(v, 2, c, C, R), load_row(v, 3, c, C, R)
    best, number = tl.full((BM, BC), float("-inf"), tl.float32), tl.zeros((BM, BC), tl.int32)
    winner = tl.zeros((BM, BC), tl.float32)
    for i in tl.static_range(SIZE):
        for j in tl.static_range(SIZE):
            row, column = 2 * h + i - (SIZE - 2), 2 * w + j - (SIZE - 2)
            inside = (m < M) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
            o, _ = find_offsets((n * H + row) * W + column, c, M, C, WIDE)
            ok = inside[:, None] & (c < C)[None, :]
            raw = tl.load(x + o, mask=ok, other=0.0).to(tl.float32)
            value = raw
            if v is not None:
                value = raw * scale + shift
                value = tl.where(value < 0, 0.0, value)
            value = tl.where(ok, value, float("-inf"))
            better = (value > best) | (value != value)  # noqa: PLR0124 - only NaN does
            number = tl.where(better, i * SIZE + j, number)
            winner = tl.where(better, raw, winner)
            best = tl.where(better, value, best)
    o, ok = find_offsets(m, c, M, C, WIDE)
    o += find_first_pixel(M) * C
    tl.store(y + o, best.to(y.dtype.element_ty), mask=ok)
    tl.store(argmax + o, number.to(tl.uint8), mask=ok)
    if x_at_max is not None:
        tl.store(x_at_max + o, winner.to(x_at_max.dtype.element_ty), mask=ok)


def pool_norm_fused(x: Tensor, v: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise + ReLU + max-pool, the index of the maximum in each window, and x there."""
    _, c, h, w = x.shape
    ho, wo = find_pooled_edge(h, size), find_pooled_edge(w, size)
    y, argmax = (new_image(x, c, ho, wo, dtype) for dtype in (x.dtype, torch.uint8))
    x_at_max = torch.empty_like(y)
    sizes = find_sizes(y, by_image=v.ndim == 3)
    _launch(_pool, (x, y, argmax, x_at_max, v), sizes, (h, w, ho, wo), SIZE=size)
    return y, argmax, x_at_max


def pool_fused(x: Tensor) -> tuple[Tensor, Tensor]:
    """Max-pool over windows of 2 x 2, and the index of the maximum in each."""
    _, c, h, w = x.shape
    y, argmax = (new_image(x, c, h // 2, w // 2, dtype) for dtype in (x.dtype, torch.uint8))
    sizes = find_sizes(y, by_image=False)
    _launch(_pool, (x, y, argmax, None, None), sizes, (h, w, h // 2, w // 2), SIZE=2)
    return y, argmax


@triton.jit
def _find_gradient(
    dy, argmax, n, h, w, c, ok, C, HO, WO, SIZE: tl.constexpr, WIDE: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The gradient of pixels through the pool: from one, two or four windows."""
    d = tl.zeros((BM, BC), tl.float32)
    for i in tl.static_range(SIZE - 1):
        for j in tl.static_range(SIZE - 1):
            row, column = (h + i) // 2, (w + j) // 2
            there = (row < HO) & (column < WO)
            if i == 1:
                there = there & (h % 2 == 1)
            if j == 1:
                there = there & (w % 2 == 1)
            o, _ = find_offsets((n * HO + row) * WO + column, c, 0, C, WIDE)
            there = there[:, None] & ok
            own = (h - 2 * row + SIZE - 2) * SIZE + w - 2 * column + SIZE - 2
            hit = tl.load(argmax + o, mask=there, other=255).to(tl.int32) == own[:, None]
            d += tl.where(hit, tl.load(dy + o, mask=there, other=0.0).to(tl.float32), 0.0)
    return d


@triton.jit
def _pool_back(
    dy, argmax, x, dx, v, u, M, C, R, H, W, HO, WO,
    SIZE: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The gradient of x: through the pool, the ReLU and the norm."""
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    n, h, w = tl.program_id(2) + m // (H * W), (m // W) % H, m % W
    o, ok = find_offsets(m, c, M, C, WIDE)
    o += find_first_pixel(M) * C
    d = _find_gradient(dy, argmax, n, h, w, c, ok, C, HO, WO, SIZE, WIDE, BM, BC)
    value = tl.load(x + o, mask=ok, other=0.0).to(tl.float32)
    d = tl.where(value * load_row(v, 2, c, C, R) + load_row(v, 3, c, C, R) > 0, d, 0.0)
    d = d * load_row(u, 2, c, C, R) + value * load_row(u, 3, c, C, R) + load_row(u, 4, c, C, R)
    tl.store(dx + o, d.to(dx.dtype.element_ty), mask=ok)


@triton.jit
def _pool_back_quads(
    dy, argmax, x, dx, v, u, M, C, R, HO, WO, WIDE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr
):
    """_pool_back of 2 HO x 2 WO pixels by quads: four windows of 3 x 3 reach the four pixels."""
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    h, w = (m // WO) % HO, m % WO
    o, ok = find_offsets(m, c, M, C, WIDE)
    o += find_first_pixel(M) * C
    ok01, ok10 = ok & (w + 1 < WO)[:, None], ok & (h + 1 < HO)[:, None]
    d00 = tl.load(dy + o, mask=ok, other=0.0).to(tl.float32)
    d01 = tl.load(dy + o + C, mask=ok01, other=0.0).to(tl.float32)
    d10 = tl.load(dy + o + WO * C, mask=ok10, other=0.0).to(tl.float32)
    d11 = tl.load(dy + o + (WO + 1) * C, mask=ok01 & ok10, other=0.0).to(tl.float32)
    a00 = tl.load(argmax + o, mask=ok, other=255)
    a01 = tl.load(argmax + o + C, mask=ok01, other=255)
    a10 = tl.load(argmax + o + WO * C, mask=ok10, other=255)
    a11 = tl.load(argmax + o + (WO + 1) * C, mask=ok01 & ok10, other=255)
    scale, shift = load_row(v, 2, c, C, R), load_row(v, 3, c, C, R)
    by, slope, const = load_row(u, 2, c, C, R), load_row(u, 3, c, C, R), load_row(u, 4, c, C, R)
    for p in tl.static_range(2):
        for q in tl.static_range(2):
            pixel = (2 * (m // WO) + p) * (2 * WO) + 2 * w + q
            to, _ = find_offsets(pixel, c, M, C, WIDE)
            to += find_first_pixel(4 * M) * C
            value = tl.load(x + to, mask=ok, other=0.0).to(tl.float32)
            d = tl.where(a00 == (p + 1) * 3 + q + 1, d00, 0.0)
            if q == 1:
                d += tl.where(a01 == (p + 1) * 3, d01, 0.0)
            if p == 1:
                d += tl.where(a10 == q + 1, d10, 0.0)
            if p + q == 2:
                d += tl.where(a11 == 0, d11, 0.0)
            d = tl.where(value * scale + shift > 0, d, 0.0) * by + value * slope + const
            tl.store(dx + to, d.to(dx.dtype.element_ty), mask=ok)


def pool_norm_back_fused(
    dy: Tensor,
    argmax: Tensor,
    x_at_max: Tensor,
    x: Tensor,
    v: Tensor,
    size: int,
    groups: list[int],
) -> tuple[Tensor, Tensor]:
    """The gradient of x, and u from the maxima alone: no other pixel gets a gradient."""
    dx, (h, w), (ho, wo) = torch.empty_like(x), x.shape[2:], dy.shape[2:]
    sums = sum_gradients(dy, x_at_max, v, RELU)
    if groups:
        u = finish_group_gradients(sums, v, groups, h * w)
    else:
        u = finish_gradients(sums, v, len(x) * h * w)
    images = (dy, argmax, x, dx, v, u)
    if size == 3 and (h, w) == (2 * ho, 2 * wo):
        _launch(_pool_back_quads, images, find_sizes(dy, by_image=bool(groups)), (ho, wo))
    else:
        sizes = find_sizes(x, by_image=bool(groups))
        _launch(_pool_back, images, sizes, (h, w, ho, wo), SIZE=size)
    return dx, u


def _launch(
    kernel: Any,
    tensors: tuple[Tensor | None, ...],
    sizes: NormSizes,
    edges: tuple[int, ...],
    **flags: int,
) -> None:
    """Launch a pooling kernel."""
    args = (*tensors, sizes.pixels, sizes.channels, sizes.row, *edges)
    flags["WIDE"] = max(tensor.numel() for tensor in tensors if tensor is not None) >= 2**31
    CHOICES.run(kernel, sizes.by_pixels, args, _POOL_TILES, **flags)


@triton.jit
def _unpool_back(
    dy, argmax, x, dx, v, u, M, C, R, H, W, HO, WO,
    ACT: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The gradient through activation and norm, stored at the maximum of each window of 2 x 2.

    The last window of a row or column also writes the zeros of an odd pixel after it.
    """
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    n, h, w = tl.program_id(2) + m // (HO * WO), (m // WO) % HO, m % WO
    o, ok = find_offsets(m, c, M, C, WIDE)
    o += find_first_pixel(M) * C
    d = tl.load(dy + o, mask=ok, other=0.0).to(tl.float32)
    value = tl.load(x + o, mask=ok, other=0.0).to(tl.float32)
    place = tl.load(argmax + o, mask=ok, other=255).to(tl.int32)
    d = activate_back(d, value * load_row(v, 2, c, C, R) + load_row(v, 3, c, C, R), ACT)
    d = d * load_row(u, 2, c, C, R) + value * load_row(u, 3, c, C, R) + load_row(u, 4, c, C, R)
    for p in tl.static_range(3):
        for q in tl.static_range(3):
            there = (2 * h + p < H) & (2 * w + q < W)
            if p == 2:
                there = there & (h == HO - 1)
            if q == 2:
                there = there & (w == WO - 1)
            to, _ = find_offsets((n * H + 2 * h + p) * W + 2 * w + q, c, 0, C, WIDE)
            own = tl.where(place == 2 * p + q, d, 0.0) if p < 2 and q < 2 else tl.zeros_like(d)
            tl.store(dx + to, own.to(dx.dtype.element_ty), mask=there[:, None] & ok)


def unpool_norm_back_fused(
    dy: Tensor,
    argmax: Tensor,
    x: Tensor,
    v: Tensor,
    u: Tensor,
    activation: int,
    edges: list[int],
) -> Tensor:
    """The gradient of the input of a pool that a norm and an activation follow."""
    dx = new_image(x, x.shape[1], edges[0], edges[1], x.dtype)
    sizes = find_sizes(x, by_image=v.ndim == 3)
    places = (*edges, *x.shape[2:])
    _launch(_unpool_back, (dy, argmax, x, dx, v, u), sizes, places, ACT=activation)
    return dx
