"""How long a GPU waits for images that the cores decode, and whether it therefore decodes them."""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch

from phalanx.data.loading.gpu_share import ImageCheck

_Step = TypeVar("_Step")
_WATCHED = 200  # steps; a measurement is of the later half of them, when all kernels are compiled
_FEWEST = 10  # steps
_LONG_WAIT = 0.2  # of the GPU's time; it trains at 0.86 of its rate or more while it also decodes


class _WatchedStep(NamedTuple):
    """A step on the device, and how long its images were waited for."""

    waited_ms: float
    begin: torch.cuda.Event
    end: torch.cuda.Event


class DecoderChoice:
    """Measures how long a GPU waits for the cores' images, to decide who decodes the next ones.

    known: what the run has found out before. It is measured and decided once.
    """

    def __init__(self, device: torch.device, known: ImageCheck):
        self._device, self.is_decided, self.waited = device, known.is_decided, known.waited
        self._steps: deque[_WatchedStep] = deque(maxlen=_WATCHED)

    def watch(self, steps: Iterator[_Step]) -> Iterator[_Step]:
        """The steps, whose images the cores decode; the last ones are timed."""
        if self._device.type != "cuda":
            yield from steps
            return
        stream, began = torch.cuda.current_stream(self._device), perf_counter()
        for step in steps:
            waited_ms = 1e3 * (perf_counter() - began)
            begin = stream.record_event(torch.cuda.Event(enable_timing=True))
            yield step
            end = stream.record_event(torch.cuda.Event(enable_timing=True))
            self._steps.append(_WatchedStep(waited_ms, begin, end))
            began = perf_counter()

    def conclude(self, gather: Callable[[Any], list[Any]], *, is_over: bool) -> None:
        """Decide, on all ranks alike, if enough steps were watched or there will be no more."""
        if self.is_decided:
            return
        enough = len(self._steps) >= (_FEWEST if is_over else _WATCHED)
        found = gather(self._measure() if enough else None)
        self.waited = max((wait for wait in found if wait is not None), default=None)
        self.is_decided = is_over or self.waited is not None

    def _measure(self) -> float:
        steps = list(self._steps)[len(self._steps) // 2 :]
        steps[-1].end.synchronize()
        idle_ms = sum(
            min(step.waited_ms, before.end.elapsed_time(step.begin))
            for before, step in pairwise(steps)
        )
        # after some of the steps it has also scored: then they seem to be longer than others
        busy_ms = (len(steps) - 1) * median(step.begin.elapsed_time(step.end) for step in steps)
        return round(idle_ms / (idle_ms + busy_ms), 4)

    @property
    def gpu_decodes(self) -> bool:
        """Whether the GPU decodes from now on."""
        return self.waited is not None and self.waited > _LONG_WAIT

    def describe(self, step: int) -> str:
        """Who decodes after this step, and why, for the user."""
        who = "the GPU decodes JPEGs" if self.gpu_decodes else "the cores go on decoding"
        why = "too few steps to tell how long the GPU waits for images"
        if self.waited is not None:
            why = f"the GPU spent {self.waited:.0%} of its time waiting for images"
        return f"{who} from step {step + 1:,} on: {why}"
