"""Images/s of training: the loop, session and step of `phalanx train`, block by block."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction

from torch import Tensor

from phalanx.assemble.dataset_summary import PlannedRun
from phalanx.assemble.score import watch_ranks
from phalanx.assemble.session import Session
from phalanx.bench.blocks import BlockClock
from phalanx.bench.measurement import BenchJob, build_result, release_memory, start_clock
from phalanx.bench.memory_fit import explain_full_device, refuse_large_step
from phalanx.bench.result import BenchResult
from phalanx.engine.evaluate import Score
from phalanx.engine.state import StepMetrics, Throughput, TrainState
from phalanx.engine.step import MicroBatch
from phalanx.engine.train import LoopDependencies, MetricsBuffer, fit
from phalanx.errors import Stopped, is_out_of_memory
from phalanx.parallel.ranks import Ranks
from phalanx.plan.events import Every
from phalanx.plan.plan import Plan

_ENDLESS = 10**9  # steps
_NO_RATE = 0.0  # learning rate: noise cannot make it diverge, and a step costs the same


@dataclass(frozen=True)
class _BlockEnds(Every):
    """Log points at the ends of blocks, which are known only while they are measured."""

    is_end: Callable[[int], bool] = lambda step: False

    def is_due(self, step: int) -> bool:
        """Whether a block ends here."""
        return self.is_end(step)


class _BlockObserver:
    """Observes the loop: every log point ends a block."""

    def __init__(self, clock: BlockClock, beat: Callable[[], None]) -> None:
        self.wait_s = 0.0  # for data, in all blocks
        self._clock, self._beat = clock, beat

    def on_step(self, step: int) -> None:
        """Tell the watchdog that there is progress."""
        self._beat()

    def on_metrics(self, first: int, rows: list[StepMetrics]) -> None:
        """Ignore the metrics."""

    def on_log(self, state: TrainState, interval: Throughput) -> None:
        """End a block and, with the last one, the benchmark."""
        blocks = len(self._clock.rates)
        self._clock.end_block(state.step, interval.images, interval.busy_s)
        if len(self._clock.rates) > blocks:
            self.wait_s += interval.wait_s
        if self._clock.is_over:
            raise Stopped  # every rank at the same step

    def on_score(self, state: TrainState, score: Score) -> None:
        """Nothing is scored."""

    def on_averaged_score(self, state: TrainState, score: Score) -> None:
        """Nothing is scored."""


def measure_training(planned: PlannedRun, job: BenchJob, ranks: Ranks | None) -> BenchResult:
    """Train until all blocks are measured; nothing is written, and weights do not change."""
    settings, plan = planned.settings, planned.plan
    plan = _fit_plan(plan, ends="steps" in settings.user_options)
    refuse_large_step(settings.config, plan)
    found = _try_to_measure(planned._replace(plan=plan), job, ranks)
    if found is None:
        release_memory()
        raise explain_full_device(settings, plan, alone=ranks is None)
    return found


def _try_to_measure(planned: PlannedRun, job: BenchJob, ranks: Ranks | None) -> BenchResult | None:
    """The result; None if memory ran out, with everything that filled it freed."""
    settings, plan, dataset = planned
    release_memory()
    try:
        with Session(settings.config, plan, classes=dataset.classes, ranks=ranks) as session:
            return _measure(session, job)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    return None


def _fit_plan(plan: Plan, *, ends: bool) -> Plan:
    """The plan of a run that neither scores nor saves, and continues until it is measured.

    ends: the user gave a number of steps. Images have the largest size from the start.
    """
    return replace(
        plan,
        total_steps=plan.total_steps if ends else _ENDLESS,
        growth=(),
        valid_batch=plan.micro_batch,  # synthetic images are made for the larger of the two
        evaluate=replace(plan.evaluate, rate=Fraction(0)),
        save=replace(plan.save, rate=Fraction(0)),
    )


def _measure(session: Session, job: BenchJob) -> BenchResult:
    state, plan, total = session.state, session.plan, session.plan.total_steps
    session.feed  # noqa: B018 - its processes start before the clock does
    clock = start_clock(session, job, most_turns=None if total == _ENDLESS else total)
    with watch_ranks(session, lambda: f"step {state.step + 1:,} of a benchmark") as beat:
        observer = _BlockObserver(clock, beat)
        with suppress(Stopped):
            fit(
                state,
                replace(plan, log=_BlockEnds(Fraction(1), Fraction(1), total, is_end=clock.is_end)),
                deps=_build_dependencies(session, observer),
                metrics=MetricsBuffer(session.device, session.config.train.device_iterations),
                untimed_steps=0,  # the clock knows when it is warm
            )
        share = observer.wait_s / clock.measured_s if clock.measured_s else None
        return build_result(
            session,
            job,
            clock,
            global_batch=plan.global_batch,
            micro_batch=plan.micro_batch,
            data_wait=share,
        )


def _build_dependencies(session: Session, observer: _BlockObserver) -> LoopDependencies:
    """What the loop calls: the session's own batches and step, and nothing else."""

    def train_step(passes: Sequence[MicroBatch], lr: float) -> Tensor:
        return session.train_step(passes, _NO_RATE)

    return LoopDependencies(
        batches_from=session.feed.batches_from,
        train_step=train_step,
        evaluate=lambda state: None,
        save=lambda state: None,
        stop_requested=lambda: False,
        describe_images=lambda step: f"those of step {step:,}",
        diagnose=lambda row: "the model cannot be measured with these options",
        observer=observer,
        consensus=session.rank_context.consensus,
    )
