"""Pasted text as the words of commands: quotes, continuations, comments, variables.

A variable that the text itself sets is filled in, as a shell would do. Others stay as they are
written: they are looked up where a plan or a run needs them.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from phalanx.errors import ConfigError

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=", re.ASCII)
_PLACEHOLDER = re.compile(r"\[(?:\.\.\.|-[^\]\s]*)\]")  # [...] and [--help], as READMEs write them
_REDIRECTION = re.compile(r"&>>?|\d?(?:>>?|<)&?(?:\d|-)?")
_FORMAT_PREFIX = "\x00"  # marks an operator of the shell among words

_RUN = r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*+\))*+\)|`[^`]*`"  # $(command) and `command`
_RUN_COMMAND = re.compile(_RUN)
_VARIABLE = re.compile(
    r"\$(?:(?P<name>[A-Za-z_]\w*)|\{(?P<braced>[A-Za-z_]\w*)(?::?-(?P<default>[^{}]*))?\})",
    re.ASCII,
)
_IN_DOUBLE_QUOTES = re.compile(rf'{_RUN}|\\\n|\\["\\$`]|{_VARIABLE.pattern}', re.ASCII)
_QUOTED = {
    "'": re.compile(r"'([^']*)'"),
    '"': re.compile(rf'"((?:{_RUN}|[^"\\]|\\.)*+)"', re.DOTALL),
}


@dataclass(frozen=True)
class OldLine:
    """One command as it was pasted."""

    words: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)  # what lines before it exported
    line: int = 1  # where it begins
    left_out: tuple[str, ...] = ()  # placeholders and what belonged to the shell
    moves: tuple[str, ...] = ()  # commands before it that change the folder, as they stand there


def read_words(words: Sequence[str]) -> list[OldLine]:
    """The commands that words of a command line hold; a single word is taken as pasted text."""
    if len(words) == 1 and re.search(r"\s", words[0].strip()):
        return read_text_lines(words[0])
    return [_build_line(list(words), {}, 1)]


def read_text_lines(text: str) -> list[OldLine]:
    """The commands of a pasted text or a script, with what was exported before each."""
    exported: dict[str, str] = {}
    moves: list[str] = []
    found = []
    for number, words in _ShellReader(text).read():
        assigned = _read_assignments(words)
        if assigned:  # what runs a command is filled in where it is used, and not run again
            exported |= {n: v for n, v in assigned.items() if not _RUN_COMMAND.search(v)}
        elif words[:1] == ["cd"]:
            moves.append(" ".join(words))
        else:
            line = _build_line(words, dict(exported), number)
            found.append(replace(line, moves=tuple(moves)))
    return [line for line in found if line.words]


def _read_assignments(words: Sequence[str]) -> dict[str, str]:
    """The variables that a command sets; none where it does anything else."""
    assigned = words[1:] if words[:1] == ["export"] else words
    if not all(_ASSIGNMENT.match(word) for word in assigned):
        return {}
    return dict(word.split("=", 1) for word in assigned)


def _build_line(words: list[str], environment: dict[str, str], number: int) -> OldLine:
    """A command without what belongs to the shell or stands for something to be filled in."""
    kept: list[str] = []
    left: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if _PLACEHOLDER.fullmatch(word):
            left.append(word)
        elif word == f"{_FORMAT_PREFIX}|":
            left.append(" ".join([word, *rest]).replace(_FORMAT_PREFIX, ""))
            rest = []
        elif word.startswith(_FORMAT_PREFIX):  # > FILE, 2>&1, &
            is_whole = word[-1].isdigit() or word[-1] in "-&"
            target = [] if is_whole else rest[:1]
            left.append(" ".join([word.removeprefix(_FORMAT_PREFIX), *target]))
            rest = rest[len(target) :]
        else:
            kept.append(word)
    return OldLine(tuple(kept), environment, number, tuple(left))


class _ShellReader:
    """Takes text apart as a shell would, as far as training scripts need it."""

    def __init__(self, text: str) -> None:
        self.text = text.replace("\r\n", "\n")
        self.place = 0
        self.commands: list[tuple[int, list[str]]] = []
        self.words: list[str] = []
        self.word: str | None = None  # None between words
        self.first_line = 1
        self.variables: dict[str, str] = {}  # those that the text has set so far
        self.subshells = 0  # ( that are not closed yet

    def read(self) -> list[tuple[int, list[str]]]:
        """All commands of the text."""
        while self.place < len(self.text):
            self._step()
        self._end_command()
        return self.commands

    def _step(self) -> None:
        here = self.text[self.place]
        continued = re.compile(r"\\[ \t]*\n").match(self.text, self.place)
        if continued:
            self._end_word()
            self.place = continued.end()
        elif here == "\\":
            self._add(self.text[self.place + 1 : self.place + 2], 2)
        elif here in "'\"":
            self._read_quoted(here)
        elif here in "$`":
            self._read_substitution()
        elif here == "#" and self.word is None:
            end = self.text.find("\n", self.place)
            self.place = len(self.text) if end < 0 else end
        elif here in " \t":
            self._end_word()
            self.place += 1
        elif not self._read_operator(here):
            self._add(here, 1)

    def _read_operator(self, here: str) -> bool:
        """Whether something that the shell acts upon stands here; then it is read."""
        redirection = self.word is None and self._find_redirection()
        if here in "\n;" or self.text.startswith(("&&", "||"), self.place):
            self._end_command()
            self.place += 2 if here in "&|" else 1
        elif redirection:
            self._add_operator(redirection)
        elif here in "|&":
            self._add_operator(here)
            if here == "&":
                self._end_command()
        elif self._is_subshell(here):
            self._end_command()
            self.subshells += 1 if here == "(" else -1
            self.place += 1
        else:
            return False
        return True

    def _find_redirection(self) -> str:
        """The redirection that begins here; <path> is what READMEs write to be filled in."""
        found = _REDIRECTION.match(self.text, self.place)
        rest = self.text[self.place :].split("\n", 1)[0]
        return found[0] if found and not re.match(r"<[^<>]*>", rest) else ""

    def _is_subshell(self, here: str) -> bool:
        """Whether a bracket stands around commands: before one, or after one that has one."""
        if here == "(":
            return self.word is None and not self.words
        return here == ")" and self.subshells > 0

    def _read_substitution(self) -> None:
        """A variable or a command for the shell to run, which stays as it is written."""
        run = _RUN_COMMAND.match(self.text, self.place)
        variable = _VARIABLE.match(self.text, self.place)
        value = self._expand(variable) if variable else ""
        splits = variable and value != variable[0] and not _RUN_COMMAND.search(value)
        if self.word is not None and _ASSIGNMENT.match(self.word):
            splits = False
        if variable and splits:
            for position, part in enumerate(re.split(r"\s+", value)):
                if position:
                    self._end_word()
                if part:
                    self._add(part, 0)
            self.place = variable.end()
        elif variable:
            self._add(value, len(variable[0]))
        else:
            text = run[0] if run else self.text[self.place]
            self._add(text, len(text))

    def _expand(self, found: re.Match[str]) -> str:
        """What stands for a match in double quotes: a value, or what a backslash protects."""
        name, default = found["name"] or found["braced"], found["default"]
        if name in self.variables:
            return self.variables[name]
        if default is not None:
            return os.environ.get(name, default)
        is_protected = found[0].startswith("\\")
        return found[0][1:].replace("\n", "") if is_protected else found[0]

    def _add(self, text: str, length: int) -> None:
        if self.word is None and not self.words:
            self.first_line = self.text.count("\n", 0, self.place) + 1
        self.word = (self.word or "") + text
        self.place += length

    def _add_operator(self, text: str) -> None:
        self._end_word()
        self.words.append(_FORMAT_PREFIX + text)
        self.place += len(text)

    def _read_quoted(self, quote: str) -> None:
        """What stands between two quotes; in double ones a backslash may protect."""
        found = _QUOTED[quote].match(self.text, self.place)
        if found is None:
            line = self.text.count("\n", 0, self.place) + 1
            column = self.place - self.text.rfind("\n", 0, self.place)
            after = self.text[self.place : self.place + 20].split("\n")[0]
            raise ConfigError(
                f"line {line}, column {column}: the quote that begins {after!r} is not closed; "
                f"close it with {quote}, or put a backslash before it"
            )
        inner = _IN_DOUBLE_QUOTES.sub(self._expand, found[1]) if quote == '"' else found[1]
        self._add(inner, found.end() - self.place)

    def _end_word(self) -> None:
        if self.word is not None:
            self.words.append(self.word)
            self.word = None

    def _end_command(self) -> None:
        self._end_word()
        words = self.words[1:] if self.words[:1] == ["$"] else self.words  # a prompt, copied along
        if words:
            self.commands.append((self.first_line, words))
            self.variables |= _read_assignments(words)
        self.words = []
