"""The vectors of batch norm and group norm from partial sums over pixels, in Triton.

Partial sums are [2, G, C] for a batch norm, [2, G, images, C] for a group norm; each of the G
programs that computed them wrote a row.
"""
# ruff: noqa: PLR0913, PLR0917  (kernels take pointers and sizes one by one)
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.batch_norm import NONE
from phalanx.kernels.choices import CHOICES, Tile, make_tiles
from phalanx.kernels.image_layout import count_rows
from phalanx.kernels.norm_passes_fused import find_offsets, sum_gradients, sum_statistics

# one tile each: timing would repeat a kernel that updates running statistics
_TILES = make_tiles("BG BC", (64, 16, 4, 3))
_LONG_TILES = make_tiles("BG BC", (256, 16, 8, 3))
_LONG = 128  # rows of partial sums
_IMAGE_TILES = make_tiles("", (4, 3))


# --- batch norm ---


@triton.jit
def _add_partials(s, c, C, G, BG: tl.constexpr, BC: tl.constexpr):
    """Two sums, each over G rows of partial sums."""
    first, second = tl.zeros((BG, BC), tl.float32), tl.zeros((BG, BC), tl.float32)
    for g0 in range(0, G, BG):
        o, ok = find_offsets(g0 + tl.arange(0, BG), c, G, C, False)
        first += tl.load(s + o, mask=ok, other=0.0)
        second += tl.load(s + G * C + o, mask=ok, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def update_running(running_mean, running_var, batches, c, mean, var, M, C, momentum):
    """Update the running statistics as torch does."""
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
    """v and the running statistics from partial sums of x, or of x - first if that is given."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    ok = c < C
    total, square = _add_partials(s, c, C, G, BG, BC)
    mean = total / M
    var = square / M - mean * mean
    var = tl.where(var < 0, 0.0, var)
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
        update_running(running_mean, running_var, batches, c, mean, var, M, C, momentum)


@triton.jit
def store_backward_vectors(v, u, c, C, M, dbeta, product, CENTRED: tl.constexpr):
    """u from the sums of the gradient and, CENTRED, of gradient * (x - mean), else gradient * x."""
    ok = c < C
    mean, rstd = tl.load(v + c, mask=ok, other=0.0), tl.load(v + C + c, mask=ok, other=0.0)
    scale = tl.load(v + 2 * C + c, mask=ok, other=0.0)
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
def _finish_gradients(s, v, u, M, C, G, CENTRED: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr):
    """u from partial sums."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    dbeta, product = _add_partials(s, c, C, G, BG, BC)
    store_backward_vectors(v, u, c, C, M, dbeta, product, CENTRED)


def _find_tiles(rows: int) -> list[Tile]:
    """The tiles for that many rows of partial sums."""
    return _LONG_TILES if rows > _LONG else _TILES


def norm_vectors_fused(
    x: Tensor, affine: list[Tensor], running: list[Tensor], eps: float, momentum: float
) -> Tensor:
    """v of x; updates the running statistics."""
    sums = sum_statistics(x, by_image=False)
    return _finish(sums, x, affine, running, count_rows(x), eps, momentum)


def finish_vectors_fused(
    sums: Tensor,
    affine: list[Tensor],
    running: list[Tensor],
    count: int,
    eps: float,
    momentum: float,
) -> Tensor:
    """v from partial sums."""
    return _finish(sums, None, affine, running, count, eps, momentum)


def _finish(
    sums: Tensor,
    first: Tensor | None,
    affine: list[Tensor],
    running: list[Tensor],
    count: int,
    eps: float,
    momentum: float,
) -> Tensor:
    """v from partial sums of x, or of x minus its first pixel if `first` is given."""
    _, rows, channels = sums.shape
    v = torch.empty((4, channels), device=sums.device)
    args = (sums, first, *affine, *(running or (None, None, None)), v, count, channels, rows)
    args, tiles = (*args, eps, momentum), _find_tiles(rows)
    grid = lambda tile: (triton.cdiv(channels, tile["BC"]),)  # noqa: E731
    CHOICES.run(_finish_statistics, grid, args, tiles, RUNNING=bool(running))
    return v


def reduce_norm_fused(
    dy: Tensor, x: Tensor, v: Tensor, activation: int, factor: Tensor | None
) -> Tensor:
    """u of a batch norm."""
    sums = sum_gradients(dy, x, v, activation, factor=factor)
    return finish_gradients(sums, v, count_rows(x))


def reduce_norm_gated_fused(
    dy: Tensor, x: Tensor, v: Tensor, gate: Tensor, second: Tensor | None, factor: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gated gradient, and u."""
    gated = torch.empty_like(dy)
    sums = sum_gradients(dy, x, v, NONE, factor=factor, second=second, gate=gate, out=gated)
    return gated, finish_gradients(sums, v, count_rows(x))


def finish_back_fused(sums: Tensor, v: Tensor, count: int) -> Tensor:
    """u from partial sums of the gradient and of gradient * x."""
    return finish_gradients(sums, v, count, centred=False)


def finish_gradients(sums: Tensor, v: Tensor, count: int, *, centred: bool = True) -> Tensor:
    """u from partial sums."""
    _, rows, channels = sums.shape
    u = torch.empty((5, channels), device=sums.device)
    args = (sums, v, u, count, channels, rows)
    grid = lambda tile: (triton.cdiv(channels, tile["BC"]),)  # noqa: E731
    CHOICES.run(_finish_gradients, grid, args, _find_tiles(rows), CENTRED=centred)
    return u


# --- group norm: one program per image, with its channels as a matrix [groups, channels] ---


@triton.jit
def _find_channels(GROUPS, STEP, EACH, BETWEEN, BG: tl.constexpr, BC: tl.constexpr):
    """The channels of each group, [groups, channels of a group], and the mask of valid ones."""
    g, j = tl.arange(0, BG), tl.arange(0, BC)
    return g[:, None] * STEP + j[None, :] * BETWEEN, (g < GROUPS)[:, None] & (j < EACH)[None, :]


@triton.jit
def _add_image_partials(s, c, ok, C, R, G, BG: tl.constexpr, BC: tl.constexpr):
    """Two sums for each channel of an image, each over G rows of partial sums."""
    first, second = tl.zeros((BG, BC), tl.float32), tl.zeros((BG, BC), tl.float32)
    s += tl.program_id(0) * C
    for g in range(G):
        first += tl.load(s + g * R + c, mask=ok, other=0.0)
        second += tl.load(s + (G + g) * R + c, mask=ok, other=0.0)
    return first, second


@triton.jit
def _finish_group_statistics(
    s, x, weight, bias, v, M, C, R, G, GROUPS, STEP, EACH, BETWEEN, eps,
    BG: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """v of an image from partial sums of x minus its first pixel."""
    n = tl.program_id(0)
    c, ok = _find_channels(GROUPS, STEP, EACH, BETWEEN, BG, BC)
    total, square = _add_image_partials(s, c, ok, C, R, G, BG, BC)
    own = total / M
    spread = square - total * own
    own += tl.load(x + n.to(tl.int64) * M * C + c, mask=ok, other=0.0).to(tl.float32)
    mean = tl.sum(tl.where(ok, own, 0.0), 1)[:, None] / EACH
    apart = tl.where(ok, own - mean, 0.0)
    var = tl.sum(tl.where(ok, spread, 0.0) + M * apart * apart, 1)[:, None] / (EACH * M)
    rstd = 1 / tl.sqrt_rn(tl.where(var < 0, 0.0, var) + eps)
    scale = tl.load(weight + c, mask=ok, other=0.0).to(tl.float32) * rstd
    shift = tl.load(bias + c, mask=ok, other=0.0).to(tl.float32) - mean * scale
    v += n * C + c
    tl.store(v, tl.broadcast_to(mean, (BG, BC)), mask=ok)
    tl.store(v + R, tl.broadcast_to(rstd, (BG, BC)), mask=ok)
    tl.store(v + 2 * R, scale, mask=ok)
    tl.store(v + 3 * R, shift, mask=ok)


@triton.jit
def _finish_group_gradients(
    s, v, u, M, C, R, G, GROUPS, STEP, EACH, BETWEEN, BG: tl.constexpr, BC: tl.constexpr
):
    """u of an image from partial sums."""
    c, ok = _find_channels(GROUPS, STEP, EACH, BETWEEN, BG, BC)
    dbeta, product = _add_image_partials(s, c, ok, C, R, G, BG, BC)
    v += tl.program_id(0) * C + c
    mean, rstd = tl.load(v, mask=ok, other=0.0), tl.load(v + R, mask=ok, other=0.0)
    scale = tl.load(v + 2 * R, mask=ok, other=0.0)
    dgamma = product * rstd
    slope = rstd * tl.sum(scale * dgamma, 1)[:, None] / (EACH * M)
    u += tl.program_id(0) * C + c
    tl.store(u, dgamma, mask=ok)
    tl.store(u + R, dbeta, mask=ok)
    tl.store(u + 2 * R, scale, mask=ok)
    tl.store(u + 3 * R, -slope, mask=ok)
    through = tl.sum(scale * dbeta, 1)[:, None] / (EACH * M)
    tl.store(u + 4 * R, slope * mean - through, mask=ok)


def group_norm_vectors_fused(
    x: Tensor, affine: list[Tensor], groups: list[int], eps: float
) -> Tensor:
    """v of a group norm of x."""
    (n, c), sums = x.shape[:2], sum_statistics(x, by_image=True)
    v = torch.empty((4, n, c), device=x.device)
    pixels = x.numel() // n // c
    args = (sums, x, *affine, v, pixels, c, n * c, sums.shape[1], *groups, eps)
    flags = _find_blocks(groups)
    CHOICES.run(_finish_group_statistics, lambda _: (n,), args, _IMAGE_TILES, **flags)
    return v


def finish_group_gradients(sums: Tensor, v: Tensor, groups: list[int], pixels: int) -> Tensor:
    """u of a group norm from partial sums; `pixels` of an image."""
    _, n, c = v.shape
    u = torch.empty((5, n, c), device=v.device)
    args = (sums, v, u, pixels, c, n * c, sums.shape[1], *groups)
    flags = _find_blocks(groups)
    CHOICES.run(_finish_group_gradients, lambda _: (n,), args, _IMAGE_TILES, **flags)
    return u


def _find_blocks(groups: list[int]) -> dict[str, int]:
    """Block sizes: powers of two that cover all groups, and the channels of one."""
    number, _, each, _ = groups
    return {"BG": triton.next_power_of_2(number), "BC": triton.next_power_of_2(each)}


def reduce_group_norm_fused(
    dy: Tensor, x: Tensor, v: Tensor, groups: list[int], activation: int, factor: Tensor | None
) -> Tensor:
    """u of a group norm."""
    sums = sum_gradients(dy, x, v, activation, factor=factor)
    return finish_group_gradients(sums, v, groups, count_rows(x[:1]))


def reduce_group_norm_gated_fused(
    dy: Tensor,
    x: Tensor,
    v: Tensor,
    groups: list[int],
    gate: Tensor,
    second: Tensor | None,
    factor: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The gated gradient, and u of a group norm."""
    gated = torch.empty_like(dy)
    sums = sum_gradients(dy, x, v, NONE, factor=factor, second=second, gate=gate, out=gated)
    return gated, finish_group_gradients(sums, v, groups, count_rows(x[:1]))
