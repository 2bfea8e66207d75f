"""Command lines split into launcher (mpirun, `phalanx launch`) and the program it starts."""

from collections.abc import Sequence
from pathlib import PurePath

_PHALANX, _LAUNCH = "phalanx", "launch"
_MPI = ("mpirun", "mpiexec")
_COUNTS = ("np", "n", "c")
_MPI_VALUES = dict.fromkeys(  # how many values an option of Open MPI, MPICH and the like takes
    [
        *_COUNTS, "x", "H", "host", "hosts", "hostfile", "machinefile", "machine", "f", "N",
        "npernode", "npersocket", "ppn", "perhost", "map-by", "bind-to", "rank-by", "rf",
        "rankfile", "wdir", "wd", "path", "prefix", "output-filename", "stdin", "am", "tune",
        "timeout", "cpu-set", "cpu-list", "default-hostfile", "personality", "launcher", "iface",
        "envlist", "genvlist", "configfile",
    ],
    1,
) | dict.fromkeys(["mca", "gmca", "omca", "prtemca", "env", "genv"], 2)  # fmt: skip
_MEASURES = (("bench", "train"), ("bench", "infer"))  # print a BenchResult


def find_program(words: Sequence[str]) -> int:
    """The index of the command that mpirun or `phalanx launch` starts; 0 without a launcher."""
    if tuple(words[:2]) == (_PHALANX, _LAUNCH):
        return list(words).index("--") + 1 if "--" in words else 0
    return _read_mpi_options(words)[0] if _is_mpi(words) else 0


def count_mpi_processes(words: Sequence[str]) -> int:
    """How many processes mpirun starts; 1 without it. Variables must be replaced already."""
    return _read_mpi_options(words)[1] if _is_mpi(words) else 1


def get_program(words: Sequence[str]) -> tuple[str, ...]:
    """The command without its launcher."""
    rest = tuple(words[find_program(words) :])
    return (_PHALANX, *rest) if len(rest) < len(words) and words[0] == _PHALANX else rest


def is_measurement(words: Sequence[str]) -> bool:
    """Whether a command line runs one of our commands that print a BenchResult."""
    program = get_program(words)
    return program[:1] == (_PHALANX,) and program[1:3] in _MEASURES


def _is_mpi(words: Sequence[str]) -> bool:
    return bool(words) and PurePath(words[0]).name in _MPI


def _read_mpi_options(words: Sequence[str]) -> tuple[int, int]:
    """The index where mpirun's options end, and the number of processes they give."""
    place, count = 1, 1
    while place < len(words) and words[place].startswith("-"):
        name, equals, value = words[place].lstrip("-").partition("=")
        follow = 0 if equals else _MPI_VALUES.get(name, 0)
        value = value if equals else "".join(words[place + 1 : place + 2])
        if name in _COUNTS and value.isdecimal():
            count = int(value)
        place += 1 + follow
    return min(place, len(words)), count
