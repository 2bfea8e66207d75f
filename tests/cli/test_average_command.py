"""`phalanx average` on real runs: what it writes, what it scores, what it refuses."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from phalanx.cli.main import main
from phalanx.engine.checkpoint_store import (
    find_newest_checkpoint,
    list_checkpoints,
    prune_checkpoints,
    read_facts,
)
from phalanx.engine.state import hash_weights
from phalanx.report.folder import open_run
from small_runs import read_result, small_run

CONFIG, CHECKPOINT = 2, 4
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory) -> Path:
    """A finished run of 18 steps with its last four checkpoints: 12, 14, 16 and 18."""
    run = tmp_path_factory.mktemp("average") / "run"
    assert main(small_run(digits, run, keep=4)) == 0
    return run


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy to work on."""
    return shutil.copytree(trained, tmp_path / "run", symlinks=True)


def weights_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "weights.safetensors")


def mean_of(checkpoints: list[Path], name: str) -> torch.Tensor:
    return torch.stack([weights_in(one)[name].double() for one in checkpoints]).mean(0)


def average(capsys, run: Path, *words: str) -> dict:
    capsys.readouterr()
    assert main(["average", str(run), "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, run: Path, *words: str, code: int) -> str:
    capsys.readouterr()
    assert main(["average", str(run), *words]) == code
    assert not (run / "checkpoints" / "average").exists()
    return capsys.readouterr().err


def test_the_mean_of_the_last_checkpoints_is_written_and_scored(run, capsys):
    last = list_checkpoints(run / "checkpoints")[-3:]
    told = average(capsys, run, "--weight-avg-n", "3")
    made = run / "checkpoints" / "average"
    found = weights_in(made)
    for name, tensor in found.items():
        if name.endswith("num_batches_tracked"):
            assert torch.equal(tensor, weights_in(last[-1])[name])
        else:
            expected = mean_of(last, name)
            torch.testing.assert_close(tensor.double(), expected, rtol=1e-7, atol=1e-9)
    assert told["averaged"]["steps"] == [14, 16, 18]
    assert told["average"]["checkpoint"] == str(made)
    assert told["newest"]["top1"] == read_result(run)["top1"]
    facts = read_facts(made)
    assert facts["averaged"] == told["averaged"]
    assert facts["weights_sha256"] == hash_weights(found)


def test_a_checkpoint_that_was_kept_for_being_the_best_is_not_averaged(run, capsys):
    shelf = run / "checkpoints"
    for checkpoint in list_checkpoints(shelf):  # 14 is the best, 16 was pruned
        if checkpoint.name not in ("step-00000014", "step-00000018"):
            shutil.rmtree(checkpoint)
    shutil.copytree(shelf / "step-00000018", shelf / "step-00000017")  # saved at a stop
    assert average(capsys, run, "--weight-avg-n=-1")["averaged"]["steps"] == [17, 18]
    assert average(capsys, run)["averaged"]["steps"] == [17, 18]
    shutil.rmtree(shelf / "average")
    told = refused(capsys, run, "--weight-avg-n", "3", code=CONFIG)
    assert "checkpoints holds 2 checkpoints to average, 3 are needed" in told


def test_the_average_is_scored_again_by_validate(run, capsys):
    told = average(capsys, run, "--weight-avg-n", "4")
    assert main(["validate", str(run / "checkpoints" / "average"), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    for name in ("step", "scored", "top1", "top5", "loss", "interval95"):
        assert again[name] == told["average"][name]
    assert told["average"]["loss"] != told["newest"]["loss"]


def test_the_report_shows_the_average_beside_the_newest(run, capsys):
    before = (run / "report.html").read_text()
    told = average(capsys, run)
    page = (run / "report.html").read_text()
    assert "top-1 of the average" in page and "top-1 of the average" not in before
    assert f"<b>{told['average']['top1']:.2%}</b>" in page
    assert f"the newest {told['newest']['top1']:.2%}" in page


def test_newer_checkpoints_count_as_the_decay_says(run, capsys):
    average(capsys, run, "--weight-avg-strategy", "exponential", "--weight-avg-exp-decay", "0.25")
    expected = None
    for checkpoint in list_checkpoints(run / "checkpoints"):
        now = weights_in(checkpoint)["fc.weight"].double()
        expected = now if expected is None else 0.25 * expected + 0.75 * now
    found = weights_in(run / "checkpoints" / "average")["fc.weight"]
    torch.testing.assert_close(found.double(), expected, rtol=1e-7, atol=1e-9)


def test_two_lines_say_both_scores(run, capsys):
    capsys.readouterr()
    assert main(["average", str(run), "--weight-avg-n=-1"]) == 0
    first, newest, mean = capsys.readouterr().out.splitlines()
    there = [int(path.name.removeprefix("step-")) for path in list_checkpoints(run / "checkpoints")]
    steps = ", ".join(map(str, there))
    assert first == f"mean of {len(there)} checkpoints: steps {steps}"
    last = (run / "checkpoints" / "step-00000018").resolve()
    assert newest.startswith(f"{last} (the newest): top-1 ")
    assert mean.startswith(f"{run / 'checkpoints' / 'average'}: top-1 ")


def test_statistics_anew_change_the_statistics_alone(run, capsys):
    average(capsys, run)
    plain = weights_in(run / "checkpoints" / "average")
    told = average(capsys, run, "--reestimate-norms", "3")
    fresh = weights_in(run / "checkpoints" / "average")
    for name, tensor in fresh.items():
        assert torch.equal(tensor, plain[name]) != name.endswith(STATISTICS), name
    counters = {int(t) for n, t in fresh.items() if n.endswith("num_batches_tracked")}
    assert counters == {3}
    assert told["averaged"]["norm_steps"] == 3


def test_the_average_is_no_step_of_the_run(run, capsys):
    average(capsys, run)
    shelf = run / "checkpoints"
    assert find_newest_checkpoint(shelf).name == "step-00000018"
    prune_checkpoints(shelf, keep=1, scores={})
    assert sorted(path.name for path in shelf.iterdir()) == ["average", "best", "step-00000018"]


def test_a_fork_begins_with_the_average(run, tmp_path, capsys):
    average(capsys, run)
    made, fork = run / "checkpoints" / "average", tmp_path / "fork"
    words = ["train", "--fork", str(made), "--run-dir", str(fork), "--steps", "19", "--lr", "0"]
    assert main(words) == 0
    found = weights_in(find_newest_checkpoint(fork / "checkpoints"))
    for name, tensor in weights_in(made).items():
        assert name.endswith(STATISTICS) or torch.equal(tensor, found[name]), name


# --- refused ---


def test_more_checkpoints_than_exist_are_refused_with_the_way_out(run, capsys):
    there = len(list_checkpoints(run / "checkpoints"))
    told = refused(capsys, run, "--weight-avg-n", "40", code=CONFIG)
    assert told == (
        f"phalanx average: --weight-avg-n 40: {run}/checkpoints holds {there} checkpoints to "
        f"average, 40 are needed; give --weight-avg-n {there}, or train with --keep 40 "
        "and a --ckpts-per-epoch that saves as many\n"
    )


def test_a_run_without_checkpoints_is_refused(run, capsys):
    shutil.rmtree(run / "checkpoints")
    assert "the run has no checkpoint; it is finished" in refused(capsys, run, code=CHECKPOINT)
    (run / "summary.json").unlink()
    way_out = f"wait for one while it is trained, else continue it: {open_run(run).resume_command}"
    assert refused(capsys, run, code=CHECKPOINT).endswith(f"; {way_out}\n")


def test_a_run_that_is_being_trained_is_left_alone(run, capsys):
    with open_run(run).lock():
        assert "is being trained by process" in refused(capsys, run, code=CHECKPOINT)


def test_a_damaged_checkpoint_is_named(run, capsys):
    damaged = list_checkpoints(run / "checkpoints")[-2] / "weights.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert str(damaged) in refused(capsys, run, code=CHECKPOINT)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--weight-avg-strategy", "ema"],
            "--weight-avg-strategy ema: choose from mean, exponential",
        ),
        (
            ["--weight-avg-exp-decay", "2"],
            "--weight-avg-exp-decay 2: expected a number from 0 to bel",
        ),
        (["--weight-avg-exp-decay", "x"], "--weight-avg-exp-decay: expected a number, got 'x'"),
        (["--weight-avg-n", "1.5"], "--weight-avg-n: expected a whole number, got '1.5'"),
        (
            ["--weight-avg-n", "0"],
            "--weight-avg-n 0: expected 1 or more checkpoints, or -1 for all",
        ),
        (["--reestimate-norms", "19"], "--reestimate-norms 19: the run has 18 training steps"),
        (["--weight-avg-N", "x"], "--weight-avg-n: expected a whole number, got 'x'"),
    ],
)
def test_what_cannot_be_is_told(words, told, run, capsys):
    assert told in refused(capsys, run, *words, code=CONFIG)


