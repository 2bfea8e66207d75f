"""The layers of our models."""

import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.catalog.variant import Variant
from phalanx.models.norms import build_norm


def pad_same(x: Tensor, size: int, stride: int, *, value: float = 0.0) -> Tensor:
    """Pad so that ceil(side / stride) windows fit; an odd pixel goes below and to the right."""
    padding = [max((-(-edge // stride) - 1) * stride + size - edge, 0) for edge in x.shape[2:]]
    high, wide = padding
    return F.pad(x, (wide // 2, wide - wide // 2, high // 2, high - high // 2), value=value)


class SameConv2d(nn.Conv2d):
    """A convolution with TensorFlow's SAME padding."""

    def forward(self, x: Tensor) -> Tensor:
        """Pad, then convolve."""
        return super().forward(pad_same(x, self.kernel_size[0], self.stride[0]))


class SameMaxPool(nn.Module):
    """3x3 max-pool of stride 2 with TensorFlow's SAME padding."""

    def forward(self, x: Tensor) -> Tensor:
        """Pad with -inf, which is never the maximum, then pool."""
        return F.max_pool2d(pad_same(x, 3, 2, value=float("-inf")), 3, stride=2)


class LayerFactory:
    """Builds the convolutions, norms and pools of a variant."""

    def __init__(self, variant: Variant):
        self._norm, self._same_padding = variant.norm, variant.padding == "same"

    def conv(self, inp: int, out: int, size: int, *, stride: int = 1, groups: int = 1) -> nn.Conv2d:
        """A convolution that keeps the image's size at stride 1.

        It has a bias only if there is no norm after it.
        """
        bias = self._norm.type == "none"
        if self._same_padding and stride > 1:  # at stride 1 both paddings are the same
            return SameConv2d(inp, out, size, stride=stride, groups=groups, bias=bias)
        return nn.Conv2d(inp, out, size, stride=stride, padding=size // 2, groups=groups, bias=bias)

    def norm(self, channels: int) -> nn.Module:
        """A norm layer."""
        return build_norm(self._norm, channels)

    def max_pool(self) -> nn.Module:
        """A 3x3 pool of stride 2."""
        return SameMaxPool() if self._same_padding else nn.MaxPool2d(3, stride=2, padding=1)


def average_over_pixels(x: Tensor) -> Tensor:
    """The mean over height and width: [N, C, H, W] to [N, C].

    The gradient of `mean` is contiguous in the order of the dimensions it was given. In NCHW order,
    it makes the backward pass of a channels_last layer up to ten times slower on a CPU.
    """
    return x.permute(0, 2, 3, 1).mean((1, 2)) if x.requires_grad else x.mean((2, 3))


class GlobalAvgPool(nn.Module):
    """Mean over height and width: one vector per image."""

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] to [N, C]."""
        return average_over_pixels(x)


class GlobalMaxPool(nn.Module):
    """Maximum over height and width: one vector per image."""

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] to [N, C]."""
        return x.amax((2, 3))


class Scale(nn.Module):
    """Multiplies by a constant: keeps the initial logits small, so that training starts gently."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """x times the factor."""
        return x * self.factor


class Dropout(nn.Module):
    """Dropout whose noise is an argument of forward; without noise nothing is dropped."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """`noise`: uniform numbers in [0, 1), of x's shape."""
        return x if noise is None else _drop(x, self.rate, noise)


def _drop(x: Tensor, rate: float, noise: Tensor) -> Tensor:
    """Zero where the noise is below the rate, and scale the rest to keep the mean."""
    return x * ((noise >= rate).to(x.dtype) / (1 - rate))


def drop_path(x: Tensor, rate: float, noise: Tensor | None) -> Tensor:
    """Drop the residual branch of a block for some of the images; `noise` is [N, 1]."""
    return x if noise is None else _drop(x, rate, noise[:, :, None, None])


def drop_path_rate(variant: Variant, index: int, blocks: int) -> float:
    """The drop-path rate of a block: 0 for the first, growing linearly."""
    return variant.drop_path * index / blocks
