"""Draws a step over time, which stage runs which pass when, as text or as a PNG."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any

from phalanx.disk import write_atomically
from phalanx.plan.pipeline import TimedPass, measure_bubble

_FILL = {"forward": "░", "backward": "▓"}
_COLOURS = {"forward": "#56b4e9", "backward": "#e69f00"}  # safe for colour-blind readers
_IDLE, _INK = "#eeeeee", "#333333"
_FEWEST_COLUMNS = 16  # of a drawing, however narrow the terminal is
_MOST_COLUMNS = 4  # per unit of time
_CUT_COLUMNS = 2  # the same if the whole step does not fit
_SHORTEST = 0.5  # units of time; shorter passes may have no column
_CUT_TIME = 70.0  # units of time of a long step that a PNG shows
_MOST_ROWS = 16  # of a PNG; if there are more, only one pipeline is drawn
_DOTS_PER_INCH = 110
_DIGITS = 150  # that fit into the width of a PNG


@dataclass(frozen=True, kw_only=True)
class StepPicture:
    """The contents of a drawing: the passes of one pipeline; all pipelines run the same.

    The unit of time is the forward pass of a stage of average cost.
    """

    passes: Sequence[TimedPass]
    group: int  # micro-batches that go forward before the first one goes back
    rows: tuple[str, ...]  # the name of each stage
    notes: tuple[str, ...]  # a note for each stage
    title: str
    footer: str = ""  # what ranks exchange
    pipelines: int = 1  # that run the same at the same time

    @cached_property
    def bubble(self) -> float:
        """The share of the stages' time in which they wait for each other."""
        return measure_bubble(self.passes)

    @cached_property
    def end(self) -> float:
        """When the last pass ends."""
        return max(one.end for one in self.passes)

    @cached_property
    def micro_batches(self) -> int:
        """The number of micro-batches."""
        return 1 + max(one.what.number for one in self.passes)

    def find_group_end(self) -> float:
        """When the first group is done."""
        return max(one.end for one in self.passes if one.what.number < self.group)

    def describe_shown(self, until: float) -> str:
        """Which part of the step is finished by then, in words; empty if all of it is."""
        late = [one.what.number for one in self.passes if one.end > until]
        if not late:
            return ""
        first = f"the first {min(late)}" if min(late) else "the beginning"
        return f"{first} of {self.micro_batches:,} micro-batches"


# --- text ---


def draw_text(picture: StepPicture, width: int) -> list[str]:
    """The picture as lines of at most `width` characters, with a legend."""
    labels = max(map(len, picture.rows)) + 2
    room = max(width - labels, _FEWEST_COLUMNS)
    scale = min(room / picture.end, _MOST_COLUMNS)
    shortest = min(one.end - one.start for one in picture.passes)
    least = 1 / max(shortest, _SHORTEST)  # a column for every pass
    is_cut = scale < least
    if is_cut:
        room -= 2  # for the dots
        scale = max(least, min(_CUT_COLUMNS, room / picture.find_group_end()))
    lines = []
    for stage, label in enumerate(picture.rows):
        cells = [" "] * min(room, ceil(picture.end * scale))
        for one in picture.passes:
            if one.stage == stage:
                _fill(cells, one, scale)
        line = "".join(cells)
        lines.append(
            f"{label:<{labels}}{line} …" if is_cut else f"{label:<{labels}}{line}".rstrip()
        )
    return [*lines, *_describe(picture, picture.describe_shown(room / scale) if is_cut else "")]


def _fill(cells: list[str], one: TimedPass, scale: float) -> None:
    """Draw a pass: the last digit of its micro-batch's number, then the fill of its kind."""
    first, end = round(one.start * scale), min(round(one.end * scale), len(cells))
    for place in range(first, end):
        cells[place] = _FILL[one.what.kind]
    if first < end:
        cells[first] = str(one.what.number % 10)


def _describe(picture: StepPicture, shown: str) -> list[str]:
    """The legend; shown: which part is drawn, if not all of the step."""
    digit = "the last digit of its number" if picture.micro_batches > 10 else "its number"
    lines = [f"0░ forward and 0▓▓ backward pass of a micro-batch, with {digit}"]
    if shown:
        lines.append(f"… {shown}")
    if len(picture.rows) > 1:
        lines.append(f"bubble: a stage waits {picture.bubble:.1%} of the time for the others")
    if picture.pipelines > 1:
        what = "pipelines do" if len(picture.rows) > 1 else "devices do"
        lines.append(f"{picture.pipelines} {what} the same at the same time")
    return lines


# --- PNG ---


def write_png(picture: StepPicture, path: Path) -> None:
    """Write the picture as a PNG file."""
    import matplotlib
    from matplotlib.figure import Figure

    copies = picture.pipelines if picture.pipelines * len(picture.rows) <= _MOST_ROWS else 1
    rows = copies * len(picture.rows)
    end = min(picture.end, max(_CUT_TIME, picture.find_group_end()))
    with matplotlib.rc_context({"font.size": 9, "text.color": _INK, "axes.labelcolor": _INK}):
        figure = Figure(figsize=(11, 1.5 + 0.34 * rows), layout="constrained")
        axes = figure.subplots()
        for copy in range(copies):
            _paint_pipeline(axes, picture, copy * len(picture.rows), end)
            if copy:
                axes.axhline(copy * len(picture.rows) - 0.5, color=_INK, lw=0.8)
        _label_axes(axes, picture, copies, end)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
    write_atomically(path, file.getvalue())


def _paint_pipeline(axes: Any, picture: StepPicture, first_row: int, end: float) -> None:
    """Draw the passes of one pipeline, from a row on."""
    for stage in range(len(picture.rows)):
        axes.barh(first_row + stage, end, height=0.86, color=_IDLE)
    for kind, colour in _COLOURS.items():
        shown = [one for one in picture.passes if one.what.kind == kind and one.start < end]
        axes.barh(
            [first_row + one.stage for one in shown],
            [min(one.end, end) - one.start for one in shown],
            left=[one.start for one in shown],
            height=0.86,
            color=colour,
            edgecolor="white",
            linewidth=0.6,
            label=f"{kind} pass" if first_row == 0 else None,
        )
    for one in picture.passes:
        number, took = str(one.what.number), one.end - one.start
        if one.end <= end and took >= end * len(number) / _DIGITS:
            middle, row = one.start + took / 2, first_row + one.stage
            axes.text(middle, row, number, ha="center", va="center", fontsize=7)


def _label_axes(axes: Any, picture: StepPicture, copies: int, end: float) -> None:
    """Label rows, times and title."""
    names = [
        f"pipeline {copy}, {row}" if copies > 1 else row
        for copy in range(copies)
        for row in picture.rows
    ]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, end)
    notes = axes.secondary_yaxis("right")
    notes.set_yticks(range(len(names)), picture.notes * copies)
    for side in (axes, notes):
        side.tick_params(length=0)
        side.spines[:].set_visible(False)
    shown = picture.describe_shown(end)
    time = f"time, in forward passes of an average stage{f'; {shown}' if shown else ''}"
    lines = [time, picture.footer]
    axes.set_xlabel("\n".join(filter(None, lines)))
    bubble = f"; bubble {picture.bubble:.1%}" if len(picture.rows) > 1 else ""
    many = f"; one of {picture.pipelines} pipelines" if picture.pipelines > copies else ""
    axes.set_title(f"{picture.title}{many}{bubble}", fontsize=10, loc="left")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
