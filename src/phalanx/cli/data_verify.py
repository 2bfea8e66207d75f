"""`phalanx data verify`: look at every image and say what is wrong."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.command import Argument, Command, Request
from phalanx.cli.data_build import make_printable, read_number
from phalanx.cli.progress import ImageProgress
from phalanx.errors import ConfigError, DataError
from phalanx.units import format_count, format_seconds

if TYPE_CHECKING:
    from phalanx.data.verify.verify import ImageLocation, VerifyResult

_SHOWN = 5


def _verify_data(request: Request) -> int:
    """Look at every image; the code is 0 when nothing is wrong."""
    request.refuse_problems()
    from phalanx.data.verify.manifest import save_manifest
    from phalanx.data.verify.verify import verify

    if not request["dir"]:
        raise ConfigError("say which folder to look at: phalanx data verify DIR")
    root, began = Path(request["dir"]).expanduser(), time.monotonic()
    out = _read_out(request["out"])
    result = verify(
        root, workers=read_number(request, "workers"), progress=ImageProgress("looked at")
    )
    elapsed = time.monotonic() - began
    save_manifest(root, result.manifest, result.fingerprints)
    if out is not None:
        _write_page(out, root, result)
    if request["json"]:
        print(json.dumps(result.to_json(), indent=2))
    else:
        _show_result(result, elapsed)
        if out is not None:
            print(f"pictures: {out}")
    return DataError.exit_code if result.wrong else 0


def _read_out(text: str | None) -> Path | None:
    """Where the page goes; None where none is asked for."""
    if text is None:
        return None
    path = Path(text).expanduser()
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--out {path}: wants a name that ends in .html")
    return path


def _write_page(out: Path, root: Path, result: "VerifyResult") -> None:
    """The page with pictures of what was found."""
    from phalanx.data.convert.source_splits import find_source_splits
    from phalanx.data.formats.decode import BadImage, Pixels
    from phalanx.report.verify_page import write_verify_page

    sources = {split.name: split.source for split in find_source_splits(root)}

    def read_pixels(split: str, number: int) -> Pixels | None:
        try:
            return sources[split].read(number)
        except BadImage:
            return None

    write_verify_page(out, result, read_pixels)


def _show_result(result: "VerifyResult", elapsed: float) -> None:
    """The findings as a table, and the first of each kind by name."""
    from rich.console import Console
    from rich.table import Table

    from phalanx.data.verify.verify import NOTES, describe_problems

    images = sum(result.images.values())
    rate = images / elapsed if elapsed > 0 else 0.0
    told = " + ".join(f"{format_count(n)} {split}" for split, n in result.images.items())
    print(f"{result.folder}: {result.data}, {told}, {len(result.classes):,} classes")
    print(f"looked at in {format_seconds(elapsed)} ({format_count(rate)} images/s)\n")
    table = Table(box=None, pad_edge=False)
    table.add_column("what")
    table.add_column("found", justify="right")
    for kind, count in result.totals.items():
        table.add_row(f"{kind} (a note)" if kind in NOTES else kind, format_count(count))
    table.add_row(*_balance_row(result))
    Console(highlight=False).print(table)
    for kind, places in result.single.items():
        _show_first("" if kind in NOTES else kind, [_describe(place) for place in places])
    for kind, groups in result.groups.items():
        _show_first(kind, [_describe_group(group) for group in groups])
    _show_first("class missing in a split", result.missing)
    print(f"\n{describe_problems(result.wrong)}; manifest {result.manifest}")


def _balance_row(result: "VerifyResult") -> tuple[str, str]:
    """How unequal the classes are, in one line."""
    counts = next(iter(result.counts.values()))
    split = next(iter(result.counts))
    return f"images of a class, {split}", f"{min(counts):,} to {max(counts):,}"


def _show_first(kind: str, lines: list[str]) -> None:
    """The first few lines of one kind of finding."""
    if not kind or not lines:
        return
    print(f"\n{kind}:")
    print("\n".join(f"  {make_printable(line)}" for line in lines[:_SHOWN]))
    if len(lines) > _SHOWN:
        print(f"  and {len(lines) - _SHOWN:,} more; --json and --out page.html have them")


def _describe(place: "ImageLocation") -> str:
    """An image in one line."""
    return f"{place.name}: {place.why}" if place.why else place.name


def _describe_group(group: list["ImageLocation"]) -> str:
    """Images that are the same in one line."""
    names = " = ".join(place.name for place in group[:_SHOWN])
    more = f" and {len(group) - _SHOWN:,} more" if len(group) > _SHOWN else ""
    labels = " / ".join(sorted({place.label for place in group}))
    return f"{names}{more}" + (f" (labels differ: {labels})" if "/" in labels else "")


COMMANDS = {
    "data verify": Command(
        name="data verify",
        summary="Look at every image of a set, on all cores, and say what is wrong; the code is 0 "
        "when nothing is.",
        usage="phalanx data verify DIR [--json] [--out report.html]",
        run=_verify_data,
        arguments=(
            Argument(name="dir", metavar="DIR", help="The folder that the data lies in."),
            Argument(name="--json", help="Print JSON.", switch=True),
            Argument(name="--out", help="Write a page with pictures."),
            Argument(name="--workers", help="Processes; by default one a core."),
        ),
        examples=(
            ("phalanx data verify ~/photos", "damage, duplicates, leaks between the splits"),
            ("phalanx data verify ~/photos --out photos.html", "with pictures of what was found"),
        ),
    ),
}
