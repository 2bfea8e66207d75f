"""sweep.html, from states that no training was needed for."""

import re

import pytest

from html_page import Page
from phalanx.sweep.page import find_best_so_far, plot_option, plot_trials, render_page
from phalanx.sweep.state import SweepState, Trial
from small_sweeps import WIDE, play, read_text

pytestmark = pytest.mark.draws


@pytest.fixture
def state(tmp_path) -> SweepState:
    return play(read_text(tmp_path, WIDE + "prune: median\n"), tmp_path)


def test_the_page_shows_everything_and_needs_no_other_file(state):
    (state.folder / "trial-000").mkdir()
    (state.folder / "trial-000" / "report.html").touch()
    text = render_page(state)
    page = Page(text)
    assert page.sections == ["scores", "options", "trials", "file"]
    assert page.tags.count("svg") == 5, "by trial, by epoch, and one an option"
    assert {a for a in page.addresses if not a.startswith("#")} == {"trial-000/report.html"}
    best = state.best
    assert best is not None
    for words in (
        "rates finished",
        f"best top-1 {best.score:.2%} 95% interval",
        f"best trial {best.number} lr {best.values['lr']!r}\nmomentum {best.values['momentum']!r}",
        "trials 12 of 12 9 done, 2 pruned, 1 failed",
        "method tpe pruned by median",
        state.command(best),
        "diverged: step 5: loss nan",
        "# rates and choices of the demo",
    ):
        assert words in page.text, words
    assert "prefers-color-scheme: dark" in text and "#030405" not in text, "colours are the page's"


def test_a_sweep_that_has_only_begun_has_a_page(tmp_path):
    sweep = read_text(tmp_path)
    trials = (Trial(number=0, values={"lr": 0.1, "momentum": 0.9, "weight-decay": "1e-4"}),)
    page = Page(render_page(SweepState(folder=tmp_path, sweep=sweep, trials=trials)))
    assert "rates unfinished" in page.text and "No trial has finished yet." in page.text
    assert "Nothing has been scored yet." in page.text and page.tags.count("svg") == 0
    assert "trials 0 of 12 1 running" in page.text


def test_names_in_a_file_cannot_break_the_page(tmp_path):
    text = WIDE.replace("# rates and choices", "# <i>&</script>")
    page = Page(render_page(play(read_text(tmp_path, text), tmp_path, count=2)))
    assert "# <i>&</script> of the demo" in page.text and "i" not in page.tags


def test_pruned_trials_are_hollow_and_failed_ones_crosses(state):
    svg = plot_trials(state)
    hollow = svg.count("fill: none; stroke: var(--train)")
    assert hollow >= 1 and "failed" in svg and "best so far" in svg
    done = SweepState(
        folder=state.folder,
        sweep=state.sweep,
        trials=tuple(trial for trial in state.trials if trial.state == "done"),
    )
    plain = plot_trials(done)
    assert "pruned" not in plain and "failed" not in plain


def test_the_best_so_far_never_gets_worse(state):
    numbers, heights = find_best_so_far(state)
    assert numbers == list(range(12)) and heights == sorted(heights)
    best = state.best
    assert best is not None and best.score is not None
    assert heights[-1] == pytest.approx(100 * best.score)


def test_a_searched_by_factors_option_has_such_an_axis(state):
    numbers = re.findall(r">([\d.]+)</text>", plot_option(state, "lr"))
    assert {"0.02", "0.05", "0.1", "0.2", "0.5"} <= set(numbers)
    assert "0.05" not in re.findall(r">([\d.]+)</text>", plot_option(state, "momentum"))
