"""`phalanx plan --measure`: real steps, and a prediction that is their sum."""

import json
import time
from itertools import chain

import pytest

from phalanx.__main__ import main
from phalanx.assemble.session import Session
from small_runs import small_run


def plan_words(digits, run, **options) -> list[str]:
    _, *words = small_run(digits, run, model="resnet8", **options)
    return ["plan", *words, "--no-memory", "--measure", "--seconds", "0.4"]


def test_a_measured_plan_adds_up_and_leaves_nothing_behind(digits, tmp_path, capsys):
    assert main([*plan_words(digits, tmp_path / "run", steps=500), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    found = plan["measured"]
    assert found["steps"]["steps"] >= 3
    assert found["steps"]["warmup_steps"] <= 10
    parts, counts = found["parts_s"], found["plan"]
    assert counts == {"steps": 500, "evaluations": 84, "checkpoints": 250}
    assert parts["steps"] == pytest.approx(500 * found["steps"]["step_s"])
    assert parts["evaluations"] == pytest.approx(84 * found["scoring"]["score_s"])
    assert parts["checkpoints"] >= found["saving"]["written_s"]
    assert found["total_s"] == pytest.approx(sum(parts.values()))
    assert found["quick_s"] <= found["slow_s"]
    assert found["saving"]["size_bytes"] > 100_000  # weights and momentum of resnet8
    assert found["peak_bytes"] > 10_000_000
    assert found["measured_on"]["device"] == "cpu"
    assert not list(tmp_path.iterdir()), "a plan writes nothing"


def test_a_measured_plan_in_words(digits, tmp_path, capsys):
    assert main(plan_words(digits, tmp_path / "run", steps=30, ckpts_per_epoch=0)) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line[:14].strip(): line[14:] for line in lines}
    assert "torch" in rows["measured on"]
    assert " ms, " in rows["a step"] and "waiting for data" in rows["a step"]
    assert "if every step were like the quicker or the slower quarter" in rows["predicted"]
    assert "the process with its libraries" in rows["memory used"]
    assert rows["energy"].startswith(("not known", "0")) or "kWh" in rows["energy"]
    assert any("of 30 steps were timed" in line for line in lines)
    assert "a checkpoint" not in rows, "the run writes none"


def test_what_is_slow_once_counts_once(digits, tmp_path, capsys, monkeypatch):
    """As on a GPU, which compiles before its first step and its first batch."""
    train_step, evaluate, steps = Session.train_step, Session.evaluate, []

    def compile_and_train(session, *args):
        time.sleep(0 if steps else 0.5)
        steps.append(args)
        return train_step(session, *args)

    def compile_and_score(session, batches):
        coming = iter(batches)
        first = next(coming)
        time.sleep(0.3)
        return evaluate(session, chain([first], coming))

    monkeypatch.setattr(Session, "train_step", compile_and_train)
    monkeypatch.setattr(Session, "evaluate", compile_and_score)
    words = plan_words(digits, tmp_path / "run", steps=500, valid_batch_size=5)
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["measured"]
    assert found["steps"]["warmup_steps"] >= 4
    assert found["steps"]["step_s"] < 0.25
    assert found["scoring"]["once_s"] > 0.2
    assert found["scoring"]["score_s"] < 0.3
    assert found["parts_s"]["start"] > 0.7


def test_steps_with_smaller_images_count_by_their_pixels(digits, tmp_path, capsys):
    given = {"steps": 40, "progressive-resolution": "8:50%", "image-size": 16}
    assert main([*plan_words(digits, tmp_path / "run", **given), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["measured"]
    assert found["parts_s"]["steps"] == pytest.approx((20 / 4 + 20) * found["steps"]["step_s"])
    assert any("those with smaller ones" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seconds", "3"], "--seconds: belongs to --measure, which is not given"),
        (["--measure", "--seconds", "0"], "--seconds: expected seconds above 0, such as 30"),
        (["--measure", "--devices", "2", "--replicas", "2"], "this plan has 2 ranks; give"),
        (["--measure", "--data", "imagenet"], "there are none of imagenet yet; give --data-dir"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, message, capsys):
    assert main(["plan", "--device", "cpu", "--no-memory", *words]) == 2
    assert message in capsys.readouterr().err
