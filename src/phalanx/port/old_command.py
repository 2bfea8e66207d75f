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
# of the shell, before a command
_KEYWORDS = ("if", "elif", "while", "until", "then", "do", "else", "{", "!")
_PREFIXES = {  # programs that start another: their options with a value, and words before it
    "env": ("uCS", 0),
    "time": ("fo", 0),
    "nohup": ("", 0),
    "exec": ("a", 0),
    "sudo": ("ugCDhpRrtTU", 0),
    "nice": ("n", 0),
    "ionice": ("cn", 0),
    "timeout": ("ks", 1),
    "stdbuf": ("ioe", 0),
    "setsid": ("", 0),
    "numactl": ("CNmpil", 0),
    "taskset": ("", 1),
}
_WRAPPERS = {  # others that do, where one of these words follows; whether to use them is open
    **dict.fromkeys(("srun", "salloc", "torchrun", "xvfb-run", "gc-docker"), ()),
    **dict.fromkeys(("conda", "mamba", "micromamba", "uv", "poetry", "pipenv"), ("run",)),
    **dict.fromkeys(("docker", "podman", "singularity", "apptainer"), ("run", "exec")),
    "accelerate": ("launch",),
}
_TORCH_LAUNCH = "torch.distributed.launch"
_PYTHON_VALUES = ("-W", "-X", "-c")  # options of the interpreter that take a value


@dataclass
class OldCommand:
    """An old command line."""

    environment: dict[str, str] = field(default_factory=dict)
    wrapper: str = ""  # what starts all that follows, as srun does with its options
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
    rest, _ = _skip_wrapper(_skip_assignments(words, {}))
    name = PurePath(rest[0]).name if rest else ""
    if name in LAUNCHERS or name.endswith(".py"):
        return True
    modules = " ".join(rest[1:4])
    own_use = re.match(r"-m (pip|venv|pytest|virtualenv)\b|--version|-V\b|-c\b|-( |$)", modules)
    return bool(_PYTHON.fullmatch(name)) and not own_use


def read_old_command(words: Sequence[str], environment: Mapping[str, str]) -> OldCommand:
    """The parts of a command; ConfigError where it starts nothing that is known."""
    found, problems = OldCommand(environment=dict(environment)), list[str]()
    rest, found.wrapper = _skip_wrapper(_skip_assignments(words, found.environment))
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
    """The words after NAME=VALUE, which go into the environment, and after sudo and the like."""
    rest = list(words)
    while rest:
        assignment = _ASSIGNMENT.fullmatch(rest[0])
        prefix = _PREFIXES.get(PurePath(rest[0]).name)
        if assignment:
            environment[assignment[1]] = assignment[2]
        elif prefix is None and rest[0] not in (*_KEYWORDS, "--"):
            break
        rest.pop(0)
        if prefix:
            _skip_own_options(rest, *prefix)
    return rest


def _skip_wrapper(words: Sequence[str]) -> tuple[list[str], str]:
    """The words from python or a script on, where srun and the like start it; and their words."""
    is_module = words[1:2] == ["-m"] and words[2:3] in (["torch.distributed.run"], [_TORCH_LAUNCH])
    verbs = _WRAPPERS.get(PurePath(words[0]).name) if words else None
    if is_module or verbs == () or (verbs and set(verbs) & set(words)):
        places = [n for n, word in enumerate(words) if n and not word.startswith("-")]
        programs = [n for n in places if _is_program(words[n:])]
        scripts = [n for n in places if words[n].endswith(".py")]
        for place in (*programs, *scripts)[:1]:
            return list(words[place:]), " ".join(words[:place])
    return list(words), ""


def _is_program(words: Sequence[str]) -> bool:
    """Whether words begin with a launcher, or with python and what it is to run."""
    name, after = PurePath(words[0]).name, "".join(words[1:2])
    is_python = _PYTHON.fullmatch(name) and (after.endswith(".py") or after.startswith("-"))
    return name in LAUNCHERS or bool(is_python)


def _skip_own_options(rest: list[str], with_value: str, words: int) -> None:
    """Take the options of sudo and the like from the words, and what must follow them."""
    while rest and rest[0].startswith("-") and rest[0] != "--":
        option = rest.pop(0)
        if len(option) == 2 and option[1] in with_value:
            del rest[:1]
    del rest[:words]


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
        if word == "-m" and _is_script(rest):
            found.script, found.words = f"{rest[0]}.py", tuple(rest[1:])
            return found
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


def _is_script(words: Sequence[str]) -> bool:
    """Whether words after -m name a script: no word of a package's own command follows."""
    is_name = bool(words) and words[0].isidentifier()
    return is_name and (len(words) == 1 or is_option(words[1]))
