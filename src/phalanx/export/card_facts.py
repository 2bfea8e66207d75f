"""What a model card says of a run: scores, data, recipe and limits."""

import re
import shlex
from pathlib import Path
from typing import Any

from phalanx.assemble.scorable import ScorableCheckpoint
from phalanx.assemble.session import Session
from phalanx.catalog.datasets import DATASETS
from phalanx.config.schema import Config
from phalanx.errors import UserError
from phalanx.export.metadata import ModelMetadata
from phalanx.report.folder import RunFolder, format_value, is_run_folder
from phalanx.report.records import read_averaged_top1, read_scores
from phalanx.report.scores import wilson_interval

_OWN_TO_A_MACHINE = (  # options that say nothing of how a model came about
    "data-dir", "run-dir", "device", "devices", "workers", "threads", "plugin", "init-weights",
    "keep", "logs-per-epoch", "ckpts-per-epoch", "tensorboard", "wandb", "mlflow",
)  # fmt: skip
_CLASSES_SHOWN = 20
_MACHINE_PATH = re.compile(
    r"(?<![^=,])(~[^/=,]*|\.\.)?/[^=,]*"
)  # a value that is one, or one of many


def _find_run(checkpoint: ScorableCheckpoint) -> RunFolder | None:
    """The run that a checkpoint lies in."""
    folder = checkpoint.start.checkpoint.parent.parent
    return RunFolder(folder) if is_run_folder(folder) else None


def describe_scores(
    session: Session, checkpoint: ScorableCheckpoint, metadata: ModelMetadata
) -> str:
    """A table of what the weights scored in training, or how to score them."""
    rows = _find_scores(checkpoint, metadata)
    if not rows:
        return "These weights were not scored. Score them with `phalanx validate`."
    flip = session.config.augment.flip_averaging
    with_mirror = (
        " Each image was scored together with its mirror image, which this export does not do."
    )
    table = ["| score | value | 95 % interval | validation images |", "|---|---|---|---|"]
    return "\n".join([*table, *rows]) + (f"\n\n{with_mirror.strip()}" if flip else "")


def _find_scores(checkpoint: ScorableCheckpoint, metadata: ModelMetadata) -> list[str]:
    """Rows of the table of scores."""
    run, facts = _find_run(checkpoint), checkpoint.start.facts
    images, step = int(facts["plan"]["valid_images"]), metadata.step
    if checkpoint.start.use == "score average":
        top1 = read_averaged_top1(run.path).get(step) if run else None
        return [] if top1 is None else [_format_row("top-1", top1, images)]
    if "averaged" in facts:
        return []
    try:
        found = [row for row in read_scores(run.path) if row.step == step] if run else []
    except UserError:  # the records are damaged, and the checkpoint has the score, too
        found = []
    if found:
        row = found[-1]
        rows = [_format_row("top-1", row.top1, row.scored)]
        rows += [] if row.top5 is None else [_format_row("top-5", row.top5, row.scored)]
        return [*rows, f"| loss | {row.loss:.4f} | | {row.scored:,} |"]
    top1 = facts["state"].get("scores", {}).get(str(step))
    return [] if top1 is None else [_format_row("top-1", float(top1), images)]


def _format_row(name: str, share: float, images: int) -> str:
    low, high = wilson_interval(round(share * images), images)
    return f"| {name} | {share:.2%} | {low:.2%} to {high:.2%} | {images:,} |"


def describe_data(session: Session, checkpoint: ScorableCheckpoint) -> str:
    """Which images it was trained and scored on, its classes, and how images are prepared."""
    facts, name = checkpoint.start.facts, session.config.data.data
    plan, shown = facts["plan"], session.classes[:_CLASSES_SHOWN]
    known = DATASETS[name].help if name in DATASETS else name
    more = len(session.classes) - len(shown)
    classes = ", ".join(f"`{escape_text(one)}`" for one in shown) + (
        f" and {more:,} more" if more else ""
    )
    lines = [
        f"- `{name}`: {known}",
        f"- {plan['train_images']:,} training images, {plan['valid_images']:,} validation images",
        f"- {len(session.classes):,} classes: {classes}",
    ]
    prints = {
        split: values["sha256"]
        for split, values in (facts.get("data") or {}).items()
        if isinstance(values, dict) and "sha256" in values
    }
    lines += [f"- fingerprint of the {split} split: `{value}`" for split, value in prints.items()]
    return "\n".join(lines)


def describe_recipe(session: Session, checkpoint: ScorableCheckpoint) -> str:
    """The options that are not the defaults, and the command."""
    config, default = session.config.flat(), Config().flat()
    stored = checkpoint.start.facts["config"]
    rows = [
        f"| `{name}` | {escape_text(format_value(stored.get(name, value)))} |"
        for name, value in config.items()
        if name not in _OWN_TO_A_MACHINE and stored.get(name, value) != default.get(name)
    ]
    run = _find_run(checkpoint)
    command = run.facts.get("command") if run else None
    lines = [f"```sh\n{_hide_paths(str(command))}\n```\n"] if command else []
    lines += ["Options that differ from the defaults:\n", "| option | value |", "|---|---|", *rows]
    return "\n".join(lines)


def _hide_paths(command: str) -> str:
    """A command line with only the last part of each path of this machine, also in `--a=/b,/c`."""
    try:
        words = shlex.split(command)
    except ValueError:  # its quotes were changed by hand
        words = command.split()
    return shlex.join(_MACHINE_PATH.sub(lambda found: Path(found[0]).name, word) for word in words)


def describe_limits(session: Session, metadata: ModelMetadata) -> str:
    """What the model cannot do, and where its scores do not hold."""
    size = metadata.preprocessing.image_size
    lines = [
        f"- It always answers with one of its {len(metadata.classes):,} classes, also where an "
        "image shows none of them.",
        "- The scores hold for images like those of the validation data; for others they were not "
        "measured.",
        "- Probabilities are those of training: nobody calibrated them.",
        f"- Images become {size}x{size} pixels: what is smaller than a few of these is lost.",
    ]
    if metadata.dtype != "float32":
        lines.append(
            f"- Its weights are {metadata.dtype}: answers differ a little from the scored ones."
        )
    return "\n".join(lines)


def escape_text(text: Any) -> str:
    """Text in a cell of a table."""
    return str(text).replace("|", "\\|").replace("`", "'").replace("\n", " ")
