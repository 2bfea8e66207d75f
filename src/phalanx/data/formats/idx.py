"""MNIST's idx files, plain or gzipped."""

import gzip
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.data.formats.arrays import ArraySource, build_array_source
from phalanx.errors import DataError

_STEMS = {"train": "train", "valid": "t10k"}
_FOLDERS = {  # where these files lie under a data folder, nearest first
    "mnist": ("", "raw", "MNIST", "MNIST/raw"),
    "fashion-mnist": ("", "raw", "FashionMNIST", "FashionMNIST/raw", "fashion-mnist"),
}
IMAGES_MAGIC, LABELS_MAGIC = 0x0803, 0x0801  # unsigned bytes in three dimensions, in one


def open_idx(data: str, folder: Path, split: str) -> ArraySource:
    """One split of MNIST or of a set in its format."""
    stem = _STEMS[split]
    images_path = _find_file(data, folder, f"{stem}-images-idx3-ubyte")
    labels_path = _find_file(data, folder, f"{stem}-labels-idx1-ubyte")
    pixels = read_idx(images_path, IMAGES_MAGIC)
    labels = read_idx(labels_path, LABELS_MAGIC)
    if len(pixels) != len(labels):
        raise DataError(
            f"{images_path} has {len(pixels)} images and {labels_path.name} {len(labels)} labels; "
            "they are not of one set, fetch both again"
        )
    if not len(pixels):
        raise DataError(f"{images_path}: has no images; fetch the file again")
    return build_array_source(data, pixels, labels, files=(f"{stem}-images-idx3-ubyte",))


def _find_file(data: str, folder: Path, name: str) -> Path:
    """Where the file lies, plain before gzipped."""
    places = _FOLDERS.get(data, ("",))
    for place in places:
        for path in (folder / place / name, folder / place / f"{name}.gz"):
            if path.is_file():
                return path
    looked = ", ".join(place or "the folder itself" for place in places)
    raise DataError(
        f"{folder}: {data} needs {name} or {name}.gz, looked in {looked}; point --data-dir at "
        "the folder that holds the four idx files"
    )


def read_idx(path: Path, magic: int) -> NDArray[np.uint8]:
    """The array in an idx file of unsigned bytes."""
    data = _read_bytes(path)
    dimensions = magic & 0xFF
    found = int.from_bytes(data[:4], "big")
    if found != magic:
        raise DataError(
            f"{path}: starts with {found:#010x}, not with {magic:#010x}: not such an idx file; "
            "fetch it again"
        )
    start = 4 + 4 * dimensions
    shape = tuple(int.from_bytes(data[4 * i : 4 * i + 4], "big") for i in range(1, dimensions + 1))
    expected = start + int(np.prod(shape))
    if len(data) != expected:
        raise DataError(
            f"{path}: holds {len(data):,} bytes where its header promises {expected:,}; the file "
            "is truncated or damaged, fetch it again"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def _read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as cause:  # a damaged gzip is an OSError too
        raise DataError(f"{path}: cannot be read ({cause}); fetch it again") from None
