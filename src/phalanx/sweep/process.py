"""A trial as a process of its own: started, followed by its validations, and asked to stop."""

import csv
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from phalanx.disk import disk_errors, try_lock
from phalanx.errors import CheckpointError
from phalanx.report.folder import is_run_folder, read_json_object
from phalanx.report.records import SCORE_FIELDS, VALIDATION
from phalanx.sweep.check import flags_of, preset_of
from phalanx.sweep.file import SweepFile
from phalanx.sweep.journal import Point, Trial

_POLL_S = 0.1
_MOST_READ = 20_000  # bytes of what a process said last
_OWN_WORDS = "phalanx train: "  # what a command that ends badly begins its last line with


class TrialProcess:
    """`phalanx train` at work on a trial."""

    def __init__(self, words: list[str], log: int):
        self._said_before = os.fstat(log).st_size
        # a group of its own: Ctrl-C is for the sweep, which passes it on once
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "phalanx", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._asked = False

    @property
    def number(self) -> int:
        """Of the process."""
        return self._process.pid

    def wait(self) -> int | None:
        """The exit code, if it ends in a moment."""
        try:
            return self._process.wait(timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            return None

    def ask_to_stop(self) -> None:
        """As Ctrl-C does: it finishes its step, saves, and leaves."""
        if not self._asked:
            self._asked = True
            self._process.send_signal(signal.SIGINT)

    def said(self, log: Path) -> str:
        """What this process wrote into the log, without what others did before it."""
        return log.read_bytes()[self._said_before :][-_MOST_READ:].decode(errors="replace")

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()


def words_for(sweep: SweepFile, trial: Trial, run: Path) -> tuple[list[str], bool]:
    """The words that train a trial from wherever it stands, and whether they resume it."""
    if is_run_folder(run):
        return ["train", "--resume", str(run)], True
    if run.exists():
        shutil.rmtree(run)  # killed before it was a run
    preset = preset_of(sweep, trial.values)
    flags = {**flags_of(sweep, trial.values), "run-dir": str(run)}
    named = [f"--{name}={text}" for name, text in flags.items()]
    return ["train", *([preset] if preset else []), *named], False


def open_log(folder: Path, trial: Trial, stopping: Callable[[], bool]) -> int | None:
    """The file a trial speaks into, locked by whoever trains it; None if a stop comes first.

    The lock travels with the file into the process and is gone when that is. A sweep that was
    killed leaves a process behind which still holds it: that one is asked to stop, too.
    """
    path = folder / f"{trial.name}.log"
    with disk_errors(path):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    asked = False
    while not stopping():
        if try_lock(handle, path):
            return handle
        asked = asked or _ask_leftover(trial, path)
        time.sleep(_POLL_S)
    os.close(handle)
    return None


def _ask_leftover(trial: Trial, log: Path) -> bool:
    """Ask the process that a killed sweep left behind to stop; says that it was asked."""
    if trial.process is None:
        return False  # killed in the very moment it was started: it is waited for
    host, number = trial.process
    if host != socket.gethostname():
        raise CheckpointError(
            f"{log}: process {number} on {host} still trains this trial; stop it there, or wait"
        )
    try:
        os.kill(number, signal.SIGINT)
    except ProcessLookupError:
        return True  # its own children are about to go
    return True


def read_points(run: Path, goal: str) -> list[Point]:
    """The validations of a run so far, as validation.csv has them; a torn last line is left out."""
    try:
        text = (run / VALIDATION).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    whole = text[: text.rfind("\n") + 1].splitlines()
    rows = [
        row for row in csv.DictReader(whole) if all(row.get(n) is not None for n in SCORE_FIELDS)
    ]
    return [_as_point(row, goal) for row in rows if row[goal]]


def _as_point(row: dict[str, str], goal: str) -> Point:
    """One line of validation.csv."""
    interval = (float(row["top1_low"]), float(row["top1_high"])) if goal == "top1" else None
    return Point(
        step=int(row["step"]),
        epoch=float(row["epoch"]),
        score=float(row[goal]),
        interval95=interval,
    )


def total_steps(run: Path) -> int:
    """How long a run will be."""
    return int(read_json_object(run / "run.json")["plan"]["total_steps"])


def last_words(text: str) -> str:
    """What a process said when it ended badly: its own message, or the last line."""
    at = text.rfind(_OWN_WORDS)
    told = text[at + len(_OWN_WORDS) :] if at >= 0 else text.strip().rpartition("\n")[2]
    return " ".join(told.split())


def last_lines(text: str, count: int = 5) -> list[str]:
    """The end of what a process said."""
    return [line for line in text.splitlines() if line.strip()][-count:]
