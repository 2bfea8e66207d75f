"""Work on many images, shared among processes; its results come in the order of the tasks."""

import multiprocessing
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from types import TracebackType
from typing import TypeVar

from phalanx.errors import DataError

_AHEAD = 4  # tasks under way for each process: enough to bridge a slow one, few in memory
_Task = TypeVar("_Task")
_Made = TypeVar("_Made")


class ProcessPool:
    """Processes that share the work; with one worker or none it is done here."""

    def __init__(self, workers: int):
        self.workers = workers
        spawn = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(workers, spawn, initializer=_begin) if workers > 1 else None

    def map(self, work: Callable[[_Task], _Made], tasks: Iterable[_Task]) -> Iterator[_Made]:
        """What `work` gives for each task, in order; a few tasks are under way ahead of it."""
        if self.pool is None:
            yield from map(work, tasks)
            return
        waiting: deque[Future[_Made]] = deque()
        try:
            for task in tasks:
                waiting.append(self.pool.submit(work, task))
                if len(waiting) > _AHEAD * self.workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise DataError(
                "a process that reads images was killed; when memory ran out, use fewer --workers"
            ) from None
        finally:
            for future in waiting:
                future.cancel()

    def __enter__(self) -> "ProcessPool":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """Set up a process: Ctrl-C is its parent's to answer, and it does not outlive that."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # what Pillow mutters about an image is told as a finding
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(0)
