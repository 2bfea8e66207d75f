"""Batches in the order of the training stream, filled here or by worker processes."""

from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import closing
from itertools import tee
from types import TracebackType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.data.formats.index import IndexedSource
from phalanx.data.formats.sources import Source, Split
from phalanx.data.loading.cache import SharedCaches
from phalanx.data.loading.prefetch import read_ahead
from phalanx.data.loading.reader import Batch, InputSpec, Reader, ReadingNotes, check_bad
from phalanx.data.loading.worker_pool import BatchRequest, Chunk, WorkerPool

_Walk = Generator[Batch, None, None]
_Empty = Callable[[tuple[int, ...]], NDArray[np.uint8]]
_STEPS_AHEAD = 2
_ROWS = 16  # of one task: few enough that several workers share a step
_CHUNKS_AHEAD = 4  # for each worker, so that none waits for the parent


class Filler(Protocol):
    """Makes images where they are needed, from what a reader knows."""

    immediate: bool  # whether a batch costs the host so little that no thread should make it

    def batches(self, wishes: Iterable[BatchRequest]) -> Iterator[Batch]:
        """The images that were wished for."""


class _HostFiller:
    """Fills memory of this process."""

    immediate = False

    def __init__(self, reader: Reader, empty: _Empty):
        self._reader, self._empty = reader, empty

    def batches(self, wishes: Iterable[BatchRequest]) -> Iterator[Batch]:
        """The images in arrays."""
        return map(self._fill, wishes)

    def _fill(self, wish: BatchRequest) -> Batch:
        pixels = self._empty((len(wish.keys), wish.size, wish.size, 3))
        rows = self._reader.fill(wish.keys, pixels)
        return Batch(pixels, rows.labels, rows.indices, wish.keys)


