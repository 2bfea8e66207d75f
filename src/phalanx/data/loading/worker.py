"""A process that fills slots of shared memory: `python -m phalanx.data.loading.worker`.

It reads tasks as JSON lines from stdin and writes answers as JSON lines to stdout, in the same
order. The first line says what to fill from. The worker exits when its stdin is closed, so it ends
with its parent, however that ends, and it ignores signals meant for the parent.
"""

import json
import mmap
import os
import queue
import signal
import sys
import threading
import traceback
from typing import Any

import numpy as np

from phalanx.data.formats.file_bytes import inherit_copies
from phalanx.data.loading.cache import open_caches
from phalanx.data.loading.opened_rows import fill_slot
from phalanx.data.loading.reader import BatchRequest, InputSpec, Reader
from phalanx.errors import UserError
from phalanx.escapes import escape_worker_stderr


class _LoaderWorker:
    """Carries out the tasks of one parent."""

    def __init__(self, start: dict[str, Any]):
        inherit_copies(start["copies"])
        self._spec = InputSpec.from_dict(start["spec"])
        self._max_bad: int | None = start["max_bad"]
        self._caches = open_caches(start["cache"]) if start["cache"] else {}
        self._readers: dict[str, Reader] = {}
        slots, slot_bytes = start["slots"]
        shared = mmap.mmap(start["fd"], slots * slot_bytes)
        self._slots = np.frombuffer(shared, np.uint8).reshape(slots, slot_bytes)

    def run_task(self, task: dict[str, Any]) -> dict[str, Any]:
        """Fill the slot of one task; returns what is in it, with problems and checksums."""
        split = task["split"]
        if split not in self._readers:
            self._readers[split] = Reader(
                self._spec, split, max_bad=self._max_bad, cache=self._caches.get(split)
            )
        reader = self._readers[split]
        problems = reader.problems
        problems.cores_only.update(dict.fromkeys(task["cores_only"]))
        bad_before, notes_before = len(problems.bad_images), len(problems.notes)
        cores_before = len(problems.cores_only)
        positions = np.array(task["positions"], np.int64)
        request = BatchRequest(positions, task["size"], task["by_gpu"])
        contents = fill_slot(reader, request, self._slots[task["slot"]])
        checksums = [problems.checksums.get(index, 0) for index in contents.indices]
        problems.checksums.clear()
        return {
            "contents": contents,
            "checksums": checksums,
            "bad": list(problems.bad_images.items())[bad_before:],
            "notes": list(problems.notes.items())[notes_before:],
            "cores_only": list(problems.cores_only)[cores_before:],
        }


def _send(answer: dict[str, Any]) -> None:
    """Write one answer; exit if the parent is gone."""
    try:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os._exit(0)


def _read_tasks(tasks: "queue.Queue[str]") -> None:
    """Queue each line of stdin; exit as soon as the parent closes it, even during a task."""
    for line in sys.stdin:
        tasks.put(line)
    os._exit(0)


def main() -> None:
    """Carry out tasks until stdin is closed."""
    escape_worker_stderr()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a stopping parent still finishes its step
    # a bug is reported to the parent, which shows the traceback
    sys.excepthook = lambda *error: _send({"crash": "".join(traceback.format_exception(*error))})
    tasks: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read_tasks, args=(tasks,), daemon=True).start()
    worker = _LoaderWorker(json.loads(tasks.get()))
    while True:
        task = json.loads(tasks.get())
        try:
            _send(worker.run_task(task))
        except UserError as error:
            _send({"error": type(error).__name__, "text": str(error)})


if __name__ == "__main__":
    main()
