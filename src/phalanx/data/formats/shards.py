"""Data spread over numbered files: finding all of them, and scanning them on all cores."""

import multiprocessing
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.data.formats.index import (
    Index,
    StringArray,
    load_or_build_index,
    pack_strings,
    snapshot_files,
)
from phalanx.data.formats.indexed_source import WRONG_LABEL, IndexedSource
from phalanx.errors import DataError
from phalanx.plan.machine import count_cores

SHARD_SPLITS = {"train": ("train",), "valid": ("validation", "valid", "val")}
SHARD_PREFIX = {"train": "train", "valid": "validation"}  # what our own shards are called
MAX_CLASSES = 1_000_000  # a label above is no class number but a misread file
_SMALL_SCAN = 2**30  # bytes one process reads before another one would have started
_SHOWN = 5


@dataclass(frozen=True)
class ShardFiles:
    """How the files of one format are named after the split and the number."""

    tail: str  # a pattern with a group "total" for the number of files where the name tells it
    words: dict[str, tuple[str, ...]] = field(default_factory=lambda: dict(SHARD_SPLITS))
    folders: tuple[str, ...] = ("",)  # where to look besides a folder called as the split

    def pattern(self, words: Sequence[str]) -> re.Pattern[str]:
        """What the names of a split look like."""
        split = "|".join(words)
        return re.compile(rf"(?:.+[-_.])?(?:{split})-(?P<number>\d+){self.tail}")

    def places(self, root: Path, words: Sequence[str]) -> list[Path]:
        """The folders the files of a split may lie in."""
        found = [root / name for name in (*self.folders, *words)]
        return [folder for folder in found if folder.is_dir()]

    def looks_like(self, root: Path) -> bool:
        """Whether a file of this family lies in the folder."""
        words = [word for split in self.words.values() for word in split]
        pattern = self.pattern(words)
        return any(
            pattern.fullmatch(path.name)
            for folder in self.places(root, words)
            for path in _entries(folder)
        )

    def find(self, root: Path, split: str) -> list[Path]:
        """The files of a split in the order of their numbers; none where it has none."""
        for word in self.words[split]:
            pattern = self.pattern([word])
            for folder in self.places(root, [word]):
                matches = [m for path in _entries(folder) if (m := pattern.fullmatch(path.name))]
                if matches:
                    return [folder / name for name in _in_order(folder, matches)]
        return []


def _entries(folder: Path) -> list[Path]:
    with _readable(folder):
        return list(folder.iterdir())


@contextmanager
def _readable(place: Path) -> Iterator[None]:
    """A block whose system errors become a DataError that names the file."""
    try:
        yield
    except OSError as cause:
        why = cause.strerror or str(cause)
        where = cause.filename or place
        raise DataError(f"{where}: cannot be read ({why}); mend its rights or fetch it") from cause


def _in_order(folder: Path, matches: list[re.Match[str]]) -> list[str]:
    """The names by number; a gap or a second set among them is refused."""
    by_number = {int(match["number"]): match[0] for match in matches}
    totals = {match["total"] for match in matches}
    if len(totals) > 1 or len(by_number) < len(matches):
        names = sorted(match[0] for match in matches)
        raise DataError(
            f"{folder}: shards of several sets lie side by side ({names[0]}, {names[-1]}); keep "
            "each set in a folder of its own"
        )
    first = 0 if next(iter(totals)) else min(1, *by_number)  # without a total: from 0 or 1
    end = int(next(iter(totals)) or max(by_number) + 1)
    missing = [number for number in range(first, end) if number not in by_number]
    if missing or max(by_number) >= end:
        raise DataError(_describe_missing(folder, matches[0], missing, end - first))
    return [by_number[number] for number in sorted(by_number)]


def _describe_missing(
    folder: Path, example: re.Match[str], missing: list[int], expected: int
) -> str:
    if not missing:
        return f"{folder}: has shards numbered above their total, such as {example[0]}; remove them"
    begin, end = example.span("number")
    names = [f"{example[0][:begin]}{n:0{end - begin}}{example[0][end:]}" for n in missing[:_SHOWN]]
    more = f" and {len(missing) - _SHOWN:,} more" if len(missing) > _SHOWN else ""
    return (
        f"{folder}: {', '.join(names)}{more} missing of {expected:,} shards; fetch what is missing"
    )


@dataclass(frozen=True, kw_only=True)
class ShardScan:
    """What was found in one file: for each image its name, place, label and box."""

    names: StringArray
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    labels: NDArray[np.int64]
    boxes: NDArray[np.float32]  # [N, 4]; nan: none
    titles: dict[int, str] = field(default_factory=dict)  # the name of a class, where files tell


@dataclass(frozen=True, kw_only=True)
class ScannedImage:
    """One image met while scanning."""

    name: str
    offset: int
    size: int
    label: int
    box: Sequence[float] | None = None


class UnreadableShard(Exception):
    """A shard cannot be read on from a byte; `fault` is a key of indexed_source.REASONS."""

    def __init__(self, byte: int, fault: int):
        super().__init__(byte, fault)
        self.byte, self.fault = byte, fault


def lost_rest(cut: UnreadableShard) -> ScannedImage:
    """One entry for all that a shard has lost, named by the byte where that begins."""
    return ScannedImage(
        name=f" from byte {cut.byte:,} on", offset=cut.byte, size=cut.fault, label=-1
    )


def size_or_fault(size: int, label: int) -> int:
    """The size of an image, or a fault in its place where no class can have the label."""
    return size if 0 <= label < MAX_CLASSES else WRONG_LABEL


