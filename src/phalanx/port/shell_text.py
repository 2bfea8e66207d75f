"""Pasted text as the words of commands: quotes, continuations, comments, variables.

A variable that the text itself sets is filled in, as a shell would do, and a `for` loop over known
values is unrolled. Other variables stay as they are written: they are looked up where a plan or a
run needs them.
"""

import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from phalanx.errors import ConfigError
from phalanx.port.shell_builtins import ARITHMETIC, find_set_variables
from phalanx.port.shell_loops import MOST_ROUNDS, Loop, find_changed, leave_loop, open_loop
from phalanx.port.shell_variables import ShellVariables

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=", re.ASCII)
_ARRAY = re.compile(r'("?)\$\{([A-Za-z_]\w*)\[[@*]\]\}\1', re.ASCII)
_PLACEHOLDER = re.compile(  # [...] and [--help], as READMEs write them; what a script is given
    r"\[(?:\.\.\.|-[^\]\s]*)\]|\$[@*]|\$\{[@*][^{}]*\}"
)
_REDIRECTION = re.compile(r"&>>?|<<<|\d?(?:>>?|<)&?(?:\d|-)?")
_HERE_DOCUMENT = re.compile(
    r"""\d?<<-?[ \t]*(?:'([^'\n]+)'|"([^"\n]+)"|\\?([^\s<>|&;()'"`$\\]+))"""
)
# a line that gives a document to one of these, which runs what stands there
_READS_COMMANDS = re.compile(r"(?:^|[\s/|])(?:bash|sh|zsh|sbatch|qsub|ssh)(?=\s|$)")
_SETTERS = ("export", "declare", "readonly", "typeset")  # before what sets variables
_EXEC_FORM = re.compile(r"^(?:CMD|ENTRYPOINT|RUN)[ \t]+(\[.*\])[ \t]*$", re.MULTILINE)
_MAKE_PREFIX = re.compile(r"^(?:@-?|-@?)(?=[\w./])")  # before a command of a recipe
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
    moves: list[str] = []
    found = []
    for number, words, environment in _ShellReader(text).read():
        if words[:1] == ["cd"]:
            moves.append(" ".join(words))
        else:
            line = _build_line(words, environment, number)
            found.append(replace(line, moves=tuple(moves)))
    return [line for line in found if line.words]


def _read_assignments(words: Sequence[str]) -> dict[str, str]:
    """The variables that a command sets; none where it does anything else."""
    assigned = list(words)
    if words[:1] and words[0] in _SETTERS:
        assigned = [word for word in words[1:] if not word.startswith("-")]
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
            is_whole = word[-1].isdigit() or word[-1] in "-&" or _HERE_DOCUMENT.match(word, 1)
            target = [] if is_whole else rest[:1]
            left.append(" ".join([word.removeprefix(_FORMAT_PREFIX), *target]))
            rest = rest[len(target) :]
        else:
            kept.append(word)
    return OldLine(tuple(kept), environment, number, tuple(left))


