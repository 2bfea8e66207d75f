"""The results of a file's benchmarks: as JSON, CSV, a Markdown table and one for the console."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from phalanx.disk import write_atomically
from phalanx.errors import ConfigError
from phalanx.units import format_bytes

RESULTS = "benchmark_results"  # .json, .csv and .md
_FORMAT = 1
_LATENCY = "latency"
_TABLE_CELL_LENGTH = 100


@dataclass(frozen=True)
class VariantResult:
    """How one variant of a benchmark ended, and its metrics."""

    benchmark: str
    variant: str
    parameters: dict[str, str]
    command: str
    result: str  # "passed", "untrusted" or "failed"
    reason: str = ""  # of the latter two
    exit_code: int | None = None  # None: never started, or timed out
    duration_s: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] | None = None  # what the command itself printed as JSON


@dataclass(frozen=True)
class SpecRun:
    """Everything about a run of benchmarks; written after each of them."""

    command: str
    specs: tuple[str, ...]
    date: str
    environment: Mapping[str, Any]
    planned: int  # commands
    done: int = 0
    results: tuple[VariantResult, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "format": _FORMAT,
            "command": self.command,
            "specs": list(self.specs),
            "date": self.date,
            "environment": dict(self.environment),
            "planned": self.planned,
            "done": self.done,
            "results": [asdict(result) for result in self.results],
        }


def read_results(folder: Path) -> SpecRun | None:
    """The results in a folder; None if there are none."""
    path = folder / f"{RESULTS}.json"
    try:
        facts = json.loads(path.read_bytes())
        if facts.pop("format") != _FORMAT:
            raise ValueError
        results = tuple(VariantResult(**one) for one in facts.pop("results"))
        return SpecRun(**{**facts, "specs": tuple(facts["specs"])}, results=results)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(f"--out {folder}: {path.name} cannot be read; choose another") from None


def write_results(folder: Path, run: SpecRun) -> None:
    """Write the three files of results, each atomically."""
    write_atomically(folder / f"{RESULTS}.json", json.dumps(run.to_dict(), indent=2) + "\n")
    write_atomically(folder / f"{RESULTS}.csv", _format_csv(run.results))
    write_atomically(folder / f"{RESULTS}.md", _format_markdown(run))


def _format_csv(results: Sequence[VariantResult]) -> str:
    """A row per variant: its name, its metrics, and what is needed to repeat it."""
    metrics = _list_metrics(results)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    facts = ("n", "median", "low", "high", "spread", "peak_memory_bytes", "data")
    places = ("commit", "torch", "python", "device", "date")
    ended = ("test_duration", "result", "reason", "command")
    writer.writerow(["benchmark", "variant", *metrics, *facts, *ended, *places])
    for one in results:
        found, where = one.facts or {}, (one.facts or {}).get("environment") or {}
        writer.writerow(
            [one.benchmark, one.variant]
            + [one.metrics.get(name, "") for name in metrics]
            + [_or_empty(found.get(name)) for name in facts]
            + [f"{one.duration_s:.3f}", one.result, one.reason, one.command]
            + [_or_empty(where.get(name)) for name in places]
        )
    return text.getvalue()


def _or_empty(value: Any) -> Any:
    return "" if value is None else value


def _list_metrics(results: Sequence[VariantResult]) -> list[str]:
    """The metrics that any variant has, throughput first."""
    names = dict.fromkeys(name for result in results for name in result.metrics)
    return sorted(names, key=lambda name: (name != "throughput", not name.startswith(_LATENCY)))


def _format_markdown(run: SpecRun) -> str:
    """The table, below what is needed to repeat it."""
    where = ", ".join(f"{name} {value}" for name, value in run.environment.items())
    head, *rows = build_table(run.results)
    lines = [f"`{run.command}`", "", f"{run.date}; {where}.", ""]
    lines += [_join_cells(head), "|" + "|".join(["---", *["---:"] * (len(head) - 2), "---"]) + "|"]
    lines += [_join_cells(row) for row in rows]
    return "\n".join(lines) + "\n"


def _join_cells(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def build_table(results: Sequence[VariantResult], *, with_reasons: bool = True) -> list[list[str]]:
    """Column names, then a row per variant; empty columns are left out."""
    metrics = _list_metrics(results)
    head = ["benchmark", *map(_title_metric, metrics), "range", "n", "peak memory", "result"]
    rows = [_build_row(result, metrics) for result in results]
    if not with_reasons:
        rows = [[*row[:-1], result.result] for row, result in zip(rows, results, strict=True)]
    shown = [
        place
        for place, name in enumerate(head)
        if name in ("benchmark", "result") or any(row[place] for row in rows)
    ]
    return [[row[place] for place in shown] for row in (head, *rows)]


def _title_metric(name: str) -> str:
    """The title of a metric's column, with the unit if it is known."""
    if name.startswith(_LATENCY):
        return f"{name.replace('_', ' ')}, ms"
    return "images/s" if name == "throughput" else name


def _build_row(result: VariantResult, metrics: Sequence[str]) -> list[str]:
    """The cells of one variant."""
    facts = result.facts or {}
    low, high, peak = (facts.get(name) for name in ("low", "high", "peak_memory_bytes"))
    ended = result.result if result.result == "passed" else f"{result.result}: {result.reason}"
    return [
        result.variant,
        *(_format_metric(name, result.metrics.get(name)) for name in metrics),
        "" if low is None else f"{format_rate(low)} to {format_rate(high or low)}",
        f"{facts['n']}" if facts.get("n") else "",
        "" if peak is None else format_bytes(peak),
        _shorten(ended),
    ]


def _format_metric(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return format_rate(value) if name == "throughput" else f"{value:.4g}"


def format_rate(rate: float) -> str:
    """Images/s with at least three digits."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _shorten(text: str) -> str:
    """The beginning of a long reason; the JSON file has all of it."""
    line = " ".join(text.split())
    return line if len(line) <= _TABLE_CELL_LENGTH else f"{line[:_TABLE_CELL_LENGTH]}..."
