"""How often may be asked for: every example of TensorFlow 2's, its warnings and its error."""

from fractions import Fraction
from itertools import product

import pytest

from phalanx.errors import ConfigError
from phalanx.plan.events import (
    CKPTS,
    LOGS,
    EventKind,
    Every,
    adjust_event_rate,
    find_nearest_divisor,
)
from phalanx.units import parse_rate

CIFAR = Fraction(781)  # 50000 images, 64 a step, the tail dropped: 11 * 71 steps


def settled(
    rate: str,
    epochs: object,
    *,
    kind: EventKind = LOGS,
    per_epoch: Fraction = CIFAR,
    even: bool = True,
) -> tuple[Every, list[str]]:
    length = Fraction(str(epochs))
    every = Every(parse_rate(rate), per_epoch, int(length * per_epoch))
    return adjust_event_rate(every, kind, epochs=length, even=even)


def due_steps(every: Every) -> list[int]:
    return [step for step in range(every.total_steps + 1) if every.is_due(step)]


# --- TensorFlow 2, "Periodic host events": CIFAR-10, micro-batch 8, accumulation 8 ---


def test_one_log_an_epoch():
    every, warnings = settled("1", 6)
    assert due_steps(every) == [781 * epoch for epoch in range(1, 7)] and warnings == []


def test_two_logs_an_epoch_become_one():
    every, warnings = settled("2", 6)
    assert due_steps(every) == [781 * epoch for epoch in range(1, 7)]
    assert warnings == [
        "--logs-per-epoch 2: 781 steps an epoch do not divide into 2 equal parts; "
        "the run will log once an epoch"
    ]


def test_ten_logs_an_epoch_become_eleven():
    every, warnings = settled("10", 6)
    assert due_steps(every) == [71 * number for number in range(1, 67)]
    assert warnings == [
        "--logs-per-epoch 10: 781 steps an epoch do not divide into 10 equal parts; "
        "the run will log 11 times an epoch"
    ]


@pytest.mark.parametrize(("rate", "period", "times"), [("1/2", 2, 3), ("1/3", 3, 2)])
def test_a_log_every_few_epochs(rate, period, times):
    for even in (True, False):
        every, warnings = settled(rate, 6, even=even)
        assert due_steps(every) == [781 * period * number for number in range(1, times + 1)]
        assert warnings == [] and every.count() == times


@pytest.mark.parametrize("even", [True, False])
def test_five_epochs_cannot_be_logged_two_at_a_time(even):
    with pytest.raises(ConfigError) as caught:
        settled("1/2", 5, even=even)
    assert str(caught.value) == (
        "--logs-per-epoch 1/2: cannot log 2 epochs at a time over 5 epochs; "
        "1/5 would work, or 4 or 6 epochs"
    )


def test_no_log_at_all():
    every, warnings = settled("0", 6)
    assert due_steps(every) == []
    assert warnings == [
        "--logs-per-epoch 0: the whole run passes without a log point; 1 gives one every epoch"
    ]


# --- TensorFlow 2: values of its tests of arguments, checkpoints and the closest divisor ---


def test_a_quarter_log_in_six_epochs_is_refused():
    with pytest.raises(ConfigError, match=r"cannot log 4 epochs .* 1/6 would work, or 4 or 8"):
        settled("0.25", 6)


def test_a_negative_rate_is_refused():
    with pytest.raises(ConfigError, match="cannot be negative"):
        parse_rate("-1")


def test_every_way_out_that_is_named_is_one():
    for rate, epochs in product(["1/2", "1/3", "2/3", "3/4", "0.4"], range(1, 13)):
        try:
            settled(rate, epochs, even=False)
        except ConfigError as error:
            advice = str(error).split("; ")[1]
            fitting, lengths = advice.split(" would work, or ")
            settled(fitting, epochs)
            for length in lengths.removesuffix(" epochs").split(" or "):
                assert int(length) > 0
                settled(rate, length, even=False)


@pytest.mark.parametrize(
    ("wanted", "found"), [(2, 1), (10, 11), (40, 11), (41, 11), (42, 71), (1000, 781)]
)
def test_the_closest_divisor_of_781(wanted, found):
    assert find_nearest_divisor(781, Fraction(wanted)) == found


