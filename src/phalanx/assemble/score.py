"""Score and predict: a checkpoint, or a fresh model, on any data."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from phalanx.assemble.dataset_summary import build_read_limits, plan_run
from phalanx.assemble.prepare import refuse_missing_weights
from phalanx.assemble.run_recorder import make_score_row
from phalanx.assemble.scorable import ScorableCheckpoint, plan_checkpoint
from phalanx.assemble.session import Session
from phalanx.config.read import Settings, merge_layers, read_flags
from phalanx.data.formats.decode import BadImage, decode
from phalanx.data.formats.image_file import read_image_file
from phalanx.data.transforms.transform import build_transform
from phalanx.engine.evaluate import Score
from phalanx.report.records import ScoreRow


def open_checkpoint(checkpoint: ScorableCheckpoint) -> Session:
    """The session of a checkpoint: its model with its weights or their average."""
    size = checkpoint.start.facts["preprocessing"]["image_size"]
    plan = replace(plan_checkpoint(checkpoint), image_size=size)
    return Session(checkpoint.settings.config, plan, start=checkpoint.start)


def open_fresh(model: str, flags: Mapping[str, str]) -> Session:
    """An untrained model, for the numbers that chance gives."""
    problems: list[str] = []
    given = read_flags({**flags, "model": model}, problems)
    return open_untrained(merge_layers([given], problems, name=model))  # no preset has a say in it


def open_untrained(settings: Settings) -> Session:
    """The model that a config would begin to train."""
    refuse_missing_weights(settings.config)
    plan, dataset = plan_run(settings)
    return Session(settings.config, plan, classes=dataset.classes)


class ScoredModel(NamedTuple):
    """A score on the validation images, and the images that could not be read."""

    row: ScoreRow
    bad_images: dict[str, str]  # name to reason


def score(session: Session, *, step: int = 0) -> ScoredModel:
    """Score a model on the validation images; the session is closed with it."""
    with session:
        feed = session.scoring_feed
        found = session.evaluate(feed.validation())
        assert isinstance(found, Score)
        return ScoredModel(make_score_row(found, session.plan, step=step), feed.bad_images())


def score_checkpoint(checkpoint: ScorableCheckpoint) -> ScoredModel:
    """Score a checkpoint on the validation images."""
    return score(open_checkpoint(checkpoint), step=checkpoint.start.facts["state"]["step"])


@dataclass(frozen=True)
class Answer:
    """What a model says of one image: its five likeliest classes, or why it cannot be read."""

    image: str
    guesses: tuple[tuple[str, float], ...]  # class and probability, likeliest first
    problem: str = ""


@torch.inference_mode()
def predict(session: Session, images: Sequence[Path]) -> Iterator[Answer]:
    """An answer for each image file, in their order."""
    size, rows = session.preprocessing.image_size, session.plan.valid_batch
    transform = build_transform(session.preprocessing.transform)
    limits = build_read_limits(session.config)
    for first in range(0, len(images), rows):
        paths = images[first : first + rows]
        pixels = np.zeros((len(paths), size, size, 3), np.uint8)
        problems = {}
        for row, path in enumerate(paths):
            try:
                data = read_image_file(path, str(path), limits)
                image = decode(
                    data,
                    str(path),
                    max_pixels=limits.max_pixels,
                    upright=session.preprocessing.exif_orientation,
                )
                transform.apply_evaluation(image, pixels[row])
            except BadImage as bad:
                problems[row] = bad.why
        logits = session.compute_logits(pixels)
        best = logits.softmax(1).topk(min(5, len(session.classes)))
        for row, path in enumerate(paths):
            guesses = zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True)
            named = tuple((session.classes[number], share) for number, share in guesses)
            yield Answer(str(path), () if row in problems else named, problems.get(row, ""))
