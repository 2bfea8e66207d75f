"""Work on many images, shared among processes; results are in the order of the tasks."""

import multiprocessing
import os
import signal
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any, TypeVar

from phalanx.errors import DataError
from phalanx.escapes import escape_worker_stderr
from phalanx.parent_process import watch_parent

_TASKS_AHEAD = 4  # pending for each process: enough to bridge a slow one, yet few in memory
_SAFE_PATH = "PYTHONSAFEPATH"
# a terminal sends these to all processes of a command: Ctrl-C, a hangup
_OF_TERMINALS = (signal.SIGINT, signal.SIGHUP)
_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


class SpawnExecutor(ProcessPoolExecutor):
    """An executor whose processes end with this one and import nothing from the current folder."""

    def __init__(self, workers: int):
        # a fork would copy the locks of our threads in whatever state they are
        spawn = multiprocessing.get_context("spawn")
        with _safe_path(), _block_interrupts():
            resource_tracker.ensure_running()  # if started later, Ctrl-C would reach it
            super().__init__(workers, spawn, initializer=_init_worker)

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit work; Python's executor starts its processes here."""
        with _safe_path(), _block_interrupts():
            return super().submit(work, *args, **kwargs)


@contextmanager
def _safe_path() -> Iterator[None]:
    """Context for starting processes: their `python -c` must not import from the current folder."""
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        del os.environ[_SAFE_PATH]
        if before is not None:
            os.environ[_SAFE_PATH] = before


class WorkerKilled(DataError):
    """A process of the pool ended before finishing its work."""


class ProcessPool:
    """Processes that share the work; with one worker or none it is done in this process."""

    def __init__(self, workers: int):
        self.workers = workers
        self._executor: ProcessPoolExecutor | None = None
        if workers > 1:
            self._executor = SpawnExecutor(workers)

    def map(self, work: Callable[[_Task], _Result], tasks: Iterable[_Task]) -> Iterator[_Result]:
        """The result of `work` for each task, in order; a few tasks are submitted in advance."""
        if self._executor is None:
            yield from map(work, tasks)
            return
        pending: deque[Future[_Result]] = deque()
        try:
            for task in tasks:
                pending.append(self._executor.submit(work, task))
                if len(pending) > _TASKS_AHEAD * self.workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise WorkerKilled(
                "a process that reads images was killed; if memory ran out, use fewer --workers"
            ) from None
        finally:
            for future in pending:
                future.cancel()

    def __enter__(self) -> "ProcessPool":
        return self

    def __exit__(self, *_error: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)


@contextmanager
def _block_interrupts() -> Iterator[None]:
    """Context for starting processes that a terminal's signals never reach, even at their start.

    They inherit the blocked signals; in this process, they are delivered when the context ends.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_TERMINALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _init_worker() -> None:
    """Set up a worker process: it leaves signals to its parent, and ends with it."""
    for number in _OF_TERMINALS:
        signal.signal(number, signal.SIG_IGN)
    escape_worker_stderr()
    warnings.simplefilter("ignore")  # what Pillow warns about is reported as a finding instead
    parent = multiprocessing.parent_process()
    if parent is not None:
        watch_parent(parent.sentinel, lambda: os._exit(0))
