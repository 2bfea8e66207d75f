"""What each thread does and when, and when the streams of a GPU come to it: for lab scripts."""

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median
from time import perf_counter, thread_time
from typing import Any, NamedTuple

import torch


class Span(NamedTuple):
    """Something that a thread did, in seconds of the host's clock."""

    name: str
    thread: int
    begin: float
    end: float
    cpu: float  # seconds of it that the thread was running


class Mark(NamedTuple):
    """The same, in the order of a stream; called: when the host asked for it."""

    name: str
    called: float
    begin: Any
    end: Any


class Recorder:
    """Phases of all threads, and of the GPU on the same clock."""

    def __init__(self, *, on_gpu: bool, timed_by_streams: tuple[str, ...]) -> None:
        self.on_gpu, self._timed_by_streams = on_gpu, timed_by_streams
        self.spans: list[Span] = []
        self.marks: list[Mark] = []
        self._zero: tuple[Any, float] = (None, 0.0)
        self._gc_began = 0.0

    def start(self) -> None:
        """Forget everything; training goes on."""
        self.spans, self.marks = [], []
        if self.on_gpu:
            with torch.cuda.stream(torch.cuda.Stream()):  # idle, so that it is reached at once
                event = self.mark()
            event.synchronize()
            self._zero = event, perf_counter()

    def mark(self) -> Any:
        """An event of the current stream; without a GPU the time."""
        if not self.on_gpu:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def find_time(self, mark: Any) -> float:
        """When a stream had come to a mark, in seconds of the host's clock."""
        if not self.on_gpu:
            return float(mark)
        first, zero = self._zero
        return zero + 1e-3 * float(first.elapsed_time(mark))

    def record(self, name: str, run: Callable[[], Any]) -> Any:
        """What `run` returns."""
        begin, cpu = perf_counter(), thread_time()
        first = self.mark() if name in self._timed_by_streams else None
        try:
            return run()
        finally:
            if first is not None:
                self.marks.append(Mark(name, begin, first, self.mark()))
            took = thread_time() - cpu
            thread = threading.get_native_id()
            self.spans.append(Span(name, thread, begin, perf_counter(), took))

    def wrap(self, name: str, owner: Any, function: str) -> None:
        """Record every call of a function or method."""
        plain = getattr(owner, function)
        setattr(owner, function, lambda *given: self.record(name, lambda: plain(*given)))

    def wrap_kernel(self) -> None:
        """Record the kernel of the crops, without what the host does before."""
        from phalanx.kernels import crop_resize_fused

        kernel: Any = crop_resize_fused._crop_and_resize

        class Timed:
            def __getitem__(_, grid: Any) -> Callable[..., Any]:
                return lambda *given, **options: self.record(
                    "cut", lambda: kernel[grid](*given, **options)
                )

        crop_resize_fused._crop_and_resize = Timed()

    def on_gc(self, phase: str, facts: dict[str, int]) -> None:
        """Record a collection of garbage: all threads wait for it."""
        now = perf_counter()
        if phase == "start":
            self._gc_began = now
        else:
            name = f"gc{facts['generation']}"
            self.spans.append(Span(name, threading.get_native_id(), self._gc_began, now, 0.0))


def describe_stops(ends: list[float], spans: list[Span]) -> Iterator[str]:
    """What each thread did in steps that took much longer than most."""
    usual = median(after - before for before, after in pairwise(ends))
    for number, (begin, end) in enumerate(pairwise(ends), 2):
        if end - begin < max(2.5 * usual, usual + 0.03):
            continue
        inside = [
            (min(end, span.end) - max(begin, span.begin), span)
            for span in spans
            if span.name not in ("batch", "answers")
        ]
        long = sorted((one for one in inside if one[0] > 0.2 * (end - begin)), reverse=True)
        parts = [
            f"{span.name} {1e3 * (span.end - span.begin):.0f} (cpu {1e3 * span.cpu:.0f})"
            for _, span in long[:7]
        ]
        yield f"step {number}: {1e3 * (end - begin):.0f} ms: {', '.join(parts)}"
