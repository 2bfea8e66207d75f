"""Average: the last checkpoints of a run become one, which is scored beside the newest."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from phalanx.assemble.dataset_summary import recipe_of
from phalanx.assemble.feed import normaliser_of, open_feed
from phalanx.assemble.prepare import Described, describe_checkpoint
from phalanx.assemble.score import Scorable, load_checkpoint, score_model
from phalanx.disk import remove_quietly
from phalanx.engine.checkpoint import FACTS, WEIGHTS
from phalanx.engine.checkpoint_store import (
    AVERAGE,
    list_checkpoints,
    read_files,
    step_of,
    write_named,
)
from phalanx.engine.state import hash_weights
from phalanx.engine.weight_average import average_weights, reestimate_norms
from phalanx.errors import ConfigError
from phalanx.models.weights import LAYOUT, fill
from phalanx.plan.averaging import Averaging
from phalanx.report.folder import RunFolder
from phalanx.report.records import ScoreRow
from phalanx.report.summary import AVERAGE_FILE, AverageScore, write_average_score

_Scored = tuple[ScoreRow, dict[str, str]]  # and the images that could not be read


def _write_average(newest: Described, checkpoints: Sequence[Path], how: Averaging) -> Path:
    """Put the average of checkpoints, oldest first, on their shelf; its path.

    Beside the weights it holds what the newest does, so that whatever reads a checkpoint reads it.
    """
    states = (tensors_from_bytes(read_files(path)[WEIGHTS]) for path in checkpoints)
    weights = average_weights(states, strategy=how.strategy, decay=how.decay)
    if how.norm_steps:
        weights |= _new_statistics(newest, weights, steps=how.norm_steps)
    facts = {
        **newest.facts,
        "weights_sha256": hash_weights(weights),
        "averaged": _account_of(checkpoints, how),
    }
    layout = {LAYOUT: newest.facts["norm_layout"]}
    files = {
        **read_files(newest.checkpoint),
        WEIGHTS: tensors_to_bytes(weights, metadata=layout),
        FACTS: json.dumps(facts, indent=1).encode(),
    }
    shelf = newest.checkpoint.parent
    remove_quietly(shelf.parent / AVERAGE_FILE)  # of another average
    return write_named(shelf, AVERAGE, files)


@dataclass(frozen=True, kw_only=True)
class Averaged:
    """The newest checkpoint of a run and the average that ends with it, both scored."""

    account: dict[str, Any]
    paths: tuple[Path, Path]
    scores: tuple[_Scored, _Scored]


def average_run(folder: RunFolder, how: Averaging, flags: Mapping[str, str]) -> Averaged:
    """Average the last checkpoints of a run, and keep what came of it beside them."""
    found = list_checkpoints(folder.checkpoints)
    checkpoints = found[-how.count_among(len(found), where=folder.checkpoints) :]
    newest = describe_checkpoint(checkpoints[-1], flags)
    average = describe_checkpoint(_write_average(newest, checkpoints, how), flags)
    scores = score_model(load_checkpoint(newest)), score_model(load_checkpoint(average))
    account = _account_of(checkpoints, how)
    both = AverageScore(account=account, newest=scores[0][0], average=scores[1][0])
    write_average_score(folder.path, both)
    return Averaged(account=account, paths=(newest.checkpoint, average.checkpoint), scores=scores)


def _account_of(checkpoints: Sequence[Path], how: Averaging) -> dict[str, Any]:
    """What was averaged and how, as plain values."""
    return {**asdict(how), "count": len(checkpoints), "steps": [step_of(c) for c in checkpoints]}


def _new_statistics(
    newest: Described, weights: dict[str, Tensor], *, steps: int
) -> dict[str, Tensor]:
    """The statistics that averaged weights give the batch norms, under the names of the buffers."""
    scorable = load_checkpoint(newest)
    fill(scorable.model, weights, where=str(newest.checkpoint))
    images = _training_images(scorable, steps=steps)
    names = reestimate_norms(scorable.model, images, precision=scorable.rule.precision)
    if not names:
        raise ConfigError(
            f"--reestimate-norms {steps}: {scorable.config.model.model} as it was trained has no "
            "batch norm, so there are no statistics; leave the option away"
        )
    found = scorable.model.state_dict()
    return {name: found[name].cpu().contiguous().to(weights[name].dtype) for name in names}


def _training_images(scorable: Scorable, *, steps: int) -> Iterator[Tensor]:
    """The images of the last steps of training, augmented as they were, in passes as they came.

    The last, because a run whose images grow has them at full size only there.
    """
    config, plan = scorable.config, scorable.plan
    normaliser = normaliser_of(scorable.preprocessing, scorable.device, config)
    with open_feed(recipe_of(config, plan), plan, normaliser, config) as feed:
        for passes in feed.batches_from(plan.total_steps - steps):
            yield from (batch.images for batch in passes)
