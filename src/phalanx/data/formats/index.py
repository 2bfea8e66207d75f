"""The index of a split, which says where each image is stored, and the source that reads them.

An index is a file of arrays, copied into memory that all processes share: a magic word, the
length of a JSON header, the header, the arrays it lists, each at a multiple of 64 bytes, and a
checksum of everything. It is built once, stored with the data (or in a cache folder if that is
read-only), and rebuilt when it is damaged, or when the files it describes no longer match the
snapshot in its header.
"""

import errno
import hashlib
import json
import os
import stat
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from phalanx.cache_folder import find_user_cache
from phalanx.data.formats.decode import BadImage, EncodedImage, Image, decode_image
from phalanx.data.formats.file_bytes import copy_to_memory, crc32c
from phalanx.data.formats.image_file import (
    DEFAULT_LIMITS,
    open_regular,
    read_image_file,
)
from phalanx.data.string_array import StringArray, pack_strings
from phalanx.disk import convert_disk_errors, write_atomically
from phalanx.errors import DataError, DiskError

_MAGIC = b"phalanxI"
_FORMAT = 2  # raise it when the layout changes: files of another format are rebuilt
_CRC_BYTES = 4
_ALIGN = 64
PHALANX_FOLDER = ".phalanx"
_ANYBODY_WRITES = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
_MAX_OPEN_FILES = 128  # shards kept open by one process

Box = tuple[float, float, float, float]  # left, top, right, bottom, as shares of the image's sides
Snapshot = list[list[Any]]  # name, size and time of each file or folder that an index was made from
_TakeSnapshot = Callable[[Snapshot | None], Snapshot]  # takes one now, given the previous one

# An image that was found to be bad when the index was built has one of these instead of its size.
BAD_CHECKSUM, TRUNCATED_SHARD, DAMAGED_SHARD, WRONG_LABEL, NO_LABEL = -1, -2, -3, -4, -5
_FAULT_REASONS = {
    BAD_CHECKSUM: "the checksum of its data does not match",
    TRUNCATED_SHARD: "the shard is truncated there and the rest is lost; fetch it again",
    DAMAGED_SHARD: "the shard is damaged there and the rest is lost; fetch it again",
    WRONG_LABEL: "label {label}, but there are {classes} classes, counted from {first}; fix it",
    NO_LABEL: "its class is not a whole number; fix it",
}


@contextmanager
def convert_read_errors(path: Path, hint: str = "check its permissions") -> Iterator[None]:
    """Context that turns an OSError into a DataError with the file and what to do."""
    try:
        yield
    except OSError as cause:
        where, why = cause.filename or path, cause.strerror or cause
        raise DataError(f"{where}: cannot be read ({why}); {hint}") from cause


def enclosing_box(boxes: Iterable[Sequence[float]]) -> Box:
    """The smallest box that encloses all boxes, of which there must be at least one."""
    left, top, right, bottom = zip(*boxes, strict=True)
    return min(left), min(top), max(right), max(bottom)


