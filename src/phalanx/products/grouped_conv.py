"""Grouped 3x3 convolutions of stride 1: by kernels of our own or by the library, as measured."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import custom_op

from phalanx.kernels.choices import CHOICES
from phalanx.kernels.fused import find_fused_for

_WIDEST_GROUP = 64  # channels
_MOST_ELEMENTS = 2**31  # the kernels' offsets have 32 bits
_CHANNELS = 64  # every layer has a multiple of so many


def suits_grouped_conv(conv: nn.Conv2d) -> bool:
    """Whether the kernels take a convolution."""
    group = conv.in_channels // conv.groups
    shape = (conv.kernel_size, conv.stride, conv.padding, conv.dilation)
    return (
        conv.groups > 1
        and shape == ((3, 3), (1, 1), (1, 1), (1, 1))
        and conv.in_channels == conv.out_channels
        and conv.in_channels % _CHANNELS == 0
        and group <= _WIDEST_GROUP
        and group & (group - 1) == 0
    )


@custom_op("phalanx::grouped_conv", mutates_args=())
def grouped_conv(x: Tensor, weight: Tensor) -> Tensor:
    """The convolution of x [N, C, H, W] with a weight [C, group, 3, 3], both channels_last."""
    fused = find_fused_for(x, "phalanx.products.grouped_conv_fused.grouped_conv_fused")
    if fused is None or x.numel() >= _MOST_ELEMENTS:
        return grouped_conv_reference(x, weight)
    ways = {
        "kernel": partial(fused, x, weight, False),
        "library": partial(grouped_conv_reference, x, weight),
    }
    return CHOICES.choose(f"grouped convolution {_describe(x, weight)}", ways)


def grouped_conv_reference(x: Tensor, weight: Tensor) -> Tensor:
    """`grouped_conv` in torch's own operations."""
    y = F.conv2d(x, weight, padding=1, groups=_count_groups(weight))
    return y.contiguous(memory_format=torch.channels_last)


@grouped_conv.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


@custom_op("phalanx::grouped_conv_input", mutates_args=())
def grouped_conv_input(dy: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the convolution's input."""
    fused = find_fused_for(dy, "phalanx.products.grouped_conv_fused.grouped_conv_fused")
    if fused is None or dy.numel() >= _MOST_ELEMENTS:
        return grouped_conv_input_reference(dy, weight)
    ways = {
        "kernel": partial(fused, dy, weight, True),
        "library": partial(grouped_conv_input_reference, dy, weight),
    }
    return CHOICES.choose(f"grouped convolution's input {_describe(dy, weight)}", ways)


def grouped_conv_input_reference(dy: Tensor, weight: Tensor) -> Tensor:
    """`grouped_conv_input` in torch's own operations."""
    dx, _ = _convolve_back(dy, dy, weight, [True, False, False])
    return dx.contiguous(memory_format=torch.channels_last)


@grouped_conv_input.register_fake
def _(dy: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(dy)


@custom_op("phalanx::grouped_conv_weight", mutates_args=())
def grouped_conv_weight(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the convolution's weight in at least 32 bits, channels_last."""
    fused = find_fused_for(x, "phalanx.products.grouped_conv_fused.grouped_weight_gradient_fused")
    if fused is None or x.numel() >= _MOST_ELEMENTS:
        return grouped_conv_weight_reference(dy, x, weight)
    ways = {
        "kernel": partial(fused, dy, x, weight.shape[1]),
        "library": partial(grouped_conv_weight_reference, dy, x, weight),
    }
    return CHOICES.choose(f"grouped convolution's weight {_describe(x, weight)}", ways)


def grouped_conv_weight_reference(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """`grouped_conv_weight` in torch's own operations."""
    _, dw = _convolve_back(dy, x, weight, [False, True, False])
    wide = dw if dw.dtype == torch.float64 else dw.float()
    return wide.contiguous(memory_format=torch.channels_last)


@grouped_conv_weight.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    wide = torch.empty_like(weight, dtype=torch.float32)
    return wide.contiguous(memory_format=torch.channels_last)


def _convolve_back(
    dy: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]
) -> tuple[Tensor, Tensor]:
    """The gradients of input and weight by the library, as far as wanted."""
    places = ([1, 1], [1, 1], [1, 1], False, [0, 0], _count_groups(weight))
    dx, dw, _ = torch.ops.aten.convolution_backward(dy, x, weight, None, *places, wanted)
    return dx, dw


def _count_groups(weight: Tensor) -> int:
    """Groups of a convolution that keeps its channels."""
    return len(weight) // weight.shape[1]


def _describe(x: Tensor, weight: Tensor) -> str:
    """What is convolved."""
    return f"{list(x.shape)} {_count_groups(weight)} {x.dtype}"
