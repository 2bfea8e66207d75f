"""Which rank runs which replicas, for any number of both."""

from itertools import chain

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from phalanx.errors import ConfigError
from phalanx.plan.layout import Layout, count_accumulation, describe_layout, make_layout


@st.composite
def layouts(draw):
    """Any layout that is made of up to 96 replicas and 40 devices."""
    span, groups = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    return make_layout(span * groups, devices=draw(st.integers(0, 40)), bn_span=span)


@given(layouts())
def test_every_replica_is_run_once(layout):
    run = [replica for rank in range(layout.ranks) for replica in layout.replicas_of(rank)]
    assert sorted(run) == list(range(layout.replicas))
    assert all(layout.replicas_of(rank) for rank in range(layout.ranks)), "no rank is idle"


@given(layouts())
def test_rounds_go_through_the_replicas_in_order(layout):
    own = [layout.turns_of(rank) for rank in range(layout.ranks)]
    assert max(map(len, own)) == layout.rounds <= min(map(len, own)) + 1
    walk = [
        own[rank][turn]
        for turn in range(layout.rounds)
        for rank in range(layout.ranks)
        if turn < len(own[rank])
    ]
    assert list(chain.from_iterable(walk)) == list(range(layout.replicas))
    assert len(walk) == layout.turns and {len(turn) for turn in walk} == {layout.turn_size}


@given(layouts())
def test_who_shares_statistics_is_together_or_exchanges_them(layout):
    """A group of replicas is one turn, or the turns of one round on the ranks of one span group."""
    for first in range(0, layout.replicas, layout.bn_span):
        group = set(range(first, first + layout.bn_span))
        turns = [
            (rank, turn)
            for rank in range(layout.ranks)
            for turn in layout.turns_of(rank)
            if group & set(turn)
        ]
        assert set(chain.from_iterable(turn for _, turn in turns)) == group
        if len(turns) > 1:
            assert tuple(rank for rank, _ in turns) in layout.span_groups
            assert layout.rounds == 1, "ranks that exchange statistics run one turn each"


@given(layouts())
def test_span_groups_hold_all_ranks_or_none(layout):
    ranks = [*chain.from_iterable(layout.span_groups)]
    assert ranks in ([], list(range(layout.ranks)))
    for rank in range(layout.ranks):
        partners = layout.partners_of(rank)
        assert rank not in partners and len(partners) == layout.bn_span // layout.turn_size - 1
        assert all(rank in layout.partners_of(other) for other in partners)


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 40))
def test_as_many_devices_are_used_as_replicas_allow(span, groups, devices):
    replicas = span * groups
    layout = make_layout(replicas, devices=devices, bn_span=span)
    assert layout.ranks <= min(devices, replicas)
    assert layout.folded == (layout.ranks < replicas)
    assert make_layout(replicas, devices=layout.ranks, bn_span=span) == layout, (
        "others change nothing"
    )
    if devices >= replicas:
        assert (layout.ranks, layout.turn_size, layout.rounds) == (replicas, 1, 1)
    if span == 1:
        assert layout.ranks == min(devices, replicas)


@given(st.integers(2, 5000), st.integers(2, 5000))
def test_a_span_that_does_not_divide_is_answered_with_those_that_do(replicas, span):
    assume(replicas % span)
    with pytest.raises(ConfigError) as caught:
        make_layout(replicas, devices=1, bn_span=span)
    told = str(caught.value)
    assert told.startswith(f"--bn-span {span}: ") and len(told) < 120
    if span > replicas:
        ways = f"--replicas {span}, or a multiple of that, or --bn-span {replicas}"
        assert told.endswith(f"are only {replicas} replicas; give {ways}")
        make_layout(replicas, devices=1, bn_span=replicas)
        return
    ways = [int(word) for word in told.partition("; use ")[2].replace(" or ", ", ").split(", ")]
    fits = [n for n in range(1, replicas + 1) if replicas % n == 0]
    nearest = [max(n for n in fits if n < span), min(n for n in fits if n > span)]
    assert ways == (fits if len(fits) <= 10 else nearest)


@given(st.integers(1, 300), st.integers(1, 20), st.integers(1, 40))
def test_accumulation_fills_a_global_batch_that_divides(micro, replicas, passes):
    batch = micro * replicas * passes
    assert count_accumulation(batch, micro_batch=micro, replicas=replicas) == passes


@given(st.integers(1, 3000), st.integers(1, 300), st.integers(1, 20), st.booleans())
def test_every_way_out_of_a_global_batch_works(batch, micro, replicas, kept):
    assume(batch % (micro * replicas))
    with pytest.raises(ConfigError) as caught:
        count_accumulation(batch, micro_batch=micro, replicas=replicas, keeps_global_batch=kept)
    told = str(caught.value)
    assert told.startswith("--replicas auto: " if kept else f"--global-batch-size {batch}: ")
    smaller, _, nearest = told.partition("; use ")[2].rpartition("--global-batch-size ")
    sizes = [int(word) for word in nearest.split(" or ")]
    below = batch // (micro * replicas) * micro * replicas
    assert sizes == [size for size in (below, below + micro * replicas) if size]
    for size in sizes:
        assert count_accumulation(size, micro_batch=micro, replicas=replicas)
    if batch % replicas == 0:
        assert smaller.endswith(f" --global-batch-size {batch} or ") == kept
        other = int(smaller.split()[1])
        assert other < micro and count_accumulation(batch, micro_batch=other, replicas=replicas)
    else:
        assert not smaller


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        (Layout(), ""),
        (Layout(4, 4), "4 replicas, one on each of 4 devices"),
        (Layout(4, 4, 4), "4 replicas, one on each of 4 devices"),
        (Layout(16, 1), "16 replicas folded onto 1 device: they run one after the other"),
        (Layout(4, 1, 4), "4 replicas folded onto 1 device: they run side by side"),
        (
            Layout(16, 1, 4),
            "16 replicas folded onto 1 device: they run 4 at a time, side by side",
        ),
        (Layout(16, 4), "16 replicas folded onto 4 devices: 4 on each, one after the other"),
        (Layout(16, 5), "16 replicas folded onto 5 devices: 3 or 4 on each, one after the other"),
        (Layout(8, 4, 2), "8 replicas folded onto 4 devices: 2 on each, side by side"),
        (Layout(4, 2, 4), "4 replicas folded onto 2 devices: 2 on each, side by side"),
        (
            Layout(16, 4, 2),
            "16 replicas folded onto 4 devices: 4 on each, 2 at a time, side by side",
        ),
    ],
)  # fmt: skip
def test_a_layout_in_words(layout, told):
    assert describe_layout(layout) == told
