"""sweep.html: one self-contained page about a sweep, made from its journal."""

from collections import Counter
from html import escape

from phalanx.report.folder import is_run_folder
from phalanx.report.markup import note, section, table
from phalanx.report.page import plot_row
from phalanx.report.page_style import STYLE
from phalanx.sweep.drawings import draw_course, draw_curves, draw_option
from phalanx.sweep.journal import SweepState, Trial
from phalanx.sweep.table import TITLES, cells, describe_values, format_interval, format_score, heads
from phalanx.units import format_seconds

_OWN_STYLE = """
pre { background: var(--panel); border-radius: 10px; padding: 13px 16px; overflow-x: auto;
  font-size: 13px; white-space: pre-wrap; overflow-wrap: anywhere; }
#trials .list td:first-child { width: auto; min-width: 3em; }
#trials .list td, #trials .list th { white-space: nowrap; }
#trials .list td:last-child { white-space: normal; min-width: 16em; }
a { color: var(--train); }
"""


def render_page(journal: SweepState) -> str:
    """The whole page as HTML."""
    parts = (_headline, _scores, _options, _trials, _file)
    sections = "\n".join(render(journal) for render in parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(journal.sweep.name)}: sweep</title>\n<style>{STYLE}{_OWN_STYLE}</style>\n"
        f"</head>\n<body>\n<main>\n{sections}\n</main>\n</body>\n</html>\n"
    )


def _headline(journal: SweepState) -> str:
    """Name, state, the best trial and the command that repeats it."""
    state = "finished" if journal.is_finished else "unfinished"
    tiles = "".join(
        f'<div class="tile"><span>{escape(label)}</span><b>{escape(value)}</b>'
        f"<span>{escape(detail)}</span></div>"
        for label, value, detail in _headline_tiles(journal)
    )
    best = journal.best
    told = (
        f"<p>The best trial alone:</p>\n<pre>{escape(journal.command(best))}</pre>"
        if best
        else note("No trial has come to its end yet.")
    )
    return (
        f"<header>\n<h1>{escape(journal.sweep.name)} "
        f'<span class="state {state}">{state}</span></h1>\n'
        f'<p class="muted">a sweep in {escape(str(journal.folder))}</p>\n'
        f'<div class="tiles">{tiles}</div>\n{told}\n</header>'
    )


def _headline_tiles(journal: SweepState) -> list[tuple[str, str, str]]:
    """What the page opens with, as (label, value, detail)."""
    sweep, best = journal.sweep, journal.best
    counts = Counter(trial.state for trial in journal.trials)
    told = ", ".join(f"{counts[state]} {state}" for state in counts)
    pruner = "no pruning" if sweep.prune == "none" else f"pruned by {sweep.prune}"
    total = sum(trial.seconds for trial in journal.trials)
    tiles = [
        ("trials", f"{len(journal.finished)} of {sweep.trials}", told),
        ("method", sweep.method, f"{pruner}\nseed {sweep.seed}"),
        ("time", format_seconds(total), "of training"),
    ]
    if best is None:
        return tiles
    interval = format_interval(best)
    detail = f"95% interval\n{interval}" if interval else f"after {best.epochs:g} epochs"
    score = (f"best {TITLES[sweep.goal]}", format_score(best.score, sweep.goal), detail)
    return [score, ("best trial", str(best.number), describe_values(best, "\n")), *tiles]


def _scores(journal: SweepState) -> str:
    """Scores over trials and over epochs."""
    if not any(trial.points for trial in journal.trials):
        return section("scores", "Scores", body=note("Nothing was scored yet."))
    title = TITLES[journal.sweep.goal]
    drawings = [(f"{title} by trial", draw_course(journal))]
    drawings.append((f"{title} by epoch", draw_curves(journal)))
    return section("scores", "Scores", body=plot_row(drawings, "wide"))


def _options(journal: SweepState) -> str:
    """Scores over the values of each option."""
    title = TITLES[journal.sweep.goal]
    if not any(trial.points for trial in journal.trials):
        return ""
    drawings = [
        (f"{title} by {escape(name)}", draw_option(journal, name)) for name in journal.sweep.search
    ]
    told = note("Full: trained to its end. Hollow: pruned, by its last score. Cross: failed.")
    return section("options", "Options", body=told + plot_row(drawings, "small"))


def _trials(journal: SweepState) -> str:
    """The table, best first, with a way to each trial's report."""
    rows = [[*_linked(journal, trial), escape(trial.reason)] for trial in journal.ordered()]
    body = table([*map(escape, heads(journal.sweep)), "why it failed"], rows)
    return section("trials", "Trials", body=body if rows else note("None has begun."))


def _linked(journal: SweepState, trial: Trial) -> list[str]:
    """A row of the table whose number leads to the report, where there is one."""
    number, *rest = map(escape, cells(journal, trial))
    if (journal.folder / trial.name / "report.html").is_file():
        number = f'<a href="{trial.name}/report.html">{number}</a>'
    elif is_run_folder(journal.folder / trial.name):
        number = f'<a href="{trial.name}.log">{number}</a>'
    return [number, *rest]


def _file(journal: SweepState) -> str:
    """The file of the sweep as it is written."""
    return section("file", "File", body=f"<pre>{escape(journal.sweep.text)}</pre>")
