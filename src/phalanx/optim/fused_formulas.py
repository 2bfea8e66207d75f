"""The formula of phalanx.kernels.update for each optimizer, and the names of its state."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.kernels.update import GroupSettings
from phalanx.optim.optimizers import Group, RmspropTf, SgdCombined

_State = dict[str, Tensor]  # of one weight


@dataclass(frozen=True)
class _FusedFormula:
    """A formula of the kernels, and the names of the state it changes; None if it has none."""

    name: str  # a key of phalanx.kernels.update.FORMULAS
    first: str | None
    second: str | None = None
    number: str | None = None  # a scalar per weight
    start: float = 0.0  # initial value of `first`
    number_type: torch.dtype = torch.float32

    @property
    def has_momentum(self) -> bool:
        """Whether there is a momentum buffer, for formulas in which it is optional."""
        return "momentum_buffer" in (self.first, self.second)

    def find_states(
        self, weights: Sequence[Tensor], optimizer: torch.optim.Optimizer
    ) -> list[_State]:
        """The state of each weight; for those with a gradient it is complete, on their device."""
        states = optimizer.state
        return [
            self._complete(weight, states[weight])
            if weight.grad is not None
            else states.get(weight, {})
            for weight in weights
        ]

    def _complete(self, weight: Tensor, state: _State) -> _State:
        """The state of a weight before its update, created if it is the first one."""
        if self.first is not None and self.first not in state:
            state[self.first] = torch.full_like(weight, self.start, requires_grad=False)
        if self.second is not None and self.second not in state:
            state[self.second] = torch.zeros_like(weight, requires_grad=False)
        if self.number is not None:
            found = state.get(self.number)
            if found is None:  # a velocity of 0 may have any scale
                start = 1.0 if self.number == "velocity_scale" else 0.0
                state[self.number] = torch.full((), start, **self._like(weight))
            elif found.is_cuda != weight.is_cuda:  # restored from a checkpoint
                state[self.number] = found.to(**self._like(weight))
        return state

    def _like(self, weight: Tensor) -> dict[str, Any]:
        """The device and dtype of a weight's scalar."""
        return {"device": weight.device, "dtype": self.number_type}


def _find_sgd(group: Group) -> _FusedFormula:
    first = "momentum_buffer" if group["momentum"] else None
    return _FusedFormula("nesterov" if group["nesterov"] else "sgd", first=first)


def _find_rmsprop(group: Group) -> _FusedFormula:
    second = "momentum_buffer" if group["momentum"] else None
    return _FusedFormula("rmsprop", first="square_avg", second=second, number="step")


def _find_rmsprop_tf(group: Group) -> _FusedFormula:
    second = "momentum_buffer" if group["momentum"] else None
    return _FusedFormula("rmsprop_tf", first="square_avg", second=second, start=group["start"])


_COMBINED = _FusedFormula(
    "sgd_combined", first="velocity", number="velocity_scale", number_type=torch.float64
)
_ADAM = _FusedFormula("adam", first="exp_avg", second="exp_avg_sq", number="step")
_FORMULAS: dict[type, Callable[[Group], _FusedFormula]] = {
    torch.optim.SGD: _find_sgd,
    SgdCombined: lambda group: _COMBINED,
    torch.optim.Adam: lambda group: _ADAM,
    torch.optim.RMSprop: _find_rmsprop,
    RmspropTf: _find_rmsprop_tf,
}


def find_fused_formula(optimizer: torch.optim.Optimizer) -> _FusedFormula | None:
    """The formula of an optimizer from `build_optimizer`; None if the kernels do not have it."""
    find = _FORMULAS.get(type(optimizer))
    return None if find is None else find(optimizer.param_groups[0])


def find_group_settings(group: Group) -> GroupSettings:
    """The settings of a parameter group for the kernels, with its current learning rate."""
    betas = group.get("betas", (0.0, 0.0))
    return GroupSettings(
        lr=group["lr"],
        l2=group["l2"],
        weight_factor=1 - group["lr"] * group["decoupled_decay"],
        momentum=group.get("momentum", betas[0]),
        decay=group.get("alpha", group.get("decay_rate", betas[1])),
        eps=group.get("eps", 0.0),
    )
