"""Schedules that cannot be, and those that may not be meant: the words and the way out."""

from fractions import Fraction

import pytest

from phalanx.errors import ConfigError
from phalanx.plan.schedule import (
    ScheduleOptions,
    list_schedule_problems,
    list_schedule_warnings,
    make_schedule,
)
from phalanx.units import RunLength, parse_duration

TEN_EPOCHS = RunLength(100, Fraction(10))
LENGTHS = ("warmup", "length", "period")


def asked(**given: object) -> ScheduleOptions:
    """Options with their lengths and milestones as text."""
    read = {name: parse_duration(str(given.pop(name))) for name in LENGTHS if name in given}
    for name, parse in (("milestones", parse_duration), ("drop_after", Fraction)):
        if name in given:
            read[name] = tuple(parse(part) for part in str(given.pop(name)).split(","))
    return ScheduleOptions(**read, **given)


def refused(clock: RunLength = TEN_EPOCHS, **given: object) -> str:
    """The only problem, which is also what the maker raises."""
    (problem,) = list_schedule_problems(asked(**given), clock)
    with pytest.raises(ConfigError) as caught:
        make_schedule(asked(**given), 1.0, clock)
    assert str(caught.value) == problem
    return problem


def told(clock: RunLength = TEN_EPOCHS, **given: object) -> str:
    """The only warning of a schedule that can be made."""
    make_schedule(asked(**given), 1.0, clock)
    (warning,) = list_schedule_warnings(asked(**given), clock)
    return warning


def test_sound_schedules_have_no_problems_and_no_warnings():
    for options in (
        asked(),
        asked(shape="constant", warmup="10ep"),
        asked(shape="step", milestones="3,6,9"),
        asked(shape="step", milestones="50%,75%", decay=(1.0, 0.1, 0.01)),
        asked(shape="step", drop_after="0.5,0.75", warmup="1ep", warmup_mode="shift"),
        asked(shape="exponential", decay=(0.97,), freq=Fraction("0.424")),
        asked(shape="exponential", decay=(0.9,), period="2ep"),
        asked(shape="polynomial", length="8ep", warmup="2ep", warmup_mode="shift"),
        asked(warmup="1ep", warmup_mode="mask", staircase=True),
        asked(staircase=True),
    ):
        assert list_schedule_problems(options, TEN_EPOCHS) == []
        assert list_schedule_warnings(options, TEN_EPOCHS) == []


# --- refused ---


def test_a_warmup_longer_than_the_run():
    assert refused(warmup="10.1ep") == (
        "--warmup-epoch: 10.1ep is 101 steps, longer than the run of 100; "
        "shorten it or give it as a share, such as 10%"
    )


def test_a_warmup_that_leaves_nothing_to_a_schedule_that_waits():
    assert refused(warmup="10ep", warmup_mode="shift") == (
        "--warmup-mode shift: the warm-up takes all 100 steps and leaves none to the cosine; "
        "shorten --warmup-epoch, or choose ramp or mask"
    )
    assert not list_schedule_problems(asked(warmup="10ep", warmup_mode="mask"), TEN_EPOCHS)
    assert not list_schedule_problems(
        asked(warmup="10ep", warmup_mode="shift", length="5ep"), TEN_EPOCHS
    )


@pytest.mark.parametrize(
    ("milestones", "said"),
    [
        ("6,3", "3ep follows 6ep but is not later; write 3ep,6ep"),
        ("3,9,6", "6ep follows 9ep but is not later; write 3ep,6ep,9ep"),
        ("5,50%", "50% follows 5ep but is not later; write 5ep"),
        ("60%,5", "5ep follows 60% but is not later; write 5ep,60%"),
        ("0,5", "0ep is the start of the run; lower --lr instead"),
    ],
)
def test_milestones_out_of_order(milestones, said):
    found = refused(shape="step", milestones=milestones)
    assert found.startswith(f"--lr-epoch-decay: {said}")


def test_shares_out_of_order():
    assert refused(shape="step", drop_after="0.75,0.5") == (
        "--lr-drop-after: 0.5 follows 0.75 but is not later; write 0.5,0.75"
    )


@pytest.mark.parametrize("share", ["30", "1", "0"])
def test_shares_that_are_none(share):
    assert refused(shape="step", drop_after=share) == (
        f"--lr-drop-after: {share} is not a share of the run; give numbers between 0 and 1, "
        f"such as 0.5,0.75, or epochs with --lr-epoch-decay"
    )


def test_steps_that_never_fall():
    assert refused(shape="step") == (
        "--lr-schedule step: nothing says where the rate falls; add --lr-epoch-decay, "
        "such as 30,60,90 or 50%,75%, or choose constant"
    )


def test_two_ways_to_say_where_the_rate_falls():
    assert refused(shape="step", milestones="5", drop_after="0.5") == (
        "--lr-epoch-decay and --lr-drop-after both say where the rate falls; give one"
    )


