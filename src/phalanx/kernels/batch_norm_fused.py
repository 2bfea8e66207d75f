"""phalanx.kernels.batch_norm in Triton: each pass reads every tensor once.

Sums are made in two kernels: a number of programs add up rows, then a second kernel adds their
partial sums in a fixed order. WIDE: offsets need 64 bits.
"""
# ruff: noqa: PLR0913, PLR0917  (kernels take pointers and sizes one by one)
# mypy: disable-error-code="no-untyped-def"

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.choices import CHOICES, Tile, make_tiles

_NARROW_TILES = make_tiles("BM BC", (64, 32, 4, 3), (128, 32, 4, 3))
_TILES = make_tiles(
    "BM BC", (32, 64, 4, 3), (64, 64, 4, 3), (128, 64, 8, 3), (16, 128, 4, 3), (32, 128, 8, 3)
)
_FINISH_TILES = make_tiles("BG BC", (64, 16, 4, 3))
_LONG_FINISH_TILES = make_tiles("BG BC", (256, 16, 8, 3))
_MULTIPROCESSORS = 132  # of an H100 or H200


@triton.jit
def place(m, c, M, C, WIDE: tl.constexpr):
    """Offsets of the pixels m and channels c, and which of them exist."""
    if WIDE:
        m = m.to(tl.int64)
    return m[:, None] * C + c[None, :], (m < M)[:, None] & (c < C)[None, :]


@triton.jit
def load_row(v, row, c, C):
    """One row of a buffer of vectors, as [1, channels]."""
    return tl.load(v + row * C + c, mask=c < C, other=0.0)[None, :]


