"""The schema of a sweep's file: how to search, and the ranges and choices to search through."""

from collections.abc import Iterator, Mapping
from itertools import product
from math import floor, prod
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    model_validator,
)

from phalanx.catalog.plugins import list_loaded_plugins

_Value = str | int | float
Values = dict[str, _Value]  # of one trial, by option; values from a list are text
PRESET = "preset"  # may be searched like an option
PLUGIN = "plugin"
_DIGITS = 5  # of a drawn number; more would be meaningless and fill the command line


class _Schema(BaseModel):
    """Strict types, no unknown keys, immutable."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Range(_Schema):
    """Numbers from low to high, both included unless the last step falls short of high."""

    low: float
    high: float
    log: bool = False
    step: float | None = None

    @model_validator(mode="after")
    def _check(self) -> "Range":
        low, high, log, step = self.low, self.high, self.log, self.step
        problems = (
            (low >= high, f"low {low:g} must be below high {high:g}"),
            (
                log and low <= 0,
                f"log: expected low above 0, got {low:g}; leave log out, or raise low",
            ),
            (log and step is not None, "log and step do not go together; leave one out"),
            (step is not None and step <= 0, f"step: must be above 0, got {step}"),
            (step is not None and step > high - low, f"step: {step} does not fit into the range"),
        )
        for is_wrong, problem in problems:
            if is_wrong:
                raise ValueError(problem)
        return self

    @property
    def last(self) -> float:
        """The highest number in the range."""
        if self.step is None:
            return self.high
        return float(f"{self.low + self.step * self._count_steps(self.step):.12g}")

    @property
    def ends(self) -> tuple[_Value, ...]:
        """The values that are checked before anything runs."""
        return (self.low, self.last)

    @property
    def points(self) -> tuple[_Value, ...] | None:
        """All its numbers; None if they cannot be counted."""
        if self.step is None:
            return None
        count = self._count_steps(self.step) + 1
        return tuple(self.round_value(self.low + self.step * number) for number in range(count))

    def _count_steps(self, step: float) -> int:
        return floor((self.high - self.low) / step + 1e-9)

    def round_value(self, value: float) -> float:
        """A drawn number rounded to meaningful digits, within the range."""
        digits = _DIGITS if self.step is None else 12  # 0.1 + 0.2 is 0.3
        return min(max(float(f"{value:.{digits}g}"), self.low), self.last)

    def to_yaml_value(self) -> dict[str, _Value]:
        """The range as written in a file."""
        return {**self.model_dump(exclude_defaults=True), "high": self.last}


class WholeRange(Range):
    """A range of an option that takes integers only."""

    low: int
    high: int
    step: int | None = None

    @property
    def last(self) -> int:
        """The highest number in the range."""
        return range(self.low, self.high + 1, self.step or 1)[-1]

    @property
    def points(self) -> tuple[_Value, ...] | None:
        """All its numbers; on a log scale they are not counted."""
        return None if self.log else tuple(range(self.low, self.high + 1, self.step or 1))

    def round_value(self, value: float) -> int:
        """The nearest integer."""
        return round(value)


class Choice(_Schema):
    """One of several values, each as text that a flag takes."""

    values: tuple[str, ...] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _accept_list(cls, data: Any) -> Any:
        return {"values": tuple(data)} if isinstance(data, list) else data

    @property
    def ends(self) -> tuple[_Value, ...]:
        """The values that are checked before anything runs."""
        return self.values

    @property
    def points(self) -> tuple[_Value, ...] | None:
        """All values."""
        return self.values

    def to_yaml_value(self) -> list[str]:
        """The list as written in a file."""
        return list(self.values)


Dimension = Range | Choice
_SHAPES: dict[type, str] = {list: "list", dict: "mapping"}
_by_shape = Discriminator(lambda data: _SHAPES.get(type(data)))
_Choices = Annotated[Choice, Tag("list")]
# how an option is searched, by the kind of number that it takes
DIMENSIONS: dict[type, TypeAdapter[Any]] = {
    int: TypeAdapter(Annotated[_Choices | Annotated[WholeRange, Tag("mapping")], _by_shape]),
    float: TypeAdapter(Annotated[_Choices | Annotated[Range, Tag("mapping")], _by_shape]),
}


class SweepSettings(_Schema):
    """The keys of a sweep's file that hold a single value."""

    preset: str | None = Field(default=None, min_length=1)  # of every trial
    method: Literal["grid", "random", "tpe"] = "tpe"
    goal: Literal["top1", "top5", "loss"] = "top1"
    prune: Literal["none", "median", "halving"] = "none"
    trials: int = Field(default=0, ge=1)  # 0: as many as there are points
    startup: int = Field(default=5, ge=1)  # trials before tpe and median learn from them
    grace: int = Field(default=1, ge=1)  # validations before a trial may be pruned
    seed: int = Field(default=0, ge=0)


KEYS = (PRESET, "options", "search", *list(SweepSettings.model_fields)[1:])


class SweepFile(SweepSettings):
    """A sweep as its file describes it."""

    name: str
    text: str  # of the file
    options: dict[str, str]  # of every trial, as flags take them
    search: dict[str, Dimension]
    locations: dict[str, str]  # location of each option: "rates.yaml:4: lr"

    @property
    def wants_highest(self) -> bool:
        """Whether a higher score is better."""
        return self.goal != "loss"

    def preset_for(self, values: Values) -> str | None:
        """The preset of a trial."""
        return str(values[PRESET]) if PRESET in values else self.preset

    def flags_for(self, values: Values) -> dict[str, str]:
        """The options of a trial as flags, with the plugins that this process was given."""
        allowed = {PLUGIN: names} if (names := list_loaded_plugins()) else {}
        drawn = {name: format_flag(value) for name, value in values.items() if name != PRESET}
        return {**allowed, **self.options, **drawn}

    def to_dict(self) -> dict[str, Any]:
        """Everything that determines the sweep, for JSON and for comparison."""
        settings = {key: getattr(self, key) for key in SweepSettings.model_fields}
        search = {name: dimension.to_yaml_value() for name, dimension in self.search.items()}
        return {PRESET: settings.pop(PRESET), "options": self.options, "search": search, **settings}


def format_flag(value: _Value) -> str:
    """A value as a flag takes it."""
    return value if isinstance(value, str) else repr(value)


def count_points(space: Mapping[str, Dimension]) -> int | None:
    """How many points a space has; None if they cannot be counted."""
    points = [dimension.points for dimension in space.values()]
    return None if None in points else prod(len(values or ()) for values in points)


def iterate_points(space: Mapping[str, Dimension]) -> Iterator[Values]:
    """Every point of a countable space; the last option varies fastest."""
    for point in product(*(dimension.points or () for dimension in space.values())):
        yield dict(zip(space, point, strict=True))


def iterate_ends(space: Mapping[str, Dimension]) -> Iterator[Values]:
    """For every option its ends or choices, with the others at their first."""
    first = {name: dimension.ends[0] for name, dimension in space.items()}
    for name, dimension in space.items():
        yield from ({**first, name: value} for value in dimension.ends)
