"""The trials of a sweep as text: a line while it runs, a table when it is over."""

import math

from phalanx.sweep.schema import Choice, Dimension, SweepFile, count_points, format_flag
from phalanx.sweep.state import SweepState, Trial
from phalanx.units import align_columns, format_seconds

GOAL_TITLES = {"top1": "top-1", "top5": "top-5", "loss": "loss"}
_LONGEST = 60  # letters of a reason in a table; sweep.json has all of it


def format_score(score: float | None, goal: str) -> str:
    """A score, formatted for reading."""
    if score is None:
        return "-"
    return f"{score:.4f}" if goal == "loss" or not math.isfinite(score) else f"{score:.2%}"


def format_interval(trial: Trial) -> str:
    """The 95 % interval of a score, if it has one."""
    interval = trial.points[-1].interval95 if trial.points else None
    return "" if interval is None else f"{interval[0]:.2%} to {interval[1]:.2%}"


def describe_values(trial: Trial, separator: str = "  ") -> str:
    """The values of a trial."""
    return separator.join(f"{name} {format_flag(value)}" for name, value in trial.values.items())


def describe_progress(state: SweepState, trial: Trial) -> str:
    """The progress of a trial."""
    goal = state.sweep.goal
    score = f"{GOAL_TITLES[goal]} {format_score(trial.score, goal)}"
    return f"{_describe_number(state, trial)}  epoch {trial.epochs:g}  {score}"


def _describe_number(state: SweepState, trial: Trial) -> str:
    """Which trial of how many."""
    total = state.sweep.trials
    width = len(str(total))
    return f"[{trial.number + 1:>{width}}/{total}] trial {trial.number:>{width}}"


def describe_trial(state: SweepState, trial: Trial) -> str:
    """The result of a trial, in a line."""
    best = state.best
    title = GOAL_TITLES[state.sweep.goal]
    parts = [
        f"{_describe_number(state, trial)}  {trial.state:<7}",
        f"{title} {format_score(trial.score, state.sweep.goal):>7}",
        describe_values(trial),
        f"epochs {trial.epochs:g}",
        format_seconds(trial.seconds),
    ]
    parts += ["best so far"] if best is not None and best.number == trial.number else []
    return "  ".join(parts + ([shorten(trial.reason)] if trial.reason else []))


def shorten(text: str, most: int = _LONGEST) -> str:
    """A text, truncated if it is too long."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def column_names(sweep: SweepFile) -> list[str]:
    """The names of the table's columns."""
    interval = ["95% interval"] if sweep.goal == "top1" else []
    return ["trial", "state", GOAL_TITLES[sweep.goal], *interval, *sweep.search, "epochs", "time"]


def format_trial(state: SweepState, trial: Trial) -> list[str]:
    """A trial as a row of the table."""
    goal = state.sweep.goal
    return [
        str(trial.number),
        trial.state,
        format_score(trial.score, goal),
        *([format_interval(trial)] if goal == "top1" else []),
        *(format_flag(trial.values[name]) for name in state.sweep.search),
        f"{trial.epochs:g}",
        format_seconds(trial.seconds),
    ]


def format_table(state: SweepState) -> list[str]:
    """The trials as lines with aligned columns, best first."""
    trials = state.sort_trials()
    head = [*column_names(state.sweep), ""]
    rows = [[*format_trial(state, trial), shorten(trial.reason)] for trial in trials]
    return align_columns([head, *rows], left=[1, len(head) - 1])  # state and reason are words


def describe_sweep(sweep: SweepFile) -> list[str]:
    """What a sweep is about to do."""
    points = count_points(sweep.search)
    fixed = "  ".join(f"{name} {text}" for name, text in sweep.options.items())
    rows = [
        ("preset", sweep.preset or "searched" * ("preset" in sweep.search) or "of the data"),
        ("options", fixed or "the preset's own"),
        *((f"  {name}", _describe_dimension(one)) for name, one in sweep.search.items()),
        ("method", f"{sweep.method}, seed {sweep.seed}"),
        ("trials", f"{sweep.trials}" + (f" of {points:,} points" if points else "")),
        ("goal", f"{'highest' if sweep.wants_highest else 'lowest'} {GOAL_TITLES[sweep.goal]}"),
        ("prune", sweep.prune),
    ]
    return [f"{name:<24}{text}" for name, text in rows]


def _describe_dimension(dimension: Dimension) -> str:
    """The range or choices of one option."""
    if isinstance(dimension, Choice):
        return ", ".join(dimension.values)
    parts = [f"{format_flag(dimension.low)} to {format_flag(dimension.last)}"]
    parts += [] if dimension.step is None else [f"step {format_flag(dimension.step)}"]
    return "  ".join([*parts, *(["log scale"] if dimension.log else [])])
