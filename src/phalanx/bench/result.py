"""The result of a benchmark: one record for training and inference, and whether to trust it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import fmean, median
from typing import Any

from phalanx.report.environment import collect_environment

_MOST_SPREAD = 0.10  # of the rates of blocks, for a result to be trusted
_FEWEST_BLOCKS = 3  # below that a spread says nothing


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """Images/s of one benchmark, block by block, with everything needed to repeat it.

    A block is a number of steps or batches. The first result of a process, which contains the
    warm-up, is in `first_rate` and counts nowhere else.
    """

    kind: str  # "train" or "infer"
    name: str  # of the preset, model or run
    command: str
    rates: tuple[float, ...]  # images/s of each block, of all devices together
    first_rate: float | None = None  # of the process's first steps: the warm-up
    devices: int = 1
    global_batch: int
    micro_batch: int
    data: str  # "synthetic" (on the device), "generated" (on the host) or "real"
    warmup_s: float
    measured_s: float
    setup_s: float = 0.0  # before the warm-up: opening, and the first step, which chooses kernels
    # p50, p95 and p99 of one batch at a time, if there were enough calls, and their number, n
    latency_ms: Mapping[str, float | None] | None = None
    peak_memory_bytes: int | None = None  # of the device that needs most
    data_wait: float | None = None  # share of the time that training waited for data
    energy_j_per_image: float | None = None  # None if the devices do not report it
    limit: str | None = None  # "data" or "model"; None if no other data was measured
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def images_per_second(self) -> float | None:
        """The mean over all blocks, which do not include the first result of each process."""
        return fmean(self.rates) if self.rates else None

    @property
    def per_device(self) -> float | None:
        """The mean's share of one device."""
        rate = self.images_per_second
        return None if rate is None else rate / self.devices

    @property
    def median(self) -> float | None:
        """The median over blocks."""
        return median(self.rates) if self.rates else None

    @property
    def spread(self) -> float | None:
        """The difference between the fastest and the slowest block, divided by the median."""
        if not self.rates:
            return None
        return (max(self.rates) - min(self.rates)) / median(self.rates)

    @property
    def problems(self) -> list[str]:
        """Why the figures are unreliable, a sentence each; empty if they are reliable."""
        if not self.rates:
            return [
                "nothing was measured: the warm-up outlasted the benchmark, which ended after "
                f"{self.setup_s + self.warmup_s:.1f} s; give more --steps or a shorter --warmup"
            ]
        found, spread = [], self.spread or 0.0
        if self.warmup_s > self.measured_s:
            found.append(
                f"the warm-up of {self.warmup_s:.1f} s outlasted the measurement of "
                f"{self.measured_s:.1f} s; give more --seconds or a shorter --warmup"
            )
        if len(self.rates) < _FEWEST_BLOCKS:
            found.append(
                f"only {len(self.rates)} of at least {_FEWEST_BLOCKS} blocks were measured, so "
                "the spread is not known; give more --steps or --seconds"
            )
        if spread > _MOST_SPREAD:
            found.append(
                f"the rates of {len(self.rates)} blocks spread over {spread:.0%} of their median, "
                f"more than {_MOST_SPREAD:.0%}; measure on an idle machine, or with more --seconds"
            )
        return found

    @property
    def is_trusted(self) -> bool:
        """Whether the figures are reliable."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "kind": self.kind,
            "name": self.name,
            "command": self.command,
            "images_per_second": self.images_per_second,
            "median": self.median,
            "low": min(self.rates, default=None),
            "high": max(self.rates, default=None),
            "spread": self.spread,
            "rates": list(self.rates),
            "n": len(self.rates),
            "first_rate": self.first_rate,
            "per_device": self.per_device,
            "devices": self.devices,
            "batch": {"global": self.global_batch, "micro": self.micro_batch},
            "latency_ms": None if self.latency_ms is None else dict(self.latency_ms),
            "peak_memory_bytes": self.peak_memory_bytes,
            "energy_j_per_image": self.energy_j_per_image,
            "data": self.data,
            "data_wait": self.data_wait,
            "setup_s": self.setup_s,
            "warmup_s": self.warmup_s,
            "measured_s": self.measured_s,
            "limit": self.limit,
            "trusted": self.is_trusted,
            "problems": self.problems,
            "environment": dict(self.environment),
        }


def collect_bench_environment(device: str) -> dict[str, Any]:
    """Where and with what a benchmark ran; device: what the device calls itself."""
    found = collect_environment()
    return {
        "commit": found["commit"],
        "phalanx": found["phalanx version"],
        "torch": found["torch version"],
        "python": found["python version"],
        "device": device,
        "processor": found["processor"],
        "cores": found["cores"],
        "load": _read_load(),
        "system": found["system"],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _read_load() -> float | None:
    """The load average of the last minute, including this process."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
