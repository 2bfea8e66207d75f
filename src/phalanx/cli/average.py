"""`phalanx average`: the last checkpoints of a run become one, scored beside the newest."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cli.command import Argument, Command, Request
from phalanx.cli.validate import show
from phalanx.errors import ConfigError
from phalanx.plan.averaging import USUAL, Averaging

if TYPE_CHECKING:
    from phalanx.assemble.prepare import Described
    from phalanx.report.records import ScoreRow

SCORING_OPTIONS = ("data-dir", "valid-batch-size", "workers", "device", "precision")


def run(request: Request) -> int:
    """Average, write the result, and print both scores."""
    request.refuse_problems()
    how = read_averaging(request)
    from phalanx.report.folder import open_run

    folder = open_run(Path(request["run"]))
    with folder.lock():  # a training at work deletes checkpoints
        checkpoints = choose_checkpoints(folder.path, folder.checkpoints, how)
        newest = describe(checkpoints[-1], request)
        refuse_more_steps(newest, how)

        from phalanx.assemble.average import account_of, write_average

        average = write_average(newest, checkpoints, how)
    show_both(
        score(newest),
        score(describe(average, request)),
        paths=(newest.checkpoint, average),
        account=account_of(checkpoints, how),
        as_json=request["json"],
    )
    return 0


def read_averaging(request: Request) -> Averaging:
    """What the words ask for; ConfigError for what is no number or out of range."""
    count = request["weight_avg_n"]
    return Averaging(
        strategy=request["weight_avg_strategy"],
        decay=read_number("--weight-avg-exp-decay", request["weight_avg_exp_decay"], float),
        count=None if count is None else read_number("--weight-avg-n", count, int),
        norm_steps=read_number("--reestimate-norms", request["reestimate_norms"], int),
    )


def read_number(flag: str, text: str, kind: type[Any]) -> Any:
    """A number of that kind."""
    try:
        return kind(text)
    except ValueError:
        wanted = {int: "a whole number", float: "a number"}[kind]
        raise ConfigError(f"{flag}: wants {wanted}, got {text!r}") from None


def choose_checkpoints(run: Path, shelf: Path, how: Averaging) -> list[Path]:
    """The checkpoints to average, oldest first."""
    from phalanx.assemble.prepare import checkpoint_in
    from phalanx.engine.shelf import list_checkpoints

    checkpoint_in(run)  # knows what to say where there is none
    found = list_checkpoints(shelf)
    return found[-how.count_among(len(found), where=shelf) :]


def describe(checkpoint: Path, request: Request) -> "Described":
    """A checkpoint with the options it is scored with."""
    from phalanx.assemble.prepare import describe_checkpoint

    return describe_checkpoint(checkpoint, request.flags)


def refuse_more_steps(newest: "Described", how: Averaging) -> None:
    """Statistics come from steps the run has."""
    steps = newest.facts["plan"]["total_steps"]
    if how.norm_steps > steps:
        raise ConfigError(
            f"--reestimate-norms {how.norm_steps}: the run has {steps:,} training steps; "
            f"give at most that many"
        )


def score(described: "Described") -> "tuple[ScoreRow, dict[str, str]]":
    """The score of a checkpoint, and the images that could not be read."""
    from phalanx.assemble.score import load_checkpoint, score_model

    return score_model(load_checkpoint(described))


def show_both(
    newest: "tuple[ScoreRow, dict[str, str]]",
    average: "tuple[ScoreRow, dict[str, str]]",
    *,
    paths: tuple[Path, Path],
    account: dict[str, Any],
    as_json: bool,
) -> None:
    """The newest checkpoint's score and the average's, as lines or as one object."""
    if as_json:
        rows = {
            name: {"checkpoint": str(path), **asdict(row), "bad_images": bad}
            for name, path, (row, bad) in zip(
                ("newest", "average"), paths, (newest, average), strict=True
            )
        }
        print(json.dumps({"averaged": account, **rows}, indent=2))
        return
    print(tell(account))
    show(str(paths[0]), newest[0], {}, as_json=False)
    show(str(paths[1]), *average, as_json=False)


def tell(account: dict[str, Any]) -> str:
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
        run=run,
        arguments=(
            Argument(name="run", metavar="RUN", help="A run folder.", required=True),
            Argument(
                name="--weight-avg-strategy",
                help="mean: all count alike. exponential: average = d x average + (1 - d) x "
                "weights, from the oldest on.  [mean]",
                default="mean",
            ),
            Argument(
                name="--weight-avg-exp-decay",
                help="The d of exponential.  [0.99]",
                default="0.99",
            ),
            Argument(
                name="--weight-avg-n",
                help="The last so many checkpoints; -1 for all. How many there are is decided by "
                f"--keep of train.  [{USUAL}, or as many as there are]",
            ),
            Argument(
                name="--reestimate-norms",
                help="Take the statistics of batch norms anew, from the images of so many training "
                "steps, instead of averaging them.  [0]",
                default="0",
            ),
            Argument(name="--json", help="Print a JSON object.", switch=True),
        ),
        options=SCORING_OPTIONS,
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
