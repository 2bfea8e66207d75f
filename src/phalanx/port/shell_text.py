"""Pasted text as the words of commands: quotes, continuations, comments, export lines.

Variables stay as they are written: they are looked up where a plan or a run needs them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from phalanx.errors import ConfigError

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=", re.ASCII)
_PLACEHOLDER = re.compile(r"\[(?:\.\.\.|-[^\]\s]*)\]")  # [...] and [--help], as READMEs write them
_REDIRECTION = re.compile(r"\d?(?:>>?|<)&?(?:\d|-)?")
_FORMAT_PREFIX = "\x00"  # marks an operator of the shell among words


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
    for number, all_words in _ShellReader(text).read():
        words = all_words[1:] if all_words[0] == "$" else all_words  # a prompt, copied along
        assigned = words[1:] if words[:1] == ["export"] else words
        if assigned and all(_ASSIGNMENT.match(word) for word in assigned):
            exported |= dict(word.split("=", 1) for word in assigned)
        elif words[:1] == ["cd"]:
            moves.append(" ".join(words))
        elif words:
            line = _build_line(words, dict(exported), number)
            found.append(replace(line, moves=tuple(moves)))
    return found


def _build_line(words: list[str], environment: dict[str, str], number: int) -> OldLine:
    """A command without what belongs to the shell or stands for something to be filled in."""
    kept: list[str] = []
    left: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if _PLACEHOLDER.fullmatch(word):
            left.append(word)
        elif word in (f"{_FORMAT_PREFIX}|", f"{_FORMAT_PREFIX}&"):
            left.append(" ".join([word, *rest]).replace(_FORMAT_PREFIX, ""))
            rest = []
        elif word.startswith(_FORMAT_PREFIX):  # > FILE, 2>&1
            target = [] if word[-1].isdigit() or word[-1] == "-" else rest[:1]
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

    def read(self) -> list[tuple[int, list[str]]]:
        """All commands of the text."""
        while self.place < len(self.text):
            self._step()
        self._end_command()
        return self.commands

    def _step(self) -> None:
        here = self.text[self.place]
        continued = re.compile(r"\\[ \t]*\n").match(self.text, self.place)
        redirection = self.word is None and self._find_redirection()
        if continued:
            self._end_word()
            self.place = continued.end()
        elif here == "\\":
            self._add(self.text[self.place + 1 : self.place + 2], 2)
        elif here in "'\"":
            self._read_quoted(here)
        elif here == "#" and self.word is None:
            end = self.text.find("\n", self.place)
            self.place = len(self.text) if end < 0 else end
        elif here in " \t":
            self._end_word()
            self.place += 1
        elif here in "\n;" or self.text.startswith(("&&", "||"), self.place):
            self._end_command()
            self.place += 2 if here in "&|" else 1
        elif here in "|&":
            self._add_operator(here)
        elif redirection:
            self._add_operator(redirection)
        else:
            self._add(here, 1)

    def _find_redirection(self) -> str:
        """The redirection that begins here; <path> is what READMEs write to be filled in."""
        found = _REDIRECTION.match(self.text, self.place)
        rest = self.text[self.place :].split("\n", 1)[0]
        return found[0] if found and not re.match(r"<[^<>]*>", rest) else ""

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
        pattern = r"'([^']*)'" if quote == "'" else r'"((?:[^"\\]|\\.)*)"'
        found = re.compile(pattern, re.DOTALL).match(self.text, self.place)
        if found is None:
            line = self.text.count("\n", 0, self.place) + 1
            column = self.place - self.text.rfind("\n", 0, self.place)
            after = self.text[self.place : self.place + 20].split("\n")[0]
            raise ConfigError(
                f"line {line}, column {column}: the quote that begins {after!r} is not closed; "
                f"close it with {quote}, or put a backslash before it"
            )
        inner = found[1]
        if quote == '"':
            inner = re.sub(r"\\\n", "", inner)
            inner = re.sub(r'\\(["\\$`])', r"\1", inner)
        self._add(inner, found.end() - self.place)

    def _end_word(self) -> None:
        if self.word is not None:
            self.words.append(self.word)
            self.word = None

    def _end_command(self) -> None:
        self._end_word()
        if self.words:
            self.commands.append((self.first_line, self.words))
            self.words = []
