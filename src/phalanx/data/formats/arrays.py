"""Images in memory: those that come with Phalanx, random ones, and what array formats share."""

import gzip
import hashlib
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.catalog.datasets import DATASETS
from phalanx.data.formats.decode import grey_to_rgb
from phalanx.data.formats.image_file import open_data_file
from phalanx.errors import ConfigError, DataError
from phalanx.plan.draws import draw_below, draw_bits

EMBEDDED_FOLDER = Path(__file__).parents[1] / "embedded"
_MD5_BLOCK = 1 << 20
_SHIFTS = 1 << 16  # how many different images are cut from one block of random bytes


@dataclass(frozen=True, kw_only=True)
class ArraySource:
    """Random access to images in one array, grey [N, H, W] or colour [N, H, W, 3]."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    files: tuple[str, ...]  # the files of the images in order, each with as many images

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def rgb(self) -> NDArray[np.uint8]:
        """All images with three channels, contiguous: a batch copies rows from it."""
        if self.pixels.ndim == 4:
            return self.pixels
        rows = self.pixels.reshape(-1, self.pixels.shape[-1])
        return grey_to_rgb(rows).reshape(*self.pixels.shape, 3)

    def read(self, index: int) -> NDArray[np.uint8]:
        """The image as RGB."""
        return self.rgb[index]

    def name(self, index: int) -> str:
        """The file that the image came from, and its number in it."""
        file, number = divmod(int(index), len(self) // len(self.files))
        return f"{self.files[file]}[{number}]"

    def fingerprint(self) -> dict[str, Any]:
        """Counts, and a hash over every pixel and label."""
        return {
            "images": len(self),
            "classes": len(self.classes),
            "sha256": hash_arrays(self.pixels, self.labels),
        }


def hash_arrays(pixels: NDArray[np.uint8], labels: NDArray[np.integer[Any]]) -> str:
    """The sha256 of the pixels followed by the labels, one byte each."""
    digest = hashlib.sha256(np.ascontiguousarray(pixels).data)
    digest.update(labels.astype(np.uint8).tobytes())
    return digest.hexdigest()


def open_embedded(split: str) -> ArraySource:
    """The Fashion-MNIST images that come with Phalanx, 8,000 to train and 1,500 to validate."""
    path = EMBEDDED_FOLDER / f"{split}.npz"
    if not path.exists():
        raise DataError(f"{path}: the embedded images are missing; install Phalanx again")
    with np.load(path) as stored:
        return build_array_source(
            "embedded", stored["pixels"], stored["labels"], files=(path.name,)
        )


def build_array_source(
    data: str, pixels: NDArray[np.uint8], labels: NDArray[np.uint8], *, files: tuple[str, ...]
) -> ArraySource:
    """A source of a dataset in the catalog; DataError if a label is not among its classes."""
    classes = DATASETS[data].classes or ()
    if labels.size and int(labels.max()) >= len(classes):
        raise DataError(
            f"{files[0]}: label {labels.max()} at image {labels.argmax()}, but {data} has "
            f"{len(classes)} classes; is this another dataset's file?"
        )
    return ArraySource(pixels=pixels, labels=labels.astype(np.int64), classes=classes, files=files)


def read_archive(path: Path, names: Sequence[str], *, hint: str) -> list[bytes]:
    """The contents of the files in a tar archive whose paths end in these names."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                name = next((n for n in names if f"/{member.name}".endswith(f"/{n}")), "")
                file = archive.extractfile(member) if name else None
                found |= {name: file.read()} if file else {}
    except (OSError, EOFError, zlib.error, tarfile.TarError) as cause:
        raise DataError(f"{path}: cannot be read ({cause}); {hint}") from None
    missing = [name for name in names if name not in found]
    if missing:
        raise DataError(f"{path}: has no {missing[0]}; {hint}")
    return [found[name] for name in names]


def compute_md5(path: Path, *, gunzip: bool = False) -> str:
    """The md5 of a file, or of a gzipped file's contents; empty if it cannot be read."""
    digest = hashlib.md5(usedforsecurity=False)
    try:
        with open_data_file(path) as stored:
            file = gzip.open(stored) if gunzip else stored  # noqa: SIM115 - closed with what is stored
            while block := file.read(_MD5_BLOCK):
                digest.update(block)
    except (OSError, EOFError, zlib.error):  # a damaged gzip is an OSError too
        return ""
    return digest.hexdigest()


# --- random images, to run everything but the disk ---


@dataclass(frozen=True, kw_only=True)
class GeneratedSpec:
    """Number, size and seed of random images."""

    images: int
    image_size: int
    seed: int = 0


class _GeneratedSource:
    """Random access to random images: each is a window into one block of random bytes."""

    def __init__(self, spec: GeneratedSpec):
        self.spec = spec
        self.classes = DATASETS["generated"].classes or ()
        self.labels: NDArray[np.int64] = np.arange(spec.images, dtype=np.int64) % len(self.classes)

    def __len__(self) -> int:
        return self.spec.images

    @cached_property
    def block(self) -> NDArray[np.uint8]:
        """The bytes that images are cut from."""
        words = (self.spec.image_size**2 * 3 + _SHIFTS) // 8 + 1
        bits = draw_bits(self.spec.seed, "generated-block", np.arange(words))
        return bits.astype("<u8").view(np.uint8)

    def read(self, index: int) -> NDArray[np.uint8]:
        """The image as RGB noise."""
        size = self.spec.image_size
        start = int(draw_below(_SHIFTS, self.spec.seed, "generated-start", index))
        return self.block[start : start + size * size * 3].reshape(size, size, 3)

    def name(self, index: int) -> str:
        """The image's number, as there is no file."""
        return f"generated[{index}]"

    def fingerprint(self) -> dict[str, Any]:
        """Counts, and what determines the pixels."""
        return {
            "images": len(self),
            "classes": len(self.classes),
            "sha256": f"generated:{self.spec.image_size}:{self.spec.seed}",
        }


def open_generated(spec: GeneratedSpec | None) -> _GeneratedSource:
    """The random images of a spec."""
    if spec is None or spec.images < 1:
        raise ConfigError("--data generated needs a number of images above zero")
    return _GeneratedSource(spec)
