"""The checkpoints at the end of a run that follow one another, without torch."""

from pathlib import Path

from phalanx.assemble.prepare import ScorableCheckpoint
from phalanx.engine.checkpoint_store import list_checkpoints, step_in_name
from phalanx.plan.averaging import count_consecutive
from phalanx.plan.plan import DatasetCounts, Plan, make_plan


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
