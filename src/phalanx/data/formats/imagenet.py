"""ImageNet: in folders with a table of boxes, and as distributed, in archives or by Kaggle.

The folders can be trained from. The official archives and Kaggle's tree can only be read
sequentially; `phalanx data build` converts them into a format with random access.
"""

import csv
import hashlib
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from phalanx.data.formats.decode import BadImage
from phalanx.data.formats.folder import FolderSource, open_folder
from phalanx.data.formats.image_file import DEFAULT_LIMITS, ReadLimits, read_image_file
from phalanx.data.formats.imagenet_devkit import read_validation_synsets
from phalanx.data.formats.index import Box, Index, convert_read_errors, enclosing_box
from phalanx.data.layouts.image_files import list_folders
from phalanx.data.layouts.listing import DEFAULT_LAYOUT, LayoutOptions
from phalanx.data.layouts.split_folders import find_split_folders
from phalanx.data.layouts.tiny_imagenet import find_annotations
from phalanx.data.pillow_image import read_image_header
from phalanx.errors import DataError

BOXES_FILE = "imagenet_2012_bounding_boxes.csv"
_SYNSET = re.compile(r"n\d{8}")
OFFICIAL_ARCHIVES = {"train": "ILSVRC2012_img_train.tar", "valid": "ILSVRC2012_img_val.tar"}
_KAGGLE_IMAGES = Path("ILSVRC/Data/CLS-LOC")
_KAGGLE_SOLUTIONS = {"train": "LOC_train_solution.csv", "valid": "LOC_val_solution.csv"}
_KAGGLE_SYNSETS = "LOC_synset_mapping.txt"
_SEQUENTIAL_FILES = (  # whose sizes show whether the data has changed
    *OFFICIAL_ARCHIVES.values(),
    BOXES_FILE,
    _KAGGLE_SYNSETS,
    *_KAGGLE_SOLUTIONS.values(),
)
_NO_BOX = (np.nan,) * 4


class _SynsetImage(NamedTuple):
    """An image as it is distributed, with its synset."""

    name: str
    data: bytes | str  # for a bad image, what is wrong
    synset: str
    box: Box | None


_Boxes = dict[str, Box]  # by the name of an image's file without suffix
_Read = Callable[[ReadLimits], tuple[bytes, Box | None]]  # raises BadImage
_Entry = tuple[str, str, _Read]  # name, synset, function that reads it


@dataclass(frozen=True, kw_only=True)
class _SequentialFormat:
    """A format that can only be read sequentially; it must be converted for training."""

    classes: Callable[[Path], tuple[str, ...]]  # the synsets in the order of labels
    entries: Callable[[Path, str], Iterator[_Entry]]  # from (root, split), in a fixed order
    images: Callable[[Path, str], Iterable[str]] = lambda *_: ()  # files of one image each

    def count(self, root: Path, split: str) -> int:
        """The number of images in a split; none is read."""
        return sum(1 for _ in self.entries(root, split))

    def iterate(
        self, root: Path, split: str, *, start: int = 0, limits: ReadLimits = DEFAULT_LIMITS
    ) -> Iterator[_SynsetImage]:
        """The images from number `start` on."""
        for name, synset, read in islice(self.entries(root, split), start, None):
            try:
                data, box = read(limits)
                yield _SynsetImage(name, data, synset, box)
            except BadImage as bad:
                yield _SynsetImage(name, str(bad), synset, None)

    def list_files(self, root: Path, split: str) -> Iterator[str]:
        """All files that a split is made from, some of which need not be there."""
        yield from _SEQUENTIAL_FILES
        yield from self.images(root, split)

    def fingerprint(self, root: Path, split: str, classes: tuple[str, ...]) -> dict[str, Any]:
        """Counts, and a hash over the classes and the sizes of files."""
        digest = hashlib.sha256("\n".join(classes).encode())
        for path in (root / file for file in _SEQUENTIAL_FILES):
            if path.is_file():
                digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        images = self.count(root, split)
        return {"images": images, "classes": len(classes), "sha256": digest.hexdigest()}


# --- as folders ---


def has_imagenet_folders(root: Path) -> bool:
    """Whether a folder has splits of synset folders, or a split and the table of boxes."""
    found = find_split_folders(root)
    folder = found.train or found.valid
    if found.flat or folder is None or find_annotations(found.valid):
        return False
    names = list_folders(folder)
    synsets = sum(1 for name in names if _SYNSET.fullmatch(name))
    return (root / BOXES_FILE).is_file() or synsets * 2 > len(names)


def open_imagenet(root: Path, split: str, layout: LayoutOptions = DEFAULT_LAYOUT) -> FolderSource:
    """One split of ImageNet in folders, with bounding boxes if their table exists."""
    tables = [root / BOXES_FILE] if (root / BOXES_FILE).is_file() else []
    add_boxes = partial(_add_boxes, root)
    return open_folder(root, split, layout, form="imagenet", tables=tables, complete=add_boxes)


