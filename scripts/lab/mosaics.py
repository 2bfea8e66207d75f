"""Small images packed in few bytes, to carry to a machine without a network.

    python scripts/lab/mosaics.py pack-cifar DIR OUT [--parts 4] [--lossy]
    python scripts/lab/mosaics.py unpack-cifar OUT DIR
    python scripts/lab/mosaics.py pack-photos DIR OUT [--parts 2] [--quality 58]
    python scripts/lab/mosaics.py unpack-photos OUT DIR

CIFAR-10's binary files become mosaics of 1,000 images, WebP without loss (97 MiB in all) or AVIF
(--lossy: 36 dB, 26 MiB); unpacked without loss, their md5 sums are the published ones. Class
folders of photographs of 64 x 64 pixels, train/ and val/, become mosaics of 256, AVIF, and are
unpacked as JPEG files; classes get numbers in place of their names. OUT is a folder of parts, which
may be carried one after the other: unpacking continues where the earlier parts ended.
"""

import argparse
import hashlib
import io
import random
import struct
from collections.abc import Iterator
from multiprocessing import Pool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

HEADER = struct.Struct("<16sIII")  # name, number of the first image, images, bytes
CIFAR_FILES = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
ROW = 3073  # bytes of a label and its image
ACROSS = {32: 32, 64: 16}  # images in a row of a mosaic, by their side


class Piece(NamedTuple):
    """A mosaic and the labels of its images."""

    name: str
    first: int
    labels: bytes
    data: bytes


def join(images: NDArray[np.uint8], **options: Any) -> bytes:
    """Images [N, S, S, 3] as one encoded mosaic."""
    side = images.shape[1]
    across = ACROSS[side]
    full = np.zeros((across * across, side, side, 3), np.uint8)
    full[: len(images)] = images
    square = full.reshape(across, across, side, side, 3).transpose(0, 2, 1, 3, 4)
    file = io.BytesIO()
    Image.fromarray(square.reshape(across * side, -1, 3)).save(file, **options)
    return file.getvalue()


def cut(data: bytes, count: int, side: int) -> NDArray[np.uint8]:
    """The images of a mosaic."""
    across = ACROSS[side]
    square = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    images = square.reshape(across, side, across, side, 3).transpose(0, 2, 1, 3, 4)
    return images.reshape(-1, side, side, 3)[:count]


def write_parts(pieces: list[Piece], out: Path, count: int) -> None:
    """Write files with about equally many pieces each."""
    out.mkdir(parents=True, exist_ok=True)
    each = -(-len(pieces) // count)
    for part in range(count):
        with (out / f"part-{part}.bin").open("wb") as file:
            for name, first, labels, data in pieces[part * each : (part + 1) * each]:
                file.write(HEADER.pack(name.encode(), first, len(labels), len(data)))
                file.write(labels + data)


def read_parts(folder: Path) -> Iterator[Piece]:
    """The pieces of all existing parts."""
    for path in sorted(folder.glob("part-*.bin")):
        content, at = path.read_bytes(), 0
        while at < len(content):
            name, first, images, size = HEADER.unpack_from(content, at)
            labels = at + HEADER.size
            at = labels + images + size
            data = content[labels + images : at]
            yield Piece(name.rstrip(b"\0").decode(), first, content[labels : labels + images], data)


def pack_cifar(words: argparse.Namespace) -> None:
    """Pack binary files into parts."""
    exact = {"format": "WEBP", "lossless": True, "quality": 100, "method": 4}
    lossy = {"format": "AVIF", "quality": 84, "subsampling": "4:4:4", "speed": 6}
    pieces = []
    for name in CIFAR_FILES:
        rows = np.fromfile(words.source / name, np.uint8).reshape(-1, ROW)
        for first in range(0, len(rows), 1000):
            some = rows[first : first + 1000]
            images = some[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            data = join(images, **(lossy if words.lossy else exact))
            pieces.append(Piece(name.removesuffix(".bin"), first, some[:, 0].tobytes(), data))
    write_parts(pieces, words.target, words.parts)


def unpack_cifar(words: argparse.Namespace) -> None:
    """Unpack parts into binary files, and print their md5 sums."""
    words.target.mkdir(parents=True, exist_ok=True)
    for name, first, labels, data in read_parts(words.source):
        path = words.target / f"{name}.bin"
        path.touch()
        pixels = cut(data, len(labels), 32).transpose(0, 3, 1, 2).reshape(len(labels), -1)
        rows = np.concatenate([np.frombuffer(labels, np.uint8)[:, None], pixels], axis=1)
        with path.open("r+b") as file:
            file.seek(first * ROW)
            file.write(rows.tobytes())
    for path in sorted(words.target.glob("*.bin")):
        print(path.name, hashlib.md5(path.read_bytes()).hexdigest())


def pack_photos(words: argparse.Namespace) -> None:
    """Pack class folders into parts; every part holds photographs of all classes."""
    classes = sorted(path.name for path in (words.source / "train").iterdir())
    options = {"format": "AVIF", "quality": words.quality, "subsampling": "4:2:0", "speed": 6}
    pieces = []
    for split in ("val", "train"):
        paths = sorted((words.source / split).glob("*/*"))
        random.Random(1).shuffle(paths)
        for first in range(0, len(paths), 256):
            some = paths[first : first + 256]
            images = np.stack([np.asarray(Image.open(path).convert("RGB")) for path in some])
            labels = bytes(classes.index(path.parent.name) for path in some)
            pieces.append(Piece(split, first, labels, join(images, **options)))
    write_parts(pieces, words.target, words.parts)


def write_photos(job: tuple[Piece, Path]) -> int:
    """Write the photographs of a piece as files."""
    (split, first, labels, data), target = job
    for number, (label, image) in enumerate(zip(labels, cut(data, len(labels), 64), strict=True)):
        folder = target / split / f"c{label:03}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{first + number}.jpg", quality=92)
    return len(labels)


def unpack_photos(words: argparse.Namespace) -> None:
    """Unpack parts into class folders, on all cores."""
    with Pool() as pool:
        jobs = ((piece, words.target) for piece in read_parts(words.source))
        print(f"{sum(pool.imap_unordered(write_photos, jobs)):,} photographs")


def main() -> None:
    """Run one of the four commands."""
    parser = argparse.ArgumentParser(description=__doc__)
    ways = {
        "pack-cifar": pack_cifar,
        "unpack-cifar": unpack_cifar,
        "pack-photos": pack_photos,
        "unpack-photos": unpack_photos,
    }
    parser.add_argument("way", choices=ways)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--lossy", action="store_true")
    parser.add_argument("--quality", type=int, default=58)
    words = parser.parse_args()
    ways[words.way](words)


if __name__ == "__main__":
    main()
