"""Our own form for full speed: all images of a split in one file, train.phx and valid.phx.

A magic word, the length of a JSON header, the header, the images (JPEG, or raw RGB), then the
index (arrays, and a JSON directory of them) and a tail of 40 bytes with checksums of header and
index. Everything starts at a multiple of 64 bytes. Each image has its own checksum, too.

Images are read, not mapped: mapped pages would count as memory of every worker that touched them.
The index is mapped, and shared by all.
"""

import hashlib
import json
import mmap
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.data.formats.decode import BadImage, EncodedImage, Image, encode_png
from phalanx.data.formats.index import Index, StringArray, pack_strings
from phalanx.data.formats.indexed_source import IndexedSource
from phalanx.errors import DataError

MAGIC, END_MAGIC = b"phalanxP", b"phalanxE"
FORMAT = 1  # raise it when the layout changes
ALIGN = 64
HEAD = struct.Struct("<8sQ")  # magic, length of the header
TAIL = struct.Struct("<QQQII8s")  # index begin, directory begin, its length, two checksums, magic
_ENDING = ".phx"
_SPLITS = ("train", "valid")
_AGAIN = "build it again with `phalanx data build --to packed`"
CHANGED_AFTER_PACKING = "its bytes changed after packing"


@dataclass(frozen=True, kw_only=True)
class _Content:
    """What a packed file says about itself, and its arrays, mapped."""

    header: dict[str, Any]
    arrays: dict[str, NDArray[Any]]

    def index(self, name: str) -> Index:
        """Where the images lie in the file of this name."""
        arrays = self.arrays
        count = len(arrays["labels"])
        return Index(
            classes=tuple(self.header["classes"]),
            files=pack_strings([name]),
            names=StringArray(arrays["names.letters"], arrays["names.ends"]),
            file_of=np.broadcast_to(np.int32(0), (count,)),
            offsets=arrays["offsets"],
            sizes=arrays["sizes"],
            labels=arrays["labels"],
            boxes=arrays.get("boxes"),
        )


class _PackedPicture(EncodedImage):
    """A JPEG of a packed file, whose checksum is looked at when it cannot be decoded."""

    def __init__(self, data: bytes, name: str, checksum: int):
        super().__init__(data, name)
        self.checksum = checksum

    def pixels(self, scale: float = 1.0) -> NDArray[np.uint8]:
        """The whole image, at no less than that scale of its size; raises BadImage."""
        with _told_apart(self.data, self.checksum):
            return super().pixels(scale)


@contextmanager
def _told_apart(data: bytes, checksum: int) -> Iterator[None]:
    """A block whose BadImage says so when the image's bytes are not those that were packed."""
    try:
        yield
    except BadImage as bad:
        if zlib.crc32(data) == checksum:
            raise
        raise BadImage(bad.name, CHANGED_AFTER_PACKING) from None


class PackedSource(IndexedSource):
    """Random access to the images of a packed file."""

    def __init__(self, path: Path, content: _Content):
        super().__init__(path.parent, content.index(path.name))
        self.header, self.arrays = content.header, content.arrays
        self.raw = content.header["encoding"] == "raw"

    def read(self, index: int) -> NDArray[np.uint8]:
        """The image as RGB; raises BadImage when it is damaged."""
        if self.raw:
            return self._shape(super().encoded(index), index)
        return self._picture(index).pixels()

    def image(self, index: int) -> Image:
        """Raw pixels as they are, a JPEG to be decoded as far as it is needed."""
        return self.read(index) if self.raw else self._picture(index)

    def _picture(self, index: int) -> "_PackedPicture":
        data = super().encoded(index)
        checksum = int(self.arrays["checksums"][index])
        with _told_apart(data, checksum):
            return _PackedPicture(data, self.name(index), checksum)

    def _shape(self, data: bytes, index: int) -> NDArray[np.uint8]:
        if not data:
            raise BadImage(self.name(index), "it could not be decoded when it was packed")
        height, width = int(self.arrays["heights"][index]), int(self.arrays["widths"][index])
        return np.frombuffer(data, np.uint8).reshape(height, width, 3)

    def encoded(self, index: int) -> bytes:
        """The image as a file: the JPEG as it lies there, or a PNG of raw pixels."""
        return encode_png(self.read(index)) if self.raw else super().encoded(index)

    def is_intact(self, index: int) -> bool:
        """Whether the image's bytes are those that were packed."""
        return zlib.crc32(super().encoded(index)) == int(self.arrays["checksums"][index])

    def fingerprint(self) -> dict[str, Any]:
        """Counts, and a hash over labels and the checksums of all images."""
        digest = hashlib.sha256(self.header["encoding"].encode())
        for name in ("labels", "checksums", "names.letters"):
            digest.update(np.ascontiguousarray(self.arrays[name]).data)
        return {"images": len(self), "classes": len(self.classes), "sha256": digest.hexdigest()}


