"""Finds the largest micro-batch that fits a device, and the fastest one, by real steps."""

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from phalanx.assemble.dataset_summary import plan_run
from phalanx.assemble.memory import read_peak_memory, read_resident_memory
from phalanx.assemble.torch_setup import prepare_torch
from phalanx.bench.synthetic_steps import build_synthetic_step
from phalanx.config.read import Settings
from phalanx.config.schema import Config
from phalanx.data.loading.cache import read_free_memory
from phalanx.data.loading.stage_rates import measure_rate
from phalanx.errors import ConfigError, is_out_of_memory
from phalanx.plan.plan import Plan
from phalanx.units import format_bytes

_LEAST_SIZE = 2
_FIRST_SIZE = 8
_GRAIN = 16  # the largest size is found to this part of itself
FREE_MEMORY_FRACTION = 0.9  # of the host's memory; the rest is for everybody else


@dataclass(frozen=True, kw_only=True)
class BatchSizeTrial:
    """The result of trying one size of a micro-batch."""

    size: int
    images_per_second: float | None = None  # None: it does not fit
    peak_bytes: int | None = None
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """The results of all sizes that were tried, and the suggested one."""

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
        """The size with the most images per second."""
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

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        suggested = {"batch-size": self.batch_size, "gradient-accumulation": self.accumulation}
        found = {"largest": self.largest, "fastest": self.fastest.size}
        return {**asdict(self), **found, "suggested": suggested}


def find_batch_size(
    settings: Settings, *, most: int, seconds: float, done: Callable[[BatchSizeTrial], None]
) -> BatchSizes:
    """Try sizes with real steps on synthetic images, each for so many seconds."""
    plan, _ = plan_run(settings, without_data=True)
    device, trials = prepare_torch(plan), list[BatchSizeTrial]()
    before = _memory_now(device)

    def fits(size: int) -> bool:
        trial = BatchSizeTrial(size=size)
        if device.type != "cuda":
            kept = _memory_now(device) - before  # what earlier trials left is used again
            trial = replace(trial, problem=explain_no_room(size, trials, read_free_memory() + kept))
        if not trial.problem:
            rate, peak = _try_size(settings.config, plan, device, size=size, seconds=seconds)
            trial = replace(trial, problem="out of memory")
            if rate is not None:
                peak = max(0, peak - before)
                trial = BatchSizeTrial(size=size, images_per_second=rate, peak_bytes=peak)
        trials.append(trial)
        done(trial)
        return not trial.problem

    if not search_sizes(fits, most=most):
        raise ConfigError(
            f"--model {settings.config.model.model}: not even {trials[-1].size} images of "
            f"{plan.image_size} pixels fit on {plan.device}: {trials[-1].problem}; try a smaller "
            "--image-size or --enable-recompute"
        )
    share = plan.micro_batch * plan.accumulation
    return BatchSizes(trials=tuple(trials), most=most, global_batch=share, device=str(device))


def search_sizes(fits: Callable[[int], bool], *, most: int) -> int:
    """The largest size that fits, to within a sixteenth; 0 if none does."""
    good, bad, size = 0, most + 1, min(_FIRST_SIZE, most)
    while size >= _LEAST_SIZE:
        good, bad = (size, bad) if fits(size) else (good, size)
        size = _next_size(good, bad, most)
    return good


def _next_size(good: int, bad: int, most: int) -> int:
    """The size to try next if `good` fits and `bad` does not; 0 if there is none."""
    if not good:
        return bad // 2
    if bad > most:
        return min(2 * good, most) if good < most else 0
    return (good + bad) // 2 if bad - good > max(1, good // _GRAIN) else 0


def explain_no_room(size: int, trials: Sequence[BatchSizeTrial], free: int) -> str:
    """Why a size will not fit into the host's memory, judged by the earlier ones; empty if it may.

    A host that runs out of memory ends the process, so this must be known before.
    """
    known = sorted((t.size, t.peak_bytes) for t in trials if t.peak_bytes is not None)
    if not known:
        return ""
    (less, low), (more, high) = known[-2:] if len(known) > 1 else ((0, 0), known[0])
    needed = high + max(0, high - low) * (size - more) // (more - less)
    if needed <= FREE_MEMORY_FRACTION * free:
        return ""
    return f"not tried: needs about {format_bytes(needed)}, {format_bytes(free)} are free"


def _try_size(
    config: Config, plan: Plan, device: torch.device, *, size: int, seconds: float
) -> tuple[float | None, int]:
    """Images per second and the peak in bytes; None if the size does not fit.

    Every size gets a session of its own: memory that runs out may leave one torn.
    """
    rate = None
    reset_peak(device)
    try:
        rate = _time_steps(config, plan, size=size, seconds=seconds)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    peak = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else read_peak_memory()
    gc.collect()  # states hold themselves in circles
    return rate, peak


def _time_steps(config: Config, plan: Plan, *, size: int, seconds: float) -> float:
    """Images per second of whole steps.

    Where the global batch takes several passes there are two: the second begins with the
    gradients of the first in memory.
    """
    passes = 2 if size < plan.micro_batch * plan.accumulation else 1
    step = build_synthetic_step(config, replace(plan, micro_batch=size, accumulation=passes))
    step()  # what the optimizer remembers is made here
    return measure_rate(step, seconds)


def reset_peak(device: torch.device) -> None:
    """Reset the peak to the memory in use now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # elsewhere than on Linux it is the peak of the whole process
        Path("/proc/self/clear_refs").write_text("5")


def _memory_now(device: torch.device) -> int:
    """The bytes in use before a trial; on a GPU they are part of the peak."""
    return 0 if device.type == "cuda" else read_resident_memory("VmRSS") or 0
