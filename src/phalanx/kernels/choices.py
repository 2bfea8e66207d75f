"""Which tile each kernel is launched with, and which of several ways to one result is taken.

Both are measured on the device, once for each shape, and remembered: a run stores what it found,
and a resume takes that again, because another tile may add up in another order.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from phalanx.kernels.fused import find_memory_error

Tile = dict[str, int]  # what a kernel is launched with besides its arguments, by name
Ways = Mapping[str, Callable[[], Any]]

_REPLAYS, _REPEATS = 3, 8  # of a measurement: replays of a graph with so many runs
_MOST_COMPILERS = 16


def make_tiles(names: str, *rows: tuple[int, ...]) -> list[Tile]:
    """Launch parameters by name, one dict a row; the last two columns are warps and stages.

    The first row must fit every layer: it is taken where nothing is measured.
    """
    keys = [*names.split(), "num_warps", "num_stages"]
    return [dict(zip(keys, row, strict=True)) for row in rows]


@dataclass(frozen=True)
class Launch:
    """A Triton kernel with all it needs to be launched."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    tile: Tile
    flags: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The kernel's name with its tile: what tells it from others that do the same work."""
        tile = " ".join(f"{name}={value}" for name, value in self.tile.items())
        return f"{self.kernel.__name__} {tile}"

    def __call__(self) -> None:
        """Launch it."""
        self.kernel[self.grid](*self.args, **self.flags, **self.tile)

    def compile(self) -> None:
        """Compile it, without running it."""
        self.kernel.warmup(*self.args, grid=(1,), **self.flags, **self.tile)

    def without_memory(self) -> "Launch":
        """The same to a compiler, which looks at a tensor's type and address and not into it."""
        args = tuple(_forget(value) for value in self.args)
        return replace(self, args=args)

    @property
    def compiled_as(self) -> tuple[Any, ...]:
        """What Triton compiles a kernel of its own for."""
        plain = getattr(self.kernel, "do_not_specialize", None) or ()
        names = getattr(self.kernel, "arg_names", ())
        args = [
            _specialise(value, plain=place < len(names) and names[place] in plain)
            for place, value in enumerate(self.args)
        ]
        return (self.name, tuple(self.flags.items()), tuple(args))


def _forget(value: Any) -> Any:
    """An empty tensor in place of one whose address is as good."""
    if isinstance(value, Tensor) and value.data_ptr() % 16 == 0:
        return value.new_empty(0)
    return value


