"""Runs whose model is cut into stages, from the outside: kills, moves and scores."""

import pytest
from launched_runs import Launched, assert_same_result, kill
from test_equal_layouts import stop_at_step

from small_runs import make_digits, read_result, run_phalanx, small_run

OPTIONS = {
    "epochs": 12,
    "batch_size": 2,
    "replicas": 2,
    "gradient_accumulation": 4,
    "pipeline_splits": "layer2/0",
    "determinism": "strict",
    "threads": 1,
    "ema_decay": 0.9,
    "drop_path": 0.2,
    "ckpts_per_epoch": 1,
}
pytestmark = pytest.mark.slow


def test_a_run_of_two_replicas_in_two_stages_moves_to_one_device(digits, tmp_path):
    folded, moved = tmp_path / "folded", tmp_path / "moved"
    done = run_phalanx(*small_run(digits, folded, **OPTIONS, devices=1))
    assert done.returncode == 0, done.stderr
    stop_at_step(small_run(digits, moved, **OPTIONS, devices=4), moved, 10)
    stop_at_step(["train", "--resume", str(moved), "--devices=2"], moved, 30)
    done = run_phalanx("train", "--resume", moved, "--devices=1")
    assert done.returncode == 0, done.stderr
    assert_same_result(moved, folded)
    newest = sorted((folded / "checkpoints").iterdir())[-1].relative_to(folded)
    for path in (folded / newest).glob("*.safetensors"):
        assert path.read_bytes() == (moved / newest / path.name).read_bytes()


def test_a_stage_that_is_killed_leaves_no_trace(digits, tmp_path):
    given = {**OPTIONS, "replicas": 1, "pipeline_schedule": "Interleaved"}
    straight, run = tmp_path / "straight", tmp_path / "run"
    done = run_phalanx(*small_run(digits, straight, **given, devices=1))
    assert done.returncode == 0, done.stderr
    launched = Launched(*small_run(digits, run, **given, devices=2), run=run)
    for rank, step in ((1, 5), (0, 20)):
        launched.wait_for_steps(step)
        kill(launched.rank(rank))
    done = launched.end()
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("was killed by SIGKILL; all 2 ranks start again") == 2
    assert_same_result(run, straight)


def test_scores_in_stages_are_those_of_the_whole_model(tmp_path):
    data = make_digits(tmp_path / "data", train=96, valid=130)
    given = {**OPTIONS, "epochs": 2, "valid_batch_size": 32, "devices": 4}
    gathered, staged = tmp_path / "gathered", tmp_path / "staged"
    for run, more in ((gathered, {}), (staged, {"pipeline_validation_model": "true"})):
        done = run_phalanx(*small_run(data, run, **given, **more))
        assert done.returncode == 0, done.stderr
    assert_same_result(staged, gathered)
    assert (staged / "predictions.csv").read_bytes() == (gathered / "predictions.csv").read_bytes()


def test_a_fork_in_16_bits_begins_with_all_its_stages(digits, tmp_path):
    given = {**OPTIONS, "epochs": 1, "replicas": 1, "precision": "16.16"}
    run, fork = tmp_path / "run", tmp_path / "fork"
    done = run_phalanx(*small_run(digits, run, **given, devices=2))
    assert done.returncode == 0, done.stderr
    done = run_phalanx(
        *("train", "--fork", run, "--run-dir", fork, "--epochs", "2", "--devices", "2")
    )
    assert done.returncode == 0, done.stderr
    before, after = (read_result(path)["numerics"] for path in (run, fork))
    assert before["updates_lost"] is not None and after["updates_lost"] is not None
