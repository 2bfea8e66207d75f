"""A convolution by cuDNN and its norm by our kernels, forward and backward."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.fused.half_copies import to_half
from phalanx.fused.module_checks import (
    GROUP_NORMS,
    check_batch_norm,
    check_conv,
    list_running_statistics,
)
from phalanx.kernels.batch_norm import (
    apply_norm_back,
    norm_vectors,
    reduce_norm,
    reduce_norm_gated,
)
from phalanx.kernels.group_norm import (
    group_norm_vectors,
    list_groups,
    reduce_group_norm,
    reduce_group_norm_gated,
)
from phalanx.models.norms import InterleavedGroupNorm
from phalanx.products.grouped import ConvShape, convolve_groups, convolve_groups_back


class _NormPart(ABC):
    """A norm over the pixels of channels_last memory, in passes."""

    @property
    @abstractmethod
    def parameters(self) -> list[Tensor]:
        """Weight and bias."""

    @abstractmethod
    def find_vectors(self, x: Tensor) -> Tensor:
        """The norm's vectors v for its input."""

    @abstractmethod
    def reduce(self, dy: Tensor, x: Tensor, v: Tensor, activation: int, factor: Any) -> Tensor:
        """Its backward vectors u, from the gradient of its activation's output."""

    @abstractmethod
    def reduce_gated(
        self, dy: Tensor, x: Tensor, v: Tensor, gate: Tensor, *more: Any
    ) -> tuple[Tensor, Tensor]:
        """The gated gradient, and u; `more`: second gradient and factor."""

    @abstractmethod
    def list_gradients(self, u: Tensor) -> list[Tensor]:
        """Gradients of weight and bias."""

    @property
    def groups(self) -> list[int]:
        """The layout of the groups; none for a batch norm."""
        return []


@dataclass(frozen=True)
class _BatchNormPart(_NormPart):
    """A batch norm."""

    norm: nn.BatchNorm2d

    @property
    def parameters(self) -> list[Tensor]:
        """Weight and bias."""
        return [self.norm.weight, self.norm.bias]

    def find_vectors(self, x: Tensor) -> Tensor:
        """The norm's vectors; updates the running statistics."""
        norm, running = self.norm, list_running_statistics(self.norm)
        assert norm.momentum is not None
        return norm_vectors(x, [norm.weight, norm.bias], running, norm.eps, norm.momentum)

    def reduce(self, dy: Tensor, x: Tensor, v: Tensor, activation: int, factor: Any) -> Tensor:
        """Its backward vectors."""
        return reduce_norm(dy, x, v, activation, factor)

    def reduce_gated(
        self, dy: Tensor, x: Tensor, v: Tensor, gate: Tensor, *more: Any
    ) -> tuple[Tensor, Tensor]:
        """The gated gradient, and u."""
        return reduce_norm_gated(dy, x, v, gate, *more)

    def list_gradients(self, u: Tensor) -> list[Tensor]:
        """The first two rows of u."""
        return [u[0], u[1]]


@dataclass(frozen=True)
class _GroupNormPart(_NormPart):
    """A group norm."""

    norm: nn.GroupNorm

    @property
    def parameters(self) -> list[Tensor]:
        """Weight and bias."""
        return [self.norm.weight, self.norm.bias]

    @property
    def groups(self) -> list[int]:
        """The layout of its groups."""
        interleaved = isinstance(self.norm, InterleavedGroupNorm)
        return list_groups(self.norm.num_groups, self.norm.num_channels, interleaved=interleaved)

    def find_vectors(self, x: Tensor) -> Tensor:
        """The norm's vectors of each image."""
        norm = self.norm
        return group_norm_vectors(x, [norm.weight, norm.bias], self.groups, norm.eps)

    def reduce(self, dy: Tensor, x: Tensor, v: Tensor, activation: int, factor: Any) -> Tensor:
        """Its backward vectors."""
        return reduce_group_norm(dy, x, v, self.groups, activation, factor)

    def reduce_gated(
        self, dy: Tensor, x: Tensor, v: Tensor, gate: Tensor, *more: Any
    ) -> tuple[Tensor, Tensor]:
        """The gated gradient, and u."""
        return reduce_group_norm_gated(dy, x, v, self.groups, gate, *more)

    def list_gradients(self, u: Tensor) -> list[Tensor]:
        """The first two rows of u, summed over the images."""
        return list(u[:2].sum(1).unbind())


@dataclass(frozen=True)
class ConvNorm:
    """A convolution without bias and its norm."""

    conv: nn.Conv2d
    norm: _NormPart
    half: torch.dtype

    @property
    def parameters(self) -> list[Tensor]:
        """Weight of the convolution, weight and bias of the norm."""
        return [self.conv.weight, *self.norm.parameters]

    def run(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The convolution of x, the norm's vectors for it, and the 16-bit weight."""
        weight = to_half(self.conv.weight, self.half)
        a = convolve(x, weight, self.conv)
        return a, self.norm.find_vectors(a), weight

    def norm_back(
        self, dy: Tensor, a: Tensor, v: Tensor, activation: int, factor: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Gradients of the norm's input and parameters, from that of its activation's output."""
        u = self.norm.reduce(dy, a, v, activation, factor)
        return apply_norm_back(dy, a, v, u, activation, factor), self.norm.list_gradients(u)

    def conv_back(
        self, da: Tensor, x: Tensor, weight: Tensor, *, needs_input_grad: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the convolution's input, if needed, and of its weight."""
        return convolve_back(da, x, weight, self.conv, needs_input_grad=needs_input_grad)


def build_conv_norm(conv: nn.Module, norm: nn.Module, half: torch.dtype) -> ConvNorm:
    """The pair, if our kernels support it; else raises UnitNotFused."""
    return ConvNorm(check_conv(conv), _build_norm_part(norm), half)


def _build_norm_part(norm: nn.Module) -> _NormPart:
    """The norm in passes, if our kernels support it; else raises UnitNotFused."""
    if type(norm) in GROUP_NORMS:
        assert isinstance(norm, nn.GroupNorm)
        return _GroupNormPart(norm)
    return _BatchNormPart(check_batch_norm(norm))


def convolve(x: Tensor, weight: Tensor, conv: nn.Conv2d) -> Tensor:
    """A convolution with the shape of a module's, in channels_last memory."""
    shape = _find_shape(conv)
    if shape.groups > 1:
        y = convolve_groups(x, weight, shape)
    else:
        y = torch.ops.aten.convolution(x, weight, None, *shape[:3], False, [0, 0], 1)
    return y.contiguous(memory_format=torch.channels_last)


def convolve_back(
    dy: Tensor, x: Tensor, weight: Tensor, conv: nn.Conv2d, *, needs_input_grad: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of a convolution's input, if needed, and of its weight."""
    shape = _find_shape(conv)
    if shape.groups > 1:
        dx, dw = convolve_groups_back(dy, x, weight, shape, needs_input_grad=needs_input_grad)
    else:
        found = (False, [0, 0], 1, [needs_input_grad, True, False])
        dx, dw, _ = torch.ops.aten.convolution_backward(dy, x, weight, None, *shape[:3], *found)
    return dx.contiguous(memory_format=torch.channels_last) if needs_input_grad else dx, dw


def _find_shape(conv: nn.Conv2d) -> ConvShape:
    """The shape of a convolution that `check_conv` accepted."""
    assert not isinstance(conv.padding, str)
    return ConvShape(conv.stride, conv.padding, conv.dilation, conv.groups)
