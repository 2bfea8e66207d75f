"""`phalanx data verify`: checks every image and reports what is wrong."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.command import LAYOUT_OPTIONS, LIMIT_OPTIONS, Argument, ParsedArgs, command
from phalanx.cli.data_build import MOST_WORKERS
from phalanx.cli.progress import ImageProgress
from phalanx.disk import expand_home
from phalanx.errors import ConfigError, DataError
from phalanx.report.terminal import drawing_stream
from phalanx.units import format_count, format_seconds

if TYPE_CHECKING:
    from phalanx.data.convert.source_splits import SourceOptions
    from phalanx.data.verify.verify import ImageLocation, VerifyResult

_SHOWN = 5


@command(
    "data verify",
    "Check every image of a dataset, on all cores, and report what is wrong; the exit code is 0 "
    "when nothing is.",
    Argument("dir", "The folder that holds the data."),
    Argument("--json", "Print JSON.", switch=True),
    Argument("--out", "Write a page with pictures."),
    Argument("--workers", "Processes; by default one per core."),
    usage="DIR [--json] [--out report.html]",
    options=("val-split", *LAYOUT_OPTIONS, *LIMIT_OPTIONS),
    examples={
        "phalanx data verify ~/photos": "damage, duplicates, leaks between the splits",
        "phalanx data verify ~/photos --val-split 10%": "the same, as train would split them",
        "phalanx data verify ~/photos --out photos.html": "with pictures of what was found",
    },
)
def _verify_data(args: ParsedArgs) -> int:
    """Check every image; the exit code is 0 if nothing is wrong."""
    args.refuse_problems()
    from phalanx.data.verify.manifest import save_manifest
    from phalanx.data.verify.verify import verify_dataset

    if not args["dir"]:
        raise ConfigError("say which folder to check: phalanx data verify DIR")
    root, began = expand_home(args["dir"]), time.monotonic()
    out = _read_output_path(args["--out"])
    source_options = args.read_source_options()
    result = verify_dataset(
        root,
        source_options=source_options,
        workers=args.read_optional_int("--workers", 1, MOST_WORKERS),
        on_progress=ImageProgress("checked"),
    )
    elapsed = time.monotonic() - began
    save_manifest(root, result.manifest, result.fingerprints)
    if out is not None:
        _write_page(out, root, result, source_options)
    args.print_result(result.to_dict(), lambda: _print_result(result, elapsed, out))
    return DataError.exit_code if result.wrong else 0


def _read_output_path(text: str | None) -> Path | None:
    """The path of the page; None if no page was asked for."""
    if text is None:
        return None
    path = expand_home(text)
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--out {path}: expected a name that ends in .html")
    return path


def _write_page(
    out: Path, root: Path, result: "VerifyResult", source_options: "SourceOptions"
) -> None:
    """Write the page with pictures of what was found."""
    from phalanx.data.convert.source_splits import find_source_splits
    from phalanx.data.formats.decode import BadImage, Pixels
    from phalanx.report.verify_page import write_verify_page

    sources = {split.name: split.source for split in find_source_splits(root, source_options)}

    def read_pixels(split: str, number: int) -> Pixels | None:
        try:
            return sources[split].read(number)
        except BadImage:
            return None

    write_verify_page(out, result, read_pixels)


def _print_result(result: "VerifyResult", elapsed: float, out: Path | None) -> None:
    """Print the findings as a table, and the first of each kind by name."""
    from rich.console import Console
    from rich.table import Table

    from phalanx.data.layouts.image_files import describe_ignored
    from phalanx.data.verify.verify import MISSING_CLASS, NOTE_KINDS, describe_problems

    rate = sum(result.images.values()) / elapsed if elapsed > 0 else 0.0
    images = " + ".join(f"{format_count(n)} {split}" for split, n in result.images.items())
    print(f"{result.folder}: {result.data}, {images}, {len(result.classes):,} classes")
    hint = "no validation split; --val-split 10% holds one out" * ("valid" not in result.images)
    for line in (result.layout, describe_ignored(result.ignored), hint):
        if line:
            print(f"  {line}")
    print(f"checked in {format_seconds(elapsed)} ({format_count(rate)} images/s)\n")
    table = Table(box=None, pad_edge=False)
    table.add_column("what")
    table.add_column("found", justify="right")
    for kind, count in result.totals.items():
        table.add_row(f"{kind} (a note)" if kind in NOTE_KINDS else kind, format_count(count))
    split, counts = next(iter(result.counts.items()))
    table.add_row(f"images per class, {split}", f"{min(counts):,} to {max(counts):,}")
    Console(highlight=False, file=drawing_stream(sys.stdout)).print(table)
    for kind, locations in result.single.items():
        lines = [f"{image.name}: {image.why}" if image.why else image.name for image in locations]
        _print_first(kind, [] if kind in NOTE_KINDS else lines)
    for kind, groups in result.groups.items():
        _print_first(kind, [_describe_group(group) for group in groups])
    _print_first(MISSING_CLASS, result.missing)
    print(f"\n{describe_problems(result.wrong)}; manifest {result.manifest}")
    if out is not None:
        print(f"pictures: {out}")


def _print_first(kind: str, lines: list[str]) -> None:
    """Print the first few lines of one kind of finding."""
    if not lines:
        return
    print(f"\n{kind}:")
    print("\n".join(f"  {line}" for line in lines[:_SHOWN]))
    if len(lines) > _SHOWN:
        print(f"  and {len(lines) - _SHOWN:,} more; --json and --out page.html list them")


def _describe_group(group: list["ImageLocation"]) -> str:
    """A group of equal images, on one line."""
    names = " = ".join(image.name for image in group[:_SHOWN])
    more = f" and {len(group) - _SHOWN:,} more" if len(group) > _SHOWN else ""
    labels = sorted({image.label for image in group})
    return f"{names}{more}" + (f" (labels differ: {' / '.join(labels)})" if labels[1:] else "")
