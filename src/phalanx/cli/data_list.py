"""`phalanx data list`: which data can be read, and what lies in a folder."""

import json
from pathlib import Path
from typing import Any

from phalanx.cli.command import Argument, Command, Request
from phalanx.errors import DataError

_MADE_UP = {  # sets that lie in no folder: what they are, how to get them
    "embedded": ("8,000 + 1,500 Fashion-MNIST images", "comes with Phalanx"),
    "generated": ("random images made on the host", "made when asked for"),
    "synthetic": ("random images made on the device", "made when asked for"),
}


def _list_data(request: Request) -> int:
    """Print the forms that can be read, or what was found in a folder."""
    request.refuse_problems()
    rows = _find_rows(Path(request["dir"]).expanduser()) if request["dir"] else _form_rows()
    if request["json"]:
        print(json.dumps(rows, indent=2))
    elif request["dir"]:
        _show_findings(rows)
    else:
        _show_forms(rows)
    return 0


def _form_rows() -> list[dict[str, Any]]:
    """Every form with what lies there and how to get it."""
    from phalanx.data.formats.sources import DATA_FORMATS

    rows = [
        {"data": name, "what": form.files, "get": form.how_to_get}
        for name, form in DATA_FORMATS.items()
    ]
    made_up = [{"data": name, "what": what, "get": get} for name, (what, get) in _MADE_UP.items()]
    return [*made_up, *rows]


def _find_rows(root: Path) -> list[dict[str, Any]]:
    """What lies in a folder, with counts and classes; nothing there is a mistake."""
    from phalanx.data.formats.detect import MAX_DEPTH, detect_datasets

    found = detect_datasets(root)
    if not found:
        raise DataError(
            f"{root}: nothing that can be read lies here or up to {MAX_DEPTH} folders below; "
            "`phalanx data list` says what can"
        )
    return [
        {"data": f.data, "folder": str(f.folder), "why": f.files, **_count(f.data, f.folder)}
        for f in found
    ]


def _count(data: str, folder: Path) -> dict[str, Any]:
    """The images and classes of a set; what is wrong with a split stands in place of its count."""
    from phalanx.data.formats.sources import DATA_FORMATS

    opener = DATA_FORMATS[data].open
    if opener is None:
        return {
            "train": None,
            "valid": None,
            "classes": None,
            "problems": [DATA_FORMATS[data].how_to_get],
        }
    counts: dict[str, Any] = {}
    problems: list[str] = []
    classes: int | None = None
    for split in ("train", "valid"):
        try:
            source = opener(folder, split)
        except DataError as error:
            counts[split] = None
            problems.append(str(error))
        else:
            counts[split], classes = len(source), len(source.classes)
    return {**counts, "classes": classes, "problems": problems}


def _show_findings(rows: list[dict[str, Any]]) -> None:
    """What lies in a folder, a line for each set and one for each thing wrong with it."""
    for row in rows:
        figures = " + ".join(
            "none" if row[s] is None else f"{row[s]:,}" for s in ("train", "valid")
        )
        told = "" if row["classes"] is None else f": {figures} images, {row['classes']:,} classes"
        print(f"{row['data']} in {row['folder']}{told}")
        print(f"  {row['why']}")
        for problem in row["problems"]:
            print("  " + problem.replace("\n", "\n  "))


def _show_forms(rows: list[dict[str, Any]]) -> None:
    """The forms as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for head in ("data", "what lies there", "how to get it"):
        table.add_column(head)
    for row in rows:
        table.add_row(row["data"], row["what"], row["get"])
    Console(highlight=False).print(table)


COMMANDS = {
    "data list": Command(
        name="data list",
        summary="Say which data can be read, or what lies in a folder and up to three below it.",
        usage="phalanx data list [DIR] [--json]",
        run=_list_data,
        arguments=(
            Argument(name="dir", metavar="DIR", help="The folder to look into."),
            Argument(name="--json", help="Print JSON.", switch=True),
        ),
        examples=(
            ("phalanx data list", "every form that can be read, and how to get it"),
            ("phalanx data list ~/data", "what lies there, with counts and classes"),
        ),
    ),
}