@triton.jit
def load_factor(factor, m, M, PIXELS):
    """The number of each pixel's image, as [pixels, 1]."""
    return tl.load(factor + m // PIXELS, mask=m < M, other=0.0).to(tl.float32)[:, None]


@triton.jit
def activate(value, ACT: tl.constexpr):
    """The activation; what is no number stays so."""
    if (ACT == 1) | (ACT == 3):
        value = tl.where(value < 0, 0.0, value)
    if ACT == 2:
        value = value * tl.sigmoid(value)
    if ACT == 3:
        value = tl.where(value > 6, 6.0, value)
    return value


@triton.jit
def activate_back(d, value, ACT: tl.constexpr):
    """The gradient of the activation's input `value`, from that of its output."""
    if ACT == 1:
        d = tl.where(value > 0, d, 0.0)
    if ACT == 2:
        gate = tl.sigmoid(value)
        d = d * gate * (1 + value * (1 - gate))
    if ACT == 3:
        d = tl.where((value > 0) & (value < 6), d, 0.0)
    return d


@triton.jit
def unpack_signs(packed, BM: tl.constexpr, BC: tl.constexpr):
    """What phalanx.kernels.batch_norm.pack_signs packed, as 0 and 1."""
    packed = tl.reshape(packed.to(tl.int32), (BM, BC // 64, 1, 8))
    return tl.reshape((packed >> tl.arange(0, 8)[None, None, :, None]) & 1, (BM, BC))


# --- forward ---


@triton.jit
def _sum_statistics(x, s, M, C, G, WIDE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """Partial sums of x and x * x, one row for each of G programs.

    Of x less its first pixel: the variance is else a small difference of large numbers.
    """
    c, g = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1)
    first = load_row(x, 0, c, C).to(tl.float32)
    total, square = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    for r in range(g * BM, M, G * BM):
        o, ok = place(r + tl.arange(0, BM), c, M, C, WIDE)
        value = tl.load(x + o, mask=ok, other=0.0).to(tl.float32)
        value = tl.where(ok, value - first, 0.0)
        total += value
        square += value * value
    tl.store(s + g * C + c, tl.sum(total, 0), mask=c < C)
    tl.store(s + (G + g) * C + c, tl.sum(square, 0), mask=c < C)


@triton.jit
def add_partials(s, c, C, G, BG: tl.constexpr, BC: tl.constexpr):
    """Two sums from their partial rows."""
    first, second = tl.zeros((BG, BC), tl.float32), tl.zeros((BG, BC), tl.float32)
    for g0 in range(0, G, BG):
        o, ok = place(g0 + tl.arange(0, BG), c, G, C, False)
        first += tl.load(s + o, mask=ok, other=0.0)
        second += tl.load(s + G * C + o, mask=ok, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def _update_running(running_mean, running_var, batches, c, mean, var, M, C, momentum):
    """The running statistics, as torch has them."""
    ok = c < C
    old = tl.load(running_mean + c, mask=ok, other=0.0).to(tl.float32)
    value = old + momentum * (mean - old)
    tl.store(running_mean + c, value.to(running_mean.dtype.element_ty), mask=ok)
    old = tl.load(running_var + c, mask=ok, other=0.0).to(tl.float32)
    unbiased = var * (M / tl.maximum(M - 1, 1))
    value = old + momentum * (unbiased - old)
    tl.store(running_var + c, value.to(running_var.dtype.element_ty), mask=ok)
    if tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + 1)


@triton.jit
def _finish_statistics(
    s, first, weight, bias, running_mean, running_var, batches, v, M, C, G, eps, momentum,
    RUNNING: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """v and the running statistics from partial sums of x less `first`, where that is given."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    ok = c < C
    total, square = add_partials(s, c, C, G, BG, BC)
    mean = total / M
    var = tl.maximum(square / M - mean * mean, 0.0)
    if first is not None:
        mean += tl.load(first + c, mask=ok, other=0.0).to(tl.float32)
    rstd = 1 / tl.sqrt_rn(var + eps)
    scale = tl.load(weight + c, mask=ok, other=0.0).to(tl.float32) * rstd
    shift = tl.load(bias + c, mask=ok, other=0.0).to(tl.float32) - mean * scale
    tl.store(v + c, mean, mask=ok)
    tl.store(v + C + c, rstd, mask=ok)
    tl.store(v + 2 * C + c, scale, mask=ok)
    tl.store(v + 3 * C + c, shift, mask=ok)
    if RUNNING:
        _update_running(running_mean, running_var, batches, c, mean, var, M, C, momentum)


@triton.jit
def _apply(
    x, residual, residual_v, factor, v, y, M, C, PIXELS,
    ACT: tl.constexpr, LAST: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Normalise, with factor, residual and activation; LAST: the residual is added last."""
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    o, ok = place(m, c, M, C, WIDE)
    value = tl.load(x + o, mask=ok, other=0.0).to(tl.float32)
    value = value * load_row(v, 2, c, C) + load_row(v, 3, c, C)
    if LAST:
        value = activate(value, ACT)
    if factor is not None:
        value *= load_factor(factor, m, M, PIXELS)
    if residual is not None:
        added = tl.load(residual + o, mask=ok, other=0.0).to(tl.float32)
        if residual_v is not None:
            added = added * load_row(residual_v, 2, c, C) + load_row(residual_v, 3, c, C)
        value += added
    if not LAST:
        value = activate(value, ACT)
    tl.store(y + o, value.to(y.dtype.element_ty), mask=ok)


# --- backward ---


@triton.jit
def _sum_gradients(
    dy, second, x, gate, factor, v, out, s, M, C, G, PIXELS,
    ACT: tl.constexpr, SIGNS: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Partial sums of the gradient before the activation, and of it times x - mean.

    With a gate, which is an output or its SIGNS, the gradient that passes it is written as well.
    """
    c, g = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1)
    mean, scale, shift = load_row(v, 0, c, C), load_row(v, 2, c, C), load_row(v, 3, c, C)
    total, product = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    for r in range(g * BM, M, G * BM):
        m = r + tl.arange(0, BM)
        o, ok = place(m, c, M, C, WIDE)
        d = tl.load(dy + o, mask=ok, other=0.0).to(tl.float32)
        value = tl.load(x + o, mask=ok, other=0.0).to(tl.float32)
        if second is not None:
            d += tl.load(second + o, mask=ok, other=0.0).to(tl.float32)
        if gate is None:
            d = activate_back(d, value * scale + shift, ACT)
        elif SIGNS:
            b = tl.program_id(0) * (BC // 8) + tl.arange(0, BC // 8)
            at, there = place(m, b, M, C // 8, WIDE)
            packed = tl.load(gate + at, mask=there, other=0)
            d = tl.where(unpack_signs(packed, BM, BC) > 0, d, 0.0)
        else:
            d = tl.where(tl.load(gate + o, mask=ok, other=0.0) > 0, d, 0.0)
        if out is not None:
            tl.store(out + o, d.to(out.dtype.element_ty), mask=ok)
        if factor is not None:
            d *= load_factor(factor, m, M, PIXELS)
        total += d
        product += d * (value - mean)
    tl.store(s + g * C + c, tl.sum(total, 0), mask=c < C)
    tl.store(s + (G + g) * C + c, tl.sum(product, 0), mask=c < C)


@triton.jit
def _finish_gradients(s, v, u, M, C, G, CENTRED: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr):
    """u from partial sums; CENTRED: of gradient * (x - mean), else of gradient * x."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    ok = c < C
    mean, rstd = tl.load(v + c, mask=ok, other=0.0), tl.load(v + C + c, mask=ok, other=0.0)
    scale = tl.load(v + 2 * C + c, mask=ok, other=0.0)
    dbeta, product = add_partials(s, c, C, G, BG, BC)
    if not CENTRED:
        product -= mean * dbeta
    dgamma = product * rstd
    slope = scale * rstd * dgamma / M
    tl.store(u + c, dgamma, mask=ok)
    tl.store(u + C + c, dbeta, mask=ok)
    tl.store(u + 2 * C + c, scale, mask=ok)
    tl.store(u + 3 * C + c, -slope, mask=ok)
    tl.store(u + 4 * C + c, slope * mean - scale * dbeta / M, mask=ok)


@triton.jit
def _apply_back(
    dy, x, factor, v, u, dx, M, C, PIXELS,
    ACT: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The gradient of a norm's input."""
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    o, ok = place(m, c, M, C, WIDE)
    d = tl.load(dy + o, mask=ok, other=0.0).to(tl.float32)
    value = tl.load(x + o, mask=ok, other=0.0).to(tl.float32)
    if ACT != 0:
        d = activate_back(d, value * load_row(v, 2, c, C) + load_row(v, 3, c, C), ACT)
    if factor is not None:
        d *= load_factor(factor, m, M, PIXELS)
    d = d * load_row(u, 2, c, C) + value * load_row(u, 3, c, C) + load_row(u, 4, c, C)
    tl.store(dx + o, d.to(dx.dtype.element_ty), mask=ok)


# --- how they are launched ---


def norm_tiles(channels: int) -> list[Tile]:
    """Tiles of pixels and channels, none much wider than the layer."""
    if channels <= 32:
        return _NARROW_TILES
    return [tile for tile in _TILES if tile["BC"] <= max(64, channels)]


def count_groups(pixels: int, channels: int) -> int:
    """Programs that share the pixels of a sum."""
    most = _MULTIPROCESSORS * 8 * 64 // max(channels, 64)
    return max(1, min(most, triton.cdiv(pixels, 128)))


def by_channels(channels: int, groups: int) -> Callable[[Tile], tuple[int, ...]]:
    """The grid of a sum over pixels."""
    return lambda tile: (triton.cdiv(channels, tile["BC"]), groups)


def by_pixels(pixels: int, channels: int) -> Callable[[Tile], tuple[int, ...]]:
    """The grid of what is done to each number."""
    return lambda tile: (triton.cdiv(pixels, tile["BM"]), triton.cdiv(channels, tile["BC"]))


def find_sizes(x: Tensor) -> tuple[int, int, int, bool]:
    """Pixels, channels, pixels of an image, and whether offsets need 64 bits."""
    channels = x.shape[1]
    pixels = x.numel() // channels
    return pixels, channels, pixels // len(x), x.numel() >= 2**31


def new_floats(*shape: int, like: Tensor) -> Tensor:
    """An empty float32 tensor."""
    return torch.empty(shape, device=like.device)


def _finish_tiles(groups: int) -> list[Tile]:
    """One tile: a kernel that updates statistics must not be repeated to be measured."""
    return _LONG_FINISH_TILES if groups > 128 else _FINISH_TILES


def norm_vectors_fused(
    x: Tensor, affine: list[Tensor], running: list[Tensor], eps: float, momentum: float
) -> Tensor:
    """v of x, with the running statistics updated."""
    pixels, channels, _, wide = find_sizes(x)
    groups = count_groups(pixels, channels)
    sums = new_floats(2, groups, channels, like=x)
    args = (x, sums, pixels, channels, groups)
    grid = by_channels(channels, groups)
    CHOICES.run(_sum_statistics, grid, args, norm_tiles(channels), WIDE=wide)
    return _finish(sums, x, affine, running, (pixels, eps, momentum))


def finish_vectors_fused(
    sums: Tensor,
    affine: list[Tensor],
    running: list[Tensor],
    count: int,
    eps: float,
    momentum: float,
) -> Tensor:
    """v from partial sums."""
    return _finish(sums, None, affine, running, (count, eps, momentum))


def _finish(
    sums: Tensor,
    first: Tensor | None,
    affine: list[Tensor],
    running: list[Tensor],
    sizes: tuple[int, float, float],
) -> Tensor:
    """v from partial sums of x less its first pixel."""
    (count, eps, momentum), (_, groups, channels) = sizes, sums.shape
    v = new_floats(4, channels, like=sums)
    args = (sums, first, *affine, *(running or (None, None, None)), v, count, channels, groups)
    args, tiles = (*args, eps, momentum), _finish_tiles(groups)
    CHOICES.run(_finish_statistics, by_channels(channels, 1), args, tiles, RUNNING=bool(running))
    return v


def apply_norm_fused(
    x: Tensor, v: Tensor, activation: int, added: tuple[Tensor | None, ...], *, last: bool
) -> Tensor:
    """The norm's output, with residual, the residual's v, factor, and activation."""
    (pixels, channels, each, wide), y = find_sizes(x), torch.empty_like(x)
    args = (x, *added, v, y, pixels, channels, each)
    grid, tiles = by_pixels(pixels, channels), norm_tiles(channels)
    CHOICES.run(_apply, grid, args, tiles, ACT=activation, LAST=last, WIDE=wide)
    return y


def reduce_norm_fused(
    dy: Tensor, x: Tensor, v: Tensor, activation: int, factor: Tensor | None
) -> Tensor:
    """u of a norm."""
    sums = sum_gradients((dy, None, x, None, factor), v, None, activation)
    return finish_gradients(sums, v, x.numel() // x.shape[1])


def reduce_norm_gated_fused(
    dy: Tensor,
    x: Tensor,
    v: Tensor,
    gate: Tensor,
    second: Tensor | None,
    factor: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The gradient that passes the gate, and u."""
    out = torch.empty_like(dy)
    sums = sum_gradients((dy, second, x, gate, factor), v, out, 0)
    return out, finish_gradients(sums, v, x.numel() // x.shape[1])


def sum_gradients(
    tensors: tuple[Tensor | None, ...], v: Tensor, out: Tensor | None, activation: int
) -> Tensor:
    """Partial sums of the gradient, second gradient, input, gate and factor of a norm."""
    _, _, x, gate, _ = tensors
    assert x is not None
    pixels, channels, each, wide = find_sizes(x)
    groups = count_groups(pixels, channels)
    sums = new_floats(2, groups, channels, like=x)
    args = (*tensors, v, out, sums, pixels, channels, groups, each)
    signs = gate is not None and gate.dtype == torch.uint8
    grid, tiles = by_channels(channels, groups), norm_tiles(channels)
    CHOICES.run(_sum_gradients, grid, args, tiles, ACT=activation, SIGNS=signs, WIDE=wide)
    return sums


def finish_back_fused(sums: Tensor, v: Tensor, count: int) -> Tensor:
    """u from partial sums of the gradient and of gradient * x."""
    return finish_gradients(sums, v, count, centred=False)


def finish_gradients(sums: Tensor, v: Tensor, count: int, *, centred: bool = True) -> Tensor:
    """u from partial sums."""
    _, groups, channels = sums.shape
    u = new_floats(5, channels, like=sums)
    args = (sums, v, u, count, channels, groups)
    grid, tiles = by_channels(channels, 1), _finish_tiles(groups)
    CHOICES.run(_finish_gradients, grid, args, tiles, CENTRED=centred)
    return u


def apply_norm_back_fused(
    dy: Tensor, x: Tensor, v: Tensor, u: Tensor, activation: int, factor: Tensor | None
) -> Tensor:
    """The gradient of a norm's input."""
    (pixels, channels, each, wide), dx = find_sizes(x), torch.empty_like(x)
    args = (dy, x, factor, v, u, dx, pixels, channels, each)
    grid, tiles = by_pixels(pixels, channels), norm_tiles(channels)
    CHOICES.run(_apply_back, grid, args, tiles, ACT=activation, WIDE=wide)
    return dx
