"""Atomic writes, file locks, and messages for disk errors."""

import errno
import fcntl
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from phalanx.errors import DiskError
from phalanx.units import format_bytes

_NO_PERMISSION = "no permission; make it writable, or choose another {noun}"
_MAKE_ROOM = "free some space, then repeat the command (a run is continued with --resume)"
_DISK_MISTAKES = {
    errno.EACCES: _NO_PERMISSION,
    errno.EPERM: _NO_PERMISSION,
    errno.EROFS: "the file system is read-only; choose another {noun}",
    errno.ENOTDIR: "a part of this path is a file, not a folder; choose another {noun}",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter {noun}",
    errno.EDQUOT: f"your disk quota is used up; {_MAKE_ROOM}",
}
_PART = re.compile(r"\..+\.(\d+)\.part")  # what is being written, with the id of the process
_FULL = {errno.ENOSPC: "no space left", errno.EDQUOT: "your disk quota is used up"}


@contextmanager
def convert_disk_errors(path: Path, noun: str = "folder") -> Iterator[None]:
    """Context that turns an OSError into a DiskError with `path` and what to do.

    noun: what the user can choose another of, such as the option that named the folder.
    """
    try:
        yield
    except OSError as cause:
        raise DiskError(f"{path}: {_explain_disk_error(cause, path, noun)}") from cause


def _explain_disk_error(error: OSError, path: Path, noun: str) -> str:
    """What went wrong with a write, and what to do about it."""
    if error.errno == errno.ENOSPC:
        return f"no space left{describe_free_space(path)}; {_MAKE_ROOM}"
    known = _DISK_MISTAKES.get(error.errno or 0, "").format(noun=noun)
    return known or f"cannot be written ({error.strerror or error}); check the disk"


@contextmanager
def convert_out_errors(out: Path, advice: str) -> Iterator[None]:
    """Context whose disk errors mention --out; advice: what to do after freeing space."""
    try:
        yield
    except (DiskError, OSError) as error:
        cause = error.__cause__ if isinstance(error, DiskError) else error
        if not isinstance(cause, OSError):
            cause = OSError(str(error))
        path, code = cause.filename or out, cause.errno or 0
        if code in _FULL:
            room = describe_free_space(out / "file")
            raise DiskError(f"{path}: {_FULL[code]}{room}; free some space, {advice}") from cause
        problem = _DISK_MISTAKES.get(code, f"cannot be written ({cause.strerror or cause})")
        reason = problem.partition(";")[0]
        raise DiskError(f"{path}: {reason}; fix that or choose another --out") from cause


def describe_free_space(path: Path) -> str:
    """The free space of the nearest existing folder, as " (12.0 KiB free on /data)"."""
    folder = next((p for p in path.absolute().parents if p.is_dir()), None)
    if folder is None:
        return ""
    return f" ({format_bytes(shutil.disk_usage(folder).free)} free on {folder})"


def expand_home(path: str | Path) -> Path:
    """The path with a leading ~ replaced by a home; as it is if there is no such user or home."""
    return Path(os.path.expanduser(path))  # Path.expanduser raises: a folder may be called ~old


def quote_path(path: str | Path) -> str:
    """The path as one word of a command line in a message; never one that looks like a flag."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file atomically: under a temporary name, synced, then renamed."""
    # surrogate escapes, of file names that are not UTF-8, become their original bytes
    data = content.encode(errors="surrogateescape") if isinstance(content, str) else content
    part = path.with_name(f".{path.name}.{os.getpid()}.part")  # matched by _PART
    with convert_disk_errors(path):
        try:
            write_synced(part, [data])
            part.replace(path)
        except OSError:
            remove_quietly(part)
            raise
        sync_folder(path.parent)


def remove_dead_parts(folder: Path) -> None:
    """Remove partial files in a folder whose writing processes no longer run."""
    for path in folder.glob(".*.part"):
        match = _PART.match(path.name)
        if match and not (int(match[1]) != os.getpid() and _is_running(int(match[1]))):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                remove_quietly(path)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's process
        return True
    return True


def write_synced(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file from its pieces and wait until it is on disk."""
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def remove_quietly(path: Path) -> None:
    """Remove a leftover file; errors are ignored, as the original error is the one to report."""
    with suppress(OSError):
        path.unlink()


@contextmanager
def file_lock(path: Path, held: Callable[[], Exception]) -> Iterator[int]:
    """Context that holds the lock of a file or folder; yields its descriptor.

    The lock ends with the process. `held` builds the error for when another process has it.
    """
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    with convert_disk_errors(path):
        handle = os.open(path, flags, 0o666)
    try:
        if not try_lock(handle, path):
            raise held()
        yield handle
    finally:
        os.close(handle)


def try_lock(handle: int, path: Path) -> bool:
    """Lock an open file; False if another process has locked it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as cause:
        raise DiskError(
            f"{path}: this file system cannot lock ({cause.strerror}); choose a --run-dir, "
            "--sweep-dir or --out on another one"
        ) from cause
    return True


def sync_folder(path: Path) -> None:
    """Make a rename inside this folder survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
