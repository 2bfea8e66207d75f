"""Worker processes and the shared memory they fill.

Neither multiprocessing nor fork is used: this process has threads and perhaps a GPU, and forking
such a process sometimes hangs. A worker is a plain child process that reads tasks from a pipe.
Pixels go through anonymous memory, so that nothing is left behind however the processes end.

Tasks are assigned to the workers in turn and each worker answers in the order of its tasks, so a
worker's next answer belongs to the oldest task it was sent. A task's slot of the shared memory
belongs to its worker until the answer arrives, and then to this process until the next rows are
requested. What a task fills depends only on its positions: it can be sent again, to another
process, and the number of workers affects only the speed. Training and scoring may each use the
pool from their own thread; a lock makes them take turns.
"""

import json
import mmap
import os
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from phalanx import errors
from phalanx.data.formats.file_bytes import list_copies, open_anonymous_memory
from phalanx.data.formats.sources import Split
from phalanx.data.loading.opened_rows import (
    OpenedRows,
    SlotContents,
    view_slot,
)
from phalanx.data.loading.read_problems import ReadProblems
from phalanx.data.loading.reader import BatchRequest, InputSpec
from phalanx.errors import DataError

_MAX_SHARED_BYTES = 1 << 29  # for images of one split that wait for their use
_EXIT_TIMEOUT_S = 2.0  # for a worker to exit once its pipe is closed


class _WorkerLost(Exception):
    """A worker that died or hangs; the text says which."""


class _PoolClosed(Exception):
    """Raised in a thread that waits for a worker when the pool is closed."""


@dataclass(eq=False)
class _PendingTask:
    """A task that was sent to a worker, and its answer once it has arrived."""

    worker: int
    message: dict[str, Any]
    answer: dict[str, Any] | None = None


class _WorkerProcess:
    """A worker's process and the pipes to it."""

    answer_timeout_s = 300.0  # a worker that is silent for this long hangs

    def __init__(self, inherited: tuple[int, ...]):
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "phalanx.data.loading.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=inherited,
            start_new_session=True,  # Ctrl-C in the terminal is for the parent only
            env={**os.environ, "PYTHONPATH": path, **one_thread},
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        self._unread = b""

    def send(self, message: dict[str, Any]) -> None:
        """Write one line of JSON."""
        try:
            self._stdin.write(json.dumps(message).encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError:
            raise _WorkerLost(self._describe_exit()) from None

    def receive(self) -> dict[str, Any]:
        """Wait for one line of JSON."""
        fd = self._stdout.fileno()  # not the file object: select does not see what it has buffered
        while b"\n" not in self._unread:
            if not select.select([fd], [], [], self.answer_timeout_s)[0]:
                self.process.kill()
                raise _WorkerLost(f"did not answer for {self.answer_timeout_s:g} s")
            piece = os.read(fd, 1 << 16)
            if not piece:
                raise _WorkerLost(self._describe_exit())
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line.decode())
        return answer

    def _describe_exit(self) -> str:
        """How a worker whose pipe is closed has ended."""
        try:
            status = self.process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            status = 0
        return (
            f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited ({status})"
        )

    def close_stdin(self) -> None:
        """Make the worker exit, without waiting for it."""
        with suppress(BrokenPipeError):  # a dead worker did not read what is flushed now
            self._stdin.close()

    def stop(self) -> None:
        """Make the worker exit, and kill it if it does not."""
        self.close_stdin()
        try:
            self.process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._stdout.close()


