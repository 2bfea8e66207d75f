"""report.html: one self-contained page about a run, made from the files in its folder."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.disk import write_atomically
from phalanx.report import plots
from phalanx.report.folder import RunFolder, flatten_facts
from phalanx.report.html import Tile, embed_image, render_html
from phalanx.report.predictions import (
    Prediction,
    WorstMistakes,
    confusion_matrix,
    read_predictions,
    read_worst,
)
from phalanx.report.records import LogRow, ScoreRow, read_logs, read_scores, read_steps
from phalanx.report.summary import AverageScore, Numerics, Summary, read_average_score, read_summary
from phalanx.units import format_bytes, format_count

_MOST_CLASSES = 40  # beyond this a matrix is a carpet, and the worst pairs say more
_MOST_PAIRS, _FEW_PAIRS = 20, 5
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
_ENVIRONMENT = {  # sections of run.json
    "chosen": "Chosen at the start",
    "environment": "Environment",
    "plan": "Plan",
    "data": "Data",
}


def write_report(run: RunFolder) -> Path:
    """Write report.html anew from the files in the run folder; returns its path."""
    write_atomically(run.report, render_html("report.html", **_page_values(_read_run(run))))
    return run.report


@dataclass(frozen=True, kw_only=True)
class _RunData:
    """What a run folder says about its run; what is not there yet is empty or None."""

    run: RunFolder
    facts: dict[str, Any]
    steps: dict[str, list[float]]
    logs: list[LogRow]
    scores: list[ScoreRow]
    predictions: list[Prediction]
    worst: WorstMistakes | None
    summary: Summary | None
    average: AverageScore | None  # of checkpoints/average, while that is there

    @property
    def device(self) -> str:
        """Where the run was trained, as far as that is known."""
        return str((self.facts.get("chosen") or {}).get("device") or "")

    def median(self, name: str) -> float | None:
        """A measurement: the summary's, or the median of the log points."""
        if self.summary and getattr(self.summary, name) is not None:
            return float(getattr(self.summary, name))
        known = [getattr(row, name) for row in self.logs if getattr(row, name) is not None]
        return float(np.median(known)) if known else None

    def class_name(self, number: int) -> str:
        """The name of a class, or its number where the run knows no name."""
        names = self.facts.get("classes") or []
        return str(names[number]) if 0 <= number < len(names) else f"class {number}"


def _read_run(run: RunFolder) -> _RunData:
    """Read everything the page needs from the run folder."""
    folder = run.path
    has_average = (run.checkpoints / "average").exists()
    return _RunData(
        run=run,
        facts=run.facts,
        steps=read_steps(folder),
        logs=read_logs(folder),
        scores=read_scores(folder),
        predictions=read_predictions(folder),
        worst=read_worst(folder),
        summary=read_summary(folder) if run.summary.exists() else None,
        average=read_average_score(folder) if has_average else None,
    )


def _page_values(data: _RunData) -> dict[str, Any]:
    """The values of the template, in the order of the page."""
    facts, summary = data.facts, data.summary
    is_finished = summary is not None and summary.finished
    return {
        "name": str(facts.get("name") or data.run.path.name),
        "state": "finished" if is_finished else "unfinished",
        "all_well": is_finished,
        "created": str(facts.get("created", "")).replace("T", " ").replace("Z", " UTC"),
        "command": facts.get("command", ""),
        "parent": ", ".join(f"{k} {v}" for k, v in flatten_facts(facts.get("parent") or {})),
        "tiles": [*_score_tiles(data), *_speed_tiles(data)],
        "waiting": describe_waiting(data.median("data_wait")),
        "input": summary and summary.input,
        "memory": _describe_memory(data),
        "numerics": _describe_numerics(summary.numerics) if summary and summary.numerics else [],
        "bad_images": summary.bad_images if summary else (),
        "curves": _draw_curves(data),
        "confusion": _count_confusion(data),
        "gallery": _find_pictures(data),
        "options": _split_options(data),
        "environment": [
            (title, flatten_facts(facts[name]))
            for name, title in _ENVIRONMENT.items()
            if facts.get(name)
        ],
        "folder": data.run.path,
        "files": list(_list_files(data.run)),
    }


