"""What a command is, and how its words are read: argparse, filled from the schema."""

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from phalanx.catalog.plugins import load_plugins
from phalanx.config.schema import OPTIONS, SPELLINGS, suggest_option
from phalanx.config.text import LIST_OPTIONS
from phalanx.errors import ConfigError

ALL_OPTIONS = tuple(OPTIONS)
MODEL_OPTIONS = tuple(
    option.name
    for option in OPTIONS.values()
    if option.section in ("model", "resnet", "efficientnet") and option.name != "model"
)


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One word of a command that is not an option of a run: a path, a switch."""

    name: str  # "run" stands for itself, "--json" is a flag
    help: str
    metavar: str = ""
    many: bool = False
    required: bool = False
    switch: bool = False  # a flag without a value
    default: Any = None

    @property
    def key(self) -> str:
        """The word under which a request holds it."""
        return self.name.lstrip("-").replace("-", "_")


@dataclass(frozen=True)
class ParsedArgs:
    """A command line that was understood."""

    words: dict[str, Any]  # the command's own arguments
    flags: dict[str, str]  # options of the run, as text
    problems: tuple[str, ...]  # what was not understood, to be told with the rest
    line: str  # as it was typed

    def __getitem__(self, name: str) -> Any:
        return self.words[name]

    def load_plugins(self) -> None:
        """Import what --plugin names; for commands that look into the tables themselves."""
        if "plugin" in self.flags:
            load_plugins(self.flags["plugin"])

    def refuse_problems(self) -> None:
        """Raise if anything was not understood; for commands that read no config."""
        if self.problems:
            raise ConfigError("\n".join(self.problems))


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command: its help, its words, and what it does."""

    name: str
    summary: str
    usage: str
    run: Callable[[ParsedArgs], int]
    examples: tuple[tuple[str, str], ...]  # (command line, what it does)
    arguments: tuple[Argument, ...] = ()
    options: tuple[str, ...] = field(default=())


def read_preset_name(request: ParsedArgs) -> str | None:
    """The preset or file of a command that takes one, as its first word or by --config."""
    words = [request[word] for word in ("preset", "config") if request[word]]
    if len(words) > 1:
        raise ConfigError(f"--config {words[1]}: the preset {words[0]} is named already; give one")
    return words[0] if words else None


class _Parser(argparse.ArgumentParser):
    """argparse that raises what it has to say."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of leaving the process."""
        raise ConfigError(f"{message.removeprefix('argument ')}; {self.prog} --help tells more")


def parse(command: Command, argv: Sequence[str]) -> ParsedArgs:
    """Read a command's words; unknown flags become problems, so that all are told together."""
    words, spaced = _join_lists(command, argv)
    known, unknown = _set_unknown_apart(command, words)
    problems = (*unknown, *spaced)
    parser = _build_parser(command)
    read = vars(parser.parse_args(known))
    flags = {
        name: read.pop(f"option {name}") for name in command.options if f"option {name}" in read
    }
    line = " ".join(["phalanx", command.name, *argv])
    return ParsedArgs(read, flags, problems, line)


def _spellings_of(command: Command) -> dict[str, str]:
    """Every spelling of the options this command takes, to the option's name."""
    return {old: name for old, name in SPELLINGS.items() if name in command.options}


def _set_unknown_apart(command: Command, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words argparse will understand, and a line for each flag it would not.

    An unknown flag takes its value along: otherwise the value would pass for a preset's name.
    """
    flags = {a.name for a in command.arguments if a.name.startswith("--")}
    flags |= {f"--{old}" for old in _spellings_of(command)}
    old = {f"--{spelling}" for spelling in SPELLINGS if spelling not in OPTIONS}
    today = sorted(flags - old)
    known: list[str] = []
    problems: list[str] = []
    skip = False
    for word in argv:
        name, equals, _ = word.partition("=")
        if name.startswith("--") and name not in flags:
            problems.append(f"{name}: no such option; {suggest_option(name, today)}")
            skip = not equals
        elif skip and not word.startswith("--"):
            skip = False
        elif _is_negative(word) and known and known[-1] in flags:
            known[-1] += f"={word}"  # argparse would take -1e-3 for a flag
        else:
            known.append(word)
            skip = False
    return known, problems


def _join_lists(command: Command, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words with lists of numbers in one piece, and a line for each that came in several.

    `--lr-epoch-decay 2 4` is how other programs write 2,4; here 4 would pass for a preset's name.
    """
    lists = {f"--{old}" for old, name in _spellings_of(command).items() if name in LIST_OPTIONS}
    words: list[str] = []
    problems: dict[int, str] = {}  # by the place of the list
    for word in argv:
        begun = len(words) > 1 and words[-2] in lists
        if begun and _is_number(words[-1].rsplit(",")[0]) and _is_number(word):
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


def _build_parser(command: Command) -> _Parser:
    """An argparse parser for the command's arguments and options."""
    parser = _Parser(prog=f"phalanx {command.name}", add_help=False, allow_abbrev=False)
    for argument in command.arguments:
        _add_argument(parser, argument)
    for spelling, name in _spellings_of(command).items():
        bare: dict[str, Any] = {"nargs": "?", "const": "true"} if OPTIONS[name].type is bool else {}
        parser.add_argument(
            f"--{spelling}", dest=f"option {name}", default=argparse.SUPPRESS, **bare
        )
    return parser


def _add_argument(parser: _Parser, argument: Argument) -> None:
    """Give argparse one of the command's own words."""
    if argument.switch:
        parser.add_argument(argument.name, dest=argument.key, action="store_true")
    elif argument.name.startswith("--"):
        several: dict[str, Any] = {"nargs": "+", "action": "extend"} if argument.many else {}
        parser.add_argument(argument.name, dest=argument.key, default=argument.default, **several)
    else:
        many = "+" if argument.required else "*"
        single = None if argument.required else "?"
        parser.add_argument(argument.key, nargs=many if argument.many else single)
