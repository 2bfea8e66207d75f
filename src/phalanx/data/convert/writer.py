"""How a split is written in any output format: shard by shard, each complete or absent.

A shard is a file that is written under a temporary name, synced and renamed. An interrupted build
continues with the first missing shard. Formats that do not consist of shards (a folder of images,
one packed file) write their images in blocks; their shards are small records of these blocks,
kept in .phalanx/blocks-SPLIT/ until the split is finished.
"""

import math
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from phalanx.data.convert.sample import Sample
from phalanx.data.formats.index import PHALANX_FOLDER
from phalanx.disk import remove_quietly, sync_folder, write_atomically
from phalanx.errors import DataError

# Images of a block, in formats without shards. An interrupted build depends on it: if you change
# it, raise the format of build.json.
BLOCK_IMAGES = 1024


@dataclass(kw_only=True)
class ShardWriter(ABC):
    """Writes one split in one format; all its state is on disk."""

    only_jpeg: ClassVar[bool]  # False: images keep their format
    takes_shards: ClassVar[bool] = False  # whether the number of shards can be chosen
    shard_mib: ClassVar[int] = 128  # size of a shard by default
    image_overhead: ClassVar[int] = 0  # bytes per image in a shard besides the image itself

    out: Path
    split: str
    count: int  # images
    classes: tuple[str, ...]
    source: dict[str, Any] = field(default_factory=dict)  # the fingerprint of the source
    lengths: dict[str, int] = field(default_factory=dict)  # number of images of every split
    shards: int | None = None  # how many; None: blocks of BLOCK_IMAGES
    short_side: int | None = None
    raw: bool = False
    number_files: bool = False  # put a number before each file name

    def __post_init__(self) -> None:
        self.blocks = self.out / PHALANX_FOLDER / f"blocks-{self.split}"
        self.bounds = self.choose_bounds()
        self.num_shards = len(self.bounds) - 1

    def choose_bounds(self) -> list[int]:
        """The first image of each shard, and the number of images."""
        wanted = self.shards
        step = BLOCK_IMAGES if wanted is None else max(1, -(-self.count // wanted))
        return [*range(0, self.count, step), self.count]

    @classmethod
    def split_shards(cls, asked: int, split: str) -> int:
        """The number of shards of a split if `asked` are requested."""
        return asked

    @classmethod
    def count_shards(cls, size: float, split: str) -> int:
        """The default number of shards of a split of `size` bytes."""
        return max(1, math.ceil(size / (cls.shard_mib * 2**20)))

    def shard_path(self, number: int) -> Path:
        """The path of a complete shard."""
        return self.blocks / f"{number:06}"

    def count_whole_shards(self) -> int:
        """The number of complete shards before the first missing one."""
        missing = (n for n in range(self.num_shards) if not self.shard_path(n).exists())
        return next(missing, self.num_shards)

    def is_finished(self) -> bool:
        """Whether nothing is left to do."""
        return self.count_whole_shards() == self.num_shards

    @abstractmethod
    def start(self, whole_shards: int) -> None:
        """Prepare the folder for writing after so many complete shards."""

    @abstractmethod
    def write_shard(self, file: BinaryIO, number: int, samples: Iterator[Sample]) -> None:
        """Write the samples of a shard; `file` gets its final name afterwards."""

    def finish(self) -> None:
        """Make the result from the complete shards; nothing to do if they are the result."""
        return

    @abstractmethod
    def find_files(self) -> Iterable[Path]:
        """The files of this split, complete or not, except the records of blocks."""

    def write(self, samples_from: Callable[[int], Iterator[Sample]]) -> None:
        """Write what is missing; `samples_from` returns the samples from a number on."""
        if not self.is_finished():
            whole = self.count_whole_shards()
            if not whole:
                self._remove_records()
            try:
                self.start(whole)
                first = self.bounds[whole]
                samples = _check_count(samples_from(first), self.count - first, self.out)
                for number in range(whole, self.num_shards):
                    self._write_whole(number, samples)
                self.finish()
            except BaseException:
                if not (self.is_finished() or self.count_whole_shards()):
                    self.remove()  # nothing that a later build could continue
                raise
        self._remove_records()

    def _write_whole(self, number: int, samples: Iterator[Sample]) -> None:
        """Write a shard, which gets its name once it is on disk."""
        path = self.shard_path(number)
        part = path.with_name(f"{path.name}.part")
        path.parent.mkdir(parents=True, exist_ok=True)
        images = self.bounds[number + 1] - self.bounds[number]
        try:
            with part.open("wb") as file:
                self.write_shard(file, number, islice(samples, images))
                if number == self.num_shards - 1:
                    next(samples, None)  # one too many is an error as well
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            remove_quietly(part)
            raise
        sync_folder(path.parent)

    def remove(self) -> None:
        """Remove everything that was written of the split."""
        self._remove_records()
        for path in self.find_files():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _remove_records(self) -> None:
        shutil.rmtree(self.blocks, ignore_errors=True)
        for path in self.blocks.parent.glob(f"*-{self.split}.json*"):
            path.unlink()  # records of an unfinished build by an older release


def _check_count(samples: Iterator[Sample], count: int, out: Path) -> Iterator[Sample]:
    """The same samples; raises DataError if there are not exactly `count`."""
    given = 0
    for given, sample in enumerate(samples, 1):
        if given > count:
            break
        yield sample
    if given != count:
        more = "more than" if given > count else f"{given:,} instead of"
        raise DataError(
            f"{out}: the source gave {more} {count:,} images; it changed while it was being read; "
            "build again"
        )


def write_class_names(path: Path, classes: tuple[str, ...]) -> None:
    """Write a file with one class name per line."""
    unusable = [name for name in classes if "\n" in name or not name.strip()]
    if unusable:
        raise DataError(f"{path}: {unusable[0]!r} cannot be a line of this file; rename the class")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(f"{name}\n" for name in classes))
