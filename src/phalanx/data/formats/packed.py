"""Our own format for full speed: all images of a split in one file, train.phx or valid.phx.

A magic word, the length of a JSON header, the header, the images (JPEG, or raw RGB), then the
index (arrays, and a JSON directory of them) and a tail of 40 bytes with checksums of header and
index. Everything starts at a multiple of 64 bytes. Each image has its own checksum, CRC-32C since
format 2, which is verified whenever the image is read.

Images are read, not mapped: mapped pages would count as memory of every worker that touched them,
and a truncated file would kill them. The index is copied into memory that all processes share.
"""

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from phalanx.data.formats.decode import BadImage, Image, encode_png
from phalanx.data.formats.file_bytes import copy_to_memory, crc32c
from phalanx.data.formats.image_file import open_data_file
from phalanx.data.formats.index import (
    Index,
    IndexedSource,
    convert_read_errors,
    hash_snapshot,
    snapshot_files,
)
from phalanx.data.string_array import StringArray, pack_strings
from phalanx.errors import DataError

MAGIC, END_MAGIC = b"phalanxP", b"phalanxE"
_CHECKSUMS: dict[int, Callable[[bytes], int]] = {1: zlib.crc32, 2: crc32c}  # of an image, by format
FORMAT = 2  # of new files; raise it when the layout changes
ALIGN = 64
HEAD = struct.Struct("<8sQ")  # magic, length of the header
TAIL = struct.Struct("<QQQII8s")  # index begin, directory begin, its length, two checksums, magic
_SPLITS = ("train", "valid")
_BUILD_AGAIN = "build it again with `phalanx data build --to packed`"
_CHANGED_AFTER_PACKING = "its bytes changed after packing"


class _PackedSource(IndexedSource):
    """Random access to the images of a packed file."""

    def __init__(self, path: Path, header: dict[str, Any], arrays: dict[str, NDArray[Any]]):
        index = Index(
            classes=tuple(header["classes"]),
            files=pack_strings([path.name]),
            names=StringArray(arrays["names.letters"], arrays["names.ends"]),
            file_numbers=np.broadcast_to(np.int32(0), arrays["labels"].shape),
            offsets=arrays["offsets"],
            sizes=arrays["sizes"],
            labels=arrays["labels"],
            boxes=arrays.get("boxes"),
            snapshot_sha256=hash_snapshot(snapshot_files(path.parent, [path])),
        )
        super().__init__(path.parent, index)
        self.header, self.arrays = header, arrays
        self.raw = header["encoding"] == "raw"

    def image(self, index: int) -> Image:
        """Raw pixels, or a JPEG to be decoded as far as needed."""
        data = self._read_checked(index)
        if not self.raw:
            return self.to_image(index, data)
        if not data:
            raise BadImage(self.name(index), "it could not be decoded when it was packed")
        height, width = int(self.arrays["heights"][index]), int(self.arrays["widths"][index])
        return np.frombuffer(data, np.uint8).reshape(height, width, 3)

    def read_encoded(self, index: int) -> bytes:
        """The image as a file: the stored JPEG, or a PNG of raw pixels."""
        return encode_png(self.read(index)) if self.raw else self._read_checked(index)

    def checksum(self, index: int, image: Image) -> int:
        """The checksum in the index, against which the image's bytes were verified."""
        return int(self.arrays["checksums"][index])

    def _read_checked(self, index: int) -> bytes:
        """The bytes of an image; raises BadImage if they changed after packing."""
        data = super().read_encoded(index)
        if _CHECKSUMS[self.header["format"]](data) != int(self.arrays["checksums"][index]):
            raise BadImage(self.name(index), _CHANGED_AFTER_PACKING)
        return data

    def take(self, numbers: NDArray[np.int64]) -> Self:
        """The source of some of the images, in the given order."""
        some = super().take(numbers)
        own = ("labels", "checksums", "heights", "widths")
        arrays = {name: self.arrays[name][numbers] for name in own if name in self.arrays}
        assert some.index.names is not None
        some.arrays = {**arrays, "names.letters": some.index.names.data}
        return some

    def fingerprint(self) -> dict[str, Any]:
        """Counts, and a hash over labels and the checksums of all images."""
        digest = hashlib.sha256(self.header["encoding"].encode())
        for name in ("labels", "checksums", "names.letters"):
            digest.update(np.ascontiguousarray(self.arrays[name]).data)
        return {"images": len(self), "classes": len(self.classes), "sha256": digest.hexdigest()}


def has_packed_files(root: Path) -> bool:
    """Whether there are packed files in the folder."""
    return any(packed_path(root, split).is_file() for split in _SPLITS)


def packed_path(root: Path, split: str) -> Path:
    """The path of a split's packed file."""
    return root / f"{split}.phx"


def open_packed(root: Path, split: str) -> _PackedSource:
    """One split of a packed dataset; DataError if the file is truncated or its index damaged."""
    path = packed_path(root, split)
    source = _PackedSource(path, *_read_content(path))
    other = packed_path(root, next(name for name in _SPLITS if name != split))
    if other.is_file() and tuple(read_header(other).get("classes", ())) != source.classes:
        raise DataError(f"{root}: train.phx and valid.phx have different classes; {_BUILD_AGAIN}")
    return source


def read_header(path: Path) -> dict[str, Any]:
    """The JSON header of a packed file."""
    with convert_read_errors(path, _BUILD_AGAIN), open_data_file(path) as file:
        return _parse_header(file, path)[1]


def _parse_header(file: BinaryIO, path: Path) -> tuple[bytes, dict[str, Any]]:
    """The bytes of the header, and its parsed contents."""
    head = file.read(HEAD.size)
    magic, length = HEAD.unpack(head) if len(head) == HEAD.size else (b"", 0)
    if magic != MAGIC:
        raise DataError(f"{path}: is not a packed file; {_BUILD_AGAIN}")
    text = file.read(min(length, path.stat().st_size))
    try:
        header: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError):
        header = {}
    if not isinstance(header, dict) or not header:
        raise DataError(f"{path}: its header is damaged; {_BUILD_AGAIN}") from None
    if header.get("format") not in _CHECKSUMS:
        raise DataError(
            f"{path}: format {header.get('format')}, this Phalanx reads up to {FORMAT}; use the "
            f"one that wrote it, or {_BUILD_AGAIN}"
        )
    return text, header


def _read_content(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """The header and the arrays of a packed file, after their checksums were verified."""
    with convert_read_errors(path, _BUILD_AGAIN), open_data_file(path) as file:
        text, header = _parse_header(file, path)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL.size))
        tail = file.read(TAIL.size)
        if size < HEAD.size + TAIL.size or not tail.endswith(END_MAGIC):
            raise DataError(
                f"{path}: ends at byte {size:,} without its index: truncated; {_BUILD_AGAIN}"
            )
        begin, directory, length, index_crc, header_crc, _ = TAIL.unpack(tail)
        end = directory + length
        if not begin <= directory <= end == size - TAIL.size:
            raise DataError(f"{path}: its tail does not match its size; {_BUILD_AGAIN}")
        content = memoryview(copy_to_memory(path, begin))
    index = content[: end - begin]
    if zlib.crc32(text) != header_crc or zlib.crc32(index) != index_crc:
        raise DataError(
            f"{path}: the checksum of its header or index does not match; {_BUILD_AGAIN}"
        )
    arrays = {}
    for name, (dtype, shape, at) in json.loads(bytes(index[directory - begin :])).items():
        arrays[name] = np.frombuffer(index, dtype, int(np.prod(shape)), at - begin).reshape(shape)
    return header, arrays
