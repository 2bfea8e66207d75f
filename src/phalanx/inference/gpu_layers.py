"""The layers of folded models on a GPU, in 16 bits.

Weights are refreshed in place, because CUDA graphs hold their addresses.
"""

from functools import partial

import torch
from torch import Tensor, nn

from phalanx.inference.conv_implementations import NONE, RAW, Geometry
from phalanx.inference.conv_ops import convolve_and_activate, expand_groups
from phalanx.inference.depthwise_ops import convolve_depthwise, squeeze_and_excite
from phalanx.inference.layers import FoldedConv, LayerTypes
from phalanx.inference.unit_ops import (
    activate_and_pool,
    empty_space_to_depth,
    rearrange_stem_weight,
    space_to_depth,
)
from phalanx.models.efficientnet import SqueezeExcite


def choose_gpu_layers(half: torch.dtype) -> LayerTypes:
    """The layers that compute in a 16-bit type."""
    return LayerTypes(
        half,
        partial(_GpuConv, half=half),
        partial(_GpuLinear, half=half),
        partial(_GpuGate, half=half),
    )


class _GpuConv(FoldedConv):
    """A convolution with its norm and activation, in 16 bits."""

    def __init__(self, conv: nn.Module, norm: nn.Module, act: nn.Module, half: torch.dtype):
        super().__init__(conv, norm, act)
        self._half = half
        self._block_padding: tuple[int, int] | None = None
        edge, geometry = self._conv.kernel_size[0], self.geometry
        if self._conv.in_channels == 3 and geometry.stride == 2 and geometry.padding == edge // 2:
            self._block_padding = rearrange_stem_weight(self._conv.weight.detach())[1]
        self._weights: list[Tensor] = []
        self.refresh()

    def refresh(self) -> None:
        """Fold the weights and statistics as they are now."""
        weight, bias = self._fold_norm()
        weights, biases = self._arrange(weight.to(self._half)), [bias, bias.to(self._half)]
        if not self._weights:
            self._weights, self._biases = weights, [tensor.clone() for tensor in biases]
            return
        torch._foreach_copy_([*self._weights, *self._biases], [*weights, *biases])

    def _arrange(self, weight: Tensor) -> list[Tensor]:
        """The weights in the layouts that kernels read."""
        if self.is_depthwise:
            return [weight.contiguous(), weight[:, 0].permute(1, 2, 0).contiguous()]
        if self._block_padding:
            return [rearrange_stem_weight(weight)[0]]
        weight = weight.contiguous(memory_format=torch.channels_last)
        blocks = expand_groups(weight, self.geometry.groups)
        return [weight] if blocks is None else [weight, blocks]

    def __call__(
        self,
        x: Tensor,
        *,
        add: Tensor | None = None,
        gate: Tensor | None = None,
        act: int | None = None,
    ) -> Tensor:
        """act(norm(conv(x * gate)) + add); act: instead of its own."""
        act, geometry = self.act if act is None else act, self.geometry
        if not self._block_padding:
            x = x.to(self._half, memory_format=torch.channels_last)
        else:
            geometry = Geometry()
            x = self.prepare_images(x) if x.shape[1] == self._conv.in_channels else x
        return convolve_and_activate(
            self._pad(x), self._weights, self._biases, add, gate, geometry.pack(), act
        )

    def prepare_images(self, images: Tensor, out: Tensor | None = None) -> Tensor:
        """The images in the layout that a stem reads: in `out`, or in new memory."""
        if self._block_padding:
            out = (
                empty_space_to_depth(images, self._block_padding, self._half)
                if out is None
                else out
            )
            space_to_depth(images, out, self._block_padding)
            return out
        if out is None:
            return images.to(self._half, memory_format=torch.channels_last, copy=True)
        return out.copy_(images)

    def convolve_depthwise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output of a depthwise convolution, and its sums per image [N, parts, C]."""
        geometry = [self.geometry.stride, self.geometry.padding]
        return convolve_depthwise(self._pad(x), self._weights, self._biases[0], geometry, self.act)

    def pool(self, x: Tensor) -> Tensor:
        """The output of a 3x3 max-pool of stride 2 after the activation."""
        return activate_and_pool(self(x, act=RAW), self._biases[0], self.act)


class _GpuLinear:
    """A linear layer in 16 bits."""

    def __init__(self, linear: nn.Linear, half: torch.dtype):
        self._linear, self._half = linear, half
        self._weight = linear.weight.detach().to(half, copy=True)
        self._biases = [tensor.clone() for tensor in self._find_biases()]

    def _find_biases(self) -> list[Tensor]:
        bias = self._linear.bias
        if bias is None:
            bias = torch.zeros_like(self._linear.weight[:, 0], dtype=torch.float32)
        return [bias.detach().float(), bias.detach().to(self._half)]

    def refresh(self) -> None:
        biases = self._find_biases()
        torch._foreach_copy_([self._weight, *self._biases], [self._linear.weight.detach(), *biases])

    def __call__(self, x: Tensor) -> Tensor:
        pixel, weight = x[:, :, None, None], self._weight[:, :, None, None]
        pixel = pixel.contiguous(memory_format=torch.channels_last)
        y = convolve_and_activate(
            pixel, [weight], self._biases, None, None, Geometry().pack(), NONE
        )
        return y[:, :, 0, 0]


class _GpuGate:
    """Squeeze-and-excite: a factor for each image and channel."""

    def __init__(self, module: SqueezeExcite, half: torch.dtype):
        self._convs, self._half = (module.conv_reduce, module.conv_expand), half
        self._weights = [tensor.clone() for tensor in self._find_weights()]

    def _find_weights(self) -> list[Tensor]:
        found = []
        for conv in self._convs:
            assert conv.bias is not None
            found += [conv.weight.detach()[:, :, 0, 0].to(self._half).contiguous()]
            found += [conv.bias.detach().float()]
        return found

    def refresh(self) -> None:
        torch._foreach_copy_(self._weights, self._find_weights())

    def __call__(self, sums: Tensor, pixels: int) -> Tensor:
        return squeeze_and_excite(sums, self._weights, pixels, self._half)
