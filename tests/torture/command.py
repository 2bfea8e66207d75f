"""A command in a forked process: torch is imported once, for all of them."""

import ctypes
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from phalanx.cli.main import main

TIMEOUT_S = 60
GRACE_S = 10  # for processes a command started to notice that it is gone
KILLED = -signal.SIGKILL
_SET_CHILD_SUBREAPER = 36
_WRITES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.truncate")


class Ended(NamedTuple):
    """How a command ended."""

    words: list[str]
    code: int | None  # None: it hung; negative: the signal that ended it
    out: str
    err: str
    orphans: bool  # a process it started outlived it

    def line(self) -> str:
        """The command, to be typed again."""
        return " ".join(["phalanx", *(repr(w) if not w.isprintable() else w for w in self.words)])


class Break(NamedTuple):
    """When to break a command off: before one of its writes, or a while after it began."""

    before_write: int = 0  # counted from 1; 0: never
    when: Callable[[], bool] | None = None  # looked at before each write
    after_s: float | None = None
    by: signal.Signals = signal.SIGKILL


NEVER = Break()


def adopt_orphans() -> None:
    """Become the parent of what commands leave behind, to see it."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run(words: list[str], cwd: Path, *, stop: Break = NEVER, timeout_s: float = TIMEOUT_S) -> Ended:
    """Run a command in a folder, to its end or until it is broken off."""
    sys.stdout.flush()
    sys.stderr.flush()
    files = [os.memfd_create(name) for name in ("out", "err")]
    ready, says_ready = os.pipe()
    child = os.fork()
    if not child:
        _become_command(words, cwd, stop, files, says_ready)
    os.close(says_ready)
    code = _wait(child, stop, ready, timeout_s)
    orphans = not _is_alone(child)
    texts = []
    for file in (ready, *files):
        if file != ready:
            texts.append(os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace"))
        os.close(file)
    return Ended(words, code, *texts, orphans)


def _become_command(
    words: list[str], cwd: Path, stop: Break, files: list[int], says_ready: int
) -> None:
    """The forked process: never returns."""
    code = 1
    try:
        os.setsid()
        os.chdir(cwd)
        for stream, file in zip((1, 2), files, strict=True):
            os.dup2(file, stream)
        if stop.before_write or stop.when:
            _break_before_write(cwd, stop)
        sys.argv[1:] = words  # as a process of its own has them: signals are its business, too
        os.write(says_ready, b".")
        code = main()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:  # noqa: BLE001 - as the interpreter would show it
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _break_before_write(cwd: Path, stop: Break) -> None:
    """Watch for writes below the folder, and leave before one as SIGKILL does."""
    seen, root = 0, str(cwd)

    def watch(event: str, facts: tuple) -> None:
        nonlocal seen
        if event == "open":
            path, _, flags = facts
            writes = bool(flags & (os.O_WRONLY | os.O_RDWR))
        else:
            path, writes = facts[0] if facts else None, event in _WRITES
        if not writes or not isinstance(path, str | Path):
            return
        if not os.path.abspath(path).startswith(root):
            return
        seen += 1
        if seen == stop.before_write or (stop.when and stop.when()):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def _wait(child: int, stop: Break, ready: int, timeout_s: float) -> int | None:
    """The exit code of the command, broken off when it is time; None for one that hung."""
    handle = os.pidfd_open(child)
    try:
        os.read(ready, 1)
        if stop.after_s is not None and not _has_ended(handle, stop.after_s):
            os.kill(child, stop.by)
        hung = not _has_ended(handle, timeout_s)
        if hung:
            os.killpg(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return None if hung else code
    finally:
        os.close(handle)


def _has_ended(handle: int, seconds: float) -> bool:
    watch = select.poll()
    watch.register(handle, select.POLLIN)
    return bool(watch.poll(seconds * 1000))


def _is_alone(group: int) -> bool:
    """Whether nothing is left of a command's processes after a grace; what is left is killed."""
    deadline, alone = time.monotonic() + GRACE_S, True
    while True:
        try:
            reaped = os.waitpid(-group, os.WNOHANG)[0]
        except ChildProcessError:
            return alone
        if not reaped and time.monotonic() > deadline and alone:
            alone = False
            os.killpg(group, signal.SIGKILL)
        if not reaped:
            time.sleep(0.005)
