"""The pieces of HTML every section of report.html is put together from."""

from collections.abc import Sequence
from html import escape
from typing import Any


def section(name: str, title: str, *, body: str) -> str:
    """One section with its heading."""
    return f'<section id="{name}">\n<h2>{escape(title)}</h2>\n{body}\n</section>'


def note(text: str) -> str:
    """A sentence that stands where there is nothing to show, or explains what is shown."""
    return f'<p class="muted">{escape(text)}</p>'


def flatten(values: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested facts as (dotted name, text) pairs."""
    if not isinstance(values, dict):
        return [(prefix, str(values))]
    pairs: list[tuple[str, str]] = []
    for name, value in values.items():
        pairs += flatten(value, f"{prefix}.{name}" if prefix else str(name))
    return pairs


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: int = 0) -> str:
    """A table of ready-made HTML cells; the last `numbers` columns line up on the right."""
    top = f"<thead>{_table_row(heads, 'th', numbers=numbers)}</thead>" if heads else ""
    body = "\n".join(_table_row(row, "td", numbers=numbers) for row in rows)
    return f'<div class="scroll"><table class="list">{top}<tbody>{body}</tbody></table></div>'


def _table_row(cells: Sequence[str], tag: str, *, numbers: int) -> str:
    """One row of a table."""
    words = len(cells) - numbers
    told = "".join(f"<{tag}>{cell}</{tag}>" for cell in cells[:words])
    counted = "".join(f'<{tag} class="number">{cell}</{tag}>' for cell in cells[words:])
    return f"<tr>{told}{counted}</tr>"
