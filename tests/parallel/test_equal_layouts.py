"""One result on any layout: folded into one process, or on several ranks."""

import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from equal_layouts import (
    check,
    list_near,
    list_one_replica,
    list_resumed,
    list_spans,
    list_split_spans,
    list_strict,
    measure,
)

from small_runs import read_result, run_phalanx, small_run, start_phalanx

QUICK_STRICT = ("EMA, clipping, cutmix, label smoothing, several buckets", "`adamw`")
QUICK_SPANS = ("`--bn-span 1`", "`--bn-span 4`")
QUICK_STEPS = 5
RANKS = (1, 2, 3, 4)


def test_two_ranks_leave_what_one_process_leaves(digits, tmp_path):
    where = {"data_dir": digits, "folder": tmp_path}
    chosen = [one for one in list_strict() if one.what in QUICK_STRICT]
    chosen += [one for one in list_near() if one.what == "5 replicas" and one.float64]
    chosen += [one for one in list_spans() if one.what in QUICK_SPANS]
    chosen = [replace(one, flags={**one.flags, "steps": str(QUICK_STEPS)}) for one in chosen]
    chosen += list_resumed([1], **where, steps=QUICK_STEPS)
    check(measure(chosen, [2], **where), count=6)


@pytest.mark.slow
def test_strict_runs_are_the_same_bit_for_bit(digits, tmp_path):
    check(measure(list_strict(), RANKS, data_dir=digits, folder=tmp_path), count=3 * 17)


@pytest.mark.slow
def test_a_strict_run_goes_on_on_another_layout_bit_for_bit(digits, tmp_path):
    where = {"data_dir": digits, "folder": tmp_path}
    check(measure(list_resumed([1, 2, 4], **where), RANKS, **where), count=4 * 3)


@pytest.mark.slow
def test_other_runs_differ_by_rounding_alone(digits, tmp_path):
    where = {"data_dir": digits, "folder": tmp_path}
    chosen = [*list_near(), *list_split_spans(**where)]
    check(measure(chosen, RANKS, **where), count=3 * 8 + 2 * 2)


@pytest.mark.slow
def test_replicas_train_as_accumulation_does(digits, tmp_path):
    check(measure(list_one_replica(), RANKS, data_dir=digits, folder=tmp_path), count=4 * 4)


@pytest.mark.slow
def test_shared_statistics_are_those_of_one_large_batch(digits, tmp_path):
    check(measure(list_spans(), RANKS, data_dir=digits, folder=tmp_path), count=3 * 3)


@pytest.mark.slow
def test_a_run_that_moves_from_four_ranks_to_two_to_one(digits, tmp_path):
    folded, moved = tmp_path / "folded", tmp_path / "moved"
    options = {
        "epochs": 15,
        "batch_size": 2,
        "replicas": 4,
        "gradient_accumulation": 2,
        "determinism": "strict",
        "threads": 1,
        "ema_decay": 0.9,
        "drop_path": 0.2,
        "ckpts_per_epoch": 1,
    }
    assert run_phalanx(*small_run(digits, folded, **options)).returncode == 0
    stop_at_step(small_run(digits, moved, **options, devices=4), moved, 10)
    stop_at_step(["train", "--resume", str(moved), "--devices=2"], moved, 40)
    done = run_phalanx("train", "--resume", moved, "--devices=1")
    assert done.returncode == 0, done.stderr
    for name in ("metrics.jsonl", "validation.csv", "predictions.csv"):
        assert (folded / name).read_bytes() == (moved / name).read_bytes()
    a, b = (read_result(run) for run in (folded, moved))
    for key in ("weights_sha256", "steps", "images", "scored", "top1", "top5", "best"):
        assert a[key] == b[key], key
    newest = sorted((folded / "checkpoints").iterdir())[-1].relative_to(folded)
    for path in (folded / newest).glob("*.safetensors"):
        assert path.read_bytes() == (moved / newest / path.name).read_bytes()


def stop_at_step(words: list[str], run: Path, step: int) -> None:
    """Interrupt a run on several ranks once its metrics show that step."""
    process, metrics = start_phalanx(*words), run / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 75, (process.returncode, out, err)
    assert "stopped after step" in err
