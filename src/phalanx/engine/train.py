"""The loop. No callbacks, no events, no hidden order: the order is the text."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from torch import Tensor

from phalanx.engine.evaluate import Score
from phalanx.engine.metrics_buffer import MetricsBuffer
from phalanx.engine.state import StepNumbers, Sums, Throughput, TrainState
from phalanx.engine.step import MicroBatch
from phalanx.errors import DivergedError, Stopped
from phalanx.plan.plan import Plan

_UNTIMED_STEPS = 10  # of every process: caches fill, kernels are chosen


class _LoopObserver(Protocol):
    """What the loop tells the outside."""

    def progress(self, step: int) -> None:
        """A step is done; called after every one."""

    def steps(self, first: int, rows: list[StepNumbers]) -> None:
        """The numbers of the steps from `first` on are known."""

    def log(self, state: TrainState, stretch: Throughput) -> None:
        """A log point: state.sums covers the steps since the last one."""

    def score(self, state: TrainState, score: Score) -> None:
        """The model was scored."""

    def score_averaged(self, state: TrainState, score: Score) -> None:
        """The model was scored with its averaged weights."""


@dataclass(frozen=True, kw_only=True)
class LoopDependencies:
    """What a run is made of, as far as the loop must know."""

    batches_from: Callable[[int], Iterator[Sequence[MicroBatch]]]
    train_step: Callable[[TrainState, Sequence[MicroBatch], float], Tensor]
    evaluate: Callable[[TrainState], Score | None]
    save: Callable[[TrainState], None]
    stopping: Callable[[], bool]
    images_of: Callable[[int], str]  # names the images of a step, for a person to look at
    blame: Callable[[float, float], str]  # of an unsound step's loss and norm: why, and what to do
    watch: _LoopObserver


def fit(state: TrainState, plan: Plan, *, parts: LoopDependencies, ledger: MetricsBuffer) -> None:
    """Train from state.step to the end, whether the state is fresh or restored."""
    watch, stretch = parts.watch, Throughput()
    _score_if_due(state, plan, parts)  # a stop may have come before the score
    if parts.stopping() and state.step < plan.total_steps:
        raise _stopped(state, plan)  # what is saved is where this process began
    started_at = state.step
    batches = parts.batches_from(state.step)
    while state.step < plan.total_steps:
        lr = plan.lr(state.step)
        begin = perf_counter()
        passes = next(batches)
        wait_s = perf_counter() - begin
        ledger.add(parts.train_step(state, passes, lr))
        step = state.step
        logging, saving = plan.log.due(step), plan.save.due(step)
        stopping = parts.stopping() and step < plan.total_steps
        warm = step - started_at == _UNTIMED_STEPS
        if logging or saving or stopping or warm or ledger.full or plan.evaluate.due(step):
            _settle(state, ledger, parts)  # waits for the device
        if step - started_at > _UNTIMED_STEPS:
            busy_s = perf_counter() - begin
            for clock in (state.clock, stretch):
                clock.add(images=plan.global_batch, busy_s=busy_s, wait_s=wait_s)
        watch.progress(step)
        if logging:
            watch.log(state, stretch)
            state.sums, stretch = Sums(), Throughput()
        if not stopping:
            _score_if_due(state, plan, parts)
        # the signal may have come while scoring: then the score is left to the resume
        stopping = parts.stopping() and step < plan.total_steps
        if saving or stopping:
            _settle(state, ledger, parts)  # the signal may have come after the last look
            parts.save(state)
        if stopping:
            raise _stopped(state, plan)


def _stopped(state: TrainState, plan: Plan) -> Stopped:
    """What a stop says."""
    return Stopped(f"stopped after step {state.step:,} of {plan.total_steps:,}; all is saved")


def _settle(state: TrainState, ledger: MetricsBuffer, parts: LoopDependencies) -> None:
    """Read the steps since the last time, hand them on, and stop at the first unsound one."""
    rows = ledger.settle(state.sums)
    first = state.step - len(rows) + 1
    parts.watch.steps(first, rows)
    for step, row in enumerate(rows, start=first):
        if not row.sound:
            raise DivergedError(
                f"step {step:,}: loss {row.loss:g}, gradient norm {row.grad_norm:g}; its images "
                f"were {parts.images_of(step)}; {parts.blame(row.loss, row.grad_norm)}"
            )


def _score_if_due(state: TrainState, plan: Plan, parts: LoopDependencies) -> None:
    """Evaluate at the points of the plan, once each."""
    if not plan.evaluate.due(state.step) or state.step in state.scores:
        return
    score = parts.evaluate(state)
    if score is not None:
        state.scores[state.step] = score.top1
        parts.watch.score(state, score)
        _score_averages(state, parts)


def _score_averages(state: TrainState, parts: LoopDependencies) -> None:
    """Score the averaged weights beside the raw ones, where there are any."""
    if state.averages is None:
        return
    with state.averages.swapped(state.model):
        score = parts.evaluate(state)
    if score is not None:
        parts.watch.score_averaged(state, score)
