"""Reads the file of a sweep; all mistakes in it are reported together, each with its line."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from phalanx.config.read import choose_run_name
from phalanx.config.schema import OPTIONS, SPELLINGS
from phalanx.config.text import (
    YamlEntry,
    YamlLoader,
    parse_option_node,
    parse_option_text,
    read_entries,
    read_mapping,
)
from phalanx.errors import ConfigError, suggest
from phalanx.sweep.schema import (
    DIMENSIONS,
    KEYS,
    PRESET,
    Dimension,
    Range,
    SweepFile,
    SweepSettings,
    count_points,
)

_RESERVED = {  # options that a sweep sets itself, or that would leave it without scores
    "run-dir": "every trial has a folder of its own inside the sweep's; leave it out",
    "training": "a trial that trains nothing has nothing to compare; leave it out",
}
_PROBLEMS = {  # our messages for pydantic's errors
    "literal_error": "expected {choices}, got {written}",
    "int_type": "expected a {number}, got {written}",
    "float_type": "expected a {number}, got {written}",
    "finite_number": "expected a {number}, got {written}",
    "greater_than_equal": "expected a {number}, got {written}",
    "missing": "expected a {number}, it is missing",
    "bool_type": "expected true or false, got {written}",
    "string_type": "expected one preset or file; several go under search:",
    "string_too_short": "expected one preset or file; several go under search:",
    "union_tag_not_found": "expected a list, or low and high; a single value goes under options:",
    "too_short": "the list is empty; give at least one value",
}


class SweepFileReader:
    """Reads a sweep's file, and collects the lines of its entries and what is wrong with them."""

    def __init__(self, path: Path):
        self.path = path
        self.problems: list[str] = []
        self._locations: dict[str, str] = {}

    def read(self) -> SweepFile | None:
        """The sweep as far as it can be read; None if too much is wrong."""
        entries = {entry.key: entry for entry in read_entries(self.path)}
        if PRESET in entries:
            self._locations[PRESET] = self._locate(entries[PRESET])
        options = self._read_options(entries.pop("options", None))
        search = self._read_search(entries.pop("search", None))
        settings = self._read_settings(entries)
        if settings.preset and PRESET in search:
            self._add_problem(entries[PRESET], "is searched too; leave it out here, or there")
        trials = self._count_trials(settings, search, is_given="trials" in entries)
        if trials is None:
            return None
        return SweepFile(
            **{**dict(settings), "trials": trials},
            name=choose_run_name(self.path.name),
            text=self.path.read_text(encoding="utf-8"),
            options=options,
            search=search,
            locations=self._locations,
        )

    def _locate(self, entry: YamlEntry) -> str:
        return f"{self.path}:{entry.line}: {entry.key}"

    def _add_problem(self, entry: YamlEntry, problem: str) -> None:
        self.problems.append(f"{self._locate(entry)}: {problem}")

    @contextmanager
    def _collect_problems(self, entry: YamlEntry) -> Iterator[None]:
        """Within the block, a ValueError is recorded as a problem of that key."""
        try:
            yield
        except ValueError as error:
            self._add_problem(entry, str(error))

    def _read_mapping(self, entry: YamlEntry) -> list[YamlEntry]:
        """The keys of a mapping; empty, and a problem, if it is not a mapping."""
        try:
            return read_mapping(YamlLoader(""), entry.node, self.path)
        except (ConfigError, yaml.YAMLError) as error:
            self.problems.append(str(error))
            return []

    def _read_settings(self, entries: Mapping[str, YamlEntry]) -> SweepSettings:
        """The keys with a single value; a wrong one is replaced by its default."""
        values = {
            key: entry.node.value if key == PRESET else _read_scalar(entry.node)
            for key, entry in entries.items()
        }
        try:
            return SweepSettings.model_validate(values)
        except ValidationError as error:
            for detail in error.errors():
                key = str(detail["loc"][0])
                self._add_problem(entries[key], _explain_setting(key, detail, entries[key].node))
                del values[key]
        return SweepSettings.model_validate(values)

    def _read_options(self, entry: YamlEntry | None) -> dict[str, str]:
        """The options of every trial, as text for flags."""
        options = {}
        for one in self._read_mapping(entry) if entry else ():
            with self._collect_problems(one):
                name = self._find_option(one)
                options[name] = _read_text(name, one.node)
        return options

    def _find_option(self, entry: YamlEntry) -> str:
        """The name of the option that a key means; ValueError if it means none."""
        name = SPELLINGS.get(entry.key.replace("_", "-"))
        if name is None:
            raise ValueError(f"no such option; {suggest(entry.key, OPTIONS)}")
        if name in _RESERVED:
            raise ValueError(_RESERVED[name])
        if name in self._locations:
            raise ValueError(f"is already given at {self._locations[name]}; remove one")
        self._locations[name] = self._locate(entry)
        return name

    def _read_search(self, entry: YamlEntry | None) -> dict[str, Dimension]:
        """What is searched, option by option."""
        if entry is None:
            self.problems.append(
                f"{self.path}: nothing to search; add search: with options and their values"
            )
            return {}
        search: dict[str, Dimension] = {}
        entries = self._read_mapping(entry)
        for one in entries:
            with self._collect_problems(one):
                name = PRESET if one.key == PRESET else self._find_option(one)
                self._locations.setdefault(name, self._locate(one))
                dimension = self._read_dimension(name, one)
                if dimension is not None:
                    search[name] = dimension
        if not entries and isinstance(entry.node, yaml.MappingNode):
            self._add_problem(entry, "is empty; name options and their values")
        return search

    def _read_dimension(self, name: str, entry: YamlEntry) -> Dimension | None:
        """The list or the range of one option; None, and a problem, if something is wrong."""
        kind = str if name == PRESET else OPTIONS[name].type
        known_problems = len(self.problems)
        keys: dict[str, yaml.Node] = {}
        data: Any = None
        if isinstance(entry.node, yaml.SequenceNode):
            data = self._read_choices(name, entry)
        elif isinstance(entry.node, yaml.MappingNode):
            if kind not in DIMENSIONS:
                raise ValueError("takes no range of numbers; give a list of its values")
            keys = {one.key: one.node for one in self._read_mapping(entry)}
            data = {key: _read_scalar(node) for key, node in keys.items()}
        if len(self.problems) > known_problems:
            return None
        try:
            return DIMENSIONS.get(kind, DIMENSIONS[float]).validate_python(data)
        except ValidationError as error:
            for detail in error.errors():
                self._add_problem(entry, _explain_dimension(detail, keys, is_whole=kind is int))
            return None

    def _read_choices(self, name: str, entry: YamlEntry) -> list[str]:
        """A list of values as text for flags; a duplicate is a problem."""
        texts: list[str] = []
        values: list[Any] = []
        for node in entry.node.value:
            with self._collect_problems(entry):
                text = _read_text(name, node)
                value = text if name == PRESET else parse_option_text(name, text)
                if value in values:
                    first = texts[values.index(value)]
                    raise ValueError(f"{first} is in the list twice; remove one")
                texts.append(text)
                values.append(value)
        return texts

    def _count_trials(
        self, settings: SweepSettings, search: dict[str, Dimension], *, is_given: bool
    ) -> int | None:
        """How many trials there will be: those asked for, but no more than there are points."""
        is_grid = settings.method == "grid"
        uncountable = [name for name, dimension in search.items() if dimension.points is None]
        for name in uncountable if is_grid else ():
            self.problems.append(
                f"{self._locations[name]}: a grid needs points; add step:, or give a list"
            )
        if not is_grid and not is_given:
            whole = "" if uncountable else ", or method: grid, which runs every combination"
            self.problems.append(f"{self.path}: add trials:, the number of runs{whole}")
        counts = [count for count in (settings.trials, count_points(search)) if count]
        is_known = settings.trials or (is_grid and not uncountable)
        return min(counts) if search and is_known else None


