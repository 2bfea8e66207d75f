"""Which dataset lies in a folder, told by what its files and folders are called."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx.data.formats.sources import DATA_FORMATS, refuse_no_folder
from phalanx.errors import DataError

MAX_DEPTH = 3
# beside these, more datasets may lie in folders below; a tree of images is not descended into
_SEARCHED_BELOW = {"packed", "cifar10", "cifar100", "mnist", "fashion-mnist"}


@dataclass(frozen=True, kw_only=True)
class DetectedDataset:
    """A dataset that lies in a folder."""

    data: str
    folder: Path
    files: str  # what lies there


def detect_datasets(root: Path) -> list[DetectedDataset]:
    """Every dataset in a folder and up to three levels below it, the nearest first."""
    refuse_no_folder(root, "give a folder that data lies in")
    if not os.access(root, os.R_OK | os.X_OK):
        raise DataError(f"{root}: cannot be read (Permission denied); check its permissions")
    found: list[DetectedDataset] = []
    for folder, formats in _search(root):
        found += [
            DetectedDataset(data=data, folder=folder, files=DATA_FORMATS[data].files)
            for data in formats
            if not any(f.data == data and folder.is_relative_to(f.folder) for f in found)
        ]
    return found


def describe_conversion(found: DetectedDataset) -> str:
    """What to say of a dataset that can be trained on in another format only."""
    return (
        f"{found.folder}: {found.data} as it is handed out ({found.files}); convert it with "
        f"`phalanx data build {found.folder} --to packed --out DIR`, then train on DIR"
    )


def describe_choices(root: Path, found: list[DetectedDataset]) -> str:
    """What to say where several datasets lie in a folder: how to name each."""
    lines = [f"  --data {f.data} --data-dir {f.folder}    ({f.files})" for f in found]
    return "\n".join([f"{root}: several datasets lie here; say which one:", *lines])


def _search(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """The folders with the formats that lie in each, level by level."""
    level = [root]
    for depth in range(MAX_DEPTH + 1):
        below: list[Path] = []
        for folder in level:
            formats = [name for name, kind in DATA_FORMATS.items() if kind.is_in(folder)]
            if "folder" in formats and "imagenet" in formats:
                formats.remove("folder")  # the same files, of which more is known
            yield folder, formats
            if depth < MAX_DEPTH and set(formats) <= _SEARCHED_BELOW:
                below += _list_readable_folders(folder)
        level = below


def _list_readable_folders(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        names = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    return [folder / name for name in names if os.access(folder / name, os.R_OK | os.X_OK)]