class WorkerPool:
    """Workers that fill batches ahead of their use, in a ring of slots for each split.

    Each split has its own ring, so that scoring can run during training. A worker that dies or
    hangs is restarted once, with the tasks it had not answered.
    """

    def __init__(
        self,
        spec: InputSpec,
        problems: dict[Split, ReadProblems],
        *,
        workers: int,
        slot_bytes: int,
        depth: int,
        max_bad: int | None,
        cache: dict[str, Any] | None,
    ):
        self._problems = problems
        self.depth = max(workers, min(depth, _MAX_SHARED_BYTES // slot_bytes))  # slots of a ring
        self._first_slot: dict[Split, int] = {"train": 0, "valid": self.depth}
        self._memory = open_anonymous_memory(2 * self.depth * slot_bytes)
        shared = mmap.mmap(self._memory.fileno(), 2 * self.depth * slot_bytes)
        self._slots = np.frombuffer(shared, np.uint8).reshape(-1, slot_bytes)
        self._copies = list_copies()  # kept, because a restarted worker needs them, too
        self._start = {
            "copies": {key: (c.memory.fileno(), len(c)) for key, c in self._copies.items()},
            "spec": spec.to_dict(),
            "max_bad": max_bad,
            "cache": cache,
            "slots": (2 * self.depth, slot_bytes),
            "fd": self._memory.fileno(),
        }
        self._inherited = (
            self._memory.fileno(),
            *([cache["fd"]] if cache else []),
            *(copy.memory.fileno() for copy in self._copies.values()),
        )
        self._lock = Lock()
        self.submitted = 0
        self.pending: list[deque[_PendingTask]] = [deque() for _ in range(workers)]
        self._restarted: dict[int, str] = {}  # worker to what happened to it
        # how many of the images that stay with the cores each worker was sent
        self._sent = {split: [0] * workers for split in problems}
        self._stopping: list[_WorkerProcess] = []
        self.workers = [_WorkerProcess(self._inherited) for _ in range(workers)]
        for worker in range(workers):
            self._send(worker, self._start)

    def stream(
        self, split: Split, requests: Iterable[BatchRequest]
    ) -> Generator[OpenedRows, None, None]:
        """The rows of each request, in order, while workers fill the next ones.

        They are overwritten when the next ones are requested.
        """
        ring: deque[_PendingTask] = deque()
        try:
            for number, request in enumerate(requests):
                if len(ring) == self.depth:
                    yield self._collect(ring.popleft())
                slot = self._first_slot[split] + number % self.depth
                ring.append(self._submit(split, request, slot))
            while ring:
                yield self._collect(ring.popleft())
        except GeneratorExit:
            while ring and self.workers:  # slots can be reused only when no worker writes to them
                self._collect(ring.popleft())
            raise

    def _submit(self, split: Split, request: BatchRequest, slot: int) -> _PendingTask:
        positions = request.positions.tolist()
        message = {"split": split, "slot": slot, **request._asdict(), "positions": positions}
        with self._lock:
            worker = self.submitted % len(self.pending)
            message["cores_only"] = self._list_unsent(split, worker)
            task = _PendingTask(worker, message)
            self.pending[task.worker].append(task)  # before it is sent: a restart sends it again
            self.submitted += 1
            self._send(task.worker, message)
        return task

    def _list_unsent(self, split: Split, worker: int) -> list[int]:
        """Images that stay with the cores, which a worker would still leave to the GPU."""
        known, sent = self._problems[split].cores_only, self._sent[split]
        if sent[worker] == len(known):
            return []
        unsent = list(known)[sent[worker] :]
        sent[worker] += len(unsent)
        return unsent

    def _collect(self, task: _PendingTask) -> OpenedRows:
        with self._lock:
            while task.answer is None:
                self._take_answer(task.worker)
        if "error" in task.answer:
            raise getattr(errors, task.answer["error"])(task.answer["text"])
        contents = SlotContents(*task.answer["contents"])
        return view_slot(contents, task.message["size"], self._slots[task.message["slot"]])

    def _take_answer(self, worker: int) -> None:
        """Wait for a worker's next answer, which may be to a task of the other split."""
        answer = self._receive(worker)
        answered = self.pending[worker].popleft()
        answered.answer = answer
        if "error" not in answer:
            problems = self._problems[answered.message["split"]]
            problems.bad_images.update(answer["bad"])
            problems.notes.update(answer["notes"])
            problems.cores_only.update(dict.fromkeys(answer["cores_only"]))
            indices = answer["contents"][0]
            problems.checksums.update(zip(indices, answer["checksums"], strict=True))

    def _find_worker(self, worker: int) -> _WorkerProcess:
        workers = self.workers  # another thread may close the pool now
        if not workers:
            raise _PoolClosed
        return workers[worker]

    def _send(self, worker: int, message: dict[str, Any]) -> None:
        try:
            self._find_worker(worker).send(message)
        except _WorkerLost as lost:
            self._restart(worker, str(lost))

    def _receive(self, worker: int) -> dict[str, Any]:
        while True:
            try:
                answer = self._find_worker(worker).receive()
            except _WorkerLost as lost:
                self._restart(worker, str(lost))
                continue
            if "crash" in answer:
                raise RuntimeError(f"data worker {worker} failed:\n{answer['crash']}")
            return answer

    def _restart(self, worker: int, how: str) -> None:
        """Replace a lost process by a new one; DataError the second time."""
        lost = self._find_worker(worker)
        what = f"data worker {worker} (pid {lost.process.pid}) {how}"
        before = self._restarted.get(worker)
        if before is not None:
            raise DataError(
                f"{what}; the one before it {before}. If memory ran out, use fewer --workers or a "
                "smaller batch; --workers 0 shows what happens in one process"
            )
        self._restarted[worker] = how
        for sent in self._sent.values():
            sent[worker] = 0
        self._problems["train"].notes[-1 - worker] = f"{what}; it was restarted"
        lost.stop()
        self.workers[worker] = _WorkerProcess(self._inherited)
        for message in (self._start, *(task.message for task in self.pending[worker])):
            self._send(worker, message)

    def stop_workers(self) -> None:
        """Make the workers exit, without waiting for them; a thread waiting for one continues."""
        self._stopping += self.workers
        self.workers = []
        for worker in self._stopping:
            worker.close_stdin()  # all of them first, so that they exit in parallel

    def close(self) -> None:
        """Wait until the workers have exited; may be called twice."""
        if self.workers:
            self.stop_workers()
        while self._stopping:
            self._stopping.pop().stop()
        self._memory.close()
