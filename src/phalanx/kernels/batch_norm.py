"""Training-mode batch norm on channels_last memory, as the separate passes that networks combine.

Forward: `norm_vectors` returns v = [mean, rstd, scale, shift] of each channel, from which
`apply_norm` computes activation(x * scale + shift + residual). Backward: `reduce_norm` returns
u = [dgamma, dbeta, a, b, c], and `apply_norm_back` the gradient of x, a * gradient + b * x + c. A
`factor` is one number per image (drop-path): it scales the norm's output before the residual is
added.

`apply_norm` and `apply_norm_back` take the vectors of phalanx.kernels.group_norm as well.

All sums are float32. `x` is [N, C, H, W] in channels_last memory, or [N, C]; gradients and
residuals have the memory layout of x.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from phalanx.kernels.fused import find_fused_for
from phalanx.kernels.image_layout import to_rows

NONE, RELU, SILU, RELU6, GELU = 0, 1, 2, 3, 4  # activations


# --- forward ---


@custom_op("phalanx::norm_vectors", mutates_args=("running",))
def norm_vectors(
    x: Tensor, affine: list[Tensor], running: list[Tensor], eps: float, momentum: float
) -> Tensor:
    """v [4, C] of x; updates the running statistics.

    affine: weight and bias. running: mean, variance and the number of batches, or an empty list.
    """
    fused = find_fused_for(x, "phalanx.kernels.norm_finish_fused.norm_vectors_fused")
    if fused is not None:
        return fused(x, affine, running, eps, momentum)
    rows = to_rows(x).float()
    variance, mean = torch.var_mean(rows, 0, correction=0)
    return finish_statistics(mean, variance, affine, running, len(rows), eps, momentum)


@norm_vectors.register_fake
def _(x: Tensor, affine: list[Tensor], running: list[Tensor], eps: float, mom: float) -> Tensor:
    return x.new_empty((4, x.shape[1]), dtype=torch.float32)


@custom_op("phalanx::finish_vectors", mutates_args=("running",))
def finish_vectors(
    sums: Tensor,
    affine: list[Tensor],
    running: list[Tensor],
    count: int,
    eps: float,
    momentum: float,
) -> Tensor:
    """`norm_vectors` from partial sums [2, any, C] of x and of x * x over `count` pixels."""
    fused = find_fused_for(sums, "phalanx.kernels.norm_finish_fused.finish_vectors_fused")
    if fused is not None:
        return fused(sums, affine, running, count, eps, momentum)
    total, square = sums.double().sum(1) / count
    variance = (square - total * total).clamp_min(0)
    return finish_statistics(total.float(), variance.float(), affine, running, count, eps, momentum)


@finish_vectors.register_fake
def _(
    sums: Tensor, affine: list[Tensor], running: list[Tensor], count: int, eps: float, mom: float
) -> Tensor:
    return sums.new_empty((4, sums.shape[2]))


def finish_statistics(
    mean: Tensor,
    variance: Tensor,
    affine: list[Tensor],
    running: list[Tensor],
    count: int,
    eps: float,
    momentum: float,
) -> Tensor:
    """v from the mean and variance of `count` pixels; updates running statistics as torch does."""
    rstd = torch.rsqrt(variance + eps)
    if running:
        running[0].lerp_(mean.to(running[0].dtype), momentum)
        unbiased = variance * (count / max(count - 1, 1))
        running[1].lerp_(unbiased.to(running[1].dtype), momentum)
        running[2].add_(1)
    scale = affine[0] * rstd
    return torch.stack([mean, rstd, scale, affine[1] - mean * scale])


@custom_op("phalanx::apply_norm", mutates_args=())
def apply_norm(
    x: Tensor,
    v: Tensor,
    activation: int,
    residual: Tensor | None = None,
    factor: Tensor | None = None,
    residual_v: Tensor | None = None,
    add_last: bool = False,
) -> Tensor:
    """activation(factor * (x * scale + shift) + residual) in x's dtype.

    The residual is normalised first if `residual_v` is given. `add_last`: it is added after the
    activation, and the factor scales the activation's output.
    """
    fused = find_fused_for(x, "phalanx.kernels.norm_passes_fused.apply_norm_fused")
    if fused is not None:
        return fused(x, v, activation, residual, factor, residual_v, add_last)
    value, by = normalise(x, v), broadcast_images(factor, x)
    value = (_activate(value, activation) if add_last else value) * by
    if residual is not None:
        value += residual.float() if residual_v is None else normalise(residual, residual_v)
    return (value if add_last else _activate(value, activation)).to(x.dtype)


@apply_norm.register_fake
def _(
    x: Tensor,
    v: Tensor,
    activation: int,
    residual: Tensor | None = None,
    factor: Tensor | None = None,
    residual_v: Tensor | None = None,
    add_last: bool = False,
) -> Tensor:
    return torch.empty_like(x)


# --- backward ---


@custom_op("phalanx::reduce_norm", mutates_args=())
def reduce_norm(
    dy: Tensor, x: Tensor, v: Tensor, activation: int, factor: Tensor | None = None
) -> Tensor:
    """u [5, C] of a norm, from the gradient dy of its activation's output."""
    fused = find_fused_for(x, "phalanx.kernels.norm_finish_fused.reduce_norm_fused")
    if fused is not None:
        return fused(dy, x, v, activation, factor)
    gradient = dy.float() * find_derivative(normalise(x, v), activation)
    return _reduce_reference(gradient * broadcast_images(factor, x), x, v)


