"""What is left after all known mistakes: bugs of our own, whose traceback goes into a file."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from phalanx.errors import (
    Bug,
    DiskError,
    DivergedError,
    FailedElsewhere,
    NetworkError,
    Stopped,
    UserError,
)
from phalanx.plan.world import World
from phalanx.report.terminal import ReaderLeft

_NAME = "phalanx-traceback"


@contextmanager
def bug_reports(folder: Path | None = None) -> Iterator[None]:
    """A block whose unexpected errors become a Bug; the traceback goes into the folder.

    Without a folder, or where it cannot be written, it goes among the temporary files. What the
    system refuses, and names a file for, is a DiskError.
    """
    try:
        yield
    except (UserError, Stopped, FailedElsewhere, Bug, ReaderLeft):
        raise
    except OSError as error:
        if error.filename is None:
            raise _make_bug(error, folder) from error
        name = os.fsdecode(error.filename)
        raise DiskError(f"{name}: {error.strerror}; fix that, or name another file") from error
    except MemoryError as error:
        raise DiskError(
            "out of memory; try a smaller --batch-size or --valid-batch-size, or fewer --workers"
        ) from error
    except Exception as error:
        raise _make_bug(error, folder) from error


@contextmanager
def told_by_rank(world: World, folder: Path | None) -> Iterator[None]:
    """A block of one rank: what fails there is told with the rank, its host and its traceback."""
    try:
        with bug_reports(folder):
            yield
    except (DivergedError, NetworkError):
        raise  # of all ranks, or with the rank in it
    except (UserError, Bug) as failure:
        where = f"rank {world.rank} of {world.size} on {socket.gethostname()}"
        if isinstance(failure, UserError):  # a bug says it itself
            # a run that has not begun is removed, and its folder must be free again
            begun = folder if folder and (folder / "metrics.jsonl").exists() else None
            with suppress(OSError):  # the disk may be what the failure is about
                path = _write(_format_traceback(failure), begun, f"{_NAME}-rank-{world.rank}")
                where += f" (traceback in {path})"
        failure.args = (f"{where}: {failure}",)
        raise


def _format_traceback(error: BaseException) -> str:
    import traceback  # with all it imports, only when it is needed

    return "".join(traceback.format_exception(error))


def _make_bug(error: Exception, folder: Path | None) -> Bug:
    """The error as one line; its traceback is written down."""
    import traceback  # with all it imports, only when it is needed

    text = _format_traceback(error)
    kind = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
    try:
        where = f"is in {_write(text, folder)}"
    except OSError as refused:
        where = f"could not be written ({refused.strerror}):\n{text}"
    return Bug(
        f"this is a bug in Phalanx or in a plugin, not a mistake of yours: {kind}. Please report "
        f"it, with the command line and the traceback, which {where}"
    )


def _write(text: str, folder: Path | None, name: str = _NAME) -> Path:
    """Write a traceback; its path."""
    data = text.encode(errors="backslashreplace")
    if folder is not None and folder.is_dir():
        try:
            path = folder / f"{name}.txt"
            path.write_bytes(data)
            return path
        except OSError:
            pass  # the disk may be what the bug is about
    import tempfile

    handle, file_name = tempfile.mkstemp(prefix=f"{name}-", suffix=".txt")
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    return Path(file_name)
