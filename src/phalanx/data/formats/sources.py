"""The sources of images: all formats of datasets, and the function that opens each."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from phalanx.catalog.datasets import DATASETS
from phalanx.data.formats import cifar, folder, idx, imagenet, packed, parquet, tfrecord, webdataset
from phalanx.data.formats.arrays import GeneratedSpec, open_embedded, open_generated
from phalanx.data.formats.image_file import ReadLimits
from phalanx.data.formats.index import IndexedSource
from phalanx.data.layouts.image_files import strip_image_suffix
from phalanx.data.layouts.listing import DEFAULT_LAYOUT, LayoutOptions
from phalanx.data.layouts.split_folders import (
    TRAIN_NAMES,
    VALID_NAMES,
    find_split_folders,
    has_class_folders,
)
from phalanx.data.layouts.val_split import choose_valid_images
from phalanx.disk import expand_home
from phalanx.errors import ConfigError, DataError, suggest
from phalanx.units import parse_share

Split = Literal["train", "valid"]
FOLDER_FORMS = ("folder", "imagenet")  # to which layout options apply
_SHARE_STEPS = 10_000  # the first rule of --val-split read a bare 10 as 10 of so many


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
        """The name of the image, by which the user can find it."""

    def fingerprint(self) -> dict[str, Any]:
        """Counts and a hash that change if the data changes."""


@dataclass(frozen=True, kw_only=True)
class _DataFormat:
    """A format of datasets."""

    files: str  # a description of the files in the folder
    how_to_get: str
    is_in: Callable[[Path], bool]  # whether a folder contains it
    # whether a dataset in a folder has a split
    has_split: Callable[[Path, str, LayoutOptions], object] = lambda *_: True
    # None: it can only be converted, with `phalanx data build`
    open: Callable[[Path, str, LayoutOptions], Source] | None = None


_Result = TypeVar("_Result")


def _ignore_layout(
    function: Callable[[Path, str], _Result],
) -> Callable[[Path, str, LayoutOptions], _Result]:
    """The function with layout options that it ignores, for a format that has only one layout."""

    def call(root: Path, split: str, _layout: LayoutOptions = DEFAULT_LAYOUT) -> _Result:
        return function(root, split)

    return call


DATA_FORMATS: dict[str, _DataFormat] = {
    "folder": _DataFormat(
        files="images in class folders, with or without train/ and val/ above them",
        how_to_get="your own images; phalanx data build --to folder",
        is_in=has_class_folders,
        has_split=folder.has_split,
        open=folder.open_folder,
    ),
    "imagenet": _DataFormat(
        files="train/SYNSET/ and val/SYNSET/, with or without imagenet_2012_bounding_boxes.csv",
        how_to_get="image-net.org, or phalanx data build --to folder",
        is_in=imagenet.has_imagenet_folders,
        has_split=folder.has_split,
        open=imagenet.open_imagenet,
    ),
    "imagenet-official": _DataFormat(
        files="ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and the development kit",
        how_to_get="image-net.org; convert with phalanx data build",
        is_in=imagenet.has_official_archives,
        has_split=lambda root, split, _: (root / imagenet.OFFICIAL_ARCHIVES[split]).is_file(),
    ),
    "imagenet-kaggle": _DataFormat(
        files="ILSVRC/Data/CLS-LOC/ with LOC_*_solution.csv beside it",
        how_to_get="kaggle.com; convert with phalanx data build",
        is_in=imagenet.has_kaggle_folder,
        has_split=lambda root, split, _: imagenet.find_kaggle_folder(root, split).is_dir(),
    ),
    "tfrecord": _DataFormat(
        files="train-00000-of-01024 and validation-00000-of-00128",
        how_to_get="phalanx data build --to tfrecord",
        is_in=tfrecord.SHARD_FILES.exist_in,
        has_split=_ignore_layout(tfrecord.SHARD_FILES.find),
        open=_ignore_layout(tfrecord.open_tfrecord),
    ),
    "tar": _DataFormat(
        files="train-000000.tar and validation-000000.tar, as in WebDataset",
        how_to_get="phalanx data build --to tar",
        is_in=webdataset.SHARD_FILES.exist_in,
        has_split=_ignore_layout(webdataset.SHARD_FILES.find),
        open=_ignore_layout(webdataset.open_tar),
    ),
    "parquet": _DataFormat(
        files="train-*.parquet with a column of images, as Hugging Face publishes them",
        how_to_get="huggingface.co, or phalanx data build --to parquet",
        is_in=parquet.has_parquet_files,
        has_split=_ignore_layout(parquet.find_files),
        open=_ignore_layout(parquet.open_parquet),
    ),
    "packed": _DataFormat(
        files="train.phx and valid.phx",
        how_to_get="phalanx data build --to packed",
        is_in=packed.has_packed_files,
        has_split=lambda root, split, _: packed.packed_path(root, split).is_file(),
        open=_ignore_layout(packed.open_packed),
    ),
    "cifar10": _DataFormat(
        files="data_batch_1.bin to 5 and test_batch.bin, or cifar-10-binary.tar.gz",
        how_to_get="phalanx data fetch cifar10",
        is_in=partial(cifar.has_cifar_files, data="cifar10"),
        open=_ignore_layout(partial(cifar.open_cifar, "cifar10")),
    ),
    "cifar100": _DataFormat(
        files="train.bin and test.bin, or cifar-100-binary.tar.gz",
        how_to_get="phalanx data fetch cifar100",
        is_in=partial(cifar.has_cifar_files, data="cifar100"),
        open=_ignore_layout(partial(cifar.open_cifar, "cifar100")),
    ),
    "mnist": _DataFormat(
        files="four idx files, plain or gzipped",
        how_to_get="phalanx data fetch mnist",
        is_in=lambda root: idx.identify_idx_files(root) == "mnist",
        open=_ignore_layout(partial(idx.open_idx, "mnist")),
    ),
    "fashion-mnist": _DataFormat(
        files="four idx files, plain or gzipped",
        how_to_get="phalanx data fetch fashion-mnist",
        is_in=lambda root: idx.identify_idx_files(root) == "fashion-mnist",
        open=_ignore_layout(partial(idx.open_idx, "fashion-mnist")),
    ),
}

OPENERS: dict[str, Callable[[str | None, Split, GeneratedSpec | None], Source]] = {
    # the data that is not in DATA_FORMATS; "synthetic" is made on the device: nothing to open
    "embedded": lambda _dir, split, _spec: open_embedded(split),
    "generated": lambda _dir, _split, spec: open_generated(spec),
}


class ValSplit(NamedTuple):
    """How a validation split is held out from data that has none."""

    wanted: str  # "10%", "0.1" or "40"
    seed: int = 0  # used by older runs; today only the names decide


def open_source(
    data: str,
    data_dir: str | None,
    split: Split,
    *,
    generated: GeneratedSpec | None = None,
    val_split: ValSplit | None = None,
    layout: LayoutOptions = DEFAULT_LAYOUT,
    limits: ReadLimits | None = None,
) -> Source:
    """The images of one split of a dataset; those that exceed the limits are bad."""
    known = [*OPENERS, *(name for name, kind in DATA_FORMATS.items() if kind.open)]
    if data not in known:
        raise ConfigError(f"--data: {data!r} has no images to read; {suggest(data, known)}")
    if not data_dir and DATASETS[data].needs_folder:
        raise DataError(
            f"--data {data} is read from a folder: give --data-dir DIR, or set DATA_DIR in the "
            "environment"
        )
    if data in DATA_FORMATS:
        root = expand_home(data_dir or "")
        refuse_no_folder(root, "give the dataset's folder with --data-dir or DATA_DIR")
        source = open_format(data, root, split, layout=layout, val_split=val_split)
    elif val_split is not None:
        raise ConfigError(f"--val-split: {data} has validation images; leave the option out")
    else:
        source = OPENERS[data](data_dir, split, generated)
    return set_limits(source, limits)


def has_valid_split(data: str, data_dir: str | None, layout: LayoutOptions) -> bool:
    """Whether a dataset has validation images; one without a folder, or of a plugin, has both."""
    if data not in DATA_FORMATS or data_dir is None:
        return True
    return bool(DATA_FORMATS[data].has_split(Path(data_dir), "valid", layout))


def open_format(
    data: str,
    root: Path,
    split: str,
    *,
    layout: LayoutOptions = DEFAULT_LAYOUT,
    val_split: ValSplit | None = None,
) -> Source:
    """One split of the dataset in a folder, or one side of it as split by --val-split."""
    form = DATA_FORMATS[data]
    if form.open is None:
        raise ValueError(f"{data} must be converted, it cannot be opened")
    _refuse_layout(data, layout)
    if val_split is None:
        if data not in FOLDER_FORMS:  # these give a more detailed message
            _refuse_missing_split(data, root, split)
        return form.open(root, split, layout)
    if layout.rule == 1 and data in FOLDER_FORMS:
        share = parse_share(val_split.wanted, _SHARE_STEPS) / _SHARE_STEPS
        return folder.open_with_first_val_split(root, split, share=share, seed=val_split.seed)
    layout, scoring = replace(layout, scoring=False), layout.scoring
    if form.has_split(root, "valid", layout):
        if scoring:  # another folder than the run's, with a validation split of its own
            return form.open(root, split, layout)
        raise ConfigError(
            f"--val-split {val_split.wanted}: {root} has validation images already; leave the "
            "option out"
        )
    whole = form.open(root, "train", layout)
    assert isinstance(whole, IndexedSource)
    valid = choose_valid_images(
        whole.labels,
        lambda number: _find_ranked_name(whole, number),
        wanted=val_split.wanted,
        classes=whole.classes,
    )
    if split == "train":
        return whole.take(np.setdiff1d(np.arange(len(whole)), valid))
    part = whole.take(valid)
    part.index = replace(part.index, ignored={})  # counted with the training images
    return part


def _refuse_missing_split(data: str, root: Path, split: str) -> None:
    """Raise DataError if only the other split exists."""
    there = {
        name: DATA_FORMATS[data].has_split(root, name, DEFAULT_LAYOUT)
        for name in ("train", "valid")
    }
    if split == "valid" and there["train"] and not there["valid"]:
        raise DataError(
            f"{root}: no validation data beside the training data; {folder.NO_VALID_SPLIT}"
        )
    if split == "train" and there["valid"] and not there["train"]:
        raise DataError(
            f"{root}: no training data, only validation data; build it again from the images, or "
            "give the folder that holds both"
        )


def _refuse_layout(data: str, layout: LayoutOptions) -> None:
    """Raise ConfigError for options about folders of image files if the format is another."""
    given = {
        "--labels": layout.labels,
        "--class-from": layout.class_from,
        "--valid-split": layout.valid_split,
    }
    for flag, value in given.items():
        if value is not None and data not in FOLDER_FORMS:
            raise ConfigError(
                f"{flag}: is for folders of image files, not for {data}; leave it out"
            )


def refuse_output_in_data(
    out: Path, flag: str, *, data: str, root: Path, layout: LayoutOptions = DEFAULT_LAYOUT
) -> None:
    """Raise ConfigError if a folder to be written would be read as a class, or as part of one."""
    if data not in FOLDER_FORMS or layout.labels is not None:  # a table lists its images
        return
    is_loose = layout.class_from is not None
    found = find_split_folders(
        root, rule=layout.rule, valid_split=layout.valid_split, loose=is_loose
    )
    for place in filter(None, (found.train, found.valid)):
        inner = Path(os.path.relpath(out.resolve(), place.resolve())).parts
        if not inner or not inner[0].startswith("."):  # `..` is outside, hidden folders are skipped
            raise ConfigError(
                f"{flag} {out}: is inside {place}, whose folders are read as classes; choose a "
                "folder outside the data"
            )


def _find_ranked_name(source: Source, number: int) -> str:
    """The name that --val-split ranks an image by; a number is preceded by the file's name.

    Without the suffix, which may differ in another format of the same data.
    """
    name = find_portable_name(source, number)
    return source.name(number) if name.isdecimal() else strip_image_suffix(name)


def find_portable_name(source: Source, number: int) -> str:
    """The name that an image has in any format: without the shard or the split's folder.

    It is CLASS/FILE for a folder, and for files of many images the name inside the file.
    """
    if isinstance(source, IndexedSource) and source.index.names is not None:
        return source.index.names[number]
    name = source.name(number)
    first, _, rest = name.partition("/")
    return rest if "/" in rest and first.lower() in (*TRAIN_NAMES, *VALID_NAMES) else name


def set_limits(source: Source, limits: ReadLimits | None) -> Source:
    """The source with these limits; they do not apply to images in memory."""
    if limits is not None and isinstance(source, IndexedSource):
        source.limits = limits
    return source


def refuse_no_folder(root: Path, hint: str) -> None:
    """Raise DataError for a path that is not a folder."""
    if not root.is_dir():
        what = "is a file, not a folder" if root.exists() else "no such folder"
        raise DataError(f"{root}: {what}; {hint}")
