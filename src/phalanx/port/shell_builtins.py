"""Commands of the shell itself that set variables to what only a run of the script would show."""

import re
from collections.abc import Sequence

ARITHMETIC = re.compile(r"\(\((?:[^()\n;]|\([^()\n;]*\))*\)\)")  # ((A++))
_CHANGED = re.compile(
    r"([A-Za-z_]\w*)\s*(?:\+\+|--|(?:<<|>>|[-+*/%&|^])?=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)",
    re.ASCII,
)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_BEFORE = re.compile(r"if|elif|while|until|!|[A-Za-z_]\w*=.*", re.ASCII | re.DOTALL)


def find_set_variables(words: Sequence[str]) -> set[str]:
    """The variables that a command sets, if it is one that asks, counts or forgets.

    >>> sorted(find_set_variables(["while", "read", "-r", "A", "B"])), find_set_variables(["ls"])
    (['A', 'B'], set())
    """
    rest = list(words)
    while rest and _BEFORE.fullmatch(rest[0]):
        del rest[0]
    name, *given = rest or [""]
    if name == "let" or ARITHMETIC.fullmatch(name):
        return {one or other for text in rest for one, other in _CHANGED.findall(text)}
    if name in ("read", "mapfile", "readarray", "unset"):
        return {word for word in given if _NAME.fullmatch(word)}
    return set(given[1:2]) if name == "printf" and given[:1] == ["-v"] else set()
