"""Tables of labels: CSV or JSON Lines with a path, a label and perhaps a split for each image."""

import csv
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from phalanx.data.layouts.image_files import find_image_suffixes
from phalanx.data.layouts.split_folders import TRAIN_NAMES, VALID_NAMES
from phalanx.errors import ConfigError, DataError, suggest

_HEADINGS = {  # the accepted names of columns and keys
    "path": ("path", "file", "filename", "file_name", "image", "image_path", "filepath", "name"),
    "label": ("label", "class", "category", "class_name", "target"),
    "split": ("split", "set", "subset", "partition"),
}
_PROBLEMS_SHOWN = 10
_WANTED = "expected path,label or path,label,split"


class _Row(NamedTuple):
    """A row of the table, for one image."""

    line: int
    path: str
    label: str
    split: str


@dataclass(frozen=True, kw_only=True)
class LabelTable:
    """The contents of a table of labels: the class of each path by split, and unused splits."""

    splits: dict[str, dict[str, str]]  # train, valid or both
    classes: tuple[str, ...]
    unused_splits: tuple[str, ...]
    unused_paths: frozenset[str]  # paths in the rows of unused splits
    has_splits: bool


@lru_cache(maxsize=2)  # a command asks for it several times
def parse_labels(
    text: str, table: Path, *, root: Path, valid_split: str | None, min_classes: int = 2
) -> LabelTable:
    """Parse the text of a table; DataError lists all its problems.

    min_classes: two to train on; one is enough to compare answers with.
    """
    is_json = table.suffix.lower() in (".jsonl", ".ndjson", ".json")
    read_rows = _read_json_rows if is_json else _read_csv_rows
    rows = list(read_rows(text.removeprefix("\ufeff"), table))
    if not rows:
        raise DataError(f"{table}: has no rows; {_WANTED} for each image")
    problems: list[str] = []
    splits, unused_splits = _choose_splits(rows, table, valid_split, problems)
    found: dict[str, dict[str, str]] = {}
    seen: dict[str, int] = {}
    unused_paths = set()
    for row in rows:
        where = f"{table}, line {row.line}"
        path = _find_path(row.path, root, where, problems)
        if not row.label:
            problems.append(f"{where}: {row.path} has no label")
        if path and path in seen:
            problems.append(f"{where}: {row.path} is already on line {seen[path]}")
        elif path:
            seen[path] = row.line
            split = splits.get(row.split.lower())
            if split:
                found.setdefault(split, {})[path] = row.label
            else:
                unused_paths.add(path)
    _refuse(problems, table)
    trained = found.get("train") or found.get("valid") or {}
    classes = _sort_classes(set(trained.values()))
    if len(classes) < min_classes:
        raise DataError(f"{table}: has only one class, {classes[0]!r}; a classifier needs two")
    has_splits = any(row.split for row in rows)
    return LabelTable(
        splits=found,
        classes=classes,
        unused_splits=unused_splits,
        unused_paths=frozenset(unused_paths),
        has_splits=has_splits,
    )


def describe_table(table: LabelTable, name: str) -> str:
    """The layout, on one line."""
    text = f"labels from {name}"
    if not table.has_splits:
        return f"{text}, without splits"
    if table.unused_splits:
        left = ", ".join(table.unused_splits)
        text += f"; rows of {left} not used (--valid-split chooses the split to validate on)"
    return text


