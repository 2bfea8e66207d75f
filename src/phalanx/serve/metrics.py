"""Counters and histograms in Prometheus' text format; changed only in the event loop."""

import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_Labels = tuple[str, ...]


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _format_labels(names: Sequence[str], values: Sequence[str]) -> str:
    pairs = ",".join(f'{n}="{_escape(v)}"' for n, v in zip(names, values, strict=True))
    return f"{{{pairs}}}" if pairs else ""


class _Counter:
    """A counter for each combination of labels."""

    def __init__(self, name: str, help_text: str, labels: Sequence[str] = ()) -> None:
        self._name, self._help, self._labels = name, help_text, tuple(labels)
        self._values: dict[_Labels, float] = {} if labels else {(): 0}

    def add(self, *labels: str, amount: float = 1) -> None:
        """Add to the counter with these labels."""
        self._values[labels] = self._values.get(labels, 0) + amount

    def lines(self) -> Iterator[str]:
        """Its lines of the page."""
        yield f"# HELP {self._name} {self._help}"
        yield f"# TYPE {self._name} counter"
        for labels, value in self._values.items():
            yield f"{self._name}{_format_labels(self._labels, labels)} {value}"


class _Histogram:
    """Counts of values up to each limit, with their sum."""

    def __init__(
        self,
        name: str,
        help_text: str,
        labels: Sequence[str] = (),
        limits: Sequence[float] = _SECONDS,
    ) -> None:
        self._name, self._help, self._labels = name, help_text, tuple(labels)
        self._limits = tuple(limits)
        self._counts: dict[_Labels, list[int]] = {}
        self._sums: dict[_Labels, float] = {}

    def observe(self, value: float, *labels: str) -> None:
        """Add a value."""
        counts = self._counts.setdefault(labels, [0] * (len(self._limits) + 1))
        counts[bisect_left(self._limits, value)] += 1
        self._sums[labels] = self._sums.get(labels, 0.0) + value

    def lines(self) -> Iterator[str]:
        """Its lines of the page."""
        yield f"# HELP {self._name} {self._help}"
        yield f"# TYPE {self._name} histogram"
        for labels, counts in self._counts.items():
            below = 0
            for limit, count in zip((*self._limits, None), counts, strict=True):
                below += count
                shown = "+Inf" if limit is None else f"{limit:g}"
                named = _format_labels((*self._labels, "le"), (*labels, shown))
                yield f"{self._name}_bucket{named} {below}"
            own = _format_labels(self._labels, labels)
            yield f"{self._name}_sum{own} {self._sums[labels]:.6f}"
            yield f"{self._name}_count{own} {below}"


class Metrics:
    """All metrics of the server."""

    def __init__(self) -> None:
        self.requests = _Counter(
            "phalanx_requests_total", "Requests answered.", ("route", "method", "status")
        )
        self.request_s = _Histogram(
            "phalanx_request_seconds", "From the headers to the end of the answer.", ("route",)
        )
        self.images = _Counter("phalanx_images_total", "Images that the model answered.")
        self.batch_images = _Histogram(
            "phalanx_batch_images", "Images in a batch of the model.", limits=_SIZES
        )
        self.batch_s = _Histogram("phalanx_batch_seconds", "Time of the model for a batch.")
        self.decode_s = _Histogram("phalanx_decode_seconds", "Decoding the images of a request.")
        self.queue_s = _Histogram("phalanx_queue_seconds", "A request's wait for the model.")
        self.failures = _Counter("phalanx_failed_batches_total", "Batches that the model failed.")
        self._gauges: list[tuple[str, str, Callable[[], float], str]] = []
        started = time.time()
        self.add_gauge("process_start_time_seconds", "Since the epoch.", lambda: started)
        self.add_gauge("process_resident_memory_bytes", "Memory in use.", _read_resident)

    def add_gauge(
        self,
        name: str,
        help_text: str,
        read: Callable[[], float],
        labels: dict[str, str] | None = None,
    ) -> None:
        """Add a value that is read whenever the page is rendered."""
        shown = _format_labels(tuple(labels or {}), tuple((labels or {}).values()))
        self._gauges.append((name, help_text, read, shown))

    def render(self) -> str:
        """The whole page."""
        lines = [
            line for one in vars(self).values() if hasattr(one, "lines") for line in one.lines()
        ]
        for name, help_text, read, labels in self._gauges:
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} gauge"]
            lines.append(f"{name}{labels} {read():.15g}")
        return "\n".join(lines) + "\n"


def _read_resident() -> float:
    """Bytes of memory this process holds; 0 if the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0.0
    return float(pages * os.sysconf("SC_PAGE_SIZE"))
