"""Weights and optimizer state that are 16-bit between updates and float32 during an update.

The optimizer never sees 16-bit tensors: during an update, float32 copies replace the weights in its
groups and its state. The parameters themselves, and hooks on them, stay the same objects.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.kernels.rounding import COUNTS, round_each
from phalanx.plan.draws import GOLDEN, MASK, splitmix64, stream_key

HALF_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_State = dict[str, Tensor]  # of one weight


@dataclass
class _HalfWeight:
    """A 16-bit weight, its 16-bit state, and the float32 copy that is updated instead."""

    weight: Tensor
    state: _State
    copy: Tensor


@torch.no_grad()
def _to_float32(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Float32 copies of tensors, each in the memory layout of its counterpart in `like`."""
    copies = [torch.empty_like(t, dtype=torch.float32, requires_grad=False) for t in like]
    if copies:
        torch._foreach_copy_(copies, list(tensors))
    return copies


def is_per_element(value: object, weight: Tensor) -> bool:
    """Whether a part of a weight's state has the weight's shape, unlike a count of steps."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == weight.shape


class HalfWeights:
    """The 16-bit weights of a model, for any optimizer; 32-bit weights are not changed."""

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
        self._round = partial(round_each, stochastic=stochastic, saturate=saturate)
        self.names = {id(weight): name for name, weight in model.named_parameters()}
        self.device = next(model.parameters()).device

    @contextmanager
    def in_float32(self, step: int) -> Iterator[Tensor]:
        """Context in which the optimizer has float32 weights, gradients and state.

        Yields a tensor on the device that holds the update's `COUNTS` afterwards. Scale and clip
        gradients inside: `collect_gradients(optimizer)` returns them in float32. Weights that are
        not updated keep their bits.
        """
        counts = torch.zeros(len(COUNTS), dtype=torch.float64, device=self.device)
        halves = self._replace_by_copies()
        try:
            yield counts
            if halves:
                counts.copy_(self._round_weights(halves, step))
                self._round_state(halves, step)
        finally:
            for half in halves:
                if half.copy.grad is None:
                    half.weight.grad = None
            self._replace_in_optimizer({half.copy: (half.weight, half.state) for half in halves})

    def _replace_by_copies(self) -> list[_HalfWeight]:
        """Give the optimizer float32 copies of 16-bit weights, their gradients and their state."""
        weights = [
            weight
            for group in self.optimizer.param_groups
            for weight in group["params"]
            if weight.dtype in HALF_TYPES.values() and weight.grad is not None
        ]
        copies = _to_float32(weights, weights)
        gradients = _to_float32([weight.grad for weight in weights], weights)
        for copy, gradient in zip(copies, gradients, strict=True):
            copy.grad = gradient
        states = [self.optimizer.state.get(weight, {}) for weight in weights]
        wide_states = [dict(state) for state in states]
        found = [
            (state, name, copy)
            for state, copy in zip(wide_states, copies, strict=True)
            for name, value in state.items()
            if is_per_element(value, copy)
        ]
        halves = [state[name] for state, name, _ in found]
        values = _to_float32(halves, [copy for _, _, copy in found])
        for (state, name, _), value in zip(found, values, strict=True):
            state[name] = value
        self._replace_in_optimizer(
            dict(zip(weights, zip(copies, wide_states, strict=True), strict=True))
        )
        return list(map(_HalfWeight, weights, states, copies))

    def _round_weights(self, halves: list[_HalfWeight], step: int) -> Tensor:
        """Round the copies into their weights; returns the update's counts."""
        weights = [half.weight for half in halves]
        return self._round(
            [half.copy for half in halves],
            [weight.detach() for weight in weights],
            [weight.grad for weight in weights if weight.grad is not None],
            keys=self._keys([self.names[id(weight)] for weight in weights], step),
        )

    def _round_state(self, halves: list[_HalfWeight], step: int) -> None:
        """Round the copies' state to 16 bits, into its previous memory."""
        names: list[str] = []
        values: list[Tensor] = []
        targets: list[Tensor] = []
        for half in halves:
            dtype, old = half.weight.dtype, half.state
            half.state = dict(self.optimizer.state.get(half.copy, {}))
            found = {n: v for n, v in half.state.items() if is_per_element(v, half.weight)}
            for name, value in found.items():
                target = old.get(name)
                if target is None or target.dtype != dtype:
                    target = torch.empty_like(value, dtype=dtype)
                half.state[name] = target
                names.append(f"{self.names[id(half.weight)]}:{name}")
                values.append(value)
                targets.append(target)
        self._round(values, targets, keys=self._keys(names, step))

    def _keys(self, names: Sequence[str], step: int) -> list[int]:
        """The key of each name's random bits in this step."""
        bases = np.array([stream_key(self.seed, f"rounding {n}", 0) for n in names], np.uint64)
        return splitmix64(bases + GOLDEN + np.uint64(step & MASK)).tolist()

    def _replace_in_optimizer(self, others: dict[Tensor, tuple[Tensor, _State]]) -> None:
        """Replace weights, and their state if they have any, in the optimizer."""
        for group in self.optimizer.param_groups:
            group["params"] = [others[w][0] if w in others else w for w in group["params"]]
        for weight, (other, state) in others.items():
            if self.optimizer.state.pop(weight, None) is not None:
                self.optimizer.state[other] = state
