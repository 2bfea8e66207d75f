"""A trial as its own process: started, watched through its validations, and interrupted."""

import csv
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from phalanx.disk import convert_disk_errors, try_lock
from phalanx.errors import CheckpointError
from phalanx.report.folder import is_run_folder, read_json_object
from phalanx.report.records import SCORE_FIELDS, VALIDATION_FILE, convert_damage_errors
from phalanx.sweep.schema import PLUGIN, SweepFile
from phalanx.sweep.state import Trial, TrialScore

_POLL_S = 0.1
_MOST_READ = 20_000  # bytes from the end of a process's output
_ERROR_PREFIX = "phalanx train: "  # of the last message of a command that fails


class TrialProcess:
    """The `phalanx train` process of a trial; when this process ends, it saves and exits."""

    def __init__(self, words: list[str], log: int):
        self._log_start = os.fstat(log).st_size
        # a group of its own: Ctrl-C is for the sweep, which passes it on once
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "phalanx.cli.trial", *words],
            stdin=subprocess.PIPE,  # nothing is written: it closes when we end, however we end
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._is_interrupted = False

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def wait(self) -> int | None:
        """The exit code, if it ends within a moment."""
        try:
            exit_code = self._process.wait(timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            return None
        assert self._process.stdin is not None
        self._process.stdin.close()
        return exit_code

    def interrupt(self) -> None:
        """Ask it to stop, as Ctrl-C does: it finishes its step, saves, and exits."""
        if not self._is_interrupted:
            self._is_interrupted = True
            self._process.send_signal(signal.SIGINT)

    def read_output(self, log: Path) -> str:
        """What this process wrote to the log, without the output of earlier ones."""
        return log.read_bytes()[self._log_start :][-_MOST_READ:].decode(errors="replace")

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()


def build_command(sweep: SweepFile, trial: Trial, run: Path) -> tuple[list[str], bool]:
    """The command that starts or resumes a trial, and whether it resumes."""
    if is_run_folder(run):
        plugin = sweep.flags_for(trial.values).get(PLUGIN)
        return ["train", "--resume", str(run), *([f"--plugin={plugin}"] if plugin else [])], True
    if run.exists():
        shutil.rmtree(run)  # killed before it became a run
    preset = sweep.preset_for(trial.values)
    flags = {**sweep.flags_for(trial.values), "run-dir": str(run)}
    words = [f"--{name}={text}" for name, text in flags.items()]
    return ["train", *([preset] if preset else []), *words], False


def open_trial_log(folder: Path, trial: Trial, should_stop: Callable[[], bool]) -> int | None:
    """The log file of a trial, locked by the process that trains it; None if a stop comes first.

    The process inherits the lock with the file, and releases it when it ends. A sweep that was
    killed may leave a process behind that still holds it: that one is interrupted, too.
    """
    path = folder / f"{trial.name}.log"
    with convert_disk_errors(path):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    is_interrupted = False
    while not should_stop():
        if try_lock(handle, path):
            return handle
        is_interrupted = is_interrupted or _interrupt_leftover(trial, path)
        time.sleep(_POLL_S)
    os.close(handle)
    return None


def _interrupt_leftover(trial: Trial, log: Path) -> bool:
    """Interrupt the process that a killed sweep left behind; False if none is known."""
    if trial.process is None:
        return False  # killed at the very moment it was started: wait for it
    host, pid = trial.process
    if host != socket.gethostname():
        raise CheckpointError(
            f"{log}: process {pid} on {host} is still training this trial; stop it there, or wait"
        )
    with suppress(ProcessLookupError):  # then its children are about to end
        os.kill(pid, signal.SIGINT)
    return True


def read_trial_scores(run: Path, goal: str) -> list[TrialScore]:
    """The validations of a run so far, from validation.csv, without an incomplete last line."""
    try:
        content = (run / VALIDATION_FILE).read_bytes()
    except FileNotFoundError:
        return []
    with convert_damage_errors(run / VALIDATION_FILE):
        whole = content[: content.rfind(b"\n") + 1].decode().splitlines()
        return [
            TrialScore(
                step=int(row["step"]),
                epoch=float(row["epoch"]),
                score=float(row[goal]),
                interval95=(float(row["top1_low"]), float(row["top1_high"]))
                if goal == "top1"
                else None,
            )
            for row in csv.DictReader(whole)
            if all(row.get(name) is not None for name in SCORE_FIELDS) and row[goal]
        ]


def read_total_steps(run: Path) -> int:
    """The planned number of steps of a run."""
    return int(read_json_object(run / "run.json")["plan"]["total_steps"])


def find_error_message(output: str) -> str:
    """Why a process failed: its own message, or its last line."""
    start = output.rfind(_ERROR_PREFIX)
    message = (
        output[start + len(_ERROR_PREFIX) :] if start >= 0 else output.strip().rpartition("\n")[2]
    )
    return " ".join(message.split())
