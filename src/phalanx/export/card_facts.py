"""The sections of a model card about a run: scores, data, recipe and limits."""

import re
import shlex
from pathlib import Path
from typing import Any

from phalanx.assemble.scoring_target import ScorableCheckpoint
from phalanx.assemble.session import Session
from phalanx.catalog.datasets import DATASETS
from phalanx.config.schema import MODEL_SECTIONS, OPTIONS, Config
from phalanx.errors import UserError
from phalanx.export.metadata import ModelMetadata
from phalanx.export.options import ExportSource
from phalanx.report.folder import RunFolder, format_value
from phalanx.report.records import ScoreRow, read_averaged_scores, read_scores
from phalanx.report.scores import wilson_interval
from phalanx.report.summary import read_average_score
from phalanx.units import format_some

_MACHINE_OPTIONS = (  # options that do not affect the trained model
    "data-dir", "run-dir", "device", "devices", "workers", "threads", "plugin", "init-weights",
    "keep", "logs-per-epoch", "ckpts-per-epoch", "tensorboard", "wandb", "mlflow",
)  # fmt: skip
_NETWORK_SECTIONS = (*MODEL_SECTIONS, "data")  # of an untrained model
_CLASSES_SHOWN = 20
_NOT_TRAINED = {  # the score section of weights that no run has trained
    "random": "None: the weights are random, so its answers mean nothing. It is for trying out a "
    "server, and for measuring one.",
    "file": "These weights come from elsewhere and were not scored. Score them with "
    "`phalanx validate`, which takes `--init-weights`, too.",
}
_MACHINE_PATH = re.compile(
    r"(?<![^=,])(~[^/=,]*|\.\.)?/[^=,]*"
)  # a value that is one, or one of many


def describe_weights(source: ExportSource, metadata: ModelMetadata) -> str:
    """A description of the weights."""
    if source.checkpoint is not None:
        weights = "averaged weights" if metadata.averaged else "weights"
        return f"the {weights} of the run `{_escape_text(metadata.run)}` at step {metadata.step:,}"
    file = source.config.model.init_weights
    which = f"the weights of `{_escape_text(Path(file).name)}`" if file else "**random weights**"
    if metadata.weights == "random" and file:
        which += " with a **random classifier**"
    trained = "" if metadata.weights == "file" else ", never trained"
    return f"{which}{trained}, in the network of `{_escape_text(source.name)}`"


def describe_scores(session: Session, source: ExportSource, metadata: ModelMetadata) -> str:
    """A table of the weights' scores in training, or how to score them."""
    if source.checkpoint is None:
        return _NOT_TRAINED[metadata.weights]
    run = RunFolder(source.run) if source.run else None
    rows = _find_scores(source.checkpoint, run, metadata)
    if not rows:
        return "These weights were not scored. Score them with `phalanx validate`."
    flip = session.config.augment.flip_averaging
    with_mirror = (
        " Each image was scored together with its mirror image, which this export does not do."
    )
    table = ["| score | value | 95 % interval | validation images |", "|---|---|---|---|"]
    return "\n".join([*table, *rows]) + (f"\n\n{with_mirror.strip()}" if flip else "")


def _find_scores(
    checkpoint: ScorableCheckpoint, run: RunFolder | None, metadata: ModelMetadata
) -> list[str]:
    """Rows of the table of scores."""
    row = _find_recorded_score(checkpoint, run, metadata.step)
    if row is not None:
        rows = [_format_row("top-1", row.top1, row.scored)]
        rows += [] if row.top5 is None else [_format_row("top-5", row.top5, row.scored)]
        return [*rows, f"| loss | {row.loss:.4f} | | {row.scored:,} |"]
    facts = checkpoint.start.facts
    if checkpoint.start.use == "score average" or "averaged" in facts:
        return []
    # without the records: the checkpoint has its score, and unreadable images without their split
    top1 = facts["state"].get("scores", {}).get(str(metadata.step))
    if top1 is None:
        return []
    if facts["state"].get("bad_images"):
        return [f"| top-1 | {float(top1):.2%} | | |"]
    return [_format_row("top-1", float(top1), int(facts["plan"]["valid_images"]))]


