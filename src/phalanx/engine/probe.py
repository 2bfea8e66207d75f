"""Finds the module in which the first non-finite number of a step appeared."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from phalanx.models.units import FusedUnit

_INPUT, _WHOLE = "(the input)", "(the whole model)"
_DESCRIPTIONS = {  # by what was not finite
    "output": "the first module whose output was not finite is {name}",
    "loss": "the output of every module was finite, the loss was not",
    "gradient": "every output was finite; the first gradient that was not is that of {name}",
    "length": "every gradient was finite, but not their length; the largest is that of {name}",
}


class _Observation(NamedTuple):
    """Whether the output of one call of a module was finite, still on the device."""

    path: str
    first: int  # index within the step of the image in the first row
    finite: Tensor  # bool: one for each image, or one for all
    weights: Tensor | None  # bool: whether the module's own weights were finite


@dataclass(frozen=True, kw_only=True)
class NonFiniteFinding:
    """The first number of a step that was not finite."""

    what: str  # a key of _DESCRIPTIONS
    name: str  # of a module, by its path, or of a parameter
    rows: tuple[int, ...] = ()  # the images affected, counted within the step from 0
    weights_finite: bool = True  # whether the module's own weights were finite before the step

    def describe(self) -> str:
        """A sentence for the user."""
        weights = "" if self.weights_finite else ", whose weights were not finite before the step"
        return _DESCRIPTIONS[self.what].format(name=self.name) + weights


class Probe:
    """Observes all outputs and gradients of a model in a `with` block, without waiting for them.

    It only reads: the step computes the same bits as without it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []
        self._fused: dict[str, FusedUnit] = getattr(model, "fused", {})
        self._observations: list[_Observation] = []
        self._peaks: list[tuple[str, Tensor]] = []  # largest value of each gradient, in their order
        self._first = self._images = 0  # of the current pass

    def __enter__(self) -> "Probe":
        self._observations, self._peaks, self._first, self._images = [], [], 0, 0
        self._handles = [
            self._model.register_forward_pre_hook(self._begin_pass),
            *(
                module.register_forward_hook(
                    partial(self._observe, path.replace(".", "/") or _WHOLE)
                )
                for path, module in self._model.named_modules()
            ),
            *(
                weight.register_post_accumulate_grad_hook(partial(self._observe_gradient, name))
                for name, weight in self._model.named_parameters()
                if weight.requires_grad
            ),
        ]
        if self._fused:  # fused units call no modules: each unit is observed as a whole
            observed: Any = {unit: self._wrap_unit(unit) for unit in self._fused}
            self._model.fused = observed
        return self

    def __exit__(self, *failure: object) -> None:
        while self._handles:
            self._handles.pop().remove()
        if self._fused:
            self._model.fused = cast(Any, self._fused)

    def _begin_pass(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._first, self._images = self._first + self._images, len(inputs[0])
        self._observations.append(
            _Observation(_INPUT, self._first, self._check_finite(inputs[0]), None)
        )

    def _observe(self, path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        weights = list(module.parameters(recurse=False))
        finite = torch.stack([w.isfinite().all() for w in weights]).all() if weights else None
        self._observations += [
            _Observation(path, self._first, self._check_finite(tensor), finite)
            for tensor in _iterate_tensors(output)
        ]

    def _wrap_unit(self, unit: str) -> FusedUnit:
        """A fused unit whose output is observed."""

        def run(x: Tensor, noise: Tensor | None) -> Tensor:
            output = self._fused[unit](x, noise)
            finite = self._check_finite(output)
            self._observations.append(_Observation(unit, self._first, finite, None))
            return output

        return run

    @torch.no_grad()
    def _check_finite(self, tensor: Tensor) -> Tensor:
        by_image = tensor.dim() > 0 and len(tensor) == self._images
        finite = tensor.isfinite()
        return finite.reshape(len(tensor), -1).all(1) if by_image else finite.all()

    @torch.no_grad()
    def _observe_gradient(self, name: str, weight: Tensor) -> None:
        assert weight.grad is not None
        self._peaks.append((name, weight.grad.abs().max()))

    def find_nonfinite(self, loss: float, grad_norm: float) -> NonFiniteFinding | None:
        """The first number of the step that was not finite, if any. Waits for the device."""
        finite = torch.stack([seen.finite.all() for seen in self._observations]).tolist()
        if not all(finite):
            seen = self._observations[finite.index(False)]
            by_image = seen.finite.tolist() if seen.finite.dim() else []
            return NonFiniteFinding(
                what="output",
                name=seen.path,
                rows=tuple(seen.first + row for row, finite in enumerate(by_image) if not finite),
                weights_finite=seen.weights is None or bool(seen.weights),
            )
        if not isfinite(loss):
            return NonFiniteFinding(what="loss", name="")
        peaks = torch.stack([peak.float() for _, peak in self._peaks]).tolist()
        for (name, _), peak in zip(self._peaks, peaks, strict=True):
            if not isfinite(peak):
                return NonFiniteFinding(what="gradient", name=name)
        if not isfinite(grad_norm):
            return NonFiniteFinding(what="length", name=self._peaks[peaks.index(max(peaks))][0])
        return None


def _iterate_tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in a module's output."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, list | tuple):
        for part in output:
            yield from _iterate_tensors(part)
    elif isinstance(output, dict):
        yield from _iterate_tensors(list(output.values()))
