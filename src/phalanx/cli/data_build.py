"""`phalanx data build`: data from one format into another."""

import time
from typing import Any

from phalanx.cli.command import LAYOUT_OPTIONS, LIMIT_OPTIONS, Argument, ParsedArgs, command
from phalanx.cli.progress import ImageProgress
from phalanx.disk import expand_home
from phalanx.errors import ConfigError
from phalanx.units import format_count, format_plural, format_seconds, parse_share

_BAD_SHOWN = 20
MOST_WORKERS = 256
_REQUIRED = {"src": "the folder to convert", "--to": "--to FORMAT", "--out": "--out DIR"}


@command(
    "data build",
    "Convert data to another format, on all cores; run it again to continue where it stopped.",
    Argument("src", "Where the data is, in any format that `phalanx data list` names."),
    Argument("--to", "folder, tar, tfrecord, parquet or packed."),
    Argument("--out", "An empty folder, or one to continue."),
    Argument(
        "--short-side",
        "Shrink images whose short side is longer. Without it images are copied, but tfrecord and "
        "packed re-encode what is not a JPEG.",
    ),
    Argument(
        "--quality", "JPEG quality of images that are re-encoded: 90 with --short-side, else 95."
    ),
    Argument(
        "--shards",
        "Training files to write for tar, tfrecord and parquet; validation gets as many, for "
        "tfrecord an eighth.",
    ),
    Argument(
        "--shard-mib",
        "Approximate size of such a file, in MiB: 128, for tfrecord 48 but no more than "
        "ImageNet's 1,024 + 128 files.",
    ),
    Argument("--raw", "Pack pixels, not JPEG: larger, faster.", switch=True),
    Argument(
        "--max-bad",
        "Bad images to leave out of a split, such as 10 or 1%; by default 10 or 1%, whichever "
        "is more.",
    ),
    Argument("--workers", "Processes; by default one per core."),
    Argument("--json", "Print JSON.", switch=True),
    usage="SRC --to folder|tar|tfrecord|parquet|packed --out DIR [--short-side N]",
    options=("val-split", *LAYOUT_OPTIONS, *LIMIT_OPTIONS),
    examples={
        "phalanx data build ~/imagenet --to packed --out ~/packed --short-side 256": (
            "the fastest format to train from"
        ),
        "phalanx data build ~/photos --to packed --out ~/packed --val-split 10%": (
            "with a tenth of the images held out for validation"
        ),
        "phalanx data build ~/photos --to tar --out ~/shards": "the same bytes, in tar files",
        "phalanx data build ~/archives --to tfrecord --out ~/records": (
            "ImageNet's archives as 1,024 + 128 shards"
        ),
    },
)
def _build_data(args: ParsedArgs) -> None:
    """Convert a dataset; bad images are left out and listed."""
    args.refuse_problems()
    from phalanx.data.convert.build import BuildOptions, build_dataset

    src, to, out = (_read_required(args, name) for name in _REQUIRED)
    options = BuildOptions(
        to=to,
        raw=args["--raw"],
        short_side=args.read_optional_int("--short-side", 1, 65_500),
        quality=args.read_optional_int("--quality", 1, 100),
        shards=args.read_optional_int("--shards", 1, 99_999),
        shard_mib=args.read_optional_int("--shard-mib", 1, 65_536),
    )
    began = time.monotonic()
    results = build_dataset(
        expand_home(src),
        expand_home(out),
        options,
        source_options=args.read_source_options(),
        max_bad=_read_share(args["--max-bad"]),
        workers=args.read_optional_int("--workers", 1, MOST_WORKERS),
        on_progress=ImageProgress("done"),
    )
    elapsed = time.monotonic() - began
    splits = {split: vars(result) for split, result in results.items()}
    facts = {"to": options.to, "out": out, "splits": splits, "elapsed_s": elapsed}
    args.print_result(facts, lambda: _print_results(out, splits, elapsed))


def _read_required(args: ParsedArgs, name: str) -> str:
    """An argument that must be given."""
    if not args[name]:
        raise ConfigError(f"say {_REQUIRED[name]}: phalanx data build SRC --to FORMAT --out DIR")
    return str(args[name])


def _read_share(text: str | None) -> str | None:
    """A count or a share, as typed; ConfigError for anything else."""
    try:
        if text is not None:
            parse_share(text, 100)
    except ConfigError as error:
        raise ConfigError(f"--max-bad: {error}") from None
    return text


def _print_results(out: str, splits: dict[str, dict[str, Any]], elapsed: float) -> None:
    """Print what was done, and which images were left out."""
    for split, result in splits.items():
        written, encoded = result["written"], result["encoded"]
        parts = [f"{format_count(written - encoded)} copied byte for byte"]
        parts += [f"{format_count(encoded)} re-encoded"] if encoded else []
        if written < result["images"]:
            parts.append(f"{format_count(result['images'] - written)} already there")
        print(f"{split}: {format_plural(result['images'], 'image')}, {', '.join(parts)}")
    written = sum(result["written"] for result in splits.values())
    rate = f" ({format_count(written / elapsed)} images/s)" if written and elapsed > 0 else ""
    print(f"{out}: done in {format_seconds(elapsed)}{rate}")
    bad = [text for result in splits.values() for text in result["bad"]]
    if bad:
        print(f"could not read {format_plural(len(bad), 'image')}, left out:")
        print("\n".join(f"  {text}" for text in bad[:_BAD_SHOWN]))
    if len(bad) > _BAD_SHOWN:
        print(f"  and {len(bad) - _BAD_SHOWN:,} more, see .phalanx/build.json there")
