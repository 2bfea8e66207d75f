"""The layers of folded models on a CPU: oneDNN's convolutions with residual and activation.

Torch's own convolutions know neither, and reorder the weights at every call.
"""

import platform
from typing import Any

import google_crc32c
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.inference.conv_implementations import NONE, RELU, RELU6, SILU
from phalanx.inference.layers import FoldedConv, LayerTypes

# by activation: oneDNN's name and constants
_POST_OPS = {
    NONE: ("none", ()),
    RELU: ("relu", ()),
    SILU: ("swish", ()),
    RELU6: ("hardtanh", (0, 6)),
}
_BATCH = 8  # images that weights are packed for; other batches differ by a few per cent


def has_onednn() -> bool:
    """Whether torch has oneDNN's fused convolutions here; only x86 was tried."""
    return torch.backends.mkldnn.is_available() and platform.machine() in ("x86_64", "AMD64")


class _CpuConv(FoldedConv):
    """A convolution with its norm and activation, in 32 bits."""

    def __init__(self, conv: nn.Module, norm: nn.Module, act: nn.Module):
        super().__init__(conv, norm, act)
        self._checksum = -1
        self.refresh()

    def refresh(self) -> None:
        """Fold the weights and statistics, if they have changed."""
        # folding and packing take as long as scoring an image; torch does not count all changes
        tensors = [*self._conv.state_dict().values(), *self._norm.state_dict().values()]
        checksum = 0
        for tensor in tensors:
            checksum = google_crc32c.extend(checksum, _view_bytes(tensor))
        if checksum != self._checksum:
            self._checksum = checksum
            self._weight, self._bias = self._fold_norm()
            self._packed: tuple[torch.Size, Tensor] | None = None

    def __call__(
        self, x: Tensor, *, add: Tensor | None = None, gate: Tensor | None = None
    ) -> Tensor:
        """act(norm(conv(x * gate)) + add); gate: [N, C]."""
        x = self._pad(x.contiguous(memory_format=torch.channels_last))
        if gate is not None:
            x = x * gate[:, :, None, None]
        stride, padding, groups = self.geometry.pack()
        where = ([padding] * 2, [stride] * 2, [1, 1], groups)
        name, constants = _POST_OPS[self.act]
        convolve, weights = torch.ops.mkldnn._convolution_pointwise, (self._pack(x), self._bias)
        if add is None:
            return convolve(x, *weights, *where, name, constants, "")
        after = None if self.act == NONE else name
        return convolve.binary(x, add, *weights, *where, "add", None, after, constants, "")

    def _pack(self, x: Tensor) -> Tensor:
        """The weights as oneDNN reads them fastest for images of this size."""
        packed = self._packed
        if packed is None or packed[0] != x.shape[1:]:
            stride, padding, groups = self.geometry.pack()
            weight = torch.ops.mkldnn._reorder_convolution_weight(
                self._weight, padding, stride, 1, groups, [_BATCH, *x.shape[1:]]
            )
            self._packed = packed = (x.shape[1:], weight)
        return packed[1]

    def convolve_depthwise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output of a depthwise convolution, and its sums per image [N, 1, C]."""
        y = self(x)
        return y, y.sum((2, 3))[:, None]

    def pool(self, x: Tensor) -> Tensor:
        """The output of a 3x3 max-pool of stride 2 after the activation."""
        return F.max_pool2d(self(x), 3, stride=2, padding=1)


def _view_bytes(tensor: Tensor) -> Any:
    """The contents, without a copy if the tensor is channels_last."""
    dense = tensor.detach()
    dense = dense.permute(0, 2, 3, 1) if dense.dim() == 4 else dense
    return dense.contiguous().numpy()


class _CpuLinear:
    """A linear layer in 32 bits."""

    def __init__(self, linear: nn.Linear):
        self._linear = linear
        self.refresh()

    def refresh(self) -> None:
        bias = self._linear.bias
        self._weight = self._linear.weight.detach().clone()
        self._bias = None if bias is None else bias.detach().clone()

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


CPU_LAYERS = LayerTypes(torch.float32, _CpuConv, _CpuLinear)