@reduce_norm.register_fake
def _(dy: Tensor, x: Tensor, v: Tensor, activation: int, factor: Tensor | None = None) -> Tensor:
    return v.new_empty((5, x.shape[1]))


@custom_op("phalanx::reduce_norm_gated", mutates_args=())
def reduce_norm_gated(
    dy: Tensor,
    x: Tensor,
    v: Tensor,
    gate: Tensor,
    second: Tensor | None = None,
    factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient dy + second masked by the gate, and u of that gradient (times the factor).

    gate: the output of the ReLU after norm and residual, or its signs as packed by `pack_signs`.
    """
    fused = find_fused_for(x, "phalanx.kernels.norm_finish_fused.reduce_norm_gated_fused")
    if fused is not None:
        return fused(dy, x, v, gate, second, factor)
    gradient = dy.float() if second is None else dy.float() + second.float()
    is_open = unpack_signs(gate, x) if gate.dtype == torch.uint8 else gate > 0
    gradient = gradient * is_open
    u = _reduce_reference(gradient * broadcast_images(factor, x), x, v)
    return gradient.to(dy.dtype), u


@reduce_norm_gated.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    v: Tensor,
    gate: Tensor,
    second: Tensor | None = None,
    factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(dy), v.new_empty((5, x.shape[1]))


@custom_op("phalanx::finish_back", mutates_args=())
def finish_back(sums: Tensor, v: Tensor, count: int) -> Tensor:
    """u from partial sums [2, any, C] of the gradient and of gradient * x over `count` pixels."""
    fused = find_fused_for(sums, "phalanx.kernels.norm_finish_fused.finish_back_fused")
    if fused is not None:
        return fused(sums, v, count)
    dbeta, product = sums.double().sum(1)
    return backward_vectors(dbeta.float(), (product - v[0] * dbeta).float(), v, count)


@finish_back.register_fake
def _(sums: Tensor, v: Tensor, count: int) -> Tensor:
    return sums.new_empty((5, sums.shape[2]))


@custom_op("phalanx::apply_norm_back", mutates_args=())
def apply_norm_back(
    dy: Tensor, x: Tensor, v: Tensor, u: Tensor, activation: int, factor: Tensor | None = None
) -> Tensor:
    """The gradient of x; `activation` is NONE if dy has been masked already."""
    fused = find_fused_for(x, "phalanx.kernels.norm_passes_fused.apply_norm_back_fused")
    if fused is not None:
        return fused(dy, x, v, u, activation, factor)
    gradient = (
        dy.float() * find_derivative(normalise(x, v), activation) * broadcast_images(factor, x)
    )
    _, _, a, b, c = (_broadcast_channels(row, x) for row in u)
    return (a * gradient + b * x.float() + c).to(x.dtype)


@apply_norm_back.register_fake
def _(
    dy: Tensor, x: Tensor, v: Tensor, u: Tensor, activation: int, factor: Tensor | None = None
) -> Tensor:
    return torch.empty_like(x)


def _reduce_reference(gradient: Tensor, x: Tensor, v: Tensor) -> Tensor:
    """u from a float32 gradient."""
    rows = to_rows(gradient)
    product = (rows * (to_rows(x).float() - v[0])).sum(0)
    return backward_vectors(rows.sum(0), product, v, len(rows))


def backward_vectors(dbeta: Tensor, product: Tensor, v: Tensor, count: int) -> Tensor:
    """u from the sums of the gradient and of gradient * (x - mean)."""
    mean, rstd, scale, _ = v
    dgamma = product * rstd
    slope = scale * rstd * dgamma / count
    return torch.stack([dgamma, dbeta, scale, -slope, slope * mean - scale * dbeta / count])


# --- shared by both ---


def pack_signs(x: Tensor) -> Tensor:
    """x > 0 with one bit per element: uint8 [pixels, C / 8]; C is a multiple of 64.

    Bit i of byte j is channel 8 i + j of 64: one thread holds all eight in a GEMM's accumulator.
    """
    kept = (to_rows(x) > 0).view(-1, x.shape[1] // 64, 8, 8).int()
    places = torch.arange(8, device=x.device)[:, None]
    return (kept << places).sum(2).view(-1, x.shape[1] // 8).to(torch.uint8)


def unpack_signs(signs: Tensor, like: Tensor) -> Tensor:
    """The mask that `pack_signs` packed, in the shape of another tensor."""
    n, c, h, w = like.shape
    places = torch.arange(8, device=like.device)[:, None]
    kept = (signs.view(-1, c // 64, 1, 8).int() >> places) & 1
    return kept.view(n, h, w, c).permute(0, 3, 1, 2).bool()


def _broadcast_channels(row: Tensor, x: Tensor) -> Tensor:
    """One number per channel, or per image and channel, in a shape that broadcasts with x."""
    return row.view(-1, x.shape[1], *(1 for _ in x.shape[2:]))


def broadcast_images(factor: Tensor | None, x: Tensor) -> Tensor | float:
    """One number per image, in a shape that broadcasts with x; 1.0 without a factor."""
    return 1.0 if factor is None else factor.float().view(-1, *(1 for _ in x.shape[1:]))


def normalise(x: Tensor, v: Tensor) -> Tensor:
    """x * scale + shift in float32."""
    return x.float() * _broadcast_channels(v[2], x) + _broadcast_channels(v[3], x)


def _activate(value: Tensor, activation: int) -> Tensor:
    """The activation of a float32 tensor."""
    if activation == RELU:
        return value.clamp_min(0)
    if activation == SILU:
        return value * value.sigmoid()
    if activation == GELU:
        return F.gelu(value)
    return value.clamp(0, 6) if activation == RELU6 else value


def find_derivative(value: Tensor, activation: int) -> Tensor | float:
    """The derivative of the activation at the input `value`."""
    if activation == RELU:
        return (value > 0).float()
    if activation == SILU:
        gate = value.sigmoid()
        return gate * (1 + value * (1 - gate))
    if activation == GELU:
        density = torch.exp(-0.5 * value * value) / math.sqrt(2 * math.pi)
        return torch.special.ndtr(value) + value * density
    return ((value > 0) & (value < 6)).float() if activation == RELU6 else 1.0
