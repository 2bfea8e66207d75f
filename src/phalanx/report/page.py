"""report.html: one self-contained page about a run, made from the files in its folder."""

from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import Any

from phalanx.disk import write_atomically
from phalanx.report import plots
from phalanx.report.folder import RunFolder
from phalanx.report.markup import flatten, note, section, table
from phalanx.report.material import Material, gather
from phalanx.report.mistakes import confusion, gallery
from phalanx.report.page_style import STYLE
from phalanx.units import format_bytes, format_count

_SCALES_SHOWN = 12
_PURPOSES = {
    "config.yaml": "every option of the run",
    "run.json": "facts about the run",
    "metrics.jsonl": "one line a step, one per evaluation",
    "training.csv": "one row per log point",
    "validation.csv": "one row per evaluation",
    "averaged.csv": "the same, of the averaged weights",
    "average.json": "what the average of checkpoints scored",
    "log.txt": "what the console said",
    "predictions.csv": "the newest evaluation, one row per image",
    "worst.npz": "thumbnails of the most confident mistakes",
    "summary.json": "the result in numbers",
    "blackbox.json": "the last steps of a run that failed",
}


def write_report(run: RunFolder) -> Path:
    """Write report.html anew from the files in the run folder; returns its path."""
    write_atomically(run.report, _render_page(gather(run)))
    return run.report


def _render_page(material: Material) -> str:
    """The whole page as HTML."""
    sections = "\n".join(render(material) for render in _SECTIONS)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(material.name)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{sections}\n</main>\n</body>\n</html>\n"
    )


def _headline(material: Material) -> str:
    """Name, state, score, speed and what held the run up."""
    facts = material.facts
    state = "finished" if material.is_finished else "unfinished"
    created = str(facts.get("created", "")).replace("T", " ").replace("Z", " UTC")
    tiles = "".join(
        f'<div class="tile"><span>{escape(label)}</span><b>{escape(value)}</b>'
        f"<span>{escape(detail)}</span></div>"
        for label, value, detail in _headline_tiles(material)
    )
    return (
        f'<header>\n<h1>{escape(material.name)} <span class="state {state}">{state}</span></h1>\n'
        f'<p class="muted">started {escape(created)} by '
        f"<code>{escape(str(facts.get('command', '')))}</code>{_parent_note(facts)}</p>\n"
        f'<div class="tiles">{tiles}</div>\n'
        f"<p>{escape(waiting_verdict(material.data_wait))}</p>\n{_input_note(material)}"
        f"{_memory_note(material)}{_numerics_note(material)}{_bad_images_note(material)}</header>"
    )


def _headline_tiles(material: Material) -> list[tuple[str, str, str]]:
    """What the page opens with, as (label, value, detail)."""
    return [
        *_score_tiles(material),
        *_best_tile(material),
        *_averaged_tile(material),
        *_average_tile(material),
        _length_tile(material),
        *_speed_tiles(material),
    ]


def _score_tiles(material: Material) -> list[tuple[str, str, str]]:
    """Top-1 with its interval and count, and top-5 where there is one."""
    score = material.score
    if score is None:
        return [("top-1", "none", "no evaluation yet")]
    low, high = score.interval95
    counted = f"of {format_count(score.scored)} images"
    interval = f"95% interval {low * 100:.2f} to {high * 100:.2f}"
    top1 = ("top-1", f"{score.top1:.2%}", f"{counted}\n{interval}")
    return [top1] if score.top5 is None else [top1, ("top-5", f"{score.top5:.2%}", counted)]


def _best_tile(material: Material) -> list[tuple[str, str, str]]:
    """The best evaluation and the step it stands at."""
    best = material.best
    return (
        [("best top-1", f"{best.top1:.2%}", f"at step {format_count(best.step)}")] if best else []
    )


def _averaged_tile(material: Material) -> list[tuple[str, str, str]]:
    """The score of the averaged weights, where there are any."""
    top1 = material.summary.averaged_top1 if material.summary else None
    return [] if top1 is None else [("averaged top-1", f"{top1:.2%}", "of the averaged weights")]


def _average_tile(material: Material) -> list[tuple[str, str, str]]:
    """The score of the average of checkpoints beside the newest's, where one was made."""
    found = material.average
    if found is None:
        return []
    steps, low_high = found.account["steps"], found.average.interval95
    of = f"of {len(steps)} checkpoints, steps {steps[0]:,} to {steps[-1]:,}"
    low, high = (bound * 100 for bound in low_high)
    detail = f"{of}\n95% interval {low:.2f} to {high:.2f}; the newest {found.newest.top1:.2%}"
    return [("top-1 of the average", f"{found.average.top1:.2%}", detail)]


