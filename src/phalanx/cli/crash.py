"""Errors that nothing else has caught: bugs, whose traceback is written to a file."""

import os
import re
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from phalanx.errors import (
    OUT_OF_MEMORY,
    Bug,
    ConfigError,
    DiskError,
    DivergedError,
    FailedElsewhere,
    NetworkError,
    OutOfMemory,
    PluginBug,
    Stopped,
    UserError,
    is_out_of_memory,
)
from phalanx.plan.world import World
from phalanx.report.terminal import OutputClosed
from phalanx.units import format_bytes

_NAME = "phalanx-traceback"
_ASKED = re.compile(r"allocate (?:(\d+) bytes|([\d.]+ [KMGT]?i?B))")
_GPU = re.compile(r"\bGPU \d+")
_LESS_MEMORY = {  # by option: what a command that has it can change to need less memory
    "gradient-accumulation": "try a smaller --batch-size with a larger --gradient-accumulation, "
    "--enable-recompute, a smaller --valid-batch-size, --gpu-decode false, or fewer --workers; "
    "`phalanx find batch-size` finds what fits",
    "valid-batch-size": "try a smaller --valid-batch-size",
    "max-batch": "try a smaller --max-batch",
    "workers": "try fewer --workers",
}


@contextmanager
def report_bugs(folder: Path | None = None) -> Iterator[None]:
    """Context whose unexpected errors become a Bug; the traceback goes into the folder.

    Without a folder, or if it cannot be written, it goes to the temporary files. An OSError that
    names a file becomes a DiskError, a failed allocation OutOfMemory, an error raised in a plugin
    a PluginBug, and any other a ConfigError where packages are missing or too old.
    """
    try:
        yield
    except (UserError, Stopped, FailedElsewhere, Bug, OutputClosed):
        raise
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # Python 3.11 wraps it in __set_name__
            raise error.__cause__ from None
        raise _convert_error(error, folder) from error


@contextmanager
def report_rank_errors(world: World, folder: Path | None) -> Iterator[None]:
    """Context whose errors are reported with the rank, its host and the file of the traceback."""
    try:
        with report_bugs(folder):
            yield
    except (DivergedError, NetworkError):
        raise  # concerns all ranks, or names the rank
    except (UserError, Bug) as failure:
        where = f"rank {world.rank} of {world.size} on {socket.gethostname()}"
        if isinstance(failure, UserError):  # a bug already names its traceback
            name = f"{_NAME}-rank-{world.rank}"
            with suppress(OSError):  # the disk may be what the failure is about
                path = _write(_format_traceback(failure), _find_lasting_folder(folder), name)
                where += f" (traceback in {path})"
        failure.args = (f"{where}: {failure}",)
        raise


def describe_less_memory(flags: Collection[str]) -> str:
    """What the user of a command with these options can change to need less memory."""
    known = [advice for option, advice in _LESS_MEMORY.items() if option in flags]
    return known[0] if known else "end other programs, or use a machine with more"


def _find_lasting_folder(folder: Path | None) -> Path | None:
    """The folder, if its run has recorded a step; else None, because the folder will be removed."""
    from phalanx.report.folder import RunFolder

    return folder if folder and RunFolder(folder).has_steps else None


def _convert_error(error: Exception, folder: Path | None) -> Exception:
    """The exception to raise in place of an unexpected error."""
    if is_out_of_memory(error):
        return OutOfMemory(_describe_out_of_memory(str(error)))
    if isinstance(error, OSError) and error.filename is not None:
        name = os.fsdecode(error.filename)
        return DiskError(f"{name}: {error.strerror}; fix that, or name another file")
    return _make_plugin_bug(error, folder) or _make_package_error() or _make_bug(error, folder)


def _describe_out_of_memory(text: str) -> str:
    """A short message from the text of a failed allocation."""
    asked, gpu = _ASKED.search(text), _GPU.search(text)
    where = f" on {gpu[0]}" if gpu else ""
    if asked is None:
        return f"{OUT_OF_MEMORY}{where}"
    amount = format_bytes(int(asked[1])) if asked[1] else asked[2]
    return f"{OUT_OF_MEMORY}{where}: {amount} more could not be allocated"


def _make_plugin_bug(error: Exception, folder: Path | None) -> PluginBug | None:
    """The error with the line of the plugin that raised it; None if no plugin did."""
    import traceback  # with all it imports, only when it is needed

    from phalanx.catalog.plugins import list_loaded_plugins

    names = list_loaded_plugins()
    plugins = {name.partition(".")[0] for name in names.split(",")} if names else set()
    steps = [
        (frame.f_globals.get("__name__", "").partition(".")[0], frame.f_code, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    own = [step for step in steps if step[0] in plugins]
    if not own:
        return None
    plugin, code, line = own[-1]
    # the folder of a run that could not be built will be removed
    built = folder if folder and (folder / "metrics.jsonl").exists() else None
    return PluginBug(
        f"this is a bug in the plugin {plugin}: {code.co_name} failed in {code.co_filename}, line "
        f"{line}: {_describe_kind(error)}. Fix it there; the traceback "
        f"{_write_traceback(error, built)}"
    )


def _make_package_error() -> ConfigError | None:
    """The error that names packages which are missing or too old; None if all are as needed."""
    from phalanx.cli.packages import check_packages

    unfit = [check for check in check_packages() if check.state == "missing"]
    lines = [f"  {check.what}: {check.found}; {check.remedy}" for check in unfit]
    first = "packages that Phalanx needs are missing or too old:"
    return ConfigError("\n".join([first, *lines])) if unfit else None


def _describe_kind(error: Exception) -> str:
    """The error as one line."""
    import traceback

    return "".join(traceback.format_exception_only(error)).strip().splitlines()[0]


def _format_traceback(error: BaseException) -> str:
    import traceback  # with all it imports, only when it is needed

    return "".join(traceback.format_exception(error))


def _make_bug(error: Exception, folder: Path | None) -> Bug:
    """The bug as one line that says where the traceback is."""
    return Bug(
        "this is a bug in Phalanx or in a plugin, not a mistake of yours: "
        f"{_describe_kind(error)}. Please report it, with the command line and the traceback, "
        f"which {_write_traceback(error, folder)}"
    )


def _write_traceback(error: Exception, folder: Path | None) -> str:
    """Write the traceback to a file; returns the end of a sentence that says where it is."""
    text = _format_traceback(error)
    try:
        return f"is in {_write(text, folder)}"
    except OSError as refused:
        return f"could not be written ({refused.strerror}):\n{text}"


def _write(text: str, folder: Path | None, name: str = _NAME) -> Path:
    """Write a traceback, and return its path."""
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
