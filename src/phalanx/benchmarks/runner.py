"""Runs the benchmarks of a file one by one: failures are reported, and the others still run."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.benchmarks.command_line import count_mpi_processes, is_measurement
from phalanx.benchmarks.metrics import MetricMissing, extract_metrics, read_facts
from phalanx.benchmarks.process import CommandContext, CommandNotStarted, read_end, run_command
from phalanx.benchmarks.results import SpecRun, VariantResult, write_results
from phalanx.benchmarks.schema import BenchmarkVariant, split_command
from phalanx.errors import EXIT_UNTRUSTED, ConfigError

_JSON = "--json"
_OWN_MESSAGE = re.compile(r"^phalanx [a-z -]+: ", re.MULTILINE)
_ALL = 50_000_000  # bytes of output searched for values


@dataclass(frozen=True)
class BenchmarkProgress:
    """The progress of the benchmarks."""

    number: int  # from 1
    count: int
    variant: str
    elapsed_s: float
    last_line: str  # of its output


class RunObserver(NamedTuple):
    """Callbacks of a run of benchmarks."""

    on_progress: Callable[[BenchmarkProgress], None]
    on_end: Callable[[int, VariantResult], None]  # with the number of the command


def run_variants(
    variants: Sequence[BenchmarkVariant],
    run: SpecRun,
    folder: Path,
    observer: RunObserver,
    *,
    timeout_s: float | None = None,
    stop_on_error: bool = False,
) -> SpecRun:
    """Run all that are not done; the files of results are rewritten after each."""
    for number, variant in enumerate(variants[run.done :], start=run.done + 1):

        def watch(
            elapsed: float, said: str, *, number: int = number, name: str = variant.name
        ) -> None:
            observer.on_progress(BenchmarkProgress(number, len(variants), name, elapsed, said))

        found = _run_variant(variant, folder, watch, timeout_s)
        run = replace(run, done=number, results=(*run.results, *found))
        write_results(folder, run)
        for result in found:
            observer.on_end(number, result)
        if stop_on_error and any(result.result == "failed" for result in found):
            break
    return run


def find_difference(found: SpecRun, run: SpecRun, variants: Sequence[BenchmarkVariant]) -> str:
    """Why existing results do not belong to a run; empty if it can continue them."""
    done = [(r.benchmark, r.parameters, r.command) for r in found.results]
    asked = [(v.benchmark.name, v.parameters, v.command) for v in variants]
    if found.done >= found.planned:
        return "already holds results"
    if found.planned != len(asked) or [key for key, _ in groupby(done)] != asked[: found.done]:
        return "holds the results of other commands"
    changed = [
        name for name, value in run.environment.items() if found.environment.get(name) != value
    ]
    return f"its results are of another {changed[0]}" if changed else ""


def find_exit_code(run: SpecRun) -> int:
    """0 if all passed; else that of the first that failed, or that of untrusted results."""
    failed = [result for result in run.results if result.result == "failed"]
    if failed:
        return next((code for result in failed if (code := result.exit_code or 0) > 0), 1)
    return EXIT_UNTRUSTED if any(r.result == "untrusted" for r in run.results) else 0


def _run_variant(
    variant: BenchmarkVariant,
    folder: Path,
    watch: Callable[[float, str], None],
    timeout_s: float | None,
) -> list[VariantResult]:
    """Run one command and read what it printed: one result, or one for each measurement."""
    benchmark, began = variant.benchmark, time.monotonic()
    before, context = (_build_context(variant, folder, ending) for ending in (".pre", ""))
    words = variant.words
    if is_measurement(words) and _JSON not in words:
        words = (*words, _JSON)
    unfinished = VariantResult(
        benchmark.name, variant.name, variant.parameters, variant.command, "failed"
    )
    limit = benchmark.timeout or timeout_s
    try:
        for text in benchmark.pre_run_commands:
            command = split_command(text, variant.parameters)
            code = _run_words(command, before, limit, watch)
            if code != 0:
                why = _describe_timeout(limit) if code is None else _describe_failure(before, code)
                reason = f"before it, {' '.join(command)}: {why}"
                duration = time.monotonic() - began
                return [replace(unfinished, reason=reason, exit_code=code, duration_s=duration)]
        code = _run_words(words, context, limit, watch)
    except CommandNotStarted as error:
        return [replace(unfinished, reason=str(error), exit_code=ConfigError.exit_code)]
    ended = replace(unfinished, exit_code=code, duration_s=time.monotonic() - began)
    if code is None:
        return [replace(ended, reason=_describe_timeout(limit))]
    return _read_results(ended, variant, context)


def _build_context(variant: BenchmarkVariant, folder: Path, ending: str) -> CommandContext:
    """Where a variant runs, with output files that do not exist yet."""
    stem = re.sub(r"[^\w.=-]", "-", variant.name) + ending
    output, errors = (folder / f"{stem}.{kind}" for kind in ("out", "err"))
    for path in (output, errors):
        path.unlink(missing_ok=True)
    return CommandContext(variant.benchmark.folder, dict(variant.benchmark.env), output, errors)


def _describe_timeout(limit: float | None) -> str:
    return f"ended after {limit:g} s, its time limit"


def _describe_failure(context: CommandContext, code: int | None) -> str:
    """The end of a failed command's output."""
    message = _find_message(read_end(context.errors)) or context.last_line()
    return message or f"exit code {code}"


