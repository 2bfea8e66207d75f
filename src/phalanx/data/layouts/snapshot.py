"""Snapshots that show whether a folder of images has changed, quickly even for a large one."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from phalanx.data.layouts.image_files import list_folders, list_images

SMALL_SET = 20_000  # up to this many images, the size and time of each are checked
_FILES_SAMPLED = 1_000  # above that, those of this many files,
_FOLDERS_SAMPLED = 50  # spread over this many class folders

_Row = list[Any]


def snapshot_folder(
    folder: Path, known: Sequence[_Row] | None, *, rule: int, by_class_folder: bool = True
) -> list[_Row]:
    """The time of each folder with images, and a digest over sizes and times of files.

    known: the rows with times of an earlier snapshot; None: search for the folders.

    Adding, removing or renaming a file or folder changes the time of the folder that contains it.
    Deeper folders are not searched for but known from the earlier snapshot; a new one changes the
    time of its parent. Overwriting a file does not change the time of its folder: of up to 20,000
    images, the size and time of each go into the digest, of larger datasets those of 1,000, spread
    evenly over 50 class folders, which are spread evenly, too. A change that the sample misses is
    noticed when the image is read, because its size differs.
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
    """A digest over the names, sizes and times of files; inaccessible ones are left out."""
    digest = hashlib.sha256()
    for file in files:
        try:
            stat = os.stat(folder / file)
        except OSError:  # a broken link
            continue
        line = f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}\n"
        digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()


def _list_below(folder: Path, rule: int) -> list[str]:
    return list_images(folder, rule=rule).folders if rule > 1 else []


def _read_time(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except OSError:  # deleted meanwhile
        return -1


def _join(name: str, inner: str) -> str:
    return f"{name}/{inner}" if name else inner


def _sample_files(folder: Path, names: Sequence[str], rule: int) -> list[str]:
    """The images whose sizes and times go into the digest, as paths relative to the folder."""
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
    """`count` of the items, evenly spaced; all of them if there are not more."""
    if len(items) <= count:
        return list(items)
    return [items[number * len(items) // count] for number in range(count)]
