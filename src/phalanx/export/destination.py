"""Writes an export next to its destination, and moves it there when complete."""

import json
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from phalanx.disk import convert_out_errors, remove_dead_parts, sync_folder, write_synced
from phalanx.errors import ConfigError
from phalanx.export.file_kind import is_own_export
from phalanx.units import format_some

CARD = "README.md"
_CARD_KEY = "phalanx_export"
_ADVICE = "then export again"
_UNKNOWN = "exists, and is not known to be an export; choose another --out, or remove it first"
_SHOWN = 3


def _is_utf8(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def refuse_existing(path: Path, files: Collection[str]) -> None:
    """Raise if a path holds anything but an earlier export of the same kind.

    files: in an export that is a folder, the model first; none for one that is a file.
    """
    if not _is_utf8(path):
        raise ConfigError(
            f"--out {path}: is not UTF-8, and the libraries that open models accept no other "
            "paths; choose another --out"
        )
    with convert_out_errors(path, _ADVICE):
        file = next((parent for parent in path.parents if parent.is_file()), None)
        if file is not None:
            raise ConfigError(f"--out {path}: {file} is a file, not a folder; choose another --out")
        if path.is_dir() != bool(files) and path.exists():
            what = "a folder" if path.is_dir() else "a file"
            raise ConfigError(f"--out {path}: is {what}; choose another --out")
        if files:
            _refuse_folder(path, files)
        else:
            _refuse_file(path)


def _refuse_folder(path: Path, files: Collection[str]) -> None:
    """Raise if a folder, which is replaced as a whole, holds anything but an export's own files."""
    own = {path / name for name in (*files, CARD)}
    own |= {folder for file in own for folder in file.parents}
    found = sorted(path.rglob("*")) if path.is_dir() else []
    others = [str(one.relative_to(path)) for one in found if one not in own]
    if others:
        raise ConfigError(
            f"--out {path}: holds files that no export wrote ({format_some(others, _SHOWN)}), "
            "and would be replaced; choose another --out, or move them away"
        )
    if found and not is_own_export(path / next(iter(files))):
        raise ConfigError(f"--out {path}: {_UNKNOWN}")


def _refuse_file(path: Path) -> None:
    if path.exists() and not is_own_export(path):
        raise ConfigError(f"--out {path}: {_UNKNOWN}")
    card = choose_card_path(path)
    if card.exists() and not _is_card_of(card, path):
        raise ConfigError(
            f"--out {path}: its model card would be {card}, which no export wrote; choose "
            "another --out, or move that file away"
        )


def choose_card_path(path: Path) -> Path:
    """The model card of a file: README.md next to it, unless that describes something else."""
    card, named = path.parent / CARD, path.with_name(f"{path.name}.md")
    if _is_card_of(named, path):
        return named
    return card if _is_card_of(card, path) or not card.exists() else named


def _is_card_of(card: Path, path: Path) -> bool:
    """Whether a model card was written by the export of this file."""
    try:
        head = card.read_text(encoding="utf-8", errors="replace")[:2_000]
    except OSError:
        return False
    return format_card_mark(path.name) in head.splitlines()


def format_card_mark(file: str) -> str:
    """The line in the header of a model card that names the file it describes."""
    return f"{_CARD_KEY}: {json.dumps(file)}"


@contextmanager
def staging_folder(path: Path) -> Iterator[Path]:
    """A context with a hidden folder next to a path, removed afterwards."""
    folder_is_new = not path.parent.exists()
    stage = path.parent / f".{path.name}.{os.getpid()}.part"
    try:
        with convert_out_errors(path, _ADVICE):
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_dead_parts(path.parent)
            stage.mkdir()
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        if folder_is_new:
            with suppress(OSError):  # it is not empty: it contains the export
                path.parent.rmdir()


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file of an export, and create its folders."""
    with convert_out_errors(path, _ADVICE):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_synced(path, [content.encode() if isinstance(content, str) else content])


def move_file(staged: Path, path: Path) -> None:
    """Move a file to its path, replacing an existing one."""
    with convert_out_errors(path, _ADVICE):
        staged.replace(path)
        sync_folder(path.parent)


def move_folder(staged: Path, path: Path) -> None:
    """Move a folder to its path, replacing an existing one."""
    before = path.parent / f".{path.name}.before.{os.getpid()}.part"
    with convert_out_errors(path, _ADVICE):
        if path.exists():
            path.rename(before)
        staged.rename(path)
        sync_folder(path.parent)
    shutil.rmtree(before, ignore_errors=True)
