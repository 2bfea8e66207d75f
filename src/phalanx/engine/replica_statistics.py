"""The running statistics of each replica, for runs with several replicas.

A model in memory has one set of buffers. Those of each replica are kept here, and copied into the
model for its passes. To be scored or saved, the model gets the mean over all replicas.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.engine.weight_average import WeightAverage
from phalanx.errors import CheckpointError
from phalanx.models.weights import find_mismatches
from phalanx.plan.averaging import ema_decay_at
from phalanx.plan.layout import Layout

_AVERAGE = "average"
_Buffers = dict[str, Tensor]


class ReplicaStatistics:
    """The replicas' buffers: those of this rank's turns, and all of them once gathered.

    Replicas of one turn share their batch-norm statistics, and so have one set of buffers.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        *,
        rank: int,
        average: WeightAverage | None,
        gather: Callable[[Any], list[Any]],
    ) -> None:
        parameters = dict(model.named_parameters())
        self._buffers = {n: t for n, t in model.state_dict().items() if n not in parameters}
        self._layout, self._rank, self._turns = layout, rank, layout.turns_of(rank)
        self._average, self._gather = average, gather
        self._rows: list[_Buffers] = []
        self._averaged_rows: list[_Buffers] = []  # of float buffers; empty without an average
        self._all: dict[str, Tensor] = {}  # of all replicas, from the last `load_mean_statistics`
        self._reset_rows()

    def _reset_rows(self) -> None:
        """Start every replica from the buffers of the model and its average."""
        self._rows = [_clone(self._buffers) for _ in self._turns]
        if self._average is not None:
            known = self._average.tensors()
            averages = {name: known[name] for name, now in self._floating(self._buffers).items()}
            self._averaged_rows = [_clone(averages) for _ in self._turns]

    @staticmethod
    def _floating(buffers: _Buffers) -> _Buffers:
        return {name: now for name, now in buffers.items() if now.is_floating_point()}

    def enter(self, turn: int) -> None:
        """Copy the buffers of one of this rank's turns into the model."""
        _copy(self._buffers, self._rows[turn])

    def leave(self, turn: int) -> None:
        """Copy the turn's buffers back from the model."""
        _copy(self._rows[turn], self._buffers)

    @torch.no_grad()
    def update_average(self, step: int) -> None:
        """Update the moving averages, after `step` optimizer steps."""
        assert self._average is not None
        kept = ema_decay_at(self._average.decay, step)
        for row, averages in zip(self._rows, self._averaged_rows, strict=True):
            now = [row[name].to(average.dtype) for name, average in averages.items()]
            if now:
                torch._foreach_lerp_(list(averages.values()), now, 1 - kept)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """The buffers of this rank's turns, each with its average."""
        return [
            (row[name], average)
            for row, averages in zip(self._rows, self._averaged_rows, strict=True)
            for name, average in averages.items()
        ]

    @torch.no_grad()
    def load_mean_statistics(self) -> None:
        """Set the model and its average to the mean over all replicas. All ranks must call it."""
        mine = [_to_host(row) for row in self._rows], [_to_host(r) for r in self._averaged_rows]
        everybody = self._gather(mine)
        self._all = {}
        for rank in self._layout.peers_of(self._rank):  # the other ranks have other stages
            rows, averaged_rows = everybody[rank]
            for turn, row in zip(self._layout.turns_of(rank), rows, strict=True):
                self._store_row("", turn, row)
            for turn, row in zip(self._layout.turns_of(rank), averaged_rows, strict=False):
                self._store_row(f"{_AVERAGE}/", turn, row)
        means = {name: self._mean("", name) for name in self._buffers}
        _copy(self._buffers, means)
        if self._average is not None:
            names = self._floating(self._buffers)
            self._average.overwrite({n: self._mean(f"{_AVERAGE}/", n) for n in names})

    def _store_row(self, prefix: str, turn: tuple[int, ...], row: _Buffers) -> None:
        for replica in turn:
            self._all |= {f"{prefix}{replica}/{name}": now for name, now in row.items()}

    def _mean(self, prefix: str, name: str) -> Tensor:
        """The mean of a buffer over all replicas; for an integer buffer, replica 0's value."""
        rows = [self._all[f"{prefix}{replica}/{name}"] for replica in range(self._layout.replicas)]
        if not rows[0].is_floating_point():
            return rows[0]
        return torch.stack(rows).double().mean(0).to(rows[0].dtype)

    def tensors(self) -> dict[str, Tensor]:
        """The buffers and averages of every replica, from the last `load_mean_statistics`."""
        return dict(self._all)

    def load(self, tensors: Mapping[str, Tensor] | None, *, where: str) -> None:
        """Restore what `tensors` returned; if None, all replicas get the model's buffers."""
        self._reset_rows()
        replicas = {name.partition("/")[0] for name in tensors or {}} - {_AVERAGE}
        if tensors is None or len(replicas) != self._layout.replicas:
            return  # a fork with another number of replicas
        has_average = any(name.startswith(_AVERAGE) for name in tensors)
        span = self._layout.bn_span
        for number, turn in enumerate(self._turns):
            # replicas that share statistics now may not have before: take those of the first
            first = turn[0] // span * span
            self._fill(self._rows[number], tensors, f"{first}/", where)
            if self._averaged_rows and has_average:
                prefix = f"{_AVERAGE}/{first}/"
                self._fill(self._averaged_rows[number], tensors, prefix, where)

    @staticmethod
    def _fill(row: _Buffers, tensors: Mapping[str, Tensor], prefix: str, where: str) -> None:
        found = {name: tensors[prefix + name] for name in row if prefix + name in tensors}
        problems = find_mismatches(row, found)
        if problems:
            raise CheckpointError(f"{where}: not the statistics of this model: {problems[0]}")
        _copy(row, {**row, **found})


def _clone(buffers: Mapping[str, Tensor]) -> _Buffers:
    return {name: now.detach().clone() for name, now in buffers.items()}


def _to_host(buffers: Mapping[str, Tensor]) -> _Buffers:
    return {name: now.detach().cpu().clone() for name, now in buffers.items()}


@torch.no_grad()
def _copy(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    """Overwrite tensors in place, in one call."""
    if targets:
        torch._foreach_copy_(list(targets.values()), [sources[name] for name in targets])
