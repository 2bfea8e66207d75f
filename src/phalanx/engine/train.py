"""The training loop: its lines are in the order of events; one observer is notified of each."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isnan
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from phalanx.engine.consensus import Consensus
from phalanx.engine.evaluate import Score
from phalanx.engine.state import MetricSums, StepMetrics, Throughput, TrainState
from phalanx.engine.step import MicroBatch
from phalanx.errors import DivergedError, Stopped
from phalanx.plan.plan import Plan

UNTIMED_STEPS = 10  # at the start of every process: caches fill, kernels are chosen


class MetricsBuffer:
    """[loss, gradient norm, top-1] of each step, kept on the device until the host needs them."""

    def __init__(self, device: torch.device, capacity: int = 512) -> None:
        self._rows = torch.zeros(capacity, 3, device=device)
        self._count = 0

    @property
    def is_full(self) -> bool:
        """Whether the buffer must be read before the next step."""
        return self._count == len(self._rows)

    def add(self, metrics: Tensor) -> None:
        """Store one step's metrics, without waiting for the device."""
        self._rows[self._count] = metrics
        self._count += 1

    def read(self) -> list[StepMetrics]:
        """The metrics of all steps since the last read. Waits for the device."""
        rows = self._rows[: self._count].tolist()
        self._count = 0
        return [StepMetrics(loss, norm, None if isnan(top1) else top1) for loss, norm, top1 in rows]


class _LoopObserver(Protocol):
    """Receives the events of the loop."""

    def on_step(self, step: int) -> None:
        """Called after every step."""

    def on_metrics(self, first: int, rows: list[StepMetrics]) -> None:
        """Called with the metrics of consecutive steps, the first of which is step `first`."""

    def on_log(self, state: TrainState, interval: Throughput) -> None:
        """Called at a log point; state.sums covers the steps since the last one."""

    def on_score(self, state: TrainState, score: Score) -> None:
        """Called after the model was scored."""

    def on_averaged_score(self, state: TrainState, score: Score) -> None:
        """Called after the model was scored with its averaged weights."""


@dataclass(frozen=True, kw_only=True)
class LoopDependencies:
    """The functions and objects that the loop calls."""

    batches_from: Callable[[int], Iterator[Sequence[MicroBatch]]]
    train_step: Callable[[Sequence[MicroBatch], float], Tensor]
    evaluate: Callable[[TrainState], Score | None]
    save: Callable[[TrainState], None]
    stop_requested: Callable[[], bool]
    describe_images: Callable[[int], str]  # names the images of a step, for an error message
    diagnose: Callable[[StepMetrics], str]  # why a step was not finite, and what to do about it
    observer: _LoopObserver
    consensus: Consensus = field(default_factory=Consensus)
    is_profiled: Callable[[int], bool] = lambda step: False  # profiled steps are slower: not timed


