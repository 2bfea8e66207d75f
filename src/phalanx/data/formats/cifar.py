"""CIFAR's binary files: for each image label bytes, then 32x32 red, green and blue.

They are read from their folder, or directly from the archive they are published in.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.data.formats.arrays import ArraySource, build_array_source, read_archive
from phalanx.data.formats.image_file import read_data_file
from phalanx.data.formats.index import convert_read_errors
from phalanx.errors import DataError

_PIXEL_BYTES = 3 * 32 * 32


@dataclass(frozen=True, kw_only=True)
class _CifarLayout:
    """The files of one of the two datasets."""

    title: str
    files: dict[str, tuple[str, ...]]  # by split
    folder: str  # in the archive, and of the unpacked files
    archive: str
    archive_md5: str  # as published on the web page of the dataset
    label_bytes: int  # CIFAR-100 has the coarse label first; the last label is used

    @property
    def record_bytes(self) -> int:
        """The bytes of one image with its labels."""
        return self.label_bytes + _PIXEL_BYTES


CIFAR_LAYOUTS = {
    "cifar10": _CifarLayout(
        title="CIFAR-10",
        files={
            "train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
            "valid": ("test_batch.bin",),
        },
        folder="cifar-10-batches-bin",
        archive="cifar-10-binary.tar.gz",
        archive_md5="c32a1d4ab5d03f1284b67883e8d87530",
        label_bytes=1,
    ),
    "cifar100": _CifarLayout(
        title="CIFAR-100",
        files={"train": ("train.bin",), "valid": ("test.bin",)},
        folder="cifar-100-binary",
        archive="cifar-100-binary.tar.gz",
        archive_md5="03b5dce01913d631647c71ecec9e9cb8",
        label_bytes=2,
    ),
}


def open_cifar(data: str, folder: Path, split: str) -> ArraySource:
    """One split of CIFAR-10, or of CIFAR-100 with its fine labels."""
    layout = CIFAR_LAYOUTS[data]
    names = layout.files[split]
    location = _find_files(layout, folder, names[0])
    if location.is_file():
        members = [f"{layout.folder}/{name}" for name in names]
        contents = read_archive(location, members, hint="fetch it again")
    else:
        with convert_read_errors(location, "fetch it again"):
            contents = [read_data_file(location / name) for name in names]
    batches = [
        _to_records(layout, location / name, content)
        for name, content in zip(names, contents, strict=True)
    ]
    if len({len(batch) for batch in batches}) > 1:
        counts = ", ".join(f"{n} {len(b):,}" for n, b in zip(names, batches, strict=True))
        raise DataError(f"{location}: files of unequal length ({counts} images); fetch them again")
    records = np.concatenate(batches)
    pixels = records[:, layout.label_bytes :].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    labels = records[:, layout.label_bytes - 1]
    return build_array_source(data, np.ascontiguousarray(pixels), labels, files=names)


def has_cifar_files(root: Path, data: str) -> bool:
    """Whether the dataset is in this folder, as files or as the archive."""
    layout = CIFAR_LAYOUTS[data]
    if (root / layout.archive).is_file():
        return True
    paths = [root / names[0] for names in layout.files.values()]
    size = max((path.stat().st_size for path in paths if path.is_file()), default=0)
    return size > 0 and size % layout.record_bytes == 0  # train.bin is a common name


def _find_files(layout: _CifarLayout, folder: Path, first: str) -> Path:
    """The folder with a split's files, else the archive; DataError if there is neither."""
    for candidate in (folder, folder / layout.folder):
        if (candidate / first).is_file():
            return candidate
    archive = folder / layout.archive
    if archive.is_file():
        return archive
    raise DataError(
        f"{folder}: no {first} here or in {layout.folder}/, and no {layout.archive}; point "
        f"--data-dir at the folder with {layout.title}'s binary version (not the Python one)"
    )


def _to_records(layout: _CifarLayout, path: Path, data: bytes) -> NDArray[np.uint8]:
    """The records of one file, [N, record_bytes]."""
    if not data or len(data) % layout.record_bytes:
        raise DataError(
            f"{path}: {len(data):,} bytes is not a multiple of the {layout.record_bytes}-byte "
            "record; the file is truncated or damaged, fetch it again"
        )
    return np.frombuffer(data, np.uint8).reshape(-1, layout.record_bytes)
