"""Combines the rows of many requests into batches, and distributes the outputs.

The event loop appends jobs to a queue; each model thread takes what was queued while its last batch
ran. A model thread never waits for the event loop: it hands over outputs and takes the next batch.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.serve.api_error import ApiError, refuse_busy

Rows = NDArray[Any]  # images as the model accepts them, one per row
Outputs = dict[str, NDArray[Any]]  # by name, one row per image

_LOGGER = logging.getLogger("phalanx.serve")
_SMOOTHING = 0.1  # weight of the newest batch in the mean time per image


class _BatchModel(Protocol):
    """Computes the outputs of batches; called by one thread."""

    def warm_up(self) -> None:
        """Prepare everything that the first batch would otherwise wait for."""
        ...

    def run(self, rows: Rows) -> Outputs:
        """The outputs for a batch."""
        ...


@dataclass(frozen=True)
class BatchStats:
    """The facts about one batch, for counters."""

    images: int
    run_s: float
    failed: bool


class JobTiming(NamedTuple):
    """How many seconds the rows of a request waited, and the model took for them."""

    queue_s: float
    compute_s: float


class _Job:
    """The rows of one request, how many of them were taken, and their outputs so far."""

    def __init__(self, rows: Rows, is_abandoned: Callable[[], bool]) -> None:
        self.rows, self.is_abandoned = rows, is_abandoned
        self.future: asyncio.Future[tuple[Outputs, JobTiming]] = (
            asyncio.get_running_loop().create_future()
        )
        self.queued_at = time.perf_counter()
        self.taken = 0  # rows taken by model threads; read and written under the queue's lock
        self._started_at = 0.0
        self._answered = 0
        self._outputs: Outputs = {}

    @property
    def kind(self) -> tuple[Any, ...]:
        """What rows must have in common to share a batch."""
        return (self.rows.dtype, self.rows.shape[1:])

    def receive(self, part: "_Part", outputs: Outputs, started_at: float, ended_at: float) -> None:
        """Store the outputs of some rows; once all have theirs, the wait ends."""
        if not self._answered:
            self._started_at = started_at
        count = part.end - part.begin
        if count == len(self.rows):
            self._outputs = outputs
        else:
            for name, values in outputs.items():
                if name not in self._outputs:
                    shape = (len(self.rows), *values.shape[1:])
                    self._outputs[name] = np.empty(shape, values.dtype)
                self._outputs[name][part.begin : part.end] = values
        self._answered += count
        if self._answered == len(self.rows) and not self.future.done():
            timing = JobTiming(self._started_at - self.queued_at, ended_at - self._started_at)
            self.future.set_result((self._outputs, timing))

    def fail(self, error: ApiError) -> None:
        """End the wait with an error."""
        if not self.future.done():
            self.future.set_exception(error)


def _call_in_event_loop(job: _Job, function: Callable[..., None], *args: Any) -> None:
    """Have the event loop of a job call a function; if the loop has ended, nobody waits for it."""
    with suppress(RuntimeError):
        job.future.get_loop().call_soon_threadsafe(function, *args)


def _refuse_broken() -> ApiError:
    return ApiError(
        503, "the server has failed and is stopping; its log says why", headers={"Retry-After": "5"}
    )


class _Part(NamedTuple):
    """Some consecutive rows of a job."""

    job: _Job
    begin: int
    end: int


class Reservation:
    """Places in the queue for the images of one request, held from before their decoding."""

    def __init__(self, batcher: "Batcher", images: int) -> None:
        self._batcher, self.left = batcher, images

    async def run(
        self, rows: Rows, is_abandoned: Callable[[], bool] = lambda: False
    ) -> tuple[Outputs, JobTiming]:
        """The outputs for rows, at most as many as places; is_abandoned: whether nobody waits."""
        self.left -= len(rows)
        return await self._batcher.enqueue(rows, is_abandoned)


class Batcher:
    """A bounded queue of images, and a thread for each model that takes batches from it.

    max_wait_s: how long a batch that is not full waits for more images. max_queue: how many images
    may wait before requests are refused. on_batch: called after each batch, in the event loop.
    """

    def __init__(
        self, *, max_batch: int, max_wait_s: float, max_queue: int,
        on_batch: Callable[[BatchStats], None] = lambda stats: None,
    ) -> None:  # fmt: skip
        self.max_batch, self.max_queue = max_batch, max_queue
        self._max_wait_s, self._on_batch = max_wait_s, on_batch
        self._queue: deque[_Job] = deque()
        self._condition = threading.Condition()
        self._rows_queued = 0  # in the queue; under the lock, like the two below
        self._waiting = 0  # images in the queue, or with a reservation
        self._closed = False
        self.is_broken = False  # a model thread has ended because of a bug
        self._image_s = 0.0  # the model's time per image, smoothed
        self._threads: list[threading.Thread] = []

    def start(self, models: Sequence[_BatchModel]) -> None:
        """Start a thread for each model, and wait until all are warm; raises their exceptions."""
        warm: list[Future[None]] = []
        for number, model in enumerate(models):
            warm.append(Future())
            thread = threading.Thread(
                target=self._run_model, args=(model, warm[-1]), name=f"model-{number}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        for one in warm:
            one.result()

    def close(self) -> None:
        """Stop the threads once the queue is empty."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()

    @property
    def waiting(self) -> int:
        """The number of images that no model has taken yet."""
        return self._waiting

    def refuse_full(self) -> None:
        """Raise 429 while the queue is full."""
        if self._waiting >= self.max_queue:
            wait_s = self._waiting * self._image_s / max(1, len(self._threads))
            raise refuse_busy(f"{self._waiting:,} images are waiting already", wait_s)

    @contextmanager
    def reserve(self, images: int) -> Iterator[Reservation]:
        """A context with places for that many images; raises 429 while the queue is full."""
        self.refuse_full()
        with self._condition:
            self._waiting += images
        reservation = Reservation(self, images)
        try:
            yield reservation
        finally:
            with self._condition:
                self._waiting -= reservation.left

    async def enqueue(
        self, rows: Rows, is_abandoned: Callable[[], bool]
    ) -> tuple[Outputs, JobTiming]:
        """The outputs for rows that already have places."""
        job = _Job(rows, is_abandoned)
        with self._condition:
            if self.is_broken:
                self._waiting -= len(rows)
                raise _refuse_broken()
            self._queue.append(job)
            self._rows_queued += len(rows)
            self._condition.notify()
        try:
            return await job.future
        finally:
            if job.future.cancelled():
                self._cancel_job(job)

    def _cancel_job(self, job: _Job) -> None:
        """Remove a job for which nobody waits any more."""
        with self._condition:
            if job in self._queue:
                self._queue.remove(job)
                self._uncount_rows(job)

    def _uncount_rows(self, job: _Job) -> None:
        left = len(job.rows) - job.taken
        self._rows_queued -= left
        self._waiting -= left

    # --- model threads ---

    def _run_model(self, model: _BatchModel, warm: "Future[None]") -> None:
        try:
            model.warm_up()  # here, because libraries keep their measurements per thread
        except Exception as error:  # noqa: BLE001 - raised again by `start`
            warm.set_exception(error)
            return
        warm.set_result(None)
        try:
            while parts := self._take_batch():
                self._run_batch(model, parts)
        except BaseException as error:
            _LOGGER.critical("a model's thread has ended", exc_info=error)
            self._fail_all()

    def _run_batch(self, model: _BatchModel, parts: list[_Part]) -> None:
        started_at = time.perf_counter()
        try:
            rows = [part.job.rows[part.begin : part.end] for part in parts]
            batch = rows[0] if len(rows) == 1 else np.concatenate(rows)
            found: Outputs | Exception = model.run(batch)
        except Exception as error:
            images = sum(part.end - part.begin for part in parts)
            _LOGGER.error("a batch of %d images failed", images, exc_info=error)
            found = error
        ended_at = time.perf_counter()
        _call_in_event_loop(parts[0].job, self._deliver, parts, found, started_at, ended_at)

    def _fail_all(self) -> None:
        """Refuse all jobs, now and later; the server, which watches `is_broken`, will stop."""
        with self._condition:
            self.is_broken = True
            while self._queue:
                job = self._queue.popleft()
                self._uncount_rows(job)
                _call_in_event_loop(job, job.fail, _refuse_broken())

    def _take_batch(self) -> list[_Part]:
        """The rows of the next batch, oldest first; empty once the queue is closed and empty."""
        with self._condition:
            while True:
                while not self._queue and not self._closed:
                    self._condition.wait()
                if self._max_wait_s and self._queue and not self._closed:
                    self._wait_for_more()
                parts = self._take_parts()
                if parts or (self._closed and not self._queue):
                    return parts

    def _wait_for_more(self) -> None:
        """Wait until a batch is full, or its oldest row has waited long enough."""
        until = self._queue[0].queued_at + self._max_wait_s
        while self._rows_queued < self.max_batch and not self._closed and self._queue:
            left = until - time.perf_counter()
            if left <= 0:
                return
            self._condition.wait(left)

    def _take_parts(self) -> list[_Part]:
        parts: list[_Part] = []
        room = self.max_batch
        kind = self._queue[0].kind if self._queue else ()
        while self._queue and room and self._queue[0].kind == kind:
            job = self._queue[0]
            if job.is_abandoned():
                self._queue.popleft()
                self._uncount_rows(job)
                _call_in_event_loop(job, job.fail, ApiError(499, "the client has left"))
                continue
            count = min(room, len(job.rows) - job.taken)
            parts.append(_Part(job, job.taken, job.taken + count))
            job.taken += count
            room -= count
            if job.taken == len(job.rows):
                self._queue.popleft()
        taken = self.max_batch - room
        self._rows_queued -= taken
        self._waiting -= taken
        if self._queue:
            self._condition.notify()  # another model may take the rest
        return parts

    # --- back in the event loop ---

    def _deliver(
        self, parts: list[_Part], found: Outputs | Exception, started_at: float, ended_at: float
    ) -> None:
        images, run_s = sum(part.end - part.begin for part in parts), ended_at - started_at
        self._on_batch(BatchStats(images, run_s, failed=isinstance(found, Exception)))
        if isinstance(found, Exception):
            for part in parts:
                part.job.fail(ApiError(500, "the model failed; the server's log says why"))
            return
        share = _SMOOTHING if self._image_s else 1.0
        self._image_s += share * (run_s / images - self._image_s)
        first = 0
        for part in parts:
            end = first + part.end - part.begin
            own = {name: values[first:end] for name, values in found.items()}
            part.job.receive(part, own, started_at, ended_at)
            first = end