def _score_tiles(data: _RunData) -> Iterator[Tile]:
    """Top-1 with its interval and count, the best one, and those of averaged weights."""
    score = data.scores[-1] if data.scores else None
    if score is None:
        yield "top-1", "none", "no evaluation yet"
    else:
        counted = f"of {format_count(score.scored)} images"
        yield "top-1", f"{score.top1:.2%}", f"{counted}\n{_describe_interval(score)}"
        if score.top5 is not None:
            yield "top-5", f"{score.top5:.2%}", counted
    highest = max(data.scores, key=lambda row: row.top1, default=None)  # of equals the first
    best = (data.summary and data.summary.best) or highest
    if best is not None:
        yield "best top-1", f"{best.top1:.2%}", f"at step {format_count(best.step)}"
    if data.summary and data.summary.averaged_top1 is not None:
        yield "averaged top-1", f"{data.summary.averaged_top1:.2%}", "of the averaged weights"
    if data.average is not None:
        steps, average = data.average.account["steps"], data.average.average
        source = f"of {len(steps)} checkpoints, steps {steps[0]:,} to {steps[-1]:,}"
        newest = f"the newest {data.average.newest.top1:.2%}"
        detail = f"{source}\n{_describe_interval(average)}; {newest}"
        yield "top-1 of the average", f"{average.top1:.2%}", detail


def _describe_interval(score: ScoreRow) -> str:
    """The 95 % interval of a top-1, in percent."""
    low, high = score.interval95
    return f"95% interval {low * 100:.2f} to {high * 100:.2f}"


def _speed_tiles(data: _RunData) -> Iterator[Tile]:
    """How long the run trained, images per second, and the share of time spent waiting."""
    steps, epochs = data.steps["step"], data.steps["epoch"]
    if steps:
        yield "steps", format_count(steps[-1]), f"{epochs[-1]:.4g} epochs"
    else:
        yield "steps", "0", "nothing trained yet"
    speed, waiting = data.median("images_per_second"), data.median("data_wait")
    if speed is not None:
        yield "images per second", format_count(speed), f"on {data.device}" if data.device else ""
    if waiting is not None:
        yield "waiting for data", f"{waiting:.1%}", "of the training time"


def describe_waiting(wait: float | None) -> str:
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


def _describe_memory(data: _RunData) -> list[str]:
    """What a step should take and what was taken, where it is known."""
    memory = data.summary.memory if data.summary else None
    lines = []
    if memory and memory.predicted is not None:
        lines.append(f"a step was predicted to take {format_bytes(memory.predicted)}")
    if memory and memory.measured is not None:
        size = format_bytes(memory.measured)
        lines.append(
            f"the process grew by {size}, a rough measure with libraries and waiting images in it"
            if data.device.startswith("cpu")
            else f"{size} were in use at most"
        )
    return lines


def _describe_numerics(numerics: Numerics) -> list[str]:
    """What became of 16-bit numbers."""
    shares = [
        (numerics.updates_lost, "of the weight updates changed nothing in their step"),
        (numerics.lost_to_rounding, "of the total change of the weights was lost to rounding"),
        (numerics.gradients_zero, "of the gradient values were zero"),
    ]
    # a sum over random roundings may fall below zero by a hair
    lines = [f"{round(share, 4) + 0.0:.2%} {text}" for share, text in shares if share is not None]
    if numerics.gradients_not_finite is not None:
        lines.append(
            f"{format_count(numerics.gradients_not_finite)} gradient values were not finite"
        )
    lines.append(f"{format_count(numerics.skipped_steps)} steps overflowed and were skipped")
    scales = numerics.loss_scales[-_SCALES_SHOWN:]
    if len(scales) < len(numerics.loss_scales):
        lines.append(f"the loss scale changed {len(numerics.loss_scales):,} times; the last were")
    return lines + [f"loss scale {scale:g} from step {step:,} on" for step, scale in scales]