def _add_boxes(root: Path, index: Index) -> Index:
    """The index with the boxes of the images in the table; unchanged without a table."""
    known = _read_boxes(root)
    if known is None:
        return index
    boxes = np.full((len(index), 4), np.nan, np.float32)
    for number in range(len(index)):
        boxes[number] = known.get(_file_stem(index.name(number)), _NO_BOX)
    return replace(index, boxes=boxes)


def _read_boxes(root: Path) -> _Boxes | None:
    """The box that encloses all of an image, by file name without suffix; None without table."""
    path = root / BOXES_FILE
    if not path.is_file():
        return None
    boxes: dict[str, list[Box]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.reader(file), 1):
            if not row or (number == 1 and not _are_numbers(row[1:])):  # a header line
                continue
            if len(row) != 5 or not _are_numbers(row[1:]):
                raise DataError(
                    f"{path}, line {number}: expected a file and four numbers, got "
                    f"{','.join(row)[:60]!r}; fix the line, or remove the file to do without boxes"
                )
            boxes.setdefault(_file_stem(row[0]), []).append(_order_corners(row[1:]))
    joined = {name: _clip(enclosing_box(found)) for name, found in boxes.items()}
    return {name: box for name, box in joined.items() if box}


def _file_stem(name: str) -> str:
    """The last part of a path without its suffixes."""
    return name.rpartition("/")[2].partition(".")[0]


def _order_corners(words: Sequence[str]) -> Box:
    """The box of two corners in any order."""
    x1, y1, x2, y2 = map(float, words)
    return min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)


def _clip(box: Box) -> Box | None:
    """The part of the box inside the image; None if it is empty."""
    left, top, right, bottom = (min(max(edge, 0.0), 1.0) for edge in box)
    return (left, top, right, bottom) if left < right and top < bottom else None


def _are_numbers(words: list[str]) -> bool:
    try:
        return bool(np.isfinite([float(word) for word in words]).all())
    except ValueError:
        return False


# --- the official archives ---


def has_official_archives(root: Path) -> bool:
    """Whether one of the official archives is in a folder."""
    return any((root / name).is_file() for name in OFFICIAL_ARCHIVES.values())


def _read_official_classes(root: Path) -> tuple[str, ...]:
    """The synsets of the training archive, else of the validation labels, sorted."""
    path = root / OFFICIAL_ARCHIVES["train"]
    if not path.is_file():
        return tuple(sorted(set(read_validation_synsets(root))))
    with _open_archive(path) as outer:
        return tuple(_file_stem(member.name) for member in _list_files(outer, path))


def _list_official(root: Path, split: str) -> Iterator[_Entry]:
    """Training images by synset, validation images by name.

    Both with the boxes of imagenet_2012_bounding_boxes.csv if that is next to the archives.
    """
    path, boxes = root / OFFICIAL_ARCHIVES[split], _read_boxes(root) or {}
    if not path.is_file():
        raise DataError(f"{path}: not found; put ImageNet's original archive there")
    with _open_archive(path) as archive:
        yield from (_list_train if split == "train" else _list_valid)(archive, path, boxes)


def _list_train(outer: tarfile.TarFile, path: Path, boxes: _Boxes) -> Iterator[_Entry]:
    for member in _list_files(outer, path):
        synset, where = _file_stem(member.name), Path(f"{path}:{member.name}")
        with _open_archive(where, outer.extractfile(member)) as inner:
            for image in _list_files(inner, where):
                yield image.name, synset, partial(_read_member, inner, image, where, boxes)


def _list_valid(archive: tarfile.TarFile, path: Path, boxes: _Boxes) -> Iterator[_Entry]:
    images, synsets = _list_files(archive, path), read_validation_synsets(path.parent)
    if len(images) != len(synsets):
        raise DataError(
            f"{path}: has {len(images):,} images, but the development kit lists {len(synsets):,}; "
            "download both again"
        )
    for image, synset in zip(images, synsets, strict=True):
        name = image.name.rpartition("/")[2]
        yield name, synset, partial(_read_member, archive, image, path, boxes)


@contextmanager
def _open_archive(path: Path, stream: IO[bytes] | None = None) -> Iterator[tarfile.TarFile]:
    """Context with an archive, in a file or in a stream; its errors become DataError."""
    try:
        with tarfile.open(path, "r:", fileobj=stream) as archive:
            yield archive
    except (OSError, tarfile.TarError) as cause:
        raise DataError(f"{path}: cannot be read ({cause}); download it again") from None


