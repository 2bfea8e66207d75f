import doctest
from fractions import Fraction
from importlib import import_module
from pathlib import Path

import pytest

import phalanx
from phalanx.errors import ConfigError
from phalanx.units import (
    Duration,
    RunLength,
    format_bytes,
    format_count,
    format_plural,
    format_seconds,
    parse_duration,
    parse_rate,
    parse_share,
)

PACKAGE = Path(phalanx.__file__).parent
WITH_EXAMPLES = [
    ".".join(["phalanx", *path.relative_to(PACKAGE).with_suffix("").parts])
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>>" in path.read_text(encoding="utf-8")
]


def test_there_are_examples_to_run():
    assert len(WITH_EXAMPLES) >= 4 and "phalanx.units" in WITH_EXAMPLES


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_in_docstrings_are_true(name):
    result = doctest.testmod(import_module(name))
    assert result.attempted > 0 and result.failed == 0


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("5ep", 5, "ep"),
        ("2.5ep", Fraction(5, 2), "ep"),
        (".5 ep", Fraction(1, 2), "ep"),
        (" 500st ", 500, "st"),
        ("10%", 10, "%"),
        ("0.1%", Fraction(1, 10), "%"),
        ("100%", 100, "%"),
        ("7", 7, "ep"),
        (7, 7, "ep"),
        (0.1, Fraction(1, 10), "ep"),
        ("0", 0, "ep"),
    ],
)
def test_a_duration_is_read_exactly(text, amount, unit):
    assert parse_duration(text) == Duration(Fraction(amount), unit)


@pytest.mark.parametrize(
    "text", ["", "ep", "five", "-1ep", "5 epochs", "5epst", "1e2ep", "nan", "inf", "5,5ep", "5st%"]
)
def test_a_duration_that_is_none_is_refused_with_examples(text):
    with pytest.raises(ConfigError, match="5ep, 500st or 10%") as caught:
        parse_duration(text)
    assert repr(text) in str(caught.value)


def test_half_a_step_and_more_than_the_run_are_refused():
    with pytest.raises(ConfigError, match=r"steps must be whole.*try 3st"):
        parse_duration("2.6st")
    with pytest.raises(ConfigError, match=r"at most 100%, got '100.1%'"):
        parse_duration("100.1%")


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("1ep", 125),
        ("0.5ep", 63),  # 62.5: half a step still takes one
        ("2ep", 250),
        ("0ep", 0),
        ("0.0001ep", 1),
        ("17st", 17),
        ("10%", 100),
        ("0.1%", 1),
        ("0.11%", 2),
        ("100%", 1000),
    ],
)
def test_a_duration_in_steps_is_rounded_up(text, steps):
    run = RunLength(1000, Fraction(125))
    assert run.count_steps(parse_duration(text)) == steps


def test_decimal_fractions_never_cost_a_step():
    # in floating point 0.1 * 3 epochs of 10 steps is a hair more than 3 steps, and rounds up to 4
    run = RunLength(10, Fraction(10))
    tenths = [parse_duration(f"0.{n}ep") for n in range(1, 10)]
    assert [run.count_steps(tenth) for tenth in tenths] == list(range(1, 10))
    assert run.count_steps(parse_duration("30%")) == 3


@pytest.mark.parametrize("text", ["5ep", "2.5ep", "500st", "10%", "0ep"])
def test_a_duration_is_written_as_it_was_read(text):
    assert str(parse_duration(text)) == text


@pytest.mark.parametrize(
    ("text", "rate"),
    [("2", 2), (2, 2), ("1/2", Fraction(1, 2)), ("0.5", Fraction(1, 2)), ("0", 0), (0.1, 0.1)],
)
def test_a_rate_is_read_exactly(text, rate):
    assert parse_rate(text) == Fraction(str(rate))


@pytest.mark.parametrize("text", ["", "often", "1/0", "nan", "inf", "1/2/3", "2x"])
def test_a_rate_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="such as 2, 1/2 or 0") as caught:
        parse_rate(text)
    assert repr(text) in str(caught.value)


def test_a_negative_rate_is_refused():
    with pytest.raises(ConfigError, match="cannot be negative, got '-1/2'"):
        parse_rate("-1/2")


@pytest.mark.parametrize(
    ("text", "count"),
    [("10", 10), (10, 10), ("0", 0), ("1%", 80), ("0.5 %", 40), ("0.01%", 0), ("100%", 8000)],
)
def test_a_share_is_rounded_down(text, count):
    assert parse_share(text, 8000) == count


@pytest.mark.parametrize("text", ["", "%", "-1", "1.5", "many", "1%%", "nan"])
def test_a_share_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="such as 10 or 1%") as caught:
        parse_share(text, 8000)
    assert repr(text) in str(caught.value)


def test_numbers_for_people():
    assert format_count(1281167) == "1,281,167"
    assert format_count(999.6) == "1,000"
    assert [format_plural(n, "step") for n in (0, 1, 1000)] == ["0 steps", "1 step", "1,000 steps"]
    assert [format_plural(n, "epoch") for n in (1.0, 0.125)] == ["1 epoch", "0.125 epochs"]
    sizes = [0, 1023, 1024, 1536, 2**20, 5 * 2**30, 3 * 2**40, 5000 * 2**40]
    assert [format_bytes(size) for size in sizes] == [
        *("0 B", "1023 B", "1.0 KiB", "1.5 KiB"),
        *("1.0 MiB", "5.0 GiB", "3.0 TiB", "5000.0 TiB"),
    ]
    times = [0, 0.4, 59.4, 59.6, 60, 3599.4, 3599.6, 7322, 90061]
    assert [format_seconds(time) for time in times] == [
        *("0s", "0s", "59s", "1m00s", "1m00s", "59m59s", "1h00m", "2h02m", "25h01m")
    ]
