"""Where an export goes: made beside its place, and moved there whole."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from phalanx.disk import out_errors, remove_dead_parts, sync_folder, write_synced
from phalanx.errors import ConfigError
from phalanx.export.options import MARK

CARD = "README.md"
_ADVICE = "then export again"


def refuse_taken(path: Path, *, is_folder: bool) -> None:
    """Raise where something lies at a path that no export of ours has written."""
    with out_errors(path, _ADVICE):
        _refuse_taken(path, is_folder=is_folder)


def _refuse_taken(path: Path, *, is_folder: bool) -> None:
    folder = path if is_folder else path.parent
    file = next((parent for parent in path.parents if parent.is_file()), None)
    if file is not None:
        raise ConfigError(f"--out {path}: {file} is a file, not a folder; choose another --out")
    if is_folder and path.is_dir() and not any(path.iterdir()):
        return
    if path.is_dir() != is_folder and path.exists():
        what = "a folder" if path.is_dir() else "a file"
        raise ConfigError(f"--out {path}: is {what}; choose another --out")
    if path.exists() and not (_is_own_card(folder / CARD) or _is_own_card(_name_card(path))):
        raise ConfigError(
            f"--out {path}: exists, and is not known to be an export; choose another --out, or "
            "remove it first"
        )


def _is_own_card(path: Path) -> bool:
    """Whether a model card was written by an export."""
    try:
        return MARK in path.read_text(encoding="utf-8", errors="replace")[:2_000]
    except OSError:
        return False


def choose_card(path: Path) -> Path:
    """The model card of a file: README.md beside it, unless somebody else has written that."""
    card = path.parent / CARD
    return card if _is_own_card(card) or not card.exists() else _name_card(path)


def _name_card(path: Path) -> Path:
    return path.with_name(f"{path.name}.md")


@contextmanager
def staging_folder(path: Path) -> Iterator[Path]:
    """A hidden folder beside a path to write in; it is gone after the block."""
    folder_is_new = not path.parent.exists()
    stage = path.parent / f".{path.name}.{os.getpid()}.part"
    try:
        with out_errors(path, _ADVICE):
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_dead_parts(path.parent)
            stage.mkdir()
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        if folder_is_new:
            _remove_empty(path.parent)


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # it is not empty: the export is in it
        folder.rmdir()


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file of an export, with the folders that lead to it."""
    with out_errors(path, _ADVICE):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_synced(path, [content.encode() if isinstance(content, str) else content])


def move_file(staged: Path, path: Path) -> None:
    """Give a file its place, in the stead of what was there."""
    with out_errors(path, _ADVICE):
        staged.replace(path)
        sync_folder(path.parent)


def move_folder(staged: Path, path: Path) -> None:
    """Give a folder its place, in the stead of what was there."""
    before = path.parent / f".{path.name}.before.{os.getpid()}.part"
    with out_errors(path, _ADVICE):
        if path.exists():
            path.rename(before)
        staged.rename(path)
        sync_folder(path.parent)
    shutil.rmtree(before, ignore_errors=True)
