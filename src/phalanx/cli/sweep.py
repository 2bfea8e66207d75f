"""`phalanx sweep`: a search over training options, trial by trial."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from phalanx.catalog.plugins import format_plugin_flag, list_loaded_plugins
from phalanx.cli.command import Argument, ParsedArgs, command
from phalanx.disk import quote_path
from phalanx.errors import CheckpointError, ConfigError, DivergedError
from phalanx.report.terminal import discard_output, escape_text, raw_stream

if TYPE_CHECKING:
    from phalanx.sweep.runner import SweepOutput
    from phalanx.sweep.state import SweepState


@command(
    "sweep",
    "Search training options: every trial is a separate run. The file names the options to "
    "search, with ranges or lists, and the method: grid, random or tpe. After a stop or a kill, "
    "the same command continues it.",
    Argument("file", "The YAML file of the sweep; docs/training.md shows one."),
    Argument("--sweep-dir", "Folder of the sweep.  [sweeps/NAME]"),
    Argument("--resume", "Continue the sweep in this folder; if it is finished, show its table."),
    Argument("--dry-run", "Check the file, say what would run, and stop.", switch=True),
    Argument("--json", "Print everything as JSON at the end.", switch=True),
    usage="FILE [--sweep-dir DIR] [--plugin MODULE] [--dry-run] [--json] | --resume DIR",
    options=("plugin",),
    examples={
        "phalanx sweep rates.yaml": "run its trials; the table, the CSV and sweep.html follow",
        "phalanx sweep rates.yaml --dry-run": "check it, and see what would run",
        "phalanx sweep --resume sweeps/rates": "continue after a kill, a signal or a power cut",
    },
)
def _run(args: ParsedArgs) -> int:
    """Read the file, then run its remaining trials."""
    args.refuse_problems()
    args.load_plugins()
    from phalanx.sweep.check import read_sweep

    path, folder = _find_file(args)
    sweep = read_sweep(path)
    if args["--dry-run"]:
        from phalanx.sweep.table import describe_sweep

        lines = [*describe_sweep(sweep), f"{'folder':<24}{folder}"]
        facts = {"folder": str(folder), **sweep.to_dict()}
        args.print_result(facts, lambda: print("\n".join(lines)))
        return 0
    from phalanx.sweep.proposals import refuse_missing_optuna

    refuse_missing_optuna()
    from phalanx.sweep.runner import run_sweep

    state = run_sweep(folder, sweep, _build_output(as_json=args["--json"]))
    args.print_result(state.to_dict(), lambda: _show_result(state))
    return 0 if state.best else _find_exit_code(state)


def _find_file(args: ParsedArgs) -> tuple[Path, Path]:
    """The sweep's file and its folder."""
    if args["--resume"]:
        return _find_file_to_resume(args)
    if not args["file"]:
        raise ConfigError(
            "name the YAML file of the sweep, or a folder to continue: --resume DIR; "
            "phalanx sweep --help shows both"
        )
    path = Path(args["file"])
    if path.is_dir():
        way_out = f"--resume {quote_path(path)}{format_plugin_flag(list_loaded_plugins())}"
        raise ConfigError(f"{path}: is a folder; to continue a sweep, give {way_out}")
    if not path.exists():
        raise ConfigError(
            f"{path}: no such file; it names a preset, what to search and how, as in: "
            "preset: demo / search: {lr: {low: 0.02, high: 0.6, log: true}} / trials: 12"
        )
    return path, Path(args["--sweep-dir"] or Path("sweeps") / path.stem)


def _find_file_to_resume(args: ParsedArgs) -> tuple[Path, Path]:
    """The copy of the file in the folder of a sweep."""
    if args["file"] or args["--sweep-dir"]:
        raise ConfigError("--resume DIR continues the sweep in DIR: give nothing else with it")
    folder = Path(args["--resume"])
    if not (folder / "sweep.json").is_file() or not (folder / "sweep.yaml").is_file():
        what = "holds no sweep" if folder.is_dir() else "there is no such folder"
        raise CheckpointError(f"{folder}: {what}; start one with: phalanx sweep FILE")
    return folder / "sweep.yaml", folder


def _build_output(*, as_json: bool) -> "SweepOutput":
    """Lines on standard output, or on standard error with --json; progress only on a terminal."""
    from phalanx.sweep.runner import SweepOutput

    stream = sys.stderr if as_json else sys.stdout
    is_terminal = sys.stderr.isatty()

    def show_progress(text: str) -> None:
        if is_terminal:
            _write(f"\r\033[K{escape_text(text)}", sys.stderr)

    def print_line(text: str) -> None:
        show_progress("")
        _write(f"{escape_text(text)}\n", stream)

    return SweepOutput(print_line, show_progress)


def _write(text: str, stream: TextIO) -> None:
    """Print escaped text; if the stream was closed, the trials continue silently."""
    try:
        print(text, end="", file=raw_stream(stream), flush=True)
    except OSError:
        discard_output(raw_stream(stream))


def _show_result(state: "SweepState") -> None:
    """Print the table, the best trial and the path of the page."""
    from phalanx.sweep.table import format_table

    print()
    for line in format_table(state):
        print(line)
    print()
    if state.best:
        print(f"best, trial {state.best.number}: {state.command(state.best)}")
    else:
        print("no trial finished")
    print(f"page: {state.folder / 'sweep.html'}")


def _find_exit_code(state: "SweepState") -> int:
    """The exit code of a sweep in which no trial finished: that of the last failed one."""
    codes = [trial.exit_code for trial in state.trials if trial.state == "failed"]
    return next((code for code in reversed(codes) if code and code > 0), DivergedError.exit_code)
