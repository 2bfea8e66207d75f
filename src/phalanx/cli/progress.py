"""How far a command is, on a terminal: one line that is written over. A pipe or a log gets none."""

import sys


def tell(text: str) -> None:
    """Show how far the work is, over the last such line."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def end_line() -> None:
    """What is printed next begins a line of its own."""
    if sys.stderr.isatty():
        print(file=sys.stderr)
