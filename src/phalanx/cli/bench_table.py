"""Prints the results of benchmarks as a table."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from phalanx.units import align_columns, format_bytes, format_plural

if TYPE_CHECKING:
    from phalanx.bench.result import BenchResult

_NONE, _RATE = "-", "images/s"
_VERBS = {"train": "training", "infer": "inference"}
_TURNS = {"train": "step", "infer": "batch"}


def _format_rate(rate: float | None) -> str:
    """Images per second, with decimals if there are few."""
    if rate is None:
        return _NONE
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _format_latency(name: str) -> Callable[["BenchResult"], str]:
    def text(result: "BenchResult") -> str:
        found = (result.latency_ms or {}).get(name)
        return _NONE if found is None else f"{found:,.2f}"

    return text


_COLUMNS: dict[str, Callable[["BenchResult"], str]] = {
    "data": lambda r: r.data,
    "batch": lambda r: f"{r.global_batch:,}",
    _RATE: lambda r: _format_rate(r.images_per_second),
    "median": lambda r: _format_rate(r.median),
    "slowest": lambda r: _format_rate(min(r.rates, default=None)),
    "fastest": lambda r: _format_rate(max(r.rates, default=None)),
    "spread": lambda r: _NONE if r.spread is None else f"{r.spread:.1%}",
    "blocks": lambda r: str(len(r.rates)),
    "per device": lambda r: _format_rate(r.per_device),
    "memory": lambda r: _NONE if r.peak_memory_bytes is None else format_bytes(r.peak_memory_bytes),
    "J/image": lambda r: _NONE if r.energy_j_per_image is None else f"{r.energy_j_per_image:.3g}",
    "p50 ms": _format_latency("p50"),
    "p95 ms": _format_latency("p95"),
    "p99 ms": _format_latency("p99"),
    "limit": lambda r: r.limit or _NONE,
}


def print_results(results: "Sequence[BenchResult]", *, model: str) -> None:
    """Print a row for each result; empty columns are left out."""
    first = results[0]
    name = model if first.name == model else f"{first.name}: {model}"
    devices = format_plural(first.devices, "device")
    print(f"{name}, {_VERBS[first.kind]} on {devices} ({first.environment['device']})")
    columns = [[title, *map(text, results)] for title, text in _COLUMNS.items()]
    shown = [cells for cells in columns if cells[0] == _RATE or {*cells[1:]} != {_NONE}]
    print("\n".join(align_columns(zip(*shown, strict=True), left=[0])))
    setup = max(result.setup_s for result in results)
    warmup = max(result.warmup_s for result in results)
    print(
        f"images/s: the mean of the blocks; not in it are the first {_TURNS[first.kind]} "
        f"({setup:.1f} s) and the warm-up ({warmup:.1f} s)"
    )