def _length_tile(material: Material) -> tuple[str, str, str]:
    """How long the run trained."""
    steps, epochs = material.steps["step"], material.steps["epoch"]
    if not steps:
        return ("steps", "0", "nothing trained yet")
    return ("steps", format_count(steps[-1]), f"{epochs[-1]:.4g} epochs")


def _speed_tiles(material: Material) -> list[tuple[str, str, str]]:
    """Images per second, and the share of time that went into waiting."""
    speed, wait = material.images_per_second, material.data_wait
    chosen = material.facts.get("chosen") or {}
    where = f"on {chosen['device']}" if chosen.get("device") else ""
    tiles = []
    if speed is not None:
        tiles.append(("images per second", format_count(speed), where))
    if wait is not None:
        tiles.append(("waiting for data", f"{wait:.1%}", "of the training time"))
    return tiles


def waiting_verdict(wait: float | None) -> str:
    """Whether the data kept up, in one sentence."""
    if wait is None:
        return "Nothing is known yet about waiting for data."
    share = f"{wait:.1%}"
    if wait < 0.05:
        return f"The data kept up: training waited for it {share} of the time."
    if wait < 0.2:
        return f"The data nearly kept up: training waited for it {share} of the time."
    return (
        f"The data held training up: it waited {share} of the time. "
        "More --workers or a faster disk would help."
    )


def _input_note(material: Material) -> str:
    """How fast images came, what the model could have eaten, and what would help."""
    found = material.summary.input if material.summary else None
    if found is None:
        return ""
    rates = "".join(
        f"<li>{escape(stage)}: {format_count(rate)} images/s</li>"
        for stage, rate in found.stages.items()
    )
    stages = f"<details><summary>one core, each stage alone</summary><ul>{rates}</ul></details>"
    verdict = f"<p>Input: {escape(found.verdict)}.</p>\n"
    return verdict + (f"{stages}\n" if rates else "")


def _memory_note(material: Material) -> str:
    """What a step should take and what was taken, where it is known."""
    found = material.summary.memory if material.summary else None
    if found is None:
        return ""
    told = []
    if found.predicted is not None:
        told.append(f"a step was predicted to take {format_bytes(found.predicted)}")
    if found.measured is not None:
        chosen = material.facts.get("chosen") or {}
        size = format_bytes(found.measured)
        rough = str(chosen.get("device")).startswith("cpu")
        told.append(
            f"the process grew by {size}, a rough measure with libraries and waiting images in it"
            if rough
            else f"{size} were in use at most"
        )
    return f"<p>Memory: {escape('; '.join(told))}.</p>\n" if told else ""


def _numerics_note(material: Material) -> str:
    """What became of 16-bit numbers, where there are any."""
    found = material.summary.numerics if material.summary else None
    if found is None:
        return ""
    lines = [
        (found.updates_lost, "of the weights' updates moved nothing in their step"),
        (found.way_lost, "of the way the weights should have moved was lost to rounding"),
        (found.gradients_zero, "of the gradients' numbers were nothing"),
    ]
    # a sum over chances may fall below nothing by a hair
    told = [f"{round(share, 4) + 0.0:.2%} {words}" for share, words in lines if share is not None]
    if found.gradients_not_finite is not None:
        count = format_count(found.gradients_not_finite)
        told.append(f"{count} numbers of gradients were not finite")
    told.append(f"{format_count(found.skipped_steps)} steps overflowed and were skipped")
    scales = found.loss_scales[-_SCALES_SHOWN:]
    if len(scales) < len(found.loss_scales):
        told.append(f"the loss scale changed {len(found.loss_scales):,} times, the last are")
    told += [f"loss scale {scale:g} from step {step:,} on" for step, scale in scales]
    rows = "".join(f"<li>{escape(line)}</li>" for line in told)
    return f"<details open><summary>Numerics of 16 bits</summary><ul>{rows}</ul></details>\n"


def _bad_images_note(material: Material) -> str:
    """The images that did not decode, by name, if any."""
    bad = material.summary.bad_images if material.summary else ()
    if not bad:
        return ""
    names = "".join(f"<li>{escape(text)}</li>" for text in bad)
    return (
        f"<details><summary>{len(bad)} images could not be read</summary><ul>{names}</ul></details>"
    )