@dataclass(frozen=True, kw_only=True)
class Index:
    """The images of one split: the file and offset of each, its label and its box."""

    classes: tuple[str, ...]
    files: StringArray  # relative to the data folder
    names: StringArray | None = None  # of images inside their files; None: one image per file
    file_numbers: NDArray[np.int32]  # [N], in `files`
    offsets: NDArray[np.int64]  # [N], in bytes
    sizes: NDArray[np.int64]  # [N], in bytes
    labels: NDArray[np.int64]  # [N]
    boxes: NDArray[np.float32] | None = None  # [N, 4], see Box; nan: none
    sha256: str = ""  # stored by an index on disk, so that a million names are not hashed again
    save_error: str = ""  # why it could not be written to disk; empty if it was
    snapshot_sha256: str = ""  # of names, sizes and times of the files it was made from
    ignored: dict[str, int] = field(default_factory=dict)  # files that are not read, by reason

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, number: int) -> str:
        """The name of an image, by which the user can find it."""
        file = self.files[int(self.file_numbers[number])]
        return file if self.names is None else f"{file}:{self.names[number]}"

    def fingerprint(self) -> dict[str, Any]:
        """Counts, and a hash over names, sizes and labels; opens no image."""
        digest = self.sha256 or self.hash_entries()
        return {"images": len(self), "classes": len(self.classes), "sha256": digest}

    def take(self, numbers: NDArray[np.int64]) -> "Index":
        """The index of some of the images, in the given order."""
        names = self.names and pack_strings(self.names[int(number)] for number in numbers)
        digest = hashlib.sha256(f"{self.sha256 or self.hash_entries()}\n".encode())
        digest.update(np.asarray(numbers, "<i8").tobytes())
        return replace(
            self,
            names=names,
            file_numbers=self.file_numbers[numbers],
            offsets=self.offsets[numbers],
            sizes=self.sizes[numbers],
            labels=self.labels[numbers],
            boxes=None if self.boxes is None else self.boxes[numbers],
            sha256=digest.hexdigest(),
        )

    def hash_entries(self) -> str:
        """sha256 over all names, sizes and labels; stored in runs, so it must never change."""
        digest = hashlib.sha256()
        sizes, labels = self.sizes.tolist(), self.labels.tolist()
        for number, (size, label) in enumerate(zip(sizes, labels, strict=True)):
            line = f"{self.name(number)}\0{size}\0{label}\n"
            digest.update(line.encode(errors="surrogateescape"))
        return digest.hexdigest()

    def hash_boxes(self) -> str:
        """sha256 over all boxes, which hash_entries leaves out; empty if there are none."""
        boxes = self.boxes
        return "" if boxes is None else hashlib.sha256(boxes.astype("<f4").tobytes()).hexdigest()


def snapshot_files(root: Path, paths: Iterable[Path]) -> Snapshot:
    """Name, size and time of files, to find out later whether one has changed."""
    facts = [(path.relative_to(root).as_posix(), path.stat()) for path in paths]
    return [[name, file.st_size, file.st_mtime_ns] for name, file in facts]


def hash_snapshot(snapshot: Snapshot) -> str:
    """A hash of a snapshot, to compare it with a later one."""
    return hashlib.sha256(json.dumps(snapshot).encode(errors="surrogateescape")).hexdigest()


def load_or_build_index(
    root: Path, key: str, *, snapshot: Snapshot | _TakeSnapshot, build: Callable[[], Index]
) -> Index:
    """The index of a data folder: the stored one, or a new one, which is then stored.

    If it cannot be stored, the new one is used by this process only, and its save_error says why.
    """
    paths = [folder / f"{key}.index" for folder in find_record_folders(root)]
    for path in paths:
        found = _load_index(path, snapshot)
        if found is not None:
            return found
    snapshot = snapshot(None) if callable(snapshot) else snapshot
    index = replace(build(), snapshot_sha256=hash_snapshot(snapshot))
    content, why = _to_bytes(index, snapshot), ""
    for path in paths:
        try:
            with convert_disk_errors(path):
                make_record_folder(path.parent)
            write_atomically(path, content)
        except DiskError as error:
            why = getattr(error.__cause__, "strerror", None) or str(error)
            continue
        return _load_index(path, snapshot) or index
    # hashed now, like one on disk: some sizes may later be replaced by fault codes
    return replace(index, sha256=index.hash_entries(), save_error=why)


def find_record_folders(root: Path) -> list[Path]:
    """Where records about a data folder are stored: beside the data, else in the user's cache."""
    beside, cache = root / PHALANX_FOLDER, find_user_cache()
    if cache is None:
        return [beside]
    key = hashlib.sha256(str(root.resolve()).encode(errors="surrogateescape")).hexdigest()[:16]
    return [beside, cache / key]


def make_record_folder(folder: Path) -> None:
    """Create a folder for records; OSError if that fails, or if only root could write to it."""
    place = folder if folder.exists() else folder.parent
    if place.exists() and not place.stat().st_mode & _ANYBODY_WRITES:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
    folder.mkdir(parents=True, exist_ok=True)


