"""Promise 2: a run that was stopped goes on bit for bit."""

import csv
import json
import shlex
import signal
import time
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.errors import CheckpointError, ConfigError, DataError
from small_photos import write_photos
from small_runs import (
    interrupt_twice,
    make_digits,
    read_result,
    run_phalanx,
    small_run,
    start_phalanx,
)

CLOCK_COLUMNS = {"images_per_second", "data_wait"}


def training_rows(run: Path) -> list[dict]:
    with (run / "training.csv").open() as file:
        return [
            {name: cell for name, cell in row.items() if name not in CLOCK_COLUMNS}
            for row in csv.DictReader(file)
        ]


def assert_same_run(a: Path, b: Path) -> None:
    assert read_result(a)["weights_sha256"] == read_result(b)["weights_sha256"]
    assert (a / "metrics.jsonl").read_bytes() == (b / "metrics.jsonl").read_bytes()
    assert (a / "validation.csv").read_bytes() == (b / "validation.csv").read_bytes()
    assert (a / "predictions.csv").read_bytes() == (b / "predictions.csv").read_bytes()
    assert training_rows(a) == training_rows(b)
    for key in ("steps", "images", "scored", "top1", "top5", "best", "checkpoint"):
        assert read_result(a)[key] == read_result(b)[key], key


