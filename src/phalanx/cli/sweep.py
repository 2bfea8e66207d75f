"""`phalanx sweep`: a search over training options, trial by trial."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from phalanx.cli.command import Argument, Command, ParsedArgs
from phalanx.errors import CheckpointError, ConfigError, DivergedError

if TYPE_CHECKING:
    from phalanx.sweep.file import SweepFile
    from phalanx.sweep.journal import SweepState
    from phalanx.sweep.study import Voice


def _run(request: ParsedArgs) -> int:
    """Read the file, then run what is left of its trials."""
    request.refuse_problems()
    from phalanx.sweep.check import open_file

    path, folder = _find_file(request)
    sweep = open_file(path)
    if request["dry_run"]:
        _show_plan(sweep, folder, as_json=request["json"])
        return 0
    from phalanx.sweep.proposals import refuse_missing

    refuse_missing()
    from phalanx.sweep.study import run_sweep

    journal = run_sweep(folder, sweep, _voice_of(as_json=request["json"]))
    if request["json"]:
        print(json.dumps(journal.facts(), indent=2))
    else:
        _show_result(journal)
    return 0 if journal.best else _failed_code(journal)


def _find_file(request: ParsedArgs) -> tuple[Path, Path]:
    """The sweep's file and its folder."""
    if request["resume"]:
        return _file_to_resume(request)
    if not request["file"]:
        raise ConfigError(
            "name the YAML file of the sweep, or a folder to go on with: --resume DIR; "
            "phalanx sweep --help shows both"
        )
    path = Path(request["file"])
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder; go on with a sweep by --resume {path}")
    if not path.is_file():
        raise ConfigError(
            f"{path}: no such file; it names a preset, what to search and how, as in: "
            "preset: demo / search: {lr: {low: 0.02, high: 0.6, log: true}} / trials: 12"
        )
    return path, Path(request["sweep_dir"] or Path("sweeps") / path.stem)


def _file_to_resume(request: ParsedArgs) -> tuple[Path, Path]:
    """The copy of the file in the folder of a sweep."""
    if request["file"] or request["sweep_dir"]:
        raise ConfigError("--resume DIR goes on with the sweep in DIR: give nothing else with it")
    folder = Path(request["resume"])
    if not (folder / "sweep.json").is_file() or not (folder / "sweep.yaml").is_file():
        what = "holds no sweep" if folder.is_dir() else "there is no such folder"
        raise CheckpointError(f"{folder}: {what}; begin one with: phalanx sweep FILE")
    return folder / "sweep.yaml", folder


def _show_plan(sweep: "SweepFile", folder: Path, *, as_json: bool) -> None:
    """What a sweep would do."""
    from phalanx.sweep.table import draw_space

    if as_json:
        print(json.dumps({"folder": str(folder), **sweep.facts()}, indent=2))
        return
    for line in [*draw_space(sweep), f"{'folder':<24}{folder}"]:
        print(line)


def _voice_of(*, as_json: bool) -> "Voice":
    """Lines on standard output, or beside the JSON; how far a trial is, on a terminal alone."""
    from phalanx.sweep.study import Voice

    stream = sys.stderr if as_json else sys.stdout
    live = sys.stderr.isatty()

    def tell(text: str) -> None:
        if live:
            _write(f"\r\033[K{text}", sys.stderr)

    def say(text: str) -> None:
        tell("")
        _write(f"{text}\n", stream)

    return Voice(say, tell)


def _write(text: str, stream: TextIO) -> None:
    """Show a text; where nobody listens any more, the trials go on in silence."""
    try:
        print(text, end="", file=stream, flush=True)
    except OSError:
        # Python flushes the stream once more at its end, and that too must not fail
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), stream.fileno())


def _show_result(journal: "SweepState") -> None:
    """The table, the best trial and where to look."""
    from phalanx.sweep.table import draw_table

    print()
    for line in draw_table(journal):
        print(line)
    print()
    if journal.best:
        print(f"best, trial {journal.best.number}: {journal.command(journal.best)}")
    else:
        print("no trial came to its end")
    print(f"page: {journal.folder / 'sweep.html'}")


def _failed_code(journal: "SweepState") -> int:
    """The exit code of a sweep in which nothing came to its end: its last failure's."""
    codes = [trial.exit_code for trial in journal.trials if trial.state == "failed"]
    return next((code for code in reversed(codes) if code and code > 0), DivergedError.exit_code)


COMMANDS = {
    "sweep": Command(
        name="sweep",
        summary="Search training options: every trial is a run of its own. The file names the "
        "options to search, with ranges or lists, and the method: grid, random or tpe. Killed or "
        "stopped, the same command goes on.",
        usage="phalanx sweep FILE [--sweep-dir DIR] [--dry-run] [--json] | --resume DIR",
        run=_run,
        arguments=(
            Argument(
                name="file",
                metavar="FILE",
                help="The YAML file of the sweep; docs/training.md shows one.",
            ),
            Argument(name="--sweep-dir", help="Folder of the sweep  [sweeps/NAME]"),
            Argument(
                name="--resume",
                help="Go on with the sweep in this folder; of a finished one, show the table.",
            ),
            Argument(
                name="--dry-run", help="Check the file, say what would run, and stop.", switch=True
            ),
            Argument(name="--json", help="Print everything as JSON at the end.", switch=True),
        ),
        examples=(
            (
                "phalanx sweep rates.yaml",
                "run its trials; the table, the CSV and sweep.html follow",
            ),
            ("phalanx sweep rates.yaml --dry-run", "check it, and see what would run"),
            ("phalanx sweep --resume sweeps/rates", "go on after a kill, a signal or a power cut"),
        ),
    ),
}