def _parent_note(facts: dict[str, Any]) -> str:
    """Which run this one was forked from, if any."""
    parent = facts.get("parent")
    if not parent:
        return ""
    told = ", ".join(f"{name} {value}" for name, value in flatten(parent))
    return f"; forked from {escape(told)}"


def _curves(material: Material) -> str:
    """Loss, top-1, learning rate, speed and waiting over epochs."""
    steps, logs, scores = material.steps, material.logs, material.scores
    if not steps["step"]:
        return section("curves", "Curves", body=note("Nothing trained yet."))
    wide = [("Loss", plots.plot_loss(steps, logs, scores=scores))]
    if scores or any(row.top1 is not None for row in logs):
        wide.append(("Top-1", plots.plot_top1(logs, scores)))
    small = [("Learning rate", plots.plot_rate(steps))]
    if any(row.images_per_second is not None for row in logs):
        small.append(("Images per second", plots.plot_speed(logs)))
    if any(row.data_wait is not None for row in logs):
        small.append(("Share of time waiting for data", plots.plot_waiting(logs)))
    body = plot_row(wide, "wide") + plot_row(small, "small")
    return section("curves", "Curves", body=body)


def plot_row(drawings: Iterable[tuple[str, str]], kind: str) -> str:
    """Drawings with their titles, side by side where there is room."""
    drawn = "\n".join(f'<div class="plot"><h3>{title}</h3>{svg}</div>' for title, svg in drawings)
    return f'<div class="plots {kind}">\n{drawn}\n</div>\n'


def _options(material: Material) -> str:
    """Every option with its value and where that came from; what was chosen comes first."""
    origins = material.facts.get("origins") or {}
    named = [(name, value, str(origins.get(name, ""))) for name, value in material.options.items()]
    changed = [row for row in named if row[2] and not row[2].startswith("default")]
    defaults = [row for row in named if row not in changed]
    rows = [*_option_rows(changed, "changed"), *_option_rows(defaults, "")]
    body = (
        note(f"{len(changed)} of {len(named)} options differ from their defaults; they come first.")
        + '<div class="scroll"><table class="list"><thead><tr><th>option</th><th>value</th>'
        f"<th>origin</th></tr></thead>\n<tbody>{''.join(rows)}</tbody></table></div>"
    )
    return section("options", "Options", body=body)


def _option_rows(rows: Iterable[tuple[str, str, str]], kind: str) -> list[str]:
    """Rows of the option table."""
    return [
        f'<tr class="{kind}"><td class="mono">{escape(name)}</td>'
        f'<td class="mono">{escape(value)}</td><td>{escape(origin)}</td></tr>'
        for name, value, origin in rows
    ]


def _surroundings(material: Material) -> str:
    """Where the run ran, what it planned and which data it saw."""
    parts = [
        ("Chosen at the start", material.facts.get("chosen")),
        ("Environment", material.facts.get("environment")),
        ("Plan", material.facts.get("plan")),
        ("Data", material.facts.get("data")),
    ]
    tables = "\n".join(
        f"<div><h3 class='apart'>{title}</h3>{_fact_table(values)}</div>"
        for title, values in parts
        if values
    )
    body = f'<div class="two">\n{tables}\n</div>' if tables else note("Nothing was recorded.")
    return section("environment", "Environment", body=body)


def _fact_table(values: Any) -> str:
    """Names and values as a table."""
    return table(
        [], [[escape(name), f"<code>{escape(text)}</code>"] for name, text in flatten(values)]
    )


def _files(material: Material) -> str:
    """What lies in the run folder."""
    folder = material.run.path
    rows = [
        [f"<code>{name}</code>", escape(purpose), format_bytes((folder / name).stat().st_size)]
        for name, purpose in _PURPOSES.items()
        if (folder / name).is_file()
    ]
    kept = sorted(p.name for p in material.run.checkpoints.glob("*"))
    if kept:
        rows.append(["<code>checkpoints/</code>", escape(", ".join(kept)), ""])
    body = note(str(folder)) + table(["file", "what it holds", "size"], rows, numbers=1)
    return section("files", "Files", body=body)


_SECTIONS: tuple[Callable[[Material], str], ...] = (
    _headline,
    _curves,
    confusion,
    gallery,
    _options,
    _surroundings,
    _files,
)