def _to_bytes(index: Index, snapshot: Snapshot) -> bytes:
    """The index as the bytes of a file."""
    stored: dict[str, NDArray[Any] | None] = {  # the names on disk, which never change
        "files.letters": index.files.data,
        "files.ends": index.files.ends,
        "names.letters": index.names.data if index.names else None,
        "names.ends": index.names.ends if index.names else None,
        "file_of": index.file_numbers,
        "offsets": index.offsets,
        "sizes": index.sizes,
        "labels": index.labels,
        "boxes": index.boxes,
    }
    arrays = {name: array for name, array in stored.items() if array is not None}
    header = {
        "format": _FORMAT,
        "classes": index.classes,
        "stamp": snapshot,
        "ignored": index.ignored,
        "sha256": index.hash_entries(),
        "arrays": {name: [a.dtype.str, list(a.shape)] for name, a in arrays.items()},
    }
    text = json.dumps(header).encode(errors="surrogateescape")
    out = bytearray(_MAGIC + len(text).to_bytes(8, "little") + text)
    for array in arrays.values():
        out += bytes(-len(out) % _ALIGN)
        out += np.ascontiguousarray(array).data
    return bytes(out) + zlib.crc32(out).to_bytes(_CRC_BYTES, "little")


def _load_index(path: Path, snapshot: Snapshot | _TakeSnapshot) -> Index | None:
    """The index in a file; None if there is none, or it does not match the snapshot."""
    try:
        content = copy_to_memory(path)
    except (OSError, ValueError):  # there is none, or it is empty
        return None
    try:
        return _parse_index(memoryview(content), snapshot)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError):
        return None  # right checksum but wrong contents: not written by Phalanx


def _parse_index(content: memoryview, snapshot: Snapshot | _TakeSnapshot) -> Index | None:
    """The index in these bytes; None if they are damaged, or do not match the snapshot."""
    if zlib.crc32(content[:-_CRC_BYTES]) != int.from_bytes(content[-_CRC_BYTES:], "little"):
        return None
    end = 16 + int.from_bytes(content[8:16], "little")
    if content[:8] != _MAGIC or end > len(content):
        return None
    header = json.loads(bytes(content[16:end]))
    if header["format"] != _FORMAT:
        return None
    now = snapshot(header["stamp"]) if callable(snapshot) else snapshot
    if header["stamp"] != now:
        return None
    arrays = {}
    for name, (dtype, shape) in header["arrays"].items():
        begin = end + -end % _ALIGN
        count = int(np.prod(shape))
        end = begin + count * np.dtype(dtype).itemsize
        arrays[name] = np.frombuffer(content, dtype, count, begin).reshape(shape)
    has_names = "names.ends" in arrays
    return Index(
        classes=tuple(header["classes"]),
        files=StringArray(arrays["files.letters"], arrays["files.ends"]),
        names=StringArray(arrays["names.letters"], arrays["names.ends"]) if has_names else None,
        file_numbers=arrays["file_of"],
        offsets=arrays["offsets"],
        sizes=arrays["sizes"],
        labels=arrays["labels"],
        boxes=arrays.get("boxes"),
        sha256=header["sha256"],
        snapshot_sha256=hash_snapshot(header["stamp"]),
        ignored={str(why): int(count) for why, count in header.get("ignored", {}).items()},
    )