def _choose_splits(
    rows: list[_Row], table: Path, valid_split: str | None, problems: list[str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Which of our splits each named split is, and the unused ones."""
    names: dict[str, int] = {}  # with the first line
    for row in rows:
        names.setdefault(row.split.lower(), row.line)
    if valid_split is not None and valid_split.lower() not in names:
        there = [name for name in names if name and name not in TRAIN_NAMES]
        way_out = suggest(valid_split, there) if there else "it has no split column"
        raise ConfigError(f"--valid-split {valid_split}: {table} has no such split; {way_out}")
    if set(names) == {""}:
        return {"": "train"}, ()
    valid = valid_split.lower() if valid_split else next((n for n in VALID_NAMES if n in names), "")
    known = {*TRAIN_NAMES, *VALID_NAMES, valid}
    for name, line in names.items():
        if name not in known or not name:
            what = f"unknown split {name!r}" if name else "no split, though other rows have one"
            way_out = f"write {TRAIN_NAMES[0]} or {VALID_NAMES[0]}"
            more = f", or give --valid-split {name}" if name and valid_split is None else ""
            problems.append(f"{table}, line {line}: {what}; {way_out}{more}")
    splits = {name: "train" for name in TRAIN_NAMES} | ({valid: "valid"} if valid else {})
    left = tuple(name for name in names if name in known and name and name not in splits)
    return splits, left


def _find_path(text: str, root: Path, where: str, problems: list[str]) -> str | None:
    """The path from the root; None, with a problem, if it points outside."""
    if "\0" in text:
        what = f"{text!r} has a zero byte in it, which no name of a file can have"
        problems.append(f"{where}: {what}")
        return None
    path = PurePosixPath(text.replace("\\", "/"))
    if path.is_absolute():
        for base in (root.absolute(), root.resolve()):
            if path.is_relative_to(base.as_posix()):
                return path.relative_to(base.as_posix()).as_posix()
    if not text or path.is_absolute() or ".." in path.parts:
        what = f"{text} is outside {root}" if text else "names no image"
        problems.append(f"{where}: {what}; paths are relative to --data-dir")
        return None
    return path.as_posix()


def _sort_classes(names: set[str]) -> tuple[str, ...]:
    """The classes sorted by name, numbers by value."""
    are_numbers = all(name.isdecimal() and len(name) < 10 for name in names)
    return tuple(sorted(names, key=lambda name: (int(name), name) if are_numbers else (0, name)))


def _refuse(problems: list[str], table: Path) -> None:
    """Raise DataError with the first of all problems."""
    if problems:
        more = len(problems) - _PROBLEMS_SHOWN
        shown = [*problems[:_PROBLEMS_SHOWN], *([f"and {more} more"] if more > 0 else [])]
        raise DataError("\n".join([*shown, f"fix these lines of {table.name}"]))


# --- rows ---


def _read_csv_rows(text: str, table: Path) -> Iterator[_Row]:
    """The rows of a CSV file with or without headings, separated by commas, semicolons or tabs."""
    columns = None
    for line, cells in _read_cells(text, table):
        if columns is None:
            columns = _find_columns(cells, table)
            if {"path", "label"} <= {*map(_find_meaning, cells)}:  # headings, not an image
                continue
        if len(cells) <= max(columns["path"], columns["label"]):
            raise DataError(f"{table}, line {line}: {_WANTED}, got {', '.join(cells)[:80]!r}")
        split = columns.get("split", len(cells))
        word = cells[split] if split < len(cells) else ""
        yield _Row(line, cells[columns["path"]], cells[columns["label"]], word)


def _read_cells(text: str, table: Path) -> Iterator[tuple[int, list[str]]]:
    """The cells of each row that is not empty, with the line where it begins."""
    delimiter = max(",;\t", key=text.partition("\n")[0].count)  # in case of a tie, the comma
    reader, line = csv.reader(io.StringIO(text), delimiter=delimiter), 1
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if any(cells):
                yield line, cells
            line = reader.line_num + 1  # an unclosed quote includes all further lines
    except csv.Error as cause:
        raise DataError(f"{table}, line {line}: not valid CSV ({cause}); fix it") from None


def _find_columns(first: list[str], table: Path) -> dict[str, int]:
    """The columns by their meaning: from the headings, else path, label, split in this order."""
    meanings = [_find_meaning(cell) for cell in first]
    found = {meaning: place for place, meaning in reversed([*enumerate(meanings)]) if meaning}
    if "path" in found and "label" in found:
        return found
    if first[0].lower().endswith(find_image_suffixes()) and len(first) > 1:
        return dict(zip(("path", "label", "split"), range(min(3, len(first))), strict=False))
    raise DataError(
        f"{table}, line 1: no columns called path and label among {', '.join(first)[:80]}; "
        f"{_WANTED}"
    )


def _find_meaning(heading: Any) -> str:
    """The meaning of a heading or key; empty if unknown."""
    words = ((meaning, names) for meaning, names in _HEADINGS.items())
    return next((meaning for meaning, names in words if str(heading).lower() in names), "")


def _read_json_rows(text: str, table: Path) -> Iterator[_Row]:
    """The rows of a file with a JSON object per line."""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        cells = _name_cells(value.items()) if isinstance(value, dict) else {}
        if "path" not in cells:
            raise DataError(
                f'{table}, line {number}: expected {{"path": ..., "label": ...}}, got {line[:60]!r}'
            )
        words = ["" if cells.get(name) is None else str(cells[name]) for name in _HEADINGS]
        path, label, split = (word.encode(errors="backslashreplace").decode() for word in words)
        yield _Row(number, path, label, split)  # JSON can hold halves of letters, no index can


def _name_cells(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The values of a JSON object by their meaning; the first of several spellings counts."""
    found: dict[str, Any] = {}
    for key, value in items:
        found.setdefault(_find_meaning(key), value)
    return found
