"""ImageNet: as folders with a table of boxes, and as it is handed out, in archives or by Kaggle."""

import csv
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from phalanx.data.formats.decode import read_image_header
from phalanx.data.formats.folder import (
    SPLIT_NAMES,
    FolderSource,
    find_split,
    index_split,
    locate_split,
    snapshot_split,
)
from phalanx.data.formats.imagenet_devkit import read_validation_synsets
from phalanx.data.formats.index import Box, Index, load_or_build_index, snapshot_files
from phalanx.errors import DataError

BOXES_FILE = "imagenet_2012_bounding_boxes.csv"
_SYNSET = re.compile(r"n\d{8}")
OFFICIAL_ARCHIVES = {"train": "ILSVRC2012_img_train.tar", "valid": "ILSVRC2012_img_val.tar"}
KAGGLE_IMAGES = Path("ILSVRC/Data/CLS-LOC")
KAGGLE_SPLITS = {"train": "train", "valid": "val"}
KAGGLE_SOLUTIONS = {"train": "LOC_train_solution.csv", "valid": "LOC_val_solution.csv"}
KAGGLE_SYNSETS = "LOC_synset_mapping.txt"
_NO_BOX = (np.nan,) * 4


class _Handed(NamedTuple):
    """An image as it is handed out."""

    name: str
    data: bytes
    synset: str
    box: Box | None


class _Solution(NamedTuple):
    """What Kaggle's table says of an image: its class, and the hull of its boxes in pixels."""

    synset: str
    hull: Box


# --- as folders ---


def has_imagenet_folders(root: Path) -> bool:
    """Whether folders of ImageNet's synsets lie here, or its table of boxes beside a split."""
    folders = [folder for split in SPLIT_NAMES if (folder := find_split(root, split))]
    if not folders:
        return False
    names = [entry.name for entry in os.scandir(folders[0]) if entry.is_dir()]
    synsets = sum(1 for name in names if _SYNSET.fullmatch(name))
    return (root / BOXES_FILE).is_file() or synsets * 2 > len(names)


def open_imagenet(root: Path, split: str) -> FolderSource:
    """One split of ImageNet in folders, with boxes where the table of them is there."""
    place, table = locate_split(root, split), root / BOXES_FILE
    tables = [table] if table.is_file() else []
    index = load_or_build_index(
        root,
        f"imagenet-{split}",
        stamp=[*snapshot_split(root, place), *snapshot_files(root, tables)],
        build=lambda: _add_boxes(index_split(root, place), tables),
    )
    return FolderSource(root, index)


def _add_boxes(index: Index, tables: list[Path]) -> Index:
    """The index with the boxes of those images that a table names; as it was without a table."""
    if not tables:
        return index
    known = {name: box for table in tables for name, box in _read_boxes(table).items()}
    boxes = np.full((len(index), 4), np.nan, np.float32)
    for place in range(len(index)):
        boxes[place] = known.get(_stem_of(index.name(place)), _NO_BOX)
    return replace(index, boxes=boxes)


def _read_boxes(path: Path) -> dict[str, Box]:
    """The hull of each image's boxes, by the name of its file without an ending."""
    boxes: dict[str, Box] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.reader(file), 1):
            if not row or (number == 1 and not _are_numbers(row[1:])):  # a line of headings
                continue
            if len(row) != 5 or not _are_numbers(row[1:]):
                raise DataError(
                    f"{path}, line {number}: wants a file and four numbers, got "
                    f"{','.join(row)[:60]!r}; mend the line, or remove the file to do without boxes"
                )
            name, box = _stem_of(row[0]), _hull([tuple(map(float, row[1:]))])
            boxes[name] = _hull([boxes[name], box]) if name in boxes else box
    return {name: clipped for name, box in boxes.items() if (clipped := _clip(box))}


def _stem_of(name: str) -> str:
    """The last part of a path without its ending."""
    return name.rpartition("/")[2].partition(".")[0]


def _hull(boxes: Iterable[tuple[float, ...]]) -> Box:
    """The smallest box around boxes, whichever corner each begins with."""
    columns = list(zip(*boxes, strict=True))
    across, down = (*columns[0], *columns[2]), (*columns[1], *columns[3])
    return min(across), min(down), max(across), max(down)


