"""Is it time: against the plain definition, for every step of many runs."""

import math
import random
from fractions import Fraction
from itertools import product

import pytest

from phalanx.plan.events import Every

RATES = [Fraction(r) for r in ("0", "1", "2", "5", "1/2", "1/3", "2/3", "7/2", "20", "100")]
EPOCHS = [Fraction(s) for s in ("125", "10", "1", "10/3", "7/10", "1000/7")]
TOTALS = [1, 2, 9, 10, 37, 250]
RUNS = list(product(RATES, EPOCHS, TOTALS))


def by_definition(rate: Fraction, steps_per_epoch: Fraction, total: int) -> list[int]:
    """Point j lies at j / rate epochs and is served by the first step that reaches it."""
    if rate == 0:
        return []
    points = {total}
    number = 1
    while math.ceil(number * steps_per_epoch / rate) <= total:
        points.add(math.ceil(number * steps_per_epoch / rate))
        number += 1
    return sorted(points)


def due_steps(every: Every) -> list[int]:
    return [step for step in range(every.total_steps + 1) if every.is_due(step)]


def test_the_definition_is_what_one_expects():
    assert by_definition(Fraction(2), Fraction(5), 12) == [3, 5, 8, 10, 12]
    assert by_definition(Fraction(1, 2), Fraction(5), 12) == [10, 12]


@pytest.mark.parametrize("rate", RATES, ids=str)
def test_events_come_when_the_definition_says(rate):
    for steps_per_epoch, total in product(EPOCHS, TOTALS):
        every = Every(rate, steps_per_epoch, total)
        wanted = by_definition(rate, steps_per_epoch, total)
        assert due_steps(every) == wanted, every
        assert every.count() == len(wanted), every
        for after in {total // 2, total - 1}:
            rest = [step for step in wanted if step > after]
            assert every.count(after=after) == len(rest), (every, after)


def test_the_last_step_is_always_due_and_the_start_never():
    for rate, steps_per_epoch, total in RUNS:
        every = Every(rate, steps_per_epoch, total)
        assert every.is_due(total) is (rate > 0)
        assert not every.is_due(0)


def test_no_point_is_lost():
    for rate, steps_per_epoch, total in RUNS:
        if rate == 0:
            continue
        steps = due_steps(Every(rate, steps_per_epoch, total))
        gap = max(math.ceil(steps_per_epoch / rate), 1)
        waits = [b - a for a, b in zip([0, *steps], steps, strict=False)]
        assert max(waits) <= gap, "nobody waits longer than one interval"


def test_more_points_than_steps_make_every_step_due():
    every = Every(Fraction(20), Fraction(10), 30)
    assert due_steps(every) == list(range(1, 31)) and every.count() == 30


def test_a_rate_of_zero_never_comes():
    assert due_steps(Every(Fraction(0), Fraction(10), 30)) == []


def test_whole_epochs_fall_on_their_last_step():
    assert due_steps(Every(Fraction(1), Fraction(10), 40)) == [10, 20, 30, 40]
    assert due_steps(Every(Fraction(1, 3), Fraction(10), 70)) == [30, 60, 70]


def test_the_answer_depends_on_the_step_alone():
    every = Every(Fraction(3), Fraction(10, 3), 200)
    steps = list(range(1, 201))
    straight = {step: every.is_due(step) for step in steps}
    random.Random(1).shuffle(steps)
    assert {step: every.is_due(step) for step in steps} == straight
