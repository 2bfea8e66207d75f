"""Whole sweeps of real, tiny trainings: what each trial comes to, and that no kill changes it."""

import csv
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from html_page import Page
from phalanx.cli.main import main
from phalanx.engine.checkpoint_store import list_checkpoints
from phalanx.errors import CheckpointError
from phalanx.report.records import SCORE_FIELDS, read_scores
from phalanx.sweep.check import read_sweep
from phalanx.sweep.process import TrialProcess, open_trial_log, read_trial_scores
from phalanx.sweep.runner import lock_sweep
from phalanx.sweep.state import Trial, create_sweep
from small_runs import interrupt_twice, read_result, small_run, start_phalanx
from small_sweeps import write_sweep

STOPPED = 75
# one that learns, one that stands still and is pruned, one that diverges in its first epoch
TEXT = """\
options:
  data: mnist
  data-dir: {digits}
  image-size: 12
  batch-size: 16
  epochs: 4
  ckpts-per-epoch: 3
  warmup-epoch: 1st
  device: cpu
  workers: 0
search:
  lr: [0.05, 0.0, 1e12]
method: grid
goal: loss
prune: halving
"""


@pytest.fixture(scope="module")
def file(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of all sweeps here."""
    return write_sweep(tmp_path_factory.mktemp("file"), TEXT.format(digits=digits))


@pytest.fixture(scope="module")
def straight(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep that never stopped."""
    folder = tmp_path_factory.mktemp("straight") / "sweep"
    assert main(["sweep", str(file), "--sweep-dir", str(folder)]) == 0
    return folder


def facts_of(folder: Path) -> dict:
    return json.loads((folder / "sweep.json").read_text())


def what_came_out(folder: Path) -> list[tuple]:
    """Everything about the trials that no clock decides."""
    names = ("number", "values", "state", "points", "epochs", "rungs")
    return [tuple(trial[name] for name in names) for trial in facts_of(folder)["trials"]]


def test_every_point_of_a_grid_runs_once_and_ends_as_it_must(straight):
    facts = facts_of(straight)
    trials = facts["trials"]
    assert [trial["values"]["lr"] for trial in trials] == ["0.05", "0.0", "1e12"]
    assert [trial["state"] for trial in trials] == ["done", "pruned", "failed"]
    assert facts["finished"] and facts["best"] == 0
    assert facts["command"].endswith("--workers 0 --lr 0.05")
    assert sorted(path.name for path in straight.glob("trial-*[0-9]")) == [
        "trial-000",
        "trial-001",
        "trial-002",
    ]


def test_a_trial_that_is_done_has_the_score_of_its_run(straight):
    done = facts_of(straight)["trials"][0]
    rows = read_scores(straight / "trial-000")
    assert done["epochs"] == 4 and len(done["points"]) == len(rows) == 4
    assert [point["score"] for point in done["points"]] == [row.loss for row in rows]
    assert done["exit_code"] == 0 and done["seconds"] > 0


def test_a_trial_that_is_pruned_was_stopped_early_and_saved(straight):
    pruned = facts_of(straight)["trials"][1]
    assert pruned["epochs"] == 1 and len(pruned["points"]) == 1
    assert pruned["exit_code"] == STOPPED, "stopped by a signal, before its end"
    run = straight / "trial-001"
    assert not (run / "summary.json").exists() and list((run / "checkpoints").glob("step-*"))
    assert "stopped after step" in (straight / "trial-001.log").read_text()


def test_a_trial_that_fails_says_why_and_the_sweep_goes_on(straight):
    failed = facts_of(straight)["trials"][2]
    assert failed["exit_code"] == 5 and failed["score"] is None
    # the step sees it in its loss, or the save before it in the weights
    assert failed["reason"].startswith("diverged: step ")
    assert "loss nan" in failed["reason"] or "is no longer finite" in failed["reason"]


def test_the_papers_of_a_sweep_are_complete(straight, file):
    with (straight / "sweep.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    assert [(row["trial"], row["state"], row["lr"]) for row in rows] == [
        ("0", "done", "0.05"),
        ("1", "pruned", "0.0"),
        ("2", "failed", "1e12"),
    ]
    page = Page((straight / "sweep.html").read_text(encoding="utf-8"))
    reports = [link for link in page.addresses if link.endswith("report.html")]
    assert sorted(reports) == [f"trial-00{n}/report.html" for n in range(3)]
    assert all((straight / report).is_file() for report in reports)
    assert (straight / "sweep.yaml").read_bytes() == file.read_bytes()


def test_a_finished_sweep_shows_its_table_and_trains_nothing(straight, capsys):
    before = {path: path.stat().st_mtime_ns for path in straight.glob("trial-*/metrics.jsonl")}
    assert main(["sweep", "--resume", str(straight)]) == 0
    shown = capsys.readouterr().out
    assert "trial  state     loss    lr  epochs  time" in shown
    assert "best, trial 0: phalanx train --data mnist" in shown
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert "<title>rates: sweep</title>" in (straight / "sweep.html").read_text()


def stop_sweep(words: list, number: signal.Signals, when: Path) -> tuple[int, str]:
    """Start a sweep and send it a signal as soon as that path exists."""
    process = start_phalanx(*words)
    deadline = time.monotonic() + 120
    while not when.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    return process.returncode, err


def test_stopped_and_killed_a_sweep_ends_as_if_it_had_not_been(straight, file, tmp_path):
    folder = tmp_path / "sweep"
    file = write_sweep(tmp_path, file.read_text() + "trials: 2\n")
    words = ["sweep", file, "--sweep-dir", folder]
    first = folder / "trial-000" / "checkpoints" / "step-00000002"
    code, err = stop_sweep(words, signal.SIGINT, first)
    assert code == STOPPED, err
    way_on = f"everything is saved; continue with: phalanx sweep --resume {folder}"
    assert f"phalanx sweep: stopped after 0 of 2 trials; {way_on}" in err
    assert [trial["state"] for trial in facts_of(folder)["trials"]] == ["running"]

    # the training of the second trial has only just begun
    code, _ = stop_sweep(words, signal.SIGKILL, folder / "trial-001" / "run.json")
    assert code == -signal.SIGKILL
    states = [trial["state"] for trial in facts_of(folder)["trials"]]
    assert states == ["done", "running"]

    assert main(["sweep", "--resume", str(folder)]) == 0
    assert what_came_out(folder) == what_came_out(straight)[:2]
    sums = [read_result(run / "trial-000")["weights_sha256"] for run in (folder, straight)]
    assert sums[0] == sums[1], "the stopped trial went on bit for bit"
    assert "resumed at step" in (folder / "trial-000.log").read_text()


def test_a_second_ctrl_c_leaves_at_once_and_takes_the_training_with_it(digits, tmp_path):
    # one step of this takes seconds, so the first signal is still being honoured
    slow = TEXT.replace("epochs: 4", "steps: 5\n  gradient-accumulation: 600")
    folder = tmp_path / "sweep"
    file = write_sweep(tmp_path, slow.format(digits=digits))
    process = start_phalanx("sweep", file, "--sweep-dir", folder)
    deadline = time.monotonic() + 120
    while not (folder / "trial-000" / "log.txt").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(1.0)
    interrupt_twice(process)
    assert process.returncode == 130
    trial = Trial(number=0, values={})
    assert open_trial_log(folder, trial, lambda: time.monotonic() > deadline) is not None, (
        "it is gone"
    )


HOLD_A_TRIAL = """
import sys
from phalanx.sweep.process import TrialProcess
trial = TrialProcess(sys.argv[1:], 1)
while trial.wait() is None:
    pass
"""


def test_a_trial_saves_and_leaves_when_its_sweep_is_killed(digits, tmp_path):
    run = tmp_path / "run"
    words = small_run(digits, run, steps=100_000, ckpts_per_epoch="1/1000", logs_per_epoch=6)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_A_TRIAL, *words], stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not (run / "training.csv").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    holder.kill()
    out, _ = holder.communicate(timeout=60)  # its end comes when the trial has left, too
    assert "SIGTERM: finishing this step and saving" in out
    assert len(list_checkpoints(run / "checkpoints")) == 1
    assert not (run / "summary.json").exists()


