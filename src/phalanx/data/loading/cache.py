"""The cache of encoded images in memory shared by several processes (--dataset-cache).

The process that reads an image first puts it there. Its offset follows from the index, so no lock
is needed: two processes that read the same image at once write the same bytes.
"""

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.data.formats.file_bytes import open_anonymous_memory
from phalanx.data.formats.sources import Source, Split
from phalanx.errors import ConfigError
from phalanx.units import format_bytes

_MAX_FREE_FRACTION = 0.8  # of the free memory; the rest is left to training
_OFFSET = np.dtype(np.int64)


class ImageCache:
    """One split's images in shared memory: offsets, flags of which are cached, and bytes."""

    def __init__(self, memory: mmap.mmap, begin: int, images: int):
        flags_begin = begin + (images + 1) * _OFFSET.itemsize
        self.offsets = np.frombuffer(memory, _OFFSET, images + 1, begin)
        self._is_cached = np.frombuffer(memory, np.uint8, images, flags_begin)
        self._memory, self._begin = memory, flags_begin + images

    def get(self, index: int) -> bytes | None:
        """The bytes of an image; None if it is not cached."""
        return self._memory[self._range(index)] if self._is_cached[index] else None

    def put(self, index: int, data: bytes) -> None:
        """Cache the bytes of an image, unless the size of its file has changed."""
        place = self._range(index)
        if place.stop - place.start == len(data):
            self._memory[place] = data
            self._is_cached[index] = 1  # last: a process that sees the flag finds all bytes

    def _range(self, index: int) -> slice:
        begin, end = self.offsets[index : index + 2].tolist()
        return slice(self._begin + begin, self._begin + end)


class SharedCaches:
    """The memory of the caches of both splits; workers open it with `handle`.

    processes: how many, including this one, have such a cache of their own.
    """

    def __init__(self, sources: dict[Split, Source], where: str, processes: int = 1):
        sizes = {split: _find_sizes(source) for split, source in sources.items()}
        total = sum(int(column.sum()) for column in sizes.values())
        if not total and any(is_cacheable(source) and len(source) for source in sources.values()):
            raise ConfigError(
                f"--dataset-cache: the index of {where} does not record how large its images are; "
                "leave the option out, or `phalanx data build --to packed`"
            )
        refuse_too_large(total * processes, read_free_memory(), where)
        self.handle: dict[str, Any] = {"splits": {}}
        end = 0
        for split, column in sizes.items():
            self.handle["splits"][split] = (end, len(column))
            end += (len(column) + 1) * _OFFSET.itemsize + len(column) + int(column.sum())
            end += -end % _OFFSET.itemsize
        self._file = open_anonymous_memory(end)
        self.handle |= {"fd": self._file.fileno(), "bytes": end}
        self.caches = open_caches(self.handle)
        for split, column in sizes.items():
            np.cumsum(column, out=self.caches[split].offsets[1:])

    def close(self) -> None:
        """Close the file descriptor; the memory is freed with the last process that maps it."""
        self._file.close()


def open_caches(handle: dict[str, Any]) -> dict[str, ImageCache]:
    """The caches by split, in this process."""
    memory = mmap.mmap(handle["fd"], handle["bytes"])
    return {split: ImageCache(memory, *layout) for split, layout in handle["splits"].items()}


def is_cacheable(source: Source) -> bool:
    """Whether a source's images are encoded files, not raw pixels in memory or in a mapped file."""
    return hasattr(source, "read_encoded") and not getattr(source, "raw", False)


def _find_sizes(source: Source) -> np.ndarray:
    """The size of each encoded image; zeros for a source that needs no cache."""
    if not is_cacheable(source):
        return np.zeros(len(source), _OFFSET)
    sizes: np.ndarray = np.asarray(source.index.sizes, _OFFSET)  # type: ignore[attr-defined]
    too_large = source.limits.is_too_large(sizes)  # type: ignore[attr-defined]
    return np.where(too_large, 0, np.maximum(sizes, 0))  # damaged images have none


def refuse_too_large(total: int, free: int, where: str) -> None:
    """Raise ConfigError if the images do not fit into memory."""
    if total > _MAX_FREE_FRACTION * free:
        raise ConfigError(
            f"--dataset-cache: {where} needs {format_bytes(total)}, but may use only "
            f"{_MAX_FREE_FRACTION:.0%} of the {format_bytes(free)} of free memory; leave the "
            "option out, or make the images smaller with `phalanx data build --to packed "
            "--short-side 256`"
        )


def read_free_memory() -> int:
    """Free memory in bytes: that of the system, or of the container if it is limited."""
    facts = dict(line.split(":") for line in _read_lines("/proc/meminfo"))
    if "MemAvailable" not in facts:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = int(facts["MemAvailable"].split()[0]) * 1024
    group = [_read_lines(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current")]
    if all(lines and lines[0].isdigit() for lines in group):
        stat = dict(line.split() for line in _read_lines("/sys/fs/cgroup/memory.stat"))
        reclaimable = int(stat.get("inactive_file", 0))  # page cache, which can be freed
        free = min(free, int(group[0][0]) - int(group[1][0]) + reclaimable)
    return free


def _read_lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().split("\n")[:-1]
    except OSError:
        return []
