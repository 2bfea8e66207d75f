"""The words of an old command taken apart: variables, launcher, interpreter, script, options."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from phalanx.dialects.table import GivenOption
from phalanx.errors import ConfigError, join_problems
from phalanx.port.launchers import LAUNCHERS, match_launcher
from phalanx.port.match import is_option

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.ASCII | re.DOTALL)
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_SHELL = ("env", "time", "nohup", "exec", "sudo")  # words before a command
_PYTHON_VALUES = ("-W", "-X", "-c")  # options of the interpreter that take a value


@dataclass
class OldCommand:
    """An old command line."""

    environment: dict[str, str] = field(default_factory=dict)
    launcher: str = ""  # poprun or mpirun
    launcher_options: list[GivenOption] = field(default_factory=list)
    profiler_options: list[GivenOption] = field(default_factory=list)  # of gc-profile
    is_profiled: bool = False
    script: str = ""  # its path; of a module, "-m NAME"; empty where the command forgets it
    words: tuple[str, ...] = ()  # after the script

    @property
    def script_name(self) -> str:
        """The script's file name, or a module's name with its first word."""
        return self.script if self.script.startswith("-m ") else PurePath(self.script).name


def is_old_command(words: Sequence[str]) -> bool:
    """Whether words start a program of an old application, not `cd`, `pip` and the like."""
    rest = _skip_assignments(words, {})
    name = PurePath(rest[0]).name if rest else ""
    if name in LAUNCHERS or name.endswith(".py"):
        return True
    modules = " ".join(rest[1:4])
    own_use = re.match(r"-m (pip|venv|pytest|virtualenv)\b|--version|-V\b|-c\b", modules)
    return bool(_PYTHON.fullmatch(name)) and not own_use


def read_old_command(words: Sequence[str], environment: Mapping[str, str]) -> OldCommand:
    """The parts of a command; ConfigError where it starts nothing that is known."""
    found, problems = OldCommand(environment=dict(environment)), list[str]()
    rest = _skip_assignments(words, found.environment)
    while rest and PurePath(rest[0]).name in LAUNCHERS:
        name = PurePath(rest[0]).name
        matched = match_launcher(name, rest[1:])
        problems += matched.problems
        rest = _skip_assignments(matched.rest, found.environment)
        if name == "gc-profile":
            found.is_profiled, found.profiler_options = True, matched.given
        else:
            found.launcher, found.launcher_options = name, matched.given
    if problems:
        raise join_problems(problems)
    if rest[:1] == ["--"]:
        rest = rest[1:]
    if not "".join(rest).strip():
        raise ConfigError(
            "there is no program in it; paste a whole command line, such as: "
            "phalanx port -- python3 train.py --model resnet"
        )
    return _read_program(found, rest)


def _skip_assignments(words: Sequence[str], environment: dict[str, str]) -> list[str]:
    """The words after NAME=VALUE, which go into the environment."""
    rest = list(words)
    while rest:
        assignment = _ASSIGNMENT.fullmatch(rest[0])
        if assignment:
            environment[assignment[1]] = assignment[2]
        elif rest[0] not in (*_SHELL, "--"):
            break
        rest.pop(0)
    return rest


def _read_program(found: OldCommand, rest: list[str]) -> OldCommand:
    """The interpreter, its options and the script."""
    program = rest.pop(0)
    if PurePath(program).name.endswith(".py"):
        found.script, found.words = program, tuple(rest)
        return found
    if not _PYTHON.fullmatch(PurePath(program).name):
        raise ConfigError(
            f"{program}: expected python and a script of an older program, or poprun, mpirun or "
            "gc-profile before it"
        )
    while rest and is_option(rest[0]) and not rest[0].startswith("--"):
        word = rest.pop(0)
        if word == "-m":
            found.script = " ".join(["-m", *rest[:2]])
            found.words = tuple(rest[2:])
            return found
        if word in _PYTHON_VALUES and rest:
            rest.pop(0)
    if rest and not is_option(rest[0]):
        found.script = rest.pop(0)
    found.words = tuple(rest)
    return found
