"""Checksums of files, and copies of files in memory that changes on disk do not affect.

A process that reads a mapped file which is truncated meanwhile is killed (SIGBUS). An index, which
is read all the time, is therefore copied once into anonymous memory; worker processes inherit the
copy of the process that starts them.
"""

import mmap
import os
import tempfile
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary, finalize

try:
    import google_crc32c
except ImportError:  # reported when a checksum is needed: datasets in memory need none
    google_crc32c = None  # type: ignore[assignment]

from phalanx.data.formats.image_file import open_data_file
from phalanx.errors import DataError

_INHERITED: dict[str, tuple[int, int]] = {}  # by key: descriptor and size of the parent's copies


class _SharedCopy(mmap.mmap):
    """A copy of a file, or of its end, in memory that can be passed to other processes."""

    memory: Any = None  # the anonymous file; it is closed with the copy


_copies: WeakValueDictionary[str, _SharedCopy] = WeakValueDictionary()


def crc32c(data: Any) -> int:
    """The CRC-32C checksum of bytes.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    if google_crc32c is None:
        raise DataError(
            "images are checked with google-crc32c, which is missing; pip install google-crc32c"
        )
    return int(google_crc32c.value(data))


def copy_to_memory(path: Path, begin: int = 0) -> _SharedCopy:
    """A copy of a file from byte `begin` on; shared while it is in use and the file is unchanged.

    Raises OSError, and ValueError if there is nothing to copy.
    """
    with open_data_file(path) as file:
        stat = os.fstat(file.fileno())
        key = f"{path.absolute()}\0{begin}\0{stat.st_size}\0{stat.st_mtime_ns}"
        found = _copies.get(key)
        if found is None and key in _INHERITED:
            found = _SharedCopy(*_INHERITED[key])
        elif found is None:
            file.seek(begin)
            content = file.read(stat.st_size - begin)
            if not content:
                raise ValueError(f"{path} is empty")
            memory = open_anonymous_memory(len(content))
            found = _SharedCopy(memory.fileno(), len(content))
            found[:] = content
            found.memory = memory
            finalize(found, memory.close)
        _copies[key] = found
        return found


def list_copies() -> dict[str, _SharedCopy]:
    """The copies that this process has made and still uses."""
    return {key: copy for key, copy in _copies.items() if copy.memory is not None}


def inherit_copies(copies: dict[str, tuple[int, int]]) -> None:
    """In a worker: use the parent's copies (descriptor and size) instead of making them again."""
    _INHERITED.update(copies)


def open_anonymous_memory(size: int) -> Any:
    """An anonymous file, in memory if the system supports it: a crash leaves nothing behind."""
    if hasattr(os, "memfd_create"):
        memory = os.fdopen(os.memfd_create("phalanx"), "w+b")
    else:
        memory = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    os.ftruncate(memory.fileno(), size)
    return memory
