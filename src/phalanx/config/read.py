"""Merging: default < preset (and what it extends) < file < flag, validated once, all problems told.

Whatever can be known to be wrong is found here, before torch is imported.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from phalanx.catalog.datasets import DATASETS
from phalanx.catalog.plugins import load_plugins
from phalanx.config.combinations import family_of, has_option, impossible
from phalanx.config.fields import suggest_dataset
from phalanx.config.hints import suggest_option
from phalanx.config.presets import Preset, find_preset
from phalanx.config.schema import OPTIONS, SPELLINGS, Config
from phalanx.config.text import WANTED, Given, given_in_file, plain_kind, value_from_text
from phalanx.errors import ConfigError, suggest

_RATES = ("lr", "lr-per-image", "base-learning-rate")
_EXCLUSIVE = (
    ("epochs", "steps"),
    _RATES,
)  # the higher layer's word wins; both in one layer is an error
_DEFAULT_EPOCHS = 10.0
_OF_THE_MODEL = ("shortcut-type", "drop-path", "dropout-rate")  # every model has its own default


@dataclass(frozen=True)
class Settings:
    """A config with its history: who set each option, and the preset it began with."""

    config: Config
    origins: dict[str, str]
    name: str  # of the preset; run folders are called after it
    places: dict[str, str] = field(default_factory=dict)  # "mine.yaml:3: lr" of what was given


_Layer = dict[str, Given]


def read_settings(
    preset: str | None = None,
    flags: Mapping[str, str] | None = None,
    *,
    problems: Iterable[str] = (),
) -> Settings:
    """The complete config for a preset or file and the flags given with it.

    `problems` were found before, on the command line; all are reported together.
    """
    found = list(problems)
    flagged = read_flags(flags or {}, found)
    _load_named_plugins([flagged])  # it may add the dataset whose preset is looked for
    try:
        chosen = find_preset(preset or _default_preset(flagged))
        layers = [*_read_preset(chosen, found), flagged]
    except ConfigError as error:
        raise joined([str(error), *found]) from None
    return settle(layers, found, name=run_name(chosen.name))


def run_name(preset: str) -> str:
    """What runs of a preset or file are called."""
    return preset.rsplit("/", 1)[-1].removesuffix(".yaml").removesuffix(".yml")


def read_flags(flags: Mapping[str, str], problems: list[str]) -> _Layer:
    """Flags by option name, as values of the option's type."""
    layer: _Layer = {}
    for spelling, text in flags.items():
        where = f"--{spelling}"
        name = SPELLINGS.get(spelling)
        if name is None:
            problems.append(f"{where}: no such option; {suggest_option(spelling, OPTIONS)}")
            continue
        try:
            layer[name] = Given(value_from_text(name, text), where, "flag")
        except ValueError as error:
            problems.append(f"{where}: {error}")
    return layer


def _default_preset(flags: _Layer) -> str:
    """The preset of the dataset that was named, or the demo."""
    name = flags["data"].value if "data" in flags else "embedded"
    if name not in DATASETS:
        raise ConfigError(f"--data: no dataset is called {name!r}; {suggest_dataset(name)}")
    return DATASETS[name].preset


def _read_preset(preset: Preset, problems: list[str]) -> list[_Layer]:
    """The preset's options above those of the presets it extends, lowest first."""
    layers: list[_Layer] = []
    seen: list[str] = []
    while True:
        seen.append(preset.name)
        layer, trouble, extends = given_in_file(
            preset.path, inside=preset.inside, origin=preset.origin
        )
        layers.insert(0, layer)
        problems.extend(trouble)
        if extends is None:
            return layers
        if extends in seen:
            raise ConfigError(f"{preset.path}: extends goes in a ring: {' > '.join(seen)}")
        preset = find_preset(extends)


def read_again(
    stored: Mapping[str, Any], *, flags: Mapping[str, str], where: str, name: str
) -> Settings:
    """The config of an existing run, with flags on top."""
    problems = [f"{where}: {key}: no such option" for key in stored if key not in OPTIONS]
    stored = fill_older(stored)
    base: _Layer = {
        key: Given(value, f"{where}: {key}", "run")
        for key, value in stored.items()
        if key in OPTIONS
    }
    flagged = read_flags(flags, problems)
    return settle([base, flagged], problems, name=name)


