"""A short part of a run, and what it predicts for the time, memory and energy of the whole.

It takes steps on the run's own data, part of an evaluation, and one checkpoint; nothing is kept.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from statistics import mean, quantiles
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from phalanx.assemble.memory import read_peak_memory
from phalanx.assemble.session import Session
from phalanx.bench.energy import EnergyMeter
from phalanx.bench.synthetic_steps import synchronise
from phalanx.config.schema import Config
from phalanx.engine.checkpoint import CheckpointSaver
from phalanx.engine.evaluate import ValidBatch
from phalanx.engine.step import MicroBatch
from phalanx.engine.train import UNTIMED_STEPS
from phalanx.errors import DiskError, DivergedError
from phalanx.plan.model import build_variant
from phalanx.plan.plan import Plan
from phalanx.report.environment import collect_environment

_WARM_UP, _SCORING = 0.3, 0.2  # at most this share of the seconds; the rest is for steps
_BLOCK_S = 0.25  # of steps: waiting for a GPU after each one would slow it down
_FEWEST_BLOCKS = 3
_FEWEST_WARM = 4  # steps: on a GPU two uncaptured ones, the capture of a graph, and a replay


@dataclass(frozen=True, kw_only=True)
class _StepTimings:
    """Timings of steps, in blocks."""

    steps: int  # that were timed
    warmup_steps: int
    warmup_s: float
    step_s: float  # mean, with the wait for data
    quick_s: float  # of the quickest quarter of the blocks
    slow_s: float  # of the slowest
    wait_share: float  # of the time, for data
    joules: float | None  # of a step; None if the device does not report it


@dataclass(frozen=True, kw_only=True)
class _ScoringTimings:
    """Timings of scored batches, extrapolated to all."""

    batches: int
    of_batches: int
    once_s: float  # extra time of the first batch, once per run
    score_s: float  # of one whole evaluation
    joules: float | None  # of the same


@dataclass(frozen=True, kw_only=True)
class _SavingTimings:
    """Timings of a checkpoint."""

    blocked_s: float  # while the state is copied; training waits
    written_s: float  # until it is on disk; training continues meanwhile
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class RunPrediction:
    """The predicted cost of a run, and the measurements behind it."""

    seconds: float  # that were asked for
    measured_on: dict[str, str | int]
    plan: dict[str, int]  # how many steps, evaluations and checkpoints the run has
    start_s: float  # to open data and model
    steps: _StepTimings
    scoring: _ScoringTimings | None  # if the run scores
    saving: _SavingTimings | None  # if it saves, and a checkpoint could be written
    peak_bytes: int | None  # of the device; on a CPU, of the process
    parts_s: dict[str, float]  # of the whole run
    quick_s: float  # the whole run, if all steps were like the quickest quarter
    slow_s: float
    joules: float | None
    notes: tuple[str, ...]  # what is extrapolated

    @property
    def total_s(self) -> float:
        """Seconds of the whole run."""
        return sum(self.parts_s.values())

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {**asdict(self), "total_s": self.total_s}


def predict_run(
    config: Config, plan: Plan, *, seconds: float, folder: Path, done: Callable[[str], None]
) -> RunPrediction:
    """Run the plan for some seconds, in one process, and extrapolate.

    folder: where a checkpoint is written and removed. done: called with the current activity.
    """
    begin = perf_counter()
    # at the step where images are largest
    first = min(plan.growth[-1][0], plan.total_steps - 1) if plan.growth else 0
    with Session(config, plan) as session:
        taker = _StepRunner(session, session.feed.batches_from(first))
        session.state  # noqa: B018 - made now: it belongs to the start
        start_s = perf_counter() - begin
        left = plan.total_steps - first
        steps = _measure_steps(session, taker, left=left, seconds=seconds, done=done)
        scoring = _measure_scoring(session, _SCORING * seconds, done) if plan.evaluations else None
        saving = _measure_saving(session, folder, done) if plan.save.count() else None
        is_gpu = session.device.type == "cuda"
        peak = session.memory.measure_rise() if is_gpu else read_peak_memory()
        device = torch.cuda.get_device_name(session.device) if is_gpu else ""
        has_average = session.state.average is not None
    scores = plan.evaluations * (2 if has_average else 1)
    counts = {"steps": plan.total_steps, "evaluations": scores, "checkpoints": plan.save.count()}
    parts = {
        "start": start_s
        + max(0.0, steps.warmup_s - steps.warmup_steps * steps.step_s)
        + (scoring.once_s if scoring else 0.0),
        "steps": _count_equal_steps(plan) * steps.step_s,
        "evaluations": scores * scoring.score_s if scoring else 0.0,
        "checkpoints": _predict_saving(saving, counts, steps.step_s) if saving else 0.0,
    }
    rest = sum(parts.values()) - parts["steps"]
    return RunPrediction(
        seconds=seconds,
        measured_on={**collect_environment(), "device": device or plan.device},
        plan=counts,
        start_s=start_s,
        steps=steps,
        scoring=scoring,
        saving=saving,
        peak_bytes=peak,
        parts_s=parts,
        quick_s=rest + _count_equal_steps(plan) * steps.quick_s,
        slow_s=rest + _count_equal_steps(plan) * steps.slow_s,
        joules=_predict_energy(plan, steps, scoring, scores),
        notes=tuple(_list_notes(plan, steps, scoring, saving)),
    )


# --- measuring ---


class _StepRunner:
    """Takes the steps of a session, and counts how long they wait for data."""

    def __init__(self, session: Session, batches: Iterator[Sequence[MicroBatch]]) -> None:
        self._session, self._batches, self.wait_s = session, batches, 0.0

    def take(self, count: int) -> int:
        """Take so many steps, or all that are left; returns the number. Waits for the device."""
        session, taken = self._session, 0
        while taken < count:
            begin = perf_counter()
            passes = next(self._batches, None)
            self.wait_s += perf_counter() - begin
            if passes is None:
                break
            session.train_step(passes, session.plan.lr(session.state.step))
            taken += 1
        synchronise(session.device)
        return taken


def _measure_steps(
    session: Session, taker: _StepRunner, *, left: int, seconds: float, done: Callable[[str], None]
) -> _StepTimings:
    """Warm up as a run does, then time blocks of steps; left: the number of steps available.

    The first step, before which kernels are compiled and chosen, does not count in the seconds.
    """
    begin, warm, last_s, setup_s = perf_counter(), 0, 0.0, 0.0
    while warm < min(UNTIMED_STEPS, left - 1) and (
        warm < _FEWEST_WARM or perf_counter() - begin - setup_s < _WARM_UP * seconds
    ):
        at = perf_counter()
        warm += taker.take(1)
        last_s = perf_counter() - at
        setup_s = setup_s or last_s
        done(f"warm-up, step {warm}")
    warmup_s, block = perf_counter() - begin, ceil(_BLOCK_S / last_s) if last_s else 1
    meter, blocks, steps = EnergyMeter(session.device), list[float](), 0
    limit = (1 - _SCORING) * seconds - (warmup_s - setup_s)
    taker.wait_s, begin = 0.0, perf_counter()
    meter.start()
    while len(blocks) < _FEWEST_BLOCKS or perf_counter() - begin < limit:
        at = perf_counter()
        taken = taker.take(block)
        if not taken:
            break
        steps += taken
        blocks.append((perf_counter() - at) / taken)
        done(f"step {warm + steps}")
    took_s, joules = perf_counter() - begin, meter.read()
    quarters = quantiles(blocks, n=4, method="inclusive") if len(blocks) > 1 else blocks * 3
    return _StepTimings(
        steps=steps,
        warmup_steps=warm,
        warmup_s=warmup_s,
        step_s=took_s / steps,
        quick_s=quarters[0],
        slow_s=quarters[2],
        wait_share=taker.wait_s / took_s,
        joules=None if joules is None else joules / steps,
    )


def _measure_scoring(
    session: Session, seconds: float, done: Callable[[str], None]
) -> _ScoringTimings | None:
    """Score batches for some seconds; the extra cost of the first counts once per run."""
    images, size = session.plan.valid_images, session.plan.valid_batch
    total = ceil(images / size)
    meter, asked = EnergyMeter(session.device), list[float]()
    begin = perf_counter()

    def limited() -> Iterator[ValidBatch]:
        for batch in session.valid_feed.validation_batches():
            synchronise(session.device)
            asked.append(perf_counter())
            done(f"evaluation, batch {len(asked)} of {total}")
            yield batch
            if perf_counter() - begin > seconds and len(asked) > 1:
                return

    meter.start()
    session.evaluate(limited())
    end, joules = perf_counter(), meter.read()
    if not asked:
        return None
    took_s, batches = end - begin, len(asked)
    first_s, *others = [b - a for a, b in zip(asked, [*asked[1:], end], strict=True)]
    each_s = mean(others or [first_s])
    once_s = max(0.0, first_s - each_s)
    whole_s = took_s - once_s + (total - batches) * each_s
    return _ScoringTimings(
        batches=batches,
        of_batches=total,
        once_s=once_s,
        score_s=whole_s,
        joules=None if joules is None else joules * whole_s / took_s,
    )


def _measure_saving(
    session: Session, folder: Path, done: Callable[[str], None]
) -> _SavingTimings | None:
    """Write one checkpoint; None if it cannot be written, which a run would report."""
    done("checkpoint")
    with suppress(OSError, DiskError, DivergedError), TemporaryDirectory(dir=folder) as temporary:
        session.state.load_mean_statistics()
        place = Path(temporary) / "checkpoints"
        facts = {"norm_layout": build_variant(session.config).norm.layout}
        saver = CheckpointSaver(
            place, keep=1, run_facts=facts, consensus=session.rank_context.consensus
        )
        begin = perf_counter()
        saver.save(session.state)
        blocked_s = perf_counter() - begin
        saver.wait()
        written_s = perf_counter() - begin
        size = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
        return _SavingTimings(blocked_s=blocked_s, written_s=written_s, size_bytes=size)
    return None


# --- extrapolating ---


def _count_equal_steps(plan: Plan) -> float:
    """The run's steps as an equivalent number with its largest images, in proportion to pixels."""
    begin, count = 0, 0.0
    for end, size in plan.growth:
        last = min(end, plan.total_steps)
        count += max(0, last - begin) * (size / plan.image_size) ** 2
        begin = last
    return count + plan.total_steps - begin


