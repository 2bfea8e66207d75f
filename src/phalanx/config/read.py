"""Merges options: default < preset (and what it extends) < file < flag, validated once.

All errors that can be detected without torch are reported here.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from phalanx.catalog.datasets import DATASETS
from phalanx.catalog.models import MODELS, SMALL_NETWORKS
from phalanx.catalog.other_values import describe_other_value
from phalanx.catalog.plugins import load_plugins, refuse_unnamed_plugins
from phalanx.config.combinations import family_has_option, find_conflicts, find_family
from phalanx.config.fields import check_dataset_name, find_model_name
from phalanx.config.hints import suggest_option
from phalanx.config.presets import Preset, find_preset
from phalanx.config.schema import OPTIONS, SPELLINGS, Config, Option
from phalanx.config.text import OptionValue, parse_option_text, read_option_file
from phalanx.disk import expand_home
from phalanx.errors import ConfigError, join_problems, suggest
from phalanx.units import Duration, parse_duration

EXCLUSIVE = (  # the higher layer's option wins; two in one layer are an error
    ("epochs", "steps"),
    ("lr", "lr-per-image", "base-learning-rate"),
    ("gradient-accumulation", "global-batch-size"),
)
_DEFAULT_EPOCHS = 10.0
_STORED = "run"  # the origin of options stored in an existing run
_FLAG = "flag"  # the origin of options given on the command line, or as a keyword
MODEL_DEFAULTS = ("shortcut-type", "drop-path", "dropout-rate")  # their default is the model's


@dataclass(frozen=True)
class Settings:
    """A config with the origin of each option, and the preset it is based on."""

    config: Config
    origins: dict[str, str]
    name: str  # of the preset; run folders are named after it
    locations: dict[str, str] = field(default_factory=dict)  # where it was given: "my.yaml:3: lr"
    required: str | None = None  # the option without which the preset cannot be used
    preset_length: Duration | None = None  # the length of the preset, or of a fork's parent
    notes: tuple[str, ...] = ()  # about options whose meaning may surprise
    numbered_replicas: int = 1  # the last number of replicas given, which auto replaces

    @property
    def missing(self) -> str:
        """A message if an option that the preset requires is missing; else empty."""
        if self.required is None or self.config.flat()[self.required] is not None:
            return ""
        if self.required == "init-weights":
            return (
                f"{self.name}: finetunes weights, and none are named; give --init-weights FILE, or "
                "choose a preset that starts from random weights"
            )
        return f"{self.name}: needs --{self.required}"

    @property
    def user_options(self) -> frozenset[str]:
        """The options that the user gave, by a flag or in their own file."""
        return frozenset(
            name for name, origin in self.origins.items() if origin.startswith((_FLAG, "file "))
        )

    def replace_options(
        self, options: Mapping[str, Any], *, origin: str = "", notes: Iterable[str] = ()
    ) -> "Settings":
        """The settings with other values for these options, and more notes; origin: a new one."""
        return replace(
            self,
            config=self.config.replace_options(options),
            origins=self.origins | (dict.fromkeys(options, origin) if origin else {}),
            notes=(*self.notes, *notes),
        )


_Layer = dict[str, OptionValue]


def read_settings(
    preset: str | None = None,
    flags: Mapping[str, str] | None = None,
    *,
    problems: Iterable[str] = (),
) -> Settings:
    """The complete config for a preset or file and the flags given with it.

    problems: those already found on the command line; all are reported together.
    """
    found = list(problems)
    layer = read_flags(flags or {}, found)
    _load_named_plugins([layer])  # a plugin may add the dataset whose preset is needed
    try:
        chosen = find_preset(preset or _choose_default_preset(layer))
        preset_layers, required = _read_preset(chosen, found)
    except ConfigError as error:
        raise join_problems([str(error), *found]) from None
    settings = merge_layers([*preset_layers, layer], found, name=choose_run_name(chosen.name))
    lengths = [
        find_length({name: given.value for name, given in preset_layer.items()})
        for preset_layer in reversed(preset_layers)
    ]
    preset_length = next((length for length in lengths if length is not None), None)
    return replace(settings, required=required, preset_length=preset_length)


def choose_run_name(preset: str) -> str:
    """The name for runs of a preset or file."""
    return preset.rsplit("/", 1)[-1].removesuffix(".yaml").removesuffix(".yml")


def read_flags(flags: Mapping[str, str], problems: list[str]) -> _Layer:
    """The values of flags, by option name; problems are appended."""
    layer: _Layer = {}
    for spelling, text in flags.items():
        where = f"--{spelling}"
        name = SPELLINGS.get(spelling)
        if name is None:
            problems.append(f"{where}: no such option; {suggest_option(spelling, OPTIONS, flags)}")
            continue
        try:
            layer[name] = OptionValue(parse_option_text(name, text), where, _FLAG)
        except ValueError as error:
            problems.append(f"{where}: {error}")
    return layer


def _choose_default_preset(flags: _Layer) -> str:
    """The preset of the dataset, for the model's family if there is one; else the demo."""
    try:
        name = check_dataset_name(flags["data"].value) if "data" in flags else "embedded"
    except ValueError as error:
        raise ConfigError(f"--data: {error}") from None
    model = _find_model(flags)
    size = MODELS[model].image_size if model else DATASETS[name].image_size
    return DATASETS[name].preset_for(model, model_size=size)