def test_a_network_without_batch_norm_has_no_statistics(digits, tmp_path, capsys):
    run = tmp_path / "grouped"
    grouped = {"norm_type": "group", "norm_num_groups": 4, "steps": 4}
    assert main(small_run(digits, run, **grouped)) == 0
    told = refused(capsys, run, "--reestimate-norms", "2", code=CONFIG)
    assert "as it was trained has no batch norm" in told


WITHOUT_TORCH = r"""
import sys
from phalanx.cli.main import main

code = main(sys.argv[1:])
assert "torch" not in sys.modules, "torch was imported"
print(code)
"""


@pytest.mark.parametrize("words", [["--weight-avg-n", "40"], ["--reestimate-norms", "19"]])
def test_mistakes_are_told_before_torch_is_imported(words, trained):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "average", str(trained), *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"{CONFIG}\n", done.stderr


def test_a_training_averages_its_last_checkpoints_and_keeps_them(digits, tmp_path, capsys):
    ended, plain = tmp_path / "ended", tmp_path / "plain"
    how = {"weight_avg_strategy": "exponential", "weight_avg_exp_decay": 0.5, "weight_avg_N": 3}
    assert main(small_run(digits, ended, **how)) == 0
    assert "exponential of 3 checkpoints: top-1 " in capsys.readouterr().out
    assert len(list_checkpoints(ended / "checkpoints")) >= 3, "whatever --keep says"
    assert main(small_run(digits, plain, keep=9)) == 0
    words = ["--weight-avg-strategy=exponential", "--weight-avg-exp-decay=0.5", "--weight-avg-n=3"]
    assert main(["average", str(plain), *words]) == 0
    files = [run / "checkpoints/average/weights.safetensors" for run in (ended, plain)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert (ended / "average.json").exists()


def test_a_training_that_would_average_too_many_is_refused(digits, tmp_path, capsys):
    asked = {"weight_avg_strategy": "mean", "weight_avg_n": 10}
    assert main(small_run(digits, tmp_path / "run", **asked)) == CONFIG
    told = capsys.readouterr().err
    assert "10 checkpoints are needed and the run makes 9; give --weight-avg-n 9, or" in told


def test_an_average_is_not_scored_where_the_run_is_not(tmp_path, capsys):
    for place in range(6):
        image = tmp_path / "data/train" / "ab"[place % 2] / f"{place}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 30), (40 * place, 90, 0)).save(image)
    run = tmp_path / "run"
    words = ["--data=folder", f"--data-dir={tmp_path / 'data'}", "--model=resnet8", "--workers=0"]
    words += ["--image-size=16", "--batch-size=2", "--epochs=2", "--validation-mode=none"]
    assert main(["train", *words, f"--run-dir={run}", "--weight-avg-strategy=mean"]) == 0
    told = capsys.readouterr().out
    assert "\nmean of 2 checkpoints: not scored\ntrained 6 steps; nothing was scored\n" in told
    assert (run / "report.html").exists() and not (run / "average.json").exists()
    assert main(["average", str(run)]) == 0
    path = run / "checkpoints/average"
    last = f"{path}: not scored (--validation-mode none)"
    assert capsys.readouterr().out.splitlines() == ["mean of 2 checkpoints: steps 3, 6", last]
    assert average(capsys, run)["average"] == {"checkpoint": str(path)}
