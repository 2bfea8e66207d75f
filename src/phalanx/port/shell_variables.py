"""The variables of a script: known where they are set whatever its conditions come to.

What only one branch of an `if`, a `case`, or a command behind && or || sets is known in that
branch, and not behind it; the same holds for a loop of unknown rounds. What a subshell sets ends
with it.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_LISTED = "[@]"  # ends the name of an array among the variables
_LOOP = "a loop"  # in place of the word that ends a condition: not every `done` does
_ARRAY_BEGIN = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.ASCII)
_ENDS = {"if": "fi", "{": "}"}  # of conditions
_KEYWORDS = ("do", "then", "else", "{")  # before a command
# commands that ask nothing: what stands behind their && is done
_SURE = ("cd", "pushd", "mkdir", "export", "source", ".", "set", "module", "echo", "conda")


_State = tuple[dict[str, str], set[str]]  # what is known, and unknown


@dataclass
class _Branches:
    """A condition that is being read."""

    end: str  # the word that ends it; empty of commands joined by && and ||
    before: _State  # in front of it
    changed: set[str] = field(default_factory=set)  # variables that a branch has set
    has_or: bool = False  # whether one of the operators that join commands was ||


class ShellVariables:
    """The variables that a text has set so far."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        self.unknown: set[str] = set()  # set in one way or another
        self._conditions: list[_Branches] = []  # the innermost last
        self._subshells: list[tuple[int, _State]] = []  # `case`s around each, and before it

    @property
    def depth(self) -> int:
        """The number of conditions around what is being read."""
        return len(self._conditions)

    def set_values(self, values: Mapping[str, str]) -> None:
        """Take over what a command sets."""
        self.known |= values
        self.unknown -= set(values)
        if self._conditions:
            self._conditions[-1].changed |= set(values)

    def lose(self, names: set[str]) -> None:
        """Know no longer what variables are."""
        for name in names:
            self.known.pop(name, None)
        self.unknown |= names
        if self._conditions:
            self._conditions[-1].changed |= names

    def begin_loop(self, names: set[str]) -> None:
        """Enter a loop of unknown rounds, which sets these variables."""
        self.lose(names | {name + _LISTED for name in names})
        self._conditions.append(_Branches(_LOOP, self._copy_state()))

    def end_loop(self) -> None:
        """Leave a loop of unknown rounds: it may have had none."""
        self._end_condition()

    def begin_subshell(self) -> None:
        """Follow a bracket that opens around commands."""
        self._subshells.append((self._count_cases(), self._copy_state()))

    def may_end_subshell(self, word: str | None) -> bool:
        """Whether a bracket behind that word ends a subshell, not the pattern of a `case` in it."""
        cases = self._count_cases() - (word == "esac")
        return bool(self._subshells) and self._subshells[-1][0] == cases

    def end_subshell(self) -> None:
        """Follow a bracket that closes around commands."""
        _, (self.known, self.unknown) = self._subshells.pop()

    def may_begin_pattern(self, before: str) -> bool:
        """Whether a bracket behind that text opens a pattern of a `case`, as in (a|b)."""
        is_case = bool(self._conditions) and self._conditions[-1].end == "esac"
        return is_case and before.rstrip().endswith((" in", ";;"))

    def _count_cases(self) -> int:
        return sum(condition.end == "esac" for condition in self._conditions)

    def _copy_state(self) -> _State:
        return dict(self.known), set(self.unknown)

    def set_array(self, begin: str, words: Sequence[str]) -> None:
        """Take over NAME=(words) or NAME+=(words), of which begin is what precedes the words."""
        found = _ARRAY_BEGIN.fullmatch(begin)
        assert found is not None
        name = found[1] + _LISTED
        if found[2] and name in self.unknown:
            return
        before = self.known.get(name, "") if found[2] else ""
        self.set_values({name: f"{before} {shlex.join(words)}".strip()})

    def find_array(self, name: str) -> list[str] | None:
        """The words of an array; None where they are not known."""
        text = self.known.get(name + _LISTED)
        return None if text is None else shlex.split(text)

    def read_condition(self, words: list[str]) -> list[str]:
        """The words of a command so far, without those that begin a branch of a condition."""
        here = self._conditions[-1] if self._conditions else None
        if here and here.end == "esac" and words[-1].endswith(")"):
            return self._read_pattern(words)
        if words[:1] == ["case"] and words[2:] == ["in"]:
            self._conditions.append(_Branches("esac", self._copy_state()))
            return []
        if len(words) > 1:
            return words
        is_joined = here is not None and not here.end
        if words == ["if"] or (words == ["{"] and is_joined):  # whose ; does not end the others
            self._conditions.append(_Branches(_ENDS[words[0]], self._copy_state()))
        elif words[0] in ("else", "elif") and here:
            self._begin_branch(here)
        elif here and words[0] == here.end:
            self._end_condition()
        return [word for word in words if word not in _KEYWORDS]

    def _read_pattern(self, words: list[str]) -> list[str]:
        """The words of a command without the pattern of a `case`, such as a|b)."""
        if "(" in words[-1].removeprefix("(") or not all(
            word.endswith("|") for word in words[1:-1:2]
        ):
            return words
        self._begin_branch(self._conditions[-1])
        return []

    def join(self, operator: str, words: Sequence[str], *, sets: bool) -> None:
        """Follow && or || behind a command; sets: whether it only sets variables."""
        here = self._conditions[-1] if self._conditions else None
        if here and not here.end:
            here.has_or |= operator == "||"
            if here.has_or:  # the commands so far may have run or not
                self.lose(here.changed)
        elif operator == "||" or not (sets or "".join(words[:1]) in _SURE):
            self._conditions.append(_Branches("", self._copy_state(), has_or=operator == "||"))

    def end_joined(self) -> None:
        """Follow the end of commands that && and || join."""
        if self._conditions and not self._conditions[-1].end:
            self._end_condition()

    def _begin_branch(self, here: _Branches) -> None:
        """Know again what was known before the condition."""
        known, unknown = here.before
        self.known, self.unknown = dict(known), set(unknown)

    def _end_condition(self) -> None:
        """Forget what a branch of the innermost condition has set."""
        self.lose(self._conditions.pop().changed)
