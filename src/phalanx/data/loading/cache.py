"""--dataset-cache: the encoded images of a set, kept in memory that all workers share.

An image is put there by whoever reads it first. Its place is fixed by the index, so nobody waits:
two that read the same image at once write the same bytes.
"""

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.data.formats.sources import Source, Split
from phalanx.data.loading.shared_memory import anonymous_memory
from phalanx.errors import ConfigError
from phalanx.units import format_bytes

_SHARE_OF_FREE = 0.8  # the rest is left to the training itself
_PLACE = np.dtype(np.int64)


class Cache:
    """One split's images in shared memory: their places, whether they are there, their bytes."""

    def __init__(self, memory: mmap.mmap, begin: int, images: int):
        bytes_begin = begin + (images + 1) * _PLACE.itemsize + images
        self.places = np.frombuffer(memory, _PLACE, images + 1, begin)
        self.there = np.frombuffer(memory, np.uint8, images, bytes_begin - images)
        self._memory, self._begin = memory, bytes_begin

    def get(self, index: int) -> bytes | None:
        """The bytes of an image, if it was put there."""
        if not self.there[index]:
            return None
        return self._memory[self._begin + self.places[index] : self._begin + self.places[index + 1]]

    def put(self, index: int, data: bytes) -> None:
        """Keep the bytes of an image; a file that changed its size has no place here."""
        begin, end = (self._begin + int(place) for place in self.places[index : index + 2])
        if end - begin == len(data):
            self._memory[begin:end] = data
            self.there[index] = 1  # last: whoever sees it finds all bytes


class SharedCaches:
    """The memory behind the caches of both splits; `spec` is what a worker opens it by."""

    def __init__(self, sources: dict[Split, Source], where: str):
        sizes = {split: _sizes_of(source) for split, source in sources.items()}
        wanted = sum(int(column.sum()) for column in sizes.values())
        if not wanted and any(is_cached(source) and len(source) for source in sources.values()):
            raise ConfigError(
                f"--dataset-cache: the index of {where} does not know how large its images are; "
                "leave the option away, or `phalanx data build --to packed`"
            )
        refuse_unfit(wanted, free_memory(), where)
        self.spec: dict[str, Any] = {"splits": {}}
        end = 0
        for split, column in sizes.items():
            self.spec["splits"][split] = (end, len(column))
            end += (len(column) + 1) * _PLACE.itemsize + len(column) + int(column.sum())
            end += -end % _PLACE.itemsize
        self._file = anonymous_memory(end)
        self.spec |= {"fd": self._file.fileno(), "bytes": end}
        self.caches = open_caches(self.spec)
        for split, column in sizes.items():
            np.cumsum(column, out=self.caches[split].places[1:])

    def close(self) -> None:
        """Give the descriptor back; the memory goes with the last process that has it."""
        self._file.close()


def open_caches(spec: dict[str, Any]) -> dict[str, Cache]:
    """The caches by split, in this process."""
    memory = mmap.mmap(spec["fd"], spec["bytes"])
    return {split: Cache(memory, *place) for split, place in spec["splits"].items()}


def is_cached(source: Source) -> bool:
    """Whether a source's images are files or pieces of them, not pixels in memory or mapped."""
    return hasattr(source, "encoded") and not getattr(source, "raw", False)


def _sizes_of(source: Source) -> np.ndarray:
    """The size of each encoded image; nothing for a source that needs no cache."""
    if not is_cached(source):
        return np.zeros(len(source), _PLACE)
    sizes: np.ndarray = np.asarray(source.index.sizes, _PLACE)  # type: ignore[attr-defined]
    return np.maximum(sizes, 0)  # damaged images have none


def refuse_unfit(wanted: int, free: int, where: str) -> None:
    """Raise ConfigError for images that do not fit into memory."""
    if wanted > _SHARE_OF_FREE * free:
        raise ConfigError(
            f"--dataset-cache: {where} takes {format_bytes(wanted)}, of {format_bytes(free)} free "
            f"memory at most {_SHARE_OF_FREE:.0%} are used; leave the option away, or make the "
            "images smaller with `phalanx data build --to packed --short-side 256`"
        )


def free_memory() -> int:
    """Bytes that can still be used: what the system has, or what a container may have."""
    facts = dict(line.split(":") for line in _lines("/proc/meminfo"))
    if "MemAvailable" not in facts:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = int(facts["MemAvailable"].split()[0]) * 1024
    group = [_lines(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current")]
    if all(lines and lines[0].isdigit() for lines in group):
        kept = dict(line.split() for line in _lines("/sys/fs/cgroup/memory.stat"))
        given_back = int(kept.get("inactive_file", 0))  # files that were read; they make room
        free = min(free, int(group[0][0]) - int(group[1][0]) + given_back)
    return free


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().split("\n")[:-1]
    except OSError:
        return []
