"""A rank for the tests of the supervisor: it runs the code it is given, with these names at hand.

Like the ranks of a run it may watch its supervisor and show its stack; that is imported only then,
since most of the many ranks of the tests need neither.
"""

import faulthandler
import os
import signal  # noqa: F401 - for the code that is given
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])
rank, restart = int(os.environ["RANK"]), int(os.environ["PHALANX_RESTART"])


def note(text: object) -> None:
    with (folder / f"{rank}.txt").open("a") as file:
        file.write(f"{text} ")


def write_pid(number: int, pid: int) -> None:
    path = folder / f"{number}.new"
    path.write_text(str(pid))
    path.rename(folder / f"{restart}-{number}.pid")


def wait_for(*names: str) -> None:
    files = [folder / name for name in names]
    while not all(file.exists() and file.stat().st_size for file in files):
        time.sleep(0.005)


def hang() -> None:
    time.sleep(20)
    (folder / "outlived").touch()


def wait_for_end(other: int) -> None:
    wait_for(f"{restart}-{other}.pid")
    stat = Path("/proc", (folder / f"{restart}-{other}.pid").read_text(), "stat")
    try:
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.005)
    except OSError:
        pass  # the supervisor has seen it
    time.sleep(0.03)  # until it has


def watch() -> None:
    from phalanx.parallel.supervisor import watch_supervisor

    watch_supervisor()


def show_stack_when_aborted() -> None:
    faulthandler.enable(2)


write_pid(rank, os.getpid())
exec(sys.argv[2])
