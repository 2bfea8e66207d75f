"""A process that loads a server for some seconds: `python -m phalanx.client.load_process`.

It reads one line of JSON, and writes one.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from phalanx.client.connection import parse_address
from phalanx.client.load_generator import LoadOptions, send_images
from phalanx.client.protocols import ServedModel
from phalanx.client.served_model import read_api_key
from phalanx.errors import NetworkError


@dataclass(frozen=True, kw_only=True)
class LoadJob:
    """The job of one process: files to send from memory, connections and seconds."""

    url: str
    model: str
    files: tuple[str, ...]
    options: LoadOptions


@dataclass
class LoadTimes:
    """The times, latencies and failures of the requests of several processes."""

    ended_at: list[float] = field(default_factory=list)  # seconds on the clock of the machine
    took_s: list[float] = field(default_factory=list)
    images: list[int] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)  # images
    began_at: float = 0.0  # when the last process began
    stopped_at: float = 0.0  # when the first one stopped
    busiest: float = 0.0  # share of a core that a process used: near 1, it could send no faster


def measure_load(job: LoadJob, processes: int) -> LoadTimes:
    """Run a job in several processes, which share its connections."""
    connections = job.options.threads
    shares = [connections // processes + (at < connections % processes) for at in range(processes)]
    times = LoadTimes()
    with ExitStack() as stack:
        children = [stack.enter_context(_LoadChild(job, share)) for share in shares if share]
        found = [child.read() for child in children]
    times.began_at = max(one["began_at"] for one in found)
    times.stopped_at = min(one["began_at"] for one in found) + (job.options.seconds or 0.0)
    times.busiest = max(one["busy"] for one in found)
    for one in found:
        times.failures.update(one["failures"])
        times.ended_at += one["ended_at"]
        times.took_s += one["took_s"]
        times.images += one["images"]
    return times


class _LoadChild:
    """Context with one of the processes, which ends with the block or with this process."""

    def __init__(self, job: LoadJob, threads: int) -> None:
        facts = {**asdict(job), "options": {**asdict(job.options), "threads": threads}}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "phalanx.client.load_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(facts) + "\n")
        self._process.stdin.flush()

    def __enter__(self) -> "_LoadChild":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def read(self) -> dict[str, Any]:
        """The results of the process."""
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text:
            raise NetworkError(
                "a client process of the benchmark ended early; run it again, with fewer "
                "--max-connections if memory ran out"
            )
        found: dict[str, Any] = json.loads(text)
        return found


def _run_job(facts: dict[str, Any]) -> dict[str, Any]:
    """Do the job that a line of JSON describes."""
    files = [(Path(file).name, Path(file).read_bytes()) for file in facts["files"]]
    busy_s = time.process_time()
    result = send_images(
        parse_address(facts["url"], api_key=read_api_key(None)),
        ServedModel(facts["model"]),
        len(files),
        files.__getitem__,
        options=LoadOptions(**facts["options"]),
    )
    requests = result.requests
    unreadable: Sequence[str] = [a.problem for a in result.answers.values() if a.problem]
    failures = (
        result.failures
        + Counter(unreadable)
        + Counter({f"{why} (sent again)": count for why, count in result.retries.items()})
    )
    return {
        "began_at": result.began_at,
        "busy": (time.process_time() - busy_s) / result.took_s,
        "ended_at": [request.ended_at for request in requests],
        "took_s": [request.took_s for request in requests],
        "images": [request.images for request in requests],
        "failures": failures,
    }


def main() -> None:
    """Read the job, do it, and write the results."""
    from phalanx.parent_process import watch_parent

    facts = json.loads(sys.stdin.readline())
    watch_parent(sys.stdin.fileno(), lambda: os._exit(1))
    sys.stdout.write(json.dumps(_run_job(facts)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
