"""What a user can fix, as a family of exceptions. Everything else is our own bug.

UserError                 exit  what it is about
  ConfigError                2  options, presets, impossible combinations
  DataError                  3  folders, files and images
  CheckpointError            4  run folders and what is saved in them
  DivergedError              5  a loss that is no longer a number
  DiskError                  6  no space, no permission, a write that did not read back
  OutOfMemory                6  memory of the host or of a GPU
  NetworkError               8  the network, or a rank that failed, differs or never started
    RanksLost               75  the same in mid-run: starting again continues
(untrusted)                  7  a benchmark ran to its end, and says why it is unreliable
Bug                         70  a bug in Phalanx itself; the traceback is in a file
  PluginBug                 70  ... in a plugin, with its line
Stopped                     75  a signal came; what is done is kept, and starting again continues
(signal)                   130  a signal came; exited at once, and nothing was changed
"""

import errno
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches

EXIT_UNTRUSTED = 7
EXIT_STOPPED = 75
EXIT_LEFT_AT_ONCE = 130
OUT_OF_MEMORY = "out of memory"  # what a message about memory begins with
_LONG_VALUE = re.compile(r"[^\s/'\",;:]{256,}|(?<=')[^'\n]{256,}(?=')")
_VALUE_SHOWN, _LINE_SHOWN = 60, 4_000  # characters
_NO_MEMORY = (  # in the words of torch, CUDA, its libraries and onnxruntime
    OUT_OF_MEMORY,
    "can't allocate memory",
    "not enough memory",
    "Cannot allocate memory",
    "Failed to allocate memory",
    "ALLOC_FAILED",
    "bad_alloc",
)


class UserError(Exception):
    """A mistake that the user can fix: the message says where it is, what is wrong and how."""

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(_shorten_values(message))


class ConfigError(UserError):
    """Options that do not exist, do not match or contradict each other."""

    exit_code = 2


class DataError(UserError):
    """Data that is missing, empty, unreadable or not what the run was started with."""

    exit_code = 3


class CheckpointError(UserError):
    """A run or checkpoint that is missing, damaged, too new or not ours."""

    exit_code = 4


class DivergedError(UserError):
    """A loss that is no longer a number."""

    exit_code = 5


class DiskError(UserError):
    """A write that failed: no space, no permission, or bytes that read back differently."""

    exit_code = 6


class OutOfMemory(UserError):
    """Memory that the host or a GPU does not have; the command says what needs less."""

    exit_code = 6


class NetworkError(UserError):
    """Ranks that cannot reach each other, do not agree, or have lost one of them."""

    exit_code = 8


class RanksLost(NetworkError):
    """Other ranks are gone; what was saved is kept, and starting again continues from there."""

    exit_code = EXIT_STOPPED


class Bug(Exception):
    """A bug in Phalanx itself; the message says where its traceback was written."""

    exit_code = 70


class PluginBug(Bug):
    """A bug in a plugin; the message names its line."""


class Stopped(Exception):
    """A signal ended the work early; what is done is kept, and starting again continues."""

    exit_code = EXIT_STOPPED


class FailedElsewhere(Exception):
    """A run on several ranks has ended, and another rank reports why."""

    def __init__(self, exit_code: int = NetworkError.exit_code) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def is_out_of_memory(error: Exception) -> bool:
    """Whether this is what Python, torch or one of its libraries raises if memory runs out."""
    if isinstance(error, RuntimeError):
        return any(words in str(error) for words in _NO_MEMORY)
    return isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM


def _shorten_values(message: str) -> str:
    """The message with only the beginning of values that are too long to read."""
    # no part of a path that exists is longer than 255 bytes
    message = _LONG_VALUE.sub(lambda found: _cut(found[0], _VALUE_SHOWN), message)
    return "\n".join(_cut(line, _LINE_SHOWN) for line in message.split("\n"))


def _cut(text: str, shown: int) -> str:
    return text if len(text) <= shown else f"{text[:shown]}... ({len(text):,} characters)"


def suggest(word: str, known: Iterable[str], *, most: int = 12) -> str:
    """What to do about an unknown name: take the nearest known one, or choose from a few.

    most: how many names are few enough to list.

    >>> suggest("resnet19", ["resnet18", "resnet50"])
    "did you mean 'resnet18'?"
    """
    known = list(known)
    if not known:
        return "there are none"
    near = get_close_matches(word, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    if len(known) > most:
        return f"none of the {len(known)} known names is close to it"
    return f"{'there is only' if len(known) == 1 else 'choose from'} {', '.join(known)}"


def join_problems(problems: Sequence[str]) -> ConfigError:
    """One error that lists all problems."""
    if len(problems) == 1:
        return ConfigError(problems[0])
    return ConfigError("\n".join([f"{len(problems)} problems:", *(f"  {p}" for p in problems)]))


def name_location(line: str, locations: Mapping[str, str]) -> str:
    """The line with the flag it begins with replaced by where that option was given.

    >>> name_location("--lr: too high", {"lr": "mine.yaml:3: lr"})
    'mine.yaml:3: lr: too high'
    """
    flag = re.match(r"--([a-z0-9-]+)", line)
    location = locations.get(flag[1]) if flag else None
    return location + line[flag.end() :] if flag and location else line


class ProblemCollector:
    """Collects problems: a ConfigError within `with problems.collect():` is noted, not raised.

    locations: where each option was given; a line begins with that instead of the flag.
    """

    def __init__(self, locations: Mapping[str, str]) -> None:
        self.lines: list[str] = []
        self._locations = locations

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Context whose ConfigError is noted."""
        try:
            yield
        except ConfigError as error:
            self.lines += [name_location(line, self._locations) for line in str(error).splitlines()]

    def refuse(self) -> None:
        """Raise one ConfigError for all that was noted, if anything was."""
        if self.lines:
            raise join_problems(self.lines)
