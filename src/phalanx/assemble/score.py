"""Scores a checkpoint or an untrained model, and predicts the classes of images."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.assemble.build import build_normaliser
from phalanx.assemble.dataset_summary import build_read_limits
from phalanx.assemble.prepare import refuse_missing_weights
from phalanx.assemble.rank_launch import digest_values
from phalanx.assemble.run_recorder import make_score_row
from phalanx.assemble.scoring_target import (
    ScorableCheckpoint,
    Target,
    adapt_settings_to_scoring,
    plan_checkpoint,
    plan_untrained_model,
)
from phalanx.assemble.session import Session
from phalanx.assemble.torch_setup import apply_torch_settings, preserve_torch_settings
from phalanx.config.read import Settings
from phalanx.data.formats.decode import BadImage
from phalanx.data.loading.image_inputs import ImageInputs, NamedImage, collect_images
from phalanx.data.loading.trained_images import describe_trained_images
from phalanx.data.transforms.transform import build_transform
from phalanx.engine.checkpoint import read_image_checksums
from phalanx.engine.evaluate import Score, ValidBatch
from phalanx.engine.state import hash_weights
from phalanx.errors import DataError
from phalanx.parallel.ranks import Ranks
from phalanx.parallel.watchdog import Watchdog
from phalanx.report.records import ScoreRow


def open_checkpoint(
    checkpoint: ScorableCheckpoint, ranks: Ranks | None = None, *, random_images: int | None = None
) -> Session:
    """The session of a checkpoint: its model with its weights or their average.

    random_images: the number of validation images, for data without a length of its own.
    """
    size = checkpoint.start.facts["preprocessing"]["image_size"]
    plan = replace(plan_checkpoint(checkpoint), image_size=size)
    plan = replace(plan, valid_images=random_images or plan.valid_images)
    return Session(checkpoint.settings.config, plan, start=checkpoint.start, ranks=ranks)


def open_untrained_model(
    settings: Settings,
    ranks: Ranks | None = None,
    *,
    random_images: int | None = None,
    without_data: bool = False,
) -> Session:
    """The session of a config's untrained model; random_images: as for `open_checkpoint`.

    without_data: as for `plan_untrained_model`; classes without known names are numbered.
    """
    refuse_missing_weights(settings.config)
    plan, dataset = plan_untrained_model(settings, without_data=without_data)
    plan = replace(plan, valid_images=random_images or plan.valid_images)
    config = adapt_settings_to_scoring(settings).config
    classes = dataset.classes or [f"class {at}" for at in range(dataset.counts.classes)]
    return Session(config, plan, classes=classes, ranks=ranks)


def open_target(
    target: Target, ranks: Ranks | None, *, random_images: int | None = None
) -> Session:
    """The session of a checkpoint or an untrained model."""
    if isinstance(target, Settings):
        return open_untrained_model(target, ranks, random_images=random_images)
    return open_checkpoint(target, ranks, random_images=random_images)


class ScoredModel(NamedTuple):
    """A score on the validation images, and the images that could not be read."""

    row: ScoreRow
    bad_images: dict[str, str]  # name to reason
    rates: tuple[float, ...]  # images/s of each pass, including loading
    notes: tuple[str, ...] = ()

    @property
    def images_per_second(self) -> float:
        """The median over the passes, without the first, which warms up, if there are others."""
        return median(self.rates[1:] or self.rates)


def score_target(target: Target, *, passes: int = 1, ranks: Ranks | None = None) -> ScoredModel:
    """Score a checkpoint or an untrained model on the validation images.

    passes: how often to score all images, more than once only to measure the speed. With several
    ranks, each scores its share, and all get the whole score.
    """
    step = 0 if isinstance(target, Settings) else target.start.facts["state"]["step"]
    done = 0

    def watched_batches() -> Iterator[ValidBatch]:
        nonlocal done
        for batch in feed.validation_batches():
            done += 1
            beat()
            yield batch

    def describe() -> str:
        return f"its share of a score, after {done:,} of its batches"

    # read first: a run that is still training may delete the checkpoint in the meantime
    known = {} if isinstance(target, Settings) else read_image_checksums(target.start.checkpoint)
    with open_target(target, ranks) as session:
        feed, rates, gather = session.scoring_feed, [], session.rank_context.gather
        with watch_ranks(session, describe) as beat:
            _refuse_differences(session)
            for _ in range(passes):
                gather(None)  # ranks start together
                began = time.perf_counter()
                found = session.evaluate(watched_batches())
                assert isinstance(found, Score)
                slowest = max(gather(time.perf_counter() - began))
                rates.append(found.scored / slowest)
                row = make_score_row(found, session.plan, step=step)
            feed.exchange_problems()
            scored = feed.gather_scored_checksums()
        notes = filter(None, (*session.notes, describe_trained_images(known, scored)))
        return ScoredModel(row, feed.bad_images(), tuple(rates), tuple(notes))


def _refuse_differences(session: Session) -> None:
    """Raise unless weights, images and options are the same on all ranks."""
    if session.rank_context.ranks is not None:
        values = {
            "weights": hash_weights(session.gather_weights()),
            "validation images": session.scoring_feed.digest_labels(),
        }
        session.rank_context.ranks.refuse_differences(digest_values(session.config, values))


@contextmanager
def watch_ranks(session: Session, describe: Callable[[], str]) -> Iterator[Callable[[], None]]:
    """Context that ends the process if other ranks delay it for too long; yields a heartbeat.

    describe: what it is doing, for the message.
    """
    ranks = session.rank_context.ranks
    if ranks is None:
        yield lambda: None
        return
    watchdog = Watchdog(
        session.config.machine.rank_timeout,
        describe,
        rank=ranks.rank,
        ranks=ranks.size,
        report=None,
    )
    with watchdog:
        yield watchdog.beat


@dataclass(frozen=True)
class Answer:
    """The prediction for one image: the five likeliest classes, or why it cannot be read."""

    image: str
    guesses: tuple[tuple[str, float], ...]  # class and probability, likeliest first
    problem: str = ""

    @property
    def label(self) -> str:
        """The likeliest class; raises DataError for an image that cannot be read."""
        return self._best[0]

    @property
    def probability(self) -> float:
        """The probability of the likeliest class; DataError for an image that cannot be read."""
        return self._best[1]

    @property
    def _best(self) -> tuple[str, float]:
        if self.problem:
            raise DataError(f"{self.image}: {self.problem}")
        return self.guesses[0]


def predict(session: Session, images: Sequence[NamedImage]) -> Iterator[Answer]:
    """An Answer for each image, in order."""
    for first in range(0, len(images), session.plan.valid_batch):
        some = images[first : first + session.plan.valid_batch]
        pixels, problems = read_pixels(session, some)
        with torch.inference_mode():
            logits = session.compute_logits(pixels)
            best = logits.softmax(1).topk(min(5, len(session.classes)))
        for row, image in enumerate(some):
            guesses = zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True)
            named = tuple((session.classes[number], share) for number, share in guesses)
            yield Answer(image.name, () if row in problems else named, problems.get(row, ""))


def read_pixels(
    session: Session, images: Sequence[NamedImage]
) -> tuple[NDArray[np.uint8], dict[int, str]]:
    """The images cropped to the model's size, and by row why an image cannot be read."""
    size, limits = session.preprocessing.image_size, build_read_limits(session.config)
    transform = build_transform(session.preprocessing.transform)
    pixels = np.zeros((len(images), size, size, 3), np.uint8)
    problems = {}
    for row, image in enumerate(images):
        try:
            found = image.read(limits, upright=session.preprocessing.exif_orientation)
            transform.apply_evaluation(found, pixels[row])
        except BadImage as bad:
            problems[row] = bad.reason
    return pixels, problems


