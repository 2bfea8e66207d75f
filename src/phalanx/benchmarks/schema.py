"""The contents of a benchmark file: command lines, variants, and how results are read."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path

from phalanx.benchmarks.command_line import find_program
from phalanx.config.read import EXCLUSIVE
from phalanx.config.schema import OPTIONS, SPELLINGS
from phalanx.config.text import LIST_OPTIONS
from phalanx.errors import ConfigError, suggest

REDUCTIONS = ("mean", "final", "min", "value")
_CONVERGENCE = "_conv"  # in the names of benchmarks that train to convergence
_WANDB = "--wandb"
_KnownOptions = Callable[[Sequence[str]], frozenset[str]]  # of the command that words begin with


@dataclass(frozen=True)
class MetricRule:
    """How one metric is found in the output of a command.

    regexp: every match in the output is a value. key: the path of one or several values in the
    JSON object that the command prints, such as latency_ms.p50. Exactly one of the two is given.
    """

    name: str
    regexp: str = ""
    key: str = ""
    skip: int = 0
    reduction_type: str = "mean"


@dataclass(frozen=True)
class Benchmark:
    """A named command with its variants."""

    name: str
    place: str  # "benchmarks.yml:12"
    folder: Path  # where its command runs
    cmd: str
    description: str = ""
    env: tuple[tuple[str, str], ...] = ()
    data: tuple[MetricRule, ...] = ()
    rows: tuple[tuple[tuple[str, str], ...], ...] = ((),)  # the parameters of each variant
    pre_run_commands: tuple[str, ...] = ()
    timeout: float | None = None

    @property
    def converges(self) -> bool:
        """Whether it trains to convergence, and is skipped unless it is named."""
        return _CONVERGENCE in self.name

    @cached_property
    def parameter_names(self) -> frozenset[str]:
        """The parameters in which its variants differ."""
        return frozenset(name for row in self.rows for name, _ in row)


@dataclass(frozen=True)
class BenchmarkVariant:
    """One command line of a benchmark, ready to be run."""

    benchmark: Benchmark
    parameters: dict[str, str]
    words: tuple[str, ...]  # environment variables are not replaced yet
    left_out: tuple[str, ...]  # settings that the command has no option for

    @property
    def name(self) -> str:
        """The benchmark's name and its parameters, sorted by name."""
        pairs = [f"{name}_{value}" for name, value in sorted(self.parameters.items())]
        return "_".join([self.benchmark.name, *pairs])

    @property
    def command(self) -> str:
        """The command line as one would type it."""
        return " ".join(_quote(word) for word in self.words)


@dataclass(frozen=True)
class Selection:
    """Which benchmarks of a file to run, and what to change in their commands."""

    names: tuple[str, ...] = ()  # empty: all
    settings: tuple[tuple[str, str], ...] = ()  # options, or parameters of variants
    include_convergence: bool = False
    allow_wandb: bool = False

    def choose(self, benchmarks: Mapping[str, Benchmark]) -> list[Benchmark]:
        """The benchmarks that are named, or all that do not train to convergence."""
        unknown = [name for name in self.names if name not in benchmarks]
        if unknown:
            raise ConfigError(
                "\n".join(_describe_unknown(name, list(benchmarks)) for name in unknown)
            )
        if self.names:
            return [benchmarks[name] for name in dict.fromkeys(self.names)]
        chosen = [b for b in benchmarks.values() if self.include_convergence or not b.converges]
        if not chosen:
            raise ConfigError(
                "every benchmark of the file trains to the end; give --include-convergence"
            )
        return chosen


def _describe_unknown(name: str, known: list[str]) -> str:
    """Suggestions for an unknown benchmark: names like it, or names that share its words."""
    parts = [part for part in name.replace("_", "-").lower().split("-") if part]
    alike = [other for other in known if all(part in other.lower() for part in parts)]
    way_out = f"there are {', '.join(alike[:6])}" if parts and alike else suggest(name, known)
    return f"--benchmark {name}: no benchmark is called that; {way_out} (--dry-run lists them)"


