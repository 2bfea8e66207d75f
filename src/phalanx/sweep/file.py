"""The file of a sweep: read, with every mistake in it told at once and by its line."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from phalanx.config.read import run_name
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
from phalanx.sweep.space import Choice, Dimension, Range, count_points, count_steps

_METHODS = ("grid", "random", "tpe")
_GOALS = {"top1": "highest", "top5": "highest", "loss": "lowest"}
_PRUNERS = ("none", "median", "halving")
PRESET = "preset"  # may be searched like an option
_OURS = {  # options that a sweep sets itself, or that would leave it without scores
    "run-dir": "every trial has a folder of its own inside the sweep's; leave it away",
    "training": "a trial that trains nothing tells nothing; leave it away",
}
_RANGE_KEYS = ("low", "high", "log", "step")
_COUNTS = {"trials": 1, "startup": 1, "grace": 1, "seed": 0}  # key: the least it may be
_DEFAULTS: dict[str, Any] = {"method": "tpe", "goal": "top1", "prune": "none"}
_DEFAULTS |= {"startup": 5, "grace": 1, "seed": 0}
_WORDS = {"method": _METHODS, "goal": tuple(_GOALS), "prune": _PRUNERS}
KEYS = (PRESET, "options", "search", *_WORDS, *_COUNTS)


@dataclass(frozen=True, kw_only=True)
class SweepFile:
    """A sweep as its file describes it."""

    name: str
    text: str  # of the file
    preset: str | None
    options: dict[str, str]  # of every trial, as flags take them
    search: dict[str, Dimension]
    method: str
    goal: str
    prune: str
    trials: int  # never more than there are points
    startup: int  # trials before tpe and median learn from them
    grace: int  # validations that no trial is pruned before
    seed: int
    places: dict[str, str] = field(default_factory=dict)  # where each option stands

    @property
    def wants_highest(self) -> bool:
        """Whether a higher score is a better one."""
        return _GOALS[self.goal] == "highest"

    def facts(self) -> dict[str, Any]:
        """What decides the course of the sweep, for JSON and for comparing."""
        return {
            "preset": self.preset,
            "options": self.options,
            "search": {name: dimension.facts() for name, dimension in self.search.items()},
            **{key: getattr(self, key) for key in (*_WORDS, *_COUNTS)},
        }


class _Notes:
    """Where things stand in a file, and what is wrong with them."""

    def __init__(self, path: Path):
        self.path = path
        self.problems: list[str] = []
        self.places: dict[str, str] = {}

    def complain(self, entry: YamlEntry, text: str) -> None:
        """Note a problem of that key."""
        self.problems.append(f"{self.path}:{entry.line}: {entry.key}: {text}")

    def inside(self, entry: YamlEntry | None) -> list[YamlEntry]:
        """The keys of a mapping; none, and a problem, where it is no mapping."""
        loader = YamlLoader("")
        try:
            return read_mapping(loader, entry.node, self.path) if entry else []
        except (ConfigError, yaml.YAMLError) as error:
            self.problems.append(str(error))
            return []
        finally:
            loader.dispose()

    def option(self, entry: YamlEntry) -> str | None:
        """The name of the option that a key means, or None with a problem noted."""
        name = SPELLINGS.get(entry.key.replace("_", "-"))
        if name is None:
            self.complain(entry, f"no such option; {suggest(entry.key, OPTIONS)}")
        elif name in _OURS:
            self.complain(entry, _OURS[name])
        elif name in self.places:
            self.complain(entry, f"stands at {self.places[name]} already; leave one away")
        else:
            self.places[name] = f"{self.path}:{entry.line}: {entry.key}"
            return name
        return None


def read_sweep(path: Path) -> tuple[SweepFile | None, list[str]]:
    """The sweep in a file, and what is wrong; None where too much is."""
    entries = {entry.key: entry for entry in read_entries(path)}
    notes = _Notes(path)
    for key in entries.keys() - set(KEYS):
        notes.complain(entries[key], _explain_unknown(key))
    settings = _read_words(entries, notes) | _read_counts(entries, notes)
    preset = _read_preset_name(entries.get(PRESET), notes)
    options = _read_options(notes.inside(entries.get("options")), notes)
    search = _read_search(entries.get("search"), notes)
    if preset and PRESET in search:
        notes.complain(entries[PRESET], "is searched too; leave it away here, or there")
    trials = _read_trials(settings, search, entries=entries, notes=notes)
    if trials is None:
        return None, notes.problems
    sweep = SweepFile(
        name=run_name(path.name),
        text=path.read_text(encoding="utf-8"),
        preset=preset,
        options=options,
        search=search,
        places=notes.places,
        **{**_DEFAULTS, **settings, "trials": trials},
    )
    return sweep, notes.problems


def _explain_unknown(key: str) -> str:
    """What is wrong with a key of the file, and the way out."""
    if key.replace("_", "-") in SPELLINGS:
        return "is an option of `phalanx train`; it belongs under options: or search:"
    return f"no such key; {suggest(key, KEYS)}"


def _plain_value(node: yaml.Node) -> Any:
    """A scalar as YAML understands it; None where it is none."""
    if not isinstance(node, yaml.ScalarNode):
        return None
    loader = YamlLoader("")
    try:
        return loader.construct_object(node)
    except (ValueError, yaml.YAMLError):
        return None
    finally:
        loader.dispose()


def _written(node: yaml.Node) -> str:
    """What stands in the file, for a message."""
    return repr(node.value) if isinstance(node, yaml.ScalarNode) else "a list or a mapping"


def _read_words(entries: Mapping[str, YamlEntry], notes: _Notes) -> dict[str, Any]:
    """The keys that take one of a few words."""
    found = {}
    for key, known in _WORDS.items():
        entry = entries.get(key)
        if entry is None:
            continue
        word = entry.node.value if isinstance(entry.node, yaml.ScalarNode) else ""
        if word in known:
            found[key] = word
        else:
            notes.complain(entry, f"wants {', '.join(known)}, got {_written(entry.node)}")
    return found


def _read_counts(entries: Mapping[str, YamlEntry], notes: _Notes) -> dict[str, Any]:
    """The keys that take a whole number."""
    found = {}
    for key, least in _COUNTS.items():
        entry = entries.get(key)
        value = _plain_value(entry.node) if entry else None
        if type(value) is int and value >= least:
            found[key] = value
        elif entry:
            told = f"wants a whole number from {least} on, got {_written(entry.node)}"
            notes.complain(entry, told)
    return found


def _read_preset_name(entry: YamlEntry | None, notes: _Notes) -> str | None:
    """The preset of all trials."""
    if entry is None:
        return None
    notes.places[PRESET] = f"{notes.path}:{entry.line}: {PRESET}"
    if isinstance(entry.node, yaml.ScalarNode) and entry.node.value:
        return entry.node.value
    notes.complain(entry, "wants one preset or file; several go under search:")
    return None


def _read_options(entries: list[YamlEntry], notes: _Notes) -> dict[str, str]:
    """What every trial has, as flags take it."""
    found = {}
    for entry in entries:
        name = notes.option(entry)
        text = None if name is None else _read_text(name, entry, entry.node, notes)
        if name is not None and text is not None:
            found[name] = text
    return found


def _read_text(name: str, entry: YamlEntry, node: yaml.Node, notes: _Notes) -> str | None:
    """A value as a flag of that option takes it; None with a problem noted."""
    try:
        text = _text_for(name, parse_option_node(name, node), str(node.value))
        parse_option_text(name, text)  # YAML reads a word where a number is wanted
        return text
    except ValueError as error:
        notes.complain(entry, str(error))
        return None


def _text_for(name: str, value: Any, text: str) -> str:
    """How a flag says a value of YAML: as it was written, where that means the same."""
    try:
        if parse_option_text(name, text) == value:
            return text
    except ValueError:
        pass  # written as only YAML allows, such as 0x10
    return "null" if value is None else str(value).lower() if value is True else str(value)


def _read_search(entry: YamlEntry | None, notes: _Notes) -> dict[str, Dimension]:
    """What is searched, option by option."""
    if entry is None:
        notes.problems.append(
            f"{notes.path}: nothing to search; add search: with options and their values"
        )
        return {}
    found: dict[str, Dimension] = {}
    inside = notes.inside(entry)
    for one in inside:
        name = PRESET if one.key == PRESET else notes.option(one)
        if name is None:
            continue
        notes.places.setdefault(name, f"{notes.path}:{one.line}: {one.key}")
        dimension = _read_dimension(name, one, notes)
        if dimension is not None:
            found[name] = dimension
    if not inside and isinstance(entry.node, yaml.MappingNode):
        notes.complain(entry, "is empty; name options and their values")
    return found


def _read_dimension(name: str, entry: YamlEntry, notes: _Notes) -> Dimension | None:
    """The range or the list of one option."""
    if isinstance(entry.node, yaml.SequenceNode):
        return _read_choice(name, entry, notes)
    if isinstance(entry.node, yaml.MappingNode):
        return _read_range(name, entry, notes)
    notes.complain(entry, "wants a list, or low and high; a single value belongs under options:")
    return None


def _read_choice(name: str, entry: YamlEntry, notes: _Notes) -> Choice | None:
    """A list of values, each once."""
    nodes = list(entry.node.value)
    if not nodes:
        notes.complain(entry, "the list is empty; give at least one value")
        return None
    if name == PRESET:
        texts = [node.value if isinstance(node, yaml.ScalarNode) else None for node in nodes]
    else:
        texts = [_read_text(name, entry, node, notes) for node in nodes]
    known = [text for text in texts if text is not None]
    meanings = [text if name == PRESET else parse_option_text(name, text) for text in known]
    twice = next((t for t, m in zip(known, meanings, strict=True) if meanings.count(m) > 1), None)
    if twice is not None:
        notes.complain(entry, f"{twice} stands in the list twice; leave one away")
        return None
    return Choice(tuple(known)) if len(known) == len(nodes) else None


def _read_range(name: str, entry: YamlEntry, notes: _Notes) -> Range | None:
    """Numbers from low to high."""
    if name == PRESET or OPTIONS[name].type not in (int, float):
        notes.complain(entry, "takes no range of numbers; give a list of its values")
        return None
    before = len(notes.problems)
    inside = {one.key: one for one in notes.inside(entry)}
    for key in inside.keys() - set(_RANGE_KEYS):
        notes.complain(entry, f"{key}: a range has no such key; {suggest(key, _RANGE_KEYS)}")
    whole = OPTIONS[name].type is int
    numbers = _read_numbers(inside, entry, notes, whole=whole)
    log = _plain_value(inside["log"].node) if "log" in inside else False
    if not isinstance(log, bool):
        notes.complain(entry, f"log: wants true or false, got {_written(inside['log'].node)}")
    if len(notes.problems) > before:
        return None
    return _make_range(numbers, entry, notes, log=log, whole=whole)


def _read_numbers(
    inside: Mapping[str, YamlEntry], entry: YamlEntry, notes: _Notes, *, whole: bool
) -> dict[str, float]:
    """The numbers that make a range; of these, step may be left away."""
    numbers: dict[str, float] = {}
    for key in ("low", "high", "step"):
        value = _plain_value(inside[key].node) if key in inside else None
        if type(value) is int or (type(value) is float and isfinite(value) and not whole):
            numbers[key] = value if whole else float(value)
        elif key in inside or key != "step":
            got = f"got {_written(inside[key].node)}" if key in inside else "it is missing"
            notes.complain(entry, f"{key}: wants a {'whole ' * whole}number, {got}")
    return numbers


def _make_range(
    numbers: dict[str, float], entry: YamlEntry, notes: _Notes, *, log: bool, whole: bool
) -> Range | None:
    """The range, if its numbers make one."""
    low, high, step = numbers["low"], numbers["high"], numbers.get("step")
    wrong = (
        (low >= high, f"low {low:g} must be below high {high:g}"),
        (log and low <= 0, f"log: wants low above 0, got {low:g}; leave log away, or raise low"),
        (log and step is not None, "log and step do not go together; leave one away"),
        (step is not None and step <= 0, f"step: must be above 0, got {step}"),
        (step is not None and step > high - low, f"step: {step} does not fit into the range"),
    )
    told = [text for is_wrong, text in wrong if is_wrong]
    for text in told[:1]:
        notes.complain(entry, text)
    if told:
        return None
    if step is not None:
        high = low + step * count_steps(low, high, step)  # the last one that is reached
        high = high if whole else float(f"{high:.12g}")
    return Range(low=low, high=high, whole=whole, log=log, step=step)


def _read_trials(
    settings: dict[str, Any],
    search: dict[str, Dimension],
    *,
    entries: Mapping[str, YamlEntry],
    notes: _Notes,
) -> int | None:
    """How many trials there will be: those asked for, but no more than there are points."""
    grid = settings.get("method", _DEFAULTS["method"]) == "grid"
    endless = [name for name, dimension in search.items() if dimension.points is None]
    for name in endless if grid else ():
        notes.problems.append(
            f"{notes.places[name]}: a grid wants points; add step:, or give a list"
        )
    asked, points = settings.get("trials"), count_points(search)
    if asked is None and not grid and "trials" not in entries:
        notes.problems.append(f"{notes.path}: add trials:, how many runs there shall be")
    if not search or (grid and endless) or (asked is None and not grid):
        return None
    counts = [count for count in (asked, points) if count is not None]
    return min(counts) if counts else None
