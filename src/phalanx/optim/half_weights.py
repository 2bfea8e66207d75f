"""Weights and optimizer state that have 16 bits between updates and 32 within.

A rule never sees 16 bits: while it works, float32 copies stand in for the weights in its groups
and in its state. The parameters themselves, and what hangs on them, are the same throughout.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.kernels.rounding import COUNTS, round_counted, round_each
from phalanx.plan.draws import GOLDEN, MASK, mix, stream_key

HALF_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_Slots = dict[str, Tensor]


@dataclass
class _Wide:
    """A 16-bit weight, the float32 copy that stands in for it, and its slots in 16 bits."""

    weight: Tensor
    stand_in: Tensor
    slots: _Slots


@torch.no_grad()
def _widened(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Float32 copies of tensors, each in the memory layout of its neighbour in `like`."""
    copies = [torch.empty_like(t, dtype=torch.float32, requires_grad=False) for t in like]
    if copies:
        torch._foreach_copy_(copies, list(tensors))
    return copies


def is_slot(value: object, weight: Tensor) -> bool:
    """Whether a rule keeps this for every element of a weight; counts of steps are not."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == weight.shape


def _room_for(slot: Tensor, weight: Tensor, before: Tensor | None) -> Tensor:
    """Memory for a slot in its weight's type: that of the slot before, where it fits."""
    if before is not None and before.dtype == weight.dtype:
        return before
    return torch.empty_like(slot, dtype=weight.dtype)


class HalfWeights:
    """The 16-bit weights of a model, for an optimizer of any rule; those of 32 bits are let be."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        seed: int,
        stochastic: bool,
        saturate: bool,
    ) -> None:
        self.optimizer = optimizer
        self.seed = seed
        self.how = {"stochastic": stochastic, "saturate": saturate}
        self.names = {id(weight): name for name, weight in model.named_parameters()}
        self.device = next(model.parameters()).device

    @contextmanager
    def in_float32(self, step: int) -> Iterator[Tensor]:
        """Within, the optimizer has float32 weights, gradients and state; after, 16 bits again.

        Gives what will hold the update's `COUNTS`, on the device. Scale and clip gradients within:
        `gradients_of(optimizer)` has them in float32. Weights that are not moved keep their bits.
        """
        counts = torch.zeros(len(COUNTS), dtype=torch.float64, device=self.device)
        wide = self._widen()
        try:
            yield counts
            if wide:
                counts.copy_(self._round_weights(wide, step))
                self._round_slots(wide, step)
        finally:
            self._put_back(wide)

    def _widen(self) -> list[_Wide]:
        """Put float32 copies of weights, gradients and slots in the optimizer's hands."""
        chosen = [
            weight
            for group in self.optimizer.param_groups
            for weight in group["params"]
            if weight.dtype in HALF_TYPES.values() and weight.grad is not None
        ]
        copies = _widened(chosen, chosen)
        gradients = _widened([weight.grad for weight in chosen], chosen)
        for copy, gradient in zip(copies, gradients, strict=True):
            copy.grad = gradient
        state = self.optimizer.state
        wide = [
            _Wide(weight, copy, state.get(weight, {}))
            for weight, copy in zip(chosen, copies, strict=True)
        ]
        self._exchange({one.weight: (one.stand_in, dict(one.slots)) for one in wide})
        self._widen_slots(wide)
        return wide

    def _widen_slots(self, wide: list[_Wide]) -> None:
        """Replace the 16-bit slots the stand-ins have by float32 copies."""
        found = [
            (one.stand_in, name)
            for one in wide
            for name, value in one.slots.items()
            if is_slot(value, one.weight)
        ]
        state = self.optimizer.state
        slots = [state[stand_in][name] for stand_in, name in found]
        copies = _widened(slots, [stand_in for stand_in, _ in found])
        for (stand_in, name), copy in zip(found, copies, strict=True):
            state[stand_in][name] = copy

    def _round_weights(self, wide: list[_Wide], step: int) -> Tensor:
        """Round stand-ins into their weights; the update's counts."""
        weights = [one.weight for one in wide]
        return round_counted(
            [one.stand_in for one in wide],
            [weight.detach() for weight in weights],
            [weight.grad for weight in weights if weight.grad is not None],
            keys=self._keys([self.names[id(weight)] for weight in weights], step),
            **self.how,
        )

    def _round_slots(self, wide: list[_Wide], step: int) -> None:
        """Round what the rule remembers to 16 bits."""
        names: list[str] = []
        values: list[Tensor] = []
        kept: list[Tensor] = []
        for one in wide:
            before, one.slots = one.slots, dict(self.optimizer.state.get(one.stand_in, {}))
            found = {key: slot for key, slot in one.slots.items() if is_slot(slot, one.weight)}
            goals = {
                key: _room_for(slot, one.weight, before.get(key)) for key, slot in found.items()
            }
            names += [f"{self.names[id(one.weight)]}:{key}" for key in found]
            values += found.values()
            kept += goals.values()
            one.slots |= goals
        round_each(values, kept, keys=self._keys(names, step), **self.how)

    def _keys(self, names: Sequence[str], step: int) -> list[int]:
        """A key of chances for each name, at this step."""
        bases = np.array([stream_key(self.seed, f"rounding {n}", 0) for n in names], np.uint64)
        return mix(bases + GOLDEN + np.uint64(step & MASK)).tolist()

    def _put_back(self, wide: list[_Wide]) -> None:
        """Put the weights back in the optimizer's hands, with the slots they have by now."""
        for one in wide:
            if one.stand_in.grad is None:
                one.weight.grad = None
        self._exchange({one.stand_in: (one.weight, one.slots) for one in wide})

    def _exchange(self, others: dict[Tensor, tuple[Tensor, _Slots]]) -> None:
        """Replace weights and their slots in the optimizer's groups and state, in their order."""
        optimizer = self.optimizer
        for group in optimizer.param_groups:
            group["params"] = [others[w][0] if w in others else w for w in group["params"]]
        before = list(optimizer.state.items())
        optimizer.state.clear()
        for weight, slots in before:
            other, own = others.get(weight, (weight, slots))
            optimizer.state[other] = own
