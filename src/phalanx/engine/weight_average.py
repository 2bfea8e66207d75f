"""Averages of weights: live while training, or over checkpoints afterwards."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from phalanx.errors import CheckpointError
from phalanx.models.weights import compare
from phalanx.plan.averaging import decay_at

_Context = Callable[[], AbstractContextManager[None]]  # the context passes run in


class WeightAverage:
    """The exponential moving average of a model's weights, in 32 bits whatever they are in.

    Running statistics of norms are averaged like weights; whole numbers, such as
    num_batches_tracked, are the model's own. Stays on the device and never waits for it.
    """

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        self.decay = decay
        self._model, self._slots = model, _find_slots(model)
        self._averages = {name: _float32_copy(slot.tensor) for name, slot in self._slots.items()}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Take in the weights after `step` optimizer steps."""
        averages, weights, counters, counts = [], [], [], []
        for name, slot in self._slots_in(model).items():
            average, now = self._averages[name], slot.tensor
            if now.is_floating_point():
                averages.append(average)
                weights.append(now.float())
            else:
                counters.append(average)
                counts.append(now)
        if averages:
            torch._foreach_lerp_(averages, weights, 1 - decay_at(self.decay, step))
        if counters:
            torch._foreach_copy_(counters, counts)

    @torch.no_grad()
    def reset_to(self, model: nn.Module) -> None:
        """Forget what was averaged: the model's weights are the average now."""
        for name, slot in self._slots_in(model).items():
            self._averages[name].copy_(slot.tensor)

    def tensors(self) -> dict[str, Tensor]:
        """The averages under the model's names, for a checkpoint; the very tensors, no copies."""
        return dict(self._averages)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], *, where: str) -> None:
        """Take back what `tensors` gave, bit for bit."""
        problems = sorted(compare(self._averages, tensors))
        if problems:
            raise CheckpointError(f"{where}: not the averages of this model: {problems[0]}")
        for name, average in self._averages.items():
            if name in tensors:  # weights.compare lets old files go without counters
                average.copy_(tensors[name])

    @contextmanager
    def applied_to(self, model: nn.Module) -> Iterator[None]:
        """A block in which the model has the averaged weights; then its own, bit for bit."""
        slots = self._slots_in(model)
        own = {name: slot.tensor.detach().clone() for name, slot in slots.items()}
        _overwrite(slots, self._averages)
        try:
            yield
        finally:
            _overwrite(slots, own)

    def _slots_in(self, model: nn.Module) -> dict[str, "_TensorSlot"]:
        if model is not self._model:
            self._model, self._slots = model, _find_slots(model)
        return self._slots


class _TensorSlot(NamedTuple):
    """Where a module keeps a tensor. Looked up at every use: a replaced tensor is seen."""

    table: dict[str, Tensor | None] | dict[str, nn.Parameter | None]
    leaf: str

    @property
    def tensor(self) -> Tensor:
        """The tensor that is there now."""
        found = self.table[self.leaf]
        assert found is not None
        return found


def _find_slots(model: nn.Module) -> dict[str, _TensorSlot]:
    """The places of all that a model's state dict holds, by name."""
    slots = {}
    for name in model.state_dict():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if leaf in module._parameters:
            slots[name] = _TensorSlot(module._parameters, leaf)
        elif leaf in module._buffers:
            slots[name] = _TensorSlot(module._buffers, leaf)
    return slots


def _float32_copy(tensor: Tensor) -> Tensor:
    """What an average begins as: the values in 32 bits, laid out as the tensor is."""
    copy = tensor.detach().clone()
    return copy.float() if copy.is_floating_point() else copy


@torch.no_grad()
def _overwrite(slots: Mapping[str, _TensorSlot], tensors: Mapping[str, Tensor]) -> None:
    """Overwrite a model's tensors in place: the optimizer and graphs hold on to them."""
    for name, slot in slots.items():
        slot.tensor.copy_(tensors[name])


def average_weights(
    states: Iterable[Mapping[str, Tensor]], *, strategy: str = "mean", decay: float = 0.99
) -> dict[str, Tensor]:
    """One state dict from several, given oldest first; each is let go before the next is taken.

    mean: all count alike. exponential: average = decay * average + (1 - decay) * weights,
    beginning with the oldest. Computed in 64 bits, returned in the type of the weights. Running
    statistics are averaged like weights; whole numbers are those of the newest.
    """
    total: dict[str, Tensor] = {}
    newest: Mapping[str, Tensor] = {}
    for number, state in enumerate(states, start=1):
        problems = sorted(compare(newest, state)) if newest else []
        if problems:
            raise CheckpointError(f"checkpoint {number} is of another network: {problems[0]}")
        newest = state
        kept = {"mean": (number - 1) / number, "exponential": decay}[strategy]
        for name, tensor in state.items():
            if not tensor.is_floating_point():
                total[name] = tensor.clone()
            elif number == 1:
                total[name] = tensor.to(torch.float64, copy=True)
            else:
                total[name].mul_(kept).add_(tensor.double(), alpha=1 - kept)
    return {name: total[name].to(tensor.dtype) for name, tensor in newest.items()}


@torch.no_grad()
def reestimate_norms(
    model: nn.Module, batches: Iterable[Tensor], *, autocast: _Context = nullcontext
) -> tuple[str, ...]:
    """Give batch norms the mean statistics of these images; the names of the buffers made anew.

    The rest of the model works as when it is scored: nothing is dropped. Where there is no batch
    norm, no batch is taken.
    """
    norms = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.track_running_stats
    }
    if not norms:
        return ()
    model.eval()
    momenta = {path: norm.momentum for path, norm in norms.items()}
    for norm in norms.values():
        norm.train()
        norm.reset_running_stats()
        norm.momentum = 1.0  # each batch's own statistics, which are summed up in 32 bits
    try:
        means = _mean_statistics(model, batches, list(norms.values()), autocast=autocast)
    finally:
        for path, norm in norms.items():
            norm.momentum = momenta[path]
        model.eval()
    for buffer, mean in zip(_running_statistics(norms.values()), means, strict=True):
        buffer.copy_(mean)
    leaves = ("running_mean", "running_var", "num_batches_tracked")
    return tuple(f"{path}.{leaf}".lstrip(".") for path in norms for leaf in leaves)


def _mean_statistics(
    model: nn.Module,
    batches: Iterable[Tensor],
    norms: list[_BatchNorm],
    *,
    autocast: _Context,
) -> list[Tensor]:
    """The statistics of all norms, each the mean over the batches."""
    sums = [torch.zeros_like(s, dtype=torch.float32) for s in _running_statistics(norms)]
    taken = 0
    for images in batches:
        with autocast():
            model(images)
        torch._foreach_add_(sums, [s.float() for s in _running_statistics(norms)])
        taken += 1
    if not taken:
        raise ValueError("there is no batch to take statistics from")
    return [total / taken for total in sums]


def _running_statistics(norms: Iterable[_BatchNorm]) -> list[Tensor]:
    """The running means and variances of norms, in order."""
    found = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var)]
    return [buffer for buffer in found if buffer is not None]
