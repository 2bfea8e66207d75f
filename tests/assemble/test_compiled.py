"""A network that torch compiles trains as it does without."""

import json

import pytest

from small_runs import run_phalanx, small_run


@pytest.mark.slow
def test_a_compiled_network_learns_the_same(digits, tmp_path):
    losses = []
    for compiled in ("true", "false"):
        run = tmp_path / compiled
        done = run_phalanx(*small_run(digits, run, compile=compiled, model="resnet8", steps=6))
        assert done.returncode == 0, done.stderr
        lines = (run / "metrics.jsonl").read_text().splitlines()
        losses.append([row["loss"] for row in map(json.loads, lines) if "loss" in row])
    assert len(losses[0]) >= 6
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
