"""The user's cache folder, and a temporary one if that cannot be used."""

import atexit
import errno
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from phalanx.errors import DiskError


def find_user_cache() -> Path | None:
    """Phalanx's folder in the user's cache; None if the user has no home."""
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "phalanx"
    with suppress(RuntimeError):  # a container may run as a uid without a user
        return Path.home() / ".cache" / "phalanx"
    return None


def ensure_writable(*folders: Path) -> None:
    """Create missing folders; OSError if one cannot be created or written to."""
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def open_temporary_cache() -> Path:
    """A temporary folder that only this user can write to, the same every time.

    Cached code is executed: if another user owns that name, a new folder is made, and removed at
    exit.
    """
    try:
        folder = Path(tempfile.gettempdir()) / f"phalanx-{os.getuid()}"
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()  # lstat: a symbolic link must not be followed
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
            folder.chmod(0o700)
            return folder
        folder = Path(tempfile.mkdtemp(prefix="phalanx-"))
    except OSError as cause:
        raise DiskError(
            f"no folder for temporary files can be written to ({cause.strerror or cause}); set "
            "TMPDIR to one, or XDG_CACHE_HOME"
        ) from cause
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
