"""`phalanx bench --spec`: runs the benchmarks of a file and prints their results as a table."""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.command import (
    JSON_FLAG,
    Argument,
    Command,
    ParsedArgs,
    command,
    parse_args,
)
from phalanx.cli.progress import ProgressLine
from phalanx.disk import convert_out_errors
from phalanx.errors import ConfigError, Stopped, UserError, join_problems, suggest
from phalanx.report.terminal import drawing_stream
from phalanx.units import align_columns, format_plural, format_seconds

if TYPE_CHECKING:
    from phalanx.benchmarks.results import SpecRun, VariantResult
    from phalanx.benchmarks.runner import BenchmarkProgress
    from phalanx.benchmarks.schema import BenchmarkVariant, Selection

_REWRITE_S, _LOG_S = 0.5, 30.0  # between two lines of progress, on a terminal and in a log
_LAST_LINE_SHOWN = 60  # characters of the last line that a command has printed


@command(
    "bench",
    "Run the benchmarks of a file one after the other, and write their results as JSON, CSV and a "
    "Markdown table. A failure is reported, and the others continue. To measure one thing: "
    "phalanx bench train, infer, ...; `phalanx bench` lists them.",
    Argument(
        "--spec",
        "Files of benchmarks; docs/benchmarks.md shows one.  [./benchmarks.yml, or Phalanx's own: "
        "those of the older applications]",
        many=True,
    ),
    Argument("--benchmark", "Only these, by name.", many=True),
    Argument(
        "--set",
        "Options to change in every command that has them, or values of a parameter: "
        "image-size=32 batchsize=1,8.",
        metavar="--set NAME=VALUE",
        many=True,
    ),
    Argument("--dry-run", "List and check the commands, run nothing.", switch=True),
    Argument(
        "--include-convergence",
        "Also those that train to the end: their names contain _conv.",
        switch=True,
    ),
    Argument("--stop-on-error", "Stop at the first that fails.", switch=True),
    Argument(
        "--timeout", "Seconds after which a command is ended, unless its entry has a timeout."
    ),
    Argument("--allow-wandb", "Keep --wandb in the commands.", switch=True),
    Argument(
        "--out",
        "Folder for results and output; with that of a stopped command, continues it.  "
        "[bench-results/TIME]",
    ),
    JSON_FLAG,
    usage="--spec FILE [--benchmark NAME]... [--set NAME=VALUE]... [--dry-run] [--out DIR]",
    examples={
        "phalanx bench --spec benchmarks.yml --dry-run": "list them, with their commands",
        "phalanx bench --spec benchmarks.yml --benchmark resnet50-train-generated": "one of them",
        "phalanx bench --spec benchmarks.yml --benchmark resnet50-train-generated --set "
        "image-size=32": "the same on a small machine",
        "phalanx bench --benchmark resnet50-infer-synthetic --set batchsize=1,16": "two of its six "
        "batch sizes",
    },
)
def _run(args: ParsedArgs) -> int:
    """Read the files, check the selection, then run or list it."""
    args.refuse_problems()
    selection = _read_selection(args)
    timeout_s = args.read_positive("--timeout", "seconds") if args["--timeout"] else None
    from phalanx.benchmarks.file import find_spec, read_specs
    from phalanx.benchmarks.schema import build_variants

    paths = list(dict.fromkeys(find_spec(name) for name in args["--spec"] or [None]))
    chosen = selection.choose(read_specs(paths))
    variants = [v for b in chosen for v in build_variants(b, selection, known=_list_options)]
    _check_settings(selection, variants)
    if args["--dry-run"]:
        return _list_variants(args, variants)
    folder = Path(args["--out"] or Path("bench-results") / time.strftime("%Y%m%d-%H%M%S"))
    run = _run_all(args, variants, folder, timeout_s=timeout_s, specs=tuple(map(str, paths)))
    from phalanx.benchmarks.runner import find_exit_code

    args.print_result(run.to_dict(), lambda: _print_table(run, folder))
    return find_exit_code(run)


def _read_selection(args: ParsedArgs) -> "Selection":
    """Which benchmarks, and what is set in their commands."""
    from phalanx.benchmarks.schema import Selection

    pairs, problems = [], []
    for word in args["--set"] or ():
        name, equals, text = word.removeprefix("--").partition("=")
        if not (name and equals):
            problems.append(f"--set {word}: expected NAME=VALUE, such as image-size=32")
        pairs.append((name, text))
    if problems:
        raise join_problems(problems)
    return Selection(
        names=tuple(args["--benchmark"] or ()),
        settings=tuple(pairs),
        include_convergence=args["--include-convergence"],
        allow_wandb=args["--allow-wandb"],
    )


