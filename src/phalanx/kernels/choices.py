"""Which tile each kernel is launched with, and which of several implementations is used.

Both are timed on the device, once per shape, and remembered: a run stores its choices and a resume
reuses them, because another tile may sum in another order.
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

Tile = dict[str, int]  # launch parameters by name: block sizes, num_warps, num_stages
Implementations = Mapping[str, Callable[[], Any]]  # of one computation, by name

_REPLAYS, _REPEATS = 3, 8  # of a measurement: replays of a graph, and runs in the graph
_MOST_COMPILERS = 16


def make_tiles(names: str, *rows: tuple[int, ...]) -> list[Tile]:
    """Launch parameters by name, one dict per row; the last two columns are warps and stages.

    The first row must fit every layer: it is used if nothing is timed.
    """
    keys = [*names.split(), "num_warps", "num_stages"]
    return [dict(zip(keys, row, strict=True)) for row in rows]


@dataclass(frozen=True)
class Launch:
    """A Triton kernel with everything needed to launch it."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    tile: Tile
    flags: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The kernel's name and its tile, which identify it among launches of the same work."""
        tile = " ".join(f"{name}={value}" for name, value in self.tile.items())
        return f"{self.kernel.__name__} {tile}"

    def __call__(self) -> None:
        """Launch it."""
        self.kernel[self.grid](*self.args, **self.flags, **self.tile)

    def compile(self) -> None:
        """Compile it, without running it."""
        self.kernel.warmup(*self.args, grid=(1,), **self.flags, **self.tile)

    def without_memory(self) -> "Launch":
        """The same launch with empty tensors: the compiler looks at dtype and alignment only."""
        args = tuple(_drop_memory(value) for value in self.args)
        return replace(self, args=args)

    @property
    def compile_key(self) -> tuple[Any, ...]:
        """A key that differs wherever Triton compiles a separate kernel."""
        plain = getattr(self.kernel, "do_not_specialize", None) or ()
        names = getattr(self.kernel, "arg_names", ())
        args = [
            _specialise(value, plain=index < len(names) and names[index] in plain)
            for index, value in enumerate(self.args)
        ]
        return (self.name, tuple(self.flags.items()), tuple(args))


def _drop_memory(value: Any) -> Any:
    """An empty tensor instead of one that is aligned to 16 bytes; other values unchanged."""
    if isinstance(value, Tensor) and value.data_ptr() % 16 == 0:
        return value.new_empty(0)
    return value


def _specialise(value: Any, *, plain: bool) -> Any:
    """What Triton specialises an argument on; only its type if it is in do_not_specialize."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int) and not plain:
        return value == 1, value % 16 == 0
    return type(value).__name__


@dataclass(frozen=True)
class _Recording:
    """Launches that are recorded instead of run: of one thread, and of its backward passes."""

    thread: int | None = None
    backward: bool = False
    launches: dict[Any, Launch] = field(default_factory=dict)

    @property
    def records_this_thread(self) -> bool:
        if self.thread is None:
            return False
        in_backward = torch._C._current_graph_task_id() >= 0  # in one of autograd's threads
        return threading.get_ident() == self.thread or (self.backward and in_backward)


class KernelChoices:
    """The choices made so far, by what is computed.

    On a GPU, what is not known yet is timed, unless a graph is being captured. Elsewhere, as in
    Triton's interpreter, the first tile and the first implementation are used.
    """

    def __init__(self) -> None:
        self.chosen_names: dict[str, str] = {}  # of launches and implementations
        self.measures = True  # if not, always the first: the same on every machine
        self.timings: dict[str, dict[str, float]] = {}  # milliseconds of each, where timed
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
        """Launch a kernel with its fastest tile; returns the tile."""
        return self.launch_fastest([Launch(kernel, grid(t), args, t, flags) for t in tiles]).tile

    def launch_fastest(self, launches: Sequence[Launch]) -> Launch:
        """Run the fastest of several launches of the same work; returns it."""
        if self._recording.records_this_thread:
            for launch in launches:
                self._recording.launches[launch.compile_key] = launch.without_memory()
            return launches[0]
        by_name = {launch.name: launch for launch in launches}
        chosen = by_name.pop(self.find_fastest(_make_key(launches[0]), by_name))
        return _run_first([chosen, *by_name.values()])

    def run_fastest(self, key: str, implementations: Implementations) -> Any:
        """The result of the fastest of several implementations."""
        if self._recording.records_this_thread:
            first, *_ = [run() for run in implementations.values()]  # all of them must be compiled
            return first
        return implementations[self.find_fastest(key, implementations)]()

    def choose_name(self, key: str, implementations: Implementations) -> str:
        """The name of the fastest implementation, for a caller that runs it by itself.

        What is timed must have no side effects: no running statistics are given to be updated.
        """
        if not self._recording.records_this_thread:
            return self.find_fastest(key, implementations)
        for run in implementations.values():  # all of them must be compiled
            run()
        return next(iter(implementations))

    def find_fastest(self, key: str, implementations: Implementations) -> str:
        """The name of the fastest implementation; any that fails (shared memory) is left out."""
        if self.measures and self.chosen_names.get(key) in implementations:
            return self.chosen_names[key]
        first = next(iter(implementations))
        if len(implementations) > 1 and self.measures and _can_measure():
            self.timings[key] = found = _time_each(implementations)
            self.chosen_names[key] = first = min(found, key=lambda name: found[name])
        return first

    @contextmanager
    def without_timing(self) -> Iterator[None]:
        """Within the block nothing is timed: the first choice is used, as for meta tensors."""
        measures, self.measures = self.measures, False
        try:
            yield
        finally:
            self.measures = measures

    def compile_all(self, run: Callable[[], object]) -> int:
        """Compile every kernel that `run` may launch, several at a time; returns their number.

        Meanwhile its kernels are recorded and not launched: results are uninitialised memory. Other
        threads launch theirs as usual.
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
                task.exception()  # a tile that does not compile is left out when it is timed
        return len(launches)


def _run_first(launches: Sequence[Launch]) -> Launch:
    """Run the first launch for which the GPU has enough shared memory; returns it.

    If nothing was timed, or on another GPU, the chosen tile may be too large for this one.
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


def _make_key(launch: Launch) -> str:
    """What a launch computes: kernel, integer arguments, dtype of the first tensor, and flags."""
    numbers = [value for value in launch.args if isinstance(value, int)]
    dtype = next((value.dtype for value in launch.args if isinstance(value, Tensor)), None)
    flags = " ".join(f"{name}={value}" for name, value in launch.flags.items())
    return f"{launch.kernel.__name__} {numbers} {dtype} {flags}".rstrip()


def _time_each(implementations: Implementations) -> dict[str, float]:
    """Milliseconds of each implementation that works."""
    found: dict[str, float] = {}
    failures: list[Exception] = []
    for name, run in implementations.items():
        try:
            found[name] = _time_on_device(run)
        except Exception as failure:  # noqa: BLE001 - compilers and drivers raise what they like
            failures.append(failure)
    if not found:
        raise failures[0]
    return found


def _time_on_device(run: Callable[[], object]) -> float:
    """Milliseconds of one run, from a CUDA graph of several: launch overhead does not count.

    The fastest replay counts: other work on the device can only make a replay slower.
    """
    run()
    side = _measuring_stream(torch.cuda.current_device())
    graph = torch.cuda.CUDAGraph()
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
def _measuring_stream(device: int) -> torch.cuda.Stream:
    """One stream of a device for all measurements, so that libraries keep one workspace for it."""
    return torch.cuda.Stream(device)


CHOICES = KernelChoices()
