"""Output to a terminal, a pipe or a log, without characters that control a terminal.

Names of files and classes are not trusted. While a command runs, standard output and standard error
are replaced by _OutputStreams, so that no print can forget to escape its text.
"""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, cast

from phalanx.errors import DiskError
from phalanx.escapes import escape_name, escape_text

__all__ = [
    "OutputClosed",
    "discard_output",
    "drawing_stream",
    "escape_name",
    "escape_output",
    "escape_redirected_streams",
    "escape_text",
    "raw_stream",
]


class OutputClosed(Exception):
    """The reader of standard output has closed it."""


class _OutputStream:
    """Standard output or standard error with escaped text; otherwise like the wrapped stream.

    required: whether a failed write is an error; if not, the rest is dropped silently.
    """

    def __init__(self, stream: TextIO, *, required: bool, escapes: bool = True) -> None:
        self.stream, self.required, self._escapes = stream, required, escapes
        self.late_failure: DiskError | None = None  # raised at the end of the command

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write text; returns its length."""
        try:
            self.stream.write(escape_text(text) if self._escapes else text)
        except OSError as cause:
            self._fail(cause)
        return len(text)

    def flush(self) -> None:
        """Flush the wrapped stream."""
        try:
            self.stream.flush()
        except OSError as cause:
            self._fail(cause)

    def _fail(self, cause: OSError) -> None:
        discard_output(self.stream)
        if not self.required:
            return
        if isinstance(cause, BrokenPipeError):
            raise OutputClosed from cause
        raise DiskError(
            f"standard output: cannot be written ({cause.strerror or cause}); what was printed is "
            "incomplete: fix that and run it again"
        ) from cause


def defer_output_error(stream: TextIO, cause: OSError, *, log: Path | None) -> None:
    """Discard all further output, and make the command fail at its end.

    For work that continues without its output and has a log of it. A reader who left is not an
    error.
    """
    discard_output(raw_stream(stream))
    if isinstance(stream, _OutputStream) and not isinstance(cause, BrokenPipeError):
        where = f", and {log} has what is missing here" if log else ""
        stream.late_failure = DiskError(
            f"standard output: could not be written ({cause.strerror or cause}); the run "
            f"continued to its end{where}"
        )


def discard_output(stream: TextIO) -> None:
    """Discard all further output: Python's last flush, at its exit, must not fail again."""
    with suppress(OSError, ValueError), open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


def drawing_stream(stream: TextIO) -> TextIO:
    """The same stream for text that is already escaped and contains our own control characters."""
    if isinstance(stream, _OutputStream):
        return cast(TextIO, _OutputStream(stream.stream, required=stream.required, escapes=False))
    return stream


def raw_stream(stream: TextIO) -> TextIO:
    """The wrapped stream, for callers that escape their text and handle failures themselves."""
    return stream.stream if isinstance(stream, _OutputStream) else stream


def escape_redirected_streams() -> None:
    """Clean what a live display has redirected to itself; it restores the earlier streams."""
    sys.stdout = cast(TextIO, _OutputStream(sys.stdout, required=False))
    sys.stderr = cast(TextIO, _OutputStream(sys.stderr, required=False))


@contextmanager
def escape_output() -> Iterator[None]:
    """Context in which all output is escaped, and printable in the terminal's encoding."""
    _reopen_closed()
    before = sys.stdout, sys.stderr
    with ExitStack() as stack:
        for stream in before:
            if isinstance(stream, io.TextIOWrapper):
                stack.callback(stream.reconfigure, errors=stream.errors)
                stream.reconfigure(errors="replace")
        output = _OutputStream(before[0], required=True)
        sys.stdout = cast(TextIO, output)
        sys.stderr = cast(TextIO, _OutputStream(before[1], required=False))
        try:
            yield
            sys.stdout.flush()
            if output.late_failure:
                raise output.late_failure
        finally:
            with suppress(OutputClosed, DiskError):  # reported already, or less important
                sys.stdout.flush()
            sys.stderr.flush()
            sys.stdout, sys.stderr = before


def _reopen_closed() -> None:
    """Open standard streams that were closed at start as /dev/null; DiskError for output.

    Otherwise the next file to be opened would get their descriptor, and what is printed.
    """
    is_closed = sys.stdout is None
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - for the whole process
    if is_closed:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - for the whole process
        raise DiskError("standard output is closed; send it to a file, or to /dev/null")