def _clip(box: Box) -> Box | None:
    """The part of the box that lies in the image; None where nothing is left of it."""
    left, top, right, bottom = (min(max(edge, 0.0), 1.0) for edge in box)
    return (left, top, right, bottom) if left < right and top < bottom else None


def _are_numbers(words: list[str]) -> bool:
    try:
        return bool(np.isfinite([float(word) for word in words]).all())
    except ValueError:
        return False


# --- the official archives ---


def has_official_archives(root: Path) -> bool:
    """Whether one of the official archives lies here."""
    return any((root / name).is_file() for name in OFFICIAL_ARCHIVES.values())


def read_official_images(root: Path, split: str, *, start: int = 0) -> Iterator[_Handed]:
    """The images of the official archives from the one numbered `start` on, in a fixed order.

    Training images come synset by synset, validation images by name; both with the boxes of
    imagenet_2012_bounding_boxes.csv where that lies beside the archives.
    """
    boxes = _read_boxes(root / BOXES_FILE) if (root / BOXES_FILE).is_file() else {}
    for name, synset, read in islice(_official(root, split), start, None):
        yield _Handed(name, read(), synset, boxes.get(_stem_of(name)))


def read_official_classes(root: Path) -> tuple[str, ...]:
    """The synsets in the order that labels count: those of the training archive, sorted."""
    path = root / OFFICIAL_ARCHIVES["train"]
    if not path.is_file():
        return tuple(sorted(set(read_validation_synsets(root))))
    with _opened(path) as outer:
        return tuple(_stem_of(member.name) for member in _files_in(outer, path))


def count_official_images(root: Path, split: str) -> int:
    """How many images a split has; reads headers only."""
    return sum(1 for _ in _official(root, split))


_Found = tuple[str, str, Callable[[], bytes]]  # name, synset, and what reads the image


def _official(root: Path, split: str) -> Iterator[_Found]:
    path = root / OFFICIAL_ARCHIVES[split]
    if not path.is_file():
        raise DataError(f"{path}: not here; put ImageNet's archive there, whole as it came")
    with _opened(path) as archive:
        found = _official_train if split == "train" else _official_valid
        yield from found(archive, path)


def _official_train(outer: tarfile.TarFile, path: Path) -> Iterator[_Found]:
    for member in _files_in(outer, path):
        synset, where = _stem_of(member.name), Path(f"{path}:{member.name}")
        with _opened(where, outer.extractfile(member)) as inner:
            for image in _files_in(inner, where):
                yield image.name, synset, _reader(inner, image, where)


def _official_valid(archive: tarfile.TarFile, path: Path) -> Iterator[_Found]:
    images, synsets = _files_in(archive, path), read_validation_synsets(path.parent)
    if len(images) != len(synsets):
        raise DataError(
            f"{path}: has {len(images):,} images where the development kit knows "
            f"{len(synsets):,}; get both again"
        )
    for image, synset in zip(images, synsets, strict=True):
        yield image.name.rpartition("/")[2], synset, _reader(archive, image, path)


@contextmanager
def _opened(path: Path, stream: object = None) -> Iterator[tarfile.TarFile]:
    """An archive, itself a file or a piece of one; damage found meanwhile names it."""
    try:
        with tarfile.open(path, "r:", fileobj=stream) as archive:  # type: ignore[call-overload]
            yield archive
    except (OSError, tarfile.TarError) as cause:
        raise DataError(f"{path}: cannot be read ({cause}); get it again") from None


def _files_in(archive: tarfile.TarFile, path: Path) -> list[tarfile.TarInfo]:
    """The files of an archive by name; anything that is neither file nor folder is refused."""
    members = sorted(archive.getmembers(), key=lambda member: member.name)
    strange = [member.name for member in members if not (member.isfile() or member.isdir())]
    if strange:
        raise DataError(f"{path}: {strange[0]} is a link or a device; get the archive again")
    return [member for member in members if member.isfile()]


