"""Runs our own server as a child process: yielded when it is ready, and always ended."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from phalanx.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DiskError,
    NetworkError,
    UserError,
)

_READY = re.compile(r"^serving (?P<name>.+) on (?P<url>https?://\S+)")
_LINES_KEPT = 30
_DRAIN_S = 40.0  # for a server to answer what it has accepted
_ERRORS: dict[int, type[UserError]] = {
    kind.exit_code: kind
    for kind in (ConfigError, DataError, CheckpointError, DiskError, NetworkError)
}


@dataclass(frozen=True)
class _ServerChild:
    """A server that is ready: its model, address and process."""

    name: str
    url: str
    pid: int


def run_child(words: Sequence[str]) -> None:
    """Run one of our commands in a new process to its end; raises the error that it printed."""
    with _start(words) as child:
        child.wait()
    if child.process.returncode:
        raise child.build_error(f"phalanx {words[0]} failed")


@contextmanager
def open_server(
    target: str, words: Sequence[str] = (), *, ready_s: float
) -> Iterator[_ServerChild]:
    """Context with a server for a file or run on a free port; the server ends with the block.

    words: more options of `phalanx serve`. ready_s: how long it may take to get ready.
    """
    with _start(["serve", target, "--port", "0", *words]) as child:
        found = child.wait_for_address(ready_s)
        if found is None:
            raise child.build_error(f"the server for {target} did not get ready")
        yield _ServerChild(found["name"], found["url"], child.process.pid)


@contextmanager
def _start(words: Sequence[str]) -> "Iterator[_CommandChild]":
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "phalanx.cli.trial", *words],
        stdin=subprocess.PIPE,  # nothing is written: it closes when we end, however we end
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C is ours to pass on
    )
    child = _CommandChild(process)
    try:
        yield child
    finally:
        child.end()


class _CommandChild:
    """A process whose last lines are kept, because they say why it failed."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process, self.lines = process, deque[str](maxlen=_LINES_KEPT)
        self._match: re.Match[str] | None = None
        self._heard = threading.Event()
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            found = _READY.match(line)
            if found:
                self._match = found
                self._heard.set()
        self._heard.set()

    def wait(self) -> None:
        """Wait until the process has ended and all its output was read."""
        while self.process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)
        self._reader.join()

    def wait_for_address(self, timeout_s: float) -> re.Match[str] | None:
        """The line with the address that the server listens on; None if it was never printed."""
        end = time.monotonic() + timeout_s
        while not self._heard.wait(0.1) and time.monotonic() < end:
            pass
        return self._match

    def build_error(self, what: str) -> UserError:
        """The last output of the process, as an error of the class with its exit code."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        self._reader.join(1.0)
        code = self.process.returncode
        said = [line for line in self.lines if line.strip()]
        if code in _ERRORS and said:
            # without the name of its command: ours comes before it
            return _ERRORS[code](re.sub(r"^phalanx \w+: ", "", said[-1]))
        why = f"; it said last: {said[-1]}" if said else ""
        ended = "it is still starting" if code is None else f"it ended with code {code}"
        return NetworkError(f"{what}: {ended}{why}")

    def end(self) -> None:
        """Ask the process to exit, then kill it and everything that it has started."""
        for number, patience_s in ((signal.SIGTERM, _DRAIN_S), (signal.SIGKILL, 5.0)):
            if self.process.poll() is not None:
                break
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(patience_s)
        self._reader.join(1.0)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