def test_a_run_that_cannot_be_resumed_begins_again(tmp_path):
    # without data the new beginning fails too, but otherwise, and before torch is imported
    text = TEXT.format(digits=tmp_path / "absent").replace("[0.05, 0.0, 1e12]", "[0.05]")
    folder = tmp_path / "sweep"
    sweep = read_sweep(write_sweep(tmp_path, text))
    create_sweep(folder, sweep).with_trial(Trial(number=0, values={"lr": "0.05"}))
    (folder / "trial-000").mkdir()
    (folder / "trial-000" / "run.json").write_text("{")
    assert main(["sweep", "--resume", str(folder)]) == 3
    first, second = (folder / "trial-000.log").read_text().split("phalanx train: ")[1:]
    assert "run.json: is damaged" in first and "absent" in second
    assert not (folder / "trial-000").exists()


def test_a_mistake_in_what_all_trials_have_ends_the_sweep_early(tmp_path, capsys):
    absent = tmp_path / "absent"
    file = write_sweep(tmp_path, TEXT.format(digits=absent).replace("1e12]", "0.1, 0.2]"))
    words = ["sweep", str(file), "--sweep-dir", str(tmp_path / "sweep")]
    assert main(words) == 3
    err = capsys.readouterr().err
    assert err.startswith("phalanx sweep: the first 3 trials failed, the last one with: ")
    assert str(absent) in err
    assert facts_of(tmp_path / "sweep")["trials"] == [], "once it is mended, all are tried"


