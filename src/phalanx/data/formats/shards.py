"""Datasets in numbered files: finding all of them, and scanning them on all cores."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.data.formats.image_file import open_data_file, read_data_file
from phalanx.data.formats.index import (
    WRONG_LABEL,
    Box,
    Index,
    IndexedSource,
    convert_read_errors,
    load_or_build_index,
    snapshot_files,
)
from phalanx.data.process_pool import ProcessPool, WorkerKilled
from phalanx.data.string_array import StringArray, join_strings, pack_strings
from phalanx.errors import DataError
from phalanx.plan.machine import count_cores
from phalanx.units import format_some

SHARD_SPLITS = {"train": ("train",), "valid": ("validation", "valid", "val")}
SHARD_PREFIX = {"train": "train", "valid": "validation"}  # of the shards that we write
MAX_CLASSES = 1_000_000  # a larger label is not a class number but a misread file
_SMALL_SCAN = 2**30  # bytes that one process reads in the time another takes to start
_MISSING_SHOWN = 5
_COMPRESSED = {  # how such files begin
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\0": "xz",
    b"BZh": "bzip2",
    b"\x04\x22\x4d\x18": "lz4",
}
_NO_BOX = (np.nan,) * 4


# --- finding files ---


@dataclass(frozen=True)
class ShardFiles:
    """How the files of one format are named: split, number and tail."""

    tail: str  # a pattern; its group "total" is the number of files, if names contain it
    splits: dict[str, tuple[str, ...]] = field(default_factory=lambda: dict(SHARD_SPLITS))
    folders: tuple[str, ...] = ("",)  # to search besides a folder named after the split

    def exist_in(self, root: Path) -> bool:
        """Whether there is a file of this format in the folder."""
        names = [name for names in self.splits.values() for name in names]
        return any(self._match(folder, names) for folder in self._find_folders(root, names))

    def find(self, root: Path, split: str) -> list[Path]:
        """The files of a split in the order of their numbers; empty if there are none."""
        for name in self.splits[split]:
            for folder in self._find_folders(root, [name]):
                matches = self._match(folder, [name])
                if matches:
                    return [folder / file for file in _sort_by_number(folder, matches)]
        return []

    def _find_folders(self, root: Path, names: Sequence[str]) -> list[Path]:
        """The existing folders that may contain the files of a split."""
        folders = [root / name for name in (*self.folders, *names)]
        return [folder for folder in folders if folder.is_dir()]

    def _match(self, folder: Path, names: Sequence[str]) -> list[re.Match[str]]:
        """The files of a split in a folder."""
        pattern = re.compile(rf"(?:.+[-_.])?(?:{'|'.join(names)})-(?P<number>\d+){self.tail}")
        with convert_read_errors(folder, "check its permissions, or download it again"):
            return [m for path in folder.iterdir() if (m := pattern.fullmatch(path.name))]


def _sort_by_number(folder: Path, matches: list[re.Match[str]]) -> list[str]:
    """The names by number; DataError for a gap, or if they are from several datasets."""
    by_number = {int(match["number"]): match[0] for match in matches}
    totals = {match["total"] for match in matches}
    if len(totals) > 1 or len(by_number) < len(matches):
        names = sorted(match[0] for match in matches)
        raise DataError(
            f"{folder}: holds shards of several datasets ({names[0]}, {names[-1]}); keep each one "
            "in its own folder"
        )
    total = totals.pop()
    first = 0 if total else min(1, *by_number)  # without a total: from 0 or 1
    end = int(total or max(by_number) + 1)
    missing = [number for number in range(first, end) if number not in by_number]
    if missing:
        raise DataError(_describe_missing(folder, matches[0], missing, end - first))
    if max(by_number) >= end:
        raise DataError(
            f"{folder}: has shards numbered above their total, such as {matches[0][0]}; remove them"
        )
    return [by_number[number] for number in sorted(by_number)]


def _describe_missing(
    folder: Path, example: re.Match[str], missing: list[int], expected: int
) -> str:
    begin, end = example.span("number")
    before, after = example[0][:begin], example[0][end:]
    names = [f"{before}{number:0{end - begin}}{after}" for number in missing]
    return (
        f"{folder}: {format_some(names, _MISSING_SHOWN)} missing, {expected:,} shards expected; "
        "fetch what is missing"
    )


def read_class_names(path: Path) -> tuple[str, ...] | None:
    """The class names in a file, one per line; None if there is no such file."""
    with convert_read_errors(path):
        if not path.exists():
            return None
        text = read_data_file(path).decode(errors="surrogateescape")
    return tuple(line.rstrip("\r") for line in text.split("\n") if line.strip())


# --- scanning files ---


class ScannedImage(NamedTuple):
    """One image found while scanning."""

    name: str
    offset: int
    size: int  # or a fault, such as WRONG_LABEL
    label: int
    box: Box | None = None


SCAN_DTYPE = np.dtype(  # of one image; a box of nan means none
    [("offset", np.int64), ("size", np.int64), ("label", np.int64), ("box", np.float32, 4)]
)


@dataclass(frozen=True, kw_only=True)
class ShardScan:
    """The images found in one file."""

    names: StringArray
    rows: NDArray[np.void]  # of SCAN_DTYPE
    class_names: dict[int, str]  # by label, if the file has them


class UnreadableShard(Exception):
    """A shard cannot be read from a byte on; `fault` is TRUNCATED_SHARD or DAMAGED_SHARD."""

    def __init__(self, byte: int, fault: int):
        super().__init__(byte, fault)
        self.byte, self.fault = byte, fault

    def to_image(self, path: Path) -> ScannedImage:
        """One entry for everything that is lost, named by the byte where it starts.

        Raises DataError if nothing in the file can be read because it is compressed.
        """
        if self.byte == 0:
            _refuse_compressed(path)
        name = f" from byte {self.byte:,} on"
        return ScannedImage(name=name, offset=self.byte, size=self.fault, label=-1)


def _refuse_compressed(path: Path) -> None:
    """Raise DataError if a shard begins as a compressed file does."""
    with open_data_file(path) as file:
        begin = file.read(max(map(len, _COMPRESSED)))
    for magic, name in _COMPRESSED.items():
        if begin.startswith(magic):
            raise DataError(
                f"{path}: is compressed ({name}), but images are read from anywhere in a shard; "
                "decompress it"
            )


def pack_scan(images: Sequence[ScannedImage], class_names: dict[int, str]) -> ShardScan:
    """The images of one file; those with an impossible label are marked as bad."""
    rows = np.array([(i.offset, i.size, i.label, i.box or _NO_BOX) for i in images], SCAN_DTYPE)
    impossible = (rows["label"] < 0) | (rows["label"] >= MAX_CLASSES)
    rows["size"][impossible & (rows["size"] >= 0)] = WRONG_LABEL
    names = pack_strings(image.name for image in images)
    return ShardScan(names=names, rows=rows, class_names=class_names)


def scan_shards(scan: Callable[[Path], ShardScan], paths: Sequence[Path]) -> list[ShardScan]:
    """The scan of each file, in order; large datasets are scanned on all cores."""
    is_small = sum(path.stat().st_size for path in paths) < _SMALL_SCAN
    try:
        with ProcessPool(1 if is_small else min(count_cores(), len(paths))) as pool:
            return list(pool.map(scan, paths))
    except WorkerKilled:  # a script without a main guard cannot start processes
        return [scan(path) for path in paths]


@dataclass(frozen=True, kw_only=True)
class ShardFormat:
    """A format of many files: how the files of a split are found, and how one is scanned."""

    key: str  # part of the name under which an index is stored
    find: Callable[[Path, str], list[Path]]  # (root, split)
    scan: Callable[[Path], ShardScan]

    def open_index(self, root: Path, split: str) -> Index | None:
        """The index of a split, with the class names in its own files; None without files."""
        paths = self.find(root, split)
        if not paths:
            return None
        with convert_read_errors(root, "check its permissions, or download it again"):
            return load_or_build_index(
                root,
                f"{self.key}-{split}",
                snapshot=snapshot_files(root, paths),
                build=lambda: _join_scans(root, paths, scan_shards(self.scan, paths)),
            )

    def assign_classes(
        self, index: Index, root: Path, split: str, listed: tuple[str, ...] | None = None
    ) -> Index:
        """The index with the listed classes, or without a list with those of the training split."""
        if listed is not None:
            return _assign_listed(index, listed)
        train = self.open_index(root, "train") if split == "valid" else None
        return index if train is None else _assign_trained(index, train, where=root)


def _join_scans(root: Path, paths: Sequence[Path], scans: Sequence[ShardScan]) -> Index:
    """The index over all files of a split."""
    rows = np.concatenate([scan.rows for scan in scans])
    if not len(rows):
        raise DataError(f"{paths[0]}: has no images; fetch or build the data again")
    class_names = _join_class_names(paths, scans)
    usable = rows["label"][rows["size"] >= 0]
    classes = range(1 + int(usable.max(initial=-1)))
    counts = [len(scan.rows) for scan in scans]
    return Index(
        classes=tuple(class_names.get(label, _default_name(label)) for label in classes),
        files=pack_strings(path.relative_to(root).as_posix() for path in paths),
        names=join_strings([scan.names for scan in scans]),
        file_numbers=np.repeat(np.arange(len(paths), dtype=np.int32), counts),
        offsets=rows["offset"],
        sizes=rows["size"],
        labels=rows["label"],
        boxes=None if np.isnan(rows["box"]).all() else rows["box"],
    )


def _join_class_names(paths: Sequence[Path], scans: Sequence[ShardScan]) -> dict[int, str]:
    """The name of each class; raises DataError if two files disagree."""
    known: dict[int, str] = {}
    for path, scan in zip(paths, scans, strict=True):
        for label, name in scan.class_names.items():
            if known.setdefault(label, name) != name:
                raise DataError(
                    f"{path}: calls class {label} {name!r}, an earlier file {known[label]!r}; "
                    "these shards are from different datasets"
                )
    return known


def _default_name(label: int) -> str:
    return f"class{label:04d}"


def _assign_listed(index: Index, names: tuple[str, ...]) -> Index:
    """The index with these class names; images of any other class are marked as bad."""
    unlisted = (index.labels >= len(names)) & (index.sizes >= 0)
    sizes = np.where(unlisted, WRONG_LABEL, index.sizes) if unlisted.any() else index.sizes
    return replace(index, classes=names, sizes=sizes)


def _assign_trained(index: Index, train: Index, *, where: Path) -> Index:
    """The index with the class names of the training split; raises DataError if they differ."""
    for label in map(int, np.unique(index.labels[index.sizes >= 0])):
        own, is_trained = index.classes[label], label < len(train.classes)
        trained = train.classes[label] if is_trained else "nothing"
        if own != (trained if is_trained else _default_name(label)):
            raise DataError(
                f"{where}: class {label} is {own!r} here and {trained!r} in training; the two "
                "splits are from different datasets"
            )
    return _assign_listed(index, train.classes)


def refuse_unusable(source: IndexedSource) -> None:
    """Raise DataError if every image of a split is bad according to the index."""
    if (source.index.sizes < 0).all():
        raise DataError(
            f"{source.root}: none of this split's images can be used ({len(source):,} in all), the "
            f"first is:\n{source.known_bad(0)}"
        )
