"""Convolutions with bias, residual and activation as one torch op, in 16 bits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.inference.conv_implementations import GROUPED_BLOCK, Convolution, Geometry
from phalanx.kernels.image_layout import new_image


def empty_result(x: Tensor, weights: Sequence[Tensor], geometry: Sequence[int]) -> Tensor:
    """An empty tensor for a convolution's output."""
    kernel, (stride, padding, *_) = weights[0].shape[2], geometry
    high, wide = ((edge + 2 * padding - kernel) // stride + 1 for edge in x.shape[2:])
    return new_image(x, weights[0].shape[0], high, wide)


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


def expand_groups(weight: Tensor, groups: int, block: int = GROUPED_BLOCK) -> Tensor | None:
    """The weights [O, C / groups, KS, KS] of a grouped convolution as [O, KS, KS, block].

    Each output channel reads the `block` input channels of its own block, with zeros for those of
    other groups. None if groups and blocks do not match.
    """
    wide, own, kernel, _ = weight.shape
    if groups == 1 or wide != own * groups or wide % block or block % own:
        return None
    out = weight.new_zeros(wide, kernel, kernel, block)
    places = (torch.arange(wide, device=weight.device) % block) // own * own
    index = places[:, None] + torch.arange(own, device=weight.device)
    index = index[:, None, None, :].expand(wide, kernel, kernel, own)
    return out.scatter_(3, index, weight.permute(0, 2, 3, 1).contiguous())
