"""Runs on several ranks as real processes, for tests to kill, stop and look at."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from phalanx.report.summary import read_summary
from small_runs import small_run

_Found = TypeVar("_Found")
LONGEST = 240  # seconds; what takes longer hangs


def ranked_run(data: Path, run: Path, *, ranks: int = 2, **options: object) -> list[str]:
    """The words of a training of a few seconds on so many ranks, of 16 images a step."""
    given = {"batch-size": 16 // ranks, "replicas": ranks, "threads": 1, "determinism": "strict"}
    launch = {} if options.pop("launched", False) else {"devices": ranks}
    return small_run(data, run, **(given | launch | options))


class Launched:
    """A command that starts ranks, in a session of its own."""

    def __init__(
        self,
        *words: object,
        run: Path | None = None,
        launcher: list[str] | None = None,
        cwd: Path | None = None,
        **variables: object,
    ) -> None:
        self.run = run
        self.process = subprocess.Popen(
            [*(launcher or [sys.executable]), "-m", "phalanx", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**os.environ, "PYTHONWARNINGS": "default"}
            | {name: str(value) for name, value in variables.items()},
            start_new_session=True,
        )

    def rank(self, number: int, *, timeout: float = 60) -> int:
        """The process of a rank, once it is there."""
        return self._wait_for(lambda: find_ranks(self.process.pid).get(number), timeout)

    def wait_for_steps(self, steps: int, *, timeout: float = 60) -> None:
        """Until that many steps are recorded."""
        assert self.run is not None
        run = self.run
        self._wait_for(lambda: count_steps(run) >= steps or None, timeout)

    def _wait_for(self, look: Callable[[], _Found | None], timeout: float) -> _Found:
        """What `look` finds while the command runs."""

        def look_if_alive() -> _Found | None:
            found = look()
            assert found is not None or self.process.poll() is None, self.process.communicate()
            return found

        try:
            return wait_for(look_if_alive, timeout=timeout)
        except BaseException:
            self.process.kill()  # its ranks leave with it
            self.process.communicate()
            raise

    def end(self) -> subprocess.CompletedProcess[str]:
        """How it ended and what it said; nothing of it runs any more."""
        ranks = find_ranks(self.process.pid)
        try:
            out, err = self.process.communicate(timeout=LONGEST)
        finally:
            self.process.kill()
        assert wait_for(lambda: not any(map(is_running, ranks.values())) or None, timeout=10)
        return subprocess.CompletedProcess([], self.process.returncode, out, err)


def find_ranks(parent: int) -> dict[int, int]:
    """The processes of the ranks that a process has started, by their numbers."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) != parent:
                continue
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended just now
        ranks = [int(text[5:]) for text in variables if text.startswith(b"RANK=")]
        found |= {rank: int(folder.name) for rank in ranks if is_running(int(folder.name))}
    return found


def is_running(pid: int) -> bool:
    """Whether a process lives, and is not only waiting for its parent to take notice."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def kill(pid: int) -> None:
    """SIGKILL to one process."""
    os.kill(pid, signal.SIGKILL)


def wait_for(look: Callable[[], _Found | None], *, timeout: float) -> _Found:
    """What `look` finds, once it is not None."""
    deadline = time.monotonic() + timeout
    while (found := look()) is None:
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return found


def count_steps(run: Path) -> int:
    """How many steps a run has recorded."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def assert_same_result(run: Path, expected: Path) -> None:
    """Weights, metrics of every step and scores are the same to the last bit."""
    assert read_summary(run).weights_sha256 == read_summary(expected).weights_sha256
    for name in ("metrics.jsonl", "validation.csv", "predictions.csv"):
        assert (run / name).read_bytes() == (expected / name).read_bytes()


def world_variables(rank: int, size: int, port: int | None = None) -> Mapping[str, object]:
    """What somebody who starts ranks by hand sets."""
    if port is None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {"RANK": rank, "WORLD_SIZE": size, **meeting}