def _specialise(value: Any, *, plain: bool) -> Any:
    """What Triton distinguishes about an argument; of a plain one, only its type."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int) and not plain:
        return value == 1, value % 16 == 0
    return type(value).__name__


@dataclass(frozen=True)
class _Recording:
    """Launches that are noted and not made: those of one thread, and of its backward passes."""

    thread: int | None = None
    backward: bool = False
    launches: dict[Any, Launch] = field(default_factory=dict)

    @property
    def has_this_thread(self) -> bool:
        if self.thread is None:
            return False
        in_backward = torch._C._current_graph_task_id() >= 0  # a thread of autograd's
        return threading.get_ident() == self.thread or (self.backward and in_backward)


class KernelChoices:
    """What was chosen so far, by what is computed.

    On a GPU whatever is not known is measured, unless a graph is being captured; elsewhere the
    first tile and the first way are taken, as for checks in Triton's interpreter.
    """

    def __init__(self) -> None:
        self.known: dict[str, str] = {}  # the name of a launch or a way
        self.measures = True  # else the first of each: the same on every machine, every time
        self.timings: dict[str, dict[str, float]] = {}  # milliseconds of each, where measured
        self._recording = _Recording()
        self._one_recording = threading.Lock()

    def run(
        self,
        kernel: Any,
        grid: Callable[[Tile], tuple[int, ...]],
        args: tuple[Any, ...],
        tiles: Sequence[Tile],
        **flags: int,
    ) -> Tile:
        """Launch a kernel with its fastest tile; gives the tile."""
        return self.run_fastest([Launch(kernel, grid(t), args, t, flags) for t in tiles]).tile

    def run_fastest(self, launches: Sequence[Launch]) -> Launch:
        """Run one of several launches of the same work; gives it."""
        if self._recording.has_this_thread:
            for launch in launches:
                self._recording.launches[launch.compiled_as] = launch.without_memory()
            return launches[0]
        by_name = {launch.name: launch for launch in launches}
        chosen = by_name.pop(self.find(_describe(launches[0]), by_name))
        return _run_first([chosen, *by_name.values()])

    def choose(self, key: str, ways: Ways) -> Any:
        """What the fastest of several ways to the same result gives."""
        if self._recording.has_this_thread:
            first, *_ = [way() for way in ways.values()]  # all of them must be compiled
            return first
        return ways[self.find(key, ways)]()

    def choose_name(self, key: str, ways: Ways) -> str:
        """The name of the fastest way, for a caller that takes it by other means.

        What is measured must change nothing: a way that updates statistics is given none.
        """
        if not self._recording.has_this_thread:
            return self.find(key, ways)
        for way in ways.values():  # all of them must be compiled
            way()
        return next(iter(ways))

    def find(self, key: str, ways: Ways) -> str:
        """The name of the fastest way; one that fails, for lack of shared memory, is left out."""
        if self.measures and self.known.get(key) in ways:
            return self.known[key]
        first = next(iter(ways))
        if len(ways) > 1 and self.measures and _can_measure():
            self.timings[key] = found = _time_each(ways)
            self.known[key] = first = min(found, key=lambda name: found[name])
        return first

    @contextmanager
    def unmeasured(self) -> Iterator[None]:
        """A block in which the first of everything is taken, as for tensors without values."""
        measures, self.measures = self.measures, False
        try:
            yield
        finally:
            self.measures = measures

    def compile_all(self, run: Callable[[], object]) -> int:
        """Compile every kernel that `run` may launch, several at a time; gives how many.

        Within, kernels are noted and not launched: results are whatever the memory held. Those of
        other threads are launched as ever.
        """
        with self._one_recording:
            self._recording = _Recording(threading.get_ident(), backward=torch.is_grad_enabled())
            try:
                run()
                launches = list(self._recording.launches.values())
            finally:
                self._recording = _Recording()
        with ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_COMPILERS)) as pool:
            for task in [pool.submit(launch.compile) for launch in launches]:
                task.exception()  # a tile that does not compile is left out when it is measured
        return len(launches)


def _run_first(launches: Sequence[Launch]) -> Launch:
    """Run the first launch that the device has memory for, and give it.

    Where nothing is measured, or it was on another GPU, the first may be too large for this one.
    """
    *others, last = launches
    for launch in others:
        with suppress(find_memory_error()):
            launch()
            return launch
    last()
    return last


def _can_measure() -> bool:
    return torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing()


def _describe(launch: Launch) -> str:
    """What a launch computes: the kernel, its numbers, flags and the type of its first tensor."""
    numbers = [value for value in launch.args if isinstance(value, int)]
    dtype = next((value.dtype for value in launch.args if isinstance(value, Tensor)), None)
    flags = " ".join(f"{name}={value}" for name, value in launch.flags.items())
    return f"{launch.kernel.__name__} {numbers} {dtype} {flags}".rstrip()


def _time_each(ways: Ways) -> dict[str, float]:
    """Milliseconds of each way that works."""
    found: dict[str, float] = {}
    failures: list[Exception] = []
    for name, way in ways.items():
        try:
            found[name] = _time_on_device(way)
        except Exception as failure:  # noqa: BLE001 - compilers and drivers raise what they like
            failures.append(failure)
    if not found:
        raise failures[0]
    return found


def _time_on_device(run: Callable[[], object]) -> float:
    """Milliseconds of one run, from a graph of several: what launching costs does not count.

    The fastest replay counts: whatever else uses the device can only make one slower.
    """
    run()
    side, graph = _measuring_stream(), torch.cuda.CUDAGraph()
    moments = [torch.cuda.Event(enable_timing=True) for _ in range(_REPLAYS + 1)]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
        torch.cuda.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(_REPEATS):
                run()
        finally:
            graph.capture_end()
        graph.replay()
        moments[0].record()
        for moment in moments[1:]:
            graph.replay()
            moment.record()
        torch.cuda.synchronize()
    torch.cuda.current_stream().wait_stream(side)
    return min(begin.elapsed_time(end) for begin, end in pairwise(moments)) / _REPEATS


@cache
def _measuring_stream() -> torch.cuda.Stream:
    """One stream for all measurements, so that libraries keep one workspace for it."""
    return torch.cuda.Stream()


CHOICES = KernelChoices()
