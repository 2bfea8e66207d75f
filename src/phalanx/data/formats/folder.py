"""Folders of image files, one folder a class."""

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from phalanx.data.formats.decode import BadImage
from phalanx.data.formats.index import (
    Index,
    IndexedSource,
    Snapshot,
    join_strings,
    load_or_build_index,
    pack_strings,
    read_errors,
    snapshot_files,
)
from phalanx.errors import ConfigError, DataError, suggest

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".gif"),
    *(".tif", ".tiff", ".avif", ".heic", ".heif"),
)
SPLIT_NAMES = {"train": ("train",), "valid": ("val", "validation", "valid")}
_SPLIT_FOLDERS = {"train": "train/", "valid": "val/ or validation/"}  # in messages
_FINDINGS_SHOWN = 10
_SMALL_SET = 20_000  # up to so many images each one's size and time are looked at on opening
_FILES_SAMPLED = 1_000  # above that so many,
_FOLDERS_SAMPLED = 50  # spread over so many class folders
_FOLDERS_TRIED = 3  # to see whether a folder holds class folders
_MEND_RIGHTS = "mend its rights"

_Select = Callable[[list[str]], list[str]]  # of a class's files, as CLASS/FILE, those of a split


class FolderSource(IndexedSource):
    """Random access to image files, each of which must be as long as when it was indexed."""

    def encoded(self, index: int) -> bytes:
        """The bytes of the image's file; raises BadImage when it is gone or has changed."""
        data = super().encoded(index)
        size = int(self.index.sizes[index])
        if 0 <= size != len(data):  # below zero: a dangling link when the folder was indexed
            why = f"has changed: {len(data):,} bytes, {size:,} when the folder was opened"
            raise BadImage(self.name(index), why)
        return data


class _SplitFolder(NamedTuple):
    """The folder whose class folders hold a split, and the classes that labels count."""

    folder: Path
    classes: tuple[str, ...]


def open_folder(root: Path, split: str) -> FolderSource:
    """One split of a data folder; all that is wrong with it is said at once."""
    return open_split(root, locate_split(root, split), f"folder-{split}")


def open_with_val_split(root: Path, split: str, *, share: float, seed: int) -> FolderSource:
    """One side of a folder without a validation split, of which `share` (0.1: a tenth) becomes one.

    The side of an image follows from its name and the seed, so that it stays when others are
    added; each class gives that share of its images, as chance has it, and at least one.
    """
    if not 0 < share < 1:
        raise ConfigError(f"--val-split: wants a share between 0% and 100%, got {share:.0%}")
    valid_folder = find_split(root, "valid")
    if valid_folder is not None:
        raise ConfigError(
            f"--val-split: {valid_folder} is there to be scored; leave the option out"
        )
    folder = find_split(root, "train") or root

    def select(files: list[str]) -> list[str]:
        valid = _choose_valid(files, share=share, seed=seed)
        return [file for file in files if (file in valid) == (split == "valid")]

    split_folder = _SplitFolder(folder, _read_classes(folder))
    return open_split(root, split_folder, f"split-{split}-{share:g}-{seed}", select=select)


def open_split(
    root: Path,
    split_folder: _SplitFolder,
    key: str,
    *,
    select: _Select | None = None,
    tables: Iterable[Path] = (),
    complete: Callable[[Index], Index] = lambda index: index,
) -> FolderSource:
    """The images of a split by its index, which is kept under that key.

    complete: adds to a new index what is known from tables beside the images.
    """
    index = load_or_build_index(
        root,
        key,
        snapshot=[*snapshot_split(root, split_folder), *snapshot_files(root, tables)],
        build=lambda: complete(_index_split(root, split_folder, select)),
    )
    return FolderSource(root, index)


def _choose_valid(files: list[str], *, share: float, seed: int) -> set[str]:
    """Those images of one class that are kept for validation: one at least, and never all."""
    ranks = {}
    for file in files:
        key = f"{seed}\0{file}".encode(errors="surrogateescape")
        digest = hashlib.blake2b(key, digest_size=8).digest()
        ranks[file] = int.from_bytes(digest, "big") / 2**64
    chosen = {file for file, rank in ranks.items() if rank < share}
    if len(files) > 1:
        chosen.add(min(files, key=ranks.__getitem__))
        chosen.discard(max(files, key=ranks.__getitem__))
    return chosen


def has_class_folders(root: Path) -> bool:
    """Whether class folders lie here, or a training or validation folder with some."""
    splits = find_splits(root)
    if splits:
        return any(_list_folders(folder) for folder in splits)
    names = _list_folders(root)
    return len(names) > 1 and all(_list_images(root / name) for name in names[:_FOLDERS_TRIED])


def locate_split(root: Path, split: str) -> _SplitFolder:
    """Where a split lies; its classes are those of the training split."""
    train, folder = find_split(root, "train"), find_split(root, split)
    if split == "valid" and train is None:
        alone = folder or root  # nothing to train on: the folder is there to be scored
        return _SplitFolder(alone, tuple(_list_folders(alone)))
    if train is None or folder is None:
        missing = _SPLIT_FOLDERS["train" if train is None else split]
        found = ", ".join(_list_folders(root)[:_FINDINGS_SHOWN]) or "no folders at all"
        raise DataError(
            f"{root}: no {missing} folder (found {found}); put images under train/CLASS/ and "
            "val/CLASS/, or point --data-dir at the folder that holds train/ and val/"
        )
    return _SplitFolder(folder, _read_classes(train))


