"""Convolutions with bias, residual and activation as one torch op, in 16 bits."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.inference.conv_ways import (
    ACTIVATIONS,
    GROUPED_BLOCK,
    RAW,
    Convolution,
    Geometry,
    fits,
    runs_kernels,
)


def like_image(x: Tensor, channels: int, height: int, width: int) -> Tensor:
    """An empty channels_last image batch."""
    shape = (x.shape[0], channels, height, width)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def out_size(edge: int, kernel: int, stride: int, padding: int) -> int:
    """The edge of a convolution's result."""
    return (edge + 2 * padding - kernel) // stride + 1


def convolve_reference(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    add: Tensor | None,
    gate: Tensor | None,
    geometry: Sequence[int],
    act: int,
) -> Tensor:
    """`convolve_and_activate` in plain torch."""
    stride, padding, groups = geometry
    x = x if gate is None else x * gate[:, :, None, None]
    y = F.conv2d(x, weights[0], None, stride, padding, 1, groups)
    if act == RAW:
        return y
    y = y.float() + biases[0][:, None, None]
    return ACTIVATIONS[act](y if add is None else y + add.float()).to(x.dtype)


@torch.library.custom_op("phalanx::convolve_and_activate", mutates_args=())
def convolve_and_activate(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    add: Tensor | None,
    gate: Tensor | None,
    geometry: Sequence[int],
    act: int,
) -> Tensor:
    """act(conv(x * gate, weight) + bias + add) of channels_last images.

    weights: [O, C, KS, KS], channels_last; of a grouped convolution, also in the dense blocks that
    `expand_groups` makes, if it does. biases: the bias in 32 bits and in x's type. gate: [N, C].
    geometry: stride, padding, groups.
    """
    out = _empty_result(x, weights, geometry)
    if not runs_kernels(x) or not fits(x, out):
        return convolve_reference(x, weights, biases, add, gate, geometry, act)
    layer = Convolution(x, weights, biases, add, gate, Geometry(*geometry), act)
    best, *_ = layer.find_ways(out).values()
    return best()


@convolve_and_activate.register_fake
def _(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    add: Tensor | None,
    gate: Tensor | None,
    geometry: Sequence[int],
    act: int,
) -> Tensor:
    return _empty_result(x, weights, geometry)


def _empty_result(x: Tensor, weights: Sequence[Tensor], geometry: Sequence[int]) -> Tensor:
    kernel, (stride, padding, _) = weights[0].shape[2], geometry
    high, wide = (out_size(edge, kernel, stride, padding) for edge in x.shape[2:])
    return like_image(x, weights[0].shape[0], high, wide)


def expand_groups(weight: Tensor, groups: int, block: int = GROUPED_BLOCK) -> Tensor | None:
    """The weights [O, C / groups, KS, KS] of a grouped convolution as [O, KS, KS, block].

    Each output channel sees the `block` input channels of its own block, with zeros for those of
    other groups. None where groups and blocks do not fit.
    """
    wide, own, kernel, _ = weight.shape
    if groups == 1 or wide != own * groups or wide % block or block % own:
        return None
    out = weight.new_zeros(wide, kernel, kernel, block)
    places = (torch.arange(wide, device=weight.device) % block) // own * own
    index = places[:, None] + torch.arange(own, device=weight.device)
    index = index[:, None, None, :].expand(wide, kernel, kernel, own)
    return out.scatter_(3, index, weight.permute(0, 2, 3, 1).contiguous())
