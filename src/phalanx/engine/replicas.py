"""The passes of a step with several replicas, some or all of which run in this process."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.engine.replica_statistics import ReplicaStatistics
from phalanx.engine.step import ForwardBackward, MicroBatch, RunPass, RunTurn, Scale
from phalanx.plan.layout import Layout
from phalanx.ranges import RANGES


class _GradientSum(Protocol):
    """Sums the gradients of all replicas; see phalanx.parallel.gradients."""

    def pass_context(self, *, last: bool) -> AbstractContextManager[Any]: ...

    def end_round(self, ranks: int) -> None: ...

    def finish(self, totals: Tensor) -> Tensor: ...


def build_turn(run_pass: RunPass, gradients: _GradientSum) -> RunTurn:
    """A function that runs the passes of a turn one after the other."""

    def run_turn(
        passes: Sequence[Sequence[MicroBatch]], loss_scale: Scale, is_last: bool
    ) -> Tensor:
        totals = []
        for number, batches in enumerate(passes, start=1):
            with gradients.pass_context(last=is_last and number == len(passes)):
                totals.append(run_pass(batches, loss_scale))
        return sum(totals[1:], totals[0])

    return run_turn


def build_replica_passes(
    run_turn: RunTurn,
    gradients: _GradientSum,
    layout: Layout,
    *,
    rank: int,
    global_batch: int,
    statistics: Callable[[], ReplicaStatistics | None],
) -> ForwardBackward:
    """A function that runs this rank's turns in order, each with its own running statistics.

    It expects the micro-batches of a step ordered by pass: pass n of every replica, then n + 1.
    """
    turns, own = layout.turns_of(rank), len(layout.replicas_of(rank))

    def run_own_turn(number: int, batches: Sequence[MicroBatch], loss_scale: Scale) -> Tensor:
        """Run all passes of one of this rank's turns; the sums of [loss, correct predictions]."""
        kept, size = statistics(), layout.turn_size
        if kept is not None:
            kept.enter(number)
        passes = [
            batches[first : first + size] for first in range(number * size, len(batches), own)
        ]
        totals = run_turn(passes, loss_scale, number == len(turns) - 1)
        if kept is not None:
            kept.leave(number)
        return totals

    def forward_backward(batches: Sequence[MicroBatch], loss_scale: Scale) -> Tensor:
        totals = []
        for number in range(layout.rounds):
            if number < len(turns):
                totals.append(run_own_turn(number, batches, loss_scale))
            else:  # in the last round, only some of the ranks have a turn
                totals.append(torch.zeros_like(totals[0]))
            done = number * layout.pipelines
            with RANGES("sum of gradients"):
                gradients.end_round(min(layout.pipelines, layout.turns - done))
        with RANGES("sum of gradients"):
            sums = gradients.finish(torch.stack(totals))
        return sums[: layout.turns].sum(0) / global_batch

    return forward_backward
