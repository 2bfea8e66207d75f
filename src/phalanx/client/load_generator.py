"""Sends images to a server over several connections; counts answers, latencies and failures."""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from phalanx.client.connection import Connection, Reply, RequestFailed, ServerAddress
from phalanx.client.protocols import (
    PROTOCOLS,
    ImageAnswer,
    ServedModel,
    decode_answers,
)

_BUSY = (429, 503)  # come again later
_BAD_REQUEST = (400, 413, 415)  # of a batch, which one image may have spoiled
_DEFAULT_WAIT_S = 0.5


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How to send images.

    threads: each sends its requests one after the other, or `in_flight` at once. per_thread: how
    many images each of them sends, from the given ones again and again; seconds: how long they do;
    without both, every image is sent once.
    """

    protocol: str = "predict"
    batch_size: int = 1
    threads: int = 2
    in_flight: int = 1
    per_thread: int | None = None
    seconds: float | None = None
    timeout_s: float = 30.0
    retries: int = 5

    @property
    def connections(self) -> int:
        """The number of requests at the same time."""
        return self.threads * self.in_flight

    @property
    def repeats(self) -> bool:
        """Whether it is a measurement, which sends images repeatedly."""
        return self.per_thread is not None or self.seconds is not None

    def fit(self, images: int) -> "LoadOptions":
        """The options without connections that would have no request, for so many images."""
        if self.seconds is not None:
            return self
        if self.per_thread is not None:
            requests = ceil(self.per_thread / self.batch_size)
            return replace(self, in_flight=min(self.in_flight, requests))
        requests = max(1, ceil(images / self.batch_size))
        threads = min(self.threads, requests)
        return replace(self, threads=threads, in_flight=min(self.in_flight, requests // threads))


@dataclass(frozen=True)
class _SentRequest:
    """An answered request: the time of the answer, its latency, and its images."""

    ended_at: float
    took_s: float
    images: int
    thread: int


@dataclass
class LoadResult:
    """The results for all images; written by all threads."""

    answers: dict[int, ImageAnswer] = field(default_factory=dict)  # the first of each image
    requests: list[_SentRequest] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)  # images, by what went wrong
    unreadable_images: int = 0  # files that are none, as often as they were sent
    retries: Counter[str] = field(default_factory=Counter)  # requests, by why they were repeated
    waited_s: float = 0.0  # because the server was busy, all connections together
    began_at: float = 0.0
    ended_at: float = 0.0

    @property
    def took_s(self) -> float:
        """From the first request to the last answer."""
        return max(self.ended_at - self.began_at, 1e-9)

    @property
    def answered_images(self) -> int:
        """Images that were classified, repetitions included."""
        return sum(request.images for request in self.requests)

    @property
    def failed_images(self) -> int:
        """Images that got no answer."""
        return self.failures.total()

    @property
    def sent_images(self) -> int:
        """All images that were to be sent; each is in one of three counts."""
        return self.answered_images + self.failed_images + self.unreadable_images


_ReadImage = Callable[[int], tuple[str, bytes]]  # name and file; raises RequestFailed


def send_images(
    address: ServerAddress,
    model: ServedModel,
    images: int,
    read: _ReadImage,
    *,
    options: LoadOptions,
    done: Callable[[LoadResult], None] = lambda result: None,
) -> LoadResult:
    """Send so many images as the options say; failures are part of the result.

    done: called after every request, by one thread at a time.
    """
    load = _LoadGenerator(address, model, images, read, options=options, done=done)
    return load.run()


class _LoadGenerator:
    """The threads that send images, and what they share."""

    def __init__(
        self,
        address: ServerAddress,
        model: ServedModel,
        images: int,
        read: _ReadImage,
        *,
        options: LoadOptions,
        done: Callable[[LoadResult], None],
    ) -> None:
        self._address, self._model, self._read, self._options = address, model, read, options
        self._images, self._done = images, done
        self._protocol = PROTOCOLS[options.protocol]
        self._lock, self._result = threading.Lock(), LoadResult()
        self._stop, self._crash = threading.Event(), list[Exception]()
        self._ready = threading.Barrier(options.connections + 1)

    def run(self) -> LoadResult:
        workers = []
        for thread, batches in enumerate(self._plan_batches()):
            shared = _SharedIterator(batches)
            for _ in range(self._options.in_flight):
                worker = threading.Thread(target=self._work, args=(thread, shared), daemon=True)
                workers.append(worker)
        for worker in workers:
            worker.start()
        try:
            self._ready.wait()
            self._result.began_at = time.monotonic()
            if self._options.seconds is not None:
                self._stop.wait(self._options.seconds)
                self._stop.set()
            for worker in workers:
                while worker.is_alive():
                    worker.join(0.1)  # so that a signal is heard
        except BaseException as error:
            self._stop.set()
            self._ready.abort()
            if self._crash and isinstance(error, threading.BrokenBarrierError):
                raise self._crash[0] from None
            raise
        if self._crash:
            raise self._crash[0]
        self._result.ended_at = time.monotonic()
        return self._result

    def _plan_batches(self) -> list[Iterator[tuple[int, ...]]]:
        """The batches of each thread, as indices of images."""
        size, threads = self._options.batch_size, self._options.threads
        if not self._options.repeats:
            every = _SharedIterator(_cut(iter(range(self._images)), size))
            return [every] * threads
        plans = []
        for thread in range(threads):
            # threads begin in different places, so that all images are met
            start = thread * self._images // threads
            places = itertools.islice(
                itertools.cycle([*range(start, self._images), *range(start)]),
                self._options.per_thread,
            )
            plans.append(_cut(places, size))
        return plans

    def _work(self, thread: int, batches: Iterator[tuple[int, ...]]) -> None:
        try:
            self._send_all(thread, batches)
        except Exception as bug:  # noqa: BLE001 - raised again by the thread that started this one
            self._crash.append(bug)
            self._stop.set()
            self._ready.abort()

    def _send_all(self, thread: int, batches: Iterator[tuple[int, ...]]) -> None:
        with Connection(self._address, timeout_s=self._options.timeout_s) as connection:
            self._warm_up(connection)
            try:
                self._ready.wait()
            except threading.BrokenBarrierError:
                return
            for batch in batches:
                if self._stop.is_set():
                    return
                self._send(connection, batch, thread)

    def _warm_up(self, connection: Connection) -> None:
        """Connect; if the rate is measured, also send a request that does not count."""
        try:
            connection.open()
            if self._options.repeats:
                files = [self._read(0)] * self._options.batch_size
                encoded = self._protocol.encode(self._model, files)
                connection.post(encoded.path, encoded.body, encoded.headers)
        except RequestFailed:
            pass  # it will be counted when it fails again

    def _send(self, connection: Connection, batch: Sequence[int], thread: int) -> None:
        """Send a batch until it is answered or cannot be, and count the result."""
        files, kept = [], []
        for place in batch:
            try:
                files.append(self._read(place))
                kept.append(place)
            except RequestFailed as problem:
                self._count_problem(place, str(problem))
        if not files:
            return
        encoded = self._protocol.encode(self._model, files)
        try:
            reply, took_s = self._ask(connection, encoded.path, encoded.body, encoded.headers)
            if reply.status in _BAD_REQUEST and len(kept) > 1:
                for place in kept:  # only those that are bad shall fail
                    self._send(connection, [place], thread)
                return
            if reply.status in _BAD_REQUEST:
                self._count_problem(kept[0], _strip_name(reply.error, files[0][0]))
                return
            if reply.status != 200:
                raise RequestFailed(f"HTTP {reply.status}: {reply.error}")
            answers = decode_answers(self._protocol, self._model, reply, images=len(kept))
        except RequestFailed as failure:
            self._count(kept, failure=str(failure))
            return
        good = sum(not answer.problem for answer in answers)
        request = _SentRequest(time.monotonic(), took_s, good, thread)
        self._count(kept, request=request, answers=answers)

    def _ask(
        self, connection: Connection, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[Reply, float]:
        """The reply and its latency, after as many attempts as a busy server may ask for."""
        tries = 0
        while True:
            began = time.monotonic()
            reply = connection.post(path, body, headers)
            took_s = time.monotonic() - began
            is_busy = reply.status in _BUSY and (reply.status == 429 or reply.wait_s is not None)
            if not is_busy or tries == self._options.retries or self._stop.is_set():
                return reply, took_s
            tries += 1
            wait_s = _DEFAULT_WAIT_S if reply.wait_s is None else reply.wait_s
            with self._lock:
                self._result.retries[f"HTTP {reply.status}"] += 1
                self._result.waited_s += wait_s
            self._stop.wait(wait_s)

    def _count_problem(self, place: int, problem: str) -> None:
        """Record an image that cannot be read; it fails every time it is to be sent."""
        with self._lock:
            self._result.answers.setdefault(place, ImageAnswer(problem=problem))
            self._result.unreadable_images += 1
            self._done(self._result)

    def _count(
        self,
        places: Sequence[int],
        *,
        request: _SentRequest | None = None,
        answers: Sequence[ImageAnswer] = (),
        failure: str = "",
    ) -> None:
        with self._lock:
            if failure:
                self._result.failures[failure] += len(places)
            if request is not None:
                self._result.requests.append(request)
                self._result.unreadable_images += len(places) - request.images
            for place, answer in zip(places, answers, strict=False):
                self._result.answers.setdefault(place, answer)
            self._done(self._result)


class _SharedIterator(Iterator[tuple[int, ...]]):
    """An iterator that several threads may use."""

    def __init__(self, items: Iterator[tuple[int, ...]]) -> None:
        self._items, self._lock = items, threading.Lock()

    def __next__(self) -> tuple[int, ...]:
        with self._lock:
            return next(self._items)


def _cut(places: Iterator[int], size: int) -> Iterator[tuple[int, ...]]:
    while batch := tuple(itertools.islice(places, size)):
        yield batch


def _strip_name(problem: str, name: str) -> str:
    """The problem with an image, without the server's name for the image."""
    for called in (name.replace("\\", "/").rpartition("/")[2], "instance 0", "image_bytes 0"):
        problem = problem.removeprefix(f"{called}: ")
    return problem