@pytest.mark.parametrize(
    ("message", "states"),
    [
        ("out of memory: 2.00 GiB more could not be allocated; try less", ["failed"] * 2),
        ("trial-000/run.json: no space left on device", ["running"]),  # nor for the next one
    ],
)
def test_a_trial_without_memory_fails_alone_and_a_full_disk_ends_the_sweep(
    message, states, tmp_path, monkeypatch
):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho 'phalanx train: {message}'\nexit 6\n")
    program.chmod(0o755)
    monkeypatch.setattr("phalanx.sweep.process.sys", SimpleNamespace(executable=str(program)))
    file = write_sweep(tmp_path, "preset: demo\nsearch: {batch-size: [64, 4096]}\nmethod: grid\n")
    assert main(["sweep", str(file), "--sweep-dir", str(tmp_path / "sweep")]) == 6
    trials = facts_of(tmp_path / "sweep")["trials"]
    assert [trial["state"] for trial in trials] == states
    assert message in (trials[0]["reason"] or message)


@pytest.mark.parametrize(
    "line", [b"\xff\xfe,1\n", b"one" + b",1" * 20 + b"\n", b"1" * 200_000 + b",1" * 20 + b"\n"]
)
def test_scores_that_are_damaged_are_refused_by_name(tmp_path, line):
    head = ",".join(SCORE_FIELDS).encode() + b"\n"
    (tmp_path / "validation.csv").write_bytes(head + b"1," * (len(SCORE_FIELDS) - 1) + b"1\n")
    assert len(read_trial_scores(tmp_path, "loss")) == 1
    (tmp_path / "validation.csv").write_bytes(head + line)
    with pytest.raises(CheckpointError, match=r"/validation\.csv: is damaged \("):
        read_trial_scores(tmp_path, "loss")


def test_two_processes_cannot_run_one_sweep(tmp_path):
    told = "another process is running this sweep; stop it first"
    with lock_sweep(tmp_path), pytest.raises(CheckpointError, match=told), lock_sweep(tmp_path):
        pass


def test_a_training_that_a_kill_left_behind_is_stopped_before_it_goes_on(tmp_path):
    log = open_trial_log(tmp_path, Trial(number=0, values={}), lambda: False)
    assert log is not None
    left = TrialProcess(["data", "bench", "--seconds", "60"], log)
    os.close(log)  # as if this process had been killed
    known = Trial(number=0, values={}, process=(socket.gethostname(), left.pid))
    time.sleep(0.3)
    assert left.wait() is None, "it is still at work"
    again = open_trial_log(tmp_path, known, lambda: False)
    assert again is not None and left.wait() is not None
    os.close(again)
    elsewhere = Trial(number=1, values={}, process=("elsewhere", 1))
    held_log = open_trial_log(tmp_path, elsewhere, lambda: False)
    with pytest.raises(
        CheckpointError, match="process 1 on elsewhere is still training this trial"
    ):
        open_trial_log(tmp_path, elsewhere, lambda: False)
    assert held_log is not None
    os.close(held_log)
