"""What the memory and the exchange of stages are predicted to be, from a run's options."""

import pytest

from phalanx.assemble.dataset_summary import plan_new_run
from phalanx.assemble.memory import (
    describe_memory,
    predict_exchanges,
    predict_stage_costs,
    predict_step_memory,
)
from phalanx.config.read import read_settings

SPLITS = {"pipeline-splits": "layer2/0", "devices": "2", "gradient-accumulation": "16"}
COUNT = 78_042  # weights of a ResNet-8 for ten classes


def plan(**options: str):
    flags = {name.replace("_", "-"): text for name, text in options.items()}
    settings, made, _ = plan_new_run(read_settings("demo", {"device": "cpu", **SPLITS, **flags}))
    return settings.config, made


def test_a_plan_has_the_memory_of_the_stage_that_needs_most():
    config, made = plan()
    peaks = [stage.memory.peak for stage in predict_stage_costs(config, made)]
    assert predict_step_memory(config, made).peak == max(peaks)
    assert [predict_step_memory(config, made, stage=stage).peak for stage in (0, 1)] == peaks
    noted = describe_memory([1, 2], config, made)
    assert [(note.predicted, note.measured) for note in noted] == [(peaks[0], 1), (peaks[1], 2)]


def test_interleaving_takes_less_than_groups():
    grouped, interleaved, turns = (
        predict_step_memory(*plan(pipeline_schedule=schedule)).peak
        for schedule in ("Grouped", "Interleaved", "Sequential")
    )
    assert grouped > 1.7 * interleaved and interleaved > 1.5 * turns, "4, 2 and 1 in flight"


def test_folded_stages_take_what_one_device_takes():
    config, made = plan(devices="1")
    assert made.layout.stages == 1 and made.stages == 2
    folded = predict_step_memory(config, made)
    assert folded.transfers == 0 and folded.gradients == 4 * COUNT
    whole = predict_step_memory(*plan(devices="1", pipeline_splits="none"))
    assert folded.activations < whole.activations / 3, "it keeps what goes from stage to stage"


def test_replicas_have_statistics_and_sums_by_stage():
    config, made = plan(replicas="2", devices="2", determinism="strict")
    stages = predict_stage_costs(config, made)
    alone = predict_stage_costs(*plan(determinism="strict"))
    for one, bare in zip(stages, alone, strict=True):
        assert one.memory.sums == one.memory.gradients == bare.memory.gradients
        assert one.memory.statistics == 2 * one.statistics > 0, "two replicas, one after the other"
        assert one.memory.peak == bare.memory.peak + one.memory.sums + one.memory.statistics


@pytest.mark.parametrize(("replicas", "pipelines"), [("1", 1), ("2", 2)])
def test_gradients_are_added_up_by_stage(replicas, pipelines):
    config, made = plan(replicas=replicas, devices=str(2 * pipelines))
    found = predict_exchanges(config, made, predict_step_memory(config, made))
    sums = [stage.memory.gradients for stage in predict_stage_costs(config, made)]
    assert sums[0] != sums[1]
    assert [one.gradients for one in found] == [(pipelines - 1) * size for size in sums]
    border = 16 * 64 * 16 * 28 * 28 * 4  # of 16 micro-batches, 32 bits each
    assert [one.activations for one in found] == [border, border]
    assert [one.statistics for one in found] == [0, 0]
