"""Batches in the order of the training stream, filled here or by worker processes."""

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from itertools import tee
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from phalanx.data.ahead import read_ahead
from phalanx.data.batches import Batch, Findings, Reader, Recipe, check_bad
from phalanx.data.pool import ROWS, Chunk, Pool
from phalanx.data.sources import Source, Split

Keys = NDArray[np.int64]
Walk = Generator[Batch, None, None]
STEPS_AHEAD = 2
CHUNKS_AHEAD = 4  # for each worker, so that none waits for the parent


class Loader:
    """Gives the batches of a recipe: the same bytes for any number of workers.

    Use it as a context manager, or call close. One walk through the training steps and one
    through the validation images can be under way at a time; beginning another ends the first.
    """

    def __init__(self, recipe: Recipe, *, workers: int, max_bad: int | None = None):
        self.recipe = recipe
        self.workers = workers
        self.max_bad = max_bad
        self._findings: dict[Split, Findings] = {"train": Findings(), "valid": Findings()}
        self._readers: dict[Split, Reader] = {}
        self._walks: dict[Split, Walk] = {}
        self._pool: Pool | None = None

    @property
    def bad(self) -> dict[Split, dict[int, str]]:
        """The images of each split that could not be: index to name and reason."""
        return {split: findings.bad for split, findings in self._findings.items()}

    @property
    def notes(self) -> dict[Split, dict[int, str]]:
        """The first images of each split smaller than what the model sees."""
        return {split: findings.notes for split, findings in self._findings.items()}

    def source(self, split: Split) -> Source:
        """The images behind one split."""
        return self._reader(split).source

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
        for whole in self._walk("train", map(order.positions, range(step, stop))):
            yield [_rows(whole, start, start + micro_batch) for start in starts]

    def evaluation(self, batch_size: int) -> Iterator[Batch]:
        """Every validation image once, in order; the last batch is padded to full size."""
        images = len(self.source("valid"))
        groups = (
            np.arange(start, min(start + batch_size, images), dtype=np.int64)
            for start in range(0, images, batch_size)
        )
        for batch in self._walk("valid", groups):
            yield _padded(batch, batch_size)

    def close(self) -> None:
        """End the workers; does nothing the second time."""
        if self._pool is not None:
            self._pool.close()
        while self._walks:
            self._walks.popitem()[1].close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _reader(self, split: Split) -> Reader:
        if split not in self._readers:
            self._readers[split] = Reader(
                self.recipe, split, findings=self._findings[split], max_bad=self.max_bad
            )
        return self._readers[split]

    def _walk(self, split: Split, groups: Iterable[Keys]) -> Walk:
        if split in self._walks:
            self._walks.pop(split).close()
        if self.workers:
            self._walks[split] = self._fill_by_workers(split, groups)
        else:
            self._walks[split] = read_ahead(self._fill_here(split, groups))
        return self._walks[split]

    def _fill_here(self, split: Split, groups: Iterable[Keys]) -> Walk:
        reader = self._reader(split)
        for keys in groups:
            pixels = self._empty(len(keys))
            rows = reader.fill(keys, pixels)
            yield Batch(pixels, rows.labels, rows.indices, keys)

    def _fill_by_workers(self, split: Split, groups: Iterable[Keys]) -> Walk:
        reader = self._reader(split)  # a folder that cannot be read is told before workers start
        ahead, behind = tee(groups)
        with closing(self._started_pool().stream(split, _chunks(ahead))) as chunks:
            for keys in behind:
                batch = self._join(keys, chunks)
                check_bad(reader.findings.bad, reader.max_bad)
                yield batch

    def _join(self, keys: Keys, chunks: Iterator[Chunk]) -> Batch:
        pixels = self._empty(len(keys))
        labels, indices = np.empty_like(keys), np.empty_like(keys)
        for start in range(0, len(keys), ROWS):
            chunk = next(chunks)
            end = start + len(chunk.labels)
            pixels[start:end] = chunk.pixels
            labels[start:end] = chunk.labels
            indices[start:end] = chunk.indices
        return Batch(pixels, labels, indices, keys)

    def _empty(self, rows: int) -> NDArray[np.uint8]:
        size = self.recipe.image_size
        return np.empty((rows, size, size, 3), np.uint8)

    def _started_pool(self) -> Pool:
        if self._pool is None:
            order = self.recipe.order
            step_chunks = -(-order.global_batch // ROWS) if order else 0
            self._pool = Pool(
                self.recipe,
                self._findings,
                workers=self.workers,
                depth=CHUNKS_AHEAD * self.workers + STEPS_AHEAD * step_chunks,
                max_bad=self.max_bad,
            )
        return self._pool


def _chunks(groups: Iterable[Keys]) -> Iterator[Keys]:
    for keys in groups:
        for start in range(0, len(keys), ROWS):
            yield keys[start : start + ROWS]


def _rows(batch: Batch, start: int, stop: int) -> Batch:
    return Batch(
        batch.pixels[start:stop],
        batch.labels[start:stop],
        batch.indices[start:stop],
        batch.positions[start:stop],
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
