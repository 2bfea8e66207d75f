"""Where every image of a split lies, and the source that reads images from there.

An index is arrays in one file, copied into memory that all processes share: a magic word, the
length of a JSON header, the header, the arrays it lists, each at a multiple of 64 bytes, and a
checksum of it all. It is built once, kept beside the data (or in a cache folder where that is
read-only) and built anew when it is damaged, or when the files it describes no longer match the
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
from phalanx.data.formats.decode import BadImage, EncodedImage, Image, decode
from phalanx.data.formats.file_bytes import copy_to_memory, crc32c
from phalanx.data.formats.image_file import (
    DEFAULT_LIMITS,
    open_regular,
    read_image_file,
)
from phalanx.data.string_array import StringArray, pack_strings
from phalanx.disk import disk_errors, write_atomically
from phalanx.errors import DataError, DiskError

_MAGIC = b"phalanxI"
_FORMAT = 2  # raise it when the layout changes: files of another one are built anew
_CRC_BYTES = 4
_ALIGN = 64
PHALANX_FOLDER = ".phalanx"
_ANYBODY_WRITES = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
_MAX_OPEN_FILES = 128  # shards kept open by one process

Box = tuple[float, float, float, float]  # left, top, right, bottom, as shares of the image's sides
Snapshot = list[list[Any]]  # name, size and time of each file or folder that an index was made from
_TakeSnapshot = Callable[[Snapshot | None], Snapshot]  # of now; told what was looked at before

# An image that was found to be bad when the index was built has one of these in place of its size.
BAD_CHECKSUM, TRUNCATED_SHARD, DAMAGED_SHARD, WRONG_LABEL, NO_LABEL = -1, -2, -3, -4, -5
_FAULT_REASONS = {
    BAD_CHECKSUM: "the checksum of its data does not match",
    TRUNCATED_SHARD: "the shard is truncated there and the rest is lost; fetch it again",
    DAMAGED_SHARD: "the shard is damaged there and the rest is lost; fetch it again",
    WRONG_LABEL: "label {label}, but there are {classes} classes, counted from {first}; fix it",
    NO_LABEL: "its class is not a whole number; fix it",
}


@contextmanager
def read_errors(path: Path, hint: str) -> Iterator[None]:
    """A block whose system errors become a DataError that names the file and the way out."""
    try:
        yield
    except OSError as cause:
        where, why = cause.filename or path, cause.strerror or cause
        raise DataError(f"{where}: cannot be read ({why}); {hint}") from cause


def enclosing_box(boxes: Iterable[Sequence[float]]) -> Box:
    """The smallest box around all, of which there is one at least."""
    left, top, right, bottom = zip(*boxes, strict=True)
    return min(left), min(top), max(right), max(bottom)


@dataclass(frozen=True, kw_only=True)
class Index:
    """The images of one split: the file each lies in, where in it, and what it shows."""

    classes: tuple[str, ...]
    files: StringArray  # relative to the data folder
    names: StringArray | None = None  # of images inside their files; None: files hold one each
    file_numbers: NDArray[np.int32]  # [N], in `files`
    offsets: NDArray[np.int64]  # [N], in bytes
    sizes: NDArray[np.int64]  # [N], in bytes
    labels: NDArray[np.int64]  # [N]
    boxes: NDArray[np.float32] | None = None  # [N, 4], see Box; nan: none
    sha256: str = ""  # kept by an index on disk, where a million names are not hashed again
    save_error: str = ""  # why it could not be written to disk; empty: it was
    snapshot_sha256: str = ""  # of names, sizes and times of the files it was made from
    ignored: dict[str, int] = field(default_factory=dict)  # files that lie there unread, by reason

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, number: int) -> str:
        """What a person can find an image by."""
        file = self.files[int(self.file_numbers[number])]
        return file if self.names is None else f"{file}:{self.names[number]}"

    def fingerprint(self) -> dict[str, Any]:
        """Counts, and a hash over names, sizes and labels; no image is opened."""
        digest = self.sha256 or self.hash_entries()
        return {"images": len(self), "classes": len(self.classes), "sha256": digest}

    def take(self, numbers: NDArray[np.int64]) -> "Index":
        """The index of some of its images, in that order."""
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
        """sha256 over every image's name, size and label; runs are known by it: never change it."""
        digest = hashlib.sha256()
        sizes, labels = self.sizes.tolist(), self.labels.tolist()
        for number, (size, label) in enumerate(zip(sizes, labels, strict=True)):
            line = f"{self.name(number)}\0{size}\0{label}\n"
            digest.update(line.encode(errors="surrogateescape"))
        return digest.hexdigest()


def snapshot_files(root: Path, paths: Iterable[Path]) -> Snapshot:
    """Name, size and time of files, to see later whether one of them has changed."""
    facts = [(path.relative_to(root).as_posix(), path.stat()) for path in paths]
    return [[name, file.st_size, file.st_mtime_ns] for name, file in facts]


def hash_snapshot(snapshot: Snapshot) -> str:
    """A hash that tells whether a snapshot taken later is the same."""
    return hashlib.sha256(json.dumps(snapshot).encode(errors="surrogateescape")).hexdigest()


