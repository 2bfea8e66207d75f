"""Everything that a step does after its backward pass on a GPU, in three kernel launches."""

from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.engine.dynamic_loss_scale import (
    GROWTH_INTERVAL,
    LARGEST_SCALE,
    REMEMBERED_CHANGES,
    SMALLEST_SCALE,
    DynamicLossScale,
)
from phalanx.engine.replica_statistics import ReplicaStatistics
from phalanx.engine.weight_average import WeightAverage
from phalanx.fused.half_copies import find_half_copy
from phalanx.kernels.fused import find_fused
from phalanx.kernels.update import (
    CHANGES,
    FINITE_STEPS,
    GROUPS,
    HISTORY,
    NORM,
    RESULTS,
    SCALE,
    SKIPPED,
    GroupSettings,
    MultiTensorUpdate,
    UpdateColumns,
    UpdateRows,
    UpdateTensors,
    overwrite,
)
from phalanx.optim.fused_formulas import find_fused_formula, find_group_settings
from phalanx.optim.update import set_learning_rates
from phalanx.plan.averaging import ema_decay_at


def can_fuse_update(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Whether `FusedUpdate` supports the optimizer, and its kernels the device of the model."""
    tensors = list(model.state_dict().values())
    return (
        find_fused_formula(optimizer) is not None
        and all(t.is_cuda for t in tensors)
        and all(t.dtype in (torch.float32, torch.int64) for t in tensors)
        and find_fused("phalanx.kernels.update_fused.build_update_tables") is not None
    )


class DeviceLossScale:
    """A dynamic loss scale in device memory, where kernels change it.

    Only reading it waits for the device: at log points and saves.
    """

    def __init__(self, start: DynamicLossScale, device: torch.device) -> None:
        size = HISTORY + 2 * REMEMBERED_CHANGES
        self.numbers = torch.zeros(size, dtype=torch.float64, device=device)
        self.multiplier: Tensor = torch.zeros((), device=device)  # the factor for a pass's loss
        self.load(start)

    def load(self, values: DynamicLossScale) -> None:
        """Overwrite the values in place."""
        changes = values.history[-REMEMBERED_CHANGES:]
        numbers = [values.scale, values.finite_steps, values.skipped, len(changes)]
        flat = [number for change in changes for number in change]
        overwrite(self.numbers[: HISTORY + len(flat)], [*numbers, *flat])
        overwrite(self.multiplier, values.scale)

    def read(self) -> DynamicLossScale:
        """The values as they are now. Waits for the device."""
        numbers = self.numbers.tolist()
        changes = int(numbers[CHANGES])
        places = [
            HISTORY + 2 * (n % REMEMBERED_CHANGES)
            for n in range(max(0, changes - REMEMBERED_CHANGES), changes)
        ]
        return DynamicLossScale(
            scale=numbers[SCALE],
            finite_steps=int(numbers[FINITE_STEPS]),
            skipped=int(numbers[SKIPPED]),
            history=[(int(numbers[place]), numbers[place + 1]) for place in places],
        )

    @property
    def scale(self) -> float:
        """The scale of the next step. Waits for the device."""
        return self.read().scale

    @property
    def skipped(self) -> int:
        """Steps that overflowed. Waits for the device."""
        return self.read().skipped

    @property
    def history(self) -> list[tuple[int, float]]:
        """The last changes: step, and the scale from then on. Waits for the device."""
        return self.read().history

    def to_dict(self) -> dict[str, Any]:
        """The values as DynamicLossScale.to_dict returns them. Waits for the device."""
        return self.read().to_dict()


class FusedUpdate:
    """Unscales and clips gradients; updates weights, 16-bit copies, averages and the loss scale.

    If the loss scale adapts and gradients are not finite, the kernels skip the update. The
    optimizer still holds the state, under its usual names, but its `step` is never called.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float = 0.0,
        clip_value: float = 0.0,
        velocity_ratio: float = 1.0,  # of sgd_combined: loss scale over its velocity's scale
        scaler: DeviceLossScale | None = None,
        average: WeightAverage | None = None,
        replica_statistics: ReplicaStatistics | None = None,
    ) -> None:
        formula = find_fused_formula(optimizer)
        assert formula is not None
        self._optimizer, self._formula = optimizer, formula
        self._average, self._replica_statistics = average, replica_statistics
        groups = optimizer.param_groups
        self._weights: list[Tensor] = [weight for group in groups for weight in group["params"]]
        self._groups = [number for number, group in enumerate(groups) for _ in group["params"]]
        self._limits = (clip_norm, clip_value or inf, velocity_ratio)
        device, size = self._weights[0].device, GROUPS + len(groups) * len(GroupSettings._fields)
        self._tensors = UpdateTensors(
            formula.name,
            formula.has_momentum,
            settings=torch.zeros(size, dtype=torch.float64, device=device),
            results=torch.zeros(RESULTS, device=device),
            loss_scale=None if scaler is None else scaler.numbers,
            multiplier=None if scaler is None else scaler.multiplier,
        )
        self._kernels = MultiTensorUpdate(self._tensors)
        self._seen: list[int] | None = None  # the addresses that the kernels were last given

    def apply(self, step: int, lr: float, loss_scale: float) -> Tensor:
        """Update once, free the gradients and return their norm.

        loss_scale: that of the gradients, if it is fixed. A skipped step has the norm 0. The next
        step overwrites the returned tensor.
        """
        self.prepare(step, lr, loss_scale)
        self.launch()
        for weight in self._weights:
            weight.grad = None
        return self._tensors.results[NORM]

    @torch.no_grad()
    def prepare(self, step: int, lr: float, loss_scale: float) -> None:
        """Copy the settings of a step to the device: the part that a CUDA graph cannot replay."""
        groups = self._optimizer.param_groups
        set_learning_rates(groups, lr)
        share = 1 - ema_decay_at(self._average.decay, step) if self._average else 0.0
        numbers = [loss_scale, step, share, *self._limits]
        numbers += [GROWTH_INTERVAL, SMALLEST_SCALE, LARGEST_SCALE]
        for group in groups:
            numbers += find_group_settings(group)
        overwrite(self._tensors.settings, numbers)
        if self._find_addresses() != self._seen:
            stays = self._kernels.set_rows(self._find_rows())
            self._seen = self._find_addresses() if stays else None

    def launch(self) -> None:
        """Launch the kernels of one update, as prepared; a CUDA graph may replay it."""
        self._kernels.run()

    def _find_addresses(self) -> list[int]:
        """The addresses of all tensors of a step; cheap, since it is called in every step.

        Addresses and not ids: a new object may get the id of a freed one, as happens in every step
        with offloaded state.
        """
        weights, state = self._weights, self._optimizer.state
        gradients = [weight.grad for weight in weights]
        copies = map(find_half_copy, weights)
        return [
            *map(Tensor.data_ptr, weights),
            *(0 if gradient is None else gradient.data_ptr() for gradient in gradients),
            *(0 if copy is None else copy.data_ptr() for copy in copies),
            *(part.data_ptr() for w in weights if w in state for part in state[w].values()),
            *(tensor.data_ptr() for pair in self._find_averaged() for tensor in pair),
        ]

    def _find_averaged(self) -> list[tuple[Tensor, Tensor]]:
        """Each averaged tensor with its average."""
        if self._average is None:
            return []
        more = [] if self._replica_statistics is None else self._replica_statistics.pairs()
        return [*self._average.pairs(), *more]

    def _find_rows(self) -> UpdateRows:
        """The current tensors: gradients are reallocated in every step, loading replaces state."""
        weights, formula = self._weights, self._formula
        states = formula.find_states(weights, self._optimizer)
        own, pairs = set(map(id, weights)), self._find_averaged()
        averages = {id(now): average for now, average in pairs if id(now) in own}
        buffers = [pair for pair in pairs if id(pair[0]) not in own]
        averaged = [pair for pair in buffers if pair[0].is_floating_point()]
        none: list[Tensor | None] = [None] * len(averaged)
        columns = UpdateColumns(
            weights=[*weights, *(now for now, _ in averaged)],
            gradients=[*(weight.grad for weight in weights), *none],
            first=[*_get_each(states, formula.first), *none],
            second=[*_get_each(states, formula.second), *none],
            averages=[*(averages.get(id(w)) for w in weights), *(a for _, a in averaged)],
            halves=[*map(find_half_copy, weights), *none],
            numbers=[*_get_each(states, formula.number), *none],
        )
        counters = [pair for pair in buffers if not pair[0].is_floating_point()]
        return UpdateRows(columns, [*self._groups, *[0] * len(averaged)], counters)


def _get_each(states: list[dict[str, Tensor]], name: str | None) -> list[Tensor | None]:
    """The tensor of that name in each state, or None."""
    return [None if name is None else state.get(name) for state in states]
