"""Batches in the order of the training stream, made in this process or by workers."""

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from functools import partial
from itertools import tee
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from phalanx.data.formats.arrays import ArraySource
from phalanx.data.formats.index import IndexedSource
from phalanx.data.formats.sources import Source, Split
from phalanx.data.loading.cache import SharedCaches
from phalanx.data.loading.image_checksums import ImageChecksums
from phalanx.data.loading.opened_rows import (
    OpenedRows,
    OpenRows,
    find_row_bytes,
    open_rows_here,
)
from phalanx.data.loading.read_problems import ReadProblems
from phalanx.data.loading.reader import Batch, BatchRequest, InputSpec, Reader
from phalanx.data.loading.worker_pool import WorkerPool
from phalanx.plan.share import WHOLE, Share

_Item = TypeVar("_Item")
_Stream = Generator[Batch, None, None]
_Allocate = Callable[[tuple[int, ...]], NDArray[np.uint8]]
_END = object()
_STEPS_AHEAD = 2
_IMAGES_PER_TASK = 16  # few enough that several workers share a step
_TASKS_AHEAD = 4  # for each worker, so that none waits for the parent
_SPLITS: tuple[Split, ...] = ("train", "valid")


def prefetch(items: Iterator[_Item]) -> Generator[_Item, None, None]:
    """The items in order; a thread makes the next one while the current one is used."""
    with (
        closing(items) if isinstance(items, Generator) else nullcontext(),
        ThreadPoolExecutor(1, "prefetch") as thread,
    ):
        coming = thread.submit(next, items, _END)
        while (item := coming.result()) is not _END:
            coming = thread.submit(next, items, _END)
            yield item  # type: ignore[misc]


class BatchBackend:
    """Makes the batches of one split; `close` frees what it holds."""

    needs_prefetch = True  # False if a batch costs the host less than a thread would
    works_ahead = False  # whether other processes already make the next batches

    def batches(self, requests: Iterable[BatchRequest]) -> _Stream:
        """The batch of each request, in order."""
        raise NotImplementedError

    def close(self) -> None:
        """Free threads and memory; may be called twice."""


class _HostBackend(BatchBackend):
    """Decodes and augments images in this process."""

    def __init__(self, reader: Reader, allocate: _Allocate, *, feeds_cpu: bool):
        self._reader, self._allocate = reader, allocate
        # copying rows takes so little that a thread would only take a core from the step
        self.needs_prefetch = not (feeds_cpu and isinstance(reader.source, ArraySource))

    def batches(self, requests: Iterable[BatchRequest]) -> _Stream:
        """The images in arrays."""
        for positions, size, _ in requests:
            yield self._reader.fill(positions, self._allocate((len(positions), size, size, 3)))


class _WorkerBackend(BatchBackend):
    """Copies the images that workers have decoded into batches."""

    works_ahead = True

    def __init__(self, reader: Reader, open_rows: OpenRows, allocate: _Allocate):
        self._reader, self._open_rows, self._allocate = reader, open_rows, allocate

    def batches(self, requests: Iterable[BatchRequest]) -> _Stream:
        """The images in arrays."""
        reader = self._reader
        ahead, behind = tee(requests)
        with closing(self._open_rows(ahead)) as opened:
            for positions, size, _ in behind:
                pixels = self._allocate((len(positions), size, size, 3))
                indices, start = np.empty_like(positions), 0
                while start < len(positions):
                    piece = next(opened)
                    rows = slice(start, start + len(piece.indices))
                    pixels[rows], indices[rows] = piece.pixels, piece.indices
                    start = rows.stop
                reader.problems.refuse_too_many_bad(reader.max_bad)
                yield Batch(pixels, reader.find_labels(indices), indices, positions)


