"""The splits of any dataset in a folder, read image by image, still encoded, in index order.

Each process that reads images opens the source itself. ImageNet as distributed can only be read
sequentially: one process reads it and passes the images on.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.data.convert.sample import Sample
from phalanx.data.formats.decode import encode_png
from phalanx.data.formats.detect import detect_only_dataset
from phalanx.data.formats.image_file import DEFAULT_LIMITS, ReadLimits
from phalanx.data.formats.imagenet import SEQUENTIAL_FORMATS
from phalanx.data.formats.index import IndexedSource
from phalanx.data.formats.sources import (
    DATA_FORMATS,
    Source,
    ValSplit,
    find_portable_name,
    open_format,
    set_limits,
)
from phalanx.data.layouts.listing import DEFAULT_LAYOUT, LayoutOptions
from phalanx.data.layouts.snapshot import hash_files
from phalanx.errors import ConfigError, DataError
from phalanx.plan.machine import count_cores

SPLITS = ("train", "valid")
TASK_IMAGES = 16
OnProgress = Callable[[str, int, int], object]  # called with split, images done, and total
_Numbers = Sequence[int] | NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SourceSplit:
    """One split of a dataset: where it is, and what is known before any image is read."""

    name: str  # train or valid
    data: str
    folder: Path
    source_options: "SourceOptions"
    images: int
    classes: tuple[str, ...]
    fingerprint: dict[str, Any]
    file_times: str  # a hash of the files' names, sizes and times; empty: the fingerprint has them
    labels: NDArray[np.int64] | None  # None: known only when images are read

    @property
    def source(self) -> Source:
        """The images, for a dataset with random access."""
        return open_once(self.key)

    @property
    def key(self) -> "SplitKey":
        """The key that opens the source in any process."""
        return SplitKey(self.data, self.folder, self.name, self.source_options)

    def count_classes(self, bad: Collection[int]) -> NDArray[np.int64]:
        """The number of images of each class, without bad ones and those of unknown classes."""
        labels = np.delete(self.source.labels, list(bad))
        known = labels[(labels >= 0) & (labels < len(self.classes))]
        return np.bincount(known, minlength=len(self.classes))


class SourceOptions(NamedTuple):
    """How a dataset is read: limits, layout, and a validation split to hold out."""

    limits: ReadLimits = DEFAULT_LIMITS  # an image that exceeds them is bad
    layout: LayoutOptions = DEFAULT_LAYOUT
    val_split: ValSplit | None = None


DEFAULT_SOURCE_OPTIONS = SourceOptions()


class SplitKey(NamedTuple):
    """Everything needed to open a split."""

    data: str
    folder: Path
    split: str
    source_options: SourceOptions


class ImageTask(NamedTuple):
    """A few images of a split for one process, by number or already read."""

    split: SplitKey
    numbers: Sequence[int]
    samples: Sequence[Sample | str] | None  # for a bad image, what is wrong


def find_source_splits(
    root: Path, source_options: SourceOptions = DEFAULT_SOURCE_OPTIONS
) -> list[SourceSplit]:
    """The splits of the only dataset in a folder; raises DataError for none or several."""
    open_once.cache_clear()  # the files may have changed since they were last opened here
    found = detect_only_dataset(root, source_options.layout)
    data, folder, val_split = found.data, found.folder, source_options.val_split
    if val_split is not None and data in SEQUENTIAL_FORMATS:
        raise ConfigError(
            f"--val-split: {data} can only be read in its own order; build it without the option, "
            "then train on the result with --val-split"
        )
    names = [
        name
        for name in SPLITS
        if val_split is not None
        or DATA_FORMATS[data].has_split(folder, name, source_options.layout)
    ]
    return [_describe_split(SplitKey(data, folder, name, source_options)) for name in names]


def _describe_split(key: SplitKey) -> SourceSplit:
    """What is known about a split from its index or its headers."""
    data, folder, name, source_options = key
    labels, file_times = None, ""
    if data in SEQUENTIAL_FORMATS:
        sequential = SEQUENTIAL_FORMATS[data]
        classes = sequential.classes(folder)
        fingerprint = sequential.fingerprint(folder, name, classes)
        file_times = hash_files(folder, sequential.list_files(folder, name))
    else:
        source = open_once(key)
        classes, fingerprint, labels = source.classes, source.fingerprint(), source.labels
        if isinstance(source, IndexedSource):
            files = source.index.files
            file_times = hash_files(source.root, (files[n] for n in range(len(files))))
    return SourceSplit(
        name=name,
        data=data,
        folder=folder,
        source_options=source_options,
        images=fingerprint["images"],
        classes=classes,
        fingerprint=fingerprint,
        file_times=file_times,
        labels=labels,
    )


@lru_cache(maxsize=4)
def open_once(key: SplitKey) -> Source:
    """The source of a split, opened once by each process."""
    layout, val_split = key.source_options.layout, key.source_options.val_split
    source = open_format(key.data, key.folder, key.split, layout=layout, val_split=val_split)
    return set_limits(source, key.source_options.limits)


def choose_workers(splits: Sequence[SourceSplit], workers: int | None) -> int:
    """The number of processes: as given, else one per core, but not more than tasks."""
    images = sum(split.images for split in splits)
    return min(count_cores() if workers is None else workers, images // TASK_IMAGES)


def make_tasks(split: SourceSplit, numbers: _Numbers) -> Iterator[ImageTask]:
    """The images of these ascending numbers, a few at a time."""
    in_order = _read_sequential(split, numbers) if split.data in SEQUENTIAL_FORMATS else None
    for start in range(0, len(numbers), TASK_IMAGES):
        some = [int(number) for number in numbers[start : start + TASK_IMAGES]]
        samples = None if in_order is None else list(islice(in_order, len(some)))
        if samples is not None:  # fewer if the source has lost images since they were counted
            some = some[: len(samples)]
        yield ImageTask(split.key, some, samples)


def _read_sequential(split: SourceSplit, numbers: _Numbers) -> Iterator[Sample | str]:
    """The images of these ascending numbers, read sequentially from the first of them.

    For a bad image, what is wrong with it.
    """
    labels = {name: label for label, name in enumerate(split.classes)}
    wanted = map(int, numbers)
    first = upcoming = next(wanted)
    sequential = SEQUENTIAL_FORMATS[split.data]
    images = sequential.iterate(
        split.folder, split.name, start=first, limits=split.source_options.limits
    )
    for number, image in enumerate(images, first):
        if number != upcoming:
            continue
        if image.synset not in labels:
            raise DataError(
                f"{split.folder}: {image.name} is of class {image.synset}, which is not "
                "among its classes; download the data again"
            )
        if isinstance(image.data, str):
            yield image.data
        else:
            label = labels[image.synset]
            yield Sample(name=image.name, data=image.data, label=label, box=image.box)
        upcoming = next(wanted, -1)


def read_sample(source: Source, number: int) -> Sample:
    """An image with its name, label and box; raises BadImage."""
    read_encoded = getattr(source, "read_encoded", None)
    box = getattr(source, "box", None)
    return Sample(
        name=find_portable_name(source, number),
        data=read_encoded(number) if read_encoded else encode_png(source.read(number)),
        label=int(source.labels[number]),
        box=box(number) if box else None,
    )