def _list_files(archive: tarfile.TarFile, path: Path) -> list[tarfile.TarInfo]:
    """The files of an archive by name; DataError for anything but files and folders."""
    members = sorted(archive.getmembers(), key=lambda member: member.name)
    for member in members:
        if not (member.isfile() or member.isdir()):
            raise DataError(
                f"{path}: {member.name} is a link or a device; download the archive again"
            )
    return [member for member in members if member.isfile()]


def _read_member(
    archive: tarfile.TarFile,
    member: tarfile.TarInfo,
    path: Path,
    boxes: _Boxes,
    limits: ReadLimits,
) -> tuple[bytes, Box | None]:
    """The bytes of an image, and its box."""
    limits.refuse_too_large(member.size, member.name)
    file = archive.extractfile(member)
    data = file.read() if file else b""
    if len(data) != member.size:
        raise DataError(f"{path}: ends in the middle of {member.name}; download it again")
    return data, boxes.get(_file_stem(member.name))


# --- Kaggle's tree ---


class _Solution(NamedTuple):
    """Kaggle's facts about an image: its class, and the box enclosing all boxes, in pixels."""

    synset: str
    box: Box


def has_kaggle_folder(root: Path) -> bool:
    """Whether Kaggle's tree was unpacked here."""
    return (root / _KAGGLE_IMAGES).is_dir()


def find_kaggle_folder(root: Path, split: str) -> Path:
    """The folder of a split's images."""
    return root / _KAGGLE_IMAGES / {"train": "train", "valid": "val"}[split]


def _read_kaggle_classes(root: Path) -> tuple[str, ...]:
    """The synsets from the mapping file, else from the training folders, sorted."""
    mapping = root / _KAGGLE_SYNSETS
    if mapping.is_file():
        lines = mapping.read_text(encoding="utf-8").splitlines()
        return tuple(sorted(line.split()[0] for line in lines if line.strip()))
    return tuple(_list_names(find_kaggle_folder(root, "train")))


def _read_solutions(root: Path, split: str) -> dict[str, _Solution]:
    """The rows of Kaggle's table by image; empty without a table."""
    path = root / _KAGGLE_SOLUTIONS[split]
    if not path.is_file():
        return {}
    solutions = {}
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.reader(file), 1):
            words = row[-1].split() if row else []
            if number == 1 and len(words) == 1:  # a header line
                continue
            corners = [words[start + 1 : start + 5] for start in range(0, len(words), 5)]
            if len(row) != 2 or not words or len(words) % 5 or not all(map(_are_numbers, corners)):
                raise DataError(
                    f"{path}, line {number}: expected an image, then a synset and four numbers for "
                    "each box; download the table again"
                )
            solutions[row[0]] = _Solution(words[0], enclosing_box(map(_order_corners, corners)))
    return solutions


def _read_kaggle_image(
    file: Path, solution: _Solution | None, limits: ReadLimits
) -> tuple[bytes, Box | None]:
    """The bytes of an image, and its box as shares of its size, or None."""
    data = read_image_file(file, str(file), limits)
    height, width = read_image_header(data).shape if solution else (0, 0)
    if not (solution and width and height):
        return data, None
    left, top, right, bottom = solution.box
    return data, _clip((left / width, top / height, right / width, bottom / height))


def _list_kaggle(root: Path, split: str) -> Iterator[_Entry]:
    """The images of a split; the class comes from the folder, or for a flat folder from a table."""
    solutions, folder = _read_solutions(root, split), find_kaggle_folder(root, split)
    for name in _list_names(folder):
        stem, files = name.partition(".")[0], [folder / name]
        if (folder / name).is_dir():
            synset, files = name, [folder / name / file for file in _list_names(folder / name)]
        elif stem in solutions:
            synset = solutions[stem].synset
        else:
            table = root / _KAGGLE_SOLUTIONS[split]
            raise DataError(
                f"{folder / name}: {table.name} has no row for it; download {table} again"
            )
        for file in files:
            yield file.name, synset, partial(_read_kaggle_image, file, solutions.get(file.stem))


def _list_kaggle_files(root: Path, split: str) -> Iterator[str]:
    """The images of a split, by their path from the root."""
    folder = find_kaggle_folder(root, split)
    for name in _list_names(folder):
        place = folder / name
        files = [place / file for file in _list_names(place)] if place.is_dir() else [place]
        yield from (file.relative_to(root).as_posix() for file in files)


def _list_names(folder: Path) -> list[str]:
    with convert_read_errors(folder, "unpack it again"):
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))


SEQUENTIAL_FORMATS = {
    "imagenet-official": _SequentialFormat(classes=_read_official_classes, entries=_list_official),
    "imagenet-kaggle": _SequentialFormat(
        classes=_read_kaggle_classes, entries=_list_kaggle, images=_list_kaggle_files
    ),
}