class LoadedModel:
    """A trained model, ready to use: call it on images to get an Answer for each.

    module: the torch module, in evaluation mode. classes: their names, in the order of its
    outputs. preprocessing: how images become its input. checkpoint and step: where its weights
    come from.
    """

    def __init__(self, checkpoint: ScorableCheckpoint) -> None:
        self._session = open_checkpoint(checkpoint)
        self.module = self._session.model.eval()
        self.classes = self._session.classes
        self.preprocessing = self._session.preprocessing
        self.checkpoint: Path = checkpoint.start.path
        self.step: int = checkpoint.start.facts["state"]["step"]

    def __repr__(self) -> str:
        size, name = self.preprocessing.image_size, self._session.config.model.model
        return f"<{name}, {len(self.classes)} classes, {size}x{size}, from {self.checkpoint}>"

    def __call__(self, images: ImageInputs) -> list[Answer]:
        """An Answer for each image of a path, a folder, a Pillow image, an array, or a list.

        If a single image cannot be read, raises DataError; among several, its Answer says why.
        """
        named = collect_images(images)
        with preserve_torch_settings():
            apply_torch_settings(self._session.plan)
            answers = list(predict(self._session, named))
        if len(answers) == 1 and answers[0].problem:
            raise DataError(f"{answers[0].image}: {answers[0].problem}")
        return answers

    def preprocess(self, images: ImageInputs) -> Tensor:
        """The images as the module's input, [N, 3, size, size]; DataError if one cannot be read."""
        named = collect_images(images)
        pixels, problems = read_pixels(self._session, named)
        for row, problem in problems.items():
            raise DataError(f"{named[row].name}: {problem}")
        return build_normaliser(self.preprocessing, self._session.device)(pixels)
