"""A tracker that is missing, fails or hangs: the run goes on, and somebody is told."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from shown_numbers import read_tensorboard, read_wandb

from phalanx.cli.main import main
from phalanx.report.folder import RunFolder, create_run
from phalanx.trackers.processes import Trackers
from small_runs import run_phalanx, small_run


@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_is_told_before_anything_runs(
    tracker, digits, tmp_path, monkeypatch, capsys
):
    (tmp_path / tracker).mkdir()  # as wandb leaves it behind; it is no package
    import_module("phalanx.assemble.train")  # with packages that are not found below
    here = [path for path in sys.path if not (Path(path) / tracker / "__init__.py").exists()]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *here])
    monkeypatch.delitem(sys.modules, tracker, raising=False)
    assert find_spec(tracker) is not None
    run = tmp_path / "run"
    assert main([*small_run(digits, run), f"--{tracker}"]) == 2
    line = f"--{tracker}: {tracker} is not installed; pip install 'phalanx[{tracker}]'"
    assert line in capsys.readouterr().err
    assert not run.exists()


@pytest.mark.parametrize("command", ["train", "track"])
def test_an_unknown_wandb_mode_is_told_before_anything_runs(
    command, run, digits, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "banana")
    new = tmp_path / "new"
    words = small_run(digits, new) if command == "train" else ["track", str(run.path)]
    assert main([*words, "--wandb"]) == 2
    told = (
        "WANDB_MODE=banana: expected online, offline or disabled; change it, or give --wandb-mode"
    )
    assert told in capsys.readouterr().err
    assert not new.exists() and not (run.path / "trackers").exists()


def test_an_option_takes_precedence_over_the_mode_of_wandb_s_environment(run, monkeypatch, capsys):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "banana")
    assert main(["track", str(run.path), "--wandb", "--wandb-mode", "offline"]) == 0
    assert capsys.readouterr().out.startswith("wandb: recorded offline; upload it with: ")


def test_a_reason_of_several_lines_is_told_in_one(run, monkeypatch, capsys):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "banana")
    main(["track", str(run.path), "--wandb", "--wandb-mode", "offline"])
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("wandb: 1 validation error for Settings silent Input should be a valid")
    assert first.endswith(LATER)


def test_a_password_is_not_stored(digits, tmp_path, capsys):
    words = small_run(digits, tmp_path / "run", mlflow_uri="http://me:secret@host:5000")
    assert main([*words, "--mlflow"]) == 2
    message = capsys.readouterr().err
    assert "--mlflow-uri: has a password in it" in message and "secret" not in message


LATER = "the run is not affected, and what is missing is sent later"


def test_a_full_disk_does_not_stop_a_run(digits, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(small_run(digits, run, steps=6, ckpts_per_epoch=1)) == 0
    (run / "summary.json").unlink()
    (run / "tensorboard").mkdir()
    (run / "tensorboard/events.out.tfevents.1.full").symlink_to("/dev/full")
    assert main(["train", "--resume", str(run), "--tensorboard"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "tensorboard: " in line]
    assert lines == [
        f"tensorboard: [Errno 28] No space left on device; {LATER}",
        f"tensorboard: not all of it arrived, see {run}/trackers/tensorboard.log; "
        f"send it by: phalanx track {run} --tensorboard",
    ]


def test_track_fails_where_a_tracker_does(run, capsys):
    (run.path / "tensorboard").write_text("a file in the way")
    assert main(["track", str(run.path), "--tensorboard"]) == 8
    out, error = capsys.readouterr()
    reason = f"[Errno 17] File exists: '{run.path / 'tensorboard'}'"
    assert out.startswith(f"tensorboard: {reason}; {LATER}\n")
    assert f"{run.path}: not everything has arrived" in error


def test_track_fails_where_a_tracker_cannot_be_started(run, capsys):
    (run.path / "trackers").write_text("a file in the way")
    assert main(["track", str(run.path), "--tensorboard"]) == 8
    out, error = capsys.readouterr()
    assert out.startswith("tensorboard: cannot be started ([Errno 17] File exists")
    assert "training goes on" not in out
    assert f"{run.path}: not everything has arrived" in error


def test_track_needs_no_tracker_but_the_one_it_names(run, monkeypatch):
    monkeypatch.setattr("phalanx.trackers.choice.find_spec", lambda module: None)
    run.config.write_text("seed: 1\nmlflow: true\n")
    assert main(["track", str(run.path)]) == 2
    assert main(["track", str(run.path), "--tensorboard"]) == 0


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run folder without any records."""
    return create_run(tmp_path / "run", config_text="seed: 1\n", facts={"origins": {}})


