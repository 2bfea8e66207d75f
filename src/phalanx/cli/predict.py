"""`phalanx predict`: name what is on images of your own."""

import csv
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.command import Argument, Command, Request
from phalanx.errors import DataError

if TYPE_CHECKING:
    from phalanx.assemble.score import Answer

_ENDINGS = (".jpg", ".jpeg", ".png")


def _run(request: Request) -> int:
    """Answer for every image; images that cannot be read are named and make the code 3."""
    request.refuse_problems()
    images = _find_images(request["images"])

    from phalanx.assemble.prepare import read_checkpoint

    described = read_checkpoint(Path(request["run"]), request.flags)

    from phalanx.assemble.score import open_checkpoint, predict

    session = open_checkpoint(described)
    show = next((_SHOW[form] for form in ("csv", "json") if request[form]), _show_text)
    bad = 0
    for answer in predict(session, images):
        if answer.problem:
            bad += 1
            print(f"{answer.image}: {answer.problem}", file=sys.stderr)
        else:
            show(answer)
    return DataError.exit_code if bad else 0


def _find_images(names: list[str]) -> list[Path]:
    """The image files among files and folders."""
    images: list[Path] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.suffix.lower() in _ENDINGS)
            if not found:
                raise DataError(f"{path}: no JPEG or PNG image in this folder")
            images += found
        elif path.exists():
            images.append(path)
        else:
            raise DataError(f"{path}: no such file or folder")
    return images


def _show_text(answer: "Answer") -> None:
    """A line with the five likeliest classes."""
    guesses = "  ".join(f"{name} {share:.1%}" for name, share in answer.guesses)
    print(f"{answer.image}: {guesses}")


def _show_csv(answer: "Answer") -> None:
    """A row: image, then class and probability five times."""
    row = [answer.image, *(cell for guess in answer.guesses for cell in guess)]
    csv.writer(sys.stdout).writerow(row)


def _show_json(answer: "Answer") -> None:
    """A JSON object on a line."""
    guesses = [{"class": name, "probability": share} for name, share in answer.guesses]
    print(json.dumps({"image": answer.image, "guesses": guesses}))


_SHOW = {"csv": _show_csv, "json": _show_json}

COMMANDS = {
    "predict": Command(
        name="predict",
        summary="Print the five likeliest classes of each image.",
        usage="phalanx predict RUN|CHECKPOINT IMAGE|DIR... [--csv|--json]",
        run=_run,
        arguments=(
            Argument(name="run", metavar="RUN", help="A run or a checkpoint.", required=True),
            Argument(
                name="images",
                metavar="IMAGE|DIR",
                help="Image files, or folders of them.",
                many=True,
                required=True,
            ),
            Argument(name="--csv", help="Rows: image, then class, probability, ...", switch=True),
            Argument(name="--json", help="A JSON object a line.", switch=True),
        ),
        options=("device", "precision", "valid-batch-size"),
        examples=(
            ("phalanx predict runs/demo shoe.png", "what is on one image"),
            ("phalanx predict runs/demo photos --csv > answers.csv", "a whole folder, as a table"),
        ),
    ),
}
