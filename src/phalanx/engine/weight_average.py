"""Averages of weights: while training, or of checkpoints afterwards."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from phalanx.errors import CheckpointError
from phalanx.models.weights import find_mismatches
from phalanx.plan.averaging import ema_decay_at

_Context = Callable[[], AbstractContextManager[None]]  # the context passes run in


class WeightAverage:
    """The exponential moving average of a model's weights, in float32 whatever their dtype.

    Running statistics of norms are averaged like weights; integers, such as num_batches_tracked,
    are copied from the model. Stays on the device and never waits for it.
    """

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        self.decay = decay
        # the dicts in which modules keep the tensors: walking the model every step costs too much
        self._slots: dict[str, tuple[dict[str, Any], str]] = {}
        for name in model.state_dict():
            path, _, leaf = name.rpartition(".")
            module = model.get_submodule(path)
            table = module._parameters if leaf in module._parameters else module._buffers
            self._slots[name] = (table, leaf)
        self._averages = {
            name: now.detach().to(
                torch.float32 if now.is_floating_point() else now.dtype, copy=True
            )
            for name, now in self._find_weights().items()
        }

    def _find_weights(self) -> dict[str, Tensor]:
        """The model's current tensors, including any that were replaced."""
        return {name: table[leaf] for name, (table, leaf) in self._slots.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average with the weights after `step` optimizer steps."""
        averages, weights, counters, counts = [], [], [], []
        for name, now in self._find_weights().items():
            if now.is_floating_point():
                averages.append(self._averages[name])
                weights.append(now.float())
            else:
                counters.append(self._averages[name])
                counts.append(now)
        if averages:
            torch._foreach_lerp_(averages, weights, 1 - ema_decay_at(self.decay, step))
        if counters:
            torch._foreach_copy_(counters, counts)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Every current tensor of the model, with its average."""
        slots, averages = self._slots.values(), self._averages.values()
        return [(t[leaf], average) for (t, leaf), average in zip(slots, averages, strict=True)]

    def reset(self) -> None:
        """Start again: set the average to the model's current weights."""
        _overwrite(self._averages, self._find_weights())

    def tensors(self) -> dict[str, Tensor]:
        """The averages under the model's names, for a checkpoint; not copied."""
        return dict(self._averages)

    def load(self, tensors: Mapping[str, Tensor], *, where: str) -> None:
        """Restore what `tensors` returned, bit for bit."""
        problems = find_mismatches(self._averages, tensors)
        if problems:
            raise CheckpointError(f"{where}: not the averages of this model: {problems[0]}")
        # find_mismatches accepts old files, which have no counters
        _overwrite(self._averages, {**self._averages, **tensors})

    def overwrite(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace some of the averages."""
        _overwrite({name: self._averages[name] for name in tensors}, tensors)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the model has the averaged weights; restores its own afterwards."""
        own = {name: now.detach().clone() for name, now in self._find_weights().items()}
        _overwrite(self._find_weights(), self._averages)
        try:
            yield
        finally:
            _overwrite(self._find_weights(), own)


@torch.no_grad()
def _overwrite(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    """Overwrite tensors in place: the optimizer and CUDA graphs hold references to them."""
    for name, target in targets.items():
        target.copy_(sources[name])


def average_weights(
    states: Iterable[Mapping[str, Tensor]], *, strategy: str = "mean", decay: float = 0.99
) -> dict[str, Tensor]:
    """The average of state dicts, given oldest first; at most two of them are held at a time.

    mean: all have the same weight. exponential: average = decay * average + (1 - decay) * weights,
    starting with the oldest. Computed in float64, returned in the dtype of the weights. Running
    statistics are averaged like weights; integers are those of the newest.
    """
    total: dict[str, Tensor] = {}
    newest: Mapping[str, Tensor] = {}
    for number, state in enumerate(states, start=1):
        problems = find_mismatches(newest, state) if newest else []
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
    """Set batch norms to the mean statistics of these images; the names of the changed buffers.

    The rest of the model runs in eval mode: nothing is dropped. If the model has no batch norm,
    no batch is read.
    """
    norms = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.track_running_stats
    }
    if not norms:
        return ()
    momenta = [norm.momentum for norm in norms.values()]
    model.eval()
    for norm in norms.values():
        norm.train()
        norm.reset_running_stats()
        norm.momentum = 1.0  # buffers get the statistics of one batch, which are summed in float32
    buffers = [b for norm in norms.values() for b in (norm.running_mean, norm.running_var)]
    statistics = [buffer for buffer in buffers if buffer is not None]
    sums = [torch.zeros_like(s, dtype=torch.float32) for s in statistics]
    taken = 0
    for images in batches:
        with autocast():
            model(images)
        torch._foreach_add_(sums, [s.float() for s in statistics])
        taken += 1
    if not taken:
        raise ValueError("there is no batch to take statistics from")
    for statistic, total in zip(statistics, sums, strict=True):
        statistic.copy_(total / taken)
    for norm, momentum in zip(norms.values(), momenta, strict=True):
        norm.momentum = momentum
    model.eval()
    leaves = ("running_mean", "running_var", "num_batches_tracked")
    return tuple(f"{path}.{leaf}".lstrip(".") for path in norms for leaf in leaves)
