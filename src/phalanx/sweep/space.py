"""What a sweep looks through: ranges of numbers and lists of choices."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import floor, prod

_Value = str | int | float
Values = dict[str, _Value]  # of one trial, by option; what comes from a list is text
_DIGITS = 5  # of a drawn number; more would tell nothing and fill the command line


@dataclass(frozen=True, kw_only=True)
class Range:
    """Numbers from low to high, both among them."""

    low: float
    high: float
    whole: bool  # the option takes whole numbers only
    log: bool = False
    step: float | None = None

    @property
    def ends(self) -> tuple[_Value, ...]:
        """The values that are tried out before anything runs."""
        return (self.low, self.high)

    @property
    def points(self) -> tuple[_Value, ...] | None:
        """All its numbers, where they can be counted."""
        step = 1 if self.whole and self.step is None and not self.log else self.step
        if step is None:
            return None
        count = count_steps(self.low, self.high, step) + 1
        return tuple(self.tidy(self.low + step * place) for place in range(count))

    def tidy(self, value: float) -> _Value:
        """A drawn number with as many digits as tell something, inside the range."""
        if self.whole:
            return round(value)
        digits = _DIGITS if self.step is None else 12  # 0.1 + 0.2 is 0.3
        return min(max(float(f"{value:.{digits}g}"), self.low), self.high)

    def facts(self) -> dict[str, _Value]:
        """The range as it stands in a file."""
        told: dict[str, _Value] = {"low": self.low, "high": self.high}
        told |= {"log": True} if self.log else {}
        return told | ({} if self.step is None else {"step": self.step})


@dataclass(frozen=True)
class Choice:
    """One of several values, each as text that a flag takes."""

    values: tuple[str, ...]

    @property
    def ends(self) -> tuple[_Value, ...]:
        """The values that are tried out before anything runs."""
        return self.values

    @property
    def points(self) -> tuple[_Value, ...] | None:
        """All values."""
        return self.values

    def facts(self) -> list[str]:
        """The list as it stands in a file."""
        return list(self.values)


Dimension = Range | Choice
_Space = Mapping[str, Dimension]


def count_steps(low: float, high: float, step: float) -> int:
    """How many whole steps fit between two numbers."""
    return floor((high - low) / step + 1e-9)


def count_points(space: _Space) -> int | None:
    """How many points a space has; None where they cannot be counted."""
    counts = [len(d.points) if d.points is not None else None for d in space.values()]
    known = [count for count in counts if count is not None]
    return prod(known) if len(known) == len(counts) else None


def iterate_points(space: _Space) -> Iterator[Values]:
    """Every point of a space that can be counted, the last option moving fastest."""
    for point in product(*(dimension.points or () for dimension in space.values())):
        yield dict(zip(space, point, strict=True))


def iterate_ends(space: _Space) -> Iterator[Values]:
    """For every option its ends or choices, the others at their first."""
    first = {name: dimension.ends[0] for name, dimension in space.items()}
    for name, dimension in space.items():
        yield from ({**first, name: value} for value in dimension.ends)


def as_text(value: _Value) -> str:
    """A value as a flag takes it."""
    return value if isinstance(value, str) else repr(value)
