"""Reads a file of benchmarks; all mistakes in it are reported together, each with its line."""

import re
import shlex
from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from phalanx.benchmarks.schema import REDUCTIONS, Benchmark, MetricRule, combine_parameters
from phalanx.config.text import YamlEntry, YamlLoader, read_entries, read_mapping
from phalanx.errors import ConfigError, join_problems, suggest

_SPEC_NAME = "benchmarks.yml"
_SHARED = "options"  # suffix of entries that only serve as anchors for others
_METRIC_KEYS = ("regexp", "key", "skip", "reduction_type")
_IGNORED = ("output", "requirements_path")  # of the older runner: all metrics are written,
# and nothing is installed


def find_spec(name: str | None) -> Path:
    """The file that --spec names, else ./benchmarks.yml, else the one that comes with Phalanx."""
    path = Path(name or _SPEC_NAME)
    if path.is_file() or (name is not None and name != _SPEC_NAME):
        return path
    return builtin_spec()


def builtin_spec() -> Path:
    """The benchmarks that come with Phalanx."""
    return Path(str(resources.files("phalanx") / "benchmarks" / _SPEC_NAME))


def read_specs(paths: Iterable[Path]) -> dict[str, Benchmark]:
    """The benchmarks of some files, by name."""
    found: dict[str, Benchmark] = {}
    for path in paths:
        for name, benchmark in _SpecReader(path).read().items():
            if name in found:
                raise ConfigError(
                    f"{benchmark.place}: {name} is also in {found[name].place}; rename one of them"
                )
            found[name] = benchmark
    return found


