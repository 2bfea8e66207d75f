"""The same road on a CUDA device."""

import json

import pytest
import torch

from phalanx.cli.main import main
from small_runs import small_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("precision", ["32.32", "16.32"])
def test_training_validation_and_fork(digits, tmp_path, capsys, precision):
    run, fork = tmp_path / "run", tmp_path / "fork"
    assert main(small_run(digits, run, epochs=10, device="cuda", precision=precision)) == 0
    summary = json.loads((run / "summary.json").read_text())
    capsys.readouterr()
    assert main(["validate", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["top1"] == summary["top1"]
    assert main(["train", "--fork", str(run), "--run-dir", str(fork), "--epochs", "11"]) == 0
    assert json.loads((fork / "summary.json").read_text())["steps"] == 66


def test_a_run_begun_on_the_gpu_is_scored_on_the_cpu(digits, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(small_run(digits, run, device="cuda", precision="32.32")) == 0
    top1 = json.loads((run / "summary.json").read_text())["top1"]
    capsys.readouterr()
    assert main(["validate", str(run), "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["top1"] == pytest.approx(top1, abs=0.051)
