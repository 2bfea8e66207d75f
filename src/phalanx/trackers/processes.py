"""The processes that track a run, as the run sees them: started, told of news, and ended.

Nothing here waits while a run trains. A message is written into a pipe, or left out where the pipe
is full: the tracker finds the numbers in the records all the same.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from time import monotonic, sleep
from typing import Any

from phalanx.errors import RanksLost, Stopped
from phalanx.report.folder import RunFolder
from phalanx.trackers.tracker import END

_END_S: dict[END, float] = {  # to wait for a tracker; whoever stops a run often has no more time
    "finished": 20.0,
    "stopped": 5.0,
    "failed": 5.0,
}
_POLL_S = 0.02
_WORKER = (sys.executable, "-P", "-m", "phalanx.trackers.worker")


class _TrackerProcess:
    """The process of one tracker."""

    def __init__(
        self, run: RunFolder, name: str, options: Mapping[str, Any], say: Callable[[str], None]
    ) -> None:
        self.name, self._run, self._say = name, run, say
        self.log = run.path / "trackers" / f"{name}.log"
        self._read = b""
        self._is_lost = False
        self.log.parent.mkdir(exist_ok=True)
        with self.log.open("ab") as log:
            # a session of its own: Ctrl-C is for the run, which ends its trackers in order
            self._process = subprocess.Popen(
                [*_WORKER, name, str(run.path), json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        for pipe in (self._stdin, self._stdout):
            os.set_blocking(pipe.fileno(), False)
        self.tell({"step": 0, "extras": {}})  # it opens the tracker and looks for old records

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message, if there is room for it, and pass on what the tracker has to say."""
        line = json.dumps(message).encode() + b"\n"
        try:
            os.write(self._stdin.fileno(), line)  # whole or not at all: it is short
        except BlockingIOError:
            pass
        except OSError:
            self._note_loss()
        self.pass_notes_on()

    def pass_notes_on(self) -> None:
        """Say what has come from the tracker."""
        with suppress(BlockingIOError):
            while part := os.read(self._stdout.fileno(), 65536):
                self._read += part
        *lines, self._read = self._read.split(b"\n")
        for line in lines:
            self._say(f"{self.name}: {json.loads(line)}")

    def _note_loss(self) -> None:
        """Say once that the process is gone."""
        if not self._is_lost:
            self._is_lost = True
            self._say(f"{self.name}: its process has ended, see {self.log}; training goes on")

    def begin_end(self, end: END, *, seconds: float) -> None:
        """Tell it that the run has ended, and how long it is waited for."""
        self.tell({"end": end, "seconds": seconds})
        with suppress(OSError):
            self._stdin.close()

    def wait(self, until: float, *, waited_s: float) -> bool:
        """Give it until then to finish; whether all has arrived."""
        while self._process.poll() is None and monotonic() < until:
            self.pass_notes_on()
            sleep(_POLL_S)
        self.pass_notes_on()
        code = self._process.poll()
        again = f"phalanx track {self._run.path} --{self.name}"
        if code is None:
            self._say(f"{self.name}: not finished within {waited_s:g} s; send the rest by: {again}")
        elif code:
            self._say(f"{self.name}: not all of it arrived, see {self.log}; send it by: {again}")
        return code == 0

    def close(self) -> None:
        """End it at once if it still runs, with all that it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for pipe in (self._stdin, self._stdout):
            with suppress(OSError):
                pipe.close()


class Trackers:
    """All trackers of one run; without any, every method does nothing."""

    def __init__(self, read_extras: Callable[[], Mapping[str, float]] = dict) -> None:
        self._read_extras = read_extras  # what no record holds
        self._processes: list[_TrackerProcess] = []

    def start(
        self, run: RunFolder, chosen: Mapping[str, Mapping[str, Any]], say: Callable[[str], None]
    ) -> None:
        """Start a process for each tracker; one that cannot be started is told."""
        for name, options in chosen.items():
            try:
                self._processes.append(_TrackerProcess(run, name, options, say))
            except OSError as failure:
                say(f"{name}: cannot be started ({failure}); training goes on")

    def notify(self, step: int) -> None:
        """Tell that the records have news of a step."""
        if self._processes:
            message = {"step": step, "extras": self._read_extras()}
            for process in self._processes:
                process.tell(message)

    def end(self, end: END, *, patience_s: float | None = None) -> bool:
        """End all of them, waiting no longer than is reasonable; whether all has arrived."""
        seconds = _END_S[end] if patience_s is None else patience_s
        until = monotonic() + seconds
        try:
            for process in self._processes:
                process.begin_end(end, seconds=seconds)
            return all([one.wait(until, waited_s=seconds) for one in self._processes])
        finally:  # a second signal may come while they are waited for
            for process in self._processes:
                process.close()
            self._processes.clear()


@contextmanager
def tracking(
    trackers: Trackers,
    run: RunFolder,
    chosen: Mapping[str, Mapping[str, Any]],
    say: Callable[[str], None],
) -> Iterator[None]:
    """A block whose run is tracked; how it is left says how the run has ended."""
    trackers.start(run, chosen, say)
    end: END = "failed"
    try:
        yield
        end = "finished"
    except (Stopped, RanksLost, KeyboardInterrupt):
        end = "stopped"
        raise
    finally:
        trackers.end(end)