def _find_own_command(words: Sequence[str]) -> tuple[Command, Sequence[str]] | None:
    """The Phalanx command that the words name, and the words after it; None for other programs."""
    from phalanx.cli.main import find_command, load_command

    name, rest = find_command(words[1:])
    if list(words[:1]) != ["phalanx"] or name is None:
        return None
    return load_command(name), rest


def _list_options(words: Sequence[str]) -> frozenset[str]:
    """The options of a command line; empty for other programs.

    If it starts another command by `launch` or mpirun, the options are those of that one.
    """
    from phalanx.benchmarks.command_line import get_program

    found = _find_own_command(get_program(words))
    if found is None:
        return frozenset()
    own = [a.name.removeprefix("--") for a in found[0].arguments if a.name.startswith("--")]
    return frozenset([*found[0].options, *own])


def _check_settings(selection: "Selection", variants: "list[BenchmarkVariant]") -> None:
    """Raise ConfigError for an option that no command has; note those that only some have."""
    problems = []
    for name, text in selection.settings:
        without = [variant for variant in variants if name in variant.left_out]
        if len(without) == len(variants):
            names = {*chain.from_iterable(_list_options(variant.words) for variant in variants)}
            names |= {*chain.from_iterable(v.benchmark.parameter_names for v in variants)}
            which = "no command here has such an option"
            problems.append(f"--set {name}={text}: {which}; {suggest(name, sorted(names))}")
        elif without:
            count = f"{len(without)} of {format_plural(len(variants), 'command')}"
            have = "has" if len(without) == 1 else "have"
            print(f"note: --set {name}={text}: {count} {have} no such option", file=sys.stderr)
    if problems:
        raise join_problems(problems)


def _list_variants(args: ParsedArgs, variants: "list[BenchmarkVariant]") -> int:
    """Print the commands and what is wrong with them; 2 if anything is."""
    problems = [check_command(variant.words) for variant in variants]
    rows = list(zip(variants, problems, strict=True))
    facts = [
        {
            "benchmark": variant.benchmark.name,
            "variant": variant.name,
            "description": variant.benchmark.description,
            "command": variant.command,
            "problem": problem or None,
        }
        for variant, problem in rows
    ]
    args.print_result(facts, lambda: _print_commands(rows))
    return ConfigError.exit_code if any(problems) else 0


def _print_commands(rows: "list[tuple[BenchmarkVariant, str]]") -> None:
    """Print the benchmarks with their descriptions and commands, and a line with their number."""
    described = ""
    for variant, problem in rows:
        benchmark = variant.benchmark
        if benchmark.name != described:
            described = benchmark.name
            print(f"{benchmark.name}{': ' * bool(benchmark.description)}{benchmark.description}")
        print(f"    {variant.command}")
        if problem:
            print(f"      wrong: {problem}")
    wrong = sum(bool(problem) for _, problem in rows)
    names = {variant.benchmark.name for variant, _ in rows}
    ending = f"{wrong or 'none'} of them wrong"
    count = f"{format_plural(len(names), 'benchmark')}, {format_plural(len(rows), 'command')}"
    print(f"{count}, {ending}; nothing was run")


def check_command(words: Sequence[str]) -> str:
    """What is wrong with a Phalanx command, as far as it shows without its data and devices."""
    found = _find_own_command(words)
    if found is None:
        named = " ".join(words[1:3])
        return f"no command is called {named!r}" if words[0] == "phalanx" else ""
    chosen, rest = found
    if chosen.takes_command:  # it parses its words itself
        return ""
    try:
        args = parse_args(chosen, rest)
        if "model" in chosen.options:
            _plan_command(args)
        args.refuse_problems()
    except UserError as error:
        return " ".join(str(error).split())
    return ""


def _plan_command(args: ParsedArgs) -> None:
    """Raise the errors that `phalanx plan` would raise for a command that trains or scores."""
    from phalanx.assemble.dataset_summary import plan_new_run
    from phalanx.config.read import read_settings

    here = {name: text for name, text in args.flags.items() if name not in ("data-dir", "device")}
    flags = {**here, "device": "cpu"}
    if "target" not in args.values:
        settings = read_settings(args.preset_name, flags, problems=args.problems)
        plan_new_run(settings, without_data=True)
        return
    from phalanx.assemble.scoring_target import (
        plan_target,
        read_untrained_settings,
        refuse_missing_path,
        use_random_target_data,
    )
    from phalanx.cli.measurement_flags import read_batch_sizes
    from phalanx.cli.validate import read_target_name

    target = read_target_name(args)
    if "$" in target:  # a run whose path is known only when the command runs
        return
    for size in read_batch_sizes(args):
        untrained = read_untrained_settings(
            target, flags if size is None else {**flags, "batch-size": size}
        )
        if untrained is None:
            refuse_missing_path(target)
        else:
            plan_target(use_random_target_data(untrained, "generated"))


