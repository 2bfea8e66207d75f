"""The curves of a run, as inline SVG whose colours come from the page's style sheet."""

import io
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phalanx.report.records import LogRow, ScoreRow

# Placeholder colours; each is replaced by a CSS variable, for light and dark pages.
TEXT_COLOR, _GRID_COLOR = "#010203", "#020304"
TRAIN_COLOR, PALE_COLOR, VALID_COLOR = "#030405", "#040506", "#050607"
_VARIABLES = {
    TEXT_COLOR: "var(--muted)",
    _GRID_COLOR: "var(--rule)",
    TRAIN_COLOR: "var(--train)",
    PALE_COLOR: "var(--train-pale)",
    VALID_COLOR: "var(--valid)",
}
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "phalanx",
    "font.size": 9,
    "text.color": TEXT_COLOR,
    "axes.edgecolor": _GRID_COLOR,
    "axes.labelcolor": TEXT_COLOR,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": _GRID_COLOR,
    "grid.linewidth": 0.6,
    "xtick.color": _GRID_COLOR,
    "xtick.labelcolor": TEXT_COLOR,
    "ytick.color": _GRID_COLOR,
    "ytick.labelcolor": TEXT_COLOR,
    "ytick.left": False,
    "legend.frameon": False,
    "lines.solid_capstyle": "round",
}
MOST_POINTS = 1_600  # as many as a screen can show
_Columns = dict[str, list[float]]
_Size = tuple[float, float]
# inches: two wide or three small ones fill a row of the page, with text of the same size
WIDE_SIZE: _Size = (5.6, 2.7)
SMALL_SIZE: _Size = (3.7, 2.1)
_DOTS = {"marker": "o", "markersize": 3.5}


def draw_svg(paint: Callable[[Any], None], *, label: str, size: _Size = WIDE_SIZE) -> str:
    """One drawing as an <svg> element; `paint` is called with its axes."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=size, layout="constrained")
        paint(figure.subplots())
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return _make_inline(file.getvalue(), label)


def _make_inline(svg: str, label: str) -> str:
    """The drawing without what only a separate file needs."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", svg)  # numbered per drawing, so not unique
    box = re.search(r'viewBox="([^"]*)"', svg)
    assert box is not None
    tag = (
        f'<svg viewBox="{box[1]}" role="img" aria-label="{escape(label)}" '
        'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
    )
    svg = tag + svg[svg.index(">") + 1 :]
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg


