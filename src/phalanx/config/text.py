"""Parses option values, from the text of flags and from YAML files with line numbers."""

import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from phalanx.config.fields import match_case
from phalanx.config.hints import suggest_option
from phalanx.config.schema import OPTIONS, SPELLINGS, Option
from phalanx.errors import ConfigError
from phalanx.units import format_bytes

TRUE_WORDS = ("true", "t", "1", "yes", "y", "on")
FALSE_WORDS = ("false", "f", "0", "no", "n", "off")

_MAX_BYTES = 2**20  # of a YAML file; those of runs have about 3,000
_MAX_MERGED_KEYS = 10_000  # of a mapping, including what << merges into it
_NAMES_OF = {"extends": "preset", "requires": "option"}  # keys that are not options: what they name
NEGATIVE_NUMBER = re.compile(r"-\d*\.?\d+(e[-+]?\d+)?", re.IGNORECASE)
_SPACE_BEFORE_UNIT = re.compile(r"(?<=\d)\s+(?=(?:ep|st|%)(?:\s|$))")

LIST_OPTIONS = (  # whose text is a list, separated by commas or spaces
    "adam-betas", "crop-ratio", "crop-scale", "lr-decay", "lr-drop-after", "lr-epoch-decay",
    "pipeline-splits", "plugin", "progressive-resolution", "recompute-checkpoints",
    "sharding-exclude-filter", "sharding-include-filter",
)  # fmt: skip
_AUTO = ("auto",)  # for numbers: the same as null


@dataclass(frozen=True)
class OptionValue:
    """A value that was given for an option, and where."""

    value: Any
    where: str  # "--batch-size", "my.yaml:12: batch-size"
    origin: str  # what `plan --origin` prints: "flag", "preset demo", "file my.yaml"


def to_flags(options: Mapping[str, Any]) -> dict[str, str]:
    """Python keywords as the flags that they stand for."""
    for name, value in options.items():
        if isinstance(value, bytes | bytearray):
            raise ConfigError(f"{name}: expected text, not bytes; decode it first")
    return {name.replace("_", "-"): str(value) for name, value in options.items()}


def parse_option_text(name: str, text: str) -> Any:
    """The value of a flag's text for an option; ValueError says what is expected."""
    option = OPTIONS[name]
    if option.optional and text.lower() in ("null", "none", *_AUTO * (option.type is not str)):
        return None
    wanted = f"expected {option.expected_values}, got {text!r}"
    if option.type is bool:
        if text.lower() in TRUE_WORDS + FALSE_WORDS:
            return text.lower() in TRUE_WORDS
        if not option.takes_share:
            raise ValueError(wanted)
    if option.type is str:
        return _normalise_text(option, text)
    try:
        return float(text) if option.takes_share else option.type(text)
    except ValueError:
        raise ValueError(wanted) from None


def _normalise_text(option: Option, text: str) -> str:
    """Text in the spelling that is stored: choices in their own case, lists with commas.

    A list that has commas is not changed, because existing runs contain such lists.
    """
    if option.choices:
        return match_case(text, option.choices)
    words = _SPACE_BEFORE_UNIT.sub("", text).split()
    if option.name in LIST_OPTIONS and "," not in text and len(words) > 1:
        return ",".join(words)
    return text


class YamlLoader(yaml.SafeLoader):
    """PyYAML's loader, but 5e-5 is a number, as in other YAML libraries."""


YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


@dataclass(frozen=True)
class YamlEntry:
    """One key of a YAML mapping with its line and its value, not yet interpreted."""

    key: str
    line: int
    node: yaml.Node


def read_text(path: Path) -> str:
    """The text of a YAML file."""
    _refuse_other_than_options(path)
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None


def read_entries(path: Path, entry_name: str | None = None) -> list[YamlEntry]:
    """The keys of a YAML file, or of one named mapping inside it."""
    try:
        loader = YamlLoader(read_text(path))
    except yaml.reader.ReaderError as error:
        raise ConfigError(f"{path}: not valid YAML: {error.reason}") from None
    try:
        with convert_yaml_errors(path):
            entries = read_mapping(loader, loader.get_single_node(), path)
            if entry_name is None:
                return entries
            chosen = next(entry for entry in entries if entry.key == entry_name)
            return read_mapping(loader, chosen.node, path)
    finally:
        loader.dispose()


