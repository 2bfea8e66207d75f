"""Averages the last checkpoints of a run into one, and scores it together with the newest."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load as tensors_from_bytes
from torch import Tensor

from phalanx.assemble.score import ScoredModel, open_checkpoint, score_target
from phalanx.assemble.scoring_target import (
    ScorableCheckpoint,
    find_checkpoint,
    list_consecutive_checkpoints,
    read_checkpoint,
)
from phalanx.catalog.variant import NORM_LAYOUT_KEY
from phalanx.disk import remove_quietly
from phalanx.engine.checkpoint_store import (
    AVERAGE_NAME,
    FACTS,
    FORMAT,
    REPLICAS,
    WEIGHTS,
    FileContent,
    parse_step,
    read_files,
    write_checkpoint_as,
)
from phalanx.engine.state import hash_weights
from phalanx.engine.tensor_bytes import iterate_safetensors
from phalanx.engine.weight_average import average_weights, reestimate_norms
from phalanx.errors import ConfigError
from phalanx.models.weights import load_tensors
from phalanx.plan.averaging import Averaging
from phalanx.plan.plan import scores_anything
from phalanx.report.folder import RunFolder
from phalanx.report.summary import AVERAGE_FILE, AverageScore, write_average_score


@dataclass(frozen=True, kw_only=True)
class AveragedRun:
    """The newest checkpoint of a run and the average of the last ones, with their scores."""

    account: dict[str, Any]
    paths: tuple[Path, Path]
    scores: tuple[ScoredModel, ...]  # of both; empty for a run that scores nothing


def average_run(folder: RunFolder, averaging: Averaging, flags: Mapping[str, str]) -> AveragedRun:
    """Average the last checkpoints of a run, and store the average and both scores in the run.

    Nothing is scored for a run with --validation-mode none, which may have no validation images.
    """
    newest = read_checkpoint(find_checkpoint(folder.path), flags)
    found = list_consecutive_checkpoints(folder.checkpoints, newest)
    checkpoints = found[-averaging.count_among(len(found), where=folder.checkpoints) :]
    steps = [parse_step(checkpoint) for checkpoint in checkpoints]
    account = {**asdict(averaging), "count": len(checkpoints), "steps": steps}
    average = read_checkpoint(_write_average(newest, checkpoints, averaging, account), flags)
    scores: tuple[ScoredModel, ...] = ()
    if scores_anything(newest.settings.config):
        scores = score_target(newest), score_target(average)
        both = AverageScore(account=account, newest=scores[0].row, average=scores[1].row)
        write_average_score(folder.path, both)
    paths = newest.start.checkpoint, average.start.checkpoint
    return AveragedRun(account=account, paths=paths, scores=scores)


def _write_average(
    newest: ScorableCheckpoint,
    checkpoints: Sequence[Path],
    averaging: Averaging,
    account: dict[str, Any],
) -> Path:
    """Write the average of checkpoints, oldest first, into their folder; returns its path.

    Apart from the weights it holds the newest's files, so that it can be read as a checkpoint.
    """
    states = (tensors_from_bytes(read_files(path, WEIGHTS)[WEIGHTS]) for path in checkpoints)
    weights = average_weights(states, strategy=averaging.strategy, decay=averaging.decay)
    if averaging.norm_steps:
        weights |= _reestimate_statistics(newest, weights, steps=averaging.norm_steps)
    checkpoint, facts = newest.start.checkpoint, newest.start.facts
    sha256 = hash_weights(weights)
    facts_now = {**facts, "format": FORMAT, "weights_sha256": sha256, "averaged": account}
    others = read_files(checkpoint)
    others.pop(REPLICAS, None)  # those of the newest; a fork's replicas start from the average
    files: dict[str, FileContent] = {
        **others,
        WEIGHTS: iterate_safetensors(weights, {NORM_LAYOUT_KEY: facts["norm_layout"]}),
        FACTS: json.dumps(facts_now, indent=1).encode(),
    }
    remove_quietly(checkpoint.parent.parent / AVERAGE_FILE)  # the scores of an earlier average
    return write_checkpoint_as(checkpoint.parent, AVERAGE_NAME, files)


def _reestimate_statistics(
    newest: ScorableCheckpoint, weights: dict[str, Tensor], *, steps: int
) -> dict[str, Tensor]:
    """The batch-norm statistics of a model with averaged weights, by name of the buffer."""
    with open_checkpoint(newest) as session:
        model = session.model
        load_tensors(model, weights, where=str(newest.start.checkpoint))
        # the last steps: in a run with growing images, only these have the full size
        batches = session.feed.batches_from(session.plan.total_steps - steps)
        images = (batch.images for passes in batches for batch in passes)
        names = reestimate_norms(model, images, autocast=session.options.autocast)
    if not names:
        raise ConfigError(
            f"--reestimate-norms {steps}: {session.config.model.model} as it was trained has no "
            "batch norm, so there are no statistics; leave the option out"
        )
    found = model.state_dict()
    return {name: found[name].cpu().contiguous().to(weights[name].dtype) for name in names}