def test_a_divisor_is_the_nearest_of_all():
    # squares and 1 are where the earlier search went wrong
    for whole, wanted in product([1, 2, 36, 49, 97, 360], [Fraction(n, 2) for n in range(1, 800)]):
        divisors = [n for n in range(1, whole + 1) if whole % n == 0]
        best = min(abs(n - wanted) for n in divisors)
        assert find_nearest_divisor(whole, wanted) == min(
            n for n in divisors if abs(n - wanted) == best
        )


def test_a_first_checkpoint_sets_the_clock():
    every = Every(Fraction(1, 3), Fraction(10), 50, first=Fraction(2))
    assert due_steps(every) == [20, 50]


def test_a_clock_that_is_set_counts_as_it_comes():
    rates = [Fraction(r) for r in ("1/3", "1", "7/2", "20")]
    firsts = [Fraction(f) for f in ("0", "1/10", "1/2", "2", "99")]
    for rate, first, total in product(rates, firsts, [1, 9, 37, 50]):
        for per_epoch in (Fraction(10), Fraction(10, 3)):
            every = Every(rate, per_epoch, total, first=first)
            points = {total}
            for number in range(0 if first else 1, 400):
                step = -(-(first + number / rate) * per_epoch // 1)
                points |= {int(step)} if step <= total else set()
            assert due_steps(every) == sorted(points), every
            assert every.count() == len(points), every


# --- what works today stays ---


def test_a_rate_that_divides_the_epoch_is_left_alone():
    for rate, even, kind in product(["1", "5", "25", "125"], [True, False], [LOGS, CKPTS]):
        plain = Every(parse_rate(rate), Fraction(125), 1000)
        assert adjust_event_rate(plain, kind, epochs=Fraction(8), even=even) == (plain, [])


@pytest.mark.parametrize("rate", ["2", "5", "7/2", "10", "1000"])
def test_steps_need_not_be_equal_unless_that_is_asked(rate):
    for per_epoch in (CIFAR, Fraction(50000, 64)):
        plain = Every(parse_rate(rate), per_epoch, int(6 * per_epoch))
        assert adjust_event_rate(plain, LOGS, epochs=Fraction(6), even=False) == (plain, [])


def test_an_epoch_that_ends_between_steps_has_no_equal_parts():
    plain = Every(Fraction(2), Fraction(50000, 64), 4687)
    assert adjust_event_rate(plain, LOGS, epochs=Fraction(6), even=True) == (plain, [])


@pytest.mark.parametrize("epochs", [None, Fraction("5.5")])
def test_a_run_of_no_whole_epochs_logs_as_it_can(epochs):
    plain = Every(Fraction(1, 2), Fraction(10), 55)
    assert adjust_event_rate(plain, LOGS, epochs=epochs, even=True) == (plain, [])
    assert due_steps(plain) == [20, 40, 55]


# --- checkpoints ---


def test_checkpoints_are_evened_out_alike():
    every, warnings = settled("10", 6, kind=CKPTS)
    assert every.rate == 11
    assert warnings == [
        "--ckpts-per-epoch 10: 781 steps an epoch do not divide into 10 equal parts; "
        "the run will save 11 times an epoch"
    ]


def test_checkpoints_need_not_fill_the_run():
    # a third of a checkpoint an epoch is fine over 5 epochs; the last step is saved
    every, warnings = settled("1/2", 5, kind=CKPTS, per_epoch=Fraction(10))
    assert due_steps(every) == [20, 40, 50] and warnings == []


def test_no_checkpoints_are_nothing_to_warn_of():
    assert settled("0", 6, kind=CKPTS)[1] == []


def test_parts_of_the_whole_run_are_evened_out():
    every, warnings = settled("2/3", 6)  # 4686 steps have 3 and 6 equal parts, but not 4
    assert due_steps(every) == [1562, 3124, 4686]
    assert warnings == [
        "--logs-per-epoch 2/3: 4686 steps in 6 epochs do not divide into 4 equal parts; "
        "the run will log 3 times in 6 epochs"
    ]
