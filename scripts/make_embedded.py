"""Make the images that come with Phalanx from Debian's copy of Fashion-MNIST.

The rule: of each class, the first 800 training and the first 150 test images in file order; they
stay in file order. `python scripts/make_embedded.py` writes src/phalanx/data/embedded/*.npz and
prints the hashes that tests/data/formats/test_arrays.py holds.
"""

import argparse
import hashlib
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.data.formats.arrays import EMBEDDED_FOLDER, hash_arrays
from phalanx.data.formats.idx import IMAGES_MAGIC, LABELS_MAGIC, read_idx

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
PER_CLASS = {"train": 800, "valid": 150}
STEMS = {"train": "train", "valid": "t10k"}
MD5 = {  # of the idx file without its header's gzip
    "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}
Bytes = NDArray[np.uint8]


def read_checked(folder: Path, name: str, magic: int) -> Bytes:
    """The array in a gzipped idx file whose contents have the published md5."""
    array = read_idx(folder / f"{name}.gz", magic)
    header = np.array([magic, *array.shape], dtype=">u4").tobytes()
    found = hashlib.md5(header + array.tobytes(), usedforsecurity=False).hexdigest()
    if found != MD5[name]:
        sys.exit(f"{folder / name}.gz: md5 {found}, expected {MD5[name]}; not the published file")
    return array


def choose(labels: Bytes, per_class: int) -> NDArray[np.int64]:
    """The indices of the first `per_class` images of each class, in file order."""
    firsts = [np.flatnonzero(labels == label)[:per_class] for label in range(10)]
    return np.sort(np.concatenate(firsts))


def make_split(folder: Path, split: str) -> tuple[Bytes, Bytes]:
    """The pixels and labels of one embedded split."""
    images = read_checked(folder, f"{STEMS[split]}-images-idx3-ubyte", IMAGES_MAGIC)
    labels = read_checked(folder, f"{STEMS[split]}-labels-idx1-ubyte", LABELS_MAGIC)
    chosen = choose(labels, PER_CLASS[split])
    return images[chosen], labels[chosen]


def main() -> None:
    """Write both splits and print their hashes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--from", dest="folder", type=Path, default=DEBIAN, metavar="DIR")
    folder = parser.parse_args().folder
    if not (folder / "train-images-idx3-ubyte.gz").is_file():
        sys.exit(f"{folder}: no Fashion-MNIST here; apt-get install dataset-fashion-mnist")
    for split in PER_CLASS:
        pixels, labels = make_split(folder, split)
        path = EMBEDDED_FOLDER / f"{split}.npz"
        np.savez_compressed(path, pixels=pixels, labels=labels)
        print(f"{split} {hash_arrays(pixels, labels)} {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
