"""Whether a GPU that could decode JPEGs does, decided by how long it waits for the cores."""

import json
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch

from phalanx.disk import write_atomically

_Step = TypeVar("_Step")
_WATCHED = 200  # steps
_LONG_WAIT = 0.2  # of the GPU's time; decoding takes at most 14 % of it (docs/bench/2026-11-gpu.md)


class _WatchedStep(NamedTuple):
    """A step on the device, and how long its images were waited for."""

    waited_ms: float
    begin: torch.cuda.Event
    end: torch.cuda.Event


class _Decision(NamedTuple):
    """Whether the GPU decodes, and why, for the user."""

    by_gpu: bool
    reason: str


class DecoderTrial:
    """Whether a GPU that could decode JPEGs does: if it has waited long for the cores' images.

    The run keeps the answer in its folder: a resume decodes as the run has done.
    """

    def __init__(self, device: torch.device, folder: Path | None):
        self._device = device
        self._file = folder / "decoder.json" if folder else None
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

    def measure_wait(self) -> float:
        """The share of its time in which the device has waited for images; 0 if not watched."""
        steps = list(self._steps)[len(self._steps) // 2 :]  # without those that compile kernels
        if len(steps) < 2:
            return 0.0
        steps[-1].end.synchronize()
        idle_ms = busy_ms = 0.0
        for before, step in pairwise(steps):  # between steps it may also have scored, or saved
            idle_ms += min(step.waited_ms, before.end.elapsed_time(step.begin))
            busy_ms += step.begin.elapsed_time(step.end)
        return idle_ms / (idle_ms + busy_ms)

    def decide(self, first: int, *, gather: Callable[[Any], list[Any]], writes: bool) -> _Decision:
        """Who decodes from this step on, the same on all ranks."""
        answers = self._read_answers()
        found = gather((answers.get(str(first)), self.measure_wait()))
        waited = found[0][0]
        if waited is None:
            waited = round(max(wait for _, wait in found), 4)
            if self._file and writes:
                write_atomically(self._file, json.dumps(answers | {str(first): waited}))
        helps = waited > _LONG_WAIT
        who = "the GPU decodes JPEGs" if helps else "the cores go on decoding"
        why = f"the GPU has waited for images {waited:.0%} of its time"
        return _Decision(helps, f"{who} from step {first + 1:,} on: {why}")

    def _read_answers(self) -> dict[str, float]:
        """The share of earlier trials, by the first step after them."""
        with suppress(OSError, ValueError):
            if self._file:
                found: dict[str, float] = json.loads(self._file.read_bytes())
                return found
        return {}