def pack_scan(images: Sequence[ScannedImage], titles: dict[int, str] | None = None) -> ShardScan:
    """The images of one file as arrays."""
    none = (np.nan,) * 4
    return ShardScan(
        names=pack_strings(image.name for image in images),
        offsets=np.array([image.offset for image in images], np.int64),
        sizes=np.array([image.size for image in images], np.int64),
        labels=np.array([image.label for image in images], np.int64),
        boxes=np.array([image.box or none for image in images], np.float32).reshape(-1, 4),
        titles=titles or {},
    )


def scan_shards(scan: Callable[[Path], ShardScan], paths: Sequence[Path]) -> list[ShardScan]:
    """A scan of each file, in order; large sets are shared among all cores."""
    processes = min(count_cores(), len(paths))
    if processes < 2 or sum(path.stat().st_size for path in paths) < _SMALL_SCAN:
        return [scan(path) for path in paths]
    try:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, spawn) as pool:
            return list(pool.map(scan, paths))
    except BrokenProcessPool:  # a script without a main guard cannot start processes
        return [scan(path) for path in paths]


def open_shards(
    root: Path, split: str, *, key: str, paths: Sequence[Path], scan: Callable[[Path], ShardScan]
) -> Index:
    """The index of a split, with class names as its own files tell them."""
    with _readable(root):
        return load_or_build_index(
            root,
            f"{key}-{split}",
            stamp=snapshot_files(root, paths),
            build=lambda: _join_scans(root, paths, scan_shards(scan, paths)),
        )


def _join_scans(root: Path, paths: Sequence[Path], scans: Sequence[ShardScan]) -> Index:
    """One index over all files of a split."""
    counts = [len(scan.labels) for scan in scans]
    boxes = np.concatenate([scan.boxes for scan in scans])
    labels = np.concatenate([scan.labels for scan in scans])
    sizes = np.concatenate([scan.sizes for scan in scans])
    if not len(labels):
        raise DataError(f"{paths[0]}: has no images; fetch or build the data again")
    return Index(
        classes=_name_classes(1 + _top_label(labels, sizes), _join_titles(paths, scans)),
        files=pack_strings(path.relative_to(root).as_posix() for path in paths),
        names=_join_texts([scan.names for scan in scans]),
        file_of=np.repeat(np.arange(len(paths), dtype=np.int32), counts),
        offsets=np.concatenate([scan.offsets for scan in scans]),
        sizes=sizes,
        labels=labels,
        boxes=None if np.isnan(boxes).all() else boxes,
    )


def _top_label(labels: NDArray[np.int64], sizes: NDArray[np.int64]) -> int:
    """The highest label of an image that can be used; -1 where none can."""
    return int(labels.max(where=sizes >= 0, initial=-1))


def _join_titles(paths: Sequence[Path], scans: Sequence[ShardScan]) -> dict[int, str]:
    """The name of each class; raises DataError when two files name one differently."""
    titles: dict[int, str] = {}
    for path, scan in zip(paths, scans, strict=True):
        for label, title in scan.titles.items():
            if titles.setdefault(label, title) != title:
                raise DataError(
                    f"{path}: calls class {label} {title!r}, an earlier file {titles[label]!r}; "
                    "these shards are not of one set"
                )
    return titles


def _name_classes(count: int, titles: dict[int, str]) -> tuple[str, ...]:
    """A name for each class, made up where none was told."""
    return tuple(titles.get(label, _made_up(label)) for label in range(count))


def _made_up(label: int) -> str:
    return f"class{label:04d}"


def _join_texts(parts: Sequence[StringArray]) -> StringArray:
    """The words of all parts, one after the other."""
    shifts = np.cumsum([0, *(len(part.letters) for part in parts)])
    ends = [part.ends + shift for part, shift in zip(parts, shifts, strict=False)]
    return StringArray(np.concatenate([part.letters for part in parts]), np.concatenate(ends))


def assign_classes(index: Index, names: tuple[str, ...]) -> Index:
    """The index with these class names, where images of any other class are set aside."""
    beyond = index.labels >= len(names)
    sizes = index.sizes
    if beyond.any():
        sizes = np.where(beyond & (sizes >= 0), WRONG_LABEL, sizes)
    return replace(index, classes=names, sizes=sizes)


def assign_train_classes(index: Index, train: Index, *, where: Path) -> Index:
    """The index with the class names of training; raises DataError when they contradict."""
    for label in map(int, np.unique(index.labels[index.sizes >= 0])):
        told = train.classes[label] if label < len(train.classes) else "nothing"
        unknown = told == "nothing" and index.classes[label] == _made_up(label)
        if index.classes[label] != told and not unknown:
            raise DataError(
                f"{where}: class {label} is {index.classes[label]!r} here and {told!r} in "
                "training; the two splits are not of one set"
            )
    return assign_classes(index, train.classes)


def refuse_unusable(source: IndexedSource) -> None:
    """Raise DataError when the index knows every image of a split to be bad."""
    if (source.index.sizes < 0).all():
        raise DataError(
            f"{source.root}: of this split's images ({len(source):,}) none can be used, the first "
            f"is:\n{source.known_bad(0)}"
        )


def enclosing_box(boxes: Iterable[Sequence[float]]) -> tuple[float, float, float, float] | None:
    """The smallest box around all; None around none."""
    columns = list(zip(*boxes, strict=True))
    if not columns:
        return None
    left, top, right, bottom = columns
    return min(left), min(top), max(right), max(bottom)


def read_class_names(path: Path) -> tuple[str, ...] | None:
    """The class names of a file, one a line; None where there is no such file."""
    try:
        text = path.read_bytes().decode(errors="surrogateescape")
    except FileNotFoundError:
        return None
    except OSError as cause:
        raise DataError(f"{path}: cannot be read ({cause.strerror}); mend its rights") from None
    return tuple(line.rstrip("\r") for line in text.split("\n") if line.strip())
