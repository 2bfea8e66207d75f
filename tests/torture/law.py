"""What a command may end with, and whether two runs are the same."""

import csv
import json
import re
from enum import StrEnum
from pathlib import Path

from torture.command import KILLED, Ended

CODES = {0, 2, 3, 4, 5, 6, 75, 130}  # of docs and phalanx.errors
STOPPED = {75, 130}
_CLOCK_COLUMNS = {"images_per_second", "data_wait"}
_SPEED = re.compile(r'"images_per_second": [^,}]+')
_SUMMARY_KEYS = ("steps", "images", "scored", "top1", "top5", "best", "checkpoint", "bad_images")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
MARK = "@@INJECTED@@"  # after a newline in a hostile name: no line of output may begin with it
_SHOWN_LINES = 12


class Outcome(StrEnum):
    """How a trial went."""

    REFUSED = "refused"  # with a code of the table
    IDENTICAL = "identical"  # to what the undisturbed command gives
    CLEAN = "clean"  # ended well, and there is nothing to compare it with
    SKIPPED = "skipped"


class Violation(Exception):
    """A trial that broke the law."""


def check_end(ended: Ended, *, killed: bool = False) -> Outcome:
    """REFUSED or CLEAN; raises Violation for any end that no command may have."""
    problem = _find_problem(ended, killed=killed)
    if problem:
        raise Violation(f"{problem}\n{describe(ended)}")
    return Outcome.REFUSED if ended.code else Outcome.CLEAN


def _find_problem(ended: Ended, *, killed: bool) -> str:
    """What no command may do, empty where it did none of it."""
    said = ended.out + "\n" + ended.err
    # a cell of a table may hold a newline, in quotes
    lines = "\n" + ("" if "--csv" in ended.words else ended.out) + "\n" + ended.err
    raw = _CONTROL.search(said)
    allowed = CODES | ({KILLED} if killed else set())
    problems = {
        "hung": ended.code is None,
        "a traceback": "Traceback" in said,
        "a process it started outlived it": ended.orphans,
        f"code {ended.code} is not in the table": ended.code not in allowed,
        f"code {ended.code} without a word": ended.code in CODES - {0} and not said.strip(),
        f"a raw {raw and raw[0]!r} on the terminal": raw is not None,
        "a name with a newline makes a line of its own": f"\n{MARK}" in lines,
    }
    return next((problem for problem, is_so in problems.items() if is_so), "")


def describe(ended: Ended) -> str:
    """The command, its code and the end of what it said."""
    said = (ended.out.splitlines()[-4:] + ended.err.splitlines())[-_SHOWN_LINES:]
    lines = [f"$ {ended.line()}", *(repr(line)[1:-1][:300] for line in said), f"code {ended.code}"]
    return "\n".join(lines)


def check_same_run(ended: Ended, undisturbed: Path, run: Path) -> Outcome:
    """REFUSED or IDENTICAL for a training; raises Violation for any other."""
    if check_end(ended) is Outcome.REFUSED:
        return Outcome.REFUSED
    difference = find_difference(undisturbed, run)
    if difference:
        raise Violation(f"ended as if nothing had happened, but {difference}\n{describe(ended)}")
    return Outcome.IDENTICAL


def check_same_answer(ended: Ended, undisturbed: str, cwd: Path) -> Outcome:
    """REFUSED or IDENTICAL for a command that prints an answer; raises Violation for any other."""
    if check_end(ended) is Outcome.REFUSED:
        return Outcome.REFUSED
    if answer(ended, cwd) != undisturbed:
        raise Violation(f"another answer without a word, not\n{undisturbed}\n{describe(ended)}")
    return Outcome.IDENTICAL


def answer(ended: Ended, cwd: Path) -> str:
    """What a command printed, whichever folder it ran in and however fast."""
    return _SPEED.sub("", ended.out.replace(str(cwd), "CWD"))


def read_summary(run: Path) -> dict:
    """The summary of a finished run."""
    return json.loads((run / "summary.json").read_text())


def find_difference(a: Path, b: Path) -> str:
    """What differs between two finished runs, empty for nothing: weights first, then records."""
    if not (b / "summary.json").exists():
        return "there is no summary.json"
    first, second = read_summary(a), read_summary(b)
    if first["weights_sha256"] != second["weights_sha256"]:
        return "the weights differ"
    for name in ("metrics.jsonl", "validation.csv", "predictions.csv"):
        if (a / name).read_bytes() != (b / name).read_bytes():
            return f"{name} differs"
    if _read_rows(a) != _read_rows(b):
        return "training.csv differs"
    keys = [key for key in _SUMMARY_KEYS if first[key] != second[key]]
    return f"summary.json differs in {', '.join(keys)}" if keys else ""


def _read_rows(run: Path) -> list[dict]:
    """training.csv without what the clock says."""
    with (run / "training.csv").open(newline="") as file:
        return [
            {name: cell for name, cell in row.items() if name not in _CLOCK_COLUMNS}
            for row in csv.DictReader(file)
        ]