@contextmanager
def convert_yaml_errors(path: Path) -> Iterator[None]:
    """Context that turns YAML errors into a ConfigError with file and line."""
    try:
        yield
    except RecursionError:
        raise ConfigError(f"{path}: lists and mappings are nested too deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not readable"
        raise ConfigError(f"{path}{line}: not valid YAML: {problem}") from None


def dump_entries(entries: list[YamlEntry]) -> str:
    """Entries as the text of a YAML file."""
    pairs = [(yaml.ScalarNode("tag:yaml.org,2002:str", e.key), e.node) for e in entries]
    node = yaml.MappingNode("tag:yaml.org,2002:map", pairs, flow_style=False)
    return yaml.serialize(node, Dumper=yaml.SafeDumper)


def read_mapping(loader: YamlLoader, node: yaml.Node | None, path: Path) -> list[YamlEntry]:
    """A mapping's entries with merges (<<) resolved; ConfigError for a key given twice."""
    if node is None:
        return []
    if not isinstance(node, yaml.MappingNode):
        raise _no_option(node, path)
    lines: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _no_option(key, path)
        line = key.start_mark.line + 1
        if key.value in lines:
            way_out = "write <<: [*a, *b]" if key.value == "<<" else "leave one out"
            raise ConfigError(
                f"{path}:{line}: {key.value} is given twice, in line {lines[key.value]} already; "
                f"{way_out}"
            )
        lines[key.value] = line
    if _count_merged_keys(node, {}) > _MAX_MERGED_KEYS:
        raise ConfigError(f"{path}: its merges (<<) expand to more than {_MAX_MERGED_KEYS:,} keys")
    loader.flatten_mapping(node)
    # a merged mapping comes first and may be overridden by a later key of the same name
    last = {
        key.value: YamlEntry(key.value, key.start_mark.line + 1, value) for key, value in node.value
    }
    return list(last.values())


def _refuse_other_than_options(path: Path) -> None:
    """Raise ConfigError if a file of options is too large or not a regular file."""
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    size = status.st_size
    if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device might never end
        raise ConfigError(f"{path}: is not a regular file; options belong in a YAML file")
    if size > _MAX_BYTES:
        raise ConfigError(
            f"{path}: {format_bytes(size)}, over the {format_bytes(_MAX_BYTES)} that an options "
            "file may have"
        )


def _count_merged_keys(node: yaml.Node, known: dict[int, int]) -> int:
    """The number of keys after all merges, without merging: a few lines can mean billions.

    known: the counts so far, by node; those being counted are 0, as they may merge themselves.
    """
    if id(node) in known or not isinstance(node, yaml.CollectionNode):
        return known.get(id(node), 0)
    known[id(node)] = 0
    if isinstance(node, yaml.MappingNode):
        merged = [value for key, value in node.value if key.tag == "tag:yaml.org,2002:merge"]
        own = len(node.value) - len(merged)
    else:
        merged, own = node.value, 0
    known[id(node)] = own + sum(_count_merged_keys(part, known) for part in merged)
    return known[id(node)]


def _no_option(node: yaml.Node, path: Path) -> ConfigError:
    line = node.start_mark.line + 1
    return ConfigError(f"{path}:{line}: expected lines of the form `option: value`")


def parse_option_node(name: str, node: yaml.Node) -> Any:
    """The value of a YAML node for an option; text options keep 16.32 and 1/2 as written."""
    option = OPTIONS[name]
    if isinstance(node, yaml.SequenceNode) and name in LIST_OPTIONS:
        if not all(isinstance(item, yaml.ScalarNode) for item in node.value):
            raise ValueError("expected a list of single values; write a,b or [a, b]")
        return ",".join(item.value for item in node.value)  # as on the command line
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError("expected a single value, got a list or a mapping")
    if node.tag == "tag:yaml.org,2002:null" and option.optional:
        return None
    if option.type is str:
        return _normalise_text(option, node.value)
    if option.optional and node.value in _AUTO:
        return None
    loader = YamlLoader("")
    try:
        return loader.construct_object(node)
    except (ValueError, yaml.YAMLError):
        raise ValueError(f"expected {option.expected_values}, got {node.value!r}") from None
    finally:
        loader.dispose()


class _OptionFile(NamedTuple):
    """The contents of a YAML file of options."""

    values: dict[str, OptionValue]
    problems: list[str]
    extends: str | None  # the preset it extends
    requires: str | None  # an option that must be given


def read_option_file(path: Path, *, origin: str, entry_name: str | None = None) -> _OptionFile:
    """The options in a YAML file, the problems found, and the presets or options it names."""
    values: dict[str, OptionValue] = {}
    problems: list[str] = []
    names: dict[str, str] = {}  # by the keys that are not options
    entries = read_entries(path, entry_name)
    keys = [entry.key for entry in entries]
    for entry in entries:
        where = f"{path}:{entry.line}: {entry.key}"
        name = SPELLINGS.get(entry.key.replace("_", "-"))
        if entry.key in _NAMES_OF:
            if not isinstance(entry.node, yaml.ScalarNode):
                raise ConfigError(f"{where}: expected the name of one {_NAMES_OF[entry.key]}")
            names[entry.key] = entry.node.value
        elif name is None:
            problems.append(f"{where}: no such option; {suggest_option(entry.key, OPTIONS, keys)}")
        elif name in values:
            problems.append(f"{where}: {name} is given twice")
        else:
            try:
                values[name] = OptionValue(parse_option_node(name, entry.node), where, origin)
            except ValueError as error:
                problems.append(f"{where}: {error}")
    requires = names.get("requires")
    if requires is not None and requires not in OPTIONS:
        way_out = suggest_option(requires, OPTIONS)
        problems.append(f"{path}: requires: no option is called {requires!r}; {way_out}")
        requires = None
    return _OptionFile(values, problems, names.get("extends"), requires)