class Loader:
    """Yields the batches of an input spec: the same bytes for any number of workers.

    Use it as a context manager, or call close. One iteration over the training steps and one over
    the validation images can run at a time; starting another ends the first of its kind.

    images_per_task: how many a worker fills at a time. cache: how many processes of this machine,
    including this one, cache encoded images in memory; 0: no cache. allocate: returns the memory
    of a batch; by default plain memory. backend: builds what makes batches on the device, from a
    reader and a function that opens their files; None for a split whose batches the host makes.
    """

    def __init__(
        self,
        spec: InputSpec,
        *,
        workers: int,
        max_bad: int | None = None,
        images_per_task: int = _IMAGES_PER_TASK,
        cache: int = 0,
        allocate: _Allocate | None = None,
        backend: Callable[[Reader, OpenRows], BatchBackend | None] | None = None,
    ):
        if spec.gpu_percent and backend is None:
            left = f"{spec.gpu_percent}% of the images are left to a GPU"
            raise ValueError(f"{left}, and none is given")
        self.spec = spec
        # whether images are made on the device from now on; if they are checked first, not yet
        self.on_device = backend is not None and spec.checked_since is None
        self.workers = workers
        self.max_bad = max_bad
        self._images_per_task = images_per_task
        self._allocate = allocate or (lambda shape: np.empty(shape, np.uint8))
        self._feeds_cpu = allocate is None
        self._build_backend = backend or (lambda reader, open_rows: None)
        self._caches: SharedCaches | None = None
        if cache:  # allocated now, to report before training if it does not fit
            sources = {split: spec.open(split) for split in spec.splits}
            self._caches = SharedCaches(sources, spec.data_dir or spec.data, processes=cache)
        self.problems = {split: ReadProblems() for split in _SPLITS}  # a thread may add to them
        self._checksums: dict[Split, ImageChecksums] = {}
        self._readers: dict[Split, Reader] = {}
        self._backends: dict[tuple[Split, bool], BatchBackend] = {}  # and whether on the device
        self._streams: dict[Split, _Stream] = {}
        self._pool: WorkerPool | None = None

    def steps_from(
        self, step: int, stop: int, *, micro_batch: int, share: Share = WHOLE
    ) -> Iterator[list[Batch]]:
        """For each step of step..stop-1, the share's micro-batches in slice order.

        Images of other shares are not read.
        """
        order = self.spec.order
        if order is None or order.global_batch % micro_batch:
            raise ValueError(f"micro-batches of {micro_batch} do not tile a step of {order}")
        slices = share.slices(order.global_batch // micro_batch)
        takes_all, by_gpu = share == WHOLE, self.on_device

        def request(step: int) -> BatchRequest:
            positions = order.positions(step)
            if not takes_all:
                positions = positions.reshape(-1, micro_batch)[slices].ravel()
            return BatchRequest(positions, self.spec.size_at(step), by_gpu)

        for batch in self._open_stream("train", map(request, range(step, stop))):
            starts = range(0, len(batch.positions), micro_batch)
            yield [batch[start : start + micro_batch] for start in starts]

    def evaluation_batches(self, batch_size: int, share: Share = WHOLE) -> Iterator[Batch]:
        """The share's validation images in order; all shares together see each image once.

        Batches that are made on the host are padded to the full size.
        """
        images = len(self.source("valid"))

        def request(number: int) -> BatchRequest:
            start = number * batch_size
            end = min(start + batch_size, images)
            return BatchRequest(np.arange(start, end, dtype=np.int64), self.spec.image_size)

        numbers = share.batches(-(-images // batch_size))
        for batch in self._open_stream("valid", map(request, numbers)):
            yield _pad(batch, batch_size) if isinstance(batch.pixels, np.ndarray) else batch

    def needs_prefetch(self, split: Split) -> bool:
        """Whether a batch takes the host so long that it should be made ahead of its use."""
        return self._backend(split).needs_prefetch

    def reader(self, split: Split) -> Reader:
        """The reader of one split in this process."""
        if split not in self._readers:
            self._readers[split] = Reader(
                self.spec,
                split,
                problems=self.problems[split],
                max_bad=self.max_bad,
                cache=self._caches.caches[split] if self._caches else None,
            )
        return self._readers[split]

    @property
    def image_checksums(self) -> dict[str, NDArray[np.uint32]]:
        """The checksum of each image by split; 0 for images that were not read."""
        return {split: images.checksums for split, images in self._checksums.items()}

    def restore_checksums(self, checksums: Mapping[str, NDArray[np.uint32]]) -> None:
        """Compare all images with the checksums from earlier processes of a run."""
        for split in _SPLITS:
            if split in checksums:
                self._open_checksums(split).restore(checksums[split])

    def _open_checksums(self, split: Split) -> ImageChecksums:
        source = self.source(split)
        assert isinstance(source, IndexedSource)
        if split not in self._checksums:
            self._checksums[split] = ImageChecksums(source, self.problems[split])
        return self._checksums[split]

    def source(self, split: Split) -> Source:
        """The images of one split."""
        return self.reader(split).source

    def recheck_bad(self, names: Collection[str]) -> None:
        """Read the images that were bad in earlier processes, and count them as bad again.

        Raises DataError for one that can be read now, because the run has trained without it.
        """
        for reader, index in self._find_images(names):
            reader.recheck_bad(index)

    def restore_bad(self, reasons: Mapping[str, str]) -> None:
        """Count images as bad without reading them, by name with what was wrong."""
        for reader, index in self._find_images(reasons):
            reader.problems.record_bad(index, reasons[reader.source.name(index)])

    def _find_images(self, names: Collection[str]) -> Iterator[tuple[Reader, int]]:
        """The images of these names; searches all, unless there are no names."""
        for split in self.spec.splits if names else ():
            reader = self.reader(split)
            for index in range(len(reader.source)):
                if reader.source.name(index) in names:
                    yield reader, index

    def describe_unsaved_indexes(self) -> list[str]:
        """A line for each index of images that could not be saved to disk."""
        sources = [reader.source for reader in self._readers.copy().values()]
        indexed = [source for source in sources if isinstance(source, IndexedSource)]
        reasons = {
            source.root: source.index.save_error for source in indexed if source.index.save_error
        }
        return [
            f"the index of {root} could not be saved ({why}); it is rebuilt each time"
            for root, why in reasons.items()
        ]

    def close(self) -> None:
        """End the workers; may be called twice."""
        if self._pool is not None:
            self._pool.stop_workers()
        while self._streams:
            self._streams.popitem()[1].close()
        if self._pool is not None:
            self._pool.close()
        for backend in self._backends.values():
            backend.close()
        self._backends, self._readers = {}, {}  # frees the memory they hold
        if self._caches is not None:
            self._caches.close()
            self._caches = None

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open_stream(self, split: Split, requests: Iterable[BatchRequest]) -> _Stream:
        """The batch of each request, in order; ends the split's previous stream."""
        if split in self._streams:
            self._streams.pop(split).close()
        backend = self._backend(split)
        stream = backend.batches(requests)
        if backend.needs_prefetch and not backend.works_ahead:
            stream = prefetch(stream)
        if isinstance(self.source(split), IndexedSource):
            stream = self._compare_checksums(split, stream)
        self._streams[split] = stream
        return stream

    def _compare_checksums(self, split: Split, stream: _Stream) -> _Stream:
        """The batches, each after its images were compared with their earlier checksums."""
        checksums = self._open_checksums(split)
        with closing(stream):
            for batch in stream:
                checksums.compare(batch.indices.tolist())
                yield batch

    def _backend(self, split: Split) -> BatchBackend:
        key = split, self.on_device  # decoders on the device are opened when it first decodes
        if key not in self._backends:
            reader, open_rows = self.reader(split), partial(self._open_rows, split)
            backend = self._build_backend(reader, open_rows) if self.on_device else None
            if backend is None and self.workers:
                backend = _WorkerBackend(reader, open_rows, self._allocate)
            elif backend is None:
                backend = _HostBackend(reader, self._allocate, feeds_cpu=self._feeds_cpu)
            self._backends[key] = backend
        return self._backends[key]

    def _open_rows(
        self, split: Split, requests: Iterable[BatchRequest]
    ) -> Generator[OpenedRows, None, None]:
        """The rows of each request in order, in pieces of at most images_per_task."""
        tasks = self._cut_to_tasks(requests)
        if self.workers:
            return self._open_pool().stream(split, tasks)
        return open_rows_here(self.reader(split), tasks)

    def _cut_to_tasks(self, requests: Iterable[BatchRequest]) -> Iterator[BatchRequest]:
        for request in requests:
            for start in range(0, len(request.positions), self._images_per_task):
                part = request.positions[start : start + self._images_per_task]
                yield request._replace(positions=part)

    def _open_pool(self) -> WorkerPool:
        if self._pool is None:
            order = self.spec.order
            reader = self.reader("train" if order else "valid")
            step_tasks = -(-order.global_batch // self._images_per_task) if order else 0
            self._pool = WorkerPool(
                self.spec,
                self.problems,
                workers=self.workers,
                slot_bytes=self._images_per_task * find_row_bytes(reader),
                depth=_TASKS_AHEAD * self.workers + _STEPS_AHEAD * step_tasks,
                max_bad=self.max_bad,
                cache=self._caches.handle if self._caches else None,
            )
        return self._pool


def _pad(batch: Batch, size: int) -> Batch:
    """The batch padded with empty rows to that size."""
    missing = size - len(batch.labels)
    if not missing:
        return batch
    return Batch(
        np.pad(batch.pixels, ((0, missing), (0, 0), (0, 0), (0, 0))),
        np.pad(batch.labels, (0, missing)),
        np.pad(batch.indices, (0, missing), constant_values=-1),
        np.pad(batch.positions, (0, missing), constant_values=-1),
    )
