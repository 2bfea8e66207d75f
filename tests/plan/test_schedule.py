"""The learning rate, against closed forms."""

import random
from itertools import pairwise
from math import cos, pi

import pytest

from phalanx.config.read import read_settings
from phalanx.plan.plan import Chosen, DataFacts, make_plan
from phalanx.plan.schedule import SHAPES, lr_at


def test_a_cosine_goes_from_the_peak_to_nothing():
    rates = [lr_at(s, shape="cosine", peak=0.4, warmup=0, total=100) for s in range(101)]
    assert rates == pytest.approx([0.2 * (1 + cos(pi * s / 100)) for s in range(101)], abs=1e-15)
    assert (rates[0], rates[50], rates[100]) == pytest.approx((0.4, 0.2, 0.0))
    assert all(a > b for a, b in pairwise(rates))


def test_a_constant_stays():
    rates = {lr_at(s, shape="constant", peak=0.3, warmup=0, total=10) for s in range(30)}
    assert rates == {0.3}


@pytest.mark.parametrize("shape", SHAPES)
def test_warmup_multiplies_the_running_schedule(shape):
    def rate(step: int, warmup: int) -> float:
        return lr_at(step, shape=shape, peak=0.5, warmup=warmup, total=40)

    for step in range(41):
        share = min(1.0, step / 8)
        assert rate(step, 8) == pytest.approx(share * rate(step, 0), abs=1e-15), step
    assert rate(0, 8) == 0.0
    assert rate(8, 8) == rate(8, 0), "the schedule is not shifted"


def test_past_the_end_the_rate_stays():
    for shape in SHAPES:
        end = lr_at(20, shape=shape, peak=1.0, warmup=0, total=20)
        assert lr_at(27, shape=shape, peak=1.0, warmup=0, total=20) == end


def test_warmup_may_last_the_whole_run():
    rates = [lr_at(s, shape="constant", peak=1.0, warmup=4, total=4) for s in range(5)]
    assert rates == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_the_rate_depends_on_the_step_alone():
    steps = list(range(60))
    straight = [lr_at(s, shape="cosine", peak=1.0, warmup=5, total=50) for s in steps]
    random.Random(1).shuffle(steps)
    mixed = {s: lr_at(s, shape="cosine", peak=1.0, warmup=5, total=50) for s in steps}
    assert [mixed[s] for s in range(60)] == straight


def test_a_plan_uses_the_options_it_was_given():
    flags = {"lr": "0.2", "warmup-epoch": "10st", "lr-schedule": "constant", "steps": "100"}
    facts = DataFacts(train_images=8000, valid_images=10, classes=10)
    chosen = Chosen(device="cpu", precision="32.32", threads=1)
    plan = make_plan(read_settings("demo", flags).config, facts, chosen)
    assert [plan.lr(step) for step in (0, 5, 10, 99)] == [0.0, 0.1, 0.2, 0.2]
