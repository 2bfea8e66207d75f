"""Loops of shell scripts: the values that they go through, and what they set."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_NUMBER = r"-?(?:0|[1-9]\d{0,5})"
_RANGE = re.compile(
    rf"\{{({_NUMBER})\.\.({_NUMBER})(?:\.\.({_NUMBER}))?\}}"
    rf"|(?:\$\(|`)seq((?: +{_NUMBER}){{1,3}}) *[)`]"
)
_BOUND = re.compile(r"(?<![\w$-])(?:do|done)(?![\w-])")
_SET = re.compile(r"(?<![\w$-])([A-Za-z_]\w*)(?:\+?=|\+\+)", re.ASCII)
MOST_ROUNDS = 1000  # of all loops of a text together


@dataclass
class Loop:
    """A loop of the shell that is being read."""

    name: str  # of its variable
    values: list[str]  # that are still to come
    is_known: bool  # whether they are all that it goes through
    begin: int  # where its commands begin
    depth: int = 0  # conditions around it
    may_break: bool = False  # before its last value


def find_changed(text: str) -> set[str]:
    """The variables that a loop sets; the text begins before its `do`."""
    depth, end = 0, len(text)
    for bound in _BOUND.finditer(text):
        depth += 1 if bound[0] == "do" else -1
        if depth <= 0:
            end = bound.start()
            break
    return set(_SET.findall(text[:end]))


def open_loop(words: Sequence[str], begin: int, depth: int) -> Loop:
    """The loop that words begin, with the values that it goes through if they are known."""
    if words[0] != "for" or words[2:3] != ["in"]:
        return Loop("", [], False, begin)
    values = [value for word in words[3:] for value in _list_loop_values(word)]
    is_known = bool(values) and not any(set(value) & set("$`*?[{") for value in values)
    return Loop(words[1], values if is_known else [], is_known, begin, depth)


def leave_loop(loop: Loop, depth: int) -> None:
    """Follow a `break` with that many conditions around it: the last round, or perhaps not."""
    if depth > loop.depth:
        loop.may_break = True
    else:
        loop.values.clear()


def _list_loop_values(word: str) -> list[str]:
    """The values that a word of a `for` stands for: {1..3} and $(seq 1 3) are three."""
    found = _RANGE.fullmatch(word)
    if found is None:
        return [word]
    numbers = [int(text) for text in (found[4] or "").split()]
    if numbers:  # seq LAST, seq FIRST LAST, seq FIRST STEP LAST
        first, last = (1 if len(numbers) == 1 else numbers[0]), numbers[-1]
        step = numbers[1] if len(numbers) == 3 else 1
    else:
        first, last = int(found[1]), int(found[2])
        step = abs(int(found[3] or 1)) * (1 if first <= last else -1)
    end = last + (1 if step > 0 else -1)
    return [str(n) for n in range(first, end, step)[: MOST_ROUNDS + 1]] if step else [word]
