"""Recomputation: the outputs of some modules are stored, all between them is computed again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.catalog.variant import Variant
from phalanx.models.forward_recorder import ForwardRecorder
from phalanx.models.units import UnitModel
from phalanx.plan.recompute import find_kept_modules, match_modules


def store_only(model: nn.Module, patterns: Sequence[str], *, variant: Variant) -> tuple[str, ...]:
    """Make a model's training passes store these modules' outputs alone; their paths come back.

    Without patterns the output of every unit is stored. Names, weights, results and gradients
    stay as they were, and passes without gradients run as before.
    """
    paths = find_kept_modules(variant, patterns, model="the model") or _paths_in(model, patterns)
    recompute = _Recompute()
    model.register_forward_pre_hook(recompute.begin)
    for path in paths:
        module = model.get_submodule(path.replace("/", "."))
        module.register_forward_hook(recompute.store)
    # after the hooks above: an output of the whole model is stored while the tape still runs
    model.register_forward_hook(recompute.end, always_call=True)
    return paths


def _paths_in(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """The same for a network that no table knows: without patterns, its units or its parts."""
    if patterns:
        names = {path.replace(".", "/"): path for path, _ in model.named_modules() if path}
        return match_modules(patterns, {name: (name,) for name in names}, model="the network")
    if isinstance(model, UnitModel):
        return tuple(parts[-1].replace(".", "/") for parts in model.units.values())
    return tuple(name for name, _ in model.named_children())


class _Recompute:
    """The hooks of one model: a tape for every pass that gradients are wanted of."""

    def __init__(self) -> None:
        self._tape: ForwardRecorder | None = None

    def begin(self, model: nn.Module, inputs: Any) -> None:
        """Start a tape before a training pass."""
        if model.training and torch.is_grad_enabled():
            self._tape = ForwardRecorder()
            self._tape.__enter__()

    def store(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        """Store what a module gives."""
        if self._tape is not None:
            self._tape.store(output)

    def end(self, model: nn.Module, inputs: Any, output: Any) -> None:
        """End the tape, also after a failure."""
        tape, self._tape = self._tape, None
        if tape is not None:
            tape.__exit__(None, None, None)
