"""Which formula of phalanx.kernels.update an optimizer has, and where its state is."""

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
    """A formula of the kernels, and the names of the state it changes; None where it has none."""

    name: str  # a key of phalanx.kernels.update.FORMULAS
    first: str | None = None
    second: str | None = None
    number: str | None = None  # has no element for each of the weight
    start: float = 0.0  # of `first`
    number_type: torch.dtype = torch.float32

    @property
    def has_momentum(self) -> bool:
        """Whether there is a velocity, for formulas that go without one."""
        return "momentum_buffer" in (self.first, self.second)

    def find_states(
        self, weights: Sequence[Tensor], optimizer: torch.optim.Optimizer
    ) -> list[_State]:
        """The state of each weight; of those with a gradient it is complete, and beside them."""
        states = optimizer.state
        return [
            self._complete(weight, states[weight])
            if weight.grad is not None
            else states.get(weight, {})
            for weight in weights
        ]

    def _complete(self, weight: Tensor, state: _State) -> _State:
        """The state of a weight that is to be updated, which may be its first time."""
        if self.first is not None and self.first not in state:
            state[self.first] = torch.full_like(weight, self.start, requires_grad=False)
        if self.second is not None and self.second not in state:
            state[self.second] = torch.zeros_like(weight, requires_grad=False)
        if self.number is not None:
            found = state.get(self.number)
            if found is None:  # of a velocity that is 0, any scale will do
                start = 1.0 if self.number == "velocity_scale" else 0.0
                state[self.number] = torch.full((), start, **self._like(weight))
            elif found.is_cuda != weight.is_cuda:  # as a checkpoint brought it back
                state[self.number] = found.to(**self._like(weight))
        return state

    def _like(self, weight: Tensor) -> dict[str, Any]:
        """Where the number of a weight lies, and its type."""
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
    """The formula of an optimizer that `build_optimizer` made; None for one the kernels lack."""
    find = _FORMULAS.get(type(optimizer))
    return None if find is None else find(optimizer.param_groups[0])


def find_group_settings(group: Group) -> GroupSettings:
    """The numbers of a group, for a step with the rate that it has now."""
    betas = group.get("betas", (0.0, 0.0))
    return GroupSettings(
        lr=group["lr"],
        l2=group["l2"],
        kept=1 - group["lr"] * group["decoupled_decay"],
        momentum=group.get("momentum", betas[0]),
        decay=group.get("alpha", group.get("decay_rate", betas[1])),
        eps=group.get("eps", 0.0),
    )
