"""`phalanx average`: averages the last checkpoints of a run, and scores the average."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cli.command import JSON_FLAG, LIMIT_OPTIONS, Argument, ParsedArgs, command
from phalanx.cli.validate import print_score
from phalanx.config.read import read_flags
from phalanx.errors import ConfigError, join_problems
from phalanx.plan.averaging import Averaging
from phalanx.units import format_plural

if TYPE_CHECKING:
    from phalanx.assemble.average import AveragedRun
    from phalanx.report.folder import RunFolder

_SCORING_OPTIONS = (
    "data-dir",
    "valid-batch-size",
    "workers",
    "device",
    "precision",
    "threads",
    "plugin",
    *LIMIT_OPTIONS,
)
_AVERAGING_OPTIONS = {  # and the field of Averaging that each one sets
    "weight-avg-strategy": "strategy", "weight-avg-n": "count", "weight-avg-exp-decay": "decay",
}  # fmt: skip


@command(
    "average",
    "Average the last checkpoints of a run into RUN/checkpoints/average, and score it together "
    "with the newest. Running statistics of batch norms are averaged like weights.",
    Argument("run", "A run folder.", required=True),
    Argument(
        "--reestimate-norms",
        "Recompute batch norm statistics from the images of this many training steps, "
        "instead of averaging them.  [0]",
        default="0",
    ),
    JSON_FLAG,
    usage="RUN [--weight-avg-strategy mean|exponential] [--weight-avg-n N] "
    "[--reestimate-norms STEPS] [--json]",
    options=(*_AVERAGING_OPTIONS, *_SCORING_OPTIONS),
    examples={
        "phalanx average runs/demo": "the mean of the last checkpoints",
        "phalanx average runs/demo --weight-avg-n 2": "of the last two only",
        "phalanx average runs/demo --weight-avg-strategy exponential "
        "--weight-avg-exp-decay 0.9": "newer ones count more",
        "phalanx average runs/demo --reestimate-norms 100": (
            "with statistics that fit the averaged weights"
        ),
        "phalanx validate runs/demo/checkpoints/average": "score it again later",
    },
)
def _run(args: ParsedArgs) -> None:
    """Average, write the result, and show both scores here and in the run's report."""
    args.refuse_problems()
    averaging = _read_averaging(args)
    from phalanx.report.folder import open_run

    folder = open_run(Path(args["run"]))
    flags = {name: text for name, text in args.flags.items() if name not in _AVERAGING_OPTIONS}
    with folder.lock():  # training would delete checkpoints meanwhile
        _check_checkpoints(folder, averaging, flags)
        from phalanx.assemble.average import average_run
        from phalanx.report.report_page import write_report

        averaged = average_run(folder, averaging, flags)
    write_report(folder)
    args.print_result(_as_json(averaged), lambda: _print_scores(averaged))


def _read_averaging(args: ParsedArgs) -> Averaging:
    """The averaging that the arguments describe; ConfigError for an invalid value."""
    problems: list[str] = []
    flags = {name: args.flags[name] for name in _AVERAGING_OPTIONS if name in args.flags}
    given = read_flags(flags, problems)
    if problems:
        raise join_problems(problems)
    steps = args["--reestimate-norms"]
    if not steps.isdecimal():
        raise ConfigError(
            f"--reestimate-norms: expected a whole number of 0 or more, got {steps!r}"
        )
    values = {_AVERAGING_OPTIONS[name]: option.value for name, option in given.items()}
    return Averaging(**values, norm_steps=int(steps))


def _check_checkpoints(run: "RunFolder", averaging: Averaging, flags: dict[str, str]) -> None:
    """Raise ConfigError for a run with too few checkpoints, or too few steps for statistics."""
    from phalanx.assemble.scoring_target import (
        find_checkpoint,
        list_consecutive_checkpoints,
        read_checkpoint,
    )

    newest = read_checkpoint(find_checkpoint(run.path), flags)
    found = list_consecutive_checkpoints(run.checkpoints, newest)
    averaging.count_among(len(found), where=run.checkpoints)
    steps = newest.start.facts["plan"]["total_steps"]
    if averaging.norm_steps > steps:
        raise ConfigError(
            f"--reestimate-norms {averaging.norm_steps}: the run has {steps:,} training steps; "
            f"give at most that many"
        )


def _as_json(averaged: "AveragedRun") -> dict[str, Any]:
    """What was averaged, and the newest checkpoint and the average with their scores, if any."""
    rows = [{**asdict(scored.row), "bad_images": scored.bad_images} for scored in averaged.scores]
    named = zip(("newest", "average"), averaged.paths, rows or [{}, {}], strict=True)
    scores = {name: {"checkpoint": str(path), **row} for name, path, row in named}
    return {"averaged": averaged.account, **scores}


def _print_scores(averaged: "AveragedRun") -> None:
    """Print what was averaged and both scores, a line each, or that there are none."""
    account = averaged.account
    decay = f", decay {account['decay']:g}" if account["strategy"] == "exponential" else ""
    steps = ", ".join(f"{step:,}" for step in account["steps"])
    fresh, count = account["norm_steps"], format_plural(account["count"], "checkpoint")
    norms = f"; batch norm statistics from {format_plural(fresh, 'training step')}" if fresh else ""
    which = f"step{'s' * (len(account['steps']) > 1)} {steps}"
    print(f"{account['strategy']}{decay} of {count}: {which}{norms}")
    if not averaged.scores:
        print(f"{averaged.paths[1]}: not scored (--validation-mode none)")
        return
    newest, average = averaged.scores
    print_score(f"{averaged.paths[0]} (the newest)", newest._replace(bad_images={}), as_json=False)
    print_score(str(averaged.paths[1]), average, as_json=False)
