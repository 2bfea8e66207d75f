"""`phalanx data list`: which data can be read, and what lies in a folder."""

import json
from pathlib import Path
from typing import Any

from phalanx.cli.command import Argument, ParsedArgs, command
from phalanx.errors import DataError

_FILELESS = {  # datasets that have no files: what they are, how to get them
    "embedded": ("8,000 + 1,500 Fashion-MNIST images", "comes with Phalanx"),
    "generated": ("random images made on the host", "made when asked for"),
    "synthetic": ("random images made on the device", "made when asked for"),
}


@command(
    "data list",
    "Say which data can be read, or what lies in a folder and up to three below it.",
    Argument("dir", "The folder to look into."),
    Argument("--json", "Print JSON.", switch=True),
    usage="[DIR] [--json]",
    examples={
        "phalanx data list": "every form that can be read, and how to get it",
        "phalanx data list ~/data": "what lies there, with counts and classes",
    },
)
def _list_data(args: ParsedArgs) -> int:
    """Print the formats that can be read, or what was found in a folder."""
    args.refuse_problems()
    rows = (
        _describe_datasets(Path(args["dir"]).expanduser()) if args["dir"] else _describe_formats()
    )
    if args["--json"]:
        print(json.dumps(rows, indent=2))
    elif args["dir"]:
        _print_datasets(rows)
    else:
        _print_formats(rows)
    return 0


def _describe_formats() -> list[dict[str, Any]]:
    """Every format with its files and how to get it."""
    from phalanx.data.formats.sources import DATA_FORMATS

    rows = [
        {"data": name, "what": form.files, "get": form.how_to_get}
        for name, form in DATA_FORMATS.items()
    ]
    fileless = [{"data": name, "what": what, "get": get} for name, (what, get) in _FILELESS.items()]
    return [*fileless, *rows]


def _describe_datasets(root: Path) -> list[dict[str, Any]]:
    """What lies in a folder, with counts and classes; nothing there is a mistake."""
    from phalanx.data.formats.detect import MAX_DEPTH, detect_datasets

    found = detect_datasets(root)
    if not found:
        raise DataError(
            f"{root}: nothing that can be read lies here or up to {MAX_DEPTH} folders below; "
            "`phalanx data list` says what can"
        )
    return [
        {"data": f.data, "folder": str(f.folder), "why": f.files, **_count_images(f.data, f.folder)}
        for f in found
    ]


def _count_images(data: str, folder: Path) -> dict[str, Any]:
    """The images and classes of a set; what is wrong with a split stands in place of its count."""
    from phalanx.data.formats.sources import DATA_FORMATS

    open_split = DATA_FORMATS[data].open
    counts: dict[str, Any] = {"train": None, "valid": None, "classes": None, "problems": []}
    if open_split is None:
        counts["problems"] = [DATA_FORMATS[data].how_to_get]
        return counts
    for split in ("train", "valid"):
        try:
            source = open_split(folder, split)
            counts[split], counts["classes"] = len(source), len(source.classes)
        except DataError as error:
            counts["problems"].append(str(error))
    return counts


def _print_datasets(rows: list[dict[str, Any]]) -> None:
    """What lies in a folder, a line for each set and one for each thing wrong with it."""
    for row in rows:
        figures = " + ".join(
            "none" if row[s] is None else f"{row[s]:,}" for s in ("train", "valid")
        )
        counts = "" if row["classes"] is None else f": {figures} images, {row['classes']:,} classes"
        print(f"{row['data']} in {row['folder']}{counts}")
        print(f"  {row['why']}")
        for problem in row["problems"]:
            print("  " + problem.replace("\n", "\n  "))


def _print_formats(rows: list[dict[str, Any]]) -> None:
    """The formats as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for head in ("data", "what lies there", "how to get it"):
        table.add_column(head)
    for row in rows:
        table.add_row(row["data"], row["what"], row["get"])
    Console(highlight=False).print(table)
