"""Opens data files: only regular files, and images only up to a size limit."""

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from phalanx.catalog.datasets import MAX_FILE_MIB, MAX_PIXELS
from phalanx.data.formats.decode import BadImage
from phalanx.units import format_bytes

_OPEN_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_SPECIAL_FILES = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


@dataclass(frozen=True, kw_only=True)
class ReadLimits:
    """The largest file size and number of pixels of an image; a larger one is bad."""

    max_file_mib: int = MAX_FILE_MIB
    max_pixels: int = MAX_PIXELS

    def is_too_large(self, size: int) -> bool:
        """Whether a file of so many bytes exceeds the limit."""
        return size > self.max_file_mib * 2**20

    def refuse_too_large(self, size: int, name: str) -> None:
        """Raise BadImage for an image whose file exceeds the limit."""
        if self.is_too_large(size):
            most = f"{self.max_file_mib:,} MiB"
            raise BadImage(name, f"{format_bytes(size)}, over the {most} of --max-file-mib")


DEFAULT_LIMITS = ReadLimits()


def open_regular(path: Path) -> int:
    """A descriptor for reading a regular file; raises OSError for anything else, never blocks.

    The kind of file is checked before, since merely opening a device can start something, and
    again when it is open, since the file may have been replaced.
    """
    refuse_special(path)
    descriptor = os.open(path, _OPEN_FLAGS)
    try:
        _refuse_mode(os.fstat(descriptor).st_mode, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_data_file(path: Path) -> BinaryIO:
    """A regular file, opened for reading; raises OSError for anything else."""
    return os.fdopen(open_regular(path), "rb")


def read_data_file(path: Path) -> bytes:
    """The bytes of a regular file; raises OSError for anything else."""
    with open_data_file(path) as file:
        return file.read()


def refuse_special(path: Path) -> None:
    """Raise OSError for a pipe, a device or anything else that is not a regular file."""
    _refuse_mode(os.stat(path).st_mode, path)


def _refuse_mode(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        kind = _SPECIAL_FILES.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"{kind}, not a regular file", str(path))


def read_image_file(path: Path, name: str, limits: ReadLimits) -> bytes:
    """The bytes of an image file; raises BadImage if it cannot be read or is too large."""
    try:
        descriptor = open_regular(path)
        try:
            size = os.fstat(descriptor).st_size
            limits.refuse_too_large(size, name)
            data = os.read(descriptor, size + 1)
            # a network file system may return fewer bytes; one byte too many shows that it grew
            while 0 < len(data) <= size and (more := os.read(descriptor, size + 1 - len(data))):
                data += more
        finally:
            os.close(descriptor)
    except OSError as cause:
        raise BadImage(name, cause.strerror or str(cause)) from None
    if len(data) > size:
        raise BadImage(name, f"has changed: it grew beyond {size:,} bytes while it was being read")
    return data
