"""The benchmarks of a file, one after the other: one that fails is told, and the others go on."""

import re
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from phalanx.benchmarks.metrics import MetricMissing, extract_metrics, read_facts
from phalanx.benchmarks.process import (
    NotStarted,
    Workplace,
    count_mpi_processes,
    read_end,
    run_command,
)
from phalanx.benchmarks.results import SpecRun, VariantResult, write_results
from phalanx.benchmarks.schema import BenchmarkVariant, fill_parameters
from phalanx.errors import EXIT_UNTRUSTED

_MEASURES = (("phalanx", "bench", "train"), ("phalanx", "bench", "infer"))  # print a BenchResult
_JSON = "--json"
_OWN_MESSAGE = re.compile(r"^phalanx [a-z -]+: ", re.MULTILINE)
_ALL = 50_000_000  # bytes of output that are searched for values


@dataclass(frozen=True)
class Progress:
    """How far the benchmarks are."""

    number: int  # from 1
    count: int
    variant: str
    elapsed_s: float
    said: str  # the last line of its output


class Observer(NamedTuple):
    """What is called while benchmarks run."""

    watch: Callable[[Progress], None]
    ended: Callable[[VariantResult], None]


def run_variants(
    variants: Sequence[BenchmarkVariant],
    run: SpecRun,
    folder: Path,
    observer: Observer,
    *,
    timeout_s: float | None = None,
    stop_on_error: bool = False,
) -> SpecRun:
    """Run all; the files of results are complete after each of them."""
    for number, variant in enumerate(variants, start=1):

        def watch(
            elapsed: float, said: str, *, number: int = number, name: str = variant.name
        ) -> None:
            observer.watch(Progress(number, len(variants), name, elapsed, said))

        result = _run_variant(variant, folder, watch, timeout_s)
        run = replace(run, results=(*run.results, result))
        write_results(folder, run)
        observer.ended(result)
        if stop_on_error and result.result == "failed":
            break
    return run


def find_exit_code(run: SpecRun) -> int:
    """0 where all passed; else that of the first that failed, or of those not to be trusted."""
    failed = [result for result in run.results if result.result == "failed"]
    if failed:
        return next((code for result in failed if (code := result.exit_code or 0) > 0), 1)
    return EXIT_UNTRUSTED if any(r.result == "untrusted" for r in run.results) else 0


def _run_variant(
    variant: BenchmarkVariant,
    folder: Path,
    watch: Callable[[float, str], None],
    timeout_s: float | None,
) -> VariantResult:
    """Run one command and read what it printed."""
    benchmark, began = variant.benchmark, time.monotonic()
    stem = re.sub(r"[^\w.=-]", "-", variant.name)
    workplace = Workplace(
        benchmark.folder, dict(benchmark.env), folder / f"{stem}.out", folder / f"{stem}.err"
    )
    for path in (workplace.output, workplace.errors):
        path.unlink(missing_ok=True)
    before = [fill_parameters(text, variant.parameters) for text in benchmark.pre_run_commands]
    words = variant.words
    if words[:3] in _MEASURES and _JSON not in words:
        words = (*words, _JSON)
    unfinished = VariantResult(
        benchmark.name, variant.name, variant.parameters, variant.command, "failed"
    )
    limit = benchmark.timeout or timeout_s
    try:
        for text in before:
            code = _run_words(tuple(shlex.split(text)), workplace, limit, watch)
            if code != 0:
                break
        else:
            code = _run_words(words, workplace, limit, watch)
    except NotStarted as error:
        return replace(unfinished, reason=str(error), exit_code=2)
    ended = replace(unfinished, exit_code=code, duration_s=time.monotonic() - began)
    if code is None:
        return replace(ended, reason=f"ended after {limit:g} s, its time limit")
    return _read_result(ended, variant, workplace)


def _run_words(
    words: tuple[str, ...],
    workplace: Workplace,
    timeout_s: float | None,
    watch: Callable[[float, str], None],
) -> int | None:
    """The exit code of one command line."""
    return run_command(
        words,
        workplace,
        timeout_s=timeout_s,
        watch=lambda elapsed: watch(elapsed, workplace.last_line()),
    )


def _read_result(
    ended: VariantResult, variant: BenchmarkVariant, workplace: Workplace
) -> VariantResult:
    """The result of a command that has ended by itself."""
    printed = read_end(workplace.output, _ALL)
    facts = read_facts(printed) if _JSON in variant.words or _measures(variant) else None
    if ended.exit_code not in (0, EXIT_UNTRUSTED):
        reason = _find_message(read_end(workplace.errors)) or workplace.last_line()
        return replace(ended, facts=facts, reason=reason or f"exit code {ended.exit_code}")
    try:
        metrics = extract_metrics(
            variant.benchmark.data,
            printed + read_end(workplace.errors, _ALL),
            facts,
            processes=count_mpi_processes(variant.command),
        )
    except MetricMissing as error:
        return replace(ended, facts=facts, reason=str(error))
    if ended.exit_code == EXIT_UNTRUSTED:
        reason = "; ".join((facts or {}).get("problems") or ["exit code 7"])
        return replace(ended, result="untrusted", reason=reason, metrics=metrics, facts=facts)
    return replace(ended, result="passed", metrics=metrics, facts=facts)


def _measures(variant: BenchmarkVariant) -> bool:
    """Whether a command prints a result of ours."""
    return variant.words[:3] in _MEASURES


def _find_message(errors: str) -> str:
    """The message that a command of ours ends with."""
    starts = [found.end() for found in _OWN_MESSAGE.finditer(errors)]
    return " ".join(errors[starts[-1] :].split()) if starts else ""
