"""Score and answer: a checkpoint, several, or a fresh model, on any data."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from phalanx.assemble.build import (
    begin_with_weights,
    build_network,
    prepare_torch,
    step_rule,
)
from phalanx.assemble.dataset_summary import Preprocessing, plan_of, preprocessing_of, recipe_of
from phalanx.assemble.feed import Feed, LoadedFeed, normaliser_of, open_feed
from phalanx.assemble.prepare import Described, refuse_missing_weights
from phalanx.assemble.watch import score_row
from phalanx.config.read import Settings, merge_layers, read_flags
from phalanx.config.schema import Config
from phalanx.data.formats.decode import BadImage, decode
from phalanx.data.loading.gpu_decode import gpu_decode_problem
from phalanx.data.transforms.transform import build_transform
from phalanx.engine.checkpoint import WEIGHTS, load_weights
from phalanx.engine.checkpoint_store import AVERAGES, read_files
from phalanx.engine.evaluate import Score, evaluate
from phalanx.engine.step import StepRule, answer_to
from phalanx.errors import DataError
from phalanx.plan.plan import DatasetCounts, Plan, make_plan
from phalanx.report.records import ScoreRow


@dataclass(frozen=True, kw_only=True)
class Scorable:
    """A model that can answer, with what it must be given."""

    model: nn.Module
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    config: Config
    plan: Plan
    device: torch.device
    step: int

    @property
    def rule(self) -> StepRule:
        """The precision it answers in."""
        return step_rule(self.config, self.plan, self.device)


def load_checkpoint(described: Described) -> Scorable:
    """The model of a checkpoint, with its weights or their average."""
    facts, checkpoint = described.facts, described.checkpoint
    config, classes = described.settings.config, tuple(facts["classes"])
    counts = DatasetCounts(
        train_images=facts["plan"]["train_images"],
        valid_images=facts["plan"]["valid_images"],
        classes=len(classes),
    )
    preprocessing = Preprocessing(**facts["preprocessing"])
    plan = make_plan(config, counts, described.chosen)
    plan = replace(plan, image_size=preprocessing.image_size)
    device = prepare_torch(plan)
    model = build_network(config, plan, device)
    file = AVERAGES if described.averaged else WEIGHTS
    load_weights(model, read_files(checkpoint)[file], where=checkpoint / file)
    return Scorable(
        model=model,
        classes=classes,
        preprocessing=preprocessing,
        config=config,
        plan=plan,
        device=device,
        step=facts["state"]["step"],
    )


def build_fresh(model: str, flags: Mapping[str, str]) -> Scorable:
    """An untrained model, for the numbers that chance gives."""
    problems: list[str] = []
    given = read_flags({**flags, "model": model}, problems)
    return build_untrained(merge_layers([given], problems, name=model))  # no preset has a say in it


def build_untrained(settings: Settings) -> Scorable:
    """The model that a config would begin to train."""
    config = settings.config
    refuse_missing_weights(config)
    plan, view = plan_of(settings)
    device = prepare_torch(plan)
    network = build_network(config, plan, device)
    begin_with_weights(network, config)
    return Scorable(
        model=network,
        classes=view.classes,
        preprocessing=preprocessing_of(config, plan),
        config=config,
        plan=plan,
        device=device,
        step=0,
    )


def score_model(scorable: Scorable) -> tuple[ScoreRow, dict[str, str]]:
    """The score on the validation images, and the images that could not be read."""
    with _validation_feed(scorable) as feed:
        score = evaluate(scorable.model, feed.validation(), rule=scorable.rule)
        assert isinstance(score, Score)
        row = score_row(score, step=scorable.step, epoch=scorable.plan.epoch_at(scorable.step))
        return row, feed.bad_images()


@contextmanager
def _validation_feed(scorable: Scorable) -> Iterator[Feed]:
    """The validation images, preprocessed as the model was trained, labelled as it counts."""
    config, plan, preprocessing = _for_scoring(scorable), scorable.plan, scorable.preprocessing
    recipe = replace(
        recipe_of(config, plan),
        order=None,
        image_size=preprocessing.image_size,
        treatment=preprocessing.treatment,
    )
    normaliser = normaliser_of(preprocessing, scorable.device, config)
    with open_feed(recipe, plan, normaliser, config) as feed:
        if isinstance(feed, LoadedFeed):
            feed.relabel(_match_classes(feed.loader.source("valid").classes, scorable.classes))
        yield feed


def _for_scoring(scorable: Scorable) -> Config:
    """The config without what serves many epochs, or what this device cannot do."""
    data = scorable.config.data
    decodes = data.gpu_decode and not gpu_decode_problem(scorable.device)
    changes = {"gpu_decode": decodes, "keep_on_device": False, "dataset_cache": False}
    return scorable.config.model_copy(update={"data": data.model_copy(update=changes)})


def _match_classes(found: Sequence[str], known: Sequence[str]) -> NDArray[np.int64]:
    """For each class of some data, its number in the model; DataError for one it never learnt."""
    strange = [name for name in found if name not in known]
    if strange:
        raise DataError(
            f"the data has classes the model never learnt: {', '.join(strange[:5])}; "
            f"it knows {', '.join(known[:10])}{'...' if len(known) > 10 else ''}"
        )
    return np.array([list(known).index(name) for name in found], np.int64)


@dataclass(frozen=True)
class Answer:
    """What a model says of one image: its five likeliest classes, or why it cannot be read."""

    image: str
    guesses: tuple[tuple[str, float], ...]  # class and probability, likeliest first
    problem: str = ""


def predict(scorable: Scorable, images: Sequence[Path]) -> Iterator[Answer]:
    """An answer for each image file, in their order."""
    size = scorable.plan.valid_batch
    for first in range(0, len(images), size):
        yield from _answer_some(scorable, images[first : first + size])


@torch.inference_mode()
def _answer_some(scorable: Scorable, images: Sequence[Path]) -> Iterator[Answer]:
    """Answers for as many images as fit in one pass."""
    edge = scorable.preprocessing.image_size
    transform = build_transform(scorable.preprocessing.treatment)
    pixels = np.zeros((len(images), edge, edge, 3), np.uint8)
    problems = {}
    for row, path in enumerate(images):
        try:
            transform.evaluate(decode(path.read_bytes(), str(path)), pixels[row])
        except BadImage as bad:
            problems[row] = bad.why
        except OSError as error:
            problems[row] = error.strerror or str(error)
    scorable.model.eval()
    inputs = normaliser_of(scorable.preprocessing, scorable.device).images(pixels)
    logits = answer_to(scorable.model, inputs, rule=scorable.rule)
    best = logits.softmax(1).topk(min(5, len(scorable.classes)))
    for row, path in enumerate(images):
        guesses = zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True)
        named = tuple((scorable.classes[number], share) for number, share in guesses)
        yield Answer(str(path), () if row in problems else named, problems.get(row, ""))
