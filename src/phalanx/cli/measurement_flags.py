"""Flags of commands that measure: noise in place of data, and batches of several sizes."""

import math

from phalanx.cli.command import Argument, ParsedArgs
from phalanx.config.schema import OPTIONS
from phalanx.errors import ConfigError

_MOST_DIGITS = 9
RANDOM_DATA_FLAGS = (
    Argument(
        "--synthetic-data",
        "Noise on the device, in place of the data and as large as its images.",
        switch=True,
    ),
    Argument(
        "--generated-data",
        "The same, made on the host, batch by batch.",
        switch=True,
    ),
)


def read_random_data_kind(args: ParsedArgs) -> str | None:
    """The kind of noise that --synthetic-data or --generated-data asks for."""
    given = [kind for kind in ("synthetic", "generated") if args[f"--{kind}-data"]]
    if len(given) > 1:
        raise ConfigError("--synthetic-data and --generated-data exclude each other; give one")
    return given[0] if given else None


def read_batch_sizes(args: ParsedArgs) -> list[str | None]:
    """The sizes of batches, as text; [None] if no flag gives any."""
    text = args["--batch-size"]
    if text is None:
        return [None]
    sizes = [part.strip() for part in text.strip("[]").split(",")]
    most = OPTIONS["valid-batch-size"].high or math.inf
    # checked here: the config's own message would name --valid-batch-size
    for size in sizes:
        if not size.isdecimal() or len(size) > _MOST_DIGITS or not 1 <= int(size) <= most:
            raise ConfigError(
                "--batch-size: expected whole numbers above 0 such as 1,4,16, each up to "
                f"{most:,}, got {text[:80]!r}"
            )
    if len(set(sizes)) < len(sizes):
        raise ConfigError(f"--batch-size {text}: names a size twice; give each once")
    return list(sizes)
