"""The memory of stages is what the plan says, and grows with the micro-batches in flight."""

import json
from pathlib import Path

import pytest
from ranked_sessions import run_ranks

PROGRAM = Path(__file__).with_name("stage_memory_program.py")
SPLITS = {2: "layer2/0", 4: "layer2/0,layer3/0,layer4/0"}
pytestmark = pytest.mark.slow


def measure(stages: int, cases: list[tuple[int, str]], folder: Path) -> list[list[dict]]:
    """For each accumulation and schedule, what is predicted and measured, by stage."""
    flags = [
        {
            "model": "resnet50",
            "data": "synthetic",
            "image-size": "64",
            "batch-size": "4",
            "valid-batch-size": "4",
            "steps": "2",
            "threads": "1",
            "gradient-accumulation": str(accumulation),
            "pipeline-splits": SPLITS[stages],
            "pipeline-schedule": schedule,
        }
        for accumulation, schedule in cases
    ]
    (folder / "cases.json").write_text(json.dumps(flags))
    run_ranks([PROGRAM, folder / "cases.json", folder / "out"], stages)
    ranks = [json.loads((folder / f"out-{rank}").read_text()) for rank in range(stages)]
    return [list(row) for row in zip(*ranks, strict=True)]


@pytest.mark.parametrize("stages", [2, 4])
def test_stages_take_the_memory_that_the_plan_says(tmp_path, stages):
    cases = [(16, "Grouped"), (16, "Interleaved"), (16, "Sequential")]
    found = measure(stages, cases, tmp_path)
    for row in (stage for stages in found for stage in stages):
        assert abs(row["predicted"] / row["measured"] - 1) < 0.15, row
    grouped, interleaved, _ = (max(row["measured"] for row in case) for case in found)
    assert interleaved < grouped


def test_a_group_has_at_most_two_micro_batches_for_each_stage_in_flight(tmp_path):
    # of two groups, the second begins with the gradients of the first
    two, many = measure(4, [(16, "Grouped"), (64, "Grouped")], tmp_path)
    for few, more in zip(two, many, strict=True):
        assert few["measured"] == pytest.approx(more["measured"], rel=0.01)
        assert few["predicted"] == more["predicted"]
