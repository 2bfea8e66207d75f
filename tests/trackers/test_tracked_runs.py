"""Runs that are tracked: what arrives, and what a resume adds to it."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from offline_wandb import read_records
from shown_numbers import READERS, Points

from phalanx.cli.main import main
from phalanx.report.records import read_logs, read_scores
from small_runs import run_phalanx, small_run, start_phalanx

OPTIONS = {"logs-per-epoch": 3, "keep": 20, "validation-frequency": 1, "seed": 7}
INSTALLED = [tracker for tracker in ("tensorboard", "wandb") if find_spec(tracker)]


@pytest.fixture(autouse=True, scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nobody's API keys, servers or settings."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
            patch.delenv(name)
        patch.setenv("HOME", str(home))
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{home / 'mlflow.db'}")
        yield


def rewind(run: Path) -> None:
    """As after a kill at the very end, with a checkpoint of long before."""
    (run / "summary.json").unlink()
    for checkpoint in sorted(run.glob("checkpoints/step-*"))[2:]:
        shutil.rmtree(checkpoint)


@pytest.fixture(scope="module")
def tracked(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was tracked to its end."""
    run = tmp_path_factory.mktemp("tracked") / "first-try"
    words = small_run(digits, run, wandb_project="mine", wandb_tags="a, b", **OPTIONS)
    assert main([*words, *(f"--{tracker}" for tracker in INSTALLED)]) == 0
    return run


def assert_shows(points: Points, run: Path) -> None:
    """Every log point and score of the records is shown once, with its value."""
    logs, scores = read_logs(run), read_scores(run)
    assert len(logs) > 5 and len(scores) > 1
    for name in ("loss", "lr", "grad_norm", "top1", "epoch"):
        wanted = [(row.step, pytest.approx(getattr(row, name), rel=1e-6)) for row in logs]
        assert points[f"train/{name}"] == wanted, name
    for name in ("top1", "loss", "scored"):
        wanted = [(row.step, pytest.approx(getattr(row, name), rel=1e-6)) for row in scores]
        assert points[f"valid/{name}"] == wanted, name
    best = [max(row.top1 for row in scores[: end + 1]) for end in range(len(scores))]
    assert [value for _, value in points["valid/best_top1"]] == pytest.approx(best)


def test_trackers_show_every_number_once_also_after_a_resume(tracked, tmp_path):
    if not INSTALLED:
        pytest.skip("no tracker is installed")
    run = tmp_path / "first-try"
    shutil.copytree(tracked, run, symlinks=True)
    before = {tracker: READERS[tracker](run) for tracker in INSTALLED}
    for tracker in INSTALLED:
        assert_shows(before[tracker], run)
        steps = [step for step, _ in before[tracker]["memory/host_percent"]]
        assert steps == [row.step for row in read_logs(run)], tracker
        assert all(0 < percent < 100 for _, percent in before[tracker]["memory/host_percent"])
    rewind(run)
    assert main(["train", "--resume", str(run)]) == 0
    for tracker in INSTALLED:
        after = READERS[tracker](run)
        assert_shows(after, run)
        # told before the kill, and not again: the clock would have shown something else
        assert after["train/images_per_second"] == before[tracker]["train/images_per_second"]
    if "wandb" in INSTALLED:
        assert_is_one_run(run, tracked)


def assert_is_one_run(run: Path, began_in: Path) -> None:
    """The offline files of both processes are one run of wandb, with the options of ours."""
    files = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    own_id, rows = json.loads((run / "trackers/wandb.json").read_text())["id"], []
    for file, folder in zip(files, (began_in, run), strict=True):
        records = read_records(file)
        ours = next(record.run for record in records if record.HasField("run"))
        config = {item.key: json.loads(item.value_json) for item in ours.config.update}
        assert ours.run_id == own_id
        assert (ours.project, ours.display_name, [*ours.tags]) == ("mine", "first-try", ["a", "b"])
        assert (config["seed"], config["run_folder"]) == (7, str(folder))
        rows += [record.history.step.num for record in records if record.HasField("history")]
    assert len(set(rows)) == len(rows), "rows of two files have the same place"


def test_track_shows_a_run_afterwards(tracked, tmp_path, capsys):
    pytest.importorskip("tensorboard")
    run = tmp_path / "run"
    shutil.copytree(tracked, run, ignore=lambda *_: ["tensorboard", "trackers", "wandb"])
    for _ in range(2):  # the second time there is nothing new
        assert main(["track", str(run), "--tensorboard"]) == 0
        assert capsys.readouterr().out == f"tensorboard: tensorboard --logdir {run}\n"
        points = READERS["tensorboard"](run)
        assert_shows(points, run)
    best = max(row.top1 for row in read_scores(run))
    assert points["result/best/top1"] == [(read_logs(run)[-1].step, pytest.approx(best))]


def test_track_wants_a_tracker(tracked, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(tracked, run, symlinks=True)
    words = ["track", str(run), *(f"--{tracker}=false" for tracker in INSTALLED)]
    assert main(words) == 2
    assert "name a tracker: --tensorboard, --wandb or --mlflow" in capsys.readouterr().err
    assert main(["track", str(tmp_path / "none"), "--tensorboard"]) == 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # its database warns of its own code
def test_mlflow_shows_every_number_once_also_after_a_resume(digits, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    run = tmp_path / "run"
    assert main([*small_run(digits, run, **OPTIONS), "--mlflow"]) == 0
    before = READERS["mlflow"](run)
    assert_shows(before, run)
    rewind(run)
    assert main(["train", "--resume", str(run)]) == 0
    after = READERS["mlflow"](run)
    assert_shows(after, run)
    assert after["train/images_per_second"] == before["train/images_per_second"]
    facts = json.loads((run / "trackers/mlflow.json").read_text())
    found = mlflow.tracking.MlflowClient(facts["uri"]).get_run(facts["id"])
    assert (found.info.status, found.info.run_name) == ("FINISHED", "run")
    assert (found.data.params["seed"], found.data.tags["run_folder"]) == ("7", str(run))


@pytest.mark.slow
def test_of_two_ranks_one_is_tracked(digits, tmp_path):
    pytest.importorskip("wandb")
    run = tmp_path / "run"
    words = small_run(digits, run, replicas=2, devices=2, **{**OPTIONS, "batch-size": 8})
    done = run_phalanx(*words, "--wandb")
    assert done.returncode == 0, done.stderr
    assert len([*run.glob("wandb/offline-run-*")]) == 1
    assert_shows(READERS["wandb"](run), run)


@pytest.mark.slow
def test_a_run_that_is_stopped_is_marked_so(digits, tmp_path):
    pytest.importorskip("wandb")
    run = tmp_path / "run"
    process = start_phalanx(*small_run(digits, run, epochs=2000), "--wandb")
    while not (run / "wandb").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 75, error
    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    kinds = [record.WhichOneof("record_type") for record in read_records(file)]
    assert "preempting" in kinds and "exit" in kinds
