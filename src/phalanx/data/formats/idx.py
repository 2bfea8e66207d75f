"""MNIST's idx files, plain or gzipped."""

import gzip
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.data.formats.arrays import ArraySource, build_array_source, compute_md5
from phalanx.errors import DataError

IDX_MD5 = {  # of the files after gunzip: packages compress them again
    "mnist": {
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    "fashion-mnist": {
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
}
IDX_FOLDERS = {  # where these files may be under a data folder, nearest first
    "mnist": ("", "raw", "MNIST", "MNIST/raw"),
    "fashion-mnist": ("", "raw", "FashionMNIST", "FashionMNIST/raw", "fashion-mnist"),
}
_STEMS = {"train": "train", "valid": "t10k"}
IMAGES_MAGIC, LABELS_MAGIC = 0x0803, 0x0801  # unsigned bytes in three dimensions, in one


def identify_idx_files(root: Path) -> str | None:
    """Which of the two idx datasets is in a folder; None if neither is.

    Their files have the same names: they are told apart by the test labels, or if these are
    missing or unknown by the folder's name; anything else is taken for MNIST.
    """
    images = [f"{stem}-images-idx3-ubyte" for stem in _STEMS.values()]
    if not any((root / f"{name}{end}").is_file() for name in images for end in ("", ".gz")):
        return None
    labels = "t10k-labels-idx1-ubyte"
    found = {compute_md5(root / labels), compute_md5(root / f"{labels}.gz", gunzip=True)}
    by_md5 = next((data for data, md5 in IDX_MD5.items() if md5[labels] in found), None)
    is_fashion = any("fashion" in part.lower() for part in root.absolute().parts[-2:])
    return by_md5 or ("fashion-mnist" if is_fashion else "mnist")


def open_idx(data: str, folder: Path, split: str) -> ArraySource:
    """One split of MNIST, or of a dataset in its format."""
    stem = _STEMS[split]
    images_path = _find_file(data, folder, f"{stem}-images-idx3-ubyte")
    labels_path = _find_file(data, folder, f"{stem}-labels-idx1-ubyte")
    pixels = read_idx(images_path, IMAGES_MAGIC)
    labels = read_idx(labels_path, LABELS_MAGIC)
    if len(pixels) != len(labels):
        raise DataError(
            f"{images_path} has {len(pixels)} images and {labels_path.name} {len(labels)} labels; "
            "they do not belong together; fetch both again"
        )
    if not len(pixels):
        raise DataError(f"{images_path}: has no images; fetch the file again")
    return build_array_source(data, pixels, labels, files=(f"{stem}-images-idx3-ubyte",))


def _find_file(data: str, folder: Path, name: str) -> Path:
    """The path of the file, plain rather than gzipped; DataError if there is none."""
    for subfolder in IDX_FOLDERS[data]:
        for path in (folder / subfolder / name, folder / subfolder / f"{name}.gz"):
            if path.is_file():
                return path
    tried = ", ".join(subfolder or "the folder itself" for subfolder in IDX_FOLDERS[data])
    raise DataError(
        f"{folder}: {data} needs {name} or {name}.gz, looked in {tried}; point --data-dir at "
        "the folder that holds the four idx files"
    )


def read_idx(path: Path, magic: int) -> NDArray[np.uint8]:
    """The array in an idx file of unsigned bytes."""
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as cause:  # a damaged gzip is an OSError too
        raise DataError(f"{path}: cannot be read ({cause}); fetch it again") from None
    found = int.from_bytes(data[:4], "big")
    if found != magic:
        raise DataError(
            f"{path}: starts with {found:#010x}, not with {magic:#010x}: not the idx file "
            "expected; fetch it again"
        )
    start = 4 + 4 * (magic & 0xFF)  # the low byte counts the dimensions
    shape = tuple(int.from_bytes(data[at : at + 4], "big") for at in range(4, start, 4))
    expected = start + int(np.prod(shape))
    if len(data) != expected:
        raise DataError(
            f"{path}: holds {len(data):,} bytes, but its header says {expected:,}; the file is "
            "truncated or damaged, fetch it again"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)
