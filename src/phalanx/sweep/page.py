"""sweep.html: one self-contained page about a sweep, made from its state."""

from collections import Counter
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import numpy as np

from phalanx.report.folder import is_run_folder
from phalanx.report.html import render_html
from phalanx.report.plots import (
    PALE_COLOR,
    SMALL_SIZE,
    TEXT_COLOR,
    TRAIN_COLOR,
    VALID_COLOR,
    WIDE_SIZE,
    draw_svg,
    put_legend_above,
)
from phalanx.sweep.schema import Choice
from phalanx.sweep.state import SweepState, Trial
from phalanx.sweep.table import (
    GOAL_TITLES,
    column_names,
    describe_values,
    format_interval,
    format_score,
    format_trial,
    shorten,
)
from phalanx.units import format_plural, format_seconds

_MARKS: dict[str, dict[str, Any]] = {
    "done": {"color": TRAIN_COLOR},
    "pruned": {"facecolors": "none", "edgecolors": TRAIN_COLOR, "linewidths": 1.1},
    "failed": {"color": TEXT_COLOR, "marker": "x", "linewidths": 1.1},
}
_SPREAD = 0.15  # of the distance between two choices
_LABEL_LETTERS = 14  # of a choice's label on an axis


def render_page(state: SweepState) -> str:
    """The whole page as HTML."""
    sweep, title = state.sweep, GOAL_TITLES[state.sweep.goal]
    scores: list[tuple[str, str]] = []
    options: list[tuple[str, str]] = []
    if any(trial.points for trial in state.trials):
        scores = [
            (f"{title} by trial", plot_trials(state)),
            (f"{title} by epoch", _plot_curves(state)),
        ]
        options = [(f"{title} by {name}", plot_option(state, name)) for name in sweep.search]
    return render_html(
        "sweep.html",
        name=sweep.name,
        state="finished" if state.is_finished else "unfinished",
        all_well=state.is_finished,
        folder=state.folder,
        sweep=sweep,
        title=title,
        best=state.best and _describe_best(state, state.best),
        trials_done=len(state.finished_trials),
        outcomes=Counter(trial.state for trial in state.trials),
        time=format_seconds(sum(trial.seconds for trial in state.trials)),
        scores=scores,
        options=options,
        heads=column_names(sweep),
        trials=[
            {
                "cells": format_trial(state, trial),
                "link": _find_link(state, trial),
                "reason": trial.reason,
            }
            for trial in state.sort_trials()
        ],
    )


def _describe_best(state: SweepState, best: Trial) -> dict[str, str]:
    """The best trial in words."""
    interval, epochs = format_interval(best), format_plural(best.epochs, "epoch")
    return {
        "number": str(best.number),
        "score": format_score(best.score, state.sweep.goal),
        "detail": f"95% interval\n{interval}" if interval else f"after {epochs}",
        "options": describe_values(best, "\n"),
        "command": state.command(best),
    }


def _find_link(state: SweepState, trial: Trial) -> str:
    """A link to a trial: its report, else its output; empty before it starts."""
    run = state.folder / trial.name
    if (run / "report.html").is_file():
        return f"{trial.name}/report.html"
    return f"{trial.name}.log" if is_run_folder(run) else ""


def plot_trials(state: SweepState) -> str:
    """Scores over trials, with the best so far."""

    def paint(axes: Any) -> None:
        numbers, heights = find_best_so_far(state)
        if numbers:
            axes.step(
                numbers, heights, where="post", color=VALID_COLOR, lw=1.6, label="best so far"
            )
        _scatter(axes, state, lambda trial: trial.number)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("trial")
        put_legend_above(axes)

    return draw_svg(paint, label=f"{GOAL_TITLES[state.sweep.goal]} by trial", size=WIDE_SIZE)


def _scatter(axes: Any, state: SweepState, find_x: Callable[[Trial], float]) -> None:
    """Draw trials by score: finished filled, pruned hollow, failed as crosses at the bad end."""
    worst_end = 0.03 if state.sweep.wants_highest else 0.97  # a share of the axis
    for outcome, mark in _MARKS.items():
        trials = [trial for trial in state.trials if trial.state == outcome]
        style = {"s": 24, "label": outcome, "zorder": 3, **mark}
        if outcome == "failed":
            heights = [worst_end] * len(trials)
            style["transform"] = axes.get_xaxis_transform()
        else:
            trials = [trial for trial in trials if _has_finite_score(trial)]
            heights = [_scale_score(state, trial.score) for trial in trials]
        if trials:
            axes.scatter([find_x(trial) for trial in trials], heights, **style)
    if state.sweep.goal != "loss":
        axes.yaxis.set_major_formatter("{x:g}%")