def load_or_build_index(
    root: Path, key: str, *, snapshot: Snapshot | _TakeSnapshot, build: Callable[[], Index]
) -> Index:
    """The index of a data folder: the one that was kept, or a new one, which is kept.

    Where nothing can be written the new one serves this process alone, and says why.
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
            with disk_errors(path):
                make_record_folder(path.parent)
            write_atomically(path, content)
        except DiskError as error:
            why = getattr(error.__cause__, "strerror", None) or str(error)
            continue
        return _load_index(path, snapshot) or index
    # hashed now, as one on disk is: sizes may later stand for images that are set aside
    return replace(index, sha256=index.hash_entries(), save_error=why)


def find_record_folders(root: Path) -> list[Path]:
    """Where what is known of a data folder is kept: beside the data, else in the user's cache."""
    beside, cache = root / PHALANX_FOLDER, find_user_cache()
    if cache is None:
        return [beside]
    key = hashlib.sha256(str(root.resolve()).encode(errors="surrogateescape")).hexdigest()[:16]
    return [beside, cache / key]


def make_record_folder(folder: Path) -> None:
    """Create such a folder; OSError where that fails, or where only root could write."""
    place = folder if folder.exists() else folder.parent
    if place.exists() and not place.stat().st_mode & _ANYBODY_WRITES:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
    folder.mkdir(parents=True, exist_ok=True)


def _to_bytes(index: Index, snapshot: Snapshot) -> bytes:
    """The index as a file."""
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
    """The index in a file; None where there is none, or none that fits the snapshot."""
    try:
        content = copy_to_memory(path)
    except (OSError, ValueError):  # there is none, or it is empty
        return None
    try:
        return _parse_index(memoryview(content), snapshot)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError):
        return None  # its checksum fits, and it says nonsense: not of ours


def _parse_index(content: memoryview, snapshot: Snapshot | _TakeSnapshot) -> Index | None:
    """The index of these bytes; None where they are damaged, or do not fit the snapshot."""
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

    first_label: the number that the files give the first class, to speak of labels as they do.
    limits: how large an image may be; upright: whether images are turned as their EXIF says.
    Whoever opens the source may set others.
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
        """The image as RGB; raises BadImage when it cannot be read or decoded."""
        data, max_pixels = self.encoded(index), self.limits.max_pixels
        return decode(data, self.name(index), max_pixels=max_pixels, upright=self.upright)

    def image(self, index: int) -> Image:
        """The image, to be decoded as far as it is needed; raises BadImage."""
        return self.to_image(index, self.encoded(index))

    def to_image(self, index: int, data: bytes) -> Image:
        """The image of bytes that `encoded` gave, to be decoded as far as it is needed."""
        max_pixels = self.limits.max_pixels
        return EncodedImage(data, self.name(index), max_pixels=max_pixels, upright=self.upright)

    def encoded(self, index: int) -> bytes:
        """The bytes of the image's file, or of its piece of one."""
        file, size = int(self.index.file_numbers[index]), int(self.index.sizes[index])
        if self.index.names is None:
            path = self.root / self.index.files[file]
            return read_image_file(path, self.name(index), self.limits)
        if size < 0:
            raise self.known_bad(index)
        self.limits.refuse_too_large(size, self.name(index))
        try:
            with self._lock:  # another thread may close what this one is about to read
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
        """The CRC-32C of an image's bytes, of which `image` was made."""
        return crc32c(
            image.data if isinstance(image, EncodedImage) else np.ascontiguousarray(image)
        )

    def fault(self, index: int) -> int:
        """What the index knows to be wrong with an image, BAD_CHECKSUM say; 0 for nothing."""
        return 0 if self.index.names is None else min(0, int(self.index.sizes[index]))

    def known_bad(self, index: int) -> BadImage:
        """The error to raise for an image that the index knows to be bad."""
        why = _FAULT_REASONS[self.fault(index)].format(
            label=int(self.labels[index]) + self.first_label,
            classes=len(self.classes),
            first=self.first_label,
        )
        return BadImage(self.name(index), why)

    def prefetch(self, indices: list[int]) -> None:
        """Ask the system to read images ahead, where they are pieces of larger files."""
        if self.index.names is None or not hasattr(os, "posix_fadvise"):
            return
        for index in indices:
            with suppress(OSError), self._lock:  # raised when it is read
                offset, size = int(self.index.offsets[index]), int(self.index.sizes[index])
                descriptor = self._descriptor(int(self.index.file_numbers[index]))
                os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)

    def take(self, numbers: NDArray[np.int64]) -> Self:
        """The source of some of its images, in that order."""
        some = copy(self)
        some._open_files, some._lock = OrderedDict(), Lock()
        some.index = self.index.take(numbers)
        some.labels = some.index.labels
        return some

    def _descriptor(self, file: int) -> int:
        """An open file that holds many images; the one unused longest is closed for it."""
        if file not in self._open_files:
            if len(self._open_files) == _MAX_OPEN_FILES:
                os.close(self._open_files.popitem(last=False)[1])
            self._open_files[file] = open_regular(self.root / self.index.files[file])
        self._open_files.move_to_end(file)
        return self._open_files[file]

    def name(self, index: int) -> str:
        """What a person can find the image by."""
        return self.index.name(index)

    def box(self, index: int) -> Box | None:
        """The part of the image that holds its object."""
        if self.index.boxes is None or np.isnan(self.index.boxes[index, 0]):
            return None
        left, top, right, bottom = map(float, self.index.boxes[index])
        return left, top, right, bottom

    def fingerprint(self) -> dict[str, Any]:
        """Counts, and a hash that changes when an image comes, goes or changes its size."""
        return self.index.fingerprint()

    def __del__(self) -> None:
        for descriptor in self._open_files.values():
            os.close(descriptor)
