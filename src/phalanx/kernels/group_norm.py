"""Training-mode group norm on channels_last memory, in the passes of phalanx.kernels.batch_norm.

Its vectors are per image: v [4, N, C] and u [5, N, C]. The first two rows of u, summed over the
images, are the gradients of weight and bias. `apply_norm` and `apply_norm_back` take v and u.

groups: their number, the distance between their first channels, the channels of each, and the
distance between these, as `list_groups` returns them.
"""

import torch
from torch import Tensor
from torch.library import custom_op

from phalanx.kernels.batch_norm import broadcast_images, find_derivative, normalise, unpack_signs
from phalanx.kernels.fused import find_fused_for


def list_groups(number: int, channels: int, *, interleaved: bool) -> list[int]:
    """The layout of groups of adjacent channels or, interleaved, of every `number`-th channel."""
    each = channels // number
    return [number, 1, each, number] if interleaved else [number, each, each, 1]


@custom_op("phalanx::group_norm_vectors", mutates_args=())
def group_norm_vectors(x: Tensor, affine: list[Tensor], groups: list[int], eps: float) -> Tensor:
    """v [4, N, C] of x; affine: weight and bias."""
    fused = find_fused_for(x, "phalanx.kernels.norm_finish_fused.group_norm_vectors_fused")
    if fused is not None:
        return fused(x, affine, groups, eps)
    rows = _by_group(x.float().flatten(2).transpose(1, 2), groups)
    variance, mean = torch.var_mean(rows, (1, 3), correction=0)
    each = groups[2]
    mean, rstd = (
        _to_channels(value[:, :, None].expand(-1, -1, each), groups)
        for value in (mean, torch.rsqrt(variance + eps))
    )
    scale = affine[0].float() * rstd
    return torch.stack([mean, rstd, scale, affine[1].float() - mean * scale])


@group_norm_vectors.register_fake
def _(x: Tensor, affine: list[Tensor], groups: list[int], eps: float) -> Tensor:
    return x.new_empty((4, *x.shape[:2]), dtype=torch.float32)


@custom_op("phalanx::reduce_group_norm", mutates_args=())
def reduce_group_norm(
    dy: Tensor,
    x: Tensor,
    v: Tensor,
    groups: list[int],
    activation: int,
    factor: Tensor | None = None,
) -> Tensor:
    """u [5, N, C] of a norm, from the gradient dy of its activation's output."""
    fused = find_fused_for(x, "phalanx.kernels.norm_finish_fused.reduce_group_norm_fused")
    if fused is not None:
        return fused(dy, x, v, groups, activation, factor)
    gradient = dy.float() * find_derivative(normalise(x, v), activation)
    return _reduce_reference(gradient * broadcast_images(factor, x), x, v, groups)


@reduce_group_norm.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    v: Tensor,
    groups: list[int],
    activation: int,
    factor: Tensor | None = None,
) -> Tensor:
    return v.new_empty((5, *x.shape[:2]))


@custom_op("phalanx::reduce_group_norm_gated", mutates_args=())
def reduce_group_norm_gated(
    dy: Tensor,
    x: Tensor,
    v: Tensor,
    groups: list[int],
    gate: Tensor,
    second: Tensor | None = None,
    factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient dy + second masked by the gate, and u, as for a batch norm."""
    fused = find_fused_for(x, "phalanx.kernels.norm_finish_fused.reduce_group_norm_gated_fused")
    if fused is not None:
        return fused(dy, x, v, groups, gate, second, factor)
    gradient = dy.float() if second is None else dy.float() + second.float()
    is_open = unpack_signs(gate, x) if gate.dtype == torch.uint8 else gate > 0
    gradient = gradient * is_open
    u = _reduce_reference(gradient * broadcast_images(factor, x), x, v, groups)
    return gradient.to(dy.dtype), u


@reduce_group_norm_gated.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    v: Tensor,
    groups: list[int],
    gate: Tensor,
    second: Tensor | None = None,
    factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(dy), v.new_empty((5, *x.shape[:2]))


def _reduce_reference(gradient: Tensor, x: Tensor, v: Tensor, groups: list[int]) -> Tensor:
    """u from a float32 gradient."""
    mean, rstd, scale, _ = v
    dbeta = gradient.flatten(2).sum(2)
    dgamma = (gradient * (x.float() - mean[:, :, None, None])).flatten(2).sum(2) * rstd
    count = groups[2] * x.shape[2] * x.shape[3]
    slope, through = (_add_groups(scale * value, groups) / count for value in (dgamma, dbeta))
    slope = slope * rstd
    return torch.stack([dgamma, dbeta, scale, -slope, slope * mean - through])


def _by_group(values: Tensor, groups: list[int]) -> Tensor:
    """[..., C] as [..., groups, channels of a group]."""
    number, _, each, between = groups
    shape = values.shape[:-1]
    if between == 1:
        return values.reshape(*shape, number, each)
    return values.reshape(*shape, each, number).transpose(-1, -2)


def _to_channels(values: Tensor, groups: list[int]) -> Tensor:
    """The inverse of `_by_group`."""
    ordered = values if groups[3] == 1 else values.transpose(-1, -2)
    return ordered.flatten(-2)


def _add_groups(values: Tensor, groups: list[int]) -> Tensor:
    """For each channel, the sum over the channels of its group."""
    parts = _by_group(values, groups)
    return _to_channels(parts.sum(-1, keepdim=True).expand(parts.shape), groups)