def _find_model(layer: _Layer) -> str:
    """The model's current name; empty if none is given, or it does not exist."""
    try:
        return find_model_name(str(_get_value(layer, "model") or ""))
    except ValueError:
        return ""  # reported later, together with all other problems


def _get_value(layer: _Layer, name: str) -> Any:
    """The value of an option; None if it is not given."""
    return layer[name].value if name in layer else None


def _read_preset(preset: Preset, problems: list[str]) -> tuple[list[_Layer], str | None]:
    """The layers of a preset and of those it extends, and the option that it requires."""
    layers: list[_Layer] = []
    seen: list[str] = []
    required = None
    while True:
        seen.append(preset.name)
        layer, own_problems, extends, requires = read_option_file(
            preset.path, origin=preset.origin, entry_name=preset.entry_name
        )
        layers.insert(0, layer)
        required = required or requires
        problems.extend(own_problems)
        if extends is None:
            return layers, required
        if extends in seen:
            raise ConfigError(f"{preset.path}: extends forms a cycle: {' > '.join(seen)}")
        preset = find_preset(extends)


def find_length(options: Mapping[str, Any]) -> Duration | None:
    """The length of a run; None if the options do not give a valid one."""
    for name, unit in (("steps", "st"), ("epochs", "ep")):
        if options.get(name) is not None:
            try:
                return parse_duration(f"{options[name]}{unit}")
            except ConfigError:
                return None  # reported later, together with all other problems
    return None


def read_stored_settings(
    stored: Mapping[str, Any], *, flags: Mapping[str, str], where: str, name: str
) -> Settings:
    """The config of an existing run, with flags on top."""
    problems = [f"{where}: {key}: no such option" for key in stored if key not in OPTIONS]
    base: _Layer = {
        key: OptionValue(value, f"{where}: {key}", _STORED)
        for key, value in fill_older_options(stored).items()
        if key in OPTIONS
    }
    for rivals in EXCLUSIVE:  # a run stores all values: a default must not exclude another option
        given = [option for option in rivals if _get_value(base, option) is not None]
        for option in given if len(given) > 1 else ():
            if base[option].value == OPTIONS[option].default:
                del base[option]
    return merge_layers([base, read_flags(flags, problems)], problems, name=name)