def start_tensorboard(run: RunFolder, notes: list[str]) -> tuple[Trackers, int]:
    """TensorBoard's process at work, and its id."""
    trackers = Trackers()
    trackers.start(run, {"tensorboard": {}}, notes.append)
    return trackers, trackers._processes[0]._process.pid


def test_a_tracker_that_hangs_is_never_waited_for_until_the_end(run):
    notes: list[str] = []
    trackers, process = start_tensorboard(run, notes)
    os.kill(process, signal.SIGSTOP)
    for step in range(5_000):  # more than its pipe takes
        trackers.notify(step)
    assert notes == []
    begin = time.monotonic()
    trackers.end("finished", patience_s=0.1)
    assert time.monotonic() - begin < 20
    rest = f"send the rest by: phalanx track {run.path} --tensorboard"
    assert notes == [f"tensorboard: not finished within 0.1 s; {rest}"]
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_tracker_that_dies_is_told_once(run):
    notes: list[str] = []
    trackers, process = start_tensorboard(run, notes)
    os.kill(process, signal.SIGKILL)
    while Path(f"/proc/{process}/stat").read_text().split()[2] != "Z":
        time.sleep(0.005)
    for step in range(10):
        trackers.notify(step)
    gone = f"tensorboard: its process has ended, see {run.path}/trackers/tensorboard.log"
    assert notes == [f"{gone}; the run is not affected"]
    trackers.end("failed")
    assert len(notes) == 2 and "not all of it arrived" in notes[1]


@pytest.mark.slow
def test_a_tracker_outlives_a_run_that_is_killed_until_all_is_told(digits, tmp_path):
    pytest.importorskip("tensorboard")
    run = tmp_path / "run"
    # the process kills itself when it would write its summary
    code = (
        "import os, sys; from unittest.mock import patch; from phalanx.cli.main import main;"
        "end = lambda *_: os.kill(os.getpid(), 9);"
        "patch('phalanx.assemble.train._write_results', end).start(); main(sys.argv[1:])"
    )
    words = [*small_run(digits, run, steps=12, **{"logs-per-epoch": 6}), "--tensorboard"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    deadline = time.monotonic() + 30
    while "valid" not in _told(run) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [step for step, _ in read_tensorboard(run)["train/loss"]][-1] == 12


def _told(run: Path) -> dict[str, int]:
    try:
        return json.loads((run / "trackers/tensorboard.json").read_text())["told"]
    except FileNotFoundError:
        return {}


@pytest.mark.slow
@pytest.mark.parametrize("answers", [False, True])
@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_a_server_that_is_gone_or_hangs_does_not_stop_a_run(
    tracker, answers, digits, tmp_path, monkeypatch
):
    pytest.importorskip(tracker)
    monkeypatch.setenv("HOME", str(tmp_path))
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if answers:
            server.listen()  # takes connections, and says nothing
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("WANDB_BASE_URL", address)
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        run = tmp_path / "run"
        begin = time.monotonic()
        done = run_phalanx(*small_run(digits, run), f"--{tracker}")
        assert done.returncode == 0, done.stderr
        assert f"\n{tracker}: " in done.stdout, done.stdout
        assert time.monotonic() - begin < 90
        assert "top-1 " in done.stdout.splitlines()[-3]
        if tracker == "wandb":  # nothing is lost: it can be uploaded later
            assert "wandb: cannot go online (" in done.stdout
            assert [step for step, _ in read_wandb(run)["train/loss"]][-1] == 18
