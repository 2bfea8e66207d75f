"""Shared by measurements of training and inference: a job, a clock, a result."""

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.assemble.session import Session
from phalanx.bench.batch_size_finder import reset_peak
from phalanx.bench.blocks import BlockClock, Timing
from phalanx.bench.energy import EnergyMeter, read_clock_mhz
from phalanx.bench.result import BenchResult, collect_bench_environment
from phalanx.report.environment import collect_environment


@dataclass(frozen=True, kw_only=True)
class BenchJob:
    """A measurement to make: its name, command and duration."""

    kind: str
    name: str
    command: str
    data: str  # "synthetic", "generated" or "real"
    timing: Timing
    done: Callable[[int, int], None]  # blocks measured, and all


def release_memory() -> None:
    """Free the memory of this process's last benchmark, and reset the peak."""
    gc.collect()  # states contain reference cycles
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc keeps freed memory, and its reuse would not show in the peak
        trim(0)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    reset_peak(torch.device("cpu"))  # a session resets that of its GPU


def start_clock(session: Session, job: BenchJob, *, most_turns: int | None = None) -> BlockClock:
    """A clock for the work of a session, with its device's energy meter."""
    ranks = session.rank_context.ranks
    # the counter of a processor covers all ranks of its host
    is_counted = session.device.type == "cuda" or ranks is None or ranks.world.local_rank == 0
    return BlockClock(
        timing=job.timing,
        energy=EnergyMeter(session.device if is_counted else torch.device("meta")),
        done=job.done,
        most_turns=most_turns,
    )


def build_result(session: Session, job: BenchJob, clock: BlockClock, **more: Any) -> BenchResult:
    """The result of all ranks, in each of them; more: fields that only one kind has."""
    plan, gather = session.plan, session.rank_context.gather
    clock_mhz = read_clock_mhz(session.device)  # before the GPU goes idle
    peaks = [rise for rise in gather(session.memory.measure_rise()) if rise is not None]
    joules = [used for used in gather(clock.energy_j) if used is not None]
    return BenchResult(
        kind=job.kind,
        name=job.name,
        command=job.command,
        rates=tuple(clock.rates),
        first_rate=clock.first_rate,
        devices=plan.layout.ranks,
        data=job.data,
        setup_s=clock.setup_s,
        warmup_s=clock.warmup_s,
        measured_s=clock.measured_s,
        peak_memory_bytes=max(peaks, default=None),
        energy_j_per_image=sum(joules) / clock.images if joules and clock.images else None,
        environment={
            **collect_bench_environment(_name_device(session.device)),
            "clock_mhz": clock_mhz,
        },
        **more,
    )


def _name_device(device: torch.device) -> str:
    """What the device calls itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return str(collect_environment()["processor"])
