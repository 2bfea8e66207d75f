"""phalanx.fused.stem_ops in Triton."""
# ruff: noqa: PLR0913, PLR0917  (kernels take pointers and sizes one by one)
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.fused.stem_ops import find_arranged_edges, find_pooled_edge
from phalanx.kernels.batch_norm import RELU
from phalanx.kernels.batch_norm_fused import (
    by_pixels,
    finish_gradients,
    load_row,
    norm_tiles,
    place,
    sum_gradients,
)
from phalanx.kernels.choices import CHOICES, make_tiles

_IMAGE_TILES = make_tiles("B", (256, 4, 3), (1024, 4, 3))


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
    out = _new_image(x, 16 if size else 4, ho, wo, half)
    pixels = n * ho * wo
    args = (x, out, n, h, w, ho, wo, *x.stride(), size // 2 + 1)
    grid = lambda tile: (triton.cdiv(pixels, tile["B"]),)  # noqa: E731
    CHOICES.run(_arrange, grid, args, _IMAGE_TILES, QUADS=bool(size))
    return out


def _new_image(x: Tensor, channels: int, height: int, width: int, dtype: torch.dtype) -> Tensor:
    """An empty image in channels_last memory."""
    empty = torch.empty((len(x), height, width, channels), device=x.device, dtype=dtype)
    return empty.permute(0, 3, 1, 2)


# --- pool ---


@triton.jit
def _pool(
    x, y, at, won, v, M, C, H, W, HO, WO,
    SIZE: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Normalise + ReLU + max-pool; a value that is no number wins."""
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    n, h, w = m // (HO * WO), (m // WO) % HO, m % WO
    scale, shift = load_row(v, 2, c, C), load_row(v, 3, c, C)
    best, number = tl.full((BM, BC), -1.0, tl.float32), tl.zeros((BM, BC), tl.int32)
    winner = tl.zeros((BM, BC), tl.float32)
    for i in tl.static_range(SIZE):
        for j in tl.static_range(SIZE):
            row, column = 2 * h + i - (SIZE - 2), 2 * w + j - (SIZE - 2)
            inside = (m < M) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
            o, ok = place((n * H + row) * W + column, c, M * H * W, C, WIDE)
            ok = inside[:, None] & (c < C)[None, :]
            raw = tl.load(x + o, mask=ok, other=0.0).to(tl.float32)
            value = raw * scale + shift
            value = tl.where(ok, tl.where(value < 0, 0.0, value), -1.0)
            better = (value > best) | (value != value)  # noqa: PLR0124 - only NaN does
            number = tl.where(better, i * SIZE + j, number)
            winner = tl.where(better, raw, winner)
            best = tl.where(better, value, best)
    o, ok = place(m, c, M, C, WIDE)
    tl.store(y + o, best.to(y.dtype.element_ty), mask=ok)
    tl.store(at + o, number.to(tl.uint8), mask=ok)
    tl.store(won + o, winner.to(won.dtype.element_ty), mask=ok)


def pool_norm_fused(x: Tensor, v: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise + ReLU + max-pool, which pixel of each window won, and its x."""
    n, c, h, w = x.shape
    ho, wo = find_pooled_edge(h, size), find_pooled_edge(w, size)
    y, at = (_new_image(x, c, ho, wo, dtype) for dtype in (x.dtype, torch.uint8))
    won, pixels = torch.empty_like(y), n * ho * wo
    args = (x, y, at, won, v, pixels, c, h, w, ho, wo)
    flags = {"SIZE": size, "WIDE": x.numel() >= 2**31}
    CHOICES.run(_pool, by_pixels(pixels, c), args, norm_tiles(c), **flags)
    return y, at, won


@triton.jit
def _pool_back(
    dy, at, x, dx, v, u, M, C, H, W, HO, WO,
    SIZE: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The gradient of x: what reaches each pixel from one, two or four windows, then the norm's."""
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    n, h, w = m // (H * W), (m // W) % H, m % W
    d = tl.zeros((BM, BC), tl.float32)
    for i in tl.static_range(SIZE - 1):
        for j in tl.static_range(SIZE - 1):
            row, column = (h + i) // 2, (w + j) // 2
            there = (m < M) & (row < HO) & (column < WO)
            if i == 1:
                there = there & (h % 2 == 1)
            if j == 1:
                there = there & (w % 2 == 1)
            o, ok = place((n * HO + row) * WO + column, c, M, C, WIDE)
            ok = there[:, None] & (c < C)[None, :]
            own = (h - 2 * row + SIZE - 2) * SIZE + w - 2 * column + SIZE - 2
            hit = tl.load(at + o, mask=ok, other=255).to(tl.int32) == own[:, None]
            d += tl.where(hit, tl.load(dy + o, mask=ok, other=0.0).to(tl.float32), 0.0)
    o, ok = place(m, c, M, C, WIDE)
    value = tl.load(x + o, mask=ok, other=0.0).to(tl.float32)
    d = tl.where(value * load_row(v, 2, c, C) + load_row(v, 3, c, C) > 0, d, 0.0)
    d = d * load_row(u, 2, c, C) + value * load_row(u, 3, c, C) + load_row(u, 4, c, C)
    tl.store(dx + o, d.to(dx.dtype.element_ty), mask=ok)


@triton.jit
def _pool_back_quads(
    dy, at, x, dx, v, u, M, C, HO, WO, WIDE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr
):
    """_pool_back of 2 HO x 2 WO pixels by quads: four windows of 3 x 3 reach the four pixels."""
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    h, w = (m // WO) % HO, m % WO
    o, ok = place(m, c, M, C, WIDE)
    ok01, ok10 = ok & (w + 1 < WO)[:, None], ok & (h + 1 < HO)[:, None]
    ok11 = ok01 & ok10
    d00 = tl.load(dy + o, mask=ok, other=0.0).to(tl.float32)
    d01 = tl.load(dy + o + C, mask=ok01, other=0.0).to(tl.float32)
    d10 = tl.load(dy + o + WO * C, mask=ok10, other=0.0).to(tl.float32)
    d11 = tl.load(dy + o + (WO + 1) * C, mask=ok11, other=0.0).to(tl.float32)
    a00 = tl.load(at + o, mask=ok, other=255)
    a01 = tl.load(at + o + C, mask=ok01, other=255)
    a10 = tl.load(at + o + WO * C, mask=ok10, other=255)
    a11 = tl.load(at + o + (WO + 1) * C, mask=ok11, other=255)
    scale, shift = load_row(v, 2, c, C), load_row(v, 3, c, C)
    by, slope, const = load_row(u, 2, c, C), load_row(u, 3, c, C), load_row(u, 4, c, C)
    for p in tl.static_range(2):
        for q in tl.static_range(2):
            pixel = (2 * (m // WO) + p) * (2 * WO) + 2 * w + q
            to, _ = place(pixel, c, M, C, WIDE)
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
    dy: Tensor, at: Tensor, won: Tensor, x: Tensor, v: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """The gradient of x, and u from the winners alone: no other pixel gets a gradient."""
    (n, c, h, w), (ho, wo), dx = x.shape, dy.shape[2:], torch.empty_like(x)
    pixels, pooled, wide = n * h * w, n * ho * wo, x.numel() >= 2**31
    u = finish_gradients(sum_gradients((dy, None, won, None, None), v, None, RELU), v, pixels)
    if size == 3 and (h, w) == (2 * ho, 2 * wo):
        quads = (dy, at, x, dx, v, u, pooled, c, ho, wo)
        CHOICES.run(_pool_back_quads, by_pixels(pooled, c), quads, norm_tiles(c), WIDE=wide)
    else:
        args = (dy, at, x, dx, v, u, pixels, c, h, w, ho, wo)
        flags = {"SIZE": size, "WIDE": wide}
        CHOICES.run(_pool_back, by_pixels(pixels, c), args, norm_tiles(c), **flags)
    return dx, u
