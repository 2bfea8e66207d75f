"""The answer of `phalanx port` as text: the command, a table, the plan."""

import shutil
import textwrap
from collections.abc import Sequence

from phalanx.dialects.table import KIND_WORDS
from phalanx.port.new_command import quote_word
from phalanx.port.ported import Ported, PortedRow

_HEADINGS = {
    "launcher": "its launcher",
    "environment": "its environment",
    "config": "its config, where the preset differs",
    "default": "defaults of {title} that differ",
    "program": "what {title} always did",
}
_WIDEST, _NARROWEST = 120, 60
_OLD_WIDTH, _KIND_WIDTH = 34, 17


def print_answer(answer: Ported, plan: Sequence[tuple[str, str]], problem: str) -> None:
    """Print the new command, what became of each option, and the plan."""
    width = max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size((100, 24)).columns))
    print(_wrap_command(answer.command.line, width))
    for words in answer.then:
        print(f"phalanx {' '.join(map(quote_word, words))}    (afterwards)")
    print()
    for warning in answer.warnings:
        text = f"warning: {warning}"
        print(textwrap.fill(text, width, subsequent_indent="  ", break_on_hyphens=False))
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
        print(f"{name:<14}{text}")
    if problem:
        print(f"\nit would not start: {problem}")


def _wrap_command(line: str, width: int) -> str:
    """A command line over several lines, each but the last with a backslash at its end."""
    parts = line.split(" ")
    lines, current = [], parts[0]
    for place, part in enumerate(parts[1:], 1):
        begins = part.startswith("-") or not parts[place - 1].startswith("-")
        follows = 1 + len(parts[place + 1]) if place + 1 < len(parts) else 0
        if begins and len(current) + len(part) + follows + 3 > width:
            lines.append(current)
            current = f"    {part}"
        else:
            current += f" {part}"
    return " \\\n".join([*lines, current])


def _print_rows(rows: Sequence[PortedRow], width: int) -> None:
    """Three columns: what it was, what it is, and why; each wrapped in its own."""
    rest = width - _OLD_WIDTH - _KIND_WIDTH - 4
    for row in rows:
        text = ": ".join(filter(None, [row.new, row.why]))
        columns = (
            _wrap(row.old or "(always)", _OLD_WIDTH),
            [KIND_WORDS[row.kind]],
            _wrap(text, rest),
        )
        for place in range(max(map(len, columns))):
            cells = [column[place] if place < len(column) else "" for column in columns]
            print(f"  {cells[0]:<{_OLD_WIDTH}}{cells[1]:<{_KIND_WIDTH}}{cells[2]}".rstrip())


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width - 2, break_on_hyphens=False) or [""]
