"""`phalanx validate --all`: what it scores beside checkpoints, and what it says without any."""

import csv
import json
import shutil
from pathlib import Path

import pytest

from phalanx.cli.main import main
from small_runs import small_run

CHECKPOINT = 4


@pytest.fixture(scope="module")
def averaged(digits, tmp_path_factory) -> Path:
    """A run of 18 steps that keeps a live average, with checkpoints 6, 12 and 18."""
    run = tmp_path_factory.mktemp("validate") / "run"
    assert main(small_run(digits, run, keep=9, ckpts_per_epoch=1, ema_decay=0.5)) == 0
    return run


@pytest.fixture
def run(averaged, tmp_path) -> Path:
    """A copy to work on."""
    return shutil.copytree(averaged, tmp_path / "run", symlinks=True)


def scored(capsys, *words: str) -> dict[str, float]:
    """The loss of each target."""
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {row["target"]: row["loss"] for row in rows}


def test_the_batch_that_is_scored_in_changes_no_answer_and_no_early_digit(run, capsys):
    rows = []
    for size in (1, 7, 40):
        capsys.readouterr()
        assert main(["validate", str(run), "--json", f"--valid-batch-size={size}"]) == 0
        rows.append(json.loads(capsys.readouterr().out))
    loss = rows[0].pop("loss")
    for row in rows[1:]:
        assert row.pop("loss") == pytest.approx(loss, rel=1e-8)
        assert row == rows[0]


def losses(run: Path, table: str) -> dict[int, float]:
    """What a table of the run says of each step."""
    with (run / table).open(newline="") as file:
        return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file)}


@pytest.mark.parametrize("way", ["validate", "train"])
def test_all_scores_the_averages_beside_the_weights(run, capsys, way):
    words = {
        "validate": ["validate", str(run), "--all"],
        "train": ["train", "--resume", str(run), "--training", "false"],
    }
    found = scored(capsys, *words[way])
    shelf = run / "checkpoints"
    expected = {}
    for step, loss in losses(run, "validation.csv").items():
        checkpoint = shelf / f"step-{step:08}"
        expected[str(checkpoint)] = loss
        expected[str(checkpoint / "average.safetensors")] = losses(run, "averaged.csv")[step]
    assert found == expected and list(found) == list(expected)
    assert main(["average", str(run)]) == 0
    more = scored(capsys, *words[way])
    assert list(more) == [*expected, str(shelf / "average")]


def test_the_average_in_a_checkpoint_is_scored_by_name(run, capsys):
    file = run / "checkpoints" / "step-00000018" / "average.safetensors"
    assert scored(capsys, "validate", str(file)) == {str(file): losses(run, "averaged.csv")[18]}


def test_all_without_checkpoints_tells_the_way_out(run, capsys):
    shutil.rmtree(run / "checkpoints")
    told = []
    for words in ([], ["--all"]):
        assert main(["validate", str(run), *words]) == CHECKPOINT
        told.append(capsys.readouterr().err)
    assert told[0] == told[1] and f"goes on with: phalanx train --resume {run}" in told[0]