class Loader:
    """Gives the batches of a recipe: the same bytes for any number of workers.

    Use it as a context manager, or call close. One walk through the training steps and one
    through the validation images can be under way at a time; beginning another ends the first.

    rows: images of one task of a worker. cache: keep encoded images in memory. empty: where
    batches are put together, plain memory if not given. filler: makes the images itself, without
    workers.
    """

    def __init__(
        self,
        recipe: InputSpec,
        *,
        workers: int,
        max_bad: int | None = None,
        rows: int = _ROWS,
        cache: bool = False,
        empty: _Empty | None = None,
        filler: Callable[[Reader], Filler] | None = None,
    ):
        self.recipe = recipe
        self.workers = workers if filler is None else 0
        self.max_bad = max_bad
        self.rows = rows
        self._empty = empty or _plain_memory
        self._filler = filler or (lambda reader: _HostFiller(reader, self._empty))
        self._fillers: dict[Split, Filler] = {}
        self._caches: SharedCaches | None = None
        self._wants_cache = cache
        if cache:
            self._shared_caches()  # told before anything begins where it does not fit
        self.on_device = filler is not None  # where the images are made
        self._findings: dict[Split, ReadingNotes] = {
            "train": ReadingNotes(),
            "valid": ReadingNotes(),
        }
        self._readers: dict[Split, Reader] = {}
        self._walks: dict[Split, _Walk] = {}
        self._pool: WorkerPool | None = None

    @property
    def bad(self) -> dict[Split, dict[int, str]]:
        """The images of each split that could not be: index to name and reason."""
        return {split: findings.bad for split, findings in self._findings.items()}

    def look_again(self, names: Collection[str]) -> None:
        """Set training images aside that were bad before, and are still; raises as reading does."""
        if not names:  # to find them, all have to be named
            return
        reader = self.reader("train")
        for index in range(len(reader.source)):
            if reader.source.name(index) in names:
                reader.try_read(index)

    @property
    def notes(self) -> dict[Split, dict[int, str]]:
        """The first images of each split smaller than what the model sees."""
        return {split: findings.notes for split, findings in self._findings.items()}

    def unkept(self) -> list[str]:
        """A line on the index of the images, where it could not be kept on disk."""
        sources = [reader.source for reader in self._readers.copy().values()]
        indexed = [source for source in sources if isinstance(source, IndexedSource)]
        told = {
            source.root: source.index.save_error for source in indexed if source.index.save_error
        }
        return [
            f"the index of {root} could not be kept ({why}); it is built anew each time"
            for root, why in told.items()
        ]

    def source(self, split: Split) -> Source:
        """The images behind one split."""
        return self.reader(split).source

    def names(self, split: Split, indices: Iterable[int]) -> list[str]:
        """What a person can find each image by; a row without an image has no name."""
        source = self.source(split)
        return [source.name(int(index)) if index >= 0 else "" for index in indices]

    def steps_from(self, step: int, stop: int, *, micro_batch: int) -> Iterator[list[Batch]]:
        """For each step of step..stop-1, its micro-batches in slice order."""
        order = self.recipe.order
        if order is None or order.global_batch % micro_batch:
            raise ValueError(f"micro-batches of {micro_batch} do not tile a step of {order}")
        starts = range(0, order.global_batch, micro_batch)
        wishes = (
            BatchRequest(order.positions(s), self.recipe.size_at(s)) for s in range(step, stop)
        )
        for whole in self._walk("train", wishes):
            yield [_rows(whole, start, start + micro_batch) for start in starts]

    def evaluation(self, batch_size: int) -> Iterator[Batch]:
        """Every validation image once, in order; what is made here is padded to full batches."""
        images = len(self.source("valid"))
        wishes = (
            BatchRequest(
                np.arange(start, min(start + batch_size, images), dtype=np.int64),
                self.recipe.image_size,
            )
            for start in range(0, images, batch_size)
        )
        for batch in self._walk("valid", wishes):
            yield batch if self.on_device else _padded(batch, batch_size)

    def close(self) -> None:
        """End the workers; does nothing the second time."""
        if self._pool is not None:
            self._pool.close()
        while self._walks:
            self._walks.popitem()[1].close()
        for filler in self._fillers.values():
            getattr(filler, "close", lambda: None)()
        self._fillers, self._readers = {}, {}  # and with them the memory they hold
        if self._caches is not None:
            self._caches.close()
            self._caches = None

    def __enter__(self) -> "Loader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def reader(self, split: Split) -> Reader:
        """What reads one split here."""
        if split not in self._readers:
            self._readers[split] = Reader(
                self.recipe,
                split,
                findings=self._findings[split],
                max_bad=self.max_bad,
                cache=self._shared_caches().caches[split] if self._wants_cache else None,
            )
        return self._readers[split]

    def _shared_caches(self) -> SharedCaches:
        if self._caches is None:
            splits: tuple[Split, ...] = ("train", "valid")
            sources = {split: self.recipe.open(split) for split in splits}
            self._caches = SharedCaches(sources, self.recipe.data_dir or self.recipe.data)
        return self._caches

    def _walk(self, split: Split, wishes: Iterable[BatchRequest]) -> _Walk:
        if split in self._walks:
            self._walks.pop(split).close()
        if self.workers:
            self._walks[split] = self._fill_by_workers(split, wishes)
        else:
            here = self._fill_here(split, wishes)
            self._walks[split] = here if self.immediate(split) else read_ahead(here)
        return self._walks[split]

    def immediate(self, split: Split) -> bool:
        """Whether batches are there as soon as they are asked for."""
        return not self.workers and self._filler_of(split).immediate

    def _fill_here(self, split: Split, wishes: Iterable[BatchRequest]) -> _Walk:
        yield from self._filler_of(split).batches(wishes)

    def _filler_of(self, split: Split) -> Filler:
        if split not in self._fillers:
            self._fillers[split] = self._filler(self.reader(split))
        return self._fillers[split]

    def _fill_by_workers(self, split: Split, wishes: Iterable[BatchRequest]) -> _Walk:
        reader = self.reader(split)  # a folder that cannot be read is told before workers start
        ahead, behind = tee(wishes)
        with closing(self._started_pool().stream(split, self._tasks(ahead))) as chunks:
            for wish in behind:
                batch = self._join(wish, chunks)
                check_bad(reader.findings.bad, reader.max_bad)
                yield batch

    def _join(self, wish: BatchRequest, chunks: Iterator[Chunk]) -> Batch:
        pixels = self._empty((len(wish.keys), wish.size, wish.size, 3))
        labels, indices = np.empty_like(wish.keys), np.empty_like(wish.keys)
        for start in range(0, len(wish.keys), self.rows):
            chunk = next(chunks)
            end = start + len(chunk.labels)
            pixels[start:end] = chunk.pixels
            labels[start:end] = chunk.labels
            indices[start:end] = chunk.indices
        return Batch(pixels, labels, indices, wish.keys)

    def _tasks(self, wishes: Iterable[BatchRequest]) -> Iterator[BatchRequest]:
        """Wishes cut to what a worker prepares at a time."""
        for keys, size in wishes:
            for start in range(0, len(keys), self.rows):
                yield BatchRequest(keys[start : start + self.rows], size)

    def _started_pool(self) -> WorkerPool:
        if self._pool is None:
            order = self.recipe.order
            step_tasks = -(-order.global_batch // self.rows) if order else 0
            self._pool = WorkerPool(
                self.recipe,
                self._findings,
                workers=self.workers,
                rows=self.rows,
                depth=_CHUNKS_AHEAD * self.workers + _STEPS_AHEAD * step_tasks,
                start={
                    "max_bad": self.max_bad,
                    "cache": self._caches.spec if self._caches else None,
                },
            )
        return self._pool


def _plain_memory(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """An array to fill."""
    return np.empty(shape, np.uint8)


def _rows(batch: Batch, start: int, stop: int) -> Batch:
    return Batch(
        batch.pixels[start:stop],
        batch.labels[start:stop],
        batch.indices[start:stop],
        batch.positions[start:stop],
        batch.ready,
    )


def _padded(batch: Batch, size: int) -> Batch:
    missing = size - len(batch.labels)
    if not missing:
        return batch
    return Batch(
        np.pad(batch.pixels, ((0, missing), (0, 0), (0, 0), (0, 0))),
        np.pad(batch.labels, (0, missing)),
        np.pad(batch.indices, (0, missing), constant_values=-1),
        np.pad(batch.positions, (0, missing), constant_values=-1),
    )
