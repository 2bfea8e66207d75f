"""Average: the last checkpoints of a run become one, which is scored beside the newest."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from phalanx.assemble.feed import normaliser_of, open_feed
from phalanx.assemble.prepare import Described
from phalanx.assemble.score import Scorable, load_checkpoint
from phalanx.assemble.view import recipe_of
from phalanx.engine.average import average_weights, reestimate_norms
from phalanx.engine.checkpoint import FACTS, WEIGHTS
from phalanx.engine.shelf import AVERAGE, read_files, step_of, write_named
from phalanx.engine.state import hash_weights
from phalanx.errors import ConfigError
from phalanx.models.weights import LAYOUT, fill
from phalanx.plan.averaging import Averaging


def write_average(newest: Described, checkpoints: Sequence[Path], how: Averaging) -> Path:
    """Put the average of checkpoints, oldest first, on their shelf; its path.

    Beside the weights it holds what the newest does, so that whatever reads a checkpoint reads it.
    """
    states = (tensors_from_bytes(read_files(path)[WEIGHTS]) for path in checkpoints)
    weights = average_weights(states, strategy=how.strategy, decay=how.decay)
    if how.norm_steps:
        weights |= new_statistics(newest, weights, steps=how.norm_steps)
    facts = {
        **newest.facts,
        "weights_sha256": hash_weights(weights),
        "averaged": account_of(checkpoints, how),
    }
    layout = {LAYOUT: newest.facts["norm_layout"]}
    files = {
        **read_files(newest.checkpoint),
        WEIGHTS: tensors_to_bytes(weights, metadata=layout),
        FACTS: json.dumps(facts, indent=1).encode(),
    }
    return write_named(newest.checkpoint.parent, AVERAGE, files)


def account_of(checkpoints: Sequence[Path], how: Averaging) -> dict[str, Any]:
    """What was averaged and how, as plain values."""
    return {**asdict(how), "count": len(checkpoints), "steps": [step_of(c) for c in checkpoints]}


def new_statistics(
    newest: Described, weights: dict[str, Tensor], *, steps: int
) -> dict[str, Tensor]:
    """The statistics that averaged weights give the batch norms, under the names of the buffers."""
    scorable = load_checkpoint(newest)
    fill(scorable.model, weights, where=str(newest.checkpoint))
    images = training_images(scorable, steps=steps)
    names = reestimate_norms(scorable.model, images, precision=scorable.rule.precision)
    if not names:
        raise ConfigError(
            f"--reestimate-norms {steps}: {scorable.config.model.model} as it was trained has no "
            "batch norm, so there are no statistics; leave the option away"
        )
    found = scorable.model.state_dict()
    return {name: found[name].cpu().contiguous().to(weights[name].dtype) for name in names}


def training_images(scorable: Scorable, *, steps: int) -> Iterator[Tensor]:
    """The images of the last steps of training, augmented as they were, in passes as they came.

    The last, because a run whose images grow has them at full size only there.
    """
    config, plan = scorable.config, scorable.plan
    normaliser = normaliser_of(scorable.preprocessing, scorable.device, config)
    with open_feed(recipe_of(config, plan), plan, normaliser, config) as feed:
        for passes in feed.batches_from(plan.total_steps - steps):
            yield from (batch.images for batch in passes)
