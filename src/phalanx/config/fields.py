"""How an option is declared, and the kinds of text some of them take."""

import re
from collections.abc import Callable
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from phalanx.catalog.datasets import DATASETS
from phalanx.catalog.models import MODELS, OLD_NAMES
from phalanx.errors import ConfigError
from phalanx.units import (
    parse_betas,
    parse_duration,
    parse_durations,
    parse_numbers,
    parse_pair,
    parse_rate,
    parse_resolutions,
    parse_share,
)


def _checked(parse: Callable[[str], object]) -> AfterValidator:
    """A check that the text can be parsed; the text itself stays the value."""

    def check(text: str) -> str:
        try:
            parse(text)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return text

    return AfterValidator(check)


def _dataset_name(name: str) -> str:
    """The name, if there is such a dataset."""
    if name not in DATASETS:
        raise ValueError(f"no dataset is called {name!r}; {suggest_dataset(name)}")
    return name


def suggest_dataset(name: str) -> str:
    """The way out of a dataset's name that does not exist: the near ones, or all there are."""
    near = get_close_matches(name, DATASETS, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(DATASETS)}"


def model_name(name: str) -> str:
    """The model's name of today; older spellings are accepted."""
    name = OLD_NAMES.get(name, name)
    if name not in MODELS:
        raise ValueError(f"no model is called {name!r}; {_suggest_model(name)}")
    return name


def _suggest_model(name: str) -> str:
    """The way out of a model's name that does not exist: the near ones, and where all are."""
    near = get_close_matches(name, [*MODELS, *OLD_NAMES], n=3, cutoff=0.6)
    quoted = " or ".join(f"{word!r}" for word in near)
    named = f"did you mean {quoted}? " if near else ""
    return f"{named}`phalanx models ls` lists all {len(MODELS)}"


def _check_device(text: str) -> str:
    """The text, if it names devices."""
    if not _DEVICES.match(text):
        raise ConfigError(f"wants auto, cpu, cuda, cuda:0,2 or mps, got {text!r}")
    return text


_DEVICES = re.compile(r"^(auto|cpu|mps|cuda(:\d+(,\d+)*)?)$")
DeviceText = Annotated[str, _checked(_check_device)]
DurationText = Annotated[str, _checked(parse_duration)]
DurationsText = Annotated[str, _checked(parse_durations)]
NumbersText = Annotated[str, _checked(parse_numbers)]
BetasText = Annotated[str, _checked(parse_betas)]
RateText = Annotated[str, _checked(parse_rate)]
ResolutionText = Annotated[str, _checked(parse_resolutions)]
PairText = Annotated[str, _checked(parse_pair)]
ShareText = Annotated[str, _checked(lambda text: parse_share(text, 100))]
ModelName = Annotated[str, AfterValidator(model_name)]
DatasetName = Annotated[str, AfterValidator(_dataset_name)]


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    resumable: bool = False,
    also: tuple[str, ...] = (),
    auto: str = "",
) -> Any:
    """Declare an option.

    resumable: a resume may change it, because it does not touch the maths. also: older
    spellings that are accepted. auto: what stands in when the value is not given.
    """
    extra: dict[str, Any] = {"resumable": resumable, "also": list(also), "auto": auto}
    return Field(default, description=help, ge=low, le=high, json_schema_extra=extra)


class Section(BaseModel):
    """A group of options; frozen, and closed to names it does not know."""

    family: ClassVar[str] = ""  # of models: the only one that has these options
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        alias_generator=lambda name: name.replace("_", "-"),
        populate_by_name=True,
    )
