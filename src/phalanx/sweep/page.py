"""sweep.html: one self-contained page about a sweep, made from its state."""

from collections import Counter

from phalanx.report.folder import is_run_folder
from phalanx.report.html import Tile, render_html
from phalanx.sweep.drawings import draw_course, draw_curves, draw_option
from phalanx.sweep.journal import SweepState, Trial
from phalanx.sweep.table import TITLES, cells, describe_values, format_interval, format_score, heads
from phalanx.units import format_seconds


def render_page(state: SweepState) -> str:
    """The whole page as HTML."""
    sweep, best = state.sweep, state.best
    title, has_scores = TITLES[sweep.goal], any(trial.points for trial in state.trials)
    return render_html(
        "sweep.html",
        name=sweep.name,
        state="finished" if state.is_finished else "unfinished",
        all_well=state.is_finished,
        folder=state.folder,
        tiles=_make_tiles(state),
        command=state.command(best) if best else "",
        scores=[
            (f"{title} by trial", draw_course(state)),
            (f"{title} by epoch", draw_curves(state)),
        ]
        if has_scores
        else [],
        options=[(f"{title} by {name}", draw_option(state, name)) for name in sweep.search]
        if has_scores
        else [],
        heads=heads(sweep),
        trials=[
            {"cells": cells(state, trial), "link": _find_link(state, trial), "reason": trial.reason}
            for trial in state.ordered()
        ],
        text=sweep.text,
    )


def _make_tiles(state: SweepState) -> list[Tile]:
    """What the page opens with."""
    sweep, best = state.sweep, state.best
    counts = Counter(trial.state for trial in state.trials)
    pruner = "no pruning" if sweep.prune == "none" else f"pruned by {sweep.prune}"
    tiles = [
        (
            "trials",
            f"{len(state.finished)} of {sweep.trials}",
            ", ".join(f"{count} {name}" for name, count in counts.items()),
        ),
        ("method", sweep.method, f"{pruner}\nseed {sweep.seed}"),
        ("time", format_seconds(sum(trial.seconds for trial in state.trials)), "of training"),
    ]
    if best is None:
        return tiles
    interval = format_interval(best)
    detail = f"95% interval\n{interval}" if interval else f"after {best.epochs:g} epochs"
    score = (f"best {TITLES[sweep.goal]}", format_score(best.score, sweep.goal), detail)
    return [score, ("best trial", str(best.number), describe_values(best, "\n")), *tiles]


def _find_link(state: SweepState, trial: Trial) -> str:
    """Where a trial can be looked at: its report, else what it printed; empty before it begins."""
    run = state.folder / trial.name
    if (run / "report.html").is_file():
        return f"{trial.name}/report.html"
    return f"{trial.name}.log" if is_run_folder(run) else ""
