"""`phalanx data fetch`: download a published dataset, checked and resumable."""

import math
import os
from pathlib import Path

from phalanx.cli.command import Argument, ParsedArgs, command
from phalanx.cli.progress import REWRITE_S, ProgressLine
from phalanx.errors import ConfigError
from phalanx.units import format_bytes


@command(
    "data fetch",
    "Download a published dataset, check it, and go on where a download broke off.",
    Argument("data", "Which dataset.", metavar="SET"),
    Argument(
        "--data-dir",
        "Where to put it; DATA_DIR when that is set, else data/SET. Without either, "
        "a system package that holds the set is used where it is.",
    ),
    usage="cifar10|cifar100|mnist|fashion-mnist [--data-dir DIR]",
    examples={
        "phalanx data fetch cifar10": "into data/cifar10",
        "phalanx data fetch fashion-mnist --data-dir ~/data": "into a folder of your own",
    },
)
def _fetch_data(args: ParsedArgs) -> None:
    """Make sure a set is here, and say where."""
    args.refuse_problems()
    from phalanx.data.fetch import PUBLISHED_FILES, fetch_dataset

    data = args["data"]
    if data is None:
        raise ConfigError(f"say which set to fetch: {', '.join(PUBLISHED_FILES)}")
    data_dir = args["--data-dir"] or os.environ.get("DATA_DIR")
    line = ProgressLine(REWRITE_S, math.inf)  # a log gets a line for each whole file

    def progress(file: str, have: int, whole: int | None) -> None:
        total = f" of {format_bytes(whole)}" if whole else ""
        line.show(f"{file}: {format_bytes(have)}{total}", is_last=have == whole)

    fetched = fetch_dataset(data, Path(data_dir) if data_dir else None, on_progress=progress)
    how = f"{len(fetched.downloaded)} files downloaded" if fetched.downloaded else "here already"
    how = how.replace("1 files", "1 file")
    print(f"{data}: {how}, every checksum is right")
    print(f"phalanx train --data {data} --data-dir {fetched.folder}")
