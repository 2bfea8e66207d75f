"""Finders that take real steps: a learning rate, and the micro-batch that a device holds."""

import gc
import resource
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch

from phalanx.assemble.build import begin_with_weights, build_state, prepare_torch, step_rule
from phalanx.assemble.dataset_summary import plan_of, preprocessing_of, recipe_of
from phalanx.assemble.feed import normaliser_of, open_feed
from phalanx.bench.feeding import synchronise
from phalanx.config.read import Settings
from phalanx.config.schema import Config
from phalanx.data.loading.cache import free_memory
from phalanx.data.loading.stage_rates import measure_rate
from phalanx.engine.step import MicroBatch, train_step
from phalanx.errors import ConfigError
from phalanx.plan.plan import Plan
from phalanx.units import format_bytes

# --- the learning rate ---

_FIRST_LOSSES = 5  # their mean is where the loss began
_MEMORY = 0.8  # of the running mean that tells an explosion
_FAR = 1.5  # times the first loss is an explosion, whatever came before
_LOST = 0.9  # so is losing that share of what was learnt
_FALL = 0.05  # a fall by a smaller share of the first loss is none
_NOISE = 4.0  # nor is one of fewer standard deviations of a step's loss
_SMOOTHING = 25  # a point is smoothed over so many parts of the sweep to each side


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Losses of steps whose rate grew, and what they suggest."""

    rates: tuple[float, ...]
    losses: tuple[float, ...]  # of each step, before its update
    smooth: tuple[float, ...]  # the same, each with its neighbours
    exploded: bool  # at the last rate; else the sweep was walked to its end
    steepest: float | None  # where the loss fell fastest; None where it did not clearly fall
    tenth: float | None  # of the rate it exploded at

    @property
    def suggested(self) -> float | None:
        """The smaller of the two rates; None where the loss did not clearly fall."""
        if self.steepest is None:
            return None
        return min(self.steepest, self.tenth or self.steepest)

    def facts(self) -> dict[str, Any]:
        """Everything, for JSON; a loss that is no number is null."""
        losses = [loss if isfinite(loss) else None for loss in self.losses]
        return {**asdict(self), "losses": losses, "suggested": self.suggested}


class Alarm:
    """Says when the loss has exploded: it is no number, far off, or what was learnt is lost."""

    def __init__(self) -> None:
        self._seen, self._mean = 0, 0.0
        self._first = self._lowest = 0.0

    def sounds(self, loss: float) -> bool:
        """Whether this loss, after all before it, is an explosion."""
        if not isfinite(loss):
            return True
        self._seen += 1
        if self._seen <= _FIRST_LOSSES:
            self._first += (loss - self._first) / self._seen
            self._mean = self._lowest = self._first
            return False
        self._mean = _MEMORY * self._mean + (1 - _MEMORY) * loss
        self._lowest = min(self._lowest, self._mean)
        learnt = self._first - self._lowest
        lost = learnt > _FALL * self._first and self._mean > self._lowest + _LOST * learnt
        return lost or self._mean > _FAR * self._first


def sweep_rates(
    settings: Settings, *, low: float, high: float, steps: int, done: Callable[[int], None]
) -> Sweep:
    """Train the run's first steps with rates that grow evenly from low to high, by factors."""
    plan, _ = plan_of(settings)
    plan, config = replace(plan, total_steps=steps), settings.config
    device = prepare_torch(plan)
    state = build_state(config, plan, device)
    begin_with_weights(state.model, config)
    rule = step_rule(config, plan, device)
    normaliser = normaliser_of(preprocessing_of(config, plan), device, config)
    losses: list[float] = []
    rates, alarm = np.geomspace(low, high, steps).tolist(), Alarm()
    with open_feed(recipe_of(config, plan), plan, normaliser, config) as feed:
        for rate, passes in zip(rates, feed.batches_from(0), strict=True):
            scale = plan.loss_scale.at(state.step)
            told = train_step(state, passes, rate, rule=rule, loss_scale=scale)
            losses.append(float(told[0]))  # waits for the device: the next step may be too much
            done(len(losses))
            if alarm.sounds(losses[-1]):
                return judge_sweep(rates[: len(losses)], losses, exploded=True, steps=steps)
    return judge_sweep(rates, losses, exploded=False, steps=steps)