def _draw_curves(data: _RunData) -> dict[str, list[tuple[str, str]]]:
    """Loss, top-1, learning rate, speed and waiting over epochs; empty before the first step."""
    steps, logs, scores = data.steps, data.logs, data.scores
    if not steps["step"]:
        return {}
    wide = [("Loss", plots.plot_loss(steps, logs, scores=scores))]
    if scores or any(row.top1 is not None for row in logs):
        wide.append(("Top-1", plots.plot_top1(logs, scores)))
    small = [("Learning rate", plots.plot_rate(steps))]
    if any(row.images_per_second is not None for row in logs):
        small.append(("Images per second", plots.plot_speed(logs)))
    if any(row.data_wait is not None for row in logs):
        small.append(("Share of time waiting for data", plots.plot_waiting(logs)))
    return {"wide": wide, "small": small}


def _count_confusion(data: _RunData) -> dict[str, Any]:
    """What was taken for what: a matrix, unless classes are many, and the most frequent pairs."""
    if not data.predictions:
        return {}
    labels = [row.label for row in data.predictions]
    guesses = [row.top[0] for row in data.predictions]
    known = len(data.facts.get("classes") or [])
    classes = max(known, max(labels) + 1, max(guesses) + 1)
    counts = confusion_matrix(labels, guesses, classes=classes)
    is_small = classes <= _MOST_CLASSES
    rows = [(data.class_name(at), _shade_row(counts[at], at)) for at in range(classes)]
    wrong = counts.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[: _FEW_PAIRS if is_small else _MOST_PAIRS]
    pairs = [divmod(int(at), classes) for at in order if wrong.flat[at] > 0]
    return {
        "matrix": rows if is_small else [],
        "pairs": [
            (
                data.class_name(label),
                data.class_name(guess),
                wrong[label, guess],
                wrong[label, guess] / counts[label].sum(),
            )
            for label, guess in pairs
        ],
    }


def _shade_row(counts: NDArray[np.int64], label: int) -> list[tuple[int, str, float]]:
    """One row of the matrix as (count, colour, opacity); mistakes in another colour than hits."""
    shares = counts / max(int(counts.sum()), 1)
    # mistakes are rare: without a lift their shades would all look like none
    return [
        (count, "heat", share * 0.85) if at == label else (count, "wrong", share**0.5 * 0.85)
        for at, (count, share) in enumerate(zip(counts.tolist(), shares.tolist(), strict=True))
    ]


def _find_pictures(data: _RunData) -> dict[str, Any]:
    """The most confident mistakes, to look at; empty where no pictures were kept."""
    worst = data.worst
    wrong = {row.index: row for row in data.predictions if not row.correct}
    if worst is None or not any(int(index) in wrong for index in worst.indices):
        return {}
    shown = [
        (wrong[int(index)], pixels)
        for index, pixels in zip(worst.indices, worst.pixels, strict=True)
        if int(index) in wrong
    ]
    return {
        "step": worst.step,
        "mistakes": [
            {
                "name": row.id,
                "label": data.class_name(row.label),
                "guess": data.class_name(row.top[0]),
                "confidence": row.confidence,
                "image": embed_image(pixels, "PNG"),
            }
            for row, pixels in shown
        ],
    }


def _split_options(data: _RunData) -> dict[str, list[tuple[str, str, str]]]:
    """Every option with its value and where that came from: what was chosen, and defaults."""
    origins = data.facts.get("origins") or {}
    parts: dict[str, list[tuple[str, str, str]]] = {"changed": [], "defaults": []}
    for name, value in data.run.options.items():
        origin = str(origins.get(name, ""))
        is_default = not origin or origin.startswith("default")
        parts["defaults" if is_default else "changed"].append((name, value, origin))
    return parts


def _list_files(run: RunFolder) -> Iterator[tuple[str, str, str]]:
    """What lies in the run folder, as (name, purpose, size)."""
    for name, purpose in _PURPOSES.items():
        file = run.path / name
        if file.is_file():
            yield name, purpose, format_bytes(file.stat().st_size)
    kept = sorted(path.name for path in run.checkpoints.glob("*"))
    if kept:
        yield "checkpoints/", ", ".join(kept), ""