def _run_all(
    args: ParsedArgs,
    variants: "list[BenchmarkVariant]",
    folder: Path,
    *,
    timeout_s: float | None,
    specs: tuple[str, ...],
) -> "SpecRun":
    """Run the commands; a signal ends the one that is running, and keeps the results so far."""
    from phalanx.benchmarks.results import write_results
    from phalanx.benchmarks.runner import RunObserver, run_variants

    run = _start_run(args, variants, folder, specs)
    done = run.done
    line = ProgressLine(_REWRITE_S, _LOG_S)

    def end(number: int, result: "VariantResult") -> None:
        nonlocal done
        done = number
        text = f"[{number}/{len(variants)}] {_describe_result(result)}"
        if line.is_terminal:
            print("\r\033[K", end="", file=drawing_stream(sys.stderr), flush=True)
        print(text, file=sys.stderr if args["--json"] else sys.stdout, flush=True)

    with convert_out_errors(folder, "then run the rest with --benchmark"):
        folder.mkdir(parents=True, exist_ok=True)
        write_results(folder, run)
        try:
            return run_variants(
                variants,
                run,
                folder,
                RunObserver(lambda progress: line.show(_describe_progress(progress)), end),
                timeout_s=timeout_s,
                stop_on_error=args["--stop-on-error"],
            )
        except KeyboardInterrupt as stop:
            count = f"{done} of {format_plural(len(variants), 'benchmark')}"
            raise Stopped(
                f"stopped after {count}; their results are in {folder}; the same command with "
                f"--out {folder} runs the rest"
            ) from stop


def _start_run(
    args: ParsedArgs, variants: "list[BenchmarkVariant]", folder: Path, specs: tuple[str, ...]
) -> "SpecRun":
    """A run without results yet, or the one in the same folder that was stopped."""
    from phalanx.benchmarks.results import SpecRun, read_results
    from phalanx.benchmarks.runner import find_difference
    from phalanx.report.environment import collect_environment

    began = datetime.now(UTC).isoformat(timespec="seconds")
    facts = collect_environment()
    where = {name: facts[name] for name in ("commit", "processor", "cores")}
    where |= {name: facts[f"{name} version"] for name in ("torch", "python", "phalanx")}
    run = SpecRun(args.line, specs, began, where, len(variants))
    found = read_results(folder)
    if found is None:
        return run
    difference = find_difference(found, run, variants)
    if difference:
        raise ConfigError(f"--out {folder}: {difference}; choose another folder")
    print(f"going on after {found.done} of {len(variants)}, in {folder}", file=sys.stderr)
    return found


def _describe_progress(progress: "BenchmarkProgress") -> str:
    """The progress of the benchmarks, on one line."""
    said = f": {progress.last_line[:_LAST_LINE_SHOWN]}" if progress.last_line else ""
    elapsed = format_seconds(progress.elapsed_s)
    return f"[{progress.number}/{progress.count}] {progress.variant}, {elapsed}{said}"


def _describe_result(result: "VariantResult") -> str:
    """How a benchmark ended, on one line."""
    from phalanx.benchmarks.results import format_rate

    parts = [f"{result.variant}: "]
    if "throughput" in result.metrics:
        parts.append(f"{format_rate(result.metrics['throughput'])} images/s, ")
    parts.append(f"{result.result} in {format_seconds(result.duration_s)}")
    return "".join(parts) + f": {result.reason}" * bool(result.reason)


def _print_table(run: "SpecRun", folder: Path) -> None:
    """Print all results in columns, and the files they are in."""
    from phalanx.benchmarks.results import RESULTS, build_table

    cells = build_table(run.results, with_reasons=False)  # each was printed when it ended
    print("", *align_columns(cells, left=[0, len(cells[0]) - 1]), sep="\n")
    counts = Counter(result.result for result in run.results)
    print(", ".join(f"{count} {word}" for word, count in counts.items()), end="")
    left = run.planned - run.done
    print(f"; {left} not run" * bool(left) + f"; results: {folder / RESULTS}.json, .csv, .md")
