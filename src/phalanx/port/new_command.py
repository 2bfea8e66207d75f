"""The new command: its words, with a launcher where hosts are named, and as YAML."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import yaml

from phalanx.config.presets import find_preset
from phalanx.config.schema import OPTIONS
from phalanx.config.text import parse_option_text
from phalanx.dialects.table import TARGET, TRUE, Effect
from phalanx.errors import ConfigError

_WORD_LISTS = ("spec", "benchmark")  # flags that take several words
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})", re.ASCII)
_SAFE_VARIABLE = re.compile(r"[\w@%+=:,./~$\{\}-]*", re.ASCII)


@dataclass
class NewCommand:
    """A command of Phalanx."""

    name: str  # train, validate, average, ...
    flags: dict[str, str] = field(default_factory=dict)  # by name; TARGET is its first word
    launch: dict[str, str] = field(default_factory=dict)  # options of phalanx launch
    variables: dict[str, str] = field(default_factory=dict)  # of the environment

    @property
    def words(self) -> list[str]:
        """The command as it is typed after `phalanx`."""
        target = self.flags.get(TARGET, "")
        words = [*self.name.split(), *([target] if target else [])]
        for name, text in self.flags.items():
            if name != TARGET:
                words += _spell(f"--{name}", text)
        if "host" not in self.launch:
            return words
        launch = [part for n, text in self.launch.items() for part in _spell_launch(n, text)]
        variables = [p for n, text in self.variables.items() for p in ("-x", f"{n}={text}")]
        return ["launch", *launch, *variables, "--", *words]

    @property
    def line(self) -> str:
        """The whole command for a shell; variables are left for the shell to fill in."""
        given = {} if "host" in self.launch else self.variables
        before = [f"{name}={quote_word(text)}" for name, text in given.items()]
        return " ".join([*before, "phalanx", *map(quote_word, self.words)])

    def spell_around(self, effect: Effect) -> list[str]:
        """The words that an effect adds before the command itself: for a launcher, variables."""
        launched = effect.launch if "host" in self.launch else {}
        words = [part for name, text in launched.items() for part in _spell_launch(name, text)]
        return [*words, *(f"{name}={text}" for name, text in effect.variables.items())]

    def dump_yaml(self, comment: str) -> str:
        """The options as a file that `phalanx train FILE` reads."""
        lines = [f"# {line}".rstrip() for line in comment.splitlines()]
        if self.flags.get(TARGET):
            lines.append(f"extends: {_name_fully(self.flags[TARGET])}")
        for name, text in self.flags.items():
            if name in OPTIONS:
                value = parse_option_text(name, text)
                lines.append(yaml.safe_dump({name: value}, default_flow_style=False).rstrip())
        return "\n".join(lines) + "\n"


def _name_fully(preset: str) -> str:
    """The name of a preset that the same name in a folder of the user's does not hide."""
    try:
        return find_preset(preset).full_name
    except ConfigError:  # one that is not here
        return preset


def _spell(flag: str, text: str) -> list[str]:
    """A flag and its value; a switch that is on has none."""
    name = flag.removeprefix("--")
    is_switch = name not in OPTIONS or OPTIONS[name].type is bool
    if text == TRUE and is_switch:
        return [flag]
    if name in _WORD_LISTS:
        return [flag, *text.split(",")]
    return [f"{flag}={text}"] if text.startswith("-") else [flag, text]


def _spell_launch(name: str, text: str) -> list[str]:
    return ["-x", text] if name.startswith("x ") else _spell(f"--{name}", text)


def quote_word(word: str) -> str:
    """A word as a shell takes it, with its variables and $(commands) alive."""
    if "$(" in word or "`" in word:
        return f'"{word}"'
    return word if word and _SAFE_VARIABLE.fullmatch(word) else shlex.quote(word)


def expand_variables(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The words with the variables that are set filled in."""

    def fill(found: re.Match[str]) -> str:
        return environment.get(found[1] or found[2], found[0])

    return [_VARIABLE.sub(fill, word) for word in words]


def find_variables(words: Sequence[str]) -> list[str]:
    """The names of all variables in the words."""
    found = [match[1] or match[2] for word in words for match in _VARIABLE.finditer(word)]
    return list(dict.fromkeys(found))