def has_packed_files(root: Path) -> bool:
    """Whether packed files lie in the folder."""
    return any(packed_path(root, split).is_file() for split in _SPLITS)


def packed_path(root: Path, split: str) -> Path:
    """Where the packed file of a split lies."""
    return root / f"{split}{_ENDING}"


def open_packed(root: Path, split: str) -> PackedSource:
    """One split of a packed set; a file that is cut short or damaged in its index is refused."""
    path = packed_path(root, split)
    source = PackedSource(path, _read_content(path))
    other = packed_path(root, next(name for name in _SPLITS if name != split))
    if other.is_file() and tuple(read_header(other).get("classes", ())) != source.classes:
        raise DataError(f"{root}: train.phx and valid.phx have other classes; {_AGAIN}")
    return source


def read_header(path: Path) -> dict[str, Any]:
    """The JSON header of a packed file."""
    with _reading(path) as file:
        return _parse_header(file.read(HEAD.size), file.read, path)[1]


def _reading(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as cause:
        raise DataError(f"{path}: cannot be read ({cause.strerror}); {_AGAIN}") from None


def _parse_header(head: bytes, read: Any, path: Path) -> tuple[bytes, dict[str, Any]]:
    """The bytes of the header and what they say."""
    magic, length = HEAD.unpack(head) if len(head) == HEAD.size else (b"", 0)
    if magic != MAGIC:
        raise DataError(f"{path}: is no packed file; {_AGAIN}")
    text = read(min(length, path.stat().st_size))
    try:
        header: dict[str, Any] = json.loads(text)
    except ValueError:
        raise DataError(f"{path}: its header is damaged; {_AGAIN}") from None
    if header.get("format") != FORMAT:
        raise DataError(
            f"{path}: format {header.get('format')}, this Phalanx reads {FORMAT}; use the one that "
            f"wrote it, or {_AGAIN}"
        )
    return text, header


def _read_content(path: Path) -> _Content:
    """The header and the arrays of a packed file, after their checksums were verified."""
    with _reading(path) as file:
        text, header = _parse_header(file.read(HEAD.size), file.read, path)
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    size = len(content)
    if size < HEAD.size + TAIL.size or bytes(content[-8:]) != END_MAGIC:
        raise DataError(f"{path}: ends at byte {size:,} without its index: truncated; {_AGAIN}")
    begin, place, length, index_crc, header_crc, _ = TAIL.unpack(content[-TAIL.size :])
    if not begin <= place <= place + length == size - TAIL.size:
        raise DataError(f"{path}: its tail does not fit its size; {_AGAIN}")
    if zlib.crc32(text) != header_crc or zlib.crc32(content[begin : place + length]) != index_crc:
        raise DataError(f"{path}: the checksum of its header or index does not fit; {_AGAIN}")
    arrays = {}
    for name, (dtype, shape, offset) in json.loads(bytes(content[place : place + length])).items():
        flat = np.frombuffer(content, dtype, int(np.prod(shape)), offset)
        arrays[name] = flat.reshape(shape)
    return _Content(header=header, arrays=arrays)
