"""`phalanx data build`: data from one form into another."""

import json
import sys
import time
from pathlib import Path
from typing import Any

from phalanx.cli.command import Argument, Command, ParsedArgs
from phalanx.errors import ConfigError
from phalanx.units import format_count, format_seconds, parse_share

_SAY_EVERY_S = 10.0
_BAD_SHOWN = 20
_LIMITS = {
    "short_side": (1, 65_500),
    "quality": (1, 100),
    "shards": (1, 99_999),
    "workers": (1, 256),
}


class Progress:
    """One line a split: rewritten on a terminal, else said every ten seconds."""

    def __init__(self, verb: str) -> None:
        self.verb, self.tty = verb, sys.stderr.isatty()
        self.split, self.began, self.first, self.said = "", 0.0, 0, 0.0

    def __call__(self, split: str, done: int, count: int) -> None:
        """Tell how far a split is."""
        now = time.monotonic()
        if split != self.split:
            self.split, self.began, self.first, self.said = split, now, done, now
        if done < count and now - self.said < (0.1 if self.tty else _SAY_EVERY_S):
            return
        self.said = now
        begin, end = ("\r\033[K", "\n" if done == count else "") if self.tty else ("", "\n")
        print(f"{begin}{self._line(done, count, now)}", end=end, file=sys.stderr, flush=True)

    def _line(self, done: int, count: int, now: float) -> str:
        told = f"{self.split}: {format_count(done)} of {format_count(count)} images {self.verb}"
        rate = (done - self.first) / (now - self.began) if now > self.began else 0.0
        if rate <= 0:
            return told
        left = f", {format_seconds((count - done) / rate)} left" if done < count else ""
        return f"{told}, {format_count(rate)}/s{left}"


def _build_data(request: ParsedArgs) -> int:
    """Convert a dataset; bad images are left out and listed."""
    request.refuse_problems()
    from phalanx.data.convert.build import BuildOptions, build

    src, to, out = (_read_word(request, name) for name in ("src", "to", "out"))
    options = BuildOptions(
        to=to,
        raw=request["raw"],
        **{name: read_number(request, name) for name in ("short_side", "quality", "shards")},
    )
    began = time.monotonic()
    outcomes = build(
        Path(src).expanduser(),
        Path(out).expanduser(),
        options,
        max_bad=_read_share(request["max_bad"]),
        workers=read_number(request, "workers"),
        tell=Progress("done"),
    )
    elapsed = time.monotonic() - began
    splits = {split: vars(outcome) for split, outcome in outcomes.items()}
    if request["json"]:
        facts = {"to": options.to, "out": out, "splits": splits, "elapsed_s": elapsed}
        print(json.dumps(facts, indent=2))
    else:
        _show_outcome(out, splits, elapsed)
    return 0


def _read_word(request: ParsedArgs, name: str) -> str:
    """A word that must be given."""
    if not request[name]:
        wanted = {"src": "the folder to convert", "to": "--to FORM", "out": "--out DIR"}[name]
        raise ConfigError(f"say {wanted}: phalanx data build SRC --to FORM --out DIR")
    return str(request[name])


def read_number(request: ParsedArgs, name: str) -> int | None:
    """A whole number within its limits; None where it is not given."""
    text = request[name]
    if text is None:
        return None
    low, high = _LIMITS[name]
    if not text.isdecimal() or not low <= int(text) <= high:
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{flag}: wants a whole number from {low} to {high:,}, got {text!r}")
    return int(text)


def _read_share(text: str | None) -> str | None:
    """A count or a share as it was typed; raises ConfigError for what is neither."""
    try:
        if text is not None:
            parse_share(text, 100)
    except ConfigError as error:
        raise ConfigError(f"--max-bad: {error}") from None
    return text


def printable(text: str) -> str:
    """The text with those bytes of a name escaped that are no letters."""
    return text.encode(errors="backslashreplace").decode()


def _show_outcome(out: str, splits: dict[str, dict[str, Any]], elapsed: float) -> None:
    """What was done, and which images were left out."""
    for split, outcome in splits.items():
        written, encoded = outcome["written"], outcome["encoded"]
        parts = [f"{format_count(written - encoded)} copied byte for byte"]
        parts += [f"{format_count(encoded)} encoded anew"] if encoded else []
        if written < outcome["images"]:
            parts.append(f"{format_count(outcome['images'] - written)} there already")
        print(f"{split}: {format_count(outcome['images'])} images, {', '.join(parts)}")
    written = sum(outcome["written"] for outcome in splits.values())
    rate = f" ({format_count(written / elapsed)} images/s)" if written and elapsed > 0 else ""
    print(f"{out}: done in {format_seconds(elapsed)}{rate}")
    bad = [text for outcome in splits.values() for text in outcome["bad"]]
    if bad:
        print(f"{len(bad)} images could not be read and were left out:")
        print("\n".join(f"  {printable(text)}" for text in bad[:_BAD_SHOWN]))
    if len(bad) > _BAD_SHOWN:
        print(f"  and {len(bad) - _BAD_SHOWN:,} more, see .phalanx/build.json there")


COMMANDS = {
    "data build": Command(
        name="data build",
        summary="Convert data into another form, on all cores; run again, it goes on where it "
        "stopped.",
        usage="phalanx data build SRC --to folder|tar|tfrecord|packed --out DIR [--short-side N]",
        run=_build_data,
        arguments=(
            Argument(
                name="src",
                metavar="SRC",
                help="Where the data lies, in any form that `phalanx data list` names.",
            ),
            Argument(name="--to", help="folder, tar, tfrecord or packed."),
            Argument(name="--out", help="An empty folder, or one to go on with."),
            Argument(
                name="--short-side",
                help="Shrink images whose short side is longer. Without it images are copied.",
            ),
            Argument(
                name="--quality",
                help="Of images that are encoded anew as JPEG: 90 with --short-side, else 95.",
            ),
            Argument(
                name="--shards",
                help="Files of the training split, of tar and tfrecord; tfrecord's default is 1024 "
                "and an eighth for validation, tar's a file for 1,024 images.",
            ),
            Argument(name="--raw", help="Pack pixels, not JPEG: larger, faster.", switch=True),
            Argument(
                name="--max-bad",
                help="Bad images of a split to leave out, such as 10 or 1%; by default 10 or 1 %, "
                "whichever is more.",
            ),
            Argument(name="--workers", help="Processes; by default one a core."),
            Argument(name="--json", help="Print JSON.", switch=True),
        ),
        examples=(
            (
                "phalanx data build ~/imagenet --to packed --out ~/packed --short-side 256",
                "the fastest form to train from",
            ),
            ("phalanx data build ~/photos --to tar --out ~/shards", "the same bytes, in tar files"),
            (
                "phalanx data build ~/archives --to tfrecord --out ~/records",
                "ImageNet's archives as 1,024 + 128 shards",
            ),
        ),
    ),
}
