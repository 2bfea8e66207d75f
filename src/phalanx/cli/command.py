"""What a command is, and how its arguments are parsed: argparse, filled from the schema."""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from phalanx.catalog.plugins import load_plugins
from phalanx.config.hints import suggest_option
from phalanx.config.schema import OPTIONS, SPELLINGS
from phalanx.config.text import LIST_OPTIONS
from phalanx.errors import ConfigError

if TYPE_CHECKING:
    from phalanx.config.read import Settings
    from phalanx.data.formats.image_file import ReadLimits

ALL_OPTIONS = tuple(OPTIONS)
LIMIT_OPTIONS = ("max-file-mib", "max-pixels")  # of every command that reads images
MODEL_OPTIONS = tuple(
    option.name
    for option in OPTIONS.values()
    if option.section in ("model", "resnet", "efficientnet") and option.name != "model"
)


@dataclass(frozen=True)
class Argument:
    """An argument of a command that is not an option of a run: a path, a switch."""

    name: str  # "run" is positional, "--json" is a flag
    help: str
    _: KW_ONLY
    metavar: str = ""
    many: bool = False
    required: bool = False
    switch: bool = False  # a flag without a value
    default: Any = None

    @property
    def shown(self) -> str:
        """What help calls it."""
        return self.metavar or (self.name if self.name.startswith("-") else self.name.upper())


JSON_FLAG = Argument("--json", "Print a JSON object.", switch=True)
PRESET_ARGS = (
    Argument("preset", "A preset, or a YAML file.", metavar="PRESET|FILE"),
    Argument("--config", "The same, as a flag."),
)


@dataclass(frozen=True)
class ParsedArgs:
    """A parsed command line."""

    values: dict[str, Any]  # of the command's own arguments, by name
    flags: dict[str, str]  # options of the run, as text
    problems: tuple[str, ...]  # what was not understood, to be reported with the rest
    line: str  # as it was typed

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @property
    def preset_name(self) -> str | None:
        """The preset or file of a command that takes one, as its first word or by --config."""
        names = [self[key] for key in ("preset", "--config") if self[key]]
        if len(names) > 1:
            raise ConfigError(
                f"--config {names[1]}: the preset {names[0]} is already named; give only one"
            )
        return names[0] if names else None

    def read_settings(self) -> "Settings":
        """The settings of a command that takes a preset and all options."""
        from phalanx.assemble.find_data import read_with_data

        return read_with_data(self.preset_name, self.flags, problems=self.problems)

    def read_int(
        self, flag: str, low: int, high: float = math.inf, *, noun: str = "a whole number"
    ) -> int:
        """The whole number that a flag such as --steps gives."""
        text = self[flag]
        if not text.isdecimal() or not low <= int(text) <= high:
            limits = f"of at least {low}" if high == math.inf else f"from {low} to {high:,}"
            raise ConfigError(f"{flag}: wants {noun} {limits}, got {text!r}")
        return int(text)

    def read_positive(self, flag: str, wanted: str, *, high: float = sys.float_info.max) -> float:
        """The number above zero that a flag such as --seconds gives."""
        try:
            number = float(self[flag])
        except ValueError:
            number = 0.0
        if not 0 < number <= high:
            raise ConfigError(f"{flag}: wants {wanted}, got {self[flag]!r}")
        return number

    def read_limits(self) -> "ReadLimits":
        """How large an image may be, of a command that reads no other config."""
        from phalanx.assemble.dataset_summary import build_read_limits
        from phalanx.config.read import merge_layers, read_flags

        problems = list(self.problems)
        layers = [read_flags(self.flags, problems)]
        return build_read_limits(merge_layers(layers, problems, name="").config)

    def load_plugins(self) -> None:
        """Import what --plugin names; for commands that look into the tables themselves."""
        if "plugin" in self.flags:
            load_plugins(self.flags["plugin"])

    def refuse_problems(self) -> None:
        """Raise if anything was not understood; for commands that read no config."""
        if self.problems:
            raise ConfigError("\n".join(self.problems))

    def print_result(self, facts: Any, print_text: Callable[[], None]) -> None:
        """Print plain values as JSON where --json is given, else what `print_text` prints."""
        if self["--json"]:
            print(json.dumps(facts, indent=2))
        else:
            print_text()


_Run = Callable[[ParsedArgs], int | None]


@dataclass(frozen=True)
class Command:
    """A command: its help, its arguments, and what it does."""

    name: str
    summary: str
    arguments: tuple[Argument, ...]
    usage: str
    options: tuple[str, ...]
    examples: dict[str, str]
    run: _Run


REGISTERED: dict[str, Command] = {}  # the commands of the files imported so far