class _ShellReader:
    """Takes text apart as a shell would, as far as training scripts need it."""

    def __init__(self, text: str) -> None:
        self.text = _EXEC_FORM.sub(_write_exec_form, text.replace("\r\n", "\n") + "\n")
        self.place = 0
        self.commands: list[tuple[int, list[str], dict[str, str]]] = []
        self.words: list[str] = []
        self.word: str | None = None  # None between words
        self.first_line = 1
        self.variables = ShellVariables()
        self.exported: list[str] = []  # the variables among them that are no loop's
        self.array: tuple[str, list[str]] | None = None  # NAME= before its (, and words before it
        self.loops: list[Loop] = []  # that have begun and are not done yet, the innermost last
        self.rounds = 0  # of loops so far
        self.here_ends: list[str] = []  # words that end the documents behind this line

    def read(self) -> list[tuple[int, list[str], dict[str, str]]]:
        """All commands of the text that do more than set variables, with those set before."""
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
        elif self._read_array(here) or self._read_arithmetic(here):
            pass
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

    def _read_array(self, here: str) -> bool:
        """Whether a part of NAME=(words) stands here, or "${NAME[@]}"; then it is read."""
        found = _ARRAY.match(self.text, self.place) if here in '"$' else None
        words = self.variables.find_array(found[2]) if found else None
        if found and words is not None:
            for position, word in enumerate(words):
                if position:
                    self._end_word()
                self._add(word, 0)
            self.place = found.end()
        elif self.array is not None and here == "\n":
            self._end_word()
            self.place += 1
        elif self.array is not None and here == ")":
            self._end_word()
            self.variables.set_array(self.array[0], self.words)
            (_, self.words), self.array = self.array, None
            self.place += 1
        elif here == "(" and self.word and _ASSIGNMENT.fullmatch(self.word):
            self.array, self.words, self.word = (self.word, self.words), [], None
            self.place += 1
        else:
            return False
        return True

    def _read_arithmetic(self, here: str) -> bool:
        """Whether ((...)) stands here; then it is read as one word."""
        found = ARITHMETIC.match(self.text, self.place) if here == "(" else None
        if found is None or self.word is not None or self.words[:1] == ["for"]:
            return False
        self._add(found[0], len(found[0]))
        return True

    def _read_operator(self, here: str) -> bool:
        """Whether something that the shell acts upon stands here; then it is read."""
        redirection = self.word is None and self._find_redirection()
        document = self._find_here_document()
        if document:
            if not _READS_COMMANDS.search(self._find_line()):
                self.here_ends.append(document[1] or document[2] or document[3])
            self._add_operator(document[0])
        elif here in "\n;" or self.text.startswith(("&&", "||"), self.place):
            operator = here * 2 if here in "&|" else ""
            self.place += len(operator) or 1
            self._end_command(operator)
            if here == "\n":
                self._skip_here_documents()
        elif redirection:
            self._add_operator(redirection)
        elif here in "|&":
            self.place += self.text.startswith("|&", self.place)
            self._add_operator(here)
            if here == "&":
                self._end_command()
        elif self._is_subshell(here):
            before = self.place
            self._end_command()
            if self.place == before:  # a loop that ends here may have another round
                (self.variables.begin_subshell if here == "(" else self.variables.end_subshell)()
                self.place += 1
        else:
            return False
        return True

    def _find_here_document(self) -> re.Match[str] | None:
        """The << END that stands here."""
        if self.word is not None or self.text.startswith("<<<", self.place):
            return None
        return _HERE_DOCUMENT.match(self.text, self.place)

    def _find_line(self) -> str:
        """The line that is being read."""
        begin = self.text.rfind("\n", 0, self.place) + 1
        return self.text[begin : self.text.find("\n", self.place)]

    def _skip_here_documents(self) -> None:
        """Go on behind the text that the line before was given, which is not commands."""
        for end in self.here_ends:
            pattern = re.compile(rf"^\t*{re.escape(end)}$", re.MULTILINE)
            last = pattern.search(self.text, self.place)
            if last:  # else it was no document, as in (( n = 1 << k ))
                self.place = last.end()
        self.here_ends = []

    def _find_redirection(self) -> str:
        """The redirection that begins here; <path> is what READMEs write to be filled in."""
        found = _REDIRECTION.match(self.text, self.place)
        rest = self.text[self.place :].split("\n", 1)[0]
        return found[0] if found and not re.match(r"<[^<>]*>", rest) else ""

    def _is_subshell(self, here: str) -> bool:
        """Whether a bracket stands around commands: before one, or after one that has one."""
        if here == "(":
            begins = self.word is None and not self.words
            return begins and not self.variables.may_begin_pattern(self.text[: self.place])
        return here == ")" and self.variables.may_end_subshell(self.word)

    def _read_substitution(self) -> None:
        """A variable or a command for the shell to run, which stays as it is written."""
        run = _RUN_COMMAND.match(self.text, self.place)
        if run and re.match(r"`\s*#", run[0]):  # a comment inside a command
            self.place = run.end()
            return
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
        if name in self.variables.known:
            return self.variables.known[name]
        if default is not None and name not in self.variables.unknown:
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
            if self.array is None:
                self.words = self.variables.read_condition(self.words)

    def _end_command(self, operator: str = "") -> None:
        """Take down the command that ends here, perhaps with && or ||."""
        self._end_word()
        words, self.words = self.words, []
        if words[:1] == ["$"]:  # a prompt, copied along
            words = words[1:]
        if words:
            words[0] = _MAKE_PREFIX.sub("", words[0])
        if words and not self._follow_loop(words):
            self._take_down(words)
        if operator:
            self.variables.join(operator, words, sets=bool(_read_assignments(words)))
        else:
            self.variables.end_joined()

    def _take_down(self, words: list[str]) -> None:
        """Remember a command, or the variables that it sets."""
        self._fill_in_appended(words)
        assigned = _read_assignments(words)
        if not assigned:
            known = self.variables.known
            # what runs a command is filled in where it is used, and not run again
            names = [n for n in self.exported if n in known and not _RUN_COMMAND.search(known[n])]
            self.commands.append((self.first_line, words, {n: known[n] for n in names}))
            self.variables.lose(find_set_variables(words))
        self.variables.set_values(assigned)
        self.exported += [name for name in assigned if name not in self.exported]

    def _fill_in_appended(self, words: list[str]) -> None:
        """Make each NAME+=VALUE at the beginning the assignment that it amounts to."""
        for place, word in enumerate(words):
            name, appends, value = word.partition("+=")
            if word not in _SETTERS and not _ASSIGNMENT.match(word):
                break
            if appends and name.isidentifier():
                unknown = f"${{{name}}}" if name in self.variables.unknown else ""
                words[place] = f"{name}={self.variables.known.get(name, unknown)}{value}"

    def _follow_loop(self, words: Sequence[str]) -> bool:
        """Whether words begin or end a loop; each round of one over known values is read anew."""
        if words[0] in ("for", "while", "until", "select"):
            self.loops.append(open_loop(words, self.place, self.variables.depth))
        elif words[0] == "break" and self.loops:
            levels = int(words[1][:3]) if words[1:] and words[1].isdecimal() else 1
            for loop in self.loops[-levels:]:
                leave_loop(loop, self.variables.depth)
            return True
        elif words[0] != "done" or not self.loops:
            return False
        loop = self.loops[-1]
        self.rounds += 1
        if self.rounds > MOST_ROUNDS:
            raise ConfigError(
                f"line {self.first_line}: loops of more than {MOST_ROUNDS:,} rounds are not "
                "unrolled; paste the lines that matter"
            )
        if loop.values:
            self.variables.set_values({loop.name: loop.values.pop(0)})
            self.place = loop.begin
        elif words[0] == "done":
            self.loops.pop()
            if not loop.is_known:
                self.variables.end_loop()
            elif loop.may_break:
                self.variables.lose(find_changed(self.text[loop.begin :]) | {loop.name})
        else:
            self.variables.begin_loop(find_changed(self.text[self.place :]) | {loop.name})
        return words[0] in ("for", "done")  # what follows `while` may be an old command


def _write_exec_form(found: re.Match[str]) -> str:
    """CMD ["python3", "train.py"] of a Dockerfile as a shell would be told it."""
    try:
        return shlex.join(json.loads(found[1]))
    except (ValueError, TypeError, RecursionError):
        return found[0]
