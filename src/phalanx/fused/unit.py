"""A unit of a model as one autograd function, with its backward pass written out.

Consecutive residual units pass their gradient in two parts: that through the convolutions as the
gradient of the output, and that through the shortcut as the gradient of a carrier, a second output
without memory of its own. The unit below adds them in a kernel that reads both anyway.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_CARRIER = "skip_carrier"  # the attribute of an output that holds its carrier

Gradients = tuple[Tensor | None, Tensor | None, Sequence[Tensor]]
"""Of a unit's input through its convolutions, and through its shortcut; of its parameters."""


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context without autocast on x's device; meta tensors have no autocast."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def cast_for_linear(x: Tensor, linear: nn.Module) -> Tensor:
    """x in the dtype of a linear layer, unless autocast casts it."""
    if x.is_meta or torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(linear.get_parameter("weight").dtype)


class ManualBackwardUnit(ABC):
    """The modules of a unit, and how they run forward and backward without autograd."""

    takes_second = False  # whether its output's gradient may come in two parts
    casts_input = True  # if not, it takes an image of any dtype, without a gradient

    def __init__(self, modules: Sequence[nn.Module], half: torch.dtype) -> None:
        self._modules, self.half = modules, half
        self._norms = [
            part
            for module in modules
            for part in module.modules()
            if isinstance(part, nn.BatchNorm2d)
        ]

    @property
    @abstractmethod
    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of their gradients."""

    @abstractmethod
    def run(self, x: Tensor, drop_path: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
        """The output, and what the backward pass needs; drop_path: from `prepare_noise`."""

    @abstractmethod
    def run_back(
        self, dy: Tensor, second: Tensor | None, saved: Sequence[Any], *, needs_input_grad: bool
    ) -> Gradients:
        """Gradients from those of the output; that of the input only if needed."""

    def prepare_noise(self, noise: Tensor) -> Tensor:
        """The noise of drop-path in the form that `run` takes: here a factor for each image."""
        rate = getattr(self._modules[0], "rate")  # noqa: B009 - blocks that drop have one
        return (noise.flatten() >= rate).float() / (1 - rate)

    def __call__(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """The unit's output, with its carrier."""
        uses_running = not all(norm.training for norm in self._norms)
        if uses_running or (x.requires_grad and not self.casts_input):
            return self._run_modules(x, noise)
        carrier = getattr(x, _CARRIER, None)
        if self.casts_input:
            x = x.to(self.half).contiguous(memory_format=torch.channels_last)
        drop_path = None if noise is None else self.prepare_noise(noise)
        y, carrier = _UnitFunction.apply(self, x, carrier, drop_path, *self.parameters)
        if self.takes_second:
            setattr(y, _CARRIER, carrier)
        return y

    def _run_modules(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """The output of the modules, which run if norms use their running statistics."""
        for module in self._modules:
            x = module(x) if noise is None else module(x, noise)
        return x


class _UnitFunction(torch.autograd.Function):
    """Runs a ManualBackwardUnit as a node of autograd's graph."""

    @staticmethod
    def forward(
        ctx: Any,
        unit: ManualBackwardUnit,
        x: Tensor,
        carrier: Tensor | None,
        drop_path: Tensor | None,
        *_parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The output and its carrier."""
        with without_autocast(x):
            y, saved = unit.run(x, drop_path)
        ctx.save_for_backward(*saved)
        ctx.unit, ctx.has_carrier = unit, carrier is not None
        ctx.set_materialize_grads(False)
        return y, y.new_empty(()).expand(y.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, second: Tensor | None) -> tuple[Any, ...]:
        """The gradients of the arguments of `forward`."""
        unit, needs_input_grad = ctx.unit, ctx.needs_input_grad[1]
        dy, second = (second, None) if dy is None else (dy, second)
        if dy is None:
            return (None,) * len(ctx.needs_input_grad)
        dy, second = _to_channels_last(dy, unit.half), _to_channels_last(second, unit.half)
        with without_autocast(dy):
            dx, skip, gradients = unit.run_back(
                dy, second, ctx.saved_tensors, needs_input_grad=needs_input_grad
            )
        if skip is not None and not ctx.has_carrier:
            dx, skip = dx.add_(skip), None
        gradients = map(_to_parameter_layout, unit.parameters, gradients)
        return None, dx if needs_input_grad else None, skip, None, *gradients


def _to_parameter_layout(parameter: Tensor, gradient: Tensor) -> Tensor:
    """A gradient in its parameter's dtype and memory layout."""
    if gradient.dtype == parameter.dtype and gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)


def _to_channels_last(tensor: Any, half: torch.dtype) -> Any:
    """A gradient in 16 bits and channels_last memory; None stays None."""
    if tensor is None:
        return None
    return tensor.to(half).contiguous(memory_format=torch.channels_last)
