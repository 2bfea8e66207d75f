"""The passes of a step that several replicas share, some of them or all in this process."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.engine.replica_statistics import ReplicaStatistics
from phalanx.engine.step import ForwardBackward, MicroBatch, RunPass
from phalanx.plan.layout import Layout


class _GradientSum(Protocol):
    """Makes one gradient of those of all replicas; see phalanx.parallel.gradients."""

    def pass_context(self, *, last: bool) -> AbstractContextManager[Any]: ...

    def end_round(self, ranks: int) -> None: ...

    def finish(self, totals: Tensor) -> Tensor: ...


def build_replica_passes(
    run_pass: RunPass,
    gradients: _GradientSum,
    layout: Layout,
    *,
    rank: int,
    global_batch: int,
    statistics: Callable[[], ReplicaStatistics | None],
) -> ForwardBackward:
    """Passes of this rank's turns one after the other, each with its own running statistics.

    A step's passes come in the order of their slices: pass n of every replica, then n + 1.
    """
    turns, own = layout.turns_of(rank), len(layout.replicas_of(rank))

    def run_turn(number: int, passes: Sequence[MicroBatch], loss_scale: float) -> Tensor:
        """All passes of this rank's turn; the sums over them of [loss, right answers]."""
        kept, firsts = statistics(), range(number * layout.turn_size, len(passes), own)
        if kept is not None:
            kept.enter(number)
        totals = []
        for first in firsts:
            last = number == len(turns) - 1 and first == firsts[-1]
            with gradients.pass_context(last=last):
                totals.append(run_pass(passes[first : first + layout.turn_size], loss_scale))
        if kept is not None:
            kept.leave(number)
        return sum(totals[1:], totals[0])

    def forward_backward(passes: Sequence[MicroBatch], loss_scale: float) -> Tensor:
        totals = []
        for number in range(layout.rounds):
            if number < len(turns):
                totals.append(run_turn(number, passes, loss_scale))
            else:  # the last round has a turn for some of the ranks only
                totals.append(torch.zeros_like(totals[0]))
            gradients.end_round(min(layout.ranks, layout.turns - number * layout.ranks))
        return gradients.finish(torch.stack(totals))[: layout.turns].sum(0) / global_batch

    return forward_backward
