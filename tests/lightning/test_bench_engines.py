"""`phalanx bench engines`: both engines on the same batches, and whether they end the same."""

import json
import os
import signal
from pathlib import Path

from phalanx.assemble.session import Session
from phalanx.bench import engines
from phalanx.cli.main import main
from phalanx.engine.train import fit
from small_runs import small_run

BRIEF = ("--pairs", "2", "--steps", "3")


def bench_words(digits: Path, **options: object) -> list[str]:
    own = ("--run-dir", "--epochs", "--steps")
    words = small_run(digits, digits, batch_size=2, **options)[1:]
    return ["bench", "engines", *(word for word in words if not word.startswith(own)), *BRIEF]


def test_the_ratio_and_equal_weights_are_printed(digits, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main([*bench_words(digits, replicas=4), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["weights_equal"] and found["largest_difference"] == 0.0
    assert found["steps_trained"] == 9  # 3 to warm up, and 2 pairs of 3
    assert found["pairs"] == 2 and len(found["native_images_per_second"]) == 2
    assert found["interval95"][0] <= found["ratio"] <= found["interval95"][1]
    assert found["layout"].startswith("4 replicas folded onto 1 device")
    assert not list(tmp_path.iterdir())  # what it trains is kept nowhere


def test_weights_that_differ_are_told(digits, monkeypatch, capfd):
    def fit_faster(state, plan, *, deps, metrics):
        step = deps.train_step
        object.__setattr__(deps, "train_step", lambda passes, lr: step(passes, 2 * lr))
        fit(state, plan, deps=deps, metrics=metrics)

    monkeypatch.setattr(engines, "choose_fit", lambda config: fit_faster)
    assert main(bench_words(digits)) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "resnet8", "lightning", "native", "ratio", "weights",
    ]  # fmt: skip
    assert lines[1].index("images/s") == lines[2].index("images/s")
    assert lines[4].startswith("weights after 9 steps: differ by up to ")


def test_ctrl_c_leaves_without_an_exit_code_of_lightnings(digits, monkeypatch, capfd):
    monkeypatch.setattr(  # the first block is Lightning's
        Session, "train_step", lambda *_, **__: os.kill(os.getpid(), signal.SIGINT)
    )
    assert main(bench_words(digits)) == 130
    assert "stopped by SIGINT" in capfd.readouterr().err


def test_several_ranks_are_refused(digits, capfd):
    assert main(bench_words(digits, replicas=2, devices=2)) == 2
    assert "these options take 2; give --devices 1, which folds" in capfd.readouterr().err