def _has_finite_score(trial: Trial) -> bool:
    """Whether a trial has a score that can be drawn."""
    return trial.score is not None and isfinite(trial.score)


def _scale_score(state: SweepState, score: float | None) -> float:
    """A score in the unit of the axis."""
    assert score is not None
    return score if state.sweep.goal == "loss" else 100 * score


def find_best_so_far(state: SweepState) -> tuple[list[int], list[float]]:
    """The best score after each trial, from the first that has one."""
    numbers: list[int] = []
    heights: list[float] = []
    choose = max if state.sweep.wants_highest else min
    for trial in state.trials:
        known = heights[-1:]
        if trial.state == "done" and _has_finite_score(trial):
            known.append(_scale_score(state, trial.score))
        if known:
            numbers.append(trial.number)
            heights.append(choose(known))
    return numbers, heights


def _plot_curves(state: SweepState) -> str:
    """Every trial's validations over its epochs; the best trial is highlighted."""
    best = state.best

    def paint_trial(axes: Any, trial: Trial, **style: Any) -> None:
        points = [point for point in trial.points if isfinite(point.score)]
        heights = [_scale_score(state, point.score) for point in points]
        axes.plot([p.epoch for p in points], heights, marker="o", markersize=3, **style)

    def paint(axes: Any) -> None:
        for trial in state.trials:
            if trial != best:
                paint_trial(axes, trial, color=PALE_COLOR, lw=1.0)
        if best is not None:
            paint_trial(axes, best, color=VALID_COLOR, lw=1.6, label=f"trial {best.number}, best")
            put_legend_above(axes)
        if state.sweep.goal != "loss":
            axes.yaxis.set_major_formatter("{x:g}%")
        axes.set_xlim(left=0)
        axes.set_xlabel("epoch")

    return draw_svg(paint, label=f"{GOAL_TITLES[state.sweep.goal]} by epoch", size=WIDE_SIZE)


def plot_option(state: SweepState, name: str) -> str:
    """Scores over the values of one option."""
    dimension = state.sweep.search[name]

    def paint(axes: Any) -> None:
        if isinstance(dimension, Choice):
            _paint_choices(axes, state, name, dimension)
            return
        if dimension.log:
            _use_log_axis(axes)
        _scatter(axes, state, lambda trial: float(trial.values[name]))
        axes.update_datalim([(end, 0) for end in dimension.ends], updatey=False)
        axes.autoscale_view()  # the whole search range is in view

    return draw_svg(paint, label=f"{GOAL_TITLES[state.sweep.goal]} by {name}", size=SMALL_SIZE)


def _use_log_axis(axes: Any) -> None:
    """Make the horizontal axis logarithmic, with few, plain tick labels."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _paint_choices(axes: Any, state: SweepState, name: str, choice: Choice) -> None:
    """Draw scores over choices, side by side in file order."""
    offsets = _spread_trials(state.trials, name)
    columns = {text: column for column, text in enumerate(choice.values)}
    _scatter(axes, state, lambda t: columns[str(t.values[name])] + offsets[t.number])
    axes.set_xticks(range(len(columns)), [shorten(text, _LABEL_LETTERS) for text in columns])
    axes.set_xlim(-0.5, len(columns) - 0.5)


def _spread_trials(trials: Sequence[Trial], name: str) -> dict[int, float]:
    """A horizontal jitter for each trial, so that equal choices do not hide each other."""
    offsets: dict[int, float] = {}
    for value in {trial.values[name] for trial in trials}:
        same = [trial.number for trial in trials if trial.values[name] == value]
        shares = np.linspace(-_SPREAD, _SPREAD, num=len(same)) if len(same) > 1 else [0.0]
        offsets |= {number: float(share) for number, share in zip(same, shares, strict=True)}
    return offsets