def fill_older(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a run that was written before they existed, as they were understood then."""
    filled = dict(stored)
    if "shortcut-type" not in stored:  # of the same age: an image's size was the dataset's
        filled["shortcut-type"] = "B"
        data = DATASETS.get(stored.get("data", "embedded"))
        if stored.get("image-size") is None and data is not None:
            filled["image-size"] = data.image_size
    return filled


def _load_named_plugins(layers: list[_Layer]) -> None:
    """Import the plugins that the topmost layer to name any asks for."""
    named = [layer["plugin"].value for layer in layers if "plugin" in layer]
    if named and isinstance(named[-1], str):
        load_plugins(named[-1])


def settle(layers: list[_Layer], problems: list[str], *, name: str) -> Settings:
    """Lay the layers over the defaults and validate the result once."""
    _load_named_plugins(layers)
    merged: _Layer = {}
    for layer in layers:
        for pair in _EXCLUSIVE:
            _drop_rivals(pair, merged=merged, layer=layer, problems=problems)
        if "model" in layer:
            _drop_said_for_another(layer["model"].value, merged)
        merged.update(layer)
    _complete(merged)
    config = _validate(merged, problems)
    if config is not None:
        problems.extend(impossible(config, merged))
    if problems or config is None:
        raise joined(problems)
    origins = {
        option: merged[option].origin if option in merged else "default" for option in OPTIONS
    }
    return Settings(config, origins, name, {key: given.where for key, given in merged.items()})


def _drop_rivals(
    pair: tuple[str, ...], *, merged: _Layer, layer: _Layer, problems: list[str]
) -> None:
    """Forget what lower layers said of a pair of which this layer names one."""
    present = [option for option in pair if option in layer and layer[option].value]
    if len(present) > 1:
        problems.append(f"{layer[present[0]].where}: {_tell_one(pair)}")
    for option in pair if present else ():
        merged.pop(option, None)


def _tell_one(rivals: tuple[str, ...]) -> str:
    """That only one of some options may be given."""
    if len(rivals) == 2:
        return f"give {' or '.join(rivals)}, not both"
    return f"give only one of {', '.join(f'--{option}' for option in rivals)}"


def _drop_said_for_another(model: Any, merged: _Layer) -> None:
    """Forget what lower layers said for the model they had, where it means nothing for this one."""
    other = "model" in merged and merged["model"].value != model
    for name in [name for name in merged if not has_option(family_of(model), name)]:
        del merged[name]
    for name in _OF_THE_MODEL if other else ():
        merged.pop(name, None)


def _complete(merged: _Layer) -> None:
    """Fill in what depends on other options, on the environment, or on the current folder."""
    if not any(option in merged and merged[option].value for option in ("epochs", "steps")):
        merged["epochs"] = Given(_DEFAULT_EPOCHS, "--epochs", "default")
    data = merged["data"].value if "data" in merged else "embedded"
    needs_folder = data in DATASETS and DATASETS[data].needs_folder
    given = merged["data-dir"].value if "data-dir" in merged else None
    if needs_folder and given is None and os.environ.get("DATA_DIR"):
        merged["data-dir"] = Given(os.environ["DATA_DIR"], "DATA_DIR", "environment DATA_DIR")
    weights = merged.get("init-weights")
    if weights is not None and isinstance(weights.value, str):  # found again from any folder
        whole = str(Path(weights.value).expanduser().absolute())
        merged["init-weights"] = replace(weights, value=whole)


def _validate(merged: _Layer, problems: list[str]) -> Config | None:
    """The frozen Config, or None with what is wrong appended to the problems."""
    nested: dict[str, dict[str, Any]] = {}
    for name, given in merged.items():
        nested.setdefault(OPTIONS[name].section, {})[name] = given.value
    try:
        return Config.model_validate(nested)
    except ValidationError as error:
        for detail in error.errors():
            name = str(detail["loc"][1])
            problems.append(f"{merged[name].where}: {_explain(name, detail)}")
        return None


def _explain(name: str, detail: ErrorDetails) -> str:
    """One validation error in a person's words, with the way out."""
    option, value = OPTIONS[name], detail["input"]
    context = detail.get("ctx", {})
    if detail["type"] == "greater_than_equal":
        return f"must be at least {context['ge']}, got {value}"
    if detail["type"] == "less_than_equal":
        return f"must be at most {context['le']}, got {value}"
    if detail["type"] == "literal_error":
        choices = next(a for a in _flatten(option.kind) if get_origin(a) is Literal)
        return f"no choice is called {value!r}; {suggest(str(value), get_args(choices))}"
    if detail["type"] == "value_error":
        return str(context["error"])
    return f"wants {WANTED[plain_kind(option.kind)]}, got {value!r}"


def _flatten(annotation: Any) -> list[Any]:
    """An annotation and everything inside it."""
    inner = () if get_origin(annotation) is Literal else get_args(annotation)
    return [annotation, *(part for kind in inner for part in _flatten(kind))]


def joined(problems: list[str]) -> ConfigError:
    """One error that tells all problems."""
    if len(problems) == 1:
        return ConfigError(problems[0])
    return ConfigError("\n".join([f"{len(problems)} problems:", *(f"  {p}" for p in problems)]))


def dump_config(config: Config) -> str:
    """The config as YAML that reads back to the same values, a comment a section."""
    lines = ["# every option of this run; read back by --resume and --fork"]
    section = ""
    for name, value in config.flat().items():
        if OPTIONS[name].section != section:
            section = OPTIONS[name].section
            lines += ["", f"# {OPTIONS[name].heading}"]
        lines.append(yaml.safe_dump({name: value}, default_flow_style=False).rstrip())
    return "\n".join(lines) + "\n"
