"""Convolutions with bias, residual and activation as one torch op, in 16 bits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.inference.conv_implementations import GROUPED_BLOCK, Convolution, Geometry
from phalanx.kernels.image_layout import new_image


def empty_result(x: Tensor, weights: Sequence[Tensor], geometry: Sequence[int]) -> Tensor:
    """An empty tensor for a convolution's output."""
    kernel, (stride, padding, *_) = weights[0].shape[2], geometry
    height, width = ((edge + 2 * padding - kernel) // stride + 1 for edge in x.shape[2:])
    return new_image(x, weights[0].shape[0], height, width)


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

    weights: [O, C, KS, KS], channels_last; of a grouped convolution, also as the dense blocks of
    `expand_groups`, if there are any. biases: the bias in float32 and in x's dtype. gate: [N, C].
    geometry: stride, padding, groups.
    """
    layer = Convolution(x, weights, biases, add, gate, Geometry(*geometry), act)
    best, *_ = layer.list_implementations(empty_result(x, weights, geometry)).values()
    return best()


convolve_and_activate.register_fake(
    lambda x, weights, biases, add, gate, geometry, act: empty_result(x, weights, geometry)
)


def expand_groups(weight: Tensor, groups: int) -> Tensor | None:
    """The weights [O, C / groups, KS, KS] of a grouped convolution as [O, KS, KS, GROUPED_BLOCK].

    Each output channel reads the input channels of its own block, with zeros for those of other
    groups. None if groups and blocks do not match.
    """
    (out_channels, each, kernel, _), block = weight.shape, GROUPED_BLOCK
    if groups == 1 or out_channels != each * groups or out_channels % block or block % each:
        return None
    out = weight.new_zeros(out_channels, kernel, kernel, block)
    first = (torch.arange(out_channels, device=weight.device) % block) // each * each
    index = first[:, None] + torch.arange(each, device=weight.device)
    index = index[:, None, None, :].expand(out_channels, kernel, kernel, each)
    return out.scatter_(3, index, weight.permute(0, 2, 3, 1).contiguous())
