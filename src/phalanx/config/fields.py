"""How an option is declared, and the types of options that are text."""

import math
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from phalanx.catalog.datasets import DATASETS
from phalanx.catalog.models import MODELS, OLD_NAMES
from phalanx.catalog.other_values import describe_other_value
from phalanx.errors import ConfigError, suggest
from phalanx.units import (
    parse_betas,
    parse_duration,
    parse_durations,
    parse_numbers,
    parse_pair,
    parse_rate,
    parse_resolutions,
    parse_share,
    parse_val_split,
)

_DEVICES = re.compile(r"^(auto|cpu|mps|cuda(:\d+(,\d+)*)?)$")


def _parsed_by(parse: Callable[[str], object]) -> AfterValidator:
    """A validator that checks that the text can be parsed, and keeps the text as the value."""

    def check(text: str) -> str:
        try:
            parse(text)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return text

    return AfterValidator(check)


def match_case(word: str, known: Iterable[str]) -> str:
    """The known name that equals the word except for its case; else the word itself.

    >>> match_case("RMSProp", ["sgd", "rmsprop"]), match_case("b", ["A"])
    ('rmsprop', 'b')
    """
    names = list(known)
    same = (name for name in names if name.lower() == word.lower())
    return word if word in names else next(same, word)


def check_dataset_name(name: str) -> str:
    """The dataset's name, in its own case; ValueError if there is no such dataset."""
    name = match_case(name, DATASETS)
    if name not in DATASETS:
        other = describe_other_value("data", name)
        way_out = other or suggest(name, DATASETS, most=len(DATASETS))
        raise ValueError(f"no dataset is called {name!r}; {way_out}")
    return name


def find_model_name(name: str) -> str:
    """The model's current name; older spellings and any case are accepted."""
    name = match_case(name, (*MODELS, *OLD_NAMES))
    name = OLD_NAMES.get(name, name)
    if name not in MODELS:
        near = get_close_matches(name, [*MODELS, *OLD_NAMES], n=3, cutoff=0.6)
        guess = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        way_out = f"{guess}`phalanx models ls` lists all {len(MODELS)}"
        raise ValueError(f"no model is called {name!r}; {way_out}")
    return name


def _check_device(text: str) -> str:
    """The text in lower case; ValueError if it does not name devices."""
    text = text.lower()
    if not _DEVICES.match(text):
        other = describe_other_value("device", text)
        way_out = f"; {other}" if other else ""
        raise ValueError(f"expected auto, cpu, cuda, cuda:0,2 or mps, got {text!r}{way_out}")
    return text


def _check_path(text: str) -> str:
    """The text; ValueError if it cannot be a path."""
    if not text:
        raise ValueError("is empty; name a file or folder, or leave the option out")
    if "\0" in text:
        raise ValueError("contains a zero byte, which no file name can have")
    return text


def _check_image_share(value: bool | float) -> bool | float:
    """True for all, False for none, else the share; ValueError unless whole percents."""
    if not math.isclose(100 * value, round(100 * value), abs_tol=1e-9):
        raise ValueError(f"expected true, false or whole percents such as 0.4, got {value}")
    return bool(value) if value in (0, 1) else round(value, 2)


ImageShare = Annotated[bool | float, AfterValidator(_check_image_share)]
DeviceText = Annotated[str, AfterValidator(_check_device)]
ModelName = Annotated[str, AfterValidator(find_model_name)]
DatasetName = Annotated[str, AfterValidator(check_dataset_name)]
DurationText = Annotated[str, _parsed_by(parse_duration)]
DurationsText = Annotated[str, _parsed_by(parse_durations)]
NumbersText = Annotated[str, _parsed_by(parse_numbers)]
BetasText = Annotated[str, _parsed_by(parse_betas)]
RateText = Annotated[str, _parsed_by(parse_rate)]
ResolutionText = Annotated[str, _parsed_by(parse_resolutions)]
PathText = Annotated[str, AfterValidator(_check_path)]
PairText = Annotated[str, _parsed_by(parse_pair)]
ValSplitText = Annotated[str, _parsed_by(parse_val_split)]
ShareText = Annotated[str, _parsed_by(lambda text: parse_share(text, 100))]


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    resumable: bool = False,
    aliases: tuple[str, ...] = (),
    auto: str = "",
) -> Any:
    """Declare an option.

    resumable: a resume may change it, because it does not affect the maths. aliases: older
    spellings that are accepted. auto: what is used if no value is given.
    """
    more: Any = {"resumable": resumable, "aliases": aliases, "auto": auto, "low": low, "high": high}
    return Field(default, description=help, ge=low, le=high, json_schema_extra=more)


class Section(BaseModel):
    """A group of options; frozen, unknown names are errors."""

    family: ClassVar[str] = ""  # the only model family that has these options
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        alias_generator=lambda name: name.replace("_", "-"),
        populate_by_name=True,
    )