def judge_sweep(
    rates: Sequence[float], losses: Sequence[float], *, exploded: bool, steps: int
) -> Sweep:
    """What the losses suggest; `steps` is the length of the whole sweep."""
    finite = [loss for loss in losses if isfinite(loss)]  # only the last may not be
    smooth = smoothed(finite, reach=max(1, steps // _SMOOTHING))
    return Sweep(
        rates=tuple(rates),
        losses=tuple(losses),
        smooth=tuple(smooth),
        exploded=exploded,
        steepest=_steepest_fall(rates, smooth) if _has_fallen(finite, smooth) else None,
        tenth=rates[-1] / 10 if exploded else None,
    )


def smoothed(values: Sequence[float], *, reach: int) -> list[float]:
    """Each value with its neighbours on both sides, the near ones most: falls stay in place."""
    weights = np.hanning(2 * reach + 3)[1:-1]
    if not values:
        return []
    sums, shares = (np.convolve(row, weights) for row in (values, np.ones(len(values))))
    return [float(mean) for mean in (sums / shares)[reach : reach + len(values)]]


def _has_fallen(losses: Sequence[float], smooth: Sequence[float]) -> bool:
    """Whether the loss came down by more than chance does."""
    if len(losses) <= _FIRST_LOSSES:
        return False
    first = float(np.mean(losses[:_FIRST_LOSSES]))
    # of two normal draws the median distance is 0.954 deviations; outliers do not move it
    deviation = float(np.median(np.abs(np.diff(losses)))) / 0.954
    return first - min(smooth) > max(_FALL * first, _NOISE * deviation)


def _steepest_fall(rates: Sequence[float], smooth: Sequence[float]) -> float | None:
    """The rate at which the loss fell fastest on its way down; None if it only rose."""
    lowest = int(np.argmin(smooth))
    if lowest < 2:
        return None
    return rates[int(np.argmin(np.gradient(smooth[: lowest + 1])))]


# --- the micro-batch ---

_LEAST_SIZE = 2
_FIRST_SIZE = 8
_GRAIN = 16  # the largest size is found to this part of itself
_SHARE_OF_FREE = 0.9  # of the host's memory; the rest is for everybody else
_NO_ROOM = ("out of memory", "can't allocate memory", "not enough memory", "STATUS_ALLOC_FAILED")


@dataclass(frozen=True, kw_only=True)
class BatchSizeTrial:
    """One size of a micro-batch, and what came of it."""

    size: int
    images_per_second: float | None = None  # None: it does not fit
    peak_bytes: int | None = None
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Every size that was tried, and what they suggest."""

    trials: tuple[BatchSizeTrial, ...]  # as they were tried
    most: int
    global_batch: int  # of one replica: what batch size and accumulation must give
    device: str

    @property
    def fitting(self) -> list[BatchSizeTrial]:
        """The sizes that fit, smallest first."""
        there = (trial for trial in self.trials if trial.images_per_second)
        return sorted(there, key=lambda trial: trial.size)

    @property
    def largest(self) -> int:
        """The largest size that fits."""
        return self.fitting[-1].size

    @property
    def fastest(self) -> BatchSizeTrial:
        """The size with the most images a second."""
        return max(self.fitting, key=lambda trial: trial.images_per_second or 0.0)

    @property
    def batch_size(self) -> int:
        """The largest part of the global batch that is no larger than the fastest size."""
        top = min(self.fastest.size, self.global_batch)
        return next(size for size in range(top, 0, -1) if self.global_batch % size == 0)

    @property
    def accumulation(self) -> int:
        """How many such parts make the global batch."""
        return self.global_batch // self.batch_size

    def facts(self) -> dict[str, Any]:
        """Everything, for JSON."""
        suggested = {"batch-size": self.batch_size, "gradient-accumulation": self.accumulation}
        found = {"largest": self.largest, "fastest": self.fastest.size}
        return {**asdict(self), **found, "suggested": suggested}


def find_batch_size(
    settings: Settings, *, most: int, seconds: float, done: Callable[[BatchSizeTrial], None]
) -> Sizes:
    """Try sizes with real steps on made-up images, each for that many seconds."""
    plan, _ = plan_of(settings, without_data=True)
    device, trials = prepare_torch(plan), list[BatchSizeTrial]()
    before = _memory_now(device)

    def fits(size: int) -> bool:
        kept = _memory_now(device) - before  # what earlier trials left is used again
        problem = "" if device.type == "cuda" else foresee(size, trials, free_memory() + kept)
        trial = BatchSizeTrial(size=size, problem=problem)
        if not problem:
            rate, peak = _try_size(settings.config, plan, device, size=size, seconds=seconds)
            trial = BatchSizeTrial(
                size=size, images_per_second=rate, peak_bytes=max(0, peak - before)
            )
            trial = trial if rate else BatchSizeTrial(size=size, problem="out of memory")
        trials.append(trial)
        done(trial)
        return not trial.problem

    if not climb(fits, most=most):
        raise ConfigError(
            f"--model {settings.config.model.model}: not even {trials[-1].size} images of "
            f"{plan.image_size} pixels fit on {plan.device}: {trials[-1].problem}; try a smaller "
            "--image-size or --enable-recompute"
        )
    share = plan.micro_batch * plan.accumulation
    return Sizes(trials=tuple(trials), most=most, global_batch=share, device=str(device))


def climb(fits: Callable[[int], bool], *, most: int) -> int:
    """The largest size that fits, to a sixteenth of itself; 0 where none does."""
    good, bad, size = 0, most + 1, min(_FIRST_SIZE, most)
    while size >= _LEAST_SIZE:
        good, bad = (size, bad) if fits(size) else (good, size)
        size = _next_size(good, bad, most)
    return good


def _next_size(good: int, bad: int, most: int) -> int:
    """What to try when `good` fits and `bad` does not; 0 for nothing more."""
    if not good:
        return bad // 2
    if bad > most:
        return min(2 * good, most) if good < most else 0
    return (good + bad) // 2 if bad - good > max(1, good // _GRAIN) else 0


def foresee(size: int, trials: Sequence[BatchSizeTrial], free: int) -> str:
    """Why a size will not fit into the host's memory, judged by those before; else nothing.

    A host that runs out of memory ends the process, so this must be known before.
    """
    known = sorted((t.size, t.peak_bytes) for t in trials if t.peak_bytes is not None)
    if not known:
        return ""
    (less, low), (more, high) = known[-2:] if len(known) > 1 else ((0, 0), known[0])
    needed = high + max(0, high - low) * (size - more) // (more - less)
    if needed <= _SHARE_OF_FREE * free:
        return ""
    return f"not tried: needs about {format_bytes(needed)}, {format_bytes(free)} are free"


def _try_size(
    config: Config, plan: Plan, device: torch.device, *, size: int, seconds: float
) -> tuple[float | None, int]:
    """Images a second and the peak in bytes; None where the size does not fit.

    Every size gets a state of its own: memory that runs out may leave one torn.
    """
    rate = None
    _forget_peak(device)
    try:
        rate = _time_steps(config, plan, device, size=size, seconds=seconds)
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in _NO_ROOM):
            raise
    peak = _peak_memory(device)
    gc.collect()  # states hold themselves in circles
    return rate, peak


def _time_steps(
    config: Config, plan: Plan, device: torch.device, *, size: int, seconds: float
) -> float:
    """Images a second of whole steps.

    Where the global batch takes several passes there are two: the second begins with the
    gradients of the first in memory.
    """
    state, rule = build_state(config, plan, device), step_rule(config, plan, device)
    count = 2 if size < plan.micro_batch * plan.accumulation else 1
    shape = (size, 3, plan.image_size, plan.image_size)
    images = torch.empty(shape, device=device, memory_format=torch.channels_last).normal_()
    labels = torch.arange(size, device=device) % plan.num_classes
    passes = [MicroBatch(images, labels, number * size) for number in range(count)]
    scale = plan.loss_scale.at(0)

    def step() -> int:
        train_step(state, passes, 0.0, rule=rule, loss_scale=scale)
        synchronise(device)
        return count * size

    step()  # what the update rule remembers is made here
    return measure_rate(step, seconds)


def _forget_peak(device: torch.device) -> None:
    """Let the peak begin at what is used now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # elsewhere than on Linux it is the peak of the whole process
        Path("/proc/self/clear_refs").write_text("5")


def _memory_now(device: torch.device) -> int:
    """Bytes this process holds before a trial; on a GPU all of them count."""
    return 0 if device.type == "cuda" else _resident_bytes("VmRSS") or 0


def _peak_memory(device: torch.device) -> int:
    """The most bytes that were used at once on the device."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    unit = 1 if sys.platform == "darwin" else 1024
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return _resident_bytes("VmHWM") or largest


def _resident_bytes(name: str) -> int | None:
    """A figure of /proc/self/status; None where there is no such file."""
    with suppress(OSError):
        facts = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        return int(facts[name].split()[0]) * 1024
    return None
