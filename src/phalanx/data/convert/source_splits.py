"""The splits of any dataset in a folder, read image by image, as encoded there, in index order.

Sources are opened by every process that reads them. ImageNet as it is handed out can only be read
from its beginning: one process reads it and passes the images on.
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
from phalanx.data.formats.detect import MAX_DEPTH, detect_datasets
from phalanx.data.formats.folder import SPLIT_NAMES
from phalanx.data.formats.image_file import DEFAULT_LIMITS, ReadLimits
from phalanx.data.formats.imagenet import SEQUENTIAL_FORMATS
from phalanx.data.formats.index import IndexedSource
from phalanx.data.formats.sources import DATA_FORMATS, Source, set_limits
from phalanx.errors import DataError
from phalanx.plan.machine import count_cores

SPLITS = ("train", "valid")
TASK_IMAGES = 16
Progress = Callable[[str, int, int], object]  # is told the split, images done, and of how many
_Numbers = Sequence[int] | NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SourceSplit:
    """One split of a dataset: where it lies and what is known of it before an image is read."""

    name: str  # train or valid
    data: str
    folder: Path
    limits: ReadLimits  # an image above them is bad
    images: int
    classes: tuple[str, ...]
    fingerprint: dict[str, Any]
    labels: NDArray[np.int64] | None  # None: known image by image

    @property
    def source(self) -> Source:
        """The images, of a dataset that can be read in any order."""
        return open_once(self.key)

    @property
    def key(self) -> "SplitKey":
        """What the source is opened by, in any process."""
        return SplitKey(self.data, self.folder, self.name, self.limits)

    def count_classes(self, bad: Collection[int] = ()) -> NDArray[np.int64]:
        """The images of each class, without bad ones and those of no known class."""
        labels = np.delete(self.source.labels, list(bad))
        known = labels[(labels >= 0) & (labels < len(self.classes))]
        return np.bincount(known, minlength=len(self.classes))


class SplitKey(NamedTuple):
    """All that it takes to open a split."""

    data: str
    folder: Path
    split: str
    limits: ReadLimits


class ImageTask(NamedTuple):
    """A few images of a split for one process, by number or already read."""

    split: SplitKey
    numbers: Sequence[int]
    samples: Sequence[Sample | str] | None  # what is wrong, in place of a bad one


def find_source_splits(root: Path, limits: ReadLimits = DEFAULT_LIMITS) -> list[SourceSplit]:
    """The splits of the one dataset in a folder; raises DataError for none or several."""
    open_once.cache_clear()  # the files may have changed since they were last opened here
    found = detect_datasets(root)
    if not found:
        raise DataError(
            f"{root}: nothing that can be read lies here or up to {MAX_DEPTH} folders below; "
            "`phalanx data list` says what can"
        )
    if len(found) > 1:
        lines = [f"  {one.folder}: {one.data} ({one.files})" for one in found]
        first = f"{root}: several datasets lie here; give the folder of one alone:"
        raise DataError("\n".join([first, *lines]))
    data, folder = found[0].data, found[0].folder
    names = [name for name in SPLITS if DATA_FORMATS[data].has_split(folder, name)]
    return [_describe_split(SplitKey(data, folder, name, limits)) for name in names]


def _describe_split(key: SplitKey) -> SourceSplit:
    """What is known of a split once its index is open, or its headers are read."""
    data, folder, name, limits = key
    labels = None
    if data in SEQUENTIAL_FORMATS:
        classes = SEQUENTIAL_FORMATS[data].classes(folder)
        fingerprint = SEQUENTIAL_FORMATS[data].fingerprint(folder, name, classes)
    else:
        source = open_once(key)
        classes, fingerprint, labels = source.classes, source.fingerprint(), source.labels
    return SourceSplit(
        name=name,
        data=data,
        folder=folder,
        limits=limits,
        images=fingerprint["images"],
        classes=classes,
        fingerprint=fingerprint,
        labels=labels,
    )


@lru_cache(maxsize=4)
def open_once(key: SplitKey) -> Source:
    """The source of a split, opened once by each process."""
    opener = DATA_FORMATS[key.data].open
    if opener is None:
        raise ValueError(f"{key.data} is handed out, not opened")
    return set_limits(opener(key.folder, key.split), key.limits)


def choose_workers(splits: Sequence[SourceSplit], workers: int | None) -> int:
    """Processes to use: as asked, else one a core, and no more than there are tasks."""
    images = sum(split.images for split in splits)
    return min(count_cores() if workers is None else workers, images // TASK_IMAGES)


def make_tasks(split: SourceSplit, numbers: _Numbers) -> Iterator[ImageTask]:
    """The images of these ascending numbers, a few at a time."""
    in_order = _read_sequential(split, numbers) if split.data in SEQUENTIAL_FORMATS else None
    for start in range(0, len(numbers), TASK_IMAGES):
        some = [int(number) for number in numbers[start : start + TASK_IMAGES]]
        samples = None if in_order is None else list(islice(in_order, len(some)))
        if samples is not None:
            some = some[
                : len(samples)
            ]  # fewer where the source lost images since they were counted
        yield ImageTask(split.key, some, samples)


def _read_sequential(split: SourceSplit, numbers: _Numbers) -> Iterator[Sample | str]:
    """The images of these ascending numbers, as the source is read on from the first of them.

    In place of a bad one comes what is wrong with it.
    """
    labels = {name: label for label, name in enumerate(split.classes)}
    wanted = map(int, numbers)
    first = upcoming = next(wanted)
    sequential = SEQUENTIAL_FORMATS[split.data]
    images = sequential.iterate(split.folder, split.name, start=first, limits=split.limits)
    for number, image in enumerate(images, first):
        if number != upcoming:
            continue
        if image.synset not in labels:
            raise DataError(f"{split.folder}: {image.name} is of {image.synset}, no known class")
        if isinstance(image.data, str):
            yield image.data
        else:
            label = labels[image.synset]
            yield Sample(name=image.name, data=image.data, label=label, box=image.box)
        upcoming = next(wanted, -1)


def read_sample(source: Source, number: int) -> Sample:
    """An image with all that is known of it; raises BadImage."""
    encoded = getattr(source, "encoded", None)
    box = getattr(source, "box", None)
    return Sample(
        name=find_portable_name(source, number),
        data=encoded(number) if encoded else encode_png(source.read(number)),
        label=int(source.labels[number]),
        box=box(number) if box else None,
    )


def find_portable_name(source: Source, number: int) -> str:
    """The name an image has in any format: without the shard, or the split's folder.

    It is CLASS/FILE for a folder, and for files of many images what they call each of them.
    """
    if isinstance(source, IndexedSource) and source.index.names is not None:
        return source.index.names[number]
    name = source.name(number)
    first, _, rest = name.partition("/")
    split_names = [word for words in SPLIT_NAMES.values() for word in words]
    return rest if rest and first in split_names else name
