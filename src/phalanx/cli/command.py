"""Commands and their arguments, which argparse parses; options come from the schema."""

import argparse
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from phalanx.catalog.plugins import has_module, load_plugins
from phalanx.config.hints import explain_device_counts, suggest_option
from phalanx.config.presets import is_preset
from phalanx.config.schema import MODEL_SECTIONS, OPTIONS, SPELLINGS
from phalanx.config.text import LIST_OPTIONS, NEGATIVE_NUMBER
from phalanx.errors import ConfigError

if TYPE_CHECKING:
    from phalanx.config.read import Settings
    from phalanx.config.schema import Config
    from phalanx.data.convert.source_splits import SourceOptions

ALL_OPTIONS = tuple(OPTIONS)
_LISTS = (*LIST_OPTIONS, "device")  # cuda:0,2
_WORD_LISTS = (
    "pipeline-splits",
    "recompute-checkpoints",
    "sharding-exclude-filter",
    "sharding-include-filter",
)
# a number, a length of training such as 5ep, or a size of images and when it ends: 128:30%
_NUMBER = re.compile(r"\[?(\d+:)?\.?\d[\d./]*(e-?\d+)?(ep|st|%)?\]?,?", re.IGNORECASE)
_MOST_DIGITS = 18  # of a whole number
LIMIT_OPTIONS = ("max-file-mib", "max-pixels")  # of every command that reads images
LAYOUT_OPTIONS = ("valid-split", "class-from", "labels", "listing-rule")  # ... that lists them
MODEL_OPTIONS = tuple(
    option.name
    for option in OPTIONS.values()
    if option.section in MODEL_SECTIONS and option.name != "model"
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
    items: bool = False  # a list of numbers, with commas or spaces

    @property
    def shown(self) -> str:
        """Its name in the help."""
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
    command: str
    words: tuple[str, ...]  # after the command, as they were typed

    @property
    def line(self) -> str:
        """The whole command line."""
        return shlex.join(["phalanx", *self.command.split(), *self.words])

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
        from phalanx.assemble.find_data import read_settings_with_data

        return read_settings_with_data(self.preset_name, self.flags, problems=self.problems)

    def read_int(
        self, flag: str, low: int, high: float = math.inf, *, noun: str = "a whole number"
    ) -> int:
        """The whole number that a flag such as --steps gives."""
        text = self[flag]
        is_number = text.isdecimal() and len(text) <= _MOST_DIGITS  # Python reads 4,300 at most
        if not is_number or not low <= int(text) <= high:
            limits = f"of at least {low}" if high == math.inf else f"from {low} to {high:,}"
            raise ConfigError(f"{flag}: expected {noun} {limits}, got {text[:80]!r}")
        return int(text)

    def read_optional_int(self, flag: str, low: int, high: float = math.inf) -> int | None:
        """The same for a flag that has no default; None if it is not given."""
        return None if self[flag] is None else self.read_int(flag, low, high)

    def read_positive(self, flag: str, wanted: str, *, high: float = sys.float_info.max) -> float:
        """The number above zero that a flag such as --seconds gives."""
        try:
            number = float(self[flag])
        except ValueError:
            number = 0.0
        if not 0 < number <= high:
            raise ConfigError(f"{flag}: expected {wanted}, got {self[flag]!r}")
        return number

    def read_config(self) -> "Config":
        """The options of a command that takes no preset."""
        from phalanx.config.read import merge_layers, read_flags

        problems = list(self.problems)
        layers = [read_flags({**self.flags, "data": "folder"}, problems)]
        return merge_layers(layers, problems, name="").config

    def read_source_options(self) -> "SourceOptions":
        """How to read the data, for a command that reads no other config."""
        from phalanx.assemble.dataset_summary import build_layout_options, build_read_limits
        from phalanx.data.convert.source_splits import SourceOptions
        from phalanx.data.formats.sources import ValSplit

        config = self.read_config()
        wanted = config.data.val_split
        return SourceOptions(
            limits=build_read_limits(config),
            layout=build_layout_options(config),
            val_split=None if wanted is None else ValSplit(wanted),
        )

    def load_plugins(self) -> None:
        """Import what --plugin names; for commands that read the tables themselves."""
        if "plugin" in self.flags:
            load_plugins(self.flags["plugin"])

    def refuse_problems(self) -> None:
        """Raise if anything was not understood; for commands that read no config."""
        if self.problems:
            raise ConfigError("\n".join(self.problems))

    def print_result(self, facts: Any, print_text: Callable[[], None]) -> None:
        """Print plain values as JSON if --json was given, else call `print_text`."""
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
    takes_command: bool  # its words have another command in them

    @property
    def all_names(self) -> set[str]:
        """Its options and arguments, without dashes."""
        return {*self.options, *(argument.name.lstrip("-") for argument in self.arguments)}


REGISTERED_COMMANDS: dict[str, Command] = {}  # the commands of the files imported so far


def command(
    name: str,
    summary: str,
    *arguments: Argument,
    usage: str,
    options: tuple[str, ...] = (),
    examples: dict[str, str],
    takes_command: bool = False,
) -> Callable[[_Run], _Run]:
    """Make a command of the decorated function, which may return an exit code.

    usage: what follows the name. options: those of a run that it takes. examples: command lines,
    and what each does. takes_command: it gets its words unparsed, as they contain another command.
    """

    def register(run: _Run) -> _Run:
        REGISTERED_COMMANDS[name] = Command(
            name, summary, arguments, usage, options, examples, run, takes_command
        )
        return run

    return register


class _Parser(argparse.ArgumentParser):
    """argparse that raises its errors."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of exiting."""
        raise ConfigError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


def parse_args(command: Command, argv: Sequence[str]) -> ParsedArgs:
    """Parse a command's words; unknown flags become problems, which are reported together."""
    spellings = {old: name for old, name in SPELLINGS.items() if name in command.options}
    own = argv[: argv.index("--")] if "--" in argv else argv
    words = _join_lists(command, spellings, own)
    known, problems = _split_off_unknown(command, spellings, words)
    for word in argv[len(own) :]:  # none of these is a flag, so -x is the file ./-x
        known.append(f"./{word}" if word.startswith("-") and word != "--" else word)
    try:
        values = vars(_build_parser(command, spellings).parse_args(known))
    except ConfigError as error:
        raise ConfigError("\n".join([*problems, str(error)])) from None
    flags = {
        name: values.pop(f"option {name}") for name in command.options if f"option {name}" in values
    }
    return ParsedArgs(values, flags, tuple(problems), command.name, tuple(argv))


def _split_off_unknown(
    command: Command, spellings: Mapping[str, str], argv: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The words that argparse understands, and a problem for each other flag.

    The value of an unknown flag is dropped, too: it would be taken for a preset's name.
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
            if os.path.lexists(word):
                way_out = f"a path that begins with a hyphen is written ./{word}"
            problems.append(f"{name}: no such option; {way_out}")
            skip = not equals
        elif skip and not re.match("--|-[a-zA-Z]", word):
            skip = False
        elif NEGATIVE_NUMBER.fullmatch(word) and known and known[-1] in flags:
            known[-1] += f"={word}"  # argparse would read -1e-3 as a flag
        else:
            known.append(word)
            skip = False
    if "--shards" in flags:
        problems += explain_device_counts(argv)
    return known, problems


def _join_lists(command: Command, spellings: Mapping[str, str], argv: Sequence[str]) -> list[str]:
    """The words with each list as one word: `--lr-epoch-decay 2 4` becomes 2,4.

    A list includes the words after it as long as they could be items.
    """
    lists = {f"--{spelling}": name for spelling, name in spellings.items() if name in _LISTS}
    lists |= {a.name: a.name for a in command.arguments if a.items}
    words: list[str] = []
    for word in argv:
        flag, equals, first = words[-1].partition("=") if words else ("", "", "")
        if len(words) > 1 and words[-2] in lists:  # `--flag first word`
            flag, equals, first = words[-2], "", words[-1]
        if flag in lists and first and _is_item(word, lists[flag]):
            joined = ",".join(text.strip(",") for text in (first, word))
            words[-1] = f"{flag}={joined}" if equals else joined
        else:
            words.append(word)
    return words


def _is_item(word: str, name: str) -> bool:
    """Whether the word, perhaps with a bracket or a comma, could be an item of a list."""
    if name == "plugin":
        return word.rstrip(",").isidentifier() and not is_preset(word) and has_module(word)
    if name in _WORD_LISTS:  # a preset or a file is what the command is about
        is_file = os.path.exists(word) or word.endswith((".yaml", ".yml"))
        return not (word.startswith("-") or is_file or is_preset(word))
    if name == "device" and os.path.exists(word):  # a folder called 7, after --device cpu
        return False
    return _NUMBER.fullmatch(word) is not None


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
            parser.add_argument(name, metavar=argument.shown, nargs="+" if many else None)
        else:  # argparse would call many without a default required
            more = {"nargs": "*", "default": []} if many else {"nargs": "?"}
            parser.add_argument(name, metavar=argument.shown, **more)
    for spelling, name in spellings.items():
        more = {"nargs": "?", "const": "true"} if OPTIONS[name].type is bool else {}
        parser.add_argument(
            f"--{spelling}", dest=f"option {name}", default=argparse.SUPPRESS, **more
        )
    return parser
