"""The process of one tracker: reads the records of a run as they grow, and logs what is new.

Standard input receives a line of JSON for every log point and score, and closes with the run; the
lines say that there is something to read, and hold what the records do not. Standard output is for
notes to the user. Everything else that a tracker's package prints, and failures, go to
trackers/NAME.log.
"""

import fcntl
import json
import os
import select
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from phalanx.report.folder import RunFolder
from phalanx.trackers.mlflow_client import MLflow
from phalanx.trackers.new_rows import NewRow, NewRows
from phalanx.trackers.tensorboard import TensorBoard
from phalanx.trackers.tracker import END, Tracker, load_state, read_results, read_run_facts
from phalanx.trackers.weights_and_biases import WeightsAndBiases

_TRACKERS: dict[str, Callable[[Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}
_RETRY_S = 10.0  # after a failure, before the tracker is tried again
_SAVE_S = 1.0  # between two writes of the state
_ALONE_S = 60.0  # to finish, if the run has ended without a message
_GRACE_S = 5.0  # longer than our parent waits
_REASON_SHOWN = 200  # characters; the log has all of it
_PIPE_BYTES = 65_536
_NICENESS = 10  # the run comes first


class _TrackedRun:
    """A tracker of one run; a failure is reported once, and the work is retried."""

    def __init__(
        self, tracker: Tracker, run: RunFolder, name: str, *, print_note: Callable[[str], None]
    ) -> None:
        self._tracker, self._run, self._print_note = tracker, run, print_note
        self._state = load_state(run, name)
        self._new_rows, self._waiting = NewRows(run.path), deque[NewRow]()
        self._extras: dict[int, dict[str, float]] = {}  # by step, until its row arrives
        self._is_open = self._has_failed = False
        self._newest = 0  # the newest step named by a message
        self._retry_at = self._save_at = 0.0

    def add_extras(self, extras: Mapping[str, float], *, step: int) -> None:
        """Keep numbers of a step that are in no record."""
        self._extras.setdefault(step, dict(extras))
        self._newest = max(step, self._newest)

    def update(self) -> None:
        """Log what is new, unless the tracker has just failed.

        A row waits for the message of its step, which may arrive a moment later.
        """
        if monotonic() >= self._retry_at:
            self._attempt(lambda: self._log_new_rows(self._newest))

    def end(self, end: END) -> bool:
        """Log the rest and end the tracker's run; returns whether everything arrived."""
        logged = self._attempt(lambda: self._log_new_rows(sys.maxsize))
        # saved before the server is asked to end the run, which may take longer than we have
        saved = logged and self._attempt(self._state.save)
        return saved and self._attempt(lambda: self._close(end))

    def _attempt(self, work: Callable[[], None]) -> bool:
        """Try a piece of work; returns whether it succeeded. The first failure is reported."""
        try:
            work()
        except (Exception, SystemExit) as failure:  # noqa: BLE001 - of a package that is not ours
            self._retry_at = monotonic() + _RETRY_S
            traceback.print_exc()
            if not self._has_failed:
                self._has_failed = True
                reason = " ".join(str(failure).split()) or type(failure).__name__
                text = reason if len(reason) <= _REASON_SHOWN else f"{reason[:_REASON_SHOWN]}..."
                self._print_note(
                    f"{text}; the run is not affected, and what is missing is sent later"
                )
            return False
        self._retry_at = 0.0
        return True

    def _log_new_rows(self, last_step: int) -> None:
        if not self._is_open:
            self._print_note(self._tracker.open(read_run_facts(self._run), self._state))
            self._is_open = True
        self._waiting += self._new_rows.read()
        while self._waiting and self._waiting[0].step <= last_step:
            row = self._waiting[0]
            # a resumed run repeats steps that were logged before, bit for bit
            if row.step > self._state.last_steps.get(row.table, -1):
                extras = self._extras.pop(row.step, {}) if row.table == "train" else {}
                self._tracker.log({**row.values, **extras}, step=row.step)
                self._state.last_steps[row.table] = row.step
            self._waiting.popleft()
        self._tracker.flush()
        if monotonic() >= self._save_at:
            self._state.save()
            self._save_at = monotonic() + _SAVE_S

    def _close(self, end: END) -> None:
        self._tracker.close(end, read_results(self._run))
        self._state.save()


def _read_messages(pipe: int) -> Iterator[list[dict[str, Any]]]:
    """Messages as they arrive, all available ones at a time, until the other end is closed.

    After a while without messages, an empty list: failed work is retried without messages, too.
    """
    torn = b""
    while True:
        readable, _, _ = select.select([pipe], [], [], _RETRY_S)
        if not readable:
            yield []
            continue
        part = os.read(pipe, _PIPE_BYTES)
        if not part:
            return
        *lines, torn = (torn + part).split(b"\n")
        yield [json.loads(line) for line in lines]


def _process_messages(tracked: _TrackedRun, arriving: Iterator[list[dict[str, Any]]]) -> bool:
    """Process messages until the run ends; returns whether the tracker got everything."""
    end: END = "failed"
    patience_s = _ALONE_S
    for messages in arriving:
        for message in messages:
            if "end" in message:
                end, patience_s = message["end"], message["seconds"] + _GRACE_S
            else:
                tracked.add_extras(message["extras"], step=message["step"])
        tracked.update()
    last = threading.Timer(patience_s, os._exit, [1])
    last.daemon = True
    last.start()
    return tracked.end(end)


def _wait_for_predecessor(run: RunFolder, name: str, print_note: Callable[[str], None]) -> int:
    """Be the only process of this tracker and run; the lock ends with the process.

    A run that was killed leaves a process behind that still logs what was recorded. Two of them
    would both log it.
    """
    path = run.path / "trackers" / f"{name}.lock"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print_note("waits for the process that an earlier end of this run has left behind")
        fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def _main(name: str, folder: str, options: str) -> int:
    """Track a run; options: the tracker's own, as JSON."""
    # the end of the run closes our input; a signal to all processes must not cut us short
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop, signal.SIG_IGN)
    os.nice(_NICENESS)
    notes = os.dup(1)
    os.dup2(2, 1)

    def print_note(note: str) -> None:
        with suppress(OSError):  # a run that was killed no longer reads our notes
            os.write(notes, json.dumps(note).encode() + b"\n")

    tracker, run = _TRACKERS[name](json.loads(options)), RunFolder(Path(folder))
    _wait_for_predecessor(run, name, print_note)
    tracked = _TrackedRun(tracker, run, name, print_note=print_note)
    return 0 if _process_messages(tracked, _read_messages(0)) else 1


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
