"""--engine lightning: a run that Lightning's Trainer drives is the run of the native loop."""

import csv
import logging
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from phalanx.assemble.run_recorder import RunRecorder
from phalanx.cli.main import main
from phalanx.errors import ConfigError
from phalanx.lightning.package import import_lightning
from phalanx.plan import machine_choice
from small_runs import read_result, run_phalanx, small_run, start_phalanx

CLOCK_COLUMNS = {"images_per_second", "data_wait"}
RECORDS = ("metrics.jsonl", "validation.csv", "predictions.csv")


def read_training(run: Path) -> list[dict]:
    with (run / "training.csv").open() as file:
        return [
            {name: cell for name, cell in row.items() if name not in CLOCK_COLUMNS}
            for row in csv.DictReader(file)
        ]


def assert_same_run(a: Path, b: Path) -> None:
    assert read_result(a)["weights_sha256"] == read_result(b)["weights_sha256"]
    for name in RECORDS:
        assert (a / name).read_bytes() == (b / name).read_bytes(), name
    assert read_training(a) == read_training(b)
    names = [sorted(path.name for path in (run / "checkpoints").iterdir()) for run in (a, b)]
    assert names[0] == names[1]
    for key in ("steps", "images", "scored", "top1", "top5", "best", "checkpoint"):
        assert read_result(a)[key] == read_result(b)[key], key


@pytest.fixture(scope="module")
def native(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the native loop: 18 steps, scored after each epoch."""
    run = tmp_path_factory.mktemp("native") / "run"
    assert main(small_run(digits, run)) == 0
    return run


def send_at_step(monkeypatch: pytest.MonkeyPatch, step: int, number: signal.Signals) -> None:
    """Let this process get a signal while it finishes that step."""
    on_step = RunRecorder.on_step

    def on_step_with_signal(self: RunRecorder, now: int) -> None:
        if now == step:
            os.kill(os.getpid(), number)
        on_step(self, now)

    monkeypatch.setattr(RunRecorder, "on_step", on_step_with_signal)


def test_weights_records_scores_and_checkpoints_are_those_of_the_native_loop(
    native, digits, tmp_path, capfd, caplog
):
    caplog.set_level(logging.INFO)
    run = tmp_path / "run"
    assert main(small_run(digits, run, engine="lightning")) == 0
    assert_same_run(native, run)
    out, err = capfd.readouterr()
    assert err == caplog.text == "" and "Trainer" not in out  # nothing but what the run says


FOLDED = {"replicas": 4, "batch_size": 1, "steps": 50}
RECIPE = {"ema_decay": 0.9, "mixup_alpha": 0.2, "precision": "16.16"}
RECIPE |= {"gradient_accumulation": 2, "batch_size": 2, "steps": 9}


@pytest.mark.parametrize("options", [FOLDED, RECIPE], ids=["folded", "recipe"])
def test_folding_accumulation_precision_and_averages_are_the_same(digits, tmp_path, options):
    found = set()
    for engine in ("native", "lightning"):
        run = tmp_path / engine
        given = {**options, "validation": "false", "ckpts_per_epoch": 0}
        assert main(small_run(digits, run, engine=engine, **given)) == 0
        found.add(read_result(run)["weights_sha256"])
    assert len(found) == 1


def test_a_signal_saves_and_either_engine_goes_on_from_there(
    native, digits, tmp_path, monkeypatch, capfd
):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        send_at_step(patch, 7, signal.SIGTERM)
        assert main(small_run(digits, run, engine="lightning")) == 75
    assert "stopped after step 8 of 18; everything is saved" in capfd.readouterr().err
    with monkeypatch.context() as patch:
        send_at_step(patch, 13, signal.SIGINT)
        assert main(["train", "--resume", str(run)]) == 75
    assert "stopped after step 14 of 18" in capfd.readouterr().err
    assert main(["train", "--resume", str(run), "--engine", "native"]) == 0
    assert_same_run(native, run)


def test_a_signal_in_the_last_step_lets_the_run_finish(digits, tmp_path, monkeypatch):
    send_at_step(monkeypatch, 2, signal.SIGTERM)
    assert main(small_run(digits, tmp_path / "run", engine="lightning", steps=2)) == 0


def test_variables_that_limit_a_trainer_do_not_cut_a_run(digits, tmp_path, monkeypatch):
    monkeypatch.setenv("PL_TRAINER_LIMIT_TRAIN_BATCHES", "1")
    run = tmp_path / "run"
    assert main(small_run(digits, run, engine="lightning", steps=3, validation="false")) == 0
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
    assert os.environ["PL_TRAINER_LIMIT_TRAIN_BATCHES"] == "1"


def test_a_loss_that_is_no_number_ends_the_run_as_ever(digits, tmp_path, capfd):
    words = small_run(digits, tmp_path / "run", engine="lightning", lr=1e30, warmup_epoch="0st")
    assert main(words) == 5
    assert "its images were" in capfd.readouterr().err


def test_without_lightning_the_install_line_is_told_before_anything_is_written(
    digits, tmp_path, monkeypatch, capfd
):
    def find_all_but_lightning(name: str) -> object:
        return None if "lightning" in name else find_spec(name)

    monkeypatch.setattr(machine_choice, "find_spec", find_all_but_lightning)
    run = tmp_path / "run"
    assert main(small_run(digits, run, engine="lightning")) == 2
    assert capfd.readouterr().err == (
        "phalanx train: --engine lightning: PyTorch Lightning is not installed: pip install "
        "'phalanx[lightning]'; or train with --engine native, to the same bits\n"
    )
    assert not run.exists()


def test_a_lightning_that_cannot_be_imported_is_no_bug_of_ours(tmp_path, monkeypatch):
    reason = "operator torchvision::nms does not exist"  # what torch says of another's torchvision
    (tmp_path / "lightning").mkdir()
    (tmp_path / "lightning" / "__init__.py").write_text(f"raise RuntimeError({reason!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("lightning.pytorch", "lightning", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ConfigError) as caught:
        import_lightning()
    assert f"lightning.pytorch: is installed, but cannot be imported ({reason})" in str(
        caught.value
    )


def test_a_run_is_scored_where_lightning_is_missing(digits, tmp_path, monkeypatch):
    run = tmp_path / "run"
    assert main(small_run(digits, run, engine="lightning", steps=1)) == 0
    monkeypatch.setattr(machine_choice, "find_spec", lambda name: None)
    assert main(["validate", str(run)]) == 0
    assert main(["train", "--resume", str(run)]) == 0  # finished: nothing is trained


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_gets_a_signal_says_how_to_continue(digits, tmp_path, number):
    run = tmp_path / "run"
    process = start_phalanx(*small_run(digits, run, engine="lightning", epochs=2000))
    while not (run / "metrics.jsonl").exists():
        assert process.poll() is None, process.communicate()
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75
    assert f"{number.name}: finishing this step and saving" in err
    assert f"phalanx train --resume {run}" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [{"replicas": 2}, {"pipeline": "true", "pipeline_splits": "layer2/0", "batch_size": 4,
                       "gradient_accumulation": 2}],
    ids=["replicas", "stages"],
)  # fmt: skip
def test_two_ranks_train_the_same_with_both_engines(digits, tmp_path, layout):
    found = set()
    for engine in ("native", "lightning"):
        words = small_run(digits, tmp_path / engine, engine=engine, devices=2, **layout)
        done = run_phalanx(*words)
        assert done.returncode == 0, done.stderr
        found.add(read_result(tmp_path / engine)["weights_sha256"])
    assert len(found) == 1
