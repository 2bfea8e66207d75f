"""Checkpoints that a model is scored from: found, read and planned, without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.assemble.dataset_summary import choose_normalization
from phalanx.assemble.prepare import StartingPoint
from phalanx.config.read import Settings, read_stored_settings
from phalanx.data.transforms.transform import CENTRE_SHARE
from phalanx.engine.checkpoint_store import (
    AVERAGE_WEIGHTS,
    list_checkpoints,
    newest_checkpoint,
    read_facts,
    step_in_name,
)
from phalanx.errors import CheckpointError
from phalanx.plan.averaging import count_consecutive
from phalanx.plan.plan import DatasetCounts, MachineChoice, Plan, choose_machine, make_plan
from phalanx.report.folder import open_run


@dataclass(frozen=True, kw_only=True)
class ScorableCheckpoint:
    """A checkpoint's own account of itself, and the options it is to be scored with."""

    start: StartingPoint
    settings: Settings
    machine: MachineChoice


def find_checkpoint(path: Path) -> Path:
    """The checkpoint a path stands for: itself, or the newest one of a run."""
    if (path / "manifest.json").exists():
        return path.resolve()
    run = open_run(path)
    checkpoint = newest_checkpoint(run.checkpoints)
    if checkpoint is None:
        raise CheckpointError(
            f"{path}: the run has no checkpoint; it was trained with --ckpts-per-epoch 0, or "
            f"goes on with: phalanx train --resume {path}{run.plugin_flag}"
        )
    return checkpoint


def read_checkpoint(path: Path, flags: Mapping[str, str]) -> ScorableCheckpoint:
    """The checkpoint a path stands for, or the average in one, checked without torch."""
    averaged = path.name == AVERAGE_WEIGHTS and path.is_file()
    checkpoint = find_checkpoint(path.parent if averaged else path)
    facts = read_facts(checkpoint)
    settings = read_stored_settings(
        facts["config"], flags=flags, where=str(checkpoint), name=facts["run"]
    )
    _refuse_other_preprocessing(settings, facts, checkpoint)
    start = StartingPoint(
        checkpoint=checkpoint, facts=facts, use="score average" if averaged else "score"
    )
    return ScorableCheckpoint(
        start=start, settings=settings, machine=choose_machine(settings.config)
    )


def _refuse_other_preprocessing(settings: Settings, facts: dict[str, Any], where: Path) -> None:
    """A model sees images as it was trained to; scored otherwise it is not the same model."""
    config, trained = settings.config, facts["preprocessing"]
    size = trained["image_size"]
    asked_and_trained = {
        "image-size": (config.data.image_size or size, size),
        "eval-crop": (config.augment.eval_crop, trained.get("eval_crop", CENTRE_SHARE)),
        "normalization": (choose_normalization(config), trained.get("normalization", "mean-std")),
        "exif-orientation": (config.data.exif_orientation, trained.get("exif_orientation", False)),
    }
    for name, (asked, before) in asked_and_trained.items():
        if asked != before:
            raise CheckpointError(
                f"--{name} {_spell(asked)}: {where} was trained with {_spell(before)}, and images "
                "are prepared for it as they were then; leave the option away, or train with it: "
                "phalanx train --fork"
            )


def _spell(value: object) -> str:
    """A value as a flag spells it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def plan_checkpoint(checkpoint: ScorableCheckpoint) -> Plan:
    """The plan of the run that a checkpoint was made by, with the options it is scored with."""
    facts = checkpoint.start.facts
    counts = DatasetCounts(
        train_images=facts["plan"]["train_images"],
        valid_images=facts["plan"]["valid_images"],
        classes=len(facts["classes"]),
    )
    return make_plan(checkpoint.settings.config, counts, checkpoint.machine)


def list_consecutive(folder: Path, newest: ScorableCheckpoint) -> list[Path]:
    """The checkpoints of a folder up to the newest, oldest first, without any that was kept longer.

    The best one is kept whatever its age; an average of it and the last ones is of no stretch.
    """
    found = list_checkpoints(folder)
    save = plan_checkpoint(newest).save
    return found[-count_consecutive([step_in_name(path) for path in found], save) :]
