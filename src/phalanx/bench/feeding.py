"""How fast images come: each stage alone, all together, and what the model would eat."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import cycle
from time import perf_counter
from typing import Any

import numpy as np
import torch

from phalanx.assemble.build import build_state, prepare_torch, step_rule
from phalanx.assemble.feed import SyntheticFeed, normaliser_of
from phalanx.assemble.view import plan_of, preprocessing_of, recipe_of
from phalanx.config.read import Settings
from phalanx.data.batches import Findings, Reader, open_image
from phalanx.data.loader import Loader
from phalanx.data.pixels import BadImage, Picture, pixels_of
from phalanx.engine.step import train_step
from phalanx.errors import ConfigError
from phalanx.plan.machine import count_cores

SAMPLES = 256  # images that the stages are timed on, spread over the set
WARM_UP_BATCHES = 4


@dataclass(frozen=True)
class Rate:
    """How many images a second something manages."""

    stage: str
    images_per_second: float
    what: str


@dataclass(frozen=True, kw_only=True)
class Feeding:
    """What was measured, and what it means."""

    stages: list[Rate]  # on one core, each alone
    one_worker: float  # images/s on the device, normalised, with one process
    workers: int
    all_workers: float  # with all of them
    model: str
    eaten: float  # images/s the model trains on this device
    device: str

    @property
    def scaling(self) -> float:
        """What each of several workers does of what one alone does."""
        return self.all_workers / (self.one_worker * self.workers)

    @property
    def enough(self) -> bool:
        """Whether the data keeps up with the model."""
        return self.all_workers >= self.eaten

    def verdict(self) -> str:
        """Who waits for whom, and what would help."""
        share = self.all_workers / self.eaten
        head = f"{self.all_workers:,.0f} images/s come, {self.model} eats {self.eaten:,.0f}"
        if self.enough:
            return f"{head}: the model is the limit, data comes {share:.1f} times as fast"
        slowest = min(self.stages[:3], key=lambda rate: rate.images_per_second)
        return f"{head}: data is the limit, {slowest.stage} above all; {ADVICE[slowest.stage]}"

    def facts(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {**asdict(self), "scaling": self.scaling, "verdict": self.verdict()}


ADVICE = {
    "read": "a faster disk, or `phalanx data build --to packed`, which reads one file",
    "decode": "more --workers, or `phalanx data build --to packed --short-side 256`",
    "augment": "more --workers, or fewer augmentations",
}


def measure_feeding(settings: Settings, *, seconds: float) -> Feeding:
    """Time the stages and the whole; the model on made-up images of the same size."""
    plan, _ = plan_of(settings)
    config = settings.config
    if config.data.data == "synthetic":
        raise ConfigError("--data synthetic: it is made on the device, nothing is fed")
    recipe, device = recipe_of(config, plan), prepare_torch(plan)
    normaliser = normaliser_of(preprocessing_of(config, plan), device)
    workers = config.data.workers or count_cores()
    reader = Reader(recipe, "train", findings=Findings(), max_bad=plan.max_bad)
    batch = np.zeros((plan.micro_batch, plan.image_size, plan.image_size, 3), np.uint8)

    def loaded(count: int) -> float:
        with Loader(recipe, workers=count, max_bad=plan.max_bad) as loader:
            steps = loader.steps_from(0, plan.total_steps, micro_batch=plan.global_batch)
            on_device = (normaliser.images(batch.pixels) for (batch,) in steps)
            return rate_of_walk(on_device, plan.global_batch, seconds)

    def copy() -> int:
        normaliser.images(batch)
        synchronise(device)
        return len(batch)

    return Feeding(
        stages=[
            *time_stages(reader, seconds / 4),
            Rate("copy", rate_of(copy, seconds / 4), f"bytes to {device}, normalised"),
        ],
        one_worker=loaded(1),
        workers=workers,
        all_workers=loaded(workers),
        model=config.model.model,
        eaten=appetite(settings, seconds),
        device=str(device),
    )


def time_stages(reader: Reader, seconds: float) -> Iterator[Rate]:
    """Reading, decoding and augmenting, on this core."""
    source = reader.source
    spread = np.linspace(0, len(source) - 1, min(SAMPLES, len(source))).astype(int).tolist()
    pictures = []
    for index in spread:
        try:
            pictures.append(open_image(source, index))
            pixels_of(pictures[-1])
        except BadImage:
            pictures = pictures[: len(pictures) - 1]
    draws = reader.transform.draw(0, np.arange(len(pictures)))
    out = np.empty((1, reader.recipe.image_size, reader.recipe.image_size, 3), np.uint8)
    plain = [pixels_of(picture) for picture in pictures]
    read, opened, arrays = cycle(spread), cycle(pictures), cycle(zip(plain, draws, strict=True))
    whole = cycle(zip(pictures, draws, strict=True))

    def augment() -> int:
        image, numbers = next(arrays)
        reader.transform.train([image], [numbers], out, None)
        return 1

    def as_trained() -> int:
        image, numbers = next(whole)
        reader.transform.train([image], [numbers], out, None)
        return 1

    def fetch() -> int:
        open_image(source, next(read))
        return 1

    def decode() -> int:
        pixels_of(next(opened))
        return 1

    yield Rate("read", rate_of(fetch, seconds), "bytes of an image from the disk or its cache")
    if isinstance(pictures[0], Picture):
        yield Rate("decode", rate_of(decode, seconds), "the whole image")
    yield Rate("augment", rate_of(augment, seconds), "crop, resize and the rest, of decoded images")
    yield Rate("both", rate_of(as_trained, seconds), "decode no more than needed, and augment")


def rate_of(work: Callable[[], int], seconds: float) -> float:
    """Images a second of work that says how many it did."""
    work()
    begin, images = perf_counter(), 0
    while perf_counter() - begin < seconds:
        images += work()
    return images / (perf_counter() - begin)


def rate_of_walk(steps: Iterator[Any], images: int, seconds: float) -> float:
    """Images a second of a loader, its first batches aside."""
    for _ in range(WARM_UP_BATCHES):
        next(steps, None)
    begin, done = perf_counter(), 0
    for _ in steps:
        done += images
        if perf_counter() - begin > seconds:
            break
    return done / (perf_counter() - begin)


def appetite(settings: Settings, seconds: float) -> float:
    """Images a second that the model trains on images that are there."""
    plan, _ = plan_of(settings)
    device = prepare_torch(plan)
    state = build_state(settings.config, plan, device)
    rule = step_rule(settings.config, plan, device)
    passes = next(SyntheticFeed(plan, device, seed=0).batches_from(0))

    def step() -> int:
        train_step(state, passes, 0.0, rule=rule)
        synchronise(device)
        return plan.global_batch

    step()
    return rate_of(step, seconds)


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
