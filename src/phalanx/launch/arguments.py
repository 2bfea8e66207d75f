"""Arguments of `phalanx launch`: its own, the older launcher's, and the command after --."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.errors import ConfigError

_SPELLINGS = {  # the older programs' names of options that exist here
    "--num-instance": "--num-instances",
    "--ipus-per-replica": "--devices-per-replica",
    "--num-ipus": "--num-devices",
    "--replication-factor": "--num-replicas",
    "--hosts": "--host",
}
_ALLOCATION = "there is no partition of devices to allocate"
_COMPILED = "nothing is compiled ahead"
_WITHOUT_MEANING = {  # the older launcher's options, and why they do nothing here
    "--numa-aware": "the operating system places the processes",
    "--vipu-server-host": _ALLOCATION,
    "--vipu-server-port": _ALLOCATION,
    "--vipu-partition": _ALLOCATION,
    "--vipu-cluster": _ALLOCATION,
    "--vipu-allocation": _ALLOCATION,
    "--update-partition": _ALLOCATION,
    "--reset-partition": _ALLOCATION,
    "--remove-partition": _ALLOCATION,
    "--num-ilds": _ALLOCATION,
    "--sync-type": "all ranks take every step together",
    "--executable-cache-path": _COMPILED,
    "--offline-mode": _COMPILED,
    "--only-output-from-instance": "only rank 0 prints",
    "--print-topology": "`phalanx plan` shows who runs what, --dry-run the lines",
    "-v": "there is nothing more to print",
    "-vv": "there is nothing more to print",
}
_TIMEOUT = "--vipu-server-timeout"
_TIMEOUT_VARIABLE = "IPUOF_VIPU_API_TIMEOUT"
_MPI_ARGS = ("--mpi-global-args", "--mpi-local-args")
_INTERFACES = ("btl_tcp_if_include", "oob_tcp_if_include")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass
class LaunchArguments:
    """A parsed command line of launch."""

    own: list[str] = field(default_factory=list)  # its own options, by their current names
    command: tuple[str, ...] = ()  # what follows --
    variables: dict[str, str] = field(default_factory=dict)  # of -x
    mpi_args: list[str] = field(default_factory=list)  # what only mpirun understands
    interface: str | None = None  # from the older launcher's options
    timeout: str | None = None  # from the older launcher's options, in seconds
    tag_output: bool = False  # requested by the older launcher's options
    notes: list[str] = field(default_factory=list)


def parse_launch_arguments(words: Sequence[str], environment: Mapping[str, str]) -> LaunchArguments:
    """The parsed arguments; older ones are replaced, or dropped with a note."""
    if "--" not in words:
        raise ConfigError(_describe_missing_command(words))
    middle = list(words).index("--")
    parsed = LaunchArguments(command=tuple(words[middle + 1 :]))
    rest = list(words[:middle])
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name in ("-x", "--mca") or (name.startswith("-x") and not name.startswith("--")):
            _read_mpi_word(parsed, word, rest, environment)
        elif name in _MPI_ARGS:
            _read_mpi_args(parsed, name, value if equals else _take(rest, name), environment)
        elif name == "--ssh-args":  # whose value looks like an option
            parsed.own.append(f"{name}={value if equals else _take(rest, name)}")
        elif name == "--allow-run-as-root":
            parsed.mpi_args.append(name)
        elif name == _TIMEOUT:
            _take_timeout(parsed, name, value if equals else _take(rest, name))
        elif name in _WITHOUT_MEANING:
            if not equals and rest and not rest[0].startswith("-"):
                word += f" {rest.pop(0)}"
            reason = _WITHOUT_MEANING[name]
            parsed.notes.append(f"{word}: has no meaning here and was left out ({reason})")
        else:
            parsed.own.append(_SPELLINGS.get(name, name) + equals + value)
    return parsed


def _describe_missing_command(words: Sequence[str]) -> str:
    """The error for a missing --; it names a program of older command lines."""
    program = next((word for word in words if re.match(r"(\S*/)?python[\d.]*$", word)), None)
    instead = f" in place of `{program} train.py`" if program else ""
    return (
        f"`--` is missing: write it and a phalanx command after the options{instead}, as in: "
        "phalanx launch --num-replicas 2 -- train demo"
    )


def _take(rest: list[str], name: str) -> str:
    """The value that follows an option."""
    if not rest:
        raise ConfigError(f"{name}: expected a value after it")
    return rest.pop(0)


def _read_mpi_args(
    parsed: LaunchArguments, name: str, text: str, environment: Mapping[str, str]
) -> None:
    """Parse what the older launcher forwarded to mpirun, given as one argument."""
    try:
        rest = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error} in {text!r}") from None
    while rest:
        _read_mpi_word(parsed, rest.pop(0), rest, environment)


def _read_mpi_word(
    parsed: LaunchArguments, word: str, rest: list[str], environment: Mapping[str, str]
) -> None:
    """Parse one of mpirun's options with its values."""
    if word == "--tag-output":
        parsed.tag_output = True
    elif word.startswith("-x"):
        _add_variable(parsed, word[2:].lstrip("=") or _take(rest, "-x"), environment)
    elif word == "--mca":
        key = _take(rest, word)
        value = _take(rest, f"{word} {key}")
        if key in _INTERFACES:
            parsed.interface = value
        else:
            parsed.mpi_args += [word, key, value]
    else:
        parsed.mpi_args.append(word)


def _add_variable(parsed: LaunchArguments, text: str, environment: Mapping[str, str]) -> None:
    """A variable for the ranks: NAME as it is here, or NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"-x {text}: expected NAME or NAME=VALUE, with a name of letters, digits and _"
        )
    if name == _TIMEOUT_VARIABLE and equals:
        _take_timeout(parsed, f"-x {name}", value)
    elif equals or name in environment:
        parsed.variables[name] = value if equals else environment[name]
    else:
        parsed.notes.append(f"-x {name}: is not set here and was left out")


def _take_timeout(parsed: LaunchArguments, name: str, value: str) -> None:
    parsed.timeout = value
    parsed.notes.append(f"{name} {value}: taken as --rank-timeout {value}")
