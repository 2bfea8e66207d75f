"""`phalanx predict`: name what is on images of your own."""

import csv
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.command import LIMIT_OPTIONS, Argument, ParsedArgs, command
from phalanx.errors import DataError
from phalanx.report.terminal import clean_name

if TYPE_CHECKING:
    from phalanx.assemble.score import Answer


@command(
    "predict",
    "Print the five likeliest classes of each image.",
    Argument("run", "A run or a checkpoint.", required=True),
    Argument(
        "images", "Image files, or folders of them.", metavar="IMAGE|DIR", many=True, required=True
    ),
    Argument("--csv", "Rows: image, then class, probability, ...", switch=True),
    Argument("--json", "A JSON object a line.", switch=True),
    usage="RUN|CHECKPOINT IMAGE|DIR... [--csv|--json]",
    options=("device", "precision", "threads", "valid-batch-size", "plugin", *LIMIT_OPTIONS),
    examples={
        "phalanx predict runs/demo shoe.png": "what is on one image",
        "phalanx predict runs/demo photos --csv > answers.csv": "a whole folder, as a table",
    },
)
def _run(args: ParsedArgs) -> int:
    """Answer for every image; images that cannot be read are named and make the code 3."""
    args.refuse_problems()
    images = _find_images(args["images"])

    from phalanx.assemble.scorable import read_checkpoint

    checkpoint = read_checkpoint(Path(args["run"]), args.flags)

    from phalanx.assemble.score import open_checkpoint, predict

    bad = 0
    for answer in predict(open_checkpoint(checkpoint), images):
        if answer.problem:
            bad += 1
            print(f"{clean_name(answer.image)}: {answer.problem}", file=sys.stderr)
        else:
            _print_answer(answer, args)
    return DataError.exit_code if bad else 0


def _find_images(names: list[str]) -> list[Path]:
    """The image files among files and folders."""
    from phalanx.data.formats.folder import IMAGE_SUFFIXES

    images: list[Path] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES)
            if not found:
                raise DataError(f"{clean_name(name)}: no image in this folder")
            images += found
        elif os.path.lexists(path):  # a link that leads nowhere is answered as a bad image
            images.append(path)
        else:
            raise DataError(f"{clean_name(name)}: no such file or folder")
    return images


def _print_answer(answer: "Answer", args: ParsedArgs) -> None:
    """The five likeliest classes: as a row of a table, a JSON object or a line of text."""
    if args["--csv"]:
        row = [answer.image, *(cell for guess in answer.guesses for cell in guess)]
        csv.writer(sys.stdout).writerow(row)
    elif args["--json"]:
        guesses = [{"class": name, "probability": share} for name, share in answer.guesses]
        print(json.dumps({"image": answer.image, "guesses": guesses}))
    else:
        text = "  ".join(f"{name} {share:.1%}" for name, share in answer.guesses)
        print(clean_name(f"{answer.image}: {text}"))
