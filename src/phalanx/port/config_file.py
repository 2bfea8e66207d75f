"""A configs.yml of an older program: its entries, with anchors and merges resolved."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from phalanx.config.text import (
    YamlEntry,
    YamlLoader,
    convert_yaml_errors,
    read_entries,
    read_mapping,
)
from phalanx.errors import ConfigError, suggest

_MODEL_KEYS = ("model", "model-name")
_HIDDEN = (".", "_")  # what the names of parts often begin with


@dataclass(frozen=True)
class OldEntry:
    """A named configuration."""

    name: str
    keys: tuple[YamlEntry, ...]
    is_part: bool  # only there to be merged into others


def read_config_file(path: Path) -> list[OldEntry]:
    """The entries of a file, those that are only parts of others included."""
    entries = read_entries(path)
    if not entries:
        raise ConfigError(f"{path}: has no entries; name the configs.yml of an older program")
    used = _find_used(entries)  # before merges are resolved, which changes the nodes
    found = []
    for entry in entries:
        is_used, is_hidden = id(entry.node) in used, entry.key.startswith(_HIDDEN)
        if isinstance(entry.node, yaml.MappingNode):
            with convert_yaml_errors(path):
                keys = tuple(read_mapping(YamlLoader(""), entry.node, path))
            names_model = any(key.key.replace("_", "-") in _MODEL_KEYS for key in keys)
            found.append(OldEntry(entry.key, keys, is_hidden or (is_used and not names_model)))
        elif not (is_used or is_hidden):
            is_list = isinstance(entry.node, yaml.SequenceNode)
            raise ConfigError(
                f"{path}:{entry.line}: {entry.key}: expected the name of an entry, and its options "
                f"below it; got {'a list' if is_list else 'a single value'}"
            )
    return found


def choose_entries(entries: Sequence[OldEntry], names: Sequence[str], path: Path) -> list[OldEntry]:
    """The entries of those names; without any, all but the parts."""
    by_name = {entry.name: entry for entry in entries}
    for name in names:
        if name not in by_name:
            raise ConfigError(f"{path}: has no entry {name}; {suggest(name, by_name)}")
    chosen = [by_name[name] for name in dict.fromkeys(names)]
    chosen = chosen or [entry for entry in entries if not entry.is_part]
    if not chosen:
        parts = ", ".join(by_name)
        raise ConfigError(
            f"{path}: all entries are parts of others ({parts}); name the one to port after the "
            "file"
        )
    return chosen


def _find_used(entries: Sequence[YamlEntry]) -> set[int]:
    """The nodes that stand inside an entry, by alias or merge or as they are."""
    found: set[int] = set()
    rest = [child for entry in entries for child in _list_children(entry.node)]
    while rest:
        node = rest.pop()
        if id(node) not in found:
            found.add(id(node))
            rest += _list_children(node)
    return found


def _list_children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []
