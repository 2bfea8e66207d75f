"""What the curves of a report show, by matplotlib's axes."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from phalanx.report import plots
from phalanx.report.records import Records, read_logs, read_scores, read_steps
from synthetic_run import STEPS_PER_EPOCH, log_row, score_row, step_row


@pytest.fixture
def axes_of_plots(monkeypatch):
    """Plots return their axes, not a drawing."""

    def paint_axes(paint, **_):
        axes = Figure().subplots()
        paint(axes)
        return axes

    monkeypatch.setattr(plots, "draw_svg", paint_axes)


def list_plots(folder):
    steps, logs, scores = read_steps(folder), read_logs(folder), read_scores(folder)
    return [
        plots.plot_loss(steps, logs, scores=scores),
        plots.plot_top1(steps, logs, scores=scores),
        plots.plot_learning_rate(steps),
        plots.plot_throughput(steps, logs),
        plots.plot_data_wait(steps, logs),
    ]


def test_a_single_log_point_and_score_are_dots_and_not_empty_axes(tmp_path, axes_of_plots):
    records = Records(tmp_path)
    records.add_steps(step_row(step) for step in range(1, 26))
    records.add_log(log_row(25))
    records.add_score(score_row(25))
    for axes in list_plots(tmp_path):
        assert axes.lines
        for line in axes.lines:
            assert np.isfinite(line.get_ydata()).sum() > 1 or line.get_marker() == "o"
    interval = list_plots(tmp_path)[1].collections[-1].get_segments()[0]
    assert interval[:, 1] / 100 == pytest.approx(score_row(25).interval95)


@pytest.mark.parametrize(("first", "left"), [(1, 0), (300, 0), (400, 400 / STEPS_PER_EPOCH)])
def test_all_curves_begin_where_a_late_fork_begins(tmp_path, axes_of_plots, first, left):
    records = Records(tmp_path)
    records.add_steps(step_row(step) for step in range(first, 626))
    records.add_log(log_row(525))
    limits = {axes.get_xlim() for axes in list_plots(tmp_path)}
    assert len(limits) == 1
    assert limits.pop()[0] == pytest.approx(left)


def test_the_steps_of_a_run_without_log_points_are_not_pale(axes_of_plots):
    columns = {"epoch": [0.1, 0.2], "loss": [2.0, 1.0]}
    for logs, color in (([], plots.TRAIN_COLOR), ([log_row(25)], plots.PALE_COLOR)):
        axes = plots.plot_loss(columns, logs, scores=[])
        assert axes.lines[0].get_color() == color


def test_no_legend_hides_a_curve(finished_run, axes_of_plots):
    for axes in list_plots(finished_run.path):
        if axes.get_legend():
            axes.figure.draw_without_rendering()
            assert axes.get_legend().get_window_extent().y0 >= axes.get_window_extent().y1
