"""How equal results are on different layouts: the largest relative L2 of a tensor, as a table.

    python scripts/measure_layouts.py [--ranks 1,2,3,4]

The comparisons are those of tests/parallel/equal_layouts.py, on generated digits of 12 pixels.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "parallel")]

from equal_layouts import (  # noqa: E402 - found by the lines above
    Comparison,
    Row,
    list_first_steps,
    list_near,
    list_one_replica,
    list_resumed,
    list_spans,
    list_split_spans,
    list_strict,
    measure,
)

from small_runs import make_digits  # noqa: E402

AGAINST = {
    "folded": "the same folded into one process",
    "one replica": "1 replica, accumulation 8; trained parameters only",
    "plain torch": "plain torch, one model for each group of replicas",
    "float64": "the same in float64, folded",
}


def describe_numbers(one: Comparison) -> str:
    """Its precision and its number of steps."""
    if one.float64:
        return "float64, 20 steps"
    if not one.bound:
        return "strict, 20 steps"
    return "float32, 1 step"


def describe_row(rows: Sequence[Row]) -> str:
    """A line of the table: a comparison on all layouts."""
    one, farthest = rows[0].comparison, max(rows, key=lambda row: row.apart)
    layouts = ", ".join("folded" if row.ranks == 1 else str(row.ranks) for row in rows)
    same = not any(row.where for row in rows)
    apart = "bit for bit" if same else f"{farthest.apart:.1e} ({farthest.where})"
    bound = f"{one.bound:g}" if one.bound else "bit for bit"
    if not all(row.holds for row in rows):
        bound += ", **missed**"
    cells = one.what, describe_numbers(one), layouts, str(rows[0].tensors), apart, bound
    return f"| {' | '.join(cells)} |"


def gather(rows: Iterable[Row], comparisons: Sequence[Comparison]) -> Iterator[list[Row]]:
    """The rows of each comparison."""
    ordered = sorted(rows, key=lambda row: (comparisons.index(row.comparison), row.ranks))
    for _, some in groupby(ordered, key=lambda row: comparisons.index(row.comparison)):
        yield list(some)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="1,2,3,4")
    ranks = [int(text) for text in parser.parse_args().ranks.split(",")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        digits = make_digits(folder / "digits", train=96, valid=40)
        resumed = list_resumed([1, 2, 4], data_dir=digits, folder=folder)
        split = list_split_spans(data_dir=digits, folder=folder)
        chosen = [*list_strict(), *resumed, *list_near(), *split]
        chosen += [*list_one_replica(), *list_spans(), *list_first_steps()]
        chosen.sort(key=lambda one: list(AGAINST).index(one.against))
        rows = list(measure(chosen, ranks, data_dir=digits, folder=folder))
    for against, some in groupby(gather(rows, chosen), key=lambda rows: rows[0].comparison.against):
        print(f"\nAgainst {AGAINST[against]}:\n")
        print("| options | numbers | ranks | tensors | largest relative L2 | bound |")
        print("|---|---|---|---:|---|---|")
        for each in some:
            print(describe_row(each))


if __name__ == "__main__":
    main()