class IndexedSource:
    """Random access to images by an index: whole files, or pieces of larger ones.

    first_label: the number of the first class in the files, used in messages about labels.
    limits: how large an image may be; upright: whether images are turned as their EXIF says.
    Both may be changed after opening.
    """

    limits = DEFAULT_LIMITS
    upright = True

    def __init__(self, root: Path, index: Index, *, first_label: int = 0):
        self.root, self.index, self.first_label = root, index, first_label
        self.labels, self.classes = index.labels, index.classes
        self._open_files: OrderedDict[int, int] = OrderedDict()  # descriptors by file number
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self.index)

    def read(self, index: int) -> NDArray[np.uint8]:
        """The image as RGB; raises BadImage if it cannot be read or decoded."""
        return decode_image(self.image(index))

    def image(self, index: int) -> Image:
        """The image, to be decoded as far as needed; raises BadImage."""
        return self.to_image(index, self.read_encoded(index))

    def to_image(self, index: int, data: bytes) -> Image:
        """The image of the bytes that `read_encoded` returned, to be decoded as far as needed."""
        max_pixels = self.limits.max_pixels
        return EncodedImage(data, self.name(index), max_pixels=max_pixels, upright=self.upright)

    def read_encoded(self, index: int) -> bytes:
        """The bytes of the image's file, or of its part of one; raises BadImage."""
        file, size = int(self.index.file_numbers[index]), int(self.index.sizes[index])
        if self.index.names is None:
            path = self.root / self.index.files[file]
            return read_image_file(path, self.name(index), self.limits)
        if size < 0:
            raise self.known_bad(index)
        self.limits.refuse_too_large(size, self.name(index))
        try:
            with self._lock:  # another thread may close the file that this one is about to read
                data = os.pread(self._descriptor(file), size, int(self.index.offsets[index]))
        except OSError as cause:
            raise BadImage(self.name(index), cause.strerror or str(cause)) from None
        if len(data) < size:
            raise DataError(
                f"{self.root / self.index.files[file]}: was truncated while it was in use, and "
                f"ends before {self.name(index)} does; restore the file"
            )
        return data

    def checksum(self, index: int, image: Image) -> int:
        """The CRC-32C of the bytes that `image` was made from."""
        return crc32c(
            image.data if isinstance(image, EncodedImage) else np.ascontiguousarray(image)
        )

    def fault(self, index: int) -> int:
        """The fault of an image according to the index, such as BAD_CHECKSUM; 0 for none."""
        return 0 if self.index.names is None else min(0, int(self.index.sizes[index]))

    def known_bad(self, index: int) -> BadImage:
        """The error to raise for an image that is bad according to the index."""
        why = _FAULT_REASONS[self.fault(index)].format(
            label=int(self.labels[index]) + self.first_label,
            classes=len(self.classes),
            first=self.first_label,
        )
        return BadImage(self.name(index), why)

    def prefetch(self, indices: list[int]) -> None:
        """Ask the system to read images in advance, if they are parts of larger files."""
        if self.index.names is None or not hasattr(os, "posix_fadvise"):
            return
        for index in indices:
            with suppress(OSError), self._lock:  # reported when it is read
                offset, size = int(self.index.offsets[index]), int(self.index.sizes[index])
                descriptor = self._descriptor(int(self.index.file_numbers[index]))
                os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)

    def take(self, numbers: NDArray[np.int64]) -> Self:
        """The source of some of the images, in the given order."""
        some = copy(self)
        some._open_files, some._lock = OrderedDict(), Lock()
        some.index = self.index.take(numbers)
        some.labels = some.index.labels
        return some

    def _descriptor(self, file: int) -> int:
        """The descriptor of a file with many images; may close the least recently used one."""
        if file not in self._open_files:
            if len(self._open_files) == _MAX_OPEN_FILES:
                os.close(self._open_files.popitem(last=False)[1])
            self._open_files[file] = open_regular(self.root / self.index.files[file])
        self._open_files.move_to_end(file)
        return self._open_files[file]

    def name(self, index: int) -> str:
        """The name of the image, by which the user can find it."""
        return self.index.name(index)

    def box(self, index: int) -> Box | None:
        """The bounding box of the image's object, or None."""
        if self.index.boxes is None or np.isnan(self.index.boxes[index, 0]):
            return None
        left, top, right, bottom = map(float, self.index.boxes[index])
        return left, top, right, bottom

    def fingerprint(self) -> dict[str, Any]:
        """Counts, and a hash that changes if an image is added, removed or changes its size."""
        return self.index.fingerprint()

    def __del__(self) -> None:
        for descriptor in self._open_files.values():
            os.close(descriptor)
