"""Ends a rank that makes no progress, and reports where it hangs.

A collective operation whose peer is gone, or waits in another operation, may wait forever: without
an error, and without returning to Python. Only another thread can report that.
"""

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from phalanx.errors import NetworkError, RanksLost
from phalanx.escapes import escape_text

_PEERS_S = 2.0  # for the other ranks to report where they hang, before this one ends
_LAST_WORDS_S = 10.0  # to report, in case a disk or the reader of stderr hangs, too


class Watchdog:
    """Context in which `beat()` must be called regularly; otherwise the process ends.

    The exit code is 8, or 75 if `find_resume_command` returns a command that continues the run.

    describe: returns where we are ("step 12 of epoch 3"). It must not wait for a device or a
    lock, which may be what hangs. The same is true for find_resume_command.
    report: a file for a copy of what is written to stderr.
    """

    def __init__(
        self,
        seconds: float,
        describe: Callable[[], str],
        *,
        rank: int,
        ranks: int,
        report: Path | None,
        find_resume_command: Callable[[], str] = str,
    ):
        self._seconds = seconds
        self._describe = describe
        self._who = f"rank {rank} of {ranks} on {socket.gethostname()}"
        self._report = report
        self._find_resume_command = find_resume_command
        self._beats = 0
        self._left = threading.Event()

    def beat(self) -> None:
        """Report progress."""
        self._beats += 1

    def __enter__(self) -> "Watchdog":
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._left.set()

    def _watch(self) -> None:
        # short waits are counted instead of reading a clock: a Ctrl-Z must not count as a hang
        moment = min(1.0, self._seconds / 10)
        beats, waited = self._beats, 0.0
        while waited < self._seconds:
            if self._left.wait(moment):
                return
            waited = waited + moment if beats == self._beats else 0.0
            beats = self._beats
        last = threading.Timer(_LAST_WORDS_S, os._exit, [NetworkError.exit_code])
        last.daemon = True
        last.start()
        place = "an unknown place"
        try:
            place = self._describe()
        finally:
            self._end(place)

    def _end(self, place: str) -> None:
        """Write where every thread is, and end the process."""
        code = NetworkError.exit_code
        try:
            head = f"{self._who}: no progress for {self._seconds:g} s, in {place}"
            data = escape_text("\n".join([head, *_describe_threads(), ""])).encode(errors="replace")
            with suppress(OSError):
                os.write(2, data)  # in one call: other ranks write at the same time
            if self._report is not None:
                with suppress(OSError):
                    self._report.write_bytes(data)
            command = self._find_resume_command()
            if command:
                code = RanksLost.exit_code
                gone = "another rank, or the network, is gone or hangs"
                last_line = f"phalanx: {self._who}: {gone}; continue with: {command}\n"
                with suppress(OSError):
                    os.write(2, escape_text(last_line).encode(errors="replace"))
            time.sleep(_PEERS_S)
        finally:
            os._exit(code)


def _describe_threads() -> Iterator[str]:
    """The stack of every thread, innermost call last, without reading source files from disk."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        yield f"  thread {names.get(ident, ident)}:"
        for place, line in reversed(list(traceback.walk_stack(frame))):
            code = place.f_code
            yield f'    File "{code.co_filename}", line {line}, in {code.co_qualname}'