def command(
    name: str,
    summary: str,
    *arguments: Argument,
    usage: str,
    options: tuple[str, ...] = (),
    examples: dict[str, str],
) -> Callable[[_Run], _Run]:
    """Make a command of the function below it, which may give an exit code.

    usage: what follows the name. options: those of a run that it takes. examples: command lines,
    and what each does.
    """

    def register(run: _Run) -> _Run:
        REGISTERED[name] = Command(name, summary, arguments, usage, options, examples, run)
        return run

    return register


class _Parser(argparse.ArgumentParser):
    """argparse that raises its errors."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of leaving the process."""
        raise ConfigError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


def parse_args(command: Command, argv: Sequence[str]) -> ParsedArgs:
    """Parse a command's words; unknown flags become problems, so that all are reported together."""
    spellings = {old: name for old, name in SPELLINGS.items() if name in command.options}
    words, list_problems = _join_lists(spellings, argv)
    known, unknown_problems = _split_off_unknown(command, spellings, words)
    values = vars(_build_parser(command, spellings).parse_args(known))
    flags = {
        name: values.pop(f"option {name}") for name in command.options if f"option {name}" in values
    }
    line = " ".join(["phalanx", command.name, *argv])
    return ParsedArgs(values, flags, (*unknown_problems, *list_problems), line)


def _split_off_unknown(
    command: Command, spellings: Mapping[str, str], argv: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The words argparse will understand, and a line for each flag it would not.

    An unknown flag takes its value along: otherwise the value would pass for a preset's name.
    """
    flags = {a.name for a in command.arguments if a.name.startswith("--")}
    flags |= {f"--{spelling}" for spelling in spellings}
    aliases = {f"--{spelling}" for spelling in SPELLINGS if spelling not in OPTIONS}
    given = [word.partition("=")[0] for word in argv if word.startswith("--")]
    known: list[str] = []
    problems: list[str] = []
    skip = False
    for word in argv:
        name, equals, value = word.partition("=")
        if value == "--":  # which argparse leaves out
            problems.append(
                f"{name}: {value} is not a value; give another, or leave the option out"
            )
        elif re.match("--|-[a-zA-Z]", name) and name not in flags:
            way_out = suggest_option(name, sorted(flags - aliases), given)
            problems.append(f"{name}: no such option; {way_out}")
            skip = not equals
        elif skip and not re.match("--|-[a-zA-Z]", word):
            skip = False
        elif _is_negative(word) and known and known[-1] in flags:
            known[-1] += f"={word}"  # argparse would take -1e-3 for a flag
        else:
            known.append(word)
            skip = False
    return known, problems


def _join_lists(spellings: Mapping[str, str], argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words with lists of numbers in one piece, and a line for each that came in several.

    `--lr-epoch-decay 2 4` is how other programs write 2,4; here 4 would pass for a preset's name.
    """
    lists = {f"--{spelling}" for spelling, name in spellings.items() if name in LIST_OPTIONS}
    words: list[str] = []
    problems: dict[int, str] = {}  # by the place of the list
    for word in argv:
        in_list = len(words) > 1 and words[-2] in lists
        if in_list and _is_number(words[-1].rsplit(",")[0]) and _is_number(word):
            words[-1] = f"{words[-1].rstrip(',')},{word.rstrip(',')}"
            problems[len(words)] = (
                f"{words[-2]}: a list has commas and no spaces; write {words[-1]}"
            )
        else:
            words.append(word)
    return words, list(problems.values())


def _is_number(word: str) -> bool:
    """Whether the word is a number or a length of training, perhaps with a bracket or a comma."""
    return re.fullmatch(r"\[?\.?\d[\d./]*(ep|st|%)?\]?,?", word) is not None


def _is_negative(word: str) -> bool:
    """Whether the word is a number below zero."""
    return re.fullmatch(r"-\d*\.?\d+(e[-+]?\d+)?", word, re.IGNORECASE) is not None


def _build_parser(command: Command, spellings: Mapping[str, str]) -> _Parser:
    """An argparse parser for the command's arguments and options."""
    parser = _Parser(prog=f"phalanx {command.name}", add_help=False, allow_abbrev=False)
    more: dict[str, Any]
    for argument in command.arguments:
        name, many = argument.name, argument.many
        if argument.switch:
            parser.add_argument(name, dest=name, action="store_true")
        elif name.startswith("--"):
            more = {"nargs": "+", "action": "extend"} if many else {}
            parser.add_argument(name, dest=name, default=argument.default, **more)
        elif argument.required:
            parser.add_argument(name, nargs="+" if many else None)
        else:
            parser.add_argument(name, nargs="*" if many else "?")
    for spelling, name in spellings.items():
        more = {"nargs": "?", "const": "true"} if OPTIONS[name].type is bool else {}
        parser.add_argument(
            f"--{spelling}", dest=f"option {name}", default=argparse.SUPPRESS, **more
        )
    return parser
