"""Which dataset lies in a folder, told by what its files and folders are called."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.data.formats import cifar, folder, idx, imagenet, packed, parquet, tfrecord, webdataset
from phalanx.data.formats.checksums import IDX_MD5, compute_md5
from phalanx.errors import DataError

if TYPE_CHECKING:
    from phalanx.data.formats.sources import Source

MAX_DEPTH = 3
_TREES = {
    "imagenet-official",
    "imagenet-kaggle",
    "imagenet",
    "tfrecord",
    "tar",
    "parquet",
    "folder",
}
_IDX_IMAGES = ("train-images-idx3-ubyte", "t10k-images-idx3-ubyte")


@dataclass(frozen=True, kw_only=True)
class _DataFormat:
    """A form that data can lie in."""

    what: str  # what lies there
    get: str  # how to come by it
    looks_like: Callable[[Path], bool]
    open: "Callable[[Path, str], Source] | None" = None  # None: to be built into another form first


@dataclass(frozen=True, kw_only=True)
class DetectedDataset:
    """A dataset that lies in a folder."""

    data: str
    folder: Path
    why: str


def _name_idx(root: Path) -> str | None:
    """Which of the two idx sets lies in a folder; None where neither does.

    Their files are called alike: the test labels tell them apart, and the folder's name does where
    those are missing or nobody's; what is left is taken for MNIST.
    """
    if not any((root / f"{name}{end}").is_file() for name in _IDX_IMAGES for end in ("", ".gz")):
        return None
    labels = "t10k-labels-idx1-ubyte"
    found = {compute_md5(root / labels), compute_md5(root / f"{labels}.gz", gunzip=True)}
    by_sum = next((name for name, sums in IDX_MD5.items() if sums[labels] in found), None)
    fashion = any("fashion" in part.lower() for part in root.absolute().parts[-2:])
    return by_sum or ("fashion-mnist" if fashion else "mnist")


def _is_idx(root: Path, data: str) -> bool:
    return _name_idx(root) == data


DATA_FORMATS: dict[str, _DataFormat] = {
    "folder": _DataFormat(
        what="train/CLASS/ and val/CLASS/ with .jpg or .png files",
        get="your own images; phalanx data build --to folder",
        looks_like=folder.has_class_folders,
        open=folder.open_folder,
    ),
    "imagenet": _DataFormat(
        what="train/SYNSET/ and val/SYNSET/, with imagenet_2012_bounding_boxes.csv or without",
        get="image-net.org, or phalanx data build --to folder",
        looks_like=imagenet.has_imagenet_folders,
        open=imagenet.open_imagenet,
    ),
    "imagenet-official": _DataFormat(
        what="ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and the development kit",
        get="image-net.org; convert with phalanx data build",
        looks_like=imagenet.has_official_archives,
    ),
    "imagenet-kaggle": _DataFormat(
        what="ILSVRC/Data/CLS-LOC/ with LOC_*_solution.csv beside it",
        get="kaggle.com; convert with phalanx data build",
        looks_like=imagenet.has_kaggle_folder,
    ),
    "tfrecord": _DataFormat(
        what="train-00000-of-01024 and validation-00000-of-00128",
        get="phalanx data build --to tfrecord",
        looks_like=tfrecord.has_tfrecord_shards,
        open=tfrecord.open_tfrecord,
    ),
    "tar": _DataFormat(
        what="train-000000.tar and validation-000000.tar, as WebDataset has them",
        get="phalanx data build --to tar",
        looks_like=webdataset.has_tar_shards,
        open=webdataset.open_tar,
    ),
    "parquet": _DataFormat(
        what="train-*.parquet with a column of images, as Hugging Face publishes them",
        get="huggingface.co",
        looks_like=parquet.has_parquet_files,
        open=parquet.open_parquet,
    ),
    "packed": _DataFormat(
        what="train.phx and valid.phx",
        get="phalanx data build --to packed",
        looks_like=packed.has_packed_files,
        open=packed.open_packed,
    ),
    "cifar10": _DataFormat(
        what="data_batch_1.bin to 5 and test_batch.bin, or cifar-10-binary.tar.gz",
        get="phalanx data fetch cifar10",
        looks_like=partial(cifar.has_cifar_files, data="cifar10"),
        open=cifar.open_cifar10,
    ),
    "cifar100": _DataFormat(
        what="train.bin and test.bin, or cifar-100-binary.tar.gz",
        get="phalanx data fetch cifar100",
        looks_like=partial(cifar.has_cifar_files, data="cifar100"),
        open=cifar.open_cifar100,
    ),
    "mnist": _DataFormat(
        what="four idx files, plain or gzipped",
        get="phalanx data fetch mnist",
        looks_like=partial(_is_idx, data="mnist"),
        open=partial(idx.open_idx, "mnist"),
    ),
    "fashion-mnist": _DataFormat(
        what="four idx files, plain or gzipped",
        get="phalanx data fetch fashion-mnist",
        looks_like=partial(_is_idx, data="fashion-mnist"),
        open=partial(idx.open_idx, "fashion-mnist"),
    ),
}


def detect_datasets(root: Path) -> list[DetectedDataset]:
    """Every dataset in a folder and up to three levels below it, the nearest first."""
    if not root.is_dir():
        what = "is a file, not a folder" if root.exists() else "no such folder"
        raise DataError(f"{root}: {what}; give a folder that data lies in")
    if not os.access(root, os.R_OK | os.X_OK):
        raise DataError(f"{root}: cannot be read (Permission denied); mend its rights")
    found: list[DetectedDataset] = []
    for place, names in _walk(root):
        found += [
            DetectedDataset(data=name, folder=place, why=DATA_FORMATS[name].what)
            for name in names
            if not any(f.data == name and place.is_relative_to(f.folder) for f in found)
        ]
    return found


def describe_conversion(found: DetectedDataset) -> str:
    """What to say of a dataset that can be trained on in another form only."""
    return (
        f"{found.folder}: {found.data} as it is handed out ({found.why}); convert it with "
        f"`phalanx data build {found.folder} --to packed --out DIR`, then train on DIR"
    )


def describe_choices(root: Path, found: list[DetectedDataset]) -> str:
    """What to say where several datasets lie in a folder: how to name each."""
    lines = [f"  --data {f.data} --data-dir {f.folder}    ({f.why})" for f in found]
    return "\n".join([f"{root}: several datasets lie here; say which one:", *lines])


def _walk(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """The folders that hold something, level by level; a tree of images is not descended into."""
    level = [root]
    for depth in range(MAX_DEPTH + 1):
        below: list[Path] = []
        for place in level:
            names = _names_of(place)
            if names:
                yield place, names
            if depth < MAX_DEPTH and not _TREES & set(names):
                below += _readable_below(place)
        level = below


def _names_of(place: Path) -> list[str]:
    """The datasets that lie in this very folder."""
    names = [name for name, form in DATA_FORMATS.items() if form.looks_like(place)]
    if "folder" in names and "imagenet" in names:
        names.remove("folder")  # the same files, of which more is known
    return names


def _readable_below(place: Path) -> list[Path]:
    with os.scandir(place) as entries:
        names = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    return [place / name for name in names if os.access(place / name, os.R_OK | os.X_OK)]
