"""A process that fills rows of shared memory: `python -m phalanx.data.loading.worker`.

Tasks come as JSON lines on stdin and answers leave as JSON lines on stdout, in the same order.
The first line says what to fill from. The worker lives as long as its stdin is open, so it dies
with its parent, however that dies, and it takes no notice of signals meant for the parent.
"""

import json
import mmap
import os
import queue
import signal
import sys
import threading
import traceback
from types import TracebackType
from typing import Any

import numpy as np

from phalanx.data.loading.cache import open_caches
from phalanx.data.loading.reader import InputSpec, Reader, ReadingNotes
from phalanx.data.loading.shared_memory import rows_in
from phalanx.errors import UserError


class _LoaderWorker:
    """Answers the tasks of one parent."""

    def __init__(self, start: dict[str, Any]):
        self.recipe = InputSpec.from_json(start["recipe"])
        self.max_bad: int | None = start["max_bad"]
        self.readers: dict[str, Reader] = {}
        self.caches = open_caches(start["cache"]) if start["cache"] else {}
        slots, slot_bytes = start["slots"]
        shared = mmap.mmap(start["fd"], slots * slot_bytes)
        self.slots = np.frombuffer(shared, np.uint8).reshape(slots, slot_bytes)

    def answer(self, task: dict[str, Any]) -> dict[str, Any]:
        """Fill the slot of one task; what comes back says what is in it."""
        reader = self._reader(task["split"])
        found = reader.findings
        known_bad, known_notes = len(found.bad), len(found.notes)
        keys = np.array(task["keys"], np.int64)
        rows = reader.fill(keys, rows_in(self.slots[task["slot"]], len(keys), task["size"]))
        return {
            "split": task["split"],
            "labels": rows.labels.tolist(),
            "indices": rows.indices.tolist(),
            "bad": list(found.bad.items())[known_bad:],
            "notes": list(found.notes.items())[known_notes:],
        }

    def _reader(self, split: Any) -> Reader:
        if split not in self.readers:
            self.readers[split] = Reader(
                self.recipe,
                split,
                findings=ReadingNotes(),
                max_bad=self.max_bad,
                cache=self.caches.get(split),
            )
        return self.readers[split]


def _send(answer: dict[str, Any]) -> None:
    """Write one answer; a parent that is gone ends the worker."""
    try:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os._exit(0)


def _send_crash(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Tell the parent about a mistake in this program, in place of a traceback on stderr."""
    _send({"crash": "".join(traceback.format_exception(kind, error, trace))})


def _read_tasks(tasks: "queue.Queue[str]") -> None:
    """Queue each line of stdin; leave at once when the parent closes it, even amid a task."""
    for line in sys.stdin:
        tasks.put(line)
    os._exit(0)


def main() -> None:
    """Serve until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a stopping parent still finishes its step
    sys.excepthook = _send_crash
    tasks: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read_tasks, args=(tasks,), daemon=True).start()
    worker = _LoaderWorker(json.loads(tasks.get()))
    while True:
        task = json.loads(tasks.get())
        try:
            _send(worker.answer(task))
        except UserError as error:
            _send({"error": type(error).__name__, "text": str(error)})


if __name__ == "__main__":
    main()