def fill_older_options(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an older run, with those it lacks set to the behaviour of its time."""
    filled = dict(stored)
    if "shortcut-type" not in stored:  # at that time, the image size was the dataset's
        filled["shortcut-type"] = "B"
        data = DATASETS.get(stored.get("data", "embedded"))
        if stored.get("image-size") is None and data is not None:
            filled["image-size"] = data.image_size
    filled.setdefault("max-pixels", 178_000_000)  # Pillow's limit
    filled.setdefault("listing-rule", 1)
    filled.setdefault("exif-orientation", False)
    filled.setdefault("kernels", "torch")
    filled.setdefault("crop-rule", 1)
    filled.setdefault("gpu-decode", False)
    return filled


def _load_named_plugins(layers: list[_Layer]) -> None:
    """Import the plugins of the topmost layer that names any; ConfigError unless it is a flag."""
    named = [layer["plugin"] for layer in layers if "plugin" in layer]
    if not named or not isinstance(named[-1].value, str):
        return
    if named[-1].origin == _FLAG:
        load_plugins(named[-1].value)
    else:
        refuse_unnamed_plugins(named[-1].value, where=named[-1].where)


def merge_layers(layers: list[_Layer], problems: list[str], *, name: str) -> Settings:
    """The settings from the layers, later ones on top, validated once; reports all problems."""
    _load_named_plugins(layers)
    merged: _Layer = {}
    for layer in layers:
        _drop_exclusive(merged, layer, problems)
        if "model" in layer:
            _drop_options_of_other_model(layer["model"].value, merged)
        merged.update(layer)
    notes = _choose_small_network(merged)
    _fill_dependent_options(merged)
    config = _validate(merged, problems)
    if config is not None:
        problems.extend(find_conflicts(config, merged))
    if problems or config is None:
        raise join_problems(problems)
    origins = {
        option: merged[option].origin if option in merged else "default" for option in OPTIONS
    }
    locations = {key: given.where for key, given in merged.items()}
    texts = [str(_get_value(layer, "replicas")) for layer in layers]
    numbered = [1, *(int(text) for text in texts if text.isdecimal())][-1]
    return Settings(config, origins, name, locations, notes=notes, numbered_replicas=numbered)


def _drop_exclusive(merged: _Layer, layer: _Layer, problems: list[str]) -> None:
    """Drop options of lower layers that exclude one of this layer."""
    for rivals in EXCLUSIVE:
        given = [option for option in rivals if _get_value(layer, option) is not None]
        if len(given) > 1:
            one = f"only one of {', '.join(f'--{option}' for option in rivals)}"
            both = f"{' or '.join(rivals)}, not both"
            where = layer[given[0]].where
            problems.append(f"{where}: give {both if len(rivals) == 2 else one}")
        for option in rivals if given else ():
            merged.pop(option, None)


def _drop_options_of_other_model(model: Any, merged: _Layer) -> None:
    """Drop options of lower layers that were meant for another model or do not fit this one."""
    if _get_value(merged, "model") not in (None, model):
        for name in MODEL_DEFAULTS:
            merged.pop(name, None)
    for name in [name for name in merged if not family_has_option(find_family(model), name)]:
        del merged[name]


def _choose_small_network(merged: _Layer) -> tuple[str, ...]:
    """If a name stands for two networks, choose the one for small images if the data has such."""
    dataset, model = DATASETS.get(str(_get_value(merged, "data"))), merged.get("model")
    if dataset is None or dataset.any_size or model is None or model.origin == _STORED:
        return ()
    small = SMALL_NETWORKS.get(_find_model(merged))
    if small is None:
        return ()
    merged["model"] = replace(model, value=small)
    data = _get_value(merged, "data")
    return (f"--model {model.value} is {small} here: {data} has small images",)


def _fill_dependent_options(merged: _Layer) -> None:
    """Fill in options that depend on others, the environment or the current folder."""
    if _get_value(merged, "epochs") is None and _get_value(merged, "steps") is None:
        merged["epochs"] = OptionValue(_DEFAULT_EPOCHS, "--epochs", "default")
    dataset = DATASETS.get(_get_value(merged, "data") or "embedded")
    folder = os.environ.get("DATA_DIR")
    if dataset and dataset.needs_folder and _get_value(merged, "data-dir") is None and folder:
        merged["data-dir"] = OptionValue(folder, "DATA_DIR", "environment DATA_DIR")
    for name in ("init-weights", "labels"):  # absolute, so that a resume finds them
        path = _get_value(merged, name)
        if isinstance(path, str) and path:
            whole = str(expand_home(path).absolute())
            merged[name] = replace(merged[name], value=whole)


def _validate(merged: _Layer, problems: list[str]) -> Config | None:
    """The frozen Config; None if it is invalid, with the reasons appended to `problems`."""
    nested: dict[str, dict[str, Any]] = {}
    for name, given in merged.items():
        nested.setdefault(OPTIONS[name].section, {})[name] = given.value
    try:
        return Config.model_validate(nested)
    except ValidationError as error:
        lines = []
        for detail in error.errors():
            name = str(detail["loc"][1])
            lines.append(f"{merged[name].where}: {_describe_error(OPTIONS[name], detail)}")
        # a value that is of neither of two types is reported once
        problems.extend(dict.fromkeys(lines))
        return None


def _describe_error(option: Option, detail: ErrorDetails) -> str:
    """One validation error in words, with what to do."""
    value, context = detail["input"], detail.get("ctx", {})
    match detail["type"]:
        case "greater_than_equal":
            return f"must be at least {context['ge']}, got {value}"
        case "less_than_equal":
            return f"must be at most {context['le']}, got {value}"
        case "literal_error":
            other = describe_other_value(option.name, str(value))
            return f"no choice is called {value!r}; {other or suggest(str(value), option.choices)}"
        case "value_error":
            return str(context["error"])
    return f"expected {option.expected_values}, got {value!r}"


def dump_config(config: Config) -> str:
    """The config as YAML that reads back to the same values, with a comment per section."""
    lines = ["# every option of this run; read back by --resume and --fork"]
    section = ""
    for name, value in config.flat().items():
        if OPTIONS[name].section != section:
            section = OPTIONS[name].section
            lines += ["", f"# {OPTIONS[name].heading}"]
        lines.append(yaml.safe_dump({name: value}, default_flow_style=False).rstrip())
    return "\n".join(lines) + "\n"
