"""The layers of folded models on a CPU: oneDNN's convolutions with residual and activation.

Torch's own convolutions know neither, and reorder the weights at every call. Everything that adds
over channels is a convolution here: unlike a matrix product of MKL, it adds in the same order for
any number of images, so that logits do not depend on the batch.
"""

import platform
from collections.abc import Callable
from functools import partial

import google_crc32c
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.inference.conv_implementations import NONE, RELU, RELU6, SILU, Geometry
from phalanx.inference.layers import FoldedConv, LayerTypes
from phalanx.models.efficientnet import SqueezeExcite
from phalanx.models.layers import average_over_pixels

_SIGMOID = -1  # an activation of gates alone
# by activation: oneDNN's name and constants
_POST_OPS: dict[int, tuple[str, tuple[int, ...]]] = {
    NONE: ("none", ()),
    RELU: ("relu", ()),
    SILU: ("swish", ()),
    RELU6: ("hardtanh", (0, 6)),
    _SIGMOID: ("sigmoid", ()),
}
# by activation: torch's, where oneDNN's convolutions cannot add a residual before it
_AFTER_ADD: dict[int, Callable[[Tensor], Tensor]] = {
    NONE: nn.Identity(),
    RELU: F.relu_,
    SILU: partial(F.silu, inplace=True),
    RELU6: partial(F.relu6, inplace=True),
}
_BATCH = 8  # images that weights are packed for; for other batches it costs a few per cent


def has_onednn() -> bool:
    """Whether torch has oneDNN's fused convolutions here; only x86 was tried."""
    return torch.backends.mkldnn.is_available() and platform.machine() in ("x86_64", "AMD64")


class _PackedConv:
    """A convolution whose weights are packed for the size of the images, not at every call."""

    def __init__(self, weight: Tensor, bias: Tensor | None, geometry: Geometry, act: int):
        self._weight, self._bias = weight, bias
        self._geometry, self._act = geometry, act
        self._packed: tuple[torch.Size, Tensor] | None = None

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """act(conv(x) + bias + add), in channels_last."""
        stride, padding, groups = self._geometry.pack()
        x = x.contiguous(memory_format=torch.channels_last)
        packed = self._packed
        if packed is None or packed[0] != x.shape[1:]:
            weight = torch.ops.mkldnn._reorder_convolution_weight(
                self._weight, padding, stride, 1, groups, [_BATCH, *x.shape[1:]]
            )
            self._packed = packed = (x.shape[1:], weight)
        convolve, (name, constants) = torch.ops.mkldnn._convolution_pointwise, _POST_OPS[self._act]
        weights = (packed[1], self._bias, [padding] * 2, [stride] * 2, [1, 1], groups)
        if add is None:
            return convolve(x, *weights, name, constants, "")
        # torch 2.11 fails to add images of one pixel; in any version only ReLU may follow the sum
        if add.shape[2:] == (1, 1) or self._act not in (NONE, RELU):
            return _AFTER_ADD[self._act](convolve(x, *weights, "none", (), "").add_(add))
        after = None if self._act == NONE else name
        return convolve.binary(x, add, *weights, "add", None, after, constants, "")


def _hash_weights(*modules: nn.Module) -> int:
    """A checksum of the modules' weights and buffers: torch does not count all their changes.

    Folding and packing takes as long as scoring an image or two, this a twentieth of it.
    """
    checksum = 0
    for tensor in (tensor for module in modules for tensor in module.state_dict().values()):
        # channels_last weights are contiguous in this order: nothing is copied
        ordered = tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor
        checksum = google_crc32c.extend(checksum, ordered.contiguous().numpy())
    return checksum


class _CpuConv(FoldedConv):
    """A convolution with its norm and activation, in 32 bits."""

    def __init__(self, conv: nn.Module, norm: nn.Module, act: nn.Module):
        super().__init__(conv, norm, act)
        self._checksum: int | None = None
        self.refresh()

    def refresh(self) -> None:
        """Fold the weights and statistics, if they have changed."""
        checksum = _hash_weights(self._conv, self._norm)
        if checksum != self._checksum:
            self._checksum = checksum
            self._convolve = _PackedConv(*self._fold_norm(), self.geometry, self.act)

    def __call__(
        self, x: Tensor, *, add: Tensor | None = None, gate: Tensor | None = None
    ) -> Tensor:
        """act(norm(conv(x * gate)) + add); gate: [N, C]."""
        x = x if gate is None else x * gate[:, :, None, None]
        return self._convolve(self._pad(x), add)

    def convolve_depthwise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output of a depthwise convolution, and its sums per image [N, 1, C]."""
        y = self(x)
        return y, y.sum((2, 3))[:, None]

    def pool(self, x: Tensor) -> Tensor:
        """The output of a 3x3 max-pool of stride 2 after the activation."""
        return F.max_pool2d(self(x), 3, stride=2, padding=1)


def _copy_as_convolution(layer: nn.Linear | nn.Conv2d, act: int) -> _PackedConv:
    """A linear layer, or a 1x1 convolution, with its weights as they are now."""
    weight = layer.weight.detach().clone()
    weight = weight[:, :, None, None] if weight.dim() == 2 else weight
    bias = None if layer.bias is None else layer.bias.detach().clone()
    return _PackedConv(weight, bias, Geometry(), act)


class _CpuLinear:
    """A linear layer in 32 bits."""

    def __init__(self, linear: nn.Linear):
        self._linear = linear
        self._checksum: int | None = None
        self.refresh()

    def refresh(self) -> None:
        checksum = _hash_weights(self._linear)
        if checksum != self._checksum:
            self._checksum, self._run = checksum, _copy_as_convolution(self._linear, NONE)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dim() != 2:  # a plugin's layer may get more than one vector per image
            return self._linear(x)
        return self._run(x[:, :, None, None])[:, :, 0, 0]


class _CpuGate:
    """Squeeze-and-excite in 32 bits."""

    def __init__(self, module: SqueezeExcite):
        self._module = module
        self._checksum: int | None = None
        self.refresh()

    def refresh(self) -> None:
        checksum = _hash_weights(self._module)
        if checksum != self._checksum:
            self._checksum = checksum
            self._squeeze = _copy_as_convolution(self._module.conv_reduce, SILU)
            self._excite = _copy_as_convolution(self._module.conv_expand, _SIGMOID)

    def __call__(self, sums: Tensor, pixels: int) -> Tensor:
        means = sums.sum(1) / pixels
        return self._excite(self._squeeze(means[:, :, None, None]))[:, :, 0, 0]


# not an operator of ours: the first call of any imports torch's compiler, which takes a second
CPU_LAYERS = LayerTypes(torch.float32, _CpuConv, _CpuLinear, _CpuGate, average_over_pixels)