def _predict_saving(saving: _SavingTimings, counts: dict[str, int], step_s: float) -> float:
    """Seconds that training waits for checkpoints: for copies, and for a slow disk."""
    between_s = counts["steps"] * step_s / counts["checkpoints"]
    each_s = max(saving.blocked_s, saving.written_s - between_s)
    return (counts["checkpoints"] - 1) * each_s + saving.written_s  # the run ends after the last


def _predict_energy(
    plan: Plan, steps: _StepTimings, scoring: _ScoringTimings | None, scores: int
) -> float | None:
    """Joules of steps and evaluations; None if the device does not report them."""
    if steps.joules is None:
        return None
    scored = scores * (scoring.joules or 0.0) if scoring else 0.0
    return _count_equal_steps(plan) * steps.joules + scored


def _list_notes(
    plan: Plan, steps: _StepTimings, scoring: _ScoringTimings | None, saving: _SavingTimings | None
) -> Iterator[str]:
    """Which parts of the prediction were not measured."""
    yield (
        f"{steps.steps:,} of {plan.total_steps:,} steps were timed, after {steps.warmup_steps} to "
        "warm up; the others are taken to be like them, with the same wait for data"
    )
    if steps.steps + steps.warmup_steps < plan.steps_per_epoch:
        yield "no epoch was finished: images that are read again may come faster"
    if plan.growth:
        yield (
            f"steps have images of {plan.image_size} pixels; those with smaller ones are taken to "
            "need time by their pixels"
        )
    if scoring is not None and scoring.batches < scoring.of_batches:
        yield f"{scoring.batches:,} of {scoring.of_batches:,} batches of an evaluation were scored"
    if saving is not None:
        yield "one checkpoint was written and removed; a run writes them while it trains"
    elif plan.save.count():
        yield "checkpoints are left out: none could be written here"
    yield "left out: the start of the program, log points, and whatever else the machine does"
