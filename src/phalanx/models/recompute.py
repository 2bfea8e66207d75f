"""Recomputation: the outputs of some modules are stored, everything between is computed again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.catalog.variant import Variant
from phalanx.models.forward_recorder import ForwardRecorder
from phalanx.models.units import UnitModel
from phalanx.plan.recompute import find_kept_modules, match_modules


def enable_recomputation(
    model: nn.Module, patterns: Sequence[str], *, variant: Variant
) -> tuple[str, ...]:
    """Make training passes store nothing but these modules' outputs; gives the modules' paths.

    Without patterns the output of every unit is stored. Names, weights, results and gradients
    stay as they were, and passes without gradients run as before.
    """
    paths = find_kept_modules(variant, patterns, model="the model") or _find_paths(model, patterns)
    hooks = _RecomputationHooks()
    model.register_forward_pre_hook(hooks.start)
    for path in paths:
        module = model.get_submodule(path.replace("/", "."))
        module.register_forward_hook(hooks.store)
    # last, so that an output of the whole model can be stored while the recorder is still active
    model.register_forward_hook(hooks.stop, always_call=True)
    return paths


def _find_paths(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """The paths in a network that no table knows: without patterns, its units or its children."""
    if patterns:
        names = [path.replace(".", "/") for path, _ in model.named_modules() if path]
        return match_modules(patterns, {name: (name,) for name in names}, model="the network")
    if isinstance(model, UnitModel):
        return tuple(parts[-1].replace(".", "/") for parts in model.units.values())
    return tuple(name for name, _ in model.named_children())


class _RecomputationHooks:
    """The hooks of one model: they record every pass that gradients are wanted of."""

    def __init__(self) -> None:
        self._recorder: ForwardRecorder | None = None

    def start(self, model: nn.Module, inputs: Any) -> None:
        """Start to record a training pass."""
        if model.training and torch.is_grad_enabled():
            self._recorder = ForwardRecorder()
            self._recorder.__enter__()

    def store(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        """Store a module's output."""
        if self._recorder is not None:
            self._recorder.store(output)

    def stop(self, model: nn.Module, inputs: Any, output: Any) -> None:
        """Stop recording, also after a failure."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.__exit__(None, None, None)
