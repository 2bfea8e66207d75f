"""Partial sums added up, in order, by Triton: into a norm's vectors, or a weight's gradient.

One tile each, never measured: running statistics are updated once.
"""
# ruff: noqa: PLR0913, PLR0917  (kernels take sizes one by one)
# mypy: disable-error-code="no-untyped-def,assignment"

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.choices import CHOICES, make_tiles
from phalanx.mbconv.image_layout import new_floats

_TILES = make_tiles("BG BC", (64, 16, 4, 1))
_SUM_TILES = make_tiles("BR BC", (32, 64, 4, 1), (128, 32, 8, 1))


@triton.jit
def _add_groups(s, c, C, G, BG: tl.constexpr, BC: tl.constexpr):
    """The two sums of one norm from their partial rows."""
    first, second = tl.zeros((BG, BC), tl.float32), tl.zeros((BG, BC), tl.float32)
    for g0 in range(0, G, BG):
        g = g0 + tl.arange(0, BG)
        ok, place = (g < G)[:, None] & (c < C)[None, :], g[:, None] * C + c[None, :]
        first += tl.load(s + place, mask=ok, other=0.0)
        second += tl.load(s + G * C + place, mask=ok, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def store_back(v, u, dweight, dbias, c, okc, total, product, M, C):
    """Backward vectors and gradients from the sums of the gradient and of gradient * x."""
    mean, rstd = tl.load(v + c, mask=okc, other=0.0), tl.load(v + C + c, mask=okc, other=0.0)
    scale = tl.load(v + 2 * C + c, mask=okc, other=0.0)
    dgamma = (product - mean * total) * rstd
    slope = scale * rstd * dgamma / M
    tl.store(dweight + c, dgamma, mask=okc)
    tl.store(dbias + c, total, mask=okc)
    tl.store(u + c, scale, mask=okc)
    tl.store(u + C + c, -slope, mask=okc)
    tl.store(u + 2 * C + c, slope * mean - scale * total / M, mask=okc)


@triton.jit
def _update(running, c, okc, value, momentum):
    """Move a running statistic towards a batch's."""
    old = tl.load(running + c, mask=okc, other=0.0).to(tl.float32)
    new = old + momentum * (value - old)
    tl.store(running + c, new.to(running.dtype.element_ty), mask=okc)


@triton.jit(do_not_specialize=["M", "C", "G"])
def _finish_forward(
    s, weight, bias, running_mean, running_var, batches, v, M, C, G, eps, momentum,
    BG: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Forward vectors and running statistics from partial sums."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    okc = c < C
    total, square = _add_groups(s, c, C, G, BG, BC)
    mean = total / M
    var = tl.maximum(square / M - mean * mean, 0.0)
    rstd = 1 / tl.sqrt(var + eps)
    scale = tl.load(weight + c, mask=okc, other=0.0).to(tl.float32) * rstd
    shift = tl.load(bias + c, mask=okc, other=0.0).to(tl.float32) - mean * scale
    tl.store(v + c, mean, mask=okc)
    tl.store(v + C + c, rstd, mask=okc)
    tl.store(v + 2 * C + c, scale, mask=okc)
    tl.store(v + 3 * C + c, shift, mask=okc)
    _update(running_mean, c, okc, mean, momentum)
    _update(running_var, c, okc, var * (M / (M - 1)), momentum)
    if tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + 1)


@triton.jit(do_not_specialize=["M", "C", "G"])
def _finish_back(s, v, u, dweight, dbias, M, C, G, BG: tl.constexpr, BC: tl.constexpr):
    """Backward vectors and gradients from partial sums."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    total, product = _add_groups(s, c, C, G, BG, BC)
    store_back(v, u, dweight, dbias, c, c < C, total, product, M, C)


@triton.jit(do_not_specialize=["G", "R", "C"])
def _sum_groups(p, out, G, R, C, BR: tl.constexpr, BC: tl.constexpr):
    """out [C, R]: the sums of p [G, R, C] over G."""
    k, total = tl.program_id(0) * BC + tl.arange(0, BC), tl.zeros((BR, BC), tl.float32)
    okk = k < R * C
    for g0 in range(0, G, BR):
        g = g0 + tl.arange(0, BR)
        ok = (g < G)[:, None] & okk[None, :]
        total += tl.load(p + g[:, None] * (R * C) + k[None, :], mask=ok, other=0.0)
    tl.store(out + (k % C) * R + k // C, tl.sum(total, 0), mask=okk)


def finish_norm(
    sums: Tensor,
    affine: list[Tensor],
    running: list[Tensor],
    count: int,
    eps: float,
    momentum: float,
) -> Tensor:
    """`phalanx.mbconv.norms.finish_norm`."""
    _, groups, c = sums.shape
    v = new_floats(4, c, like=sums)
    args = (sums, *affine, *running, v, count, c, groups, eps, momentum)
    CHOICES.run(_finish_forward, lambda t: (triton.cdiv(c, t["BC"]),), args, _TILES)
    return v


def finish_norm_back(sums: Tensor, v: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """`phalanx.mbconv.norms.finish_norm_back`."""
    _, groups, c = sums.shape
    u, dweight, dbias = (new_floats(*shape, like=sums) for shape in ((3, c), (c,), (c,)))
    args = (sums, v, u, dweight, dbias, count, c, groups)
    CHOICES.run(_finish_back, lambda t: (triton.cdiv(c, t["BC"]),), args, _TILES)
    return u, dweight, dbias


def add_partials(partials: Tensor, columns: int) -> Tensor:
    """`phalanx.mbconv.norms.add_partials`."""
    groups, rows = len(partials), partials[0].numel() // columns
    out = torch.empty(columns, rows, device=partials.device)
    args = (partials, out, groups, rows, columns)
    CHOICES.run(_sum_groups, lambda t: (triton.cdiv(rows * columns, t["BC"]),), args, _SUM_TILES)
    return out
