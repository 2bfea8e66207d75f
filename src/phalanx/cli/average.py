"""`phalanx average`: the last checkpoints of a run become one, scored beside the newest."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cli.command import Argument, Command, Request
from phalanx.cli.validate import show
from phalanx.config.text import value_from_text
from phalanx.errors import ConfigError
from phalanx.plan.averaging import Averaging

if TYPE_CHECKING:
    from phalanx.assemble.average import Averaged

_SCORING_OPTIONS = ("data-dir", "valid-batch-size", "workers", "device", "precision")
_AVERAGING = {"weight-avg-strategy", "weight-avg-exp-decay", "weight-avg-n"}


def _run(request: Request) -> int:
    """Average, write the result, and tell both scores: here and in the run's report."""
    request.refuse_problems()
    how = _read_averaging(request)
    from phalanx.report.folder import open_run

    folder = open_run(Path(request["run"]))
    with folder.lock():  # a training at work deletes checkpoints
        newest = _choose_checkpoints(folder.path, folder.checkpoints, how)[-1]
        flags = {n: text for n, text in request.flags.items() if n not in _AVERAGING}
        _refuse_more_steps(newest, how, flags)

        from phalanx.assemble.average import average_run
        from phalanx.report.page import write_report

        averaged = average_run(folder, how, flags)
    write_report(folder)
    _show_both(averaged, as_json=request["json"])
    return 0


def _read_averaging(request: Request) -> Averaging:
    """What the words ask for; ConfigError for what is no number or out of range."""
    given = {
        name: _read_value(name, request.flags[name]) for name in _AVERAGING & request.flags.keys()
    }
    steps = request["reestimate_norms"]
    if not steps.isdecimal():
        raise ConfigError(f"--reestimate-norms: wants a whole number of 0 or more, got {steps!r}")
    return Averaging(
        strategy=given.get("weight-avg-strategy", "mean"),
        decay=given.get("weight-avg-exp-decay", 0.99),
        count=given.get("weight-avg-n"),
        norm_steps=int(steps),
    )


def _read_value(name: str, text: str) -> Any:
    """What an option's text means."""
    try:
        return value_from_text(name, text)
    except ValueError as error:
        raise ConfigError(f"--{name}: {error}") from None


def _choose_checkpoints(run: Path, shelf: Path, how: Averaging) -> list[Path]:
    """The checkpoints to average, oldest first."""
    from phalanx.assemble.prepare import find_checkpoint
    from phalanx.engine.checkpoint_store import list_checkpoints

    find_checkpoint(run)  # knows what to say where there is none
    found = list_checkpoints(shelf)
    return found[-how.count_among(len(found), where=shelf) :]


def _refuse_more_steps(newest: Path, how: Averaging, flags: dict[str, str]) -> None:
    """Statistics come from steps the run has."""
    from phalanx.assemble.prepare import read_checkpoint

    steps = read_checkpoint(newest, flags).start.facts["plan"]["total_steps"]
    if how.norm_steps > steps:
        raise ConfigError(
            f"--reestimate-norms {how.norm_steps}: the run has {steps:,} training steps; "
            f"give at most that many"
        )


def _show_both(averaged: "Averaged", *, as_json: bool) -> None:
    """The newest checkpoint's score and the average's, as lines or as one object."""
    (newest, average), (first, second) = averaged.paths, averaged.scores
    if as_json:
        rows = {
            name: {"checkpoint": str(path), **asdict(row), "bad_images": bad}
            for name, path, (row, bad) in (("newest", newest, first), ("average", average, second))
        }
        print(json.dumps({"averaged": averaged.account, **rows}, indent=2))
        return
    print(_tell(averaged.account))
    show(str(newest), first[0], {}, as_json=False)
    show(str(average), *second, as_json=False)


def _tell(account: dict[str, Any]) -> str:
    """What was averaged, in a line."""
    decay = f", decay {account['decay']:g}" if account["strategy"] == "exponential" else ""
    steps = ", ".join(f"{step:,}" for step in account["steps"])
    fresh = account["norm_steps"]
    norms = f"; batch norms anew from {fresh:,} training steps" if fresh else ""
    return f"{account['strategy']}{decay} of {account['count']} checkpoints: steps {steps}{norms}"


COMMANDS = {
    "average": Command(
        name="average",
        summary="Average the last checkpoints of a run into RUN/checkpoints/average, and score it "
        "beside the newest. Running statistics of batch norms are averaged like weights.",
        usage="phalanx average RUN [--weight-avg-strategy mean|exponential] [--weight-avg-n N] "
        "[--reestimate-norms STEPS] [--json]",
        run=_run,
        arguments=(
            Argument(name="run", metavar="RUN", help="A run folder.", required=True),
            Argument(
                name="--reestimate-norms",
                help="Take the statistics of batch norms anew, from the images of so many training "
                "steps, instead of averaging them.  [0]",
                default="0",
            ),
            Argument(name="--json", help="Print a JSON object.", switch=True),
        ),
        options=(*sorted(_AVERAGING, reverse=True), *_SCORING_OPTIONS),
        examples=(
            ("phalanx average runs/demo", "the mean of the last checkpoints"),
            ("phalanx average runs/demo --weight-avg-n 2", "of the last two alone"),
            (
                "phalanx average runs/demo --weight-avg-strategy exponential "
                "--weight-avg-exp-decay 0.9",
                "newer ones count more",
            ),
            (
                "phalanx average runs/demo --reestimate-norms 100",
                "with statistics that fit the averaged weights",
            ),
            ("phalanx validate runs/demo/checkpoints/average", "score it again later"),
        ),
    ),
}
