"""Where images come from: the formats that data can lie in, and what opens each."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.catalog.datasets import DATASETS
from phalanx.data.formats import cifar, folder, idx, imagenet, packed, parquet, tfrecord, webdataset
from phalanx.data.formats.arrays import GeneratedSpec, open_embedded, open_generated
from phalanx.data.formats.image_file import ReadLimits
from phalanx.data.formats.index import IndexedSource
from phalanx.errors import ConfigError, DataError, suggest

Split = Literal["train", "valid"]


class Source(Protocol):
    """Random access to the images of one split."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """The class of each image."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The name of each class."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> NDArray[np.uint8]:
        """The image as RGB, [height, width, 3]; raises BadImage."""

    def name(self, index: int) -> str:
        """What a person can find the image by."""

    def fingerprint(self) -> dict[str, Any]:
        """Counts and a hash that change when the data does."""


@dataclass(frozen=True, kw_only=True)
class _DataFormat:
    """A format that data can lie in."""

    files: str  # what lies in the folder
    how_to_get: str
    is_in: Callable[[Path], bool]  # whether it lies in a folder
    has_split: Callable[[Path, str], object] = lambda _root, _split: True  # of one that is there
    open: Callable[[Path, str], Source] | None = None  # None: to be built into another one first


DATA_FORMATS: dict[str, _DataFormat] = {
    "folder": _DataFormat(
        files="train/CLASS/ and val/CLASS/ with image files",
        how_to_get="your own images; phalanx data build --to folder",
        is_in=folder.has_class_folders,
        has_split=folder.has_split_folder,
        open=folder.open_folder,
    ),
    "imagenet": _DataFormat(
        files="train/SYNSET/ and val/SYNSET/, with imagenet_2012_bounding_boxes.csv or without",
        how_to_get="image-net.org, or phalanx data build --to folder",
        is_in=imagenet.has_imagenet_folders,
        has_split=folder.has_split_folder,
        open=imagenet.open_imagenet,
    ),
    "imagenet-official": _DataFormat(
        files="ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and the development kit",
        how_to_get="image-net.org; convert with phalanx data build",
        is_in=imagenet.has_official_archives,
        has_split=lambda root, split: (root / imagenet.OFFICIAL_ARCHIVES[split]).is_file(),
    ),
    "imagenet-kaggle": _DataFormat(
        files="ILSVRC/Data/CLS-LOC/ with LOC_*_solution.csv beside it",
        how_to_get="kaggle.com; convert with phalanx data build",
        is_in=imagenet.has_kaggle_folder,
        has_split=lambda root, split: imagenet.find_kaggle_folder(root, split).is_dir(),
    ),
    "tfrecord": _DataFormat(
        files="train-00000-of-01024 and validation-00000-of-00128",
        how_to_get="phalanx data build --to tfrecord",
        is_in=tfrecord.SHARD_FILES.exist_in,
        has_split=tfrecord.SHARD_FILES.find,
        open=tfrecord.open_tfrecord,
    ),
    "tar": _DataFormat(
        files="train-000000.tar and validation-000000.tar, as WebDataset has them",
        how_to_get="phalanx data build --to tar",
        is_in=webdataset.SHARD_FILES.exist_in,
        has_split=webdataset.SHARD_FILES.find,
        open=webdataset.open_tar,
    ),
    "parquet": _DataFormat(
        files="train-*.parquet with a column of images, as Hugging Face publishes them",
        how_to_get="huggingface.co",
        is_in=parquet.has_parquet_files,
        has_split=parquet.find_files,
        open=parquet.open_parquet,
    ),
    "packed": _DataFormat(
        files="train.phx and valid.phx",
        how_to_get="phalanx data build --to packed",
        is_in=packed.has_packed_files,
        has_split=lambda root, split: packed.packed_path(root, split).is_file(),
        open=packed.open_packed,
    ),
    "cifar10": _DataFormat(
        files="data_batch_1.bin to 5 and test_batch.bin, or cifar-10-binary.tar.gz",
        how_to_get="phalanx data fetch cifar10",
        is_in=partial(cifar.has_cifar_files, data="cifar10"),
        open=partial(cifar.open_cifar, "cifar10"),
    ),
    "cifar100": _DataFormat(
        files="train.bin and test.bin, or cifar-100-binary.tar.gz",
        how_to_get="phalanx data fetch cifar100",
        is_in=partial(cifar.has_cifar_files, data="cifar100"),
        open=partial(cifar.open_cifar, "cifar100"),
    ),
    "mnist": _DataFormat(
        files="four idx files, plain or gzipped",
        how_to_get="phalanx data fetch mnist",
        is_in=lambda root: idx.identify_idx_files(root) == "mnist",
        open=partial(idx.open_idx, "mnist"),
    ),
    "fashion-mnist": _DataFormat(
        files="four idx files, plain or gzipped",
        how_to_get="phalanx data fetch fashion-mnist",
        is_in=lambda root: idx.identify_idx_files(root) == "fashion-mnist",
        open=partial(idx.open_idx, "fashion-mnist"),
    ),
}

_Opener = Callable[[str | None, Split, GeneratedSpec | None], Source]


def _build_folder_opener(open_format: Callable[[Path, str], Source]) -> _Opener:
    """The opener of a format that lies in --data-dir."""
    return lambda data_dir, split, _spec: open_format(_existing_folder(data_dir), split)


OPENERS: dict[str, _Opener] = {  # "synthetic" is made on the device and has nothing to open
    "embedded": lambda _dir, split, _spec: open_embedded(split),
    "generated": lambda _dir, _split, spec: open_generated(spec),
    **{name: _build_folder_opener(kind.open) for name, kind in DATA_FORMATS.items() if kind.open},
}


class ValSplit(NamedTuple):
    """How a folder without a validation split gets one."""

    share: float
    seed: int


def open_source(
    data: str,
    data_dir: str | None,
    split: Split,
    *,
    generated: GeneratedSpec | None = None,
    val_split: ValSplit | None = None,
    limits: ReadLimits | None = None,
) -> Source:
    """The images of one split of a dataset, of which those above the limits are bad."""
    if data not in OPENERS:
        raise ConfigError(f"--data: {data!r} has no images to read; {suggest(data, OPENERS)}")
    if not data_dir and DATASETS[data].needs_folder:
        raise DataError(
            f"--data {data} lies in a folder: give --data-dir DIR, or set DATA_DIR in the "
            "environment"
        )
    if val_split is not None:
        root, (share, seed) = _existing_folder(data_dir), val_split
        source: Source = folder.open_with_val_split(root, split, share=share, seed=seed)
    else:
        source = OPENERS[data](data_dir, split, generated)
    return set_limits(source, limits)


def set_limits(source: Source, limits: ReadLimits | None) -> Source:
    """The source with those limits; one whose images are in memory has no use for them."""
    if limits is not None and isinstance(source, IndexedSource):
        source.limits = limits
    return source


def _existing_folder(data_dir: str | None) -> Path:
    root = Path(data_dir or "").expanduser()
    refuse_no_folder(root, "give the dataset's folder with --data-dir or DATA_DIR")
    return root


def refuse_no_folder(root: Path, hint: str) -> None:
    """Raise DataError for a path that is no folder."""
    if not root.is_dir():
        what = "is a file, not a folder" if root.exists() else "no such folder"
        raise DataError(f"{root}: {what}; {hint}")
