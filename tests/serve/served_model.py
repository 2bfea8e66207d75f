"""A real server process on a free port of loopback, and what it holds of the machine."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hostile_bodies import Target

READY_S = 120.0
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024


@dataclass(frozen=True)
class Holdings:
    """Memory, open files and threads of a process."""

    memory_mib: float
    files: int
    threads: int

    def __str__(self) -> str:
        return f"{self.memory_mib:.0f} MiB, {self.files} files, {self.threads} threads"


@dataclass(frozen=True)
class Server:
    """A server that is ready."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def measure(self) -> Holdings:
        """What it holds now."""
        home = Path(f"/proc/{self.process.pid}")
        pages = int((home / "statm").read_text().split()[1])
        files, threads = (len(list((home / name).iterdir())) for name in ("fd", "task"))
        return Holdings(pages * PAGE_KIB / 1024, files, threads)

    def find_target(self) -> Target:
        """Its model, as it describes it itself."""
        about = self.get_json("/v2/models/" + self.find_name())
        tensor = next(one for one in about["inputs"] if one["name"] in ("input", "image"))
        return Target(about["name"], tensor["name"], tuple(tensor["shape"][1:]))

    def find_name(self) -> str:
        """The name of its model, from the line that says it is ready."""
        found = re.search(r"serving (\S+) on http", self.log.read_text(errors="replace"))
        assert found
        return found[1]

    def get_json(self, path: str) -> dict:
        """An answer to GET."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return json.load(answer)


@contextmanager
def open_server(
    words: list[object], folder: Path, *, core: int | None = None, **env: str
) -> Iterator[Server]:
    """`phalanx serve WORDS` on a free port, ended by SIGTERM; core: the only one it may use."""
    log = folder / f"serve-{time.monotonic_ns()}.log"
    pinned = [] if core is None else ["taskset", "--cpu-list", str(core)]
    command = [*pinned, sys.executable, "-m", "phalanx", "serve", *map(str, words), "--port", "0"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **env},
        )
    try:
        yield Server(process, wait_for_port(process, log), log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for_port(process: subprocess.Popen[bytes], log: Path) -> int:
    """The port in the line that a server prints when it is ready."""
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        if found := re.search(
            r"serving \S+ on http://[^:]+:(\d+)/", log.read_text(errors="replace")
        ):
            return int(found[1])
        assert process.poll() is None, f"ended with {process.returncode}:\n{log.read_text()}"
        time.sleep(0.05)
    raise AssertionError(f"not ready after {READY_S:.0f} s:\n{log.read_text()}")


def wait_until(true: Callable[[], bool], seconds: float) -> bool:
    """Whether it becomes true within so many seconds."""
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    return true()
