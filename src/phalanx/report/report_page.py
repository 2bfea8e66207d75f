"""report.html: one self-contained page about a run, made from the files in its folder."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.disk import write_atomically
from phalanx.report import plots
from phalanx.report.folder import RunFolder, flatten_facts
from phalanx.report.html import embed_file, embed_image, render_html
from phalanx.report.predictions import (
    Prediction,
    WorstMistakes,
    confusion_matrix,
    read_predictions,
    read_worst_mistakes,
)
from phalanx.report.records import LogRow, ScoreRow, read_logs, read_scores, read_steps
from phalanx.report.summary import BestScore, Summary, read_average_score, read_summary
from phalanx.units import format_bytes, format_plural

_MOST_CLASSES = 40  # with more, a matrix is unreadable, and only the worst pairs are shown
_MOST_PAIRS, _FEW_PAIRS = 20, 5
_DARKEST_SHADE = 0.55  # opacity; more would hide the numbers
_PURPOSES = {
    "config.yaml": "every option of the run",
    "run.json": "facts about the run",
    "metrics.jsonl": "one line per step and per evaluation",
    "training.csv": "one row per log point",
    "validation.csv": "one row per evaluation",
    "averaged.csv": "the same for the averaged weights",
    "average.json": "the score of the average of checkpoints",
    "log.txt": "the console output",
    "predictions.csv": "the newest evaluation, one row per image",
    "worst.npz": "thumbnails of the most confident mistakes",
    "summary.json": "the result in numbers",
    "blackbox.json": "the last steps of a run that failed",
    "profile/summary.txt": "where the time of a step went, by unit and by kernel",
    "profile/summary.json": "the same in numbers",
    "profile/step.png": "that step over time",
    "profile/trace.json.gz": "its trace; ui.perfetto.dev opens it",
}
_ENVIRONMENT = {  # sections of run.json
    "chosen": "Chosen at the start",
    "environment": "Environment",
    "plan": "Plan",
    "data": "Data",
    "parent": "Parent",
}


def write_report(run: RunFolder) -> Path:
    """Write report.html from the files in the run folder; returns its path."""
    write_atomically(run.report, render_html("report.html", **_read_values(run)))
    return run.report


def _read_values(run: RunFolder) -> dict[str, Any]:
    """All values of the page, in its order; those that do not exist yet are empty or None."""
    facts, folder = run.facts, run.path
    summary = read_summary(folder) if run.summary.exists() else None
    is_finished = summary is not None and summary.finished
    parent = dict(flatten_facts(facts.get("parent") or {}))
    steps, logs, scores = read_steps(folder), read_logs(folder), read_scores(folder)
    has_average = (run.checkpoints / "average").exists()
    device = str((facts.get("chosen") or {}).get("device") or "")
    data_wait = _find_measurement("data_wait", summary, logs)
    predictions = read_predictions(folder)
    failure = "" if is_finished else _read_failure(folder)
    names = _ClassNames(enumerate(facts.get("classes") or []))
    return {
        "name": folder.absolute().name,
        "state": "finished" if is_finished else "failed" if failure else "unfinished",
        "failure": failure,
        "all_well": is_finished,
        "created": str(facts.get("created", "")).replace("T", " ").replace("Z", " UTC"),
        "command": facts.get("command", ""),
        "parent": " at step ".join(parent[key] for key in ("run", "step") if key in parent),
        "summary": summary,
        "score": scores[-1] if scores else None,
        "best": _find_best(summary, scores),
        "average": read_average_score(folder) if has_average else None,
        "last_step": steps["step"][-1] if steps["step"] else 0,
        "epochs": format_plural(float(f"{steps['epoch'][-1]:.4g}"), "epoch")
        if steps["epoch"]
        else "nothing trained yet",
        "device": device,
        "images_per_second": _find_measurement("images_per_second", summary, logs),
        "data_wait": data_wait,
        "waiting": describe_data_wait(data_wait),
        "memory": _describe_memory(summary, device),
        "curves": _draw_curves(steps, logs, scores),
        "profiled_step": _embed_profile(folder),
        "confusion": _count_confusion(predictions, names),
        "gallery": _find_pictures(predictions, read_worst_mistakes(folder), names),
        "options": _split_options(run.options, facts.get("origins") or {}),
        "environment": [
            (title, flatten_facts(facts[name]))
            for name, title in _ENVIRONMENT.items()
            if facts.get(name)
        ],
        "folder": folder,
        "files": list(_list_files(run)),
    }


def _find_best(summary: Summary | None, scores: list[ScoreRow]) -> BestScore | ScoreRow | None:
    """The highest score: that of the best checkpoint, unless a step that was not saved beats it."""
    kept = summary.best if summary else None
    highest = max(scores, key=lambda row: row.top1, default=None)  # of equals the first
    return highest if kept is None or (highest and highest.top1 > kept.top1) else kept


def _read_failure(folder: Path) -> str:
    """Why the run failed, by its blackbox.json; empty if it did not, or has been resumed since."""
    try:
        why = json.loads((folder / "blackbox.json").read_bytes())["why"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    return str(why).partition(": ")[2]  # without the name of the exception


class _ClassNames(dict[int, str]):
    """The class names by number; a class without a name is called "class NUMBER"."""

    def __missing__(self, number: int) -> str:
        return f"class {number}"


def _find_measurement(name: str, summary: Summary | None, logs: list[LogRow]) -> float | None:
    """A measurement of the run: the summary's, or the median of the log points."""
    if summary and getattr(summary, name) is not None:
        return float(getattr(summary, name))
    known = [getattr(row, name) for row in logs if getattr(row, name) is not None]
    return float(np.median(known)) if known else None


