"""One result on any layout: folded into one process, or on several ranks."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from equal_layouts import (
    Row,
    list_near,
    list_one_replica,
    list_resumed,
    list_spans,
    list_split_spans,
    list_strict,
    measure,
)

QUICK_STRICT = ("EMA, clipping, cutmix, label smoothing, several buckets", "`adamw`")
QUICK_STEPS = 5
RANKS = (1, 2, 3, 4)


def check(rows: Iterable[Row], *, count: int) -> None:
    found = list(rows)
    missed = [
        f"{row.comparison.what}, against {row.comparison.against}, {row.ranks} ranks: "
        f"{row.where} is {row.apart:.1e} apart"
        for row in found
        if not row.holds
    ]
    assert not missed, "\n".join(missed)
    assert len(found) == count
    assert all(row.tensors > 40 for row in found)


def test_two_ranks_leave_what_one_process_leaves(digits, tmp_path):
    where = {"data_dir": digits, "folder": tmp_path}
    chosen = [one for one in list_strict() if one.what in QUICK_STRICT]
    chosen += [one for one in list_near() if one.what == "5 replicas" and one.float64]
    chosen += [one for one in list_spans() if one.what == "`--bn-span 4`"]
    chosen = [replace(one, flags={**one.flags, "steps": str(QUICK_STEPS)}) for one in chosen]
    chosen += list_resumed([1], **where, steps=QUICK_STEPS)
    check(measure(chosen, [2], **where), count=5)


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
