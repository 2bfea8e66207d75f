"""Kill a tiny training before each of its writes, resume it, and say what became of it.

python crash_points.py DATA FOLDER: one process that has torch ready and forks: a child trains
until it is about to make its n-th write and leaves there without cleaning up, as SIGKILL does;
another resumes. An audit hook sees the writes, whoever makes them. Prints the writes as JSON, each
with the exit codes of its two children. Straight, never killed, is FOLDER/straight.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from phalanx.cli.main import main
from phalanx.report import plots
from small_runs import small_run

KILLED = 137
TRUNCATED_BYTES = 3  # of an append that the disk had only begun
OPTIONS = {
    "steps": 4,
    "ckpts_per_epoch": "3",
    "keep": 1,
    "logs_per_epoch": "3",
    "validation_frequency": "1/3",
    "ema_decay": 0.5,
}
EVENTS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.truncate")


def in_child(work: Callable[..., int], *given: object, **named: object) -> int:
    """The exit code of a forked process that does the work."""
    child = os.fork()
    if not child:
        os._exit(work(*given, **named))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def is_write(event: str, facts: tuple, root: str) -> bool:
    """Whether an audit event is a write below a folder, which is about to happen."""
    if event == "open":
        path, _, flags = facts
        writing = bool(flags & (os.O_WRONLY | os.O_RDWR))
        return writing and isinstance(path, str | Path) and str(path).startswith(root)
    return event in EVENTS and str(facts[0]).startswith(root)


def train(words: list[str], root: Path, *, kill_at: int, log: Path) -> int:
    """Train and leave before the write of that number; every write is noted in the log."""
    seen, appended = 0, None  # the file, and its size before

    def watch(event: str, facts: tuple) -> None:
        nonlocal seen, appended
        if not is_write(event, facts, str(root)):
            return
        seen += 1
        if seen == kill_at:
            path, size = appended or (None, 0)
            if path is not None and path.exists():
                os.truncate(path, max(size, path.stat().st_size - TRUNCATED_BYTES))
            os._exit(KILLED)
        path, appending = Path(facts[0]), event == "open" and facts[2] & os.O_APPEND
        # in one piece: the thread that saves comes by here, too
        appended = (path, path.stat().st_size if path.exists() else 0) if appending else None
        noted = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(noted, f"{event} {path.relative_to(root)}\n".encode())
        os.close(noted)

    sys.addaudithook(watch)
    return main(words)


def run_all(data: Path, folder: Path) -> list[dict]:
    """Every write of a run that exists, with the exit codes of the kill before it and the resume.

    What is killed before run.json is there is no run yet, and has nothing to go on with.
    """
    main(small_run(data, folder / "warm-up", **OPTIONS))  # all imports, once for all children
    log, straight = folder / "writes.log", folder / "straight"
    words = small_run(data, straight, **OPTIONS)
    assert in_child(train, words, straight, kill_at=0, log=log) == 0
    writes = log.read_text().splitlines()
    begun = 1 + next(n for n, line in enumerate(writes) if ".run.json" in line and "rename" in line)
    results = []
    for number, write in enumerate(writes[begun:], start=begun + 1):
        run = folder / f"killed-{number:03}"
        words = small_run(data, run, **OPTIONS)
        killed = in_child(train, words, run, kill_at=number, log=os.devnull)
        resumed = in_child(main, ["train", "--resume", str(run)])
        results.append({"write": write, "run": run.name, "killed": killed, "resumed": resumed})
    return results


if __name__ == "__main__":
    sys.stdout, out = open(os.devnull, "w"), sys.stdout  # noqa: SIM115
    plots.draw_svg = lambda *_, label, **__: f"<svg><title>{label}</title></svg>"
    print(json.dumps(run_all(Path(sys.argv[1]), Path(sys.argv[2]))), file=out)