def describe_data_wait(wait: float | None) -> str:
    """Whether the data kept up, in one sentence."""
    if wait is None:
        return (
            "Whether training waits for data was not measured: the first "
            "steps after a start do not count, and there were no others."
        )
    share = f"{wait:.1%}"
    if wait < 0.2:
        nearly = "" if wait < 0.05 else "nearly "
        return f"The data {nearly}kept up: training waited for it {share} of the time."
    return (
        f"Data loading held training up: it waited {share} of the time. "
        "More --workers or a faster disk would help."
    )


def _describe_memory(summary: Summary | None, device: str) -> list[str]:
    """The predicted memory of a step and the measured memory, as far as they are known."""
    memory = summary.memory if summary else None
    lines = []
    if memory and memory.predicted is not None:
        lines.append(f"a step was predicted to take {format_bytes(memory.predicted)}")
    if memory and memory.measured is not None:
        size = format_bytes(memory.measured)
        lines.append(
            f"the process grew by {size}, a rough measure with libraries and waiting images in it"
            if device.startswith("cpu")
            else f"{size} were in use at most"
        )
    return lines


def _draw_curves(
    steps: dict[str, list[float]], logs: list[LogRow], scores: list[ScoreRow]
) -> dict[str, list[tuple[str, str]]]:
    """Loss, top-1, learning rate, speed and waiting by epoch; empty before the first step."""
    if not steps["step"]:
        return {}
    wide = [("Loss", plots.plot_loss(steps, logs, scores=scores))]
    if scores or any(row.top1 is not None for row in logs):
        wide.append(("Top-1", plots.plot_top1(steps, logs, scores=scores)))
    small = [("Learning rate", plots.plot_learning_rate(steps))]
    if any(row.images_per_second is not None for row in logs):
        small.append(("Images per second", plots.plot_throughput(steps, logs)))
    if any(row.data_wait is not None for row in logs):
        small.append(("Share of time waiting for data", plots.plot_data_wait(steps, logs)))
    return {"wide": wide, "small": small}


def _embed_profile(folder: Path) -> str:
    """The picture of the profiled step as a data URL; empty if there is none."""
    file = folder / "profile" / "step.png"
    return embed_file(file.read_bytes(), "PNG") if file.is_file() else ""


def _count_confusion(predictions: list[Prediction], names: _ClassNames) -> dict[str, Any]:
    """The confusion matrix, unless there are many classes, and the most frequent mistakes."""
    if not predictions:
        return {}
    labels, guesses = [row.label for row in predictions], [row.top[0] for row in predictions]
    classes = max(len(names), max(labels) + 1, max(guesses) + 1)
    counts = confusion_matrix(labels, guesses, classes=classes)
    is_small = classes <= _MOST_CLASSES
    shown = range(classes) if is_small else ()
    wrong = counts.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[: _FEW_PAIRS if is_small else _MOST_PAIRS]
    pairs = [divmod(int(at), classes) for at in order if wrong.flat[at] > 0]
    return {
        "matrix": [(names[label], _shade_row(counts[label], label)) for label in shown],
        "pairs": [
            (names[i], names[k], wrong[i, k], wrong[i, k] / counts[i].sum()) for i, k in pairs
        ],
    }


def _shade_row(counts: NDArray[np.int64], label: int) -> list[tuple[int, str, float]]:
    """One row of the matrix as (count, colour, opacity); mistakes have another colour."""
    shares = counts / max(int(counts.sum()), 1)
    # mistakes are rare: without the square root their shades would be invisible
    return [
        (count, "heat", share * _DARKEST_SHADE)
        if at == label
        else (count, "wrong", share**0.5 * _DARKEST_SHADE)
        for at, (count, share) in enumerate(zip(counts.tolist(), shares.tolist(), strict=True))
    ]


def _find_pictures(
    predictions: list[Prediction], worst: WorstMistakes | None, names: _ClassNames
) -> dict[str, Any]:
    """The most confident mistakes with their images; empty if no images were stored."""
    if worst is None:
        return {}
    wrong = {row.index: row for row in predictions if not row.correct}
    mistakes = [
        {
            "name": row.id,
            "label": names[row.label],
            "guess": names[row.top[0]],
            "confidence": row.confidence,
            "image": embed_image(pixels, "PNG"),
        }
        for index, pixels in zip(worst.indices.tolist(), worst.pixels, strict=True)
        if (row := wrong.get(index)) is not None
    ]
    return {"step": worst.step, "mistakes": mistakes}


def _split_options(
    options: dict[str, str], origins: dict[str, Any]
) -> dict[str, list[tuple[str, str, str]]]:
    """Every option with its value and origin, in two parts: changed, and defaults."""
    parts: dict[str, list[tuple[str, str, str]]] = {"changed": [], "defaults": []}
    for name, value in options.items():
        origin = str(origins.get(name, ""))
        is_default = not origin or origin.startswith("default")
        parts["defaults" if is_default else "changed"].append((name, value, origin))
    return parts


def _list_files(run: RunFolder) -> Iterator[tuple[str, str, str]]:
    """The files in the run folder, as (name, purpose, size)."""
    for name, purpose in _PURPOSES.items():
        file = run.path / name
        if file.is_file():
            yield name, purpose, format_bytes(file.stat().st_size)
    kept = sorted(path.name for path in run.checkpoints.glob("*"))
    if kept:
        yield "checkpoints/", ", ".join(kept), ""
