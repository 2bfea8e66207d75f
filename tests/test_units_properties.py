"""Units for any text: a value that is exact, or a ConfigError; nothing else, and at once."""

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from phalanx.errors import ConfigError
from phalanx.units import (
    Duration,
    RunLength,
    format_bytes,
    format_seconds,
    format_si,
    parse_betas,
    parse_duration,
    parse_durations,
    parse_numbers,
    parse_pair,
    parse_rate,
    parse_resolutions,
    parse_share,
)

PARSERS = {
    "betas": parse_betas,
    "duration": parse_duration,
    "durations": parse_durations,
    "numbers": parse_numbers,
    "pair": parse_pair,
    "rate": parse_rate,
    "resolutions": parse_resolutions,
    "share": lambda text: parse_share(text, 1000),
}
AMOUNTS = st.integers(0, 10**9).map(lambda whole: Fraction(whole, 1000))
LENGTHS = st.builds(
    RunLength,
    total_steps=st.integers(1, 10**7),
    steps_per_epoch=st.builds(Fraction, st.integers(1, 10**7), st.integers(1, 4096)),
)
# what looks like a number or a length, and what nearly does
NEARLY = st.text("0123456789.,:/%+-eE_ ²٣stepnaif[]", max_size=30)


def decimal(amount: Fraction) -> str:
    return f"{amount.numerator * (1000 // amount.denominator) / 1000:.3f}"


@pytest.mark.parametrize("name", PARSERS)
@given(text=st.one_of(NEARLY, st.text(max_size=30)))
@example(text="²:5ep")  # a digit to isdigit(), and none to int()
@example(text="1" * 5000)
@example(text="1" * 5000 + ":5ep")
@example(text="1e400,1e400")
@example(text="1e999999999")
@example(text="1e-9_9_9_9_9_9_9_9_9")
@example(text="0.99999999999999999999,0.5")
@example(text="1/0")
@example(text="nan,inf")
@example(text="\ud800")
def test_any_text_is_read_or_refused(name, text):
    try:
        PARSERS[name](text)
    except ConfigError as error:
        assert "got" in str(error)


@given(AMOUNTS, st.sampled_from(["ep", "%"]), st.sampled_from(["", " "]))
def test_an_amount_is_read_exactly(amount, unit, gap):
    if unit == "%" and amount > 100:
        amount = amount % 100
    assert parse_duration(f"{decimal(amount)}{gap}{unit}") == Duration(amount, unit)


@given(st.integers(0, 10**12))
def test_steps_are_themselves_in_any_run(steps):
    length = RunLength(total_steps=10, steps_per_epoch=Fraction(7, 3))
    assert length.count_steps(parse_duration(f"{steps}st")) == steps


@given(LENGTHS, AMOUNTS, AMOUNTS)
def test_a_longer_duration_never_takes_fewer_steps(length, one, other):
    shorter, longer = sorted((one, other))
    for unit in ("ep", "%"):
        first, second = (length.count_steps(Duration(a, unit)) for a in (shorter, longer))
        assert first <= second
        exact = length.exact_steps(Duration(shorter, unit))
        assert first == ceil(exact) and 0 <= first - exact < 1


@given(LENGTHS)
def test_a_hundred_percent_is_the_run_and_one_epoch_its_steps(length):
    assert length.count_steps(parse_duration("100%")) == length.total_steps
    assert length.count_steps(parse_duration("1ep")) == ceil(length.steps_per_epoch)


@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_a_rate_is_a_fraction(above, below):
    assert parse_rate(f"{above}/{below}") == Fraction(above, below)


@given(st.integers(0, 100_000), st.integers(0, 10**7))
def test_a_share_is_rounded_down_and_never_above_the_whole(thousandths, whole):
    share = parse_share(f"{thousandths / 1000:.3f}%", whole)
    assert share == thousandths * whole // 100_000 <= whole
    assert parse_share(str(whole), 5) == whole


@given(st.integers(0, 10**17))
def test_numbers_for_people_are_short(number):
    assert len(format_si(number)) <= 7 and len(format_bytes(number)) <= 12
    assert len(format_seconds(number % 10**9)) <= 11