def _read_scalar(node: yaml.Node) -> Any:
    """A scalar as YAML reads it; anything else as its source text."""
    if isinstance(node, yaml.ScalarNode):
        with suppress(ValueError, yaml.YAMLError):
            return YamlLoader("").construct_object(node)
    return node.value


def _read_text(name: str, node: yaml.Node) -> str:
    """A value as text for that option's flag: as written, if that means the same."""
    if name == PRESET:
        if not isinstance(node, yaml.ScalarNode):
            raise ValueError("expected a list of presets or files")
        return str(node.value)
    value, text = parse_option_node(name, node), str(node.value)
    with suppress(ValueError):  # valid only in YAML, such as 0x10
        if parse_option_text(name, text) == value:
            return text
    text = "null" if value is None else str(value).lower() if value is True else str(value)
    parse_option_text(name, text)  # raises if YAML read a word where a number is expected
    return text


def _explain_setting(key: str, detail: ErrorDetails, node: yaml.Node) -> str:
    """What is wrong with a key of the file, and how to fix it."""
    if detail["type"] == "extra_forbidden" and key.replace("_", "-") in SPELLINGS:
        return "is an option of `phalanx train`; it belongs under options: or search:"
    if detail["type"] == "extra_forbidden":
        return f"no such key; {suggest(key, KEYS)}"
    field = SweepSettings.model_fields[key]
    least = next((rule.ge for rule in field.metadata if hasattr(rule, "ge")), None)
    choices = ", ".join(map(str, get_args(field.annotation)))
    return _PROBLEMS[detail["type"]].format(
        choices=choices, number=f"whole number from {least} on", written=_quote(node)
    )


def _explain_dimension(
    detail: ErrorDetails, keys: Mapping[str, yaml.Node], *, is_whole: bool
) -> str:
    """What is wrong with a list or a range, and how to fix it."""
    key = str(detail["loc"][-1]) if len(detail["loc"]) > 1 else ""
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    if detail["type"] == "extra_forbidden":
        return f"{key}: a range has no such key; {suggest(key, Range.model_fields)}"
    number = "whole number" if is_whole else "number"
    written = _quote(keys[key]) if key in keys else ""
    problem = _PROBLEMS[detail["type"]].format(number=number, written=written)
    return f"{key}: {problem}" if key in Range.model_fields else problem


def _quote(node: yaml.Node) -> str:
    """The text in the file, quoted for a message."""
    return repr(node.value) if isinstance(node, yaml.ScalarNode) else "a list or a mapping"