def _run_words(
    words: tuple[str, ...],
    context: CommandContext,
    timeout_s: float | None,
    watch: Callable[[float, str], None],
) -> int | None:
    """The exit code of one command line."""
    return run_command(
        words,
        context,
        timeout_s=timeout_s,
        # our own measurements print nothing before their end
        watch=lambda elapsed: watch(elapsed, "" if is_measurement(words) else context.last_line()),
    )


def _read_results(
    ended: VariantResult, variant: BenchmarkVariant, context: CommandContext
) -> list[VariantResult]:
    """The results that a finished command printed; several if it measured several things."""
    printed = read_end(context.output, _ALL)
    if ended.exit_code not in (0, EXIT_UNTRUSTED):
        return [replace(ended, reason=_describe_failure(context, ended.exit_code))]
    prints_json = _JSON in variant.words or is_measurement(variant.words)
    every = read_facts(printed) if prints_json else []
    text = printed + read_end(context.errors, _ALL)
    processes = count_mpi_processes(context.replace_variables(variant.words))
    if len(every) < 2:
        return [_add_metrics(ended, variant, text, every[0] if every else None, processes)]
    return [
        _add_metrics(
            replace(ended, variant=_name_measurement(ended.variant, facts)),
            variant,
            text,
            facts,
            processes,
        )
        for facts in every
    ]


def _name_measurement(variant: str, facts: Mapping[str, Any]) -> str:
    """The name of one of several measurements of a command."""
    batch = (facts.get("batch") or {}).get("micro", "")
    return f"{variant}_{facts.get('data', '')}_{batch}".strip("_")


def _add_metrics(
    ended: VariantResult,
    variant: BenchmarkVariant,
    text: str,
    facts: dict[str, Any] | None,
    processes: int,
) -> VariantResult:
    """The result with its metrics; failed if they are missing."""
    try:
        metrics = extract_metrics(variant.benchmark.data, text, facts, processes=processes)
    except MetricMissing as error:
        return replace(ended, facts=facts, reason=str(error))
    if is_measurement(variant.words) and not metrics:
        return replace(ended, facts=facts, reason="no figure was found")
    problems = (facts or {}).get("problems") or []
    if facts is None and ended.exit_code == EXIT_UNTRUSTED:
        problems = [f"exit code {EXIT_UNTRUSTED}"]
    return replace(
        ended,
        result="untrusted" if problems else "passed",
        reason="; ".join(problems),
        metrics=metrics,
        facts=facts,
    )


def _find_message(errors: str) -> str:
    """The message that a command of ours ends with."""
    starts = [found.end() for found in _OWN_MESSAGE.finditer(errors)]
    return " ".join(errors[starts[-1] :].split()) if starts else ""
