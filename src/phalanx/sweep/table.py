"""The trials of a sweep in words: a line while it runs, a table when it is over."""

import math
from collections.abc import Sequence

from phalanx.sweep.file import SweepFile
from phalanx.sweep.journal import SweepState, Trial
from phalanx.sweep.space import as_text, count_points
from phalanx.units import format_seconds

TITLES = {"top1": "top-1", "top5": "top-5", "loss": "loss"}
_LONGEST = 60  # letters of a reason in a table; sweep.json has all of it


def format_score(score: float | None, goal: str) -> str:
    """A score as a person reads it."""
    if score is None:
        return "-"
    return f"{score:.4f}" if goal == "loss" or not math.isfinite(score) else f"{score:.2%}"


def format_interval(trial: Trial) -> str:
    """The 95 % interval of a score that has one."""
    interval = trial.points[-1].interval95 if trial.points else None
    return "" if interval is None else f"{interval[0]:.2%} to {interval[1]:.2%}"


def describe_values(trial: Trial, between: str = "  ") -> str:
    """What a trial was given."""
    return between.join(f"{name} {as_text(value)}" for name, value in trial.values.items())


def describe_progress(journal: SweepState, trial: Trial) -> str:
    """How far a trial is."""
    score = format_score(trial.score, journal.sweep.goal)
    return f"{_place(journal, trial)}  epoch {trial.epochs:g}  {TITLES[journal.sweep.goal]} {score}"


def _place(journal: SweepState, trial: Trial) -> str:
    """Which trial of how many."""
    total = journal.sweep.trials
    width = len(str(total))
    return f"[{trial.number + 1:>{width}}/{total}] trial {trial.number:>{width}}"


def describe_trial(journal: SweepState, trial: Trial) -> str:
    """What became of a trial, on a line."""
    best = journal.best
    title = TITLES[journal.sweep.goal]
    parts = [
        f"{_place(journal, trial)}  {trial.state:<7}",
        f"{title} {format_score(trial.score, journal.sweep.goal):>7}",
        describe_values(trial),
        f"epochs {trial.epochs:g}",
        format_seconds(trial.seconds),
    ]
    parts += ["best so far"] if best is not None and best.number == trial.number else []
    return "  ".join(parts + ([shorten(trial.reason)] if trial.reason else []))


def shorten(text: str, most: int = _LONGEST) -> str:
    """As much of a text as there is room for."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def heads(sweep: SweepFile) -> list[str]:
    """The names of the table's columns."""
    interval = ["95% interval"] if sweep.goal == "top1" else []
    return ["trial", "state", TITLES[sweep.goal], *interval, *sweep.search, "epochs", "time"]


def cells(journal: SweepState, trial: Trial) -> list[str]:
    """A trial as a row of the table."""
    goal = journal.sweep.goal
    interval = [format_interval(trial)] if goal == "top1" else []
    values = [as_text(trial.values[name]) for name in journal.sweep.search]
    end = [f"{trial.epochs:g}", format_seconds(trial.seconds)]
    return [
        str(trial.number),
        trial.state,
        format_score(trial.score, goal),
        *interval,
        *values,
        *end,
    ]


def draw_table(journal: SweepState) -> list[str]:
    """The trials as lines whose columns line up, best first."""
    trials = journal.ordered()
    rows = [heads(journal.sweep), *(cells(journal, trial) for trial in trials)]
    reasons = ["", *(shorten(trial.reason) for trial in trials)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        f"{_line_up(row, widths)}  {reason}".rstrip()
        for row, reason in zip(rows, reasons, strict=True)
    ]


def _line_up(row: Sequence[str], widths: Sequence[int]) -> str:
    """Cells on a line; words begin together and numbers end together."""
    return "  ".join(
        f"{cell:<{width}}" if column == 1 else f"{cell:>{width}}"
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    )


def draw_space(sweep: SweepFile) -> list[str]:
    """What a sweep is about to do."""
    points = count_points(sweep.search)
    fixed = "  ".join(f"{name} {text}" for name, text in sweep.options.items())
    rows = [
        ("preset", sweep.preset or "searched" * ("preset" in sweep.search) or "of the data"),
        ("options", fixed or "the preset's own"),
        *((f"  {name}", _describe_dimension(sweep, name)) for name in sweep.search),
        ("method", f"{sweep.method}, seed {sweep.seed}"),
        ("trials", f"{sweep.trials}" + (f" of {points:,} points" if points else "")),
        ("goal", f"{'highest' if sweep.wants_highest else 'lowest'} {TITLES[sweep.goal]}"),
        ("prune", sweep.prune),
    ]
    return [f"{name:<24}{text}" for name, text in rows]


def _describe_dimension(sweep: SweepFile, name: str) -> str:
    """What one option is searched through."""
    facts = sweep.search[name].facts()
    if isinstance(facts, list):
        return ", ".join(facts)
    parts = [f"{as_text(facts['low'])} to {as_text(facts['high'])}"]
    parts += [f"step {as_text(facts['step'])}"] if "step" in facts else []
    return "  ".join([*parts, *(["by factors"] if facts.get("log") else [])])
