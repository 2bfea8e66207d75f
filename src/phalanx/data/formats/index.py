"""Where every image of a split lies: arrays in one file, mapped into memory by all processes.

The file is a magic word, the length of a JSON header, the header, and the arrays it lists, each at
a multiple of 64 bytes. It is built once, kept beside the data (or in a cache folder where that is
read-only) and built anew when its stamp no longer fits the files it describes.
"""

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.disk import write_atomically
from phalanx.errors import DiskError

_MAGIC = b"phalanxI"
_FORMAT = 1  # raise it when the layout changes: files of another one are built anew
_ALIGN = 64
PHALANX_FOLDER = ".phalanx"

Box = tuple[float, float, float, float]  # left, top, right, bottom in 0..1
Snapshot = list[
    list[Any]
]  # what the index was made from: name, size and time of each file or folder


@dataclass(frozen=True)
class StringArray:
    """Many strings in two arrays: no Python object until one is asked for."""

    letters: NDArray[np.uint8]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, place: int) -> str:
        begin = int(self.ends[place - 1]) if place else 0
        return bytes(self.letters[begin : int(self.ends[place])]).decode(errors="surrogateescape")


def pack_strings(words: Iterable[str]) -> StringArray:
    """The words one after the other."""
    encoded = [word.encode(errors="surrogateescape") for word in words]
    ends = np.cumsum([len(word) for word in encoded], dtype=np.int64)
    return StringArray(np.frombuffer(b"".join(encoded), np.uint8), ends)


@dataclass(frozen=True, kw_only=True)
class Index:
    """The images of one split: the file each lies in, where in it, and what it shows."""

    classes: tuple[str, ...]
    files: StringArray  # relative to the data folder
    names: StringArray | None = (
        None  # what an image is called inside its file; None: files hold one each
    )
    file_of: NDArray[np.int32]  # [N]
    offsets: NDArray[np.int64]  # [N], in bytes
    sizes: NDArray[np.int64]  # [N], in bytes
    labels: NDArray[np.int64]  # [N]
    boxes: NDArray[np.float32] | None = None  # [N, 4] left, top, right, bottom in 0..1; nan: none
    sha256: str = ""  # kept by an index on disk, where a million names are not hashed again
    unkept: str = ""  # why it could not be written to disk; empty: it was

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, place: int) -> str:
        """What a person can find an image by."""
        file = self.files[int(self.file_of[place])]
        return file if self.names is None else f"{file}:{self.names[place]}"

    def fingerprint(self) -> dict[str, Any]:
        """Counts, and a hash over names, sizes and labels; no image is opened."""
        digest = self.sha256 or _hash_entries(self)
        return {"images": len(self), "classes": len(self.classes), "sha256": digest}


def _hash_entries(index: Index) -> str:
    """sha256 over every image's name, size and label; runs are known by it, so it never changes."""
    digest = hashlib.sha256()
    sizes, labels = index.sizes.tolist(), index.labels.tolist()
    for place, (size, label) in enumerate(zip(sizes, labels, strict=True)):
        line = f"{index.name(place)}\0{size}\0{label}\n"
        digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()


def _to_bytes(index: Index, stamp: Snapshot) -> bytes:
    """The index as a file."""
    arrays = _arrays_of(index)
    header: dict[str, Any] = {
        "format": _FORMAT,
        "classes": index.classes,
        "stamp": stamp,
        "sha256": _hash_entries(index),
    }
    header["arrays"] = {name: [a.dtype.str, list(a.shape)] for name, a in arrays.items()}
    text = json.dumps(header).encode(errors="surrogateescape")
    out = bytearray(_MAGIC + len(text).to_bytes(8, "little") + text)
    for array in arrays.values():
        out += bytes(-len(out) % _ALIGN)
        out += np.ascontiguousarray(array).data
    return bytes(out)


def _arrays_of(index: Index) -> dict[str, NDArray[Any]]:
    """All arrays by name; those an index does without are left out."""
    found: dict[str, NDArray[Any] | None] = {
        "files.letters": index.files.letters,
        "files.ends": index.files.ends,
        "names.letters": index.names.letters if index.names else None,
        "names.ends": index.names.ends if index.names else None,
        "file_of": index.file_of,
        "offsets": index.offsets,
        "sizes": index.sizes,
        "labels": index.labels,
        "boxes": index.boxes,
    }
    return {name: array for name, array in found.items() if array is not None}


def _open_index(path: Path, stamp: Snapshot) -> Index | None:
    """The index in a file, mapped; None where there is none, or none that fits the stamp."""
    try:
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):  # an empty file cannot be mapped
        return None
    length = int.from_bytes(content[8:16], "little")
    if content[:8] != _MAGIC or 16 + length > len(content):
        return None
    header = json.loads(content[16 : 16 + length])
    if header["format"] != _FORMAT or header["stamp"] != stamp:
        return None
    arrays, place = {}, 16 + length
    for name, (dtype, shape) in header["arrays"].items():
        place += -place % _ALIGN
        count = int(np.prod(shape))
        if place + count * np.dtype(dtype).itemsize > len(content):
            return None  # cut short
        arrays[name] = np.frombuffer(content, dtype, count, place).reshape(shape)
        place += arrays[name].nbytes
    index = _from_arrays(tuple(header["classes"]), arrays)
    return replace(index, sha256=header["sha256"])


def _from_arrays(classes: tuple[str, ...], arrays: dict[str, NDArray[Any]]) -> Index:
    """The index that `arrays_of` took apart."""
    texts = {
        kind: StringArray(arrays.pop(f"{kind}.letters"), arrays.pop(f"{kind}.ends"))
        for kind in ("files", "names")
        if f"{kind}.ends" in arrays
    }
    return Index(classes=classes, **texts, **arrays)  # type: ignore[arg-type]


def load_or_build_index(
    root: Path, key: str, *, stamp: Snapshot, build: Callable[[], Index]
) -> Index:
    """The index of a data folder: the one that was kept, or a new one, which is kept.

    Where nothing can be written the new one serves this process alone, and says why.
    """
    places = [root / PHALANX_FOLDER / f"{key}.index", user_cache_folder(root) / f"{key}.index"]
    for place in places:
        found = _open_index(place, stamp)
        if found is not None:
            return found
    index = build()
    content, why = _to_bytes(index, stamp), ""
    for place in places:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(place, content)
        except (OSError, DiskError) as error:
            why = _reason_of(error)
            continue
        return _open_index(place, stamp) or index
    # hashed now, as one on disk is: sizes may later stand for images that are set aside
    return replace(index, sha256=_hash_entries(index), unkept=why)


def _reason_of(error: OSError | DiskError) -> str:
    """The system's own words for a write that failed."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return (cause.strerror if isinstance(cause, OSError) else None) or str(error)


def user_cache_folder(root: Path) -> Path:
    """Where the index of a folder that cannot be written to is kept."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = hashlib.sha256(str(root.resolve()).encode(errors="surrogateescape")).hexdigest()[:16]
    return base / "phalanx" / key


def snapshot_files(root: Path, paths: Iterable[Path]) -> Snapshot:
    """Name, size and time of files, to see later whether one of them has changed."""
    found = []
    for path in paths:
        facts = path.stat()
        found.append([path.relative_to(root).as_posix(), facts.st_size, facts.st_mtime_ns])
    return found
