"""Worker processes and the shared memory they fill."""

import json
import mmap
import os
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx import errors
from phalanx.data.formats.sources import Split
from phalanx.data.loading.reader import InputSpec, ReadingNotes
from phalanx.data.loading.shared_memory import anonymous_memory, rows_in
from phalanx.errors import DataError

_SHARED_BYTES = 1 << 29  # the most that waits, filled, for the training loop
_GOODBYE_S = 2.0
HUNG_S = 300.0  # a worker that says nothing for so long will not speak again


class Chunk(NamedTuple):
    """Rows that a worker has filled; `pixels` is overwritten once the next chunk is asked for."""

    pixels: NDArray[np.uint8]
    labels: list[int]
    indices: list[int]


class BatchRequest(NamedTuple):
    """Images to fill in: by stream positions, or by indices when scoring."""

    keys: NDArray[np.int64]
    size: int  # height and width


class _PendingTask(NamedTuple):
    """A task under way."""

    number: int
    slot: int
    rows: int
    size: int


class _Lines:
    """The lines that come out of a pipe, with an end to the patience."""

    def __init__(self, fd: int):
        self._fd, self._rest = fd, b""

    def next(self, patience_s: float) -> bytes | None:
        """One line; None when the pipe is closed. Raises TimeoutError when none comes."""
        while b"\n" not in self._rest:
            if not select.select([self._fd], [], [], patience_s)[0]:
                raise TimeoutError
            piece = os.read(self._fd, 1 << 16)
            if not piece:
                return None
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line