def _reader(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> Callable[[], bytes]:
    def read() -> bytes:
        file = archive.extractfile(member)
        data = file.read() if file else b""
        if len(data) != member.size:
            raise DataError(f"{path}: ends within {member.name}; get it again")
        return data

    return read


# --- Kaggle's tree ---


def has_kaggle_folder(root: Path) -> bool:
    """Whether Kaggle's tree was unpacked here."""
    return (root / KAGGLE_IMAGES).is_dir()


def read_kaggle_images(root: Path, split: str, *, start: int = 0) -> Iterator[_Handed]:
    """The images of Kaggle's tree from the one numbered `start` on, in a fixed order, with boxes.

    The training images tell their class by their folder, the flat validation images by a table.
    """
    solutions = _read_solutions(root, split)
    for file, synset in islice(_kaggle_files(root, split, solutions), start, None):
        try:
            data = file.read_bytes()
        except OSError as cause:
            raise DataError(f"{file}: cannot be read ({cause.strerror}); mend it") from None
        solution = solutions.get(file.stem)
        yield _Handed(file.name, data, synset, solution and _to_shares(solution.hull, data))


def read_kaggle_classes(root: Path) -> tuple[str, ...]:
    """The synsets in the order that labels count."""
    mapping = root / KAGGLE_SYNSETS
    if mapping.is_file():
        lines = mapping.read_text(encoding="utf-8").splitlines()
        return tuple(sorted(line.split()[0] for line in lines if line.strip()))
    return tuple(_names_in(root / KAGGLE_IMAGES / KAGGLE_SPLITS["train"]))


def count_kaggle_images(root: Path, split: str) -> int:
    """How many images a split has."""
    return sum(1 for _ in _kaggle_files(root, split, _read_solutions(root, split)))


def _read_solutions(root: Path, split: str) -> dict[str, _Solution]:
    """What Kaggle's table says, by image; nothing where it has no table."""
    path = root / KAGGLE_SOLUTIONS[split]
    if not path.is_file():
        return {}
    solutions = {}
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.reader(file), 1):
            words = row[-1].split() if row else []
            if number == 1 and len(words) == 1:  # a line of headings
                continue
            numbers = [words[start + 1 : start + 5] for start in range(0, len(words), 5)]
            if len(row) != 2 or not words or len(words) % 5 or not all(map(_are_numbers, numbers)):
                raise DataError(
                    f"{path}, line {number}: wants an image, then a synset and four numbers for "
                    "each box; get the table again"
                )
            boxes = [tuple(map(float, box)) for box in numbers]
            solutions[row[0]] = _Solution(words[0], _hull(boxes))
    return solutions


def _to_shares(pixels: Box, data: bytes) -> Box | None:
    """A box in pixels as shares of the image's size; None for an image that cannot be read."""
    height, width = read_image_header(data).shape
    if not width or not height:
        return None
    left, top, right, bottom = pixels
    return _clip((left / width, top / height, right / width, bottom / height))


def _kaggle_files(
    root: Path, split: str, solutions: dict[str, _Solution]
) -> Iterator[tuple[Path, str]]:
    folder = root / KAGGLE_IMAGES / KAGGLE_SPLITS[split]
    for name in _names_in(folder):
        if (folder / name).is_dir():
            yield from ((folder / name / file, name) for file in _names_in(folder / name))
        elif name.partition(".")[0] in solutions:
            yield folder / name, solutions[name.partition(".")[0]].synset
        else:
            table = root / KAGGLE_SOLUTIONS[split]
            raise DataError(
                f"{folder / name}: {table.name} does not say what it shows; get {table}"
            )


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as cause:
        raise DataError(f"{folder}: cannot be read ({cause.strerror}); unpack it again") from None


@dataclass(frozen=True, kw_only=True)
class _Handout:
    """A form in which ImageNet is handed out; to be built into another before training."""

    looks_like: Callable[[Path], bool]
    classes: Callable[[Path], tuple[str, ...]]
    count: Callable[[Path, str], int]
    iterate: Callable[..., Iterator[_Handed]]  # (root, split, start=0)


SEQUENTIAL_FORMATS = {
    "imagenet-official": _Handout(
        looks_like=has_official_archives,
        classes=read_official_classes,
        count=count_official_images,
        iterate=read_official_images,
    ),
    "imagenet-kaggle": _Handout(
        looks_like=has_kaggle_folder,
        classes=read_kaggle_classes,
        count=count_kaggle_images,
        iterate=read_kaggle_images,
    ),
}
