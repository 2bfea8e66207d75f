"""Durations and counts with units, such as "5ep", "500st" and "10%"; text of numbers and tables."""

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from phalanx.errors import ConfigError

_DURATION = re.compile(r"^\s*(\d+(?:\.\d*)?|\.\d+)\s*(ep|st|%)?\s*$")
_MAX_DIGITS = 40  # more digits are a typing error, and exact arithmetic would never end
_HUGE_EXPONENT = re.compile(r"e[-+]?[\d_]{3,}", re.IGNORECASE)


@dataclass(frozen=True)
class Duration:
    """A length of training in epochs, steps or percent of the whole run.

    The amount is exact: 0.1 is one tenth, so that rounding never moves an event by a step.
    """

    amount: Fraction
    unit: str  # "ep", "st" or "%"

    def __str__(self) -> str:
        is_whole = self.amount.denominator == 1
        return f"{self.amount if is_whole else format(float(self.amount), '.15g')}{self.unit}"


@dataclass(frozen=True)
class RunLength:
    """The length of a run, which converts durations to optimizer steps."""

    total_steps: int
    steps_per_epoch: Fraction

    def exact_steps(self, duration: Duration) -> Fraction:
        """A duration in steps, exact."""
        whole = {
            "ep": self.steps_per_epoch,
            "st": Fraction(1),
            "%": Fraction(self.total_steps, 100),
        }[duration.unit]
        return duration.amount * whole

    def count_steps(self, duration: Duration) -> int:
        """A duration in whole steps, rounded up."""
        return ceil(self.exact_steps(duration))


def parse_exact(text: str) -> Fraction:
    """An exact number; ValueError if it is not a number, or has too many digits."""
    if len(text.strip()) > _MAX_DIGITS or _HUGE_EXPONENT.search(text):
        raise ValueError("too many digits")
    return Fraction(text.strip())


def parse_duration(text: str | int | float) -> Duration:
    """Read "5ep", "500st" or "10%"; a bare number counts epochs.

    >>> [str(parse_duration(text)) for text in ("2.5ep", 5, "10 %", "99999999st")]
    ['2.5ep', '5ep', '10%', '99999999st']
    """
    match = _DURATION.match(str(text))
    if not match or len(match[1]) > _MAX_DIGITS:
        raise ConfigError(f"expected a length such as 5ep, 500st or 10%, got {str(text)!r}")
    amount, unit = parse_exact(match[1]), match[2] or "ep"
    if unit == "st" and amount.denominator != 1:
        raise ConfigError(f"steps must be whole, got {str(text)!r}; try {round(amount)}st")
    if unit == "%" and amount > 100:
        raise ConfigError(f"a share of the run is at most 100%, got {str(text)!r}")
    return Duration(amount, unit)


def parse_durations(text: str) -> tuple[Duration, ...]:
    """Comma-separated durations.

    >>> [str(length) for length in parse_durations("30, 60ep, 75%")]
    ['30ep', '60ep', '75%']
    """
    return tuple(parse_duration(part) for part in text.strip("[]").split(","))


def parse_numbers(text: str) -> tuple[Fraction, ...]:
    """Comma-separated numbers, which may be fractions.

    >>> parse_numbers("0.5, 3/4")
    (Fraction(1, 2), Fraction(3, 4))
    """
    try:
        return tuple(parse_exact(part) for part in text.strip("[]").split(","))
    except (ValueError, ZeroDivisionError):
        raise ConfigError(
            f"expected numbers separated by commas, such as 0.5,0.75, got {text!r}"
        ) from None


def parse_betas(text: str) -> tuple[float, float]:
    """Two comma-separated numbers from 0 to below 1.

    >>> parse_betas("0.9,0.999")
    (0.9, 0.999)
    """
    numbers = tuple(map(float, parse_numbers(text)))  # 0.99...9 may round to 1
    if len(numbers) != 2 or not all(0 <= number < 1 for number in numbers):
        raise ConfigError(f"expected two shares from 0 to below 1, such as 0.9,0.999, got {text!r}")
    return numbers[0], numbers[1]


def parse_pair(text: str) -> tuple[float, float]:
    """Two comma-separated positive numbers, the smaller first, which may be fractions.

    >>> parse_pair("3/4, 4/3")
    (0.75, 1.3333333333333333)
    """
    try:
        low, high = (float(parse_exact(part)) for part in text.split(","))
    except (ValueError, ZeroDivisionError):
        raise ConfigError(
            f"expected two numbers separated by a comma, such as 0.08,1, got {text!r}"
        ) from None
    if not 0 < low <= high:
        raise ConfigError(f"expected two numbers above zero, the smaller first, got {text!r}")
    return low, high


def parse_resolutions(text: str) -> tuple[tuple[int, Duration], ...]:
    """Image sizes, each with the end of its use.

    >>> [(size, str(end)) for size, end in parse_resolutions("128:6ep, 176:60%")]
    [(128, '6ep'), (176, '60%')]
    """
    found = []
    for part in text.split(","):
        size, colon, end = part.partition(":")
        if not colon or not re.fullmatch(r"\d{1,4}", size.strip()) or not 8 <= int(size) <= 2048:
            raise ConfigError(
                f"expected sizes of 8 to 2048 and until when, such as 128:30%,176:60%, got {text!r}"
            )
        found.append((int(size), parse_duration(end)))
    return tuple(found)


