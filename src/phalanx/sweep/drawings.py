"""The drawings of sweep.html, as inline SVG in the colours of the page."""

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import numpy as np

from phalanx.report.plots import INK, PALE, SMALL, TRAIN, VALID, WIDE, draw_svg
from phalanx.sweep.journal import SweepState, Trial
from phalanx.sweep.space import Choice
from phalanx.sweep.table import TITLES, shorten

_HOLLOW = {"facecolors": "none", "edgecolors": TRAIN, "linewidths": 1.1}
_FULL = {"color": TRAIN}
_CROSS = {"color": INK, "marker": "x", "linewidths": 1.1}
_SPREAD = 0.15  # of the room between two choices
_LABEL_LETTERS = 14  # of a choice on an axis


def _shown_score(journal: SweepState, score: float) -> float:
    """A score in the unit of the axis."""
    return score if journal.sweep.goal == "loss" else 100 * score


def _scored(journal: SweepState, state: str) -> list[Trial]:
    """The trials of a state that have a score one can draw."""
    return [t for t in journal.trials if t.state == state and isfinite(t.score or float("nan"))]


def _scatter(axes: Any, journal: SweepState, places: Callable[[Trial], float]) -> None:
    """The trials by their scores: done are full, pruned hollow, failed crosses at the bad end."""
    for state, look in (("done", _FULL), ("pruned", _HOLLOW)):
        trials = _scored(journal, state)
        heights = [_shown_score(journal, trial.score or 0.0) for trial in trials]
        if trials:
            axes.scatter([places(t) for t in trials], heights, s=24, label=state, zorder=3, **look)
    failed = [trial for trial in journal.trials if trial.state == "failed"]
    if failed:
        height = 0.03 if journal.sweep.wants_highest else 0.97  # a share of the axis
        axes.scatter(
            [places(trial) for trial in failed],
            [height] * len(failed),
            s=24,
            label="failed",
            transform=axes.get_xaxis_transform(),
            zorder=3,
            **_CROSS,
        )
    if journal.sweep.goal != "loss":
        axes.yaxis.set_major_formatter("{x:g}%")


def draw_course(journal: SweepState) -> str:
    """Scores over trials, with the best so far."""

    def paint(axes: Any) -> None:
        numbers, heights = best_so_far(journal)
        if numbers:
            axes.step(numbers, heights, where="post", color=VALID, lw=1.6, label="best so far")
        _scatter(axes, journal, lambda trial: trial.number)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("trial")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4)  # above, where no point is

    return draw_svg(paint, label=f"{TITLES[journal.sweep.goal]} by trial", size=WIDE)


def best_so_far(journal: SweepState) -> tuple[list[int], list[float]]:
    """The best score after each trial, from the first that has one."""
    numbers: list[int] = []
    heights: list[float] = []
    choose = max if journal.sweep.wants_highest else min
    for trial in journal.trials:
        own = [_shown_score(journal, trial.score)] if trial in _scored(journal, "done") else []  # type: ignore[arg-type]
        known = [*heights[-1:], *own]
        if known:
            numbers.append(trial.number)
            heights.append(choose(known))
    return numbers, heights


def draw_curves(journal: SweepState) -> str:
    """Every trial's validations over its epochs; the best trial's stand out."""
    best = journal.best

    def paint(axes: Any) -> None:
        for trial in journal.trials:
            if best is None or trial.number != best.number:
                _plot_curve(axes, journal, trial, color=PALE, lw=1.0)
        if best is not None:
            _plot_curve(
                axes, journal, best, color=VALID, lw=1.6, label=f"trial {best.number}, best"
            )
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1))
        if journal.sweep.goal != "loss":
            axes.yaxis.set_major_formatter("{x:g}%")
        axes.set_xlim(left=0)
        axes.set_xlabel("epoch")

    return draw_svg(paint, label=f"{TITLES[journal.sweep.goal]} by epoch", size=WIDE)


def _plot_curve(axes: Any, journal: SweepState, trial: Trial, **look: Any) -> None:
    """One trial's validations."""
    points = [point for point in trial.points if isfinite(point.score)]
    heights = [_shown_score(journal, point.score) for point in points]
    axes.plot([p.epoch for p in points], heights, marker="o", markersize=3, **look)


def draw_option(journal: SweepState, name: str) -> str:
    """Scores over the values of one option."""
    dimension = journal.sweep.search[name]

    def paint(axes: Any) -> None:
        if isinstance(dimension, Choice):
            _paint_choices(axes, journal, name, dimension)
            return
        low, high = dimension.low, dimension.high
        if dimension.log:
            _by_factors(axes)
        _scatter(axes, journal, lambda trial: float(trial.values[name]))
        axes.update_datalim([(low, 0), (high, 0)], updatey=False)  # all that is searched
        axes.autoscale_view()

    return draw_svg(paint, label=f"{TITLES[journal.sweep.goal]} by {name}", size=SMALL)


def _by_factors(axes: Any) -> None:
    """An axis whose equal lengths are equal factors, with few and plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _paint_choices(axes: Any, journal: SweepState, name: str, choice: Choice) -> None:
    """Scores over choices, which stand side by side in the order of the file."""
    spread = _spread_out(journal.trials, name)
    places = {text: place for place, text in enumerate(choice.values)}
    _scatter(axes, journal, lambda t: places[str(t.values[name])] + spread[t.number])
    axes.set_xticks(range(len(places)), [shorten(text, _LABEL_LETTERS) for text in places])
    axes.set_xlim(-0.5, len(places) - 0.5)


def _spread_out(trials: Sequence[Trial], name: str) -> dict[int, float]:
    """A little to the side for each trial, so that equal choices do not hide each other."""
    found: dict[int, float] = {}
    for value in {trial.values[name] for trial in trials}:
        same = [trial.number for trial in trials if trial.values[name] == value]
        shares = np.linspace(-_SPREAD, _SPREAD, num=len(same)) if len(same) > 1 else [0.0]
        found |= {number: float(share) for number, share in zip(same, shares, strict=True)}
    return found
