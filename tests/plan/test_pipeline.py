"""Stages of a model: where they begin, the order of their passes, and how long they wait."""

import pytest

from phalanx.config.read import read_settings
from phalanx.errors import ConfigError
from phalanx.plan.pipeline import (
    Pass,
    Pipeline,
    choose_starts,
    count_in_flight,
    list_starts,
    measure_bubble,
    needs_splits,
    order_passes,
    time_passes,
)


def spell(order: list[Pass]) -> str:
    return " ".join(f"{one.kind[0]}{one.number}" for one in order)


def read_config(**options: str):
    flags = {name.replace("_", "-"): text for name, text in options.items()}
    return read_settings("demo", {"device": "cpu", **flags}).config


# --- the order of passes ---


@pytest.mark.parametrize(
    ("schedule", "stage", "passes", "order"),
    [
        ("Grouped", 0, 3, "f0 f1 f2 b0 b1 b2"),
        ("Grouped", 1, 6, "f0 f1 f2 f3 b0 b1 b2 b3 f4 f5 b4 b5"),  # 2 x stages at a time
        ("Sequential", 0, 3, "f0 b0 f1 b1 f2 b2"),
        ("Interleaved", 0, 4, "f0 f1 b0 f2 b1 f3 b2 b3"),
        ("Interleaved", 1, 4, "f0 b0 f1 b1 f2 b2 f3 b3"),
        ("Interleaved", 0, 1, "f0 b0"),
    ],
)
def test_each_schedule_has_its_order(schedule, stage, passes, order):
    assert spell(order_passes(schedule, stage=stage, stages=2, passes=passes)) == order


@pytest.mark.parametrize("schedule", ["Grouped", "Interleaved", "Sequential"])
@pytest.mark.parametrize("stages", [2, 3, 8])
@pytest.mark.parametrize("passes", [1, 5, 40])
def test_every_micro_batch_goes_once_each_way_and_stages_never_wait_for_ever(
    schedule, stages, passes
):
    pipeline = Pipeline(starts=tuple(map(str, range(1, stages))), schedule=schedule)
    orders = [pipeline.order(stage, passes=passes) for stage in range(stages)]
    whole = {Pass(kind, n) for kind in ("forward", "backward") for n in range(passes)}
    for order in orders:
        assert len(order) == 2 * passes and {*order} == whole
        backward = [one.number for one in order if one.kind == "backward"]
        assert backward == sorted(backward), "sums of gradients are in the order of micro-batches"
    timed = time_passes(orders, forward=[1] * stages, backward=[2] * stages)
    assert len(timed) == stages * 2 * passes


def test_so_many_micro_batches_are_in_flight():
    def most(schedule: str, stage: int, passes: int) -> int:
        return count_in_flight(order_passes(schedule, stage=stage, stages=4, passes=passes))

    assert [most("Grouped", 0, passes) for passes in (4, 8, 64, 1024)] == [4, 8, 8, 8]
    assert [most("Interleaved", stage, 64) for stage in range(4)] == [4, 3, 2, 1]
    assert most("Sequential", 0, 64) == 1


# --- time ---


def test_passes_wait_for_their_neighbours():
    """Two stages, two micro-batches; the second stage takes twice as long.

    stage 0  f0 f1 .  .  .  .  b0 b0 .  .  b1 b1
    stage 1  .  f0 f0 f1 f1 b0 b0 b0 b0 b1 ...
    """
    orders = [order_passes("Grouped", stage=stage, stages=2, passes=2) for stage in range(2)]
    timed = time_passes(orders, forward=[1, 2], backward=[2, 4])
    times = {(one.stage, spell([one.what])): (one.start, one.end) for one in timed}
    assert times == {
        (0, "f0"): (0, 1),
        (0, "f1"): (1, 2),
        (1, "f0"): (1, 3),
        (1, "f1"): (3, 5),
        (1, "b0"): (5, 9),
        (1, "b1"): (9, 13),
        (0, "b0"): (9, 11),
        (0, "b1"): (13, 15),
    }
    assert measure_bubble(timed) == pytest.approx(1 - (2 * 3 + 2 * 6) / (2 * 15))