class WorkerPool:
    """Workers that fill chunks of rows ahead of their use.

    A worker that dies or hangs is started once more, with the tasks it had not answered.

    Each split has a ring of slots of its own, so that scoring can run amid training. Tasks go to
    the workers in turn and each answers in order: the answer to a task is found without searching.
    """

    def __init__(
        self,
        recipe: InputSpec,
        findings: dict[Split, ReadingNotes],
        *,
        workers: int,
        rows: int,
        depth: int,
        start: dict[str, Any],
    ):
        self.findings = findings
        slot_bytes = rows * recipe.image_size**2 * 3
        self.depth = max(workers, min(depth, _SHARED_BYTES // slot_bytes))
        self.rings: dict[Split, int] = {"train": 0, "valid": self.depth}  # each one's first slot
        self.memory = anonymous_memory(2 * self.depth * slot_bytes)
        self.start = {
            **start,
            "recipe": recipe.to_json(),
            "slots": (2 * self.depth, slot_bytes),
            "fd": self.memory.fileno(),
        }
        self.submitted = 0
        self.tasks: dict[int, dict[str, Any]] = {}  # sent and not answered, by number
        self.restarted: dict[int, str] = {}  # worker to what happened to it
        self.answers: dict[int, dict[str, Any]] = {}  # came while another was waited for
        self.waiting: list[deque[int]] = [deque() for _ in range(workers)]
        shared = mmap.mmap(self.memory.fileno(), 2 * self.depth * slot_bytes)
        self.slots = np.frombuffer(shared, np.uint8).reshape(-1, slot_bytes)
        self.inherited = (self.memory.fileno(), *self._cache_fd())
        self.processes = [_start_worker(self.inherited) for _ in range(workers)]
        self.lines = [_lines_of(process) for process in self.processes]
        for worker in range(workers):
            self._send(worker, self.start)

    def _cache_fd(self) -> tuple[int, ...]:
        cache = self.start["cache"]
        return () if cache is None else (cache["fd"],)

    def stream(self, split: Split, wishes: Iterator[BatchRequest]) -> Generator[Chunk, None, None]:
        """The filled rows of each wish, in order, with the following ones under way."""
        ring: deque[_PendingTask] = deque()
        try:
            for number, wish in enumerate(wishes):
                if len(ring) == self.depth:
                    yield self._collect(ring.popleft())
                ring.append(self._submit(split, wish, self.rings[split] + number % self.depth))
            while ring:
                yield self._collect(ring.popleft())
        except GeneratorExit:
            while ring and self.processes:  # slots are free again only when nobody writes there
                self._collect(ring.popleft())
            raise

    def _submit(self, split: Split, wish: BatchRequest, slot: int) -> _PendingTask:
        ticket = _PendingTask(self.submitted, slot, len(wish.keys), wish.size)
        worker = ticket.number % len(self.processes)
        task = {"split": split, "keys": wish.keys.tolist(), "size": wish.size, "slot": slot}
        self.waiting[worker].append(ticket.number)
        self.tasks[ticket.number] = task
        self._send(worker, task)
        self.submitted += 1
        return ticket

    def _collect(self, ticket: _PendingTask) -> Chunk:
        worker = ticket.number % len(self.processes)
        while ticket.number not in self.answers:
            answer = self._receive(worker)
            number = self.waiting[worker].popleft()
            self.tasks.pop(number)
            self.answers[number] = answer
            self._remember(answer)
        answer = self.answers.pop(ticket.number)
        if "error" in answer:
            raise getattr(errors, answer["error"])(answer["text"])
        pixels = rows_in(self.slots[ticket.slot], ticket.rows, ticket.size)
        return Chunk(pixels, answer["labels"], answer["indices"])

    def _remember(self, answer: dict[str, Any]) -> None:
        if "error" not in answer:
            self.findings[answer["split"]].bad.update(answer["bad"])
            self.findings[answer["split"]].notes.update(answer["notes"])

    def _send(self, worker: int, message: dict[str, Any]) -> None:
        stdin = self.processes[worker].stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(message) + "\n")
            stdin.flush()
        except BrokenPipeError:
            self._restart(worker, _how_it_ended(self.processes[worker]))

    def _receive(self, worker: int) -> dict[str, Any]:
        while True:
            try:
                line = self.lines[worker].next(HUNG_S)
            except TimeoutError:
                self.processes[worker].kill()
                self._restart(worker, f"gave no answer for {HUNG_S:g} s")
                continue
            if line is not None:
                break
            self._restart(worker, _how_it_ended(self.processes[worker]))
        answer: dict[str, Any] = json.loads(line)
        if "crash" in answer:
            raise RuntimeError(f"data worker {worker} failed:\n{answer['crash']}")
        return answer

    def _restart(self, worker: int, how: str) -> None:
        """A new process in the place of one that is gone, with its tasks; the second time an error.

        Tasks are pure functions of their keys: done again, they fill the same bytes.
        """
        process = self.processes[worker]
        told = f"data worker {worker} (pid {process.pid}) {how}"
        before = self.restarted.get(worker)
        if before is not None:
            raise DataError(
                f"{told}; the one before it {before}. When memory ran out, use fewer --workers "
                "or a smaller batch; --workers 0 shows what happens in one process"
            )
        self.restarted[worker] = how
        self.findings["train"].notes[-1 - worker] = f"{told}; it was started again"
        _end(process)
        self.processes[worker] = _start_worker(self.inherited)
        self.lines[worker] = _lines_of(self.processes[worker])
        for message in (self.start, *(self.tasks[number] for number in self.waiting[worker])):
            self._send(worker, message)

    def close(self) -> None:
        """End the workers; does nothing the second time."""
        processes, self.processes = self.processes, []
        for process in processes:
            _close_pipe(process.stdin)
        for process in processes:
            _end(process)
        if processes:
            self.memory.close()


def _end(process: subprocess.Popen[str]) -> None:
    """See a worker off, and its pipes."""
    _close_pipe(process.stdin)
    try:
        process.wait(_GOODBYE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _close_pipe(process.stdout)


def _how_it_ended(process: subprocess.Popen[str]) -> str:
    """What became of a worker whose pipe is closed."""
    try:
        status = process.wait(_GOODBYE_S)
    except subprocess.TimeoutExpired:
        status = 0
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"left ({status})"


def _lines_of(process: subprocess.Popen[str]) -> _Lines:
    assert process.stdout is not None
    return _Lines(process.stdout.fileno())


def _start_worker(inherited: tuple[int, ...]) -> subprocess.Popen[str]:
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "phalanx.data.loading.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=inherited,
        start_new_session=True,  # Ctrl-C in the terminal is the parent's to answer
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )


def _close_pipe(pipe: Any) -> None:
    with suppress(BrokenPipeError):  # a dead worker never read what was still to be flushed
        pipe.close()
