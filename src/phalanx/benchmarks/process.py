"""A benchmark's command as its own process: started, watched, and ended when we end."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from phalanx.disk import convert_disk_errors

_POLL_S = 0.1
_PATIENCE_S = 5.0  # for a process to exit after it was asked to
_MOST_READ = 20_000  # bytes from the end of the output
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_PHALANX = "phalanx"


class CommandNotStarted(Exception):
    """A command that could not be started; the message says why."""


@dataclass(frozen=True)
class CommandContext:
    """Where a command runs, and where its output goes."""

    folder: Path
    variables: Mapping[str, str]
    output: Path
    errors: Path

    @property
    def all_variables(self) -> dict[str, str]:
        """The environment of the command."""
        return {**os.environ, **self.variables}

    def replace_variables(self, words: Sequence[str]) -> tuple[str, ...]:
        """The words with environment variables replaced; an unset one is a mistake."""
        variables = self.all_variables
        return tuple(_replace_variables(word, variables) for word in words)

    def last_line(self) -> str:
        """The last line of either output."""
        for path in (self.errors, self.output):
            lines = read_end(path).replace("\r", "\n").split("\n")
            said = [line.strip() for line in lines if line.strip()]
            if said:
                return said[-1]
        return ""


def run_command(
    words: tuple[str, ...],
    context: CommandContext,
    *,
    timeout_s: float | None,
    watch: Callable[[float], None],
) -> int | None:
    """The exit code of a command; None if it timed out and was ended.

    watch: called regularly with the seconds so far. The output is appended to its files.
    """
    words = context.replace_variables(words)
    own = words[0] == _PHALANX
    if own:  # the phalanx that is running here, in a process that does not outlive us
        words = (sys.executable, "-P", "-m", "phalanx.cli.trial", *words[1:])
    with (
        convert_disk_errors(context.output),
        context.output.open("ab") as output,
        context.errors.open("ab") as errors,
    ):
        process = _start(words, context, (output.fileno(), errors.fileno()))
    try:
        return _wait(process, timeout_s, watch)
    finally:
        if process.poll() is None:
            _end(process)
        if process.stdin is not None:
            process.stdin.close()


def _start(
    words: tuple[str, ...], context: CommandContext, files: tuple[int, int]
) -> subprocess.Popen[bytes]:
    """The process."""
    try:
        return subprocess.Popen(
            words,
            stdin=subprocess.PIPE,  # nothing is written: it closes when we end, however we end
            stdout=files[0],
            stderr=files[1],
            cwd=context.folder,
            env=context.all_variables,
            start_new_session=True,  # so that it can be ended with everything it has started
        )
    except OSError as error:
        where = f" in {context.folder}" if not context.folder.is_dir() else ""
        raise CommandNotStarted(f"{words[0]}{where}: {error.strerror or error}") from None


def _wait(
    process: subprocess.Popen[bytes], timeout_s: float | None, watch: Callable[[float], None]
) -> int | None:
    """The exit code, if the process ends in time."""
    began = time.monotonic()
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=_POLL_S)
        elapsed = time.monotonic() - began
        if timeout_s is not None and elapsed > timeout_s:
            return None
        watch(elapsed)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the process and everything that it has started to exit, then kill the rest."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_PATIENCE_S)
            return


def _replace_variables(word: str, variables: Mapping[str, str]) -> str:
    """The word with environment variables replaced; an unset one is a mistake."""

    def replace(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name not in variables:
            raise CommandNotStarted(f"{name} is not set; export {name}=..., or change the command")
        return variables[name]

    return os.path.expanduser(_VARIABLE.sub(replace, word))


def read_end(path: Path, most: int = _MOST_READ) -> str:
    """The end of an output file; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - most))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