def bubble(schedule: str, *, stages: int, passes: int) -> float:
    orders = [
        order_passes(schedule, stage=stage, stages=stages, passes=passes) for stage in range(stages)
    ]
    return measure_bubble(time_passes(orders, forward=[1] * stages, backward=[2] * stages))


def test_the_bubble_of_even_stages_is_the_papers():
    for stages in (2, 4, 8):
        few = stages - 1
        assert bubble("Grouped", stages=stages, passes=2 * stages) == pytest.approx(
            few / (2 * stages + few)
        )
        assert bubble("Interleaved", stages=stages, passes=40) == pytest.approx(few / (40 + few))
        assert bubble("Sequential", stages=stages, passes=40) == pytest.approx(1 - 1 / stages)


def test_every_group_has_a_bubble_of_its_own():
    """The first stage goes back last, and forward first: groups do not overlap."""
    one, many = (bubble("Grouped", stages=4, passes=passes) for passes in (8, 160))
    assert one == pytest.approx(many) == pytest.approx(3 / 11)


# --- where stages begin ---

COSTS = {"stem": 1.0, "layer1/0": 4.0, "layer2/0": 3.0, "layer3/0": 2.0, "head": 1.0}


@pytest.mark.parametrize(
    ("shards", "starts"),
    [
        ("2", ("layer2/0",)),  # 5 and 6; one unit later it would be 8 and 3
        ("3", ("layer2/0", "layer3/0")),  # 5, 3 and 3
        ("5", ("layer1/0", "layer2/0", "layer3/0", "head")),
    ],
)
def test_the_costliest_stage_costs_least(shards, starts):
    assert choose_starts(read_config(shards=shards, pipeline="true"), COSTS) == starts


def test_filters_say_where_a_model_may_be_cut():
    def starts(**options: str) -> tuple[str, ...]:
        return choose_starts(read_config(shards="2", **options), COSTS)

    assert starts(sharding_include_filter="layer3,head") == ("layer3/0",)
    assert starts(sharding_exclude_filter="layer2 layer3") == ("layer1/0",)
    assert starts(sharding_include_filter="layer", sharding_exclude_filter="2/,3/") == ("layer1/0",)
    assert starts(sharding_include_filter="head", pipeline="true") == ("layer2/0",), "ignored"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"pipeline": "true"},
            "--pipeline: the number of stages is not given; give --shards N, or name where they "
            "start with --pipeline-splits",
        ),
        (
            {"pipeline": "true", "shards": "1"},
            "--pipeline: --shards 1 is a single stage; give --shards N, or name where they start "
            "with --pipeline-splits",
        ),
        (
            {"shards": "6"},
            "--shards 6: resnet8 has only 5 units, and a stage has at least one; give --shards 5 "
            "or less",
        ),
        (
            {"shards": "3", "sharding_include_filter": "layer2"},
            "--shards 3: the sharding filters leave room for only 2 stages of resnet8; give "
            "--shards 2 or less",
        ),
        (
            {"shards": "2", "sharding_exclude_filter": "e"},
            "--shards 2: the sharding filters leave room for only 1 stage of resnet8; leave it out",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(options, told):
    config = read_config(**options)
    assert needs_splits(config)
    with pytest.raises(ConfigError) as refused:
        list_starts(config, [*COSTS])
    assert str(refused.value) == told


def test_named_splits_need_no_others():
    assert not needs_splits(read_config(pipeline="true", pipeline_splits="layer2/0"))
    assert not needs_splits(read_config(shards="1"))


def test_a_networks_own_units_are_cut_in_order():
    def cut(*starts: str) -> tuple[tuple[str, ...], ...]:
        return Pipeline(starts=starts, schedule="Grouped").split_units("abcd")

    assert cut("b", "d") == (("a",), ("b", "c"), ("d",))
    for starts, reason in {
        ("c", "b"): "list them in forward order",
        ("a",): "at least one unit apart",
        ("b", "b"): "is given twice",
        ("e",): "no unit is called 'e'; there are a, b, c, d",
    }.items():
        with pytest.raises(ConfigError, match=reason):
            cut(*starts)
