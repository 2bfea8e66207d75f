"""From text to values: what a flag says, and what stands in a YAML file, with its line."""

import re
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml

from phalanx.config.hints import suggest_option
from phalanx.config.schema import OPTIONS, SPELLINGS
from phalanx.errors import ConfigError

_TRUE_WORDS = ("true", "t", "1", "yes", "y", "on")
FALSE_WORDS = ("false", "f", "0", "no", "n", "off")
WANTED = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}

LISTS = (  # options whose text is a list with commas
    "adam-betas",
    "crop-ratio",
    "crop-scale",
    "lr-decay",
    "lr-drop-after",
    "lr-epoch-decay",
    "plugin",
    "progressive-resolution",
    "recompute-checkpoints",
)


@dataclass(frozen=True)
class Given:
    """A value somebody gave, and where."""

    value: Any
    where: str  # "--batch-size", "my.yaml:12: batch-size"
    origin: str  # what `plan --origin` prints: "flag", "preset demo", "file my.yaml"


def plain_kind(annotation: Any) -> type:
    """The one plain type behind an option's annotation: int, float, bool or str."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return plain_kind(arguments[0])
    if origin is Literal:
        return str
    if origin in (Union, types.UnionType):
        return plain_kind(next(kind for kind in arguments if kind is not type(None)))
    assert isinstance(annotation, type)
    return annotation


def _is_optional(annotation: Any) -> bool:
    """Whether the option may be left unset, which flags and YAML write as null."""
    return type(None) in get_args(annotation)


def value_from_text(name: str, text: str) -> Any:
    """What a flag's text means for that option; ValueError says what it wants."""
    option = OPTIONS[name]
    kind = plain_kind(option.kind)
    if _is_optional(option.kind) and text.lower() in ("null", "none"):
        return None
    if kind is bool:
        if text.lower() in _TRUE_WORDS + FALSE_WORDS:
            return text.lower() in _TRUE_WORDS
        raise ValueError(f"wants {WANTED[bool]}, got {text!r}")
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"wants {WANTED[kind]}, got {text!r}") from None


class YamlLoader(yaml.SafeLoader):
    """PyYAML that reads 5e-5 as a number, as everybody else does."""


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


def read_entries(path: Path, inside: str | None = None) -> list[YamlEntry]:
    """The keys of a YAML file, or of one named mapping inside it."""
    try:
        loader = YamlLoader(path.read_text(encoding="utf-8"))
    except yaml.reader.ReaderError as error:
        raise ConfigError(f"{path}: not valid YAML: {error.reason}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file in UTF-8") from None
    try:
        node = loader.get_single_node()
        entries = mapping_entries(loader, node, path)
        if inside is None:
            return entries
        chosen = next(entry for entry in entries if entry.key == inside)
        return mapping_entries(loader, chosen.node, path)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not readable"
        raise ConfigError(f"{path}{line}: not valid YAML: {problem}") from None
    finally:
        loader.dispose()


def as_yaml(entries: list[YamlEntry]) -> str:
    """Entries as the YAML file they could stand in."""
    pairs = [(yaml.ScalarNode("tag:yaml.org,2002:str", e.key), e.node) for e in entries]
    node = yaml.MappingNode("tag:yaml.org,2002:map", pairs, flow_style=False)
    return yaml.serialize(node, Dumper=yaml.SafeDumper)


def mapping_entries(loader: YamlLoader, node: yaml.Node | None, path: Path) -> list[YamlEntry]:
    """A mapping's keys, merges (<<) resolved; a key given twice is refused."""
    if node is None:
        return []
    if not isinstance(node, yaml.MappingNode):
        line = node.start_mark.line + 1
        raise ConfigError(f"{path}:{line}: wants lines of the form `option: value`")
    odd = next((key for key, _ in node.value if not isinstance(key, yaml.ScalarNode)), None)
    if odd:
        line = odd.start_mark.line + 1
        raise ConfigError(f"{path}:{line}: wants lines of the form `option: value`")
    own = [key.value for key, _ in node.value]
    twice = next((key for key in own if own.count(key) > 1), None)
    if twice:
        raise ConfigError(f"{path}: {twice} is given twice")
    loader.flatten_mapping(node)
    # a merged mapping comes first and may be overridden by a later key of the same name
    last = {
        key.value: YamlEntry(key.value, key.start_mark.line + 1, value) for key, value in node.value
    }
    return list(last.values())


def value_from_node(name: str, node: yaml.Node) -> Any:
    """A YAML value for that option; text options take 16.32 and 1/2 as they are written."""
    option = OPTIONS[name]
    if isinstance(node, yaml.SequenceNode) and name in LISTS:
        return _text_of_list(node)
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError("wants a single value, got a list or a mapping")
    if node.tag == "tag:yaml.org,2002:null" and _is_optional(option.kind):
        return None
    if plain_kind(option.kind) is str:
        return node.value
    loader = YamlLoader("")
    try:
        return loader.construct_object(node)
    except (ValueError, yaml.YAMLError):
        wanted = WANTED[plain_kind(option.kind)]
        raise ValueError(f"wants {wanted}, got {node.value!r}") from None
    finally:
        loader.dispose()


def _text_of_list(node: yaml.SequenceNode) -> str:
    """A YAML list as a flag spells it: [2, 4] is 2,4."""
    if not all(isinstance(one, yaml.ScalarNode) for one in node.value):
        raise ValueError("wants a list of single values; write a,b or [a, b]")
    return ",".join(one.value for one in node.value)


def given_in_file(
    path: Path, *, inside: str | None, origin: str
) -> tuple[dict[str, Given], list[str], str | None]:
    """A YAML file's options, the problems found, and the preset it extends."""
    given: dict[str, Given] = {}
    problems: list[str] = []
    extends = None
    for entry in read_entries(path, inside):
        where = f"{path}:{entry.line}: {entry.key}"
        name = SPELLINGS.get(entry.key.replace("_", "-"))
        if entry.key == "extends":
            if not isinstance(entry.node, yaml.ScalarNode):
                raise ConfigError(f"{where}: wants the name of one preset")
            extends = entry.node.value
        elif name is None:
            problems.append(f"{where}: no such option; {suggest_option(entry.key, OPTIONS)}")
        elif name in given:
            problems.append(f"{where}: {name} is given twice")
        else:
            try:
                given[name] = Given(value_from_node(name, entry.node), where, origin)
            except ValueError as error:
                problems.append(f"{where}: {error}")
    return given, problems, extends
