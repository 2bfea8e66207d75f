"""The layers of folded models: what those of every device have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from phalanx.inference.conv_implementations import NONE, RELU, RELU6, SILU, Geometry
from phalanx.inference.unit_ops import average_pixels
from phalanx.models.efficientnet import SqueezeExcite
from phalanx.models.layers import SameConv2d, pad_same
from phalanx.models.norms import BATCH_NORMS

ACTS: dict[type[nn.Module], int] = {
    nn.Identity: NONE,
    nn.ReLU: RELU,
    nn.SiLU: SILU,
    nn.ReLU6: RELU6,
}


class NotFoldable(Exception):
    """A unit has a part that cannot be folded; the message says which."""


class FoldedLayer(Protocol):
    """A layer with its own copy of the weights."""

    def refresh(self) -> None:
        """Copy the weights and statistics of the live modules as they are now."""


class FoldedConv(ABC):
    """A convolution with its norm and activation; each kind of device has a subclass."""

    def __init__(self, conv: nn.Module, norm: nn.Module, act: nn.Module):
        _check_foldable(conv, norm, act)
        assert isinstance(conv, nn.Conv2d)
        self._conv, self._norm = conv, norm
        self.act = ACTS[type(act)]
        self._same = isinstance(conv, SameConv2d)
        padding = 0 if self._same else conv.padding[0]
        self.geometry = Geometry(conv.stride[0], int(padding), conv.groups)
        self.is_depthwise = conv.groups == conv.in_channels == conv.out_channels > 1

    @abstractmethod
    def refresh(self) -> None:
        """Fold the weights and statistics as they are now."""

    @abstractmethod
    def __call__(
        self, x: Tensor, *, add: Tensor | None = None, gate: Tensor | None = None
    ) -> Tensor:
        """act(norm(conv(x * gate)) + add); gate: [N, C]."""

    def prepare_images(self, images: Tensor, out: Tensor | None = None) -> Tensor:
        """The images in the layout that a stem reads: in `out`, or in new memory."""
        return images.clone() if out is None else out.copy_(images)

    @abstractmethod
    def convolve_depthwise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output of a depthwise convolution, and its sums per image [N, parts, C]."""

    @abstractmethod
    def pool(self, x: Tensor) -> Tensor:
        """The output of a 3x3 max-pool of stride 2 after the activation."""

    def _fold_norm(self) -> tuple[Tensor, Tensor]:
        """Float32 weights and bias with the norm folded in."""
        conv, norm = self._conv, self._norm
        weight = conv.weight.detach().float()
        bias = (
            torch.zeros_like(weight[:, 0, 0, 0])
            if conv.bias is None
            else conv.bias.detach().float()
        )
        if isinstance(norm, nn.Identity):
            return weight.clone(), bias.clone()
        assert isinstance(norm, nn.BatchNorm2d)
        assert norm.running_mean is not None and norm.running_var is not None
        scale = norm.weight.detach() * torch.rsqrt(norm.running_var + norm.eps)
        shift = norm.bias.detach() + (bias - norm.running_mean) * scale
        return weight * scale[:, None, None, None], shift.float()

    def _pad(self, x: Tensor) -> Tensor:
        return pad_same(x, self._conv.kernel_size[0], self.geometry.stride) if self._same else x


class _FoldedLinear(FoldedLayer, Protocol):
    """A linear layer."""

    def __call__(self, x: Tensor) -> Tensor:
        """[N, C] to [N, classes]."""


class _FoldedGate(FoldedLayer, Protocol):
    """Squeeze-and-excite."""

    def __call__(self, sums: Tensor, pixels: int) -> Tensor:
        """A factor for each image and channel, from the sums of its pixels [N, parts, C]."""


@dataclass(frozen=True)
class LayerTypes:
    """The layers of one kind of device, and the type they compute in."""

    dtype: torch.dtype
    conv: Callable[[nn.Module, nn.Module, nn.Module], FoldedConv]  # convolution, norm, activation
    linear: Callable[[nn.Linear], _FoldedLinear]
    gate: Callable[[SqueezeExcite], _FoldedGate]
    average: Callable[[Tensor], Tensor] = average_pixels  # over the pixels of images


def _check_foldable(conv: nn.Module, norm: nn.Module, act: nn.Module) -> None:
    """Refuse what cannot be folded."""
    if type(conv) not in (nn.Conv2d, SameConv2d):
        raise NotFoldable(f"a {type(conv).__name__}")
    assert isinstance(conv, nn.Conv2d)
    if conv.dilation != (1, 1):
        raise NotFoldable("a dilated convolution")
    if isinstance(conv.padding, str) or conv.padding_mode != "zeros":
        raise NotFoldable(f"a convolution with padding {conv.padding}, {conv.padding_mode}")
    if any(len({*pair}) > 1 for pair in (conv.kernel_size, conv.stride, conv.padding)):
        raise NotFoldable("a convolution that is not square")
    # a plugin's own type may compute something else
    is_batch = type(norm) in BATCH_NORMS and norm.affine and norm.track_running_stats
    if not is_batch and type(norm) is not nn.Identity:
        raise NotFoldable(f"a {type(norm).__name__}")
    if type(act) not in ACTS:
        raise NotFoldable(f"a {type(act).__name__}")
