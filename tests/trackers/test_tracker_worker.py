"""The process of a tracker: what it does after a kill, a failure or a full pipe."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.report.folder import RunFolder, create_run
from phalanx.trackers import worker
from phalanx.trackers.processes import Trackers
from phalanx.trackers.tracker import load_state

WORKER = [sys.executable, "-P", "-m", "phalanx.trackers.worker", "tensorboard"]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run with one log point."""
    run = create_run(tmp_path / "run", config_text="seed: 1\n", facts={"origins": {}})
    (run.path / "training.csv").write_text("step,epoch,loss\n5,1.0,2.5\n")
    return run


class OneThatFails:
    """A tracker that takes rows and cannot end a run."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def open(self, facts, state):
        return "here"

    def log(self, values, *, step):
        self.steps.append(step)

    def flush(self):
        pass

    def close(self, end, results):
        raise RuntimeError("503")


def test_what_was_told_is_saved_before_the_run_is_ended_there(run):
    tracked = worker._TrackedRun(OneThatFails(), run, "mlflow", print_note=lambda note: None)
    tracked._save_at = time.monotonic() + 100
    assert not tracked.end("finished")
    assert load_state(run, "mlflow").last_steps == {"train": 5}


def test_what_failed_is_tried_again_without_a_message(monkeypatch):
    monkeypatch.setattr(worker, "_RETRY_S", 0.01)
    read, write = os.pipe()
    arriving = worker._read_messages(read)
    assert next(arriving) == []
    os.write(write, b'{"step": 1}\n{"st')
    assert next(arriving) == [{"step": 1}]
    os.close(write)
    assert list(arriving) == []
    os.close(read)


def test_a_killed_run_is_told_to_the_end_by_one_process_at_a_time(run):
    trackers = run.path / "trackers"
    trackers.mkdir()
    with (trackers / "tensorboard.lock").open("w") as lock, (trackers / "log").open("w") as log:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as the process of an earlier kill holds it
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        late = subprocess.Popen([*WORKER, str(run.path), "{}"], **pipes, stderr=log)
        assert late.stdin and late.stdout
        assert "waits for the process" in json.loads(late.stdout.readline())
        assert not (run.path / "tensorboard").exists()
        late.stdout.close()  # now this run is killed, too, and nobody reads what it says
        late.stdin.close()
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert late.wait(timeout=30) == 0, (trackers / "log").read_text()
    assert load_state(run, "tensorboard").last_steps == {"train": 5}


def start_tensorboard(run: RunFolder, notes: list[str]) -> tuple[Trackers, int]:
    """TensorBoard's process, stopped."""
    trackers = Trackers()
    assert trackers.start(run, {"tensorboard": {}}, notes.append)
    process = trackers._processes[0]._process.pid
    os.kill(process, signal.SIGSTOP)
    return trackers, process


def test_a_full_pipe_does_not_lose_the_end(run, monkeypatch):
    trackers, process = start_tensorboard(run, [])
    for step in range(5_000):
        trackers.notify(step)

    def wake(seconds: float) -> None:
        os.kill(process, signal.SIGCONT)
        time.sleep(seconds)

    monkeypatch.setattr("phalanx.trackers.processes.sleep", wake)
    assert trackers.end("finished")
    (events,) = (run.path / "tensorboard").iterdir()
    ended = events.read_bytes().partition(b"_hparams_/session_end_info")[2]
    assert b"\x22\x0b\x08\x01" in ended, "SUCCESS"


def test_a_signal_while_trackers_are_waited_for_does_not_change_how_a_run_ended(run, monkeypatch):
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("phalanx.trackers.processes.sleep", interrupt)
    notes: list[str] = []
    trackers, _ = start_tensorboard(run, notes)
    assert not trackers.end("finished")
    rest = f"send the rest by: phalanx track {run.path} --tensorboard"
    assert notes == [f"tensorboard: not waited for; {rest}"]
    for end in ({"end": "stopped"}, {"end": "finished", "patience_s": 9.0}):
        trackers, _ = start_tensorboard(run, notes)
        with pytest.raises(KeyboardInterrupt):
            trackers.end(**end)


def test_what_wandb_was_handed_is_sent_by_wandb(run):
    notes: list[str] = []
    trackers, _ = start_tensorboard(run, notes)
    trackers._processes[0].name = "wandb"
    (run.path / "wandb/run-20260101_000000-abc").mkdir(parents=True)
    assert not trackers.end("finished", patience_s=0.0)
    assert notes == [
        f"wandb: not finished within 0 s; send the rest by: wandb sync {run.path}/wandb/*run-*"
    ]