def test_factors_that_do_not_match_the_drops():
    assert refused(shape="step", milestones="3,6", decay=(0.1, 0.01)) == (
        "--lr-decay: 2 numbers for 2 drops; give one factor, or 3 shares of the peak, "
        "one for each stretch"
    )
    assert refused(shape="exponential", decay=(1.0, 0.9)) == (
        "--lr-decay: an exponential has one factor, got 2; give one, such as 0.97"
    )


@pytest.mark.parametrize("shape", ["step", "exponential"])
def test_a_factor_of_nothing(shape):
    more = {"milestones": "5"} if shape == "step" else {}
    assert refused(shape=shape, decay=(0.0,), **more) == (
        "--lr-decay: 0 would end all learning; choose a number above 0"
    )


def test_no_time_to_fall_in():
    said = "0ep is too short to fall in; make it longer or leave it out"
    assert refused(length="0ep") == f"--lr-decay-length: {said}"
    assert refused(shape="exponential", period="0ep") == f"--lr-decay-period: {said}"


def test_two_ways_to_hold_the_rate():
    assert refused(staircase=True, freq=Fraction(2)) == (
        "--lr-staircase and --lr-scheduler-freq both say how often the rate changes; give one"
    )


def test_a_staircase_whose_only_tread_is_nothing():
    assert refused(RunLength(10, Fraction(10)), warmup="5st", staircase=True) == (
        "--lr-staircase: the only epoch would keep the rate of its first step, which the "
        "warm-up makes 0; leave one of them out, or train longer"
    )


def test_all_problems_are_told_at_once():
    options = asked(shape="step", warmup="11ep", staircase=True, freq=Fraction(1))
    problems = list_schedule_problems(options, TEN_EPOCHS)
    assert [line.split(":")[0].split()[0] for line in problems] == [
        "--warmup-epoch",
        "--lr-schedule",
        "--lr-staircase",
    ]
    with pytest.raises(ConfigError) as caught:
        make_schedule(options, 1.0, TEN_EPOCHS)
    assert str(caught.value).splitlines() == problems


# --- warned of: a preset's drops stay while its run is cut short ---


def test_a_drop_beyond_the_end():
    assert told(shape="step", milestones="5,30") == (
        "--lr-epoch-decay: 30ep is step 300, and the run ends at 100; the rate does not fall there"
    )
    assert told(shape="step", milestones="10") == (
        "--lr-epoch-decay: 10ep is step 100, and the run ends at 100; the rate does not fall there"
    )
    assert list_schedule_warnings(asked(shape="step", milestones="99st"), TEN_EPOCHS) == []


def test_a_first_epoch_at_nothing():
    assert told(warmup="2ep", staircase=True) == (
        "--lr-staircase: the first epoch runs at rate 0, that of its first step; "
        "--warmup-mode mask or shift begins above it"
    )


def test_a_rate_that_is_never_refreshed():
    assert told(freq=Fraction(1, 11)) == (
        "--lr-scheduler-freq 1/11: the run ends before the rate is refreshed once"
    )
    assert list_schedule_warnings(asked(freq=Fraction(1, 10)), TEN_EPOCHS) == []


# --- every option arrives ---


@pytest.mark.parametrize(
    ("shape", "given"),
    [
        ("cosine", {"warmup": "2ep"}),
        ("cosine", {"warmup": "2ep", "warmup_mode": "mask"}),
        ("cosine", {"warmup": "2ep", "warmup_mode": "shift"}),
        ("cosine", {"warmup": "2ep", "warmup_mode": "ramp-shift"}),
        ("cosine", {"staircase": True}),
        ("cosine", {"freq": Fraction(2)}),
        ("cosine", {"length": "5ep"}),
        ("cosine", {"end_ratio": 0.1}),
        ("polynomial", {"power": 1.0}),
        ("exponential", {"decay": (0.5,)}),
        ("exponential", {"period": "3ep"}),
    ],
)
def test_an_option_that_is_given_changes_the_rate(shape, given):
    def rates(**options: object) -> tuple[float, ...]:
        schedule = make_schedule(asked(shape=shape, **options), 1.0, TEN_EPOCHS)
        return tuple(schedule.lr(step) for step in range(100))

    assert rates(**given) != rates()


def test_an_exponential_falls_by_its_factor_every_epoch_unless_told_otherwise():
    def rate(**given: object) -> float:
        return make_schedule(asked(shape="exponential", decay=(0.5,), **given), 1.0, TEN_EPOCHS).lr(
            40
        )

    assert rate() == 0.5**4
    assert rate(freq=Fraction(2)) == 0.5**8, "by its factor at every refresh"
    assert rate(period="2ep") == 0.5**2
    assert rate(period="1st") == 0.5**40
