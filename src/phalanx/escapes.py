"""Escapes for the characters of a text that steer a terminal."""

import re
import sys
from typing import TextIO, cast

# C0 but for newline, tab and a line's \r\n; DEL and C1; marks and overrides of the direction of
# text; separators of lines; bytes of a name that are no UTF-8
_STEERING = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
    "\ud800-\udfff]|\r(?!\n)"
)


def escape_text(text: str) -> str:
    """The text with an escape for each character that steers a terminal.

    The escape is JSON's, so that JSON remains what it is.

    >>> escape_text("a" + chr(27) + "[2J")
    'a\\\\u001b[2J'
    """
    return _STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def escape_name(name: str) -> str:
    """A name as part of a line: it begins no line of its own.

    >>> escape_name("a" + chr(10) + "b")
    'a\\\\u000ab'
    """
    return escape_text(name).replace("\n", "\\u000a").replace("\r", "\\u000d")


class _EscapingStream:
    """A stream whose text is escaped; in all else it is the stream it is made of."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text."""
        self._stream.write(escape_text(text))
        return len(text)


def escape_worker_stderr() -> None:
    """Escape what a worker process prints: on its parent's terminal, past its parent's streams."""
    sys.stderr = cast(TextIO, _EscapingStream(sys.stderr))
