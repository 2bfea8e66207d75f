"""One result whether the stages of a model are folded or have ranks of their own."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from equal_layouts import check, measure
from equal_stages import SCHEDULES, list_near_stages, list_resumed_stages, list_strict_stages
from ranked_sessions import run_ranks

QUICK_STEPS = 3
TORCH_PIPELINE = Path(__file__).with_name("torch_pipeline_program.py")


def test_two_stages_leave_what_one_device_leaves(digits, tmp_path):
    chosen = [one for one in list_strict_stages() if one.what.startswith("2 stages")]
    chosen = [replace(one, flags={**one.flags, "steps": str(QUICK_STEPS)}) for one in chosen]
    check(measure(chosen, [2], data_dir=digits, folder=tmp_path), count=len(SCHEDULES))


@pytest.mark.slow
def test_strict_stages_are_the_same_bit_for_bit(digits, tmp_path):
    rows = measure(list_strict_stages(), [1, 2, 4], data_dir=digits, folder=tmp_path)
    check(rows, count=9 * 2 + 3 + 7 * 3 - 1)


@pytest.mark.slow
def test_other_stages_differ_by_rounding_alone(digits, tmp_path):
    rows = measure(list_near_stages(), [1, 2, 4], data_dir=digits, folder=tmp_path)
    check(rows, count=2 * (9 * 2 + 3))


@pytest.mark.slow
def test_stages_go_on_from_any_layout_bit_for_bit(digits, tmp_path):
    where = {"data_dir": digits, "folder": tmp_path}
    check(measure(list_resumed_stages(**where), [1, 2, 4], **where), count=3 * 3)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["Grouped", "Interleaved"])
def test_stages_have_the_gradients_of_torchs_own_pipeline(digits, tmp_path, schedule):
    passes = 8
    flags = {
        "data": "mnist",
        "data-dir": str(digits),
        "image-size": "12",
        "batch-size": "4",
        "steps": "1",
        "threads": "1",
        "gradient-accumulation": str(passes),
        "pipeline-splits": "layer2/0",
        "pipeline-schedule": schedule,
    }
    (tmp_path / "flags.json").write_text(json.dumps(flags))
    run_ranks([TORCH_PIPELINE, tmp_path / "flags.json", tmp_path / "out"], 2)
    first, last = (json.loads((tmp_path / f"out-{rank}").read_text()) for rank in (0, 1))
    assert set(first["apart"].values()) == set(last["apart"].values()) == {0.0}
    # torch keeps the input of every micro-batch, whatever the schedule
    assert last["buffers"] == passes * 4 * 16 * 12 * 12 * 4
