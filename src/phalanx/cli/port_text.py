"""The answer of `phalanx port` as text: the command, a table, the plan."""

import re
import shutil
from collections.abc import Sequence
from itertools import zip_longest

from phalanx.dialects.table import KIND_WORDS
from phalanx.port.new_command import quote_word
from phalanx.port.ported_command import PortedCommand, PortedRow

_HEADINGS = {
    "launcher": "its launcher",
    "environment": "its environment",
    "config": "its config, where the preset differs",
    "default": "defaults of {title} that differ",
    "program": "what {title} always did",
}
_WIDEST, _NARROWEST = 120, 60
_OLD_WIDTH, _KIND_WIDTH = 34, 17
_NARROW_OLD_WIDTH = 30  # where the terminal has 80 columns or so
_PLAN_INDENT = 14


def print_answer(
    answer: PortedCommand, plan: Sequence[tuple[str, str]], problem: str, head: str = ""
) -> None:
    """Print the new command, what became of each option, and the plan.

    head: what stands in the place of the command.
    """
    width = max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size((100, 24)).columns))
    print(head or _wrap_command(answer.command.line, width))
    for words in answer.then:
        print(f"phalanx {' '.join(map(quote_word, words))}    (afterwards)")
    print()
    for warning in answer.warnings:
        _print_text(f"warning: {warning}", width)
    print("\n" * bool(answer.warnings), end="")
    _print_rows([row for row in answer.rows if row.source == "command"], width)
    for source, heading in _HEADINGS.items():
        rows = [row for row in answer.rows if row.source == source]
        if rows:
            print(f"\n{heading.format(title=answer.title)}")
            _print_rows(rows, width)
    if plan:
        print("\nthe plan, as far as it needs no torch")
    for name, text in plan:
        lines = [text] if len(text) < width - _PLAN_INDENT else _wrap(text, width - _PLAN_INDENT)
        print(f"{name:<{_PLAN_INDENT}}" + f"\n{' ' * _PLAN_INDENT}".join(lines))
    if problem:
        print()
        _print_text(f"it would not start: {problem}", width)


def _wrap_command(line: str, width: int) -> str:
    """A command line over several lines, each but the last with a backslash at its end."""
    parts = line.split(" ")
    groups = [parts[0]]  # of words that stay together: an option and its value
    for part in parts[1:]:
        is_quoted = groups[-1].count("'") % 2 == 1  # and no place for a backslash
        if not is_quoted and (part.startswith("-") or part == "phalanx"):
            groups.append(part)
        else:
            groups[-1] += f" {part}"
    lines = groups[:1]
    for group in groups[1:]:
        if len(lines[-1]) + len(group) + 3 > width:
            lines.append(f"    {group}")
        else:
            lines[-1] += f" {group}"
    return " \\\n".join(lines)


def _print_text(text: str, width: int) -> None:
    """Print what may be several lines, each but the first indented."""
    lines = [part for line in text.splitlines() for part in _wrap(line, width)]
    for place, line in enumerate(lines):
        print("  " * bool(place) + line)


def _print_rows(rows: Sequence[PortedRow], width: int) -> None:
    """Three columns: what it was, what it is, and why; each wrapped in its own."""
    old_width = _OLD_WIDTH if width >= 100 else _NARROW_OLD_WIDTH
    for row in rows:
        text = ": ".join(filter(None, [row.new, row.why]))
        texts = _wrap(text, width - old_width - _KIND_WIDTH - 2)
        cells = list(zip_longest([KIND_WORDS[row.kind]], texts, fillvalue=""))
        for old in _wrap(row.old or "(always)", old_width):
            is_long = len(old) > old_width - 2  # and stands alone in its line
            kind, text = ("", "") if is_long or not cells else cells.pop(0)
            print(f"  {old:<{old_width}}{kind:<{_KIND_WIDTH}}{text}".rstrip())
        for kind, text in cells:
            print(f"  {'':<{old_width}}{kind:<{_KIND_WIDTH}}{text}".rstrip())


def _wrap(text: str, width: int) -> list[str]:
    """Lines that break between words; a list that is too long for one breaks after its commas."""
    lines: list[str] = []
    for word in text.split():
        parts = re.split(r"(?<=,)", word) if len(word) > width - 2 else [word]
        for place, part in enumerate(parts):
            gap = " " * (place == 0 and bool(lines))
            if lines and len(lines[-1]) + len(gap) + len(part) <= width - 2:
                lines[-1] += gap + part
            else:
                lines.append(part)
    return lines or [""]
