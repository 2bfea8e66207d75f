"""What tells that a folder of images has changed, without listing a large one."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from phalanx.data.layouts.image_files import list_folders, list_images

SMALL_SET = 20_000  # up to so many images each one's size and time are looked at
_FILES_SAMPLED = 1_000  # above that so many,
_FOLDERS_SAMPLED = 50  # spread over so many class folders

_Row = list[Any]


def snapshot_folder(
    folder: Path, known: Sequence[_Row] | None, *, rule: int, by_class_folder: bool = True
) -> list[_Row]:
    """The time of each folder with images, and a digest over sizes and times of files.

    known: the rows with times of an earlier snapshot; None: the folders are searched for.

    A file that comes, goes or gets another name changes the time of its folder, and so does a
    folder. Those further down are not searched for but known from before; a new one changes the
    time of the folder it lies in. A file that is written over changes no folder's time: of up to
    20,000 images each one's size and time go into the digest, of larger sets those of 1,000,
    spread evenly over 50 class folders that are themselves spread evenly. A change that the sample
    misses is found when the image is read: its size differs.
    """
    names = list_folders(folder) if by_class_folder else [""]
    if known is None:
        below = [_join(name, inner) for name in names for inner in _list_below(folder / name, rule)]
    else:
        tops = {*names, ""}
        below = [row[0] for row in known if row[0] not in tops]
    times = [[name, _read_time(folder / name)] for name in (*names, *below)]
    digest = hash_files(folder, _sample_files(folder, names, rule))
    return [*times, ["files", digest]]


def hash_files(folder: Path, files: Iterable[str]) -> str:
    """A digest over the sizes and times of files; one that cannot be looked at is left out."""
    digest = hashlib.sha256()
    for file in files:
        try:
            stat = os.stat(folder / file)
        except OSError:  # a dangling link
            continue
        line = f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}\n"
        digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()


def _list_below(folder: Path, rule: int) -> list[str]:
    return list_images(folder, rule=rule).folders if rule > 1 else []


def _read_time(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except OSError:  # gone since
        return -1


def _join(name: str, inner: str) -> str:
    return f"{name}/{inner}" if name else inner


def _sample_files(folder: Path, names: Sequence[str], rule: int) -> list[str]:
    """The images whose size and time tell of changes, by their path from the folder."""
    files: list[str] = []
    for name in names:
        files += [_join(name, file) for file in list_images(folder / name, rule=rule).images]
        if len(files) > SMALL_SET:
            break
    else:
        return files
    chosen = _sample_evenly(names, _FOLDERS_SAMPLED)
    each = -(-_FILES_SAMPLED // len(chosen))
    return [
        _join(name, file)
        for name in chosen
        for file in _sample_evenly(list_images(folder / name, rule=rule).images, each)
    ]


def _sample_evenly(items: Sequence[str], count: int) -> list[str]:
    """So many of the items, at even distances; all of them where there are no more."""
    if len(items) <= count:
        return list(items)
    return [items[number * len(items) // count] for number in range(count)]
