"""Any data that lies in a folder, gone through image by image, as encoded there, in index order.

Sources are opened by every process that reads them. ImageNet as it is handed out can only be gone
through from its beginning: one process reads it and passes the images on.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.data.convert.sample import Sample
from phalanx.data.formats import packed, parquet, tfrecord, webdataset
from phalanx.data.formats.decode import BadImage, encode_png
from phalanx.data.formats.detect import MAX_DEPTH, detect_datasets
from phalanx.data.formats.folder import SPLIT_NAMES, find_split
from phalanx.data.formats.imagenet import (
    BOXES_FILE,
    KAGGLE_IMAGES,
    KAGGLE_SOLUTIONS,
    KAGGLE_SPLITS,
    KAGGLE_SYNSETS,
    OFFICIAL_ARCHIVES,
    SEQUENTIAL_FORMATS,
)
from phalanx.data.formats.index import IndexedSource
from phalanx.data.formats.sources import DATA_FORMATS, Source
from phalanx.errors import DataError

SPLITS = ("train", "valid")
TASK_IMAGES = 16
_HANDED_FILES = (
    *OFFICIAL_ARCHIVES.values(),
    BOXES_FILE,
    KAGGLE_SYNSETS,
    *KAGGLE_SOLUTIONS.values(),
)


def _has_folder(root: Path, split: str) -> bool:
    """Whether a split has a folder; class folders without one are there to be scored."""
    alone = split == "valid" and find_split(root, "train") is None
    return alone or find_split(root, split) is not None


_HAS_SPLIT: dict[str, Callable[[Path, str], bool]] = {  # forms that may hold one split only
    "folder": _has_folder,
    "imagenet": _has_folder,
    "tfrecord": lambda root, split: bool(tfrecord.SHARD_FILES.find(root, split)),
    "tar": lambda root, split: bool(webdataset.SHARD_FILES.find(root, split)),
    "parquet": lambda root, split: bool(parquet.find_files(root, split)),
    "packed": lambda root, split: packed.packed_path(root, split).is_file(),
    "imagenet-official": lambda root, split: (root / OFFICIAL_ARCHIVES[split]).is_file(),
    "imagenet-kaggle": lambda root, split: (root / KAGGLE_IMAGES / KAGGLE_SPLITS[split]).is_dir(),
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """One split of a set: where it lies and what is known of it before an image is read."""

    data: str
    folder: Path
    split: str
    images: int
    classes: tuple[str, ...]
    fingerprint: dict[str, Any]
    labels: NDArray[np.int64] | None  # None: told image by image

    @property
    def source(self) -> Source:
        """The images, of a set that can be read in any order."""
        return open_once(self.data, self.folder, self.split)


class Task(NamedTuple):
    """A few images of a split, by number or already read."""

    data: str
    folder: Path
    split: str
    numbers: Sequence[int]
    handed: Sequence[Sample] | None


def find_parts(root: Path) -> list[Part]:
    """The splits of the one set that lies in a folder; raises DataError for none or several."""
    open_once.cache_clear()  # the files may have changed since they were last opened here
    found = detect_datasets(root)
    if not found:
        raise DataError(
            f"{root}: nothing that can be read lies here or up to {MAX_DEPTH} folders below; "
            "`phalanx data list` says what can"
        )
    if len(found) > 1:
        lines = [f"  {one.folder}: {one.data} ({one.files})" for one in found]
        told = [f"{root}: several datasets lie here; give the folder of one alone:", *lines]
        raise DataError("\n".join(told))
    data, folder = found[0].data, found[0].folder
    has = _HAS_SPLIT.get(data, lambda _root, _split: True)
    return [_describe_part(data, folder, split) for split in SPLITS if has(folder, split)]


def _describe_part(data: str, folder: Path, split: str) -> Part:
    """What is known of a split once its index is open."""
    if data in SEQUENTIAL_FORMATS:
        return _describe_handed(data, folder, split)
    source = open_once(data, folder, split)
    return Part(
        data=data,
        folder=folder,
        split=split,
        images=len(source),
        classes=source.classes,
        fingerprint=source.fingerprint(),
        labels=source.labels,
    )


def _describe_handed(data: str, folder: Path, split: str) -> Part:
    handout = SEQUENTIAL_FORMATS[data]
    count, classes = handout.count(folder, split), handout.classes(folder)
    digest = hashlib.sha256("\n".join(classes).encode())
    for path in (folder / name for name in _HANDED_FILES):
        if path.is_file():
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    facts = {"images": count, "classes": len(classes), "sha256": digest.hexdigest()}
    return Part(
        data=data,
        folder=folder,
        split=split,
        images=count,
        classes=classes,
        fingerprint=facts,
        labels=None,
    )


@lru_cache(maxsize=4)
def open_once(data: str, folder: Path, split: str) -> Source:
    """The source of a split, opened once by each process."""
    opener = DATA_FORMATS[data].open
    if opener is None:
        raise ValueError(f"{data} is handed out, not opened")
    return opener(folder, split)


def make_tasks(part: Part, numbers: Sequence[int]) -> Iterator[Task]:
    """The images of these ascending numbers, a few at a time."""
    handed = _read_handed(part, numbers) if part.data in SEQUENTIAL_FORMATS else None
    for start in range(0, len(numbers), TASK_IMAGES):
        some = [int(number) for number in numbers[start : start + TASK_IMAGES]]
        read = None if handed is None else [next(handed) for _ in some]
        yield Task(part.data, part.folder, part.split, some, read)


def _read_handed(part: Part, numbers: Sequence[int]) -> Iterator[Sample]:
    label_of = {name: label for label, name in enumerate(part.classes)}
    first = int(numbers[0]) if len(numbers) else 0
    wanted = iter(numbers)
    next_one = next(wanted, None)
    images = SEQUENTIAL_FORMATS[part.data].iterate(part.folder, part.split, start=first)
    for number, image in enumerate(images, first):
        if number != next_one:
            continue
        if image.synset not in label_of:
            raise DataError(f"{part.folder}: {image.name} is of {image.synset}, no known class")
        yield Sample(name=image.name, data=image.data, label=label_of[image.synset], box=image.box)
        next_one = next(wanted, None)


def read_samples(task: Task) -> Iterator[tuple[int, Sample | BadImage]]:
    """Each image of a task with its number; one that cannot be read is told in its place."""
    if task.handed is not None:
        yield from zip(task.numbers, task.handed, strict=True)
        return
    source = open_once(task.data, task.folder, task.split)
    for number in task.numbers:
        try:
            yield number, read_sample(source, number)
        except BadImage as bad:
            yield number, bad


def read_sample(source: Source, number: int) -> Sample:
    """An image with all that is known of it; raises BadImage."""
    encoded = getattr(source, "encoded", None)
    box = getattr(source, "box", None)
    return Sample(
        name=own_name(source, number),
        data=encoded(number) if encoded else encode_png(source.read(number)),
        label=int(source.labels[number]),
        box=box(number) if box else None,
    )


def own_name(source: Source, number: int) -> str:
    """What an image is called whatever form it lies in: without the shard, or the split's folder.

    It is CLASS/FILE for a folder, and for files of many images what they call each of them.
    """
    if isinstance(source, IndexedSource) and source.index.names is not None:
        return source.index.names[number]
    name = source.name(number)
    first, _, rest = name.partition("/")
    splits = [word for words in SPLIT_NAMES.values() for word in words]
    return rest if rest and first in splits else name