def _find_recorded_score(
    checkpoint: ScorableCheckpoint, run: RunFolder | None, step: int | None
) -> ScoreRow | None:
    """The score of these weights in the records of their run; None if it has none."""
    account = checkpoint.start.facts.get("averaged")
    if run is None:
        return None
    try:
        if checkpoint.start.use == "score average":
            return read_averaged_scores(run.path).get(step or 0)
        if account is not None:
            average = read_average_score(run.path)
            return average.average if average and average.account == account else None
        return next((row for row in reversed(read_scores(run.path)) if row.step == step), None)
    except UserError:  # the records are damaged, but the checkpoint may have the score, too
        return None


def _format_row(name: str, share: float, images: int) -> str:
    low, high = wilson_interval(round(share * images), images)
    return f"| {name} | {share:.2%} | {low:.2%} to {high:.2%} | {images:,} |"


def describe_data(session: Session, source: ExportSource) -> str:
    """The images it was trained and scored on, or is designed for, and its classes."""
    name = session.config.data.data
    known = DATASETS[name].help if name in DATASETS else name
    classes = format_some([f"`{_escape_text(one)}`" for one in session.classes], _CLASSES_SHOWN)
    about, count = f"`{name}`: {known}", f"- {len(session.classes):,} classes: {classes}"
    if source.checkpoint is None:
        return f"- laid out for {about}\n- trained on no image by Phalanx\n{count}"
    facts = source.checkpoint.start.facts
    plan = facts["plan"]
    lines = [
        f"- {about}",
        f"- {plan['train_images']:,} training images, {plan['valid_images']:,} validation images",
        count,
    ]
    prints = {
        split: values["sha256"]
        for split, values in (facts.get("data") or {}).items()
        if isinstance(values, dict) and "sha256" in values
    }
    lines += [f"- fingerprint of the {split} split: `{value}`" for split, value in prints.items()]
    return "\n".join(lines)


def describe_recipe(session: Session, source: ExportSource) -> str:
    """The options that differ from the defaults, and the command."""
    config, default = session.config.flat(), Config().flat()
    trained = source.checkpoint is not None
    stored = source.checkpoint.start.facts["config"] if source.checkpoint else {}
    rows = [
        f"| `{name}` | {_escape_text(format_value(stored.get(name, value)))} |"
        for name, value in config.items()
        if name not in _MACHINE_OPTIONS
        and (trained or OPTIONS[name].section in _NETWORK_SECTIONS)
        and stored.get(name, value) != default.get(name)
    ]
    command = RunFolder(source.run).facts.get("command") if source.run else None
    lines = [f"```sh\n{_hide_paths(str(command))}\n```\n"] if command else []
    lines += [] if trained else ["Phalanx has not trained these weights.\n"]
    table = ["Options that differ from the defaults:\n", "| option | value |", "|---|---|", *rows]
    lines += table if rows else ["Its options are the defaults."]
    return "\n".join(lines)


def _hide_paths(command: str) -> str:
    """A command line with this machine's paths shortened to file names, also in `--a=/b,/c`."""
    try:
        words = shlex.split(command)
    except ValueError:  # its quotes were edited by hand
        words = command.split()
    return shlex.join(_MACHINE_PATH.sub(lambda found: Path(found[0]).name, word) for word in words)


def describe_limits(metadata: ModelMetadata) -> str:
    """The limits of the model and of its scores."""
    size = metadata.preprocessing.image_size
    of_training = [
        "- The scores hold for images like those of the validation data; for others they were not "
        "measured.",
        "- Probabilities are not calibrated.",
    ]
    if metadata.weights == "random":
        of_training = ["- Its weights are random: no answer of it means anything."]
    lines = [
        f"- It always answers with one of its {len(metadata.classes):,} classes, also where an "
        "image shows none of them.",
        *of_training,
        f"- Images are resized to {size}x{size} pixels: details of only a few of these are lost.",
    ]
    if metadata.dtype != "float32":
        lines.append(
            f"- Its weights are {metadata.dtype}: answers differ a little from the scored ones."
        )
    return "\n".join(lines)


def _escape_text(text: Any) -> str:
    """Text escaped for a cell of a table."""
    return str(text).replace("|", "\\|").replace("`", "'").replace("\n", " ")
