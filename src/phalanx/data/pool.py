"""Worker processes and the shared memory they fill."""

import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx import errors
from phalanx.data.batches import Findings, Recipe
from phalanx.data.sources import Split
from phalanx.errors import DataError

ROWS = 16  # rows of one task: few enough that several workers share a step
SHARED_BYTES = 1 << 29  # the most that waits, filled, for the training loop
GOODBYE_S = 2.0


class Chunk(NamedTuple):
    """Rows that a worker has filled; `pixels` is overwritten once the next chunk is asked for."""

    pixels: NDArray[np.uint8]
    labels: list[int]
    indices: list[int]


class Ticket(NamedTuple):
    """A task under way."""

    number: int
    slot: int
    rows: int


class Pool:
    """Workers that fill chunks of rows ahead of their use.

    Each split has a ring of slots of its own, so that scoring can run amid training. Tasks go to
    the workers in turn and each answers in order: the answer to a task is found without searching.
    """

    def __init__(
        self,
        recipe: Recipe,
        findings: dict[Split, Findings],
        *,
        workers: int,
        depth: int,
        max_bad: int | None,
    ):
        self.findings = findings
        size = recipe.image_size
        slot_bytes = ROWS * size * size * 3
        self.depth = max(workers, min(depth, SHARED_BYTES // slot_bytes))
        self.rings: dict[Split, int] = {"train": 0, "valid": self.depth}  # each one's first slot
        start = {
            "recipe": recipe.to_json(),
            "max_bad": max_bad,
            "slots": 2 * self.depth,
            "rows": ROWS,
        }
        self.submitted = 0
        self.answers: dict[int, dict[str, Any]] = {}  # came while another was waited for
        self.waiting: list[deque[int]] = [deque() for _ in range(workers)]
        self.processes: list[subprocess.Popen[str]] = []
        with _anonymous_memory(2 * self.depth * slot_bytes) as memory:
            shared = mmap.mmap(memory.fileno(), 2 * self.depth * slot_bytes)
            self.slots = np.frombuffer(shared, np.uint8).reshape(-1, ROWS, size, size, 3)
            for _ in range(workers):
                self.processes.append(_start_worker(memory.fileno()))
            for worker in range(workers):
                self._send(worker, {**start, "fd": memory.fileno()})

    def stream(
        self, split: Split, chunks: Iterator[NDArray[np.int64]]
    ) -> Generator[Chunk, None, None]:
        """The filled rows of each chunk of keys, in order, with the following ones under way."""
        ring: deque[Ticket] = deque()
        try:
            for number, keys in enumerate(chunks):
                if len(ring) == self.depth:
                    yield self._collect(ring.popleft())
                ring.append(self._submit(split, keys, self.rings[split] + number % self.depth))
            while ring:
                yield self._collect(ring.popleft())
        except GeneratorExit:
            while ring and self.processes:  # slots are free again only when nobody writes there
                self._collect(ring.popleft())
            raise

    def _submit(self, split: Split, keys: NDArray[np.int64], slot: int) -> Ticket:
        ticket = Ticket(self.submitted, slot, len(keys))
        worker = ticket.number % len(self.processes)
        self._send(worker, {"split": split, "keys": keys.tolist(), "slot": slot})
        self.waiting[worker].append(ticket.number)
        self.submitted += 1
        return ticket

    def _collect(self, ticket: Ticket) -> Chunk:
        worker = ticket.number % len(self.processes)
        while ticket.number not in self.answers:
            answer = self._receive(worker)
            self.answers[self.waiting[worker].popleft()] = answer
            self._remember(answer)
        answer = self.answers.pop(ticket.number)
        if "error" in answer:
            raise getattr(errors, answer["error"])(answer["text"])
        pixels = self.slots[ticket.slot, : ticket.rows]
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
            raise self._death(worker) from None

    def _receive(self, worker: int) -> dict[str, Any]:
        stdout = self.processes[worker].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line.endswith("\n"):
            raise self._death(worker)
        answer: dict[str, Any] = json.loads(line)
        if "crash" in answer:
            raise RuntimeError(f"data worker {worker} failed:\n{answer['crash']}")
        return answer

    def _death(self, worker: int) -> DataError:
        process = self.processes[worker]
        try:
            status = process.wait(GOODBYE_S)
        except subprocess.TimeoutExpired:
            status = 0
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"left ({status})"
        return DataError(
            f"data worker {worker} (pid {process.pid}) {how}; when memory ran out, use fewer "
            "--workers or a smaller batch, and --workers 0 shows what happens in one process"
        )

    def close(self) -> None:
        """End the workers; does nothing the second time."""
        processes, self.processes = self.processes, []
        for process in processes:
            _close_pipe(process.stdin)
        for process in processes:
            try:
                process.wait(GOODBYE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _close_pipe(process.stdout)


def _anonymous_memory(size: int) -> Any:
    """A file without a name, in memory where the system can: no crash leaves it behind."""
    if hasattr(os, "memfd_create"):
        memory = os.fdopen(os.memfd_create("phalanx"), "w+b")
    else:
        memory = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    os.ftruncate(memory.fileno(), size)
    return memory


def _start_worker(fd: int) -> subprocess.Popen[str]:
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "phalanx.data.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(fd,),
        start_new_session=True,  # Ctrl-C in the terminal is the parent's to answer
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )


def _close_pipe(pipe: Any) -> None:
    with suppress(BrokenPipeError):  # a dead worker never read what was still to be flushed
        pipe.close()
