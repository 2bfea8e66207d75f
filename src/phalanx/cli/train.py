"""`phalanx train`: train a preset, resume a run, or fork one."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.command import ALL_OPTIONS, Argument, Command, Request, preset_named
from phalanx.cli.validate import find_checkpoints, show
from phalanx.config.text import FALSE_WORDS
from phalanx.errors import ConfigError, Stopped

if TYPE_CHECKING:
    from phalanx.assemble.prepare import PreparedRun
    from phalanx.config.read import Settings


def _run(request: Request) -> int:
    """Prepare without torch, then train."""
    preset = preset_named(request)
    ways = [way for way in ("resume", "fork") if request[way]]
    if len(ways) > 1 or (ways and preset):
        raise ConfigError(
            "--resume goes on with a run, --fork starts a new one from its checkpoint, a preset "
            "begins afresh: give one of them"
        )
    if request["resume"] and request.flags.get("training", "").lower() in FALSE_WORDS:
        return _score_run(request)
    if request["resume"] and _is_finished(request["resume"]):
        request.refuse_problems()
        from phalanx.assemble.prepare import remake_finished

        remake_finished(Path(request["resume"]), request.flags)
        return _show_result(Path(request["resume"]), as_json=request["json"])
    if not ways:
        settings = _read_settings(request, preset)
        if not settings.config.train.training:
            return _score_untrained(settings, as_json=request["json"])
        from phalanx.assemble.prepare import prepare_new

        prepared = prepare_new(settings, line=request.line)
    else:
        prepared = _prepare_again(request)

    from phalanx.assemble.train import train

    try:
        train(prepared, stream=sys.stderr if request["json"] else None)
    except Stopped as stop:
        way_on = f"phalanx train --resume {prepared.run.path}"
        raise Stopped(f"{stop}; go on with: {way_on}") from None
    return _show_result(prepared.run.path, as_json=request["json"])


def _is_finished(run: str) -> bool:
    """Whether a run has nothing left to train."""
    return (Path(run) / "run.json").is_file() and (Path(run) / "summary.json").is_file()


def _read_settings(request: Request, preset: str | None) -> "Settings":
    """The options of a new run; mistakes are told before anything heavy is imported."""
    from phalanx.assemble.find_data import fetch_missing, read_with_data

    settings = read_with_data(preset, request.flags, problems=request.problems)
    return fetch_missing(settings, lambda line: print(line, file=sys.stderr))


def _prepare_again(request: Request) -> "PreparedRun":
    """An old run to go on with, or a new one that begins with its weights."""
    request.refuse_problems()
    from phalanx.assemble.fork import prepare_fork
    from phalanx.assemble.prepare import prepare_resume

    if request["resume"]:
        return prepare_resume(Path(request["resume"]), request.flags)
    return prepare_fork(Path(request["fork"]), request.flags, line=request.line)


def _score_untrained(settings: "Settings", *, as_json: bool) -> int:
    """--training false: the score of the model as it would begin."""
    from phalanx.assemble.dataset_summary import plan_run

    plan_run(settings)  # what cannot be is told before torch is imported
    from phalanx.assemble.score import open_untrained, score

    show(settings.config.model.model, *score(open_untrained(settings)), as_json=as_json)
    return 0


def _score_run(request: Request) -> int:
    """--resume RUN --training false: every checkpoint scored, as by `validate --all`."""
    request.refuse_problems()
    from phalanx.assemble.prepare import read_checkpoint
    from phalanx.assemble.score import score_checkpoint

    flags = {name: text for name, text in request.flags.items() if name != "training"}
    for checkpoint in find_checkpoints(request["resume"], every=True):
        scored = score_checkpoint(read_checkpoint(checkpoint, flags))
        show(str(checkpoint), *scored, as_json=request["json"])
    return 0


def _show_result(folder: Path, *, as_json: bool) -> int:
    """The last lines of a run: what it reached and where to look."""
    from phalanx.report.folder import open_run
    from phalanx.report.records import read_scores
    from phalanx.report.summary import read_summary

    summary, rows = read_summary(folder), read_scores(folder)
    if as_json:
        print(json.dumps(asdict(summary)))
        return 0
    if not rows:
        print(f"trained {summary.steps:,} steps; nothing was scored")
    for row in rows[-1:]:
        low, high = row.interval95
        print(
            f"top-1 {row.top1:.2%} of {row.scored:,} images "
            f"(95 % interval {low:.2%} to {high:.2%}) after {summary.steps:,} steps"
        )
    if summary.best:
        print(f"best checkpoint: step {summary.best.step:,}, top-1 {summary.best.top1:.2%}")
    if summary.bad_images:
        print(f"{len(summary.bad_images)} images could not be read; the report names them")
    print(f"report: {open_run(folder).report}")
    return 0


COMMANDS = {
    "train": Command(
        name="train",
        summary="Train a preset or a config file; resume a run bit for bit; or fork one.",
        usage="phalanx train [PRESET|FILE] [--option value]... | --resume RUN | --fork RUN",
        run=_run,
        arguments=(
            Argument(
                name="preset",
                metavar="PRESET|FILE",
                help="A preset by name, or a YAML file; without one, the dataset's own preset.",
            ),
            Argument(name="--config", help="The same, as a flag."),
            Argument(
                name="--resume",
                help="Go on with this run from its newest checkpoint; never changes the maths.",
            ),
            Argument(
                name="--fork",
                help="Start a new run from a run's or checkpoint's state, with changed options.",
            ),
            Argument(name="--json", help="Print the summary as JSON at the end.", switch=True),
        ),
        options=ALL_OPTIONS,
        examples=(
            ("phalanx train", "the demo: a small ResNet on built-in data, about a minute"),
            ("phalanx train demo --epochs 2 --run-dir runs/short", "the same, shorter"),
            ("phalanx train --data cifar10 --data-dir ~/cifar10", "that dataset's own preset"),
            ("phalanx train --resume runs/short", "go on after a kill, a signal or a power cut"),
            (
                "phalanx train --fork runs/short --run-dir runs/long --epochs 4",
                "a longer run from the same weights",
            ),
        ),
    ),
}