class TrainingLoop:
    """One process's part of a run, step by step, independent of what drives it.

    Call `begin` once, then `train_step` and `finish_step` for each item of `batches`.
    """

    def __init__(
        self,
        state: TrainState,
        plan: Plan,
        *,
        deps: LoopDependencies,
        metrics: MetricsBuffer,
        untimed_steps: int = UNTIMED_STEPS,
    ) -> None:
        self._state, self._plan, self._deps, self._metrics = state, plan, deps, metrics
        self._untimed_steps = untimed_steps
        self._interval, self._started_at = Throughput(), state.step
        self._last_end = self._wait_s = 0.0

    def __len__(self) -> int:
        """The number of steps left."""
        return self._plan.total_steps - self._state.step

    def begin(self) -> None:
        """Do what is due before the first step of this process."""
        self._score_if_due()  # the run may have been stopped before it was scored
        if self._is_stopping():
            raise self._make_stop_error()  # nothing to save: this process has made no step
        self._started_at = self._state.step

    def batches(self) -> Iterator[Sequence[MicroBatch]]:
        """The micro-batches of each remaining step."""
        batches = self._deps.batches_from(self._state.step)
        self._last_end = perf_counter()
        while len(self):
            begin = perf_counter()
            passes = next(batches)
            self._wait_s = perf_counter() - begin
            yield passes

    def train_step(self, passes: Sequence[MicroBatch]) -> None:
        """Run the step, without waiting for the device."""
        lr = self._plan.lr(self._state.step)
        self._metrics.add(self._deps.train_step(passes, lr))

    def finish_step(self) -> None:
        """Read metrics, log, score, save and stop, each if it is due."""
        state, plan, deps = self._state, self._plan, self._deps
        step = state.step
        logging, saving = plan.log.is_due(step), plan.save.is_due(step)
        scoring = plan.evaluate.is_due(step)
        stop = self._is_stopping()
        warm = step - self._started_at == self._untimed_steps
        if logging or saving or scoring or stop or warm or self._metrics.is_full:
            self._read_metrics()  # waits for the device
        if step - self._started_at > self._untimed_steps and not deps.is_profiled(step):
            busy_s = perf_counter() - self._last_end
            for throughput in (state.throughput, self._interval):
                throughput.add(images=plan.global_batch, busy_s=busy_s, wait_s=self._wait_s)
        deps.observer.on_step(step)
        if logging:
            deps.observer.on_log(state, Throughput.combine(deps.consensus.gather(self._interval)))
            state.sums, self._interval = MetricSums(), Throughput()
        if scoring and not stop:
            self._score_if_due()
            stop = self._is_stopping()  # the signal may have come while scoring: a resume scores
        if saving or stop:
            self._read_metrics()  # the signal may have come after the last read
            deps.save(state)
        if stop:
            raise self._make_stop_error()
        self._last_end = perf_counter()  # what the driver does before the next step counts as busy

    def _is_stopping(self) -> bool:
        """Whether to save and stop now; a run that is at its last step finishes instead."""
        return self._deps.consensus.any(self._deps.stop_requested()) and len(self) > 0

    def _make_stop_error(self) -> Stopped:
        done, total = self._state.step, self._plan.total_steps
        return Stopped(f"stopped after step {done:,} of {total:,}; everything is saved")

    def _read_metrics(self) -> None:
        """Pass on the metrics since the last read; raise at the first step that diverged."""
        state, deps, rows = self._state, self._deps, self._metrics.read()
        for row in rows:
            state.sums.add(row)
        first = state.step - len(rows) + 1
        deps.observer.on_metrics(first, rows)
        diverged = next((n for n, row in enumerate(rows) if not row.is_finite), None)
        if not deps.consensus.any(diverged is not None):
            return
        if diverged is None:
            raise DivergedError(f"step {state.step:,}: the loss of another process was not finite")
        row, step = rows[diverged], first + diverged
        raise DivergedError(
            f"step {step:,}: loss {row.loss:g}, gradient norm {row.grad_norm:g}; its images "
            f"were {deps.describe_images(step)}; {deps.diagnose(row)}"
        )

    def _score_if_due(self) -> None:
        """Score the model, and its averaged weights if there are any, once per step of the plan."""
        state, deps = self._state, self._deps
        if not self._plan.evaluate.is_due(state.step) or state.step in state.scores:
            return
        state.load_mean_statistics()
        score = deps.evaluate(state)
        if score is None:
            return
        state.scores[state.step] = score.top1
        deps.observer.on_score(state, score)
        if state.average is not None:
            with state.average.applied():
                score = deps.evaluate(state)
            if score is not None:
                deps.observer.on_averaged_score(state, score)


class Fit(Protocol):
    """Trains from state.step to the end, whether the state is fresh or restored."""

    def __call__(
        self, state: TrainState, plan: Plan, *, deps: LoopDependencies, metrics: MetricsBuffer
    ) -> None:
        """Train."""


def fit(
    state: TrainState,
    plan: Plan,
    *,
    deps: LoopDependencies,
    metrics: MetricsBuffer,
    untimed_steps: int = UNTIMED_STEPS,
) -> None:
    """Train from state.step to the end, whether the state is fresh or restored.

    untimed_steps: how many steps at the start are left out of the throughput.
    """
    loop = TrainingLoop(state, plan, deps=deps, metrics=metrics, untimed_steps=untimed_steps)
    loop.begin()
    for passes in loop.batches():
        loop.train_step(passes)
        loop.finish_step()