def build_variants(
    benchmark: Benchmark, selection: Selection, *, known: _KnownOptions
) -> list[BenchmarkVariant]:
    """The variants of a benchmark with the selection's settings in their command lines."""
    replaced: dict[str, str] = {}
    options: dict[str, str] = {}
    for name, text in selection.settings:
        parameter = _find_parameter(benchmark, name)
        (options if parameter is None else replaced)[parameter or name] = text
    rows = [dict(row) for row in benchmark.rows]
    for name, text in replaced.items():
        values = [value.strip() for value in text.split(",")]
        rows = [{**row, name: value} for row in rows for value in values]
    rows = [dict(row) for row in dict.fromkeys(tuple(row.items()) for row in rows)]
    return [_build_variant(benchmark, row, selection, options, known) for row in rows]


def _find_parameter(benchmark: Benchmark, name: str) -> str | None:
    """The parameter of that name, or the one that gives the option of that name its value.

    A variant is named after its parameters: what it runs with must be one of them.
    """
    found = re.search(rf"--{re.escape(name)}[ =]\{{([\w-]+)\}}", benchmark.cmd)
    candidates = [name, *([found[1]] if found else [])]
    return next((one for one in candidates if one in benchmark.parameter_names), None)


def _build_variant(
    benchmark: Benchmark,
    parameters: dict[str, str],
    selection: Selection,
    options: Mapping[str, str],
    known: _KnownOptions,
) -> BenchmarkVariant:
    """One variant: parameters filled in, settings replaced or appended."""
    words = list(split_command(benchmark.cmd, parameters))
    if not selection.allow_wandb:
        words = _remove_wandb(words)
    taken, place = known(words), find_program(words)
    launcher, words = words[:place], words[place:]  # settings are options of the program
    left_out = []
    for name, text in options.items():
        option = SPELLINGS.get(name, name)
        if option not in taken:
            left_out.append(name)
            continue
        rivals = {other for group in EXCLUSIVE if option in group for other in group}
        words = _remove_options(words, {option, *rivals})
        words.append(f"--{option}={text}")
    return BenchmarkVariant(benchmark, parameters, (*launcher, *words), tuple(left_out))


def split_command(text: str, parameters: Mapping[str, str]) -> tuple[str, ...]:
    """The words of a command line with each {name} replaced; all other braces stay as they are.

    A value stays in its word, whatever spaces and quotes it has; an empty one leaves no word.
    """
    words = [(word, _fill_parameters(word, parameters)) for word in shlex.split(text)]
    return tuple(filled for word, filled in words if filled or not word)


def _fill_parameters(word: str, parameters: Mapping[str, str]) -> str:
    for name, value in parameters.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def combine_parameters(values: Mapping[str, Sequence[str]]) -> list[tuple[tuple[str, str], ...]]:
    """Every combination of some parameters' values."""
    return [tuple(zip(values, row, strict=True)) for row in product(*values.values())]


def _remove_wandb(words: list[str]) -> list[str]:
    """The words without --wandb options: a measurement is not tracked."""
    kept: list[str] = []
    skip_value = False
    for word in words:
        if word.startswith(_WANDB):
            skip_value = word != _WANDB and "=" not in word  # --wandb itself takes no value
        elif not skip_value or word.startswith("-"):
            kept.append(word)
            skip_value = False
        else:
            skip_value = False
    return kept


def _remove_options(words: list[str], names: set[str]) -> list[str]:
    """The words without those options and their values, in any spelling."""
    kept: list[str] = []
    values_left = 0
    for word in words:
        name, equals, _ = word.partition("=")
        option = SPELLINGS.get(name.removeprefix("--")) if name.startswith("--") else None
        if option in names:
            values_left = 0 if equals else _count_values(option)
        elif word.startswith("--") or not values_left:
            kept.append(word)
            values_left = 0
        else:
            values_left -= 1
    return kept


def _count_values(option: str | None) -> int:
    """The most words that can follow an option as its value."""
    if option in LIST_OPTIONS:
        return 1000
    if option not in OPTIONS:
        return 1
    return int(OPTIONS[option].type is not bool or OPTIONS[option].takes_share)


def _quote(word: str) -> str:
    """The word quoted for a shell, except environment variables, which the shell is to replace."""
    return word if re.fullmatch(r"[\w$@%+=:,./{}~-]+", word) else shlex.quote(word)
