"""`phalanx predict`: the most likely classes of your own images."""

import csv
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.command import LIMIT_OPTIONS, Argument, ParsedArgs, command
from phalanx.cli.validate import CHECKPOINT_FLAG
from phalanx.errors import ConfigError, DataError
from phalanx.report.terminal import escape_name

if TYPE_CHECKING:
    from phalanx.assemble.score import Answer

_GUESSES = 5


@command(
    "predict",
    "Print the five most likely classes of each image.",
    Argument("run", "A run (its best checkpoint) or a checkpoint.", required=True),
    Argument(
        "images", "Image files, or folders of them.", metavar="IMAGE|DIR", many=True, required=True
    ),
    CHECKPOINT_FLAG,
    Argument("--csv", "Print a table with a header: image, class1, probability1, ...", switch=True),
    Argument("--json", "Print one JSON object per line.", switch=True),
    usage="RUN|CHECKPOINT IMAGE|DIR... [--checkpoint last|best|STEP] [--csv|--json]",
    options=("device", "precision", "threads", "valid-batch-size", "plugin", *LIMIT_OPTIONS),
    examples={
        "phalanx predict runs/demo shoe.png": "what is in one image",
        "phalanx predict runs/demo photos --csv > answers.csv": "a whole folder, as a table",
        "phalanx predict runs/demo photos --checkpoint last": "by the newest checkpoint",
    },
)
def _run(args: ParsedArgs) -> int:
    """Print the classes of every image; if one cannot be read, the exit code is 3."""
    args.refuse_problems()
    if args["--csv"] and args["--json"]:
        raise ConfigError("--csv, --json: each is a form of the answers; give one of them")
    from phalanx.assemble.scoring_target import read_checkpoint
    from phalanx.data.loading.image_inputs import collect_images

    try:
        images = collect_images(args["images"])
    except DataError as error:
        raise DataError(escape_name(str(error))) from None
    checkpoint = read_checkpoint(Path(args["run"]), args.flags, selection=args["--checkpoint"])
    if checkpoint.choice:
        print(f"{args['run']}: {checkpoint.choice}", file=sys.stderr)

    from phalanx.assemble.score import open_checkpoint, predict

    session, bad = open_checkpoint(checkpoint), 0
    columns = min(_GUESSES, len(session.classes))
    if args["--csv"]:
        names = [f"{what}{at}" for at in range(1, columns + 1) for what in ("class", "probability")]
        csv.writer(sys.stdout).writerow(["image", *names, "problem"])
    for answer in predict(session, images):
        if answer.problem:
            bad += 1
            print(f"{escape_name(answer.image)}: {answer.problem}", file=sys.stderr)
        _print_answer(answer, args, columns=columns)
    return DataError.exit_code if bad else 0


def _print_answer(answer: "Answer", args: ParsedArgs, *, columns: int) -> None:
    """Print the likeliest classes: as a row of a table, a JSON object or a line of text.

    For an image that cannot be read, rows and objects have the problem instead.
    """
    if args["--csv"]:
        cells = [cell for guess in answer.guesses for cell in guess] or [""] * (2 * columns)
        csv.writer(sys.stdout).writerow([answer.image, *cells, answer.problem])
    elif args["--json"]:
        guesses = [{"class": name, "probability": share} for name, share in answer.guesses]
        problem = {"problem": answer.problem} if answer.problem else {}
        print(json.dumps({"image": answer.image, "guesses": guesses, **problem}))
    elif not answer.problem:
        text = "  ".join(f"{name} {share:.1%}" for name, share in answer.guesses)
        print(escape_name(f"{answer.image}: {text}"))
