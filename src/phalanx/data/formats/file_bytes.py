"""Bytes of files: their checksum, and copies that no change on the disk can reach.

Whoever reads a mapped file that is cut short meanwhile is killed (SIGBUS). What is looked at all
the time, an index, is therefore copied once into memory without a name; worker processes are given
the copy of the process that starts them.
"""

import mmap
import os
import tempfile
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary, finalize

try:
    import google_crc32c
except ImportError:  # told when a checksum is taken: sets in memory do without
    google_crc32c = None  # type: ignore[assignment]

from phalanx.data.formats.image_file import open_data_file
from phalanx.errors import DataError

_GIVEN: dict[str, tuple[int, int]] = {}  # by key: descriptor and size of what the parent copied


class _SharedCopy(mmap.mmap):
    """A copy of a file, or of its end, in memory that other processes can be given."""

    memory: Any = None  # the file without a name; it is closed with the copy


_copies: WeakValueDictionary[str, _SharedCopy] = WeakValueDictionary()


def crc32c(data: Any) -> int:
    """The CRC-32C of some bytes.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    if google_crc32c is None:
        raise DataError(
            "images are checked with google-crc32c, which is missing; pip install google-crc32c"
        )
    return int(google_crc32c.value(data))


def copy_to_memory(path: Path, begin: int = 0) -> _SharedCopy:
    """A file from some byte on; the same copy while anybody uses it and the file does not change.

    Raises OSError, and ValueError where there is nothing.
    """
    with open_data_file(path) as file:
        stat = os.fstat(file.fileno())
        key = f"{path.absolute()}\0{begin}\0{stat.st_size}\0{stat.st_mtime_ns}"
        found = _copies.get(key)
        if found is None and key in _GIVEN:
            found = _SharedCopy(*_GIVEN[key])
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
    """The copies that this process made and uses."""
    return {key: copy for key, copy in _copies.items() if copy.memory is not None}


def take_copies(given: dict[str, tuple[int, int]]) -> None:
    """In a worker: use these copies, each a descriptor and a size, instead of making them again."""
    _GIVEN.update(given)


def open_anonymous_memory(size: int) -> Any:
    """A file without a name, in memory where the system can: no crash leaves it behind."""
    if hasattr(os, "memfd_create"):
        memory = os.fdopen(os.memfd_create("phalanx"), "w+b")
    else:
        memory = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    os.ftruncate(memory.fileno(), size)
    return memory
