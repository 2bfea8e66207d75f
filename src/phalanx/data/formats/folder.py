"""Folders of JPEG and PNG files, one folder a class."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.data.formats.decode import BadImage
from phalanx.data.formats.index import (
    Index,
    Snapshot,
    StringArray,
    load_or_build_index,
    pack_strings,
)
from phalanx.data.formats.indexed_source import IndexedSource
from phalanx.errors import ConfigError, DataError, suggest

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png")
SPLIT_NAMES = {"train": ("train",), "valid": ("val", "validation", "valid")}
_WANTED = {"train": "train/", "valid": "val/ or validation/"}
_FINDINGS_SHOWN = 10
_ALL_STAMPED = 20_000  # up to so many images each one's size and time are looked at on opening
_FILES_STAMPED, _FOLDERS_STAMPED = (
    1_000,
    50,
)  # above that so many, spread over so many class folders
_FOLDERS_LOOKED_AT = 3

_Keep = Callable[
    [list[str]], list[str]
]  # those files of a class, as CLASS/FILE, that are in a split


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
    place = locate_split(root, split)
    index = load_or_build_index(
        root,
        f"folder-{split}",
        stamp=snapshot_split(root, place),
        build=lambda: index_split(root, place),
    )
    return FolderSource(root, index)


def open_with_val_split(root: Path, split: str, *, share: float, seed: int) -> FolderSource:
    """One side of a folder without a validation split, of which `share` (0.1: a tenth) becomes one.

    The side of an image follows from its name and the seed, so that it stays when others are
    added; each class gives that share of its images, as chance has it, and at least one.
    """
    if not 0 < share < 1:
        raise ConfigError(f"--val-split: wants a share between 0% and 100%, got {share:.0%}")
    own = find_split(root, "valid")
    if own is not None:
        raise ConfigError(f"--val-split: {own} is there to be scored; leave the option out")
    folder = find_split(root, "train") or root
    place = _SplitFolder(folder, _class_names(folder))

    def keep(files: list[str]) -> list[str]:
        wanted = _choose_valid(files, share=share, seed=seed) == (split == "valid")
        return [file for file, taken in zip(files, wanted, strict=True) if taken]

    index = load_or_build_index(
        root,
        f"split-{split}-{share:g}-{seed}",
        stamp=snapshot_split(root, place),
        build=lambda: index_split(root, place, keep),
    )
    return FolderSource(root, index)


def _choose_valid(names: Sequence[str], *, share: float, seed: int) -> NDArray[np.bool_]:
    """Which images of one class are kept for validation: one at least, and never all."""
    chances = np.empty(len(names))
    for place, name in enumerate(names):
        key = f"{seed}\0{name}".encode(errors="surrogateescape")
        chances[place] = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") / 2**64
    chosen = chances < share
    if len(names) > 1:
        chosen[chances.argmin()], chosen[chances.argmax()] = True, False
    return chosen


def has_class_folders(root: Path) -> bool:
    """Whether class folders lie here, or a training or validation folder with some."""
    splits = [folder for split in SPLIT_NAMES if (folder := find_split(root, split))]
    if splits:
        return any(_subfolders(folder) for folder in splits)
    names = _subfolders(root)
    return len(names) > 1 and all(_image_files(root / n) for n in names[:_FOLDERS_LOOKED_AT])


def locate_split(root: Path, split: str) -> _SplitFolder:
    """Where a split lies; its classes are those of the training split."""
    folders = {name: find_split(root, name) for name in SPLIT_NAMES}
    if split == "valid" and folders["train"] is None:
        alone = folders["valid"] or root  # nothing to train on: the folder is there to be scored
        return _SplitFolder(alone, tuple(_subfolders(alone)))
    missing = [name for name in {"train", split} if folders[name] is None]
    if missing:
        raise DataError(_describe_missing(root, missing))
    train, wanted = folders["train"], folders[split]
    assert train is not None and wanted is not None
    return _SplitFolder(wanted, _class_names(train))


def find_split(root: Path, split: str) -> Path | None:
    """The folder of a split, where there is one."""
    return next((root / name for name in SPLIT_NAMES[split] if (root / name).is_dir()), None)


def snapshot_split(root: Path, place: _SplitFolder) -> Snapshot:
    """What tells that a split has changed, without listing a large one.

    A file that comes, goes or gets another name changes the time of its class folder. One that is
    written over does not: of up to 20,000 images each file's size and time go into a digest, of
    larger sets those of 1,000 files, spread evenly over 50 class folders that are themselves
    spread evenly. A change the sample misses is found when the image is read: its size differs.
    """
    names = _subfolders(place.folder)
    home = place.folder.relative_to(root).as_posix()
    times = []
    for name in names:
        with _readable(place.folder / name):
            times.append([name, (place.folder / name).stat().st_mtime_ns])
    digest = _hash_files(place.folder, _files_to_stamp(place.folder, names))
    return [[home, *place.classes], *times, ["files", digest]]


def _files_to_stamp(folder: Path, names: list[str]) -> list[str]:
    files: list[str] = []
    for name in names:
        files += [f"{name}/{file}" for file in _image_files(folder / name)]
        if len(files) > _ALL_STAMPED:
            chosen = _spread(names, _FOLDERS_STAMPED)
            each = -(-_FILES_STAMPED // len(chosen))
            return [
                f"{n}/{file}" for n in chosen for file in _spread(_image_files(folder / n), each)
            ]
    return files


def _spread(items: list[str], count: int) -> list[str]:
    """So many of the items, at even distances; all of them where there are no more."""
    if len(items) <= count:
        return items
    return [items[place * len(items) // count] for place in range(count)]


def _hash_files(folder: Path, files: list[str]) -> str:
    digest = hashlib.sha256()
    for file in files:
        try:
            facts = os.stat(folder / file)
        except OSError:  # a dangling link
            continue
        line = f"{file}\0{facts.st_size}\0{facts.st_mtime_ns}\n"
        digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()


def index_split(root: Path, place: _SplitFolder, keep: _Keep | None = None) -> Index:
    """The images of a split in the order of classes, then of file names; one folder at a time."""
    known = {name: label for label, name in enumerate(place.classes)}
    home = "" if place.folder == root else f"{place.folder.relative_to(root).as_posix()}/"
    findings: list[str] = []
    texts, sizes, labels = [], [], []
    for name in _subfolders(place.folder):
        folder = place.folder / name
        files = _image_files(folder)
        if name not in known:
            findings.append(f"{folder}: train/ has no such class; {suggest(name, known)}")
        elif not files:
            findings.append(f"{folder}: no {', '.join(IMAGE_SUFFIXES)} file in this class folder")
        else:
            kept = [f"{name}/{file}" for file in files]
            kept = keep(kept) if keep else kept
            texts.append(pack_strings(home + file for file in kept))
            sizes.append(np.array([_size_of(place.folder / file) for file in kept], np.int64))
            labels.append(np.full(len(kept), known[name], np.int64))
    if not texts and not findings:
        findings.append(f"{place.folder}: has no class folders")
    if findings:
        raise DataError(_describe_findings(findings))
    count = sum(map(len, labels))
    return Index(
        classes=place.classes,
        files=_join_texts(texts),
        file_of=np.arange(count, dtype=np.int32),
        offsets=np.zeros(count, np.int64),
        sizes=np.concatenate(sizes),
        labels=np.concatenate(labels),
    )


def _size_of(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # a dangling link is a bad image, to be named when it is read
        return -1


def _join_texts(parts: list[StringArray]) -> StringArray:
    starts = np.cumsum([0, *(len(part.letters) for part in parts)])
    ends = [part.ends + start for part, start in zip(parts, starts[:-1], strict=True)]
    return StringArray(np.concatenate([part.letters for part in parts]), np.concatenate(ends))


def _describe_missing(root: Path, missing: list[str]) -> str:
    wanted = " and no ".join(_WANTED[name] for name in sorted(missing))
    found = ", ".join(_subfolders(root)[:_FINDINGS_SHOWN]) or "no folders at all"
    return (
        f"{root}: no {wanted} folder (found {found}); put images under train/CLASS/ and "
        "val/CLASS/, or point --data-dir at the folder that holds train/ and val/"
    )


def _subfolders(folder: Path) -> list[str]:
    with _readable(folder), os.scandir(folder) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as cause:
        raise DataError(f"{folder}: cannot be read ({cause.strerror}); mend its rights") from cause


def _class_names(folder: Path) -> tuple[str, ...]:
    names = tuple(_subfolders(folder))
    if len(names) < 2:
        found = f"only one class folder, {names[0]}/" if names else "no class folders"
        raise DataError(f"{folder}: has {found}; a classifier needs two, as folders of images")
    return names


def _describe_findings(findings: list[str]) -> str:
    shown = findings[:_FINDINGS_SHOWN]
    if len(findings) > len(shown):
        shown.append(f"and {len(findings) - len(shown)} more")
    return "\n".join([*shown, "add images to these folders, rename them or remove them"])


def _image_files(folder: Path) -> list[str]:
    with _readable(folder), os.scandir(folder) as entries:
        names = [
            e.name for e in entries if e.name.lower().endswith(IMAGE_SUFFIXES) and not e.is_dir()
        ]
    return sorted(name for name in names if not name.startswith("."))