def parse_rate(text: str | int | float) -> Fraction:
    """A rate per epoch: 2 is twice per epoch, "1/2" every second epoch, 0 never.

    >>> parse_rate("1/3"), parse_rate(2), parse_rate("0.5")
    (Fraction(1, 3), Fraction(2, 1), Fraction(1, 2))
    """
    try:
        rate = parse_exact(str(text))
    except (ValueError, ZeroDivisionError):
        raise ConfigError(
            f"expected times per epoch such as 2, 1/2 or 0, got {str(text)!r}"
        ) from None
    if rate < 0:
        raise ConfigError(f"cannot be negative, got {str(text)!r}")
    return rate


def parse_share(text: str | int, whole: int) -> int:
    """A count, or a share of `whole`, rounded down.

    >>> parse_share("10", 8000), parse_share("1%", 8000)
    (10, 80)
    """
    match = re.match(r"^\s*(\d+(?:\.\d*)?)\s*(%?)\s*$", str(text))
    if not match or len(match[1]) > _MAX_DIGITS or (not match[2] and "." in match[1]):
        raise ConfigError(f"expected a count or a share such as 10 or 1%, got {str(text)!r}")
    return int(Fraction(match[1]) * whole / 100) if match[2] else int(match[1])


def parse_val_split(text: str | int | float) -> Fraction | int:
    """A share between 0 and 1, or a number of images.

    >>> parse_val_split("10%"), parse_val_split("0.1"), parse_val_split("40")
    (Fraction(1, 10), Fraction(1, 10), 40)
    """
    match = re.match(r"^\s*(\d+(?:\.\d*)?|\.\d+)\s*(%?)\s*$", str(text))
    if match and len(match[1]) <= _MAX_DIGITS:
        number = Fraction(match[1])
        if not match[2] and "." not in match[1] and number > 0:
            return int(number)
        share = number / 100 if match[2] else number
        if 0 < share < 1 and (match[2] or "." in match[1]):
            return share
    raise ConfigError(
        f"expected a share such as 10% or 0.1, or a number of images such as 40, got {str(text)!r}"
    )


def format_count(number: float) -> str:
    """A count with thousands separators.

    >>> format_count(1281167)
    '1,281,167'
    """
    return f"{number:,.0f}"


def format_plural(number: float, noun: str) -> str:
    """A number and its noun.

    >>> [format_plural(number, "step") for number in (1, 1000, 0.5, 1251.14)]
    ['1 step', '1,000 steps', '0.5 steps', '1,251.14 steps']
    """
    text = f"{number:,}" if isinstance(number, int) else f"{number:,g}"
    return f"{text} {noun}{'s' * (number != 1)}"


def format_si(number: int) -> str:
    """A large number with three digits and a decimal prefix.

    >>> format_si(25_557_032), format_si(4_089_184_256), format_si(75_290), format_si(640)
    ('25.6 M', '4.09 G', '75.3 k', '640')
    """
    amount, units = float(number), ["", "k", "M", "G", "T", "P"]
    while amount >= 999.5:  # would be rounded to 1000
        amount, units = amount / 1000, units[1:]
    return f"{amount:#.3g}".rstrip(".") + f" {units[0]}" if units[0] else f"{number}"


def format_bytes(count: float) -> str:
    """Bytes in a suitable unit.

    >>> format_bytes(3_000_000), format_bytes(512)
    ('2.9 MiB', '512 B')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """A time in seconds, minutes or hours.

    >>> format_seconds(8), format_seconds(75), format_seconds(7322)
    ('8s', '1m15s', '2h02m')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def format_some(items: Sequence[str], most: int) -> str:
    """The first items of a list in words, and how many more there are.

    >>> format_some(["a", "b"], most=2), format_some(["a", "b", "c"], most=2)
    ('a, b', 'a, b and 1 more')
    """
    more = f" and {len(items) - most:,} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def format_multiples(number: int, factor: int) -> str:
    """The multiples of a factor next to a number that is none of them.

    >>> format_multiples(7, 4), format_multiples(3, 4)
    ('4 or 8', '4')
    """
    below = number // factor * factor
    return " or ".join(str(near) for near in (below, below + factor) if near)


def align_columns(rows: Iterable[Sequence[str]], *, left: Container[int]) -> list[str]:
    """The rows of a table as lines: columns in `left` are left-aligned, all others right-aligned.

    >>> align_columns([("model", "layers"), ("resnet50", "50")], left=[0])
    ['model     layers', 'resnet50      50']
    """
    columns = []
    for place, column in enumerate(zip(*rows, strict=True)):
        align, width = str.ljust if place in left else str.rjust, max(map(len, column))
        columns.append([align(cell, width) for cell in column])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
