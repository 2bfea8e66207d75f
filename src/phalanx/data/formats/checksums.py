"""What tells the published files of a set from damaged ones, and one set from another."""

import gzip
import hashlib
import zlib
from pathlib import Path

_BLOCK = 1 << 20

IDX_MD5 = {  # of the files as they are after gunzip: packages gzip them anew
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
ARCHIVE_MD5 = {  # as published with the archives, on the page of the set
    "cifar10": {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
    "cifar100": {"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"},
}


def compute_md5(path: Path, *, gunzip: bool = False) -> str:
    """The md5 of a file, or of what a gzipped one holds; empty for one that cannot be read."""
    digest = hashlib.md5(usedforsecurity=False)
    try:
        with gzip.open(path) if gunzip else path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    except (OSError, EOFError, zlib.error):  # a damaged gzip is an OSError too
        return ""
    return digest.hexdigest()