@pytest.fixture(scope="module")
def straight(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that never stopped."""
    run = tmp_path_factory.mktemp("straight") / "run"
    assert main(small_run(digits, run)) == 0
    return run


def stop_at_step(words: list[str], run: Path, step: int, number: signal.Signals) -> None:
    """Start a process and send it a signal once its metrics show that step."""
    process = start_phalanx(*words)
    metrics = run / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, (process.returncode, out, err)
    assert "stopped after step" in err


# log points only at the end of each epoch: the sums since the last one must survive the stop
RARELY_LOGGED = {"epochs": 60, "logs_per_epoch": "1", "ckpts_per_epoch": "1/2"}


@pytest.fixture(scope="module")
def rarely_logged(digits, tmp_path_factory):
    run = tmp_path_factory.mktemp("rarely") / "whole"
    assert main(small_run(digits, run, **RARELY_LOGGED)) == 0
    return run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_resume_is_the_same_as_never_stopping(
    rarely_logged, digits, tmp_path, number
):
    run = tmp_path / "run"
    stop_at_step(small_run(digits, run, **RARELY_LOGGED), run, 18, number)
    assert not (run / "summary.json").exists()
    assert main(["train", "--resume", str(run)]) == 0
    assert_same_run(rarely_logged, run)


def test_a_second_sigint_leaves_at_once(digits, tmp_path):
    run = tmp_path / "run"
    # one step of this takes a minute, so the first signal is still being honoured
    process = start_phalanx(
        *small_run(digits, run, batch_size=8, gradient_accumulation=60_000, steps=5)
    )
    deadline = time.monotonic() + 60
    while not (run / "log.txt").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(1.0)
    interrupt_twice(process)
    assert process.returncode == 130
    assert not list((run / "checkpoints").glob("step-*"))


def test_resuming_a_run_without_a_checkpoint_starts_at_step_0(straight, digits, tmp_path):
    run = tmp_path / "run"
    words = small_run(digits, run)
    process = start_phalanx(*words)
    while not (run / "run.json").exists():  # before torch is imported
        time.sleep(0.001)
    process.kill()
    process.communicate()
    assert (run / "config.yaml").exists()
    assert not (run / "checkpoints").exists()
    assert main(["train", "--resume", str(run)]) == 0
    assert_same_run(straight, run)


def test_a_finished_run_remakes_its_report(straight, capsys):
    before = (straight / "metrics.jsonl").read_bytes()
    (straight / "report.html").unlink()
    assert main(["train", "--resume", str(straight)]) == 0
    assert (straight / "report.html").exists()
    assert (straight / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_takes_no_other_options(straight, capsys):
    assert main(["train", "--resume", str(straight), "--epochs", "9"]) == 2
    told = capsys.readouterr().err
    assert (
        "--epochs 9: the run was started with --epochs 3, and a resume cannot change that" in told
    )
    assert (
        f"new run from this one: phalanx train --fork {straight} --run-dir NEW --epochs 9" in told
    )
    words = ["train", "--resume", str(straight), "--run-dir", "other", "--epochs", "9"]
    assert main(words) == 2
    way_out = f"phalanx train --fork {straight} --run-dir other --epochs 9\n"
    assert capsys.readouterr().err.endswith(way_out)
    assert main(["train", "--resume", str(straight), "--keep", "5"]) == 0


def test_a_run_killed_before_its_summary_finishes_the_same(straight, digits, tmp_path):
    run = tmp_path / "run"
    assert main(small_run(digits, run)) == 0
    (run / "summary.json").unlink()
    assert main(["train", "--resume", str(run)]) == 0
    assert_same_run(straight, run)


def test_a_resume_may_change_how_but_not_what(digits, tmp_path, capsys):
    run = tmp_path / "run"
    main(small_run(digits, run))
    (run / "summary.json").unlink()
    assert main(["train", "--resume", str(run), "--lr", "0.2", "--seed", "4"]) == 2
    message = capsys.readouterr().err
    assert (
        "--lr 0.2: the run was started with --lr 0.05, and a resume cannot change that" in message
    )
    assert "--seed 4: the run was started with --seed 0" in message
    assert "--fork" in message and "--lr 0.2 --seed 4" in message
    assert main(["train", "--resume", str(run), "--keep", "7", "--lr", "0.05"]) == 0
    assert "keep: 7" in (run / "config.yaml").read_text()
    assert json.loads((run / "run.json").read_text())["origins"]["keep"] == "flag at resume"


def test_a_resume_names_what_the_run_has_in_place_of_an_option(digits, tmp_path, capsys):
    run = tmp_path / "run"
    main(small_run(digits, run, steps=2))
    for words, then in [
        ("--epochs 2", "with --steps 2"),
        ("--lr-per-image 0.001", "with --lr 0.05"),
        ("--drop-path 0.5", "without it"),
        ("--zero-init-residual true", "with --zero-init-residual false"),
    ]:
        capsys.readouterr()
        assert main(["train", "--resume", str(run), *words.split()]) == 2
        said = f"phalanx train: {words}: the run was started {then}, and a resume cannot change"
        err = capsys.readouterr().err
        assert err.startswith(said) and "None" not in err and err.count("\n") == 2


def test_a_fork_is_not_suggested_for_another_network(digits, tmp_path, capsys):
    run = tmp_path / "run"
    main(small_run(digits, run, steps=2))
    capsys.readouterr()
    words = ["--resume", str(run), "--shortcut-type", "C", "--lr", "0.2"]
    assert main(["train", *words]) == 2
    err = capsys.readouterr().err
    assert "--fork" not in err
    assert err.endswith("--shortcut-type: the run's weights fit no other network; leave it out\n")


def test_threads_are_the_runs_own_at_a_resume(digits, tmp_path, capsys):
    run = tmp_path / "run"
    main(small_run(digits, run, steps=2))
    (run / "summary.json").unlink()
    threads = json.loads((run / "run.json").read_text())["chosen"]["threads"]
    capsys.readouterr()
    other = str(threads + 1)
    assert main(["train", "--resume", str(run), "--threads", other]) == 2
    said = f"--threads {other}: the run was started with --threads {threads}, and a resume cannot"
    assert said in capsys.readouterr().err
    assert main(["train", "--resume", str(run), "--threads", str(threads)]) == 0
    assert main(["train", "--resume", str(run), "--threads", other]) == 2, "nor of a finished run"


def test_a_resume_refuses_changed_data(tmp_path, capsys):
    data = make_digits(tmp_path / "data", train=96, valid=40)
    run = tmp_path / "run"
    main(small_run(data, run, steps=2))
    (run / "summary.json").unlink()
    make_digits(data, train=96, valid=40, seed=2)
    assert main(["train", "--resume", str(run)]) == DataError.exit_code
    assert "its train data has changed: sha256" in capsys.readouterr().err
    make_digits(data, train=90, valid=40)
    assert main(["train", "--resume", str(run)]) == DataError.exit_code
    assert "images 96 then, 90 now" in capsys.readouterr().err


def test_two_processes_cannot_train_one_run(digits, tmp_path):
    run = tmp_path / "run"
    words = small_run(digits, run, epochs=2000, ckpts_per_epoch=0)
    process = start_phalanx(*words)
    while not (run / "metrics.jsonl").exists():
        time.sleep(0.01)
    second = run_phalanx("train", "--resume", run)
    process.kill()
    process.communicate()
    assert second.returncode == CheckpointError.exit_code
    assert f"process {process.pid}" in second.stderr


def test_metrics_hold_no_clock(straight):
    lines = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 18 + 3
    for line in lines:
        assert set(line) <= {"step", "epoch", "lr", "loss", "grad_norm", "top1", "valid"}


def test_the_thread_count_is_stored_and_reused(digits, tmp_path):
    run = tmp_path / "run"
    main(small_run(digits, run, steps=2))
    facts = json.loads((run / "run.json").read_text())
    facts["chosen"]["threads"] = 1
    (run / "run.json").write_text(json.dumps(facts))
    (run / "summary.json").unlink()
    import torch

    before = torch.get_num_threads()
    try:
        assert main(["train", "--resume", str(run)]) == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_a_fork_goes_on_with_changed_options(straight, digits, tmp_path, capsys):
    run = tmp_path / "fork"
    words = ["train", "--fork", str(straight), "--run-dir", str(run), "--epochs", "5"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "forked from" in said and "30 steps instead of 18" in said
    facts = json.loads((run / "run.json").read_text())
    assert facts["parent"]["step"] == 18
    assert facts["parent"]["weights_sha256"] == read_result(straight)["weights_sha256"]
    assert facts["origins"]["epochs"] == "flag"
    assert read_result(run)["steps"] == 30
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps[0] == 18  # the score of what it starts from
    assert "--resume" not in facts["command"]


def test_a_fork_killed_before_its_first_checkpoint_starts_from_its_parent(
    straight, digits, tmp_path
):
    run, again = tmp_path / "fork", tmp_path / "again"
    main(["train", "--fork", str(straight), "--run-dir", str(run), "--epochs", "4"])
    main(["train", "--fork", str(straight), "--run-dir", str(again), "--epochs", "4"])
    import shutil

    shutil.rmtree(again / "checkpoints")
    (again / "summary.json").unlink()
    assert main(["train", "--resume", str(again)]) == 0
    assert_same_run(run, again)


def test_a_fork_keeps_progress_in_images(straight, tmp_path):
    run = tmp_path / "fork"
    words = ["train", "--fork", str(straight), "--run-dir", str(run)]
    assert main([*words, "--epochs", "4", "--batch-size", "32"]) == 0
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert min(steps) == 9  # 18 steps of 16 images
    assert read_result(run)["steps"] == 12


def test_a_fork_needs_something_left_to_train(straight, tmp_path, capsys):
    words = ["train", "--fork", str(straight), "--run-dir", str(tmp_path / "fork")]
    assert main(words) == ConfigError.exit_code
    assert "nothing is left to train; raise --epochs above 3" in capsys.readouterr().err
    assert main([*words, "--steps", "2"]) == ConfigError.exit_code
    assert "of 2, so nothing is left to train; raise --steps above " in capsys.readouterr().err
    assert not (tmp_path / "fork").exists()


def test_a_fork_to_other_classes_says_how_to_use_the_weights(straight, tmp_path, capsys):
    photos, run = write_photos(tmp_path / "photos"), tmp_path / "new"
    words = [f"--data-dir={photos}", "--data=folder", f"--run-dir={run}", "--workers=0"]
    assert main(["train", "--fork", str(straight), *words, "--epochs=9"]) == ConfigError.exit_code
    said = capsys.readouterr().err
    assert "the checkpoint has 10 classes, this data has 3; a fork needs the same number" in said
    way_out = shlex.split(said.partition("from its weights: ")[2])
    assert main(["train", "mnist-resnet8", *words, *way_out, "--steps=1"]) == 0


def test_an_edited_config_cannot_change_the_maths(digits, tmp_path, capsys):
    run = tmp_path / "run"
    main(small_run(digits, run, steps=4))
    (run / "summary.json").unlink()
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("lr: 0.05", "lr: 0.5"))
    assert main(["train", "--resume", str(run)]) == ConfigError.exit_code
    assert "--lr 0.5: the run was started with --lr 0.05" in capsys.readouterr().err
    (run / "config.yaml").write_text("lr: [1\n")
    assert main(["train", "--resume", str(run)]) == ConfigError.exit_code
    assert "config.yaml" in capsys.readouterr().err


def test_a_fork_keeps_its_model_and_leaves_no_folder_when_refused(straight, tmp_path, capsys):
    words = ["train", "--fork", str(straight), "--run-dir", str(tmp_path / "fork"), "--epochs", "5"]
    assert main([*words, "--model", "resnet20"]) == ConfigError.exit_code
    assert "--model: the checkpoint was trained with resnet8" in capsys.readouterr().err
    assert not (tmp_path / "fork").exists()


def test_a_finished_run_needs_no_data(tmp_path, capsys):
    data = make_digits(tmp_path / "data", train=96, valid=40)
    run = tmp_path / "run"
    main(small_run(data, run, steps=4))
    for file in data.iterdir():
        file.unlink()
    assert main(["train", "--resume", str(run)]) == 0
    assert "report:" in capsys.readouterr().out


class StopOnCall:
    """Says that a signal has come from the n-th time it is asked on."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize("calls", [0, 1, 2, 3, 4, 5, 6, 7, 8])
def test_a_stop_at_any_point_of_the_loop_loses_no_score(
    straight, digits, tmp_path, monkeypatch, calls
):
    """The loop asks for a signal before, during and after scoring: each answer must be safe."""
    import phalanx.assemble.train as assemble_train

    run = tmp_path / "run"
    words = small_run(digits, run)
    for _ in range(60):  # every process is stopped soon after it began
        monkeypatch.setattr(assemble_train, "StopRequest", lambda: StopOnCall(calls))
        code = main(words)
        words = ["train", "--resume", str(run)]
        if code == 0:
            break
        assert code == 75
        if calls < 2:  # no progress is possible: the next one may run
            monkeypatch.undo()
    else:
        monkeypatch.undo()
        assert main(words) == 0
    assert_same_run(straight, run)


@pytest.mark.parametrize("ema_decay", [0, 0.9])
def test_a_kill_before_the_last_score_was_made_again(digits, tmp_path, ema_decay):
    run = tmp_path / "run"
    assert main(small_run(digits, run, steps=4, ema_decay=ema_decay)) == 0
    before = read_result(run)
    (run / "summary.json").unlink()
    for name in ("metrics.jsonl", "validation.csv"):  # as the first resume cuts them
        lines = (run / name).read_text().splitlines(keepends=True)
        (run / name).write_text("".join(lines[:-1]))
    assert main(["train", "--resume", str(run)]) == 0
    after = read_result(run)
    assert (after["weights_sha256"], after["top1"]) == (before["weights_sha256"], before["top1"])