def find_split(root: Path, split: str) -> Path | None:
    """The folder of a split, where there is one."""
    return next((root / name for name in SPLIT_NAMES[split] if (root / name).is_dir()), None)


def find_splits(root: Path) -> list[Path]:
    """The folders of those splits that have one."""
    return [folder for split in SPLIT_NAMES if (folder := find_split(root, split))]


def has_split_folder(root: Path, split: str) -> bool:
    """Whether a split has a folder; class folders without one are there to be scored."""
    alone = split == "valid" and find_split(root, "train") is None
    return alone or find_split(root, split) is not None


def _read_classes(folder: Path) -> tuple[str, ...]:
    names = tuple(_list_folders(folder))
    if len(names) < 2:
        found = f"only one class folder, {names[0]}/" if names else "no class folders"
        raise DataError(f"{folder}: has {found}; a classifier needs two, as folders of images")
    return names


def snapshot_split(root: Path, split_folder: _SplitFolder) -> Snapshot:
    """What tells that a split has changed, without listing a large one.

    A file that comes, goes or gets another name changes the time of its class folder. One that is
    written over does not: of up to 20,000 images each file's size and time go into a digest, of
    larger sets those of 1,000 files, spread evenly over 50 class folders that are themselves
    spread evenly. A change the sample misses is found when the image is read: its size differs.
    """
    folder = split_folder.folder
    names = _list_folders(folder)
    with read_errors(folder, _MEND_RIGHTS):
        times = [[name, (folder / name).stat().st_mtime_ns] for name in names]
    digest = hashlib.sha256()
    for file in _sample_files(folder, names):
        try:
            stat = os.stat(folder / file)
        except OSError:  # a dangling link
            continue
        line = f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}\n"
        digest.update(line.encode(errors="surrogateescape"))
    relative = folder.relative_to(root).as_posix()
    return [[relative, *split_folder.classes], *times, ["files", digest.hexdigest()]]


def _sample_files(folder: Path, names: list[str]) -> list[str]:
    """The images whose size and time tell of changes, as CLASS/FILE."""
    files: list[str] = []
    for name in names:
        files += [f"{name}/{file}" for file in _list_images(folder / name)]
        if len(files) > _SMALL_SET:
            break
    else:
        return files
    chosen = _sample_evenly(names, _FOLDERS_SAMPLED)
    each = -(-_FILES_SAMPLED // len(chosen))
    return [
        f"{name}/{file}"
        for name in chosen
        for file in _sample_evenly(_list_images(folder / name), each)
    ]


def _sample_evenly(items: list[str], count: int) -> list[str]:
    """So many of the items, at even distances; all of them where there are no more."""
    if len(items) <= count:
        return items
    return [items[number * len(items) // count] for number in range(count)]


def _index_split(root: Path, split_folder: _SplitFolder, select: _Select | None) -> Index:
    """The images of a split in the order of classes, then of file names; one folder at a time."""
    folder, classes = split_folder
    labels_by_class = {name: label for label, name in enumerate(classes)}
    prefix = "" if folder == root else f"{folder.relative_to(root).as_posix()}/"
    findings: list[str] = []
    paths, sizes, labels = [], [], []
    for name in _list_folders(folder):
        files = [f"{name}/{file}" for file in _list_images(folder / name)]
        if name not in labels_by_class:
            hint = suggest(name, labels_by_class)
            findings.append(f"{folder / name}: train/ has no such class; {hint}")
        elif not files:
            findings.append(f"{folder / name}: no image in this class folder")
        else:
            files = select(files) if select else files
            paths.append(pack_strings(prefix + file for file in files))
            sizes.append(np.array([_read_size(folder / file) for file in files], np.int64))
            labels.append(np.full(len(files), labels_by_class[name], np.int64))
    if not paths and not findings:
        findings.append(f"{folder}: has no class folders")
    if findings:
        raise DataError(_describe_findings(findings))
    count = sum(map(len, labels))
    return Index(
        classes=classes,
        files=join_strings(paths),
        file_numbers=np.arange(count, dtype=np.int32),
        offsets=np.zeros(count, np.int64),
        sizes=np.concatenate(sizes),
        labels=np.concatenate(labels),
    )


def _read_size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # a dangling link is a bad image, to be named when it is read
        return -1


def _describe_findings(findings: list[str]) -> str:
    shown = findings[:_FINDINGS_SHOWN]
    if len(findings) > len(shown):
        shown.append(f"and {len(findings) - len(shown)} more")
    return "\n".join([*shown, "add images to these folders, rename them or remove them"])


def _list_folders(folder: Path) -> list[str]:
    with read_errors(folder, _MEND_RIGHTS), os.scandir(folder) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))


def _list_images(folder: Path) -> list[str]:
    with read_errors(folder, _MEND_RIGHTS), os.scandir(folder) as entries:
        named = [e for e in entries if e.name.lower().endswith(IMAGE_SUFFIXES)]
        return sorted(e.name for e in named if e.name[0] != "." and not _is_folder(e))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether a class folder holds a folder there; a link that leads nowhere is a bad image."""
    try:
        return entry.is_dir()
    except OSError:
        return False
