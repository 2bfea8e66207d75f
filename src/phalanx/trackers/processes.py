"""The processes that track a run, from the run's side: started, notified, and ended.

Nothing here waits while a run trains. A message is written to a pipe, or dropped if the pipe is
full: the tracker finds the numbers in the records anyway.
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

_END_S: dict[END, float] = {  # to wait for a tracker; a run being stopped often has no more time
    "finished": 20.0,
    "stopped": 5.0,
    "failed": 5.0,
}
_POLL_S = 0.02
_WORKER = (sys.executable, "-P", "-m", "phalanx.trackers.worker")


class _TrackerProcess:
    """The process of one tracker."""

    def __init__(
        self,
        run: RunFolder,
        name: str,
        options: Mapping[str, Any],
        print_note: Callable[[str], None],
    ) -> None:
        self.name, self._run, self._print_note = name, run, print_note
        self.log = run.path / "trackers" / f"{name}.log"
        self._read = b""
        self._is_lost = False
        self._last = b""  # the last message, until there is room for it
        self.log.parent.mkdir(exist_ok=True)
        with self.log.open("ab") as log:
            # its own session: Ctrl-C is for the run, which ends its trackers in an orderly way
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
        self.send({"step": 0, "extras": {}})  # it opens the tracker and looks for old records

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, if there is room for it, and print what the tracker reports."""
        line = json.dumps(message).encode() + b"\n"
        try:
            os.write(self._stdin.fileno(), line)  # atomic, because it is short
        except BlockingIOError:
            pass
        except OSError:
            self._report_loss()
        self.print_notes()

    def print_notes(self) -> None:
        """Print the notes of the tracker."""
        with suppress(BlockingIOError):
            while part := os.read(self._stdout.fileno(), 65536):
                self._read += part
        *lines, self._read = self._read.split(b"\n")
        for line in lines:
            self._print_note(f"{self.name}: {json.loads(line)}")

    def _report_loss(self) -> None:
        """Report once that the process has ended unexpectedly."""
        if not self._is_lost:
            self._is_lost = True
            self._print_note(
                f"{self.name}: its process has ended, see {self.log}; the run is not affected"
            )

    def request_end(self, end: END, *, seconds: float) -> None:
        """Tell it that the run has ended, and how long the run will wait for it."""
        self._last = json.dumps({"end": end, "seconds": seconds}).encode() + b"\n"
        self._send_last()

    def _send_last(self) -> None:
        """Send the last message, if there is room for it, and close the pipe."""
        if not self._last:
            return
        try:
            os.write(self._stdin.fileno(), self._last)
        except BlockingIOError:
            return  # without it, the process would assume that the run was killed
        except OSError:
            self._report_loss()
        self._last = b""
        with suppress(OSError):
            self._stdin.close()

    def is_running(self) -> bool:
        """Whether it is still running after it was asked to end."""
        self._send_last()
        self.print_notes()
        return self._process.poll() is None

    def report(self, *, waited: str) -> bool:
        """Report what is missing and how to send it; returns whether everything has arrived."""
        code = self._process.poll()
        self.print_notes()
        if code is None:
            self._print_note(
                f"{self.name}: {waited}; send the rest by: {self._find_resend_command()}"
            )
        elif code:
            log, advice = self.log, self._find_resend_command()
            self._print_note(f"{self.name}: not all of it arrived, see {log}; send it by: {advice}")
        return code == 0

    def _find_resend_command(self) -> str:
        """The command that sends the rest."""
        folder = self._run.path / "wandb"
        # wandb keeps what it was given until it is uploaded; the records are not needed
        if self.name == "wandb" and any(folder.glob("*run-*")):
            return f"wandb sync {folder}/*run-*"
        return f"phalanx track {self._run.path} --{self.name}"

    def close(self) -> None:
        """Kill it if it still runs, with everything it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for pipe in (self._stdin, self._stdout):
            with suppress(OSError):
                pipe.close()


class Trackers:
    """All trackers of one run; without any, every method does nothing."""

    def __init__(self, read_extras: Callable[[], Mapping[str, float]] = dict) -> None:
        self._read_extras = read_extras  # numbers that are in no record
        self._processes: list[_TrackerProcess] = []

    def start(
        self,
        run: RunFolder,
        chosen: Mapping[str, Mapping[str, Any]],
        print_note: Callable[[str], None],
    ) -> bool:
        """Start a process for each tracker; returns whether all started, and reports failures."""
        for name, options in chosen.items():
            try:
                self._processes.append(_TrackerProcess(run, name, options, print_note))
            except OSError as failure:
                print_note(f"{name}: cannot be started ({failure}); the run is not affected")
        return len(self._processes) == len(chosen)

    def notify(self, step: int) -> None:
        """Notify the trackers that the records have news of a step."""
        if self._processes:
            message = {"step": step, "extras": self._read_extras()}
            for process in self._processes:
                process.send(message)

    def end(self, end: END, *, patience_s: float | None = None) -> bool:
        """End all of them with a limited wait; returns whether everything has arrived.

        A signal ends the wait. If everything else is done, it does not change how the run ended.
        """
        seconds = _END_S[end] if patience_s is None else patience_s
        until = monotonic() + seconds
        waited = f"not finished within {seconds:g} s"
        try:
            for process in self._processes:
                process.request_end(end, seconds=seconds)
            while any([one.is_running() for one in self._processes]) and monotonic() < until:
                sleep(_POLL_S)
            return all([one.report(waited=waited) for one in self._processes])
        except KeyboardInterrupt:
            if end != "finished" or patience_s is not None:
                raise
            return all([one.report(waited="not waited for") for one in self._processes])
        finally:
            for process in self._processes:
                process.close()
            self._processes.clear()


@contextmanager
def track_run(
    trackers: Trackers,
    run: RunFolder,
    chosen: Mapping[str, Mapping[str, Any]],
    print_note: Callable[[str], None],
) -> Iterator[None]:
    """Context in which the run is tracked; how it is left says how the run has ended."""
    trackers.start(run, chosen, print_note)
    end: END = "failed"
    try:
        yield
        end = "finished"
    except (Stopped, RanksLost, KeyboardInterrupt):
        end = "stopped"
        raise
    finally:
        trackers.end(end)