def put_legend_above(axes: Any) -> None:
    """Show the legend above the axes, where it can hide no point."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4)


def _draw_by_epoch(
    paint: Callable[[Any], None], steps: _Columns, *, label: str, size: _Size = WIDE_SIZE
) -> str:
    """A drawing whose horizontal axis is the epoch, of all steps; not from 0 on for a late fork."""
    first, last = steps["epoch"][0], steps["epoch"][-1]
    left = first if last / 2 < first < last else 0.0

    def paint_axes(axes: Any) -> None:
        paint(axes)
        axes.set_xlim(left, last + (last - left) * 0.01)
        axes.set_xlabel("epoch")

    return draw_svg(paint_axes, label=f"{label} by epoch", size=size)


def _plot_curve(axes: Any, curve: tuple[NDArray[Any], NDArray[Any]], **style: Any) -> None:
    """Draw a curve; a single point, of which there is no line, as a dot."""
    dots = _DOTS if np.isfinite(curve[1]).sum() == 1 else {}
    axes.plot(*curve, **{"color": TRAIN_COLOR, "lw": 1.6, **dots, **style})


def downsample_curve(x: ArrayLike, y: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]:
    """The curve with fewer points: of each interval the lowest and the highest."""
    xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    ys = np.where(np.isfinite(ys), ys, np.nan)
    stretch = len(xs) // (MOST_POINTS // 2)
    if stretch < 4:
        return xs, ys
    whole = len(xs) // stretch * stretch
    parts = ys[:whole].reshape(-1, stretch)
    bounds = np.stack([np.fmin.reduce(parts, axis=1), np.fmax.reduce(parts, axis=1)], axis=1)
    return np.repeat(xs[:whole:stretch], 2), bounds.reshape(-1)


def plot_loss(steps: _Columns, logs: Sequence[LogRow], *, scores: Sequence[ScoreRow]) -> str:
    """Loss of every step, its mean at each log point, and the validation loss."""

    def paint(axes: Any) -> None:
        curve = downsample_curve(steps["epoch"], steps["loss"])
        color = PALE_COLOR if logs or scores else TRAIN_COLOR  # pale only behind another curve
        _plot_curve(axes, curve, color=color, lw=0.8, label="each step")
        if logs:
            _plot_curve(axes, _make_curve(logs, "loss"), label="training")
        if scores:
            curve = _make_curve(scores, "loss")
            _plot_curve(axes, curve, color=VALID_COLOR, label="validation", **_DOTS)
        axes.set_ylim(*_loss_limits(steps, scores))
        put_legend_above(axes)

    return _draw_by_epoch(paint, steps, label="loss")


def _loss_limits(steps: _Columns, scores: Sequence[ScoreRow]) -> tuple[float, float]:
    """The limits of the axis: without the rarest spikes, which would flatten the rest."""
    losses = [*steps["loss"], *(row.loss for row in scores)]
    finite = np.array([loss for loss in losses if np.isfinite(loss)] or [1.0])
    low, high = float(finite.min()), float(np.percentile(finite, 99.5))
    room = max(high - low, 1e-6) * 0.06
    return low - room, high + room


def plot_top1(steps: _Columns, logs: Sequence[LogRow], *, scores: Sequence[ScoreRow]) -> str:
    """Top-1 in training and in validation, the latter with its 95 % interval."""

    def paint(axes: Any) -> None:
        if any(row.top1 is not None for row in logs):
            _plot_curve(axes, _make_curve(logs, "top1", scale=100), label="training")
        if scores:
            epochs = [row.epoch for row in scores]
            low, high = (np.array([row.interval95[k] for row in scores]) * 100 for k in (0, 1))
            axes.fill_between(epochs, low, high, color=VALID_COLOR, alpha=0.2, lw=0)
            if len(scores) == 1:  # an area without a width
                axes.vlines(epochs, low, high, color=VALID_COLOR, alpha=0.4, lw=4)
            curve = _make_curve(scores, "top1", scale=100)
            label = "validation, 95% interval"
            _plot_curve(axes, curve, color=VALID_COLOR, label=label, **_DOTS)
        axes.yaxis.set_major_formatter("{x:g}%")
        put_legend_above(axes)

    return _draw_by_epoch(paint, steps, label="top-1")


def plot_learning_rate(steps: _Columns) -> str:
    """Learning rate of every step."""

    def paint(axes: Any) -> None:
        _plot_curve(axes, downsample_curve(steps["epoch"], steps["lr"]))
        axes.set_ylim(bottom=0)

    return _draw_by_epoch(paint, steps, label="learning rate", size=SMALL_SIZE)


def plot_throughput(steps: _Columns, logs: Sequence[LogRow]) -> str:
    """Images per second at each log point."""

    def paint(axes: Any) -> None:
        x, y = _make_curve(logs, "images_per_second")
        _plot_curve(axes, (x, y))
        axes.set_ylim(0, max(y[np.isfinite(y)], default=1.0) * 1.15)
        axes.yaxis.set_major_formatter("{x:,.0f}")

    return _draw_by_epoch(paint, steps, label="images per second", size=SMALL_SIZE)


def plot_data_wait(steps: _Columns, logs: Sequence[LogRow]) -> str:
    """Share of the time spent waiting for data at each log point."""

    def paint(axes: Any) -> None:
        x, y = _make_curve(logs, "data_wait", scale=100)
        axes.fill_between(x, 0, y, color=TRAIN_COLOR, alpha=0.2, lw=0)
        _plot_curve(axes, (x, y))
        highest = max(y[np.isfinite(y)], default=0.0)
        axes.set_ylim(0, max(10.0, min(100.0, highest * 1.1)))
        axes.yaxis.set_major_formatter("{x:g}%")

    return _draw_by_epoch(paint, steps, label="share of time waiting for data", size=SMALL_SIZE)


def _make_curve(
    rows: Sequence[LogRow | ScoreRow], name: str, *, scale: float = 1
) -> tuple[NDArray[Any], NDArray[Any]]:
    """One column of the rows by epoch; missing values leave a gap."""
    values = [getattr(row, name) for row in rows]
    numbers = [np.nan if value is None else value * scale for value in values]
    return downsample_curve([row.epoch for row in rows], numbers)