class _SpecReader:
    """Reads a file, and collects what is wrong with it and where."""

    def __init__(self, path: Path):
        self.path = path
        self.problems: list[str] = []
        self.loader = YamlLoader("")
        self.keys: dict[str, Callable[[YamlEntry], Any]] = {
            "description": self._read_text,
            "cmd": self._read_command,
            "env": self._read_texts,
            "data": self._read_rules,
            "parameters": self._read_parameters,
            "location": self._read_text,
            "pre_run_commands": self._read_commands,
            "timeout": self._read_seconds,
        } | dict.fromkeys(_IGNORED, lambda entry: None)

    def read(self) -> dict[str, Benchmark]:
        """All benchmarks of the file, without entries that only serve as anchors."""
        if self.path.is_dir() or not self.path.exists():
            what = "is a folder" if self.path.is_dir() else "no such file"
            raise ConfigError(
                f"--spec {self.path}: {what}; without --spec, ./{_SPEC_NAME} is read, or the "
                "benchmarks that come with Phalanx"
            )
        found = {entry.key: self._read_benchmark(entry) for entry in read_entries(self.path)}
        if self.problems:
            raise join_problems(self.problems)
        benchmarks = {name: benchmark for name, benchmark in found.items() if benchmark}
        if not benchmarks:
            raise ConfigError(f"{self.path}: holds no benchmark: an entry with a cmd: line")
        return benchmarks

    def _note(self, entry: YamlEntry, problem: str) -> None:
        self.problems.append(f"{self.path}:{entry.line}: {entry.key}: {problem}")

    def _read_benchmark(self, entry: YamlEntry) -> Benchmark | None:
        """A benchmark; None for an anchor entry, or if something is wrong."""
        values: dict[str, Any] = {}
        for part in self._read_entries(entry):
            reader = self.keys.get(part.key)
            if reader is None:
                self._note(part, f"{entry.key} has no such key; {suggest(part.key, self.keys)}")
            else:
                values[part.key] = reader(part)
        if "cmd" not in values and not entry.key.endswith(_SHARED) and not self.problems:
            self._note(
                entry, f"has no cmd; give one, or end its name in {_SHARED} to share its lines"
            )
        if self.problems or "cmd" not in values:
            return None
        for key in _IGNORED:
            values.pop(key, None)
        place, location = f"{self.path}:{entry.line}", values.pop("location", ".")
        rows = tuple(values.pop("parameters", [()]))
        home = Path() if self.path == builtin_spec() else self.path.parent
        benchmark = Benchmark(entry.key, place, home / location, rows=rows or ((),), **values)
        self._check_parameters(entry, benchmark)
        return benchmark

    def _check_parameters(self, entry: YamlEntry, benchmark: Benchmark) -> None:
        """Report parameters that the command does not use: its variants would be the same."""
        text = " ".join([benchmark.cmd, *benchmark.pre_run_commands])
        unused = [name for name in sorted(benchmark.parameter_names) if f"{{{name}}}" not in text]
        for name in unused:
            self._note(entry, f"its cmd does not say where the parameter {{{name}}} goes")
        if benchmark.parameter_names or not benchmark.rows[0]:
            named = set(re.findall(r"(?<!\$)\{([\w-]+)\}", text))
            for name in sorted(named - benchmark.parameter_names):
                way_out = suggest(name, sorted(benchmark.parameter_names))
                if benchmark.parameter_names:
                    self._note(entry, f"{{{name}}} is none of its parameters; {way_out}")
                else:
                    self._note(entry, f"{{{name}}} has no values; list them under parameters:")

    def _read_entries(self, entry: YamlEntry) -> list[YamlEntry]:
        """The keys under a key."""
        if not isinstance(entry.node, yaml.MappingNode):
            self._note(entry, "expected lines of the form `key: value` under it")
            return []
        return read_mapping(self.loader, entry.node, self.path)

    def _read_text(self, entry: YamlEntry) -> str:
        """A string."""
        if not isinstance(entry.node, yaml.ScalarNode) or not entry.node.value.strip():
            self._note(entry, "expected a text")
            return ""
        return " ".join(entry.node.value.split())

    def _read_command(self, entry: YamlEntry) -> str:
        """A command line."""
        text = self._read_text(entry)
        try:
            shlex.split(text)
        except ValueError as error:
            self._note(entry, f"no command line: {error}")
        return text

    def _read_commands(self, entry: YamlEntry) -> tuple[str, ...]:
        """Several command lines."""
        return tuple(self._read_command(part) for part in self._read_items(entry))

    def _read_items(self, entry: YamlEntry) -> list[YamlEntry]:
        """The items of a list, as entries of the list's key."""
        if not isinstance(entry.node, yaml.SequenceNode):
            self._note(entry, "expected a list")
            return []
        return [YamlEntry(entry.key, item.start_mark.line + 1, item) for item in entry.node.value]

    def _read_texts(self, entry: YamlEntry) -> tuple[tuple[str, str], ...]:
        """Strings by name."""
        return tuple((part.key, self._read_text(part)) for part in self._read_entries(entry))

    def _read_seconds(self, entry: YamlEntry) -> float | None:
        """A number of seconds."""
        try:
            seconds = float(self._read_text(entry))
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < float("inf"):
            self._note(entry, "expected a number of seconds above 0")
            return None
        return seconds

    def _read_rules(self, entry: YamlEntry) -> tuple[MetricRule, ...]:
        """How each metric is found in the output."""
        return tuple(self._read_rule(part) for part in self._read_entries(entry))

    def _read_rule(self, entry: YamlEntry) -> MetricRule:
        """How one metric is found."""
        values: dict[str, Any] = {}
        for part in self._read_entries(entry):
            if part.key not in _METRIC_KEYS:
                self._note(part, f"{entry.key} has no such key; {suggest(part.key, _METRIC_KEYS)}")
                continue
            values[part.key] = text = self._read_text(part)
            if part.key == "skip":
                values[part.key] = int(text) if text.isdecimal() else 0
                if not text.isdecimal():
                    self._note(part, f"expected a whole number of at least 0, got {text!r}")
            elif part.key == "reduction_type" and text not in REDUCTIONS:
                self._note(part, f"no reduction is called {text!r}; {suggest(text, REDUCTIONS)}")
            elif part.key == "regexp" and text:
                values[part.key] = part.node.value  # including its spaces
                self._check_regexp(part, part.node.value)
        if ("regexp" in values) == ("key" in values):
            self._note(entry, "give either regexp, for text, or key, for a JSON object")
        return MetricRule(entry.key, **values)

    def _check_regexp(self, entry: YamlEntry, text: str) -> None:
        """Report a regular expression that is invalid, or does not have exactly one group."""
        try:
            groups = re.compile(text).groups
        except re.error as error:
            self._note(entry, f"no regular expression: {error}")
            return
        if groups > 1:
            self._note(entry, f"expected at most one group, which is the number, got {groups}")

    def _read_parameters(self, entry: YamlEntry) -> list[tuple[tuple[str, str], ...]]:
        """The parameters of each variant: all combinations, or the rows of a table."""
        if isinstance(entry.node, yaml.SequenceNode):
            return self._read_table(entry)
        values = {part.key: self._read_values(part) for part in self._read_entries(entry)}
        return combine_parameters(values)

    def _read_table(self, entry: YamlEntry) -> list[tuple[tuple[str, str], ...]]:
        """Rows of values under a first row of names."""
        rows = [self._read_values(item) for item in self._read_items(entry)]
        if len(rows) < 2:
            self._note(entry, "expected a row of names, then rows of values")
            return []
        names, *others = rows
        if any(len(row) != len(names) for row in others):
            self._note(entry, f"expected {len(names)} values in each row, as there are names")
            return []
        return [tuple(zip(names, row, strict=True)) for row in others]

    def _read_values(self, entry: YamlEntry) -> list[str]:
        """The values of a parameter: a list, or a comma-separated string."""
        if isinstance(entry.node, yaml.SequenceNode):
            return [self._read_text(item) for item in self._read_items(entry)]
        return [value.strip() for value in self._read_text(entry).split(",")]
