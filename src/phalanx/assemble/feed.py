"""Batches on the device: from the loader, or made up there once for synthetic data."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.assemble.view import Preprocessing
from phalanx.data.batches import Batch, Recipe
from phalanx.data.device import Normaliser
from phalanx.data.loader import Loader
from phalanx.data.transforms import build_transform
from phalanx.engine.evaluate import ValidBatch
from phalanx.engine.step import MicroBatch
from phalanx.plan.plan import Plan


class LoadedFeed:
    """Images that a loader reads."""

    def __init__(self, loader: Loader, plan: Plan, normaliser: Normaliser) -> None:
        self.loader, self._plan, self._normaliser = loader, plan, normaliser
        self._remap: NDArray[np.int64] | None = None

    def relabel(self, numbers: NDArray[np.int64]) -> None:
        """Score against another numbering of the classes: label i counts as numbers[i]."""
        self._remap = numbers

    def batches_from(self, step: int) -> Iterator[list[MicroBatch]]:
        """The passes of each step from that one on."""
        steps = self.loader.steps_from(
            step, self._plan.total_steps, micro_batch=self._plan.micro_batch
        )
        for passes in steps:
            yield [self._on_device(batch) for batch in passes]

    def _on_device(self, batch: Batch) -> MicroBatch:
        images = self._normaliser.images(batch.pixels)
        first = int(batch.positions[0])
        return MicroBatch(images, self._normaliser.integers(batch.labels), first)

    def validation(self) -> Iterator[ValidBatch]:
        """Every validation image once."""
        for batch in self.loader.evaluation(self._plan.valid_batch):
            labels = batch.labels if self._remap is None else self._remap[batch.labels]
            yield ValidBatch(
                self._normaliser.images(batch.pixels),
                self._normaliser.integers(labels),
                self._normaliser.integers(batch.indices),
            )

    def names(self, indices: NDArray[np.int64]) -> list[str]:
        """What a person can find the validation images by."""
        return self.loader.names("valid", indices.tolist())

    def images_of(self, step: int, shown: int = 6) -> str:
        """The training images of a step, counted from 1 as the metrics do."""
        order = self.loader.recipe.order
        assert order is not None
        indices = order.indices(order.positions(step - 1)).tolist()
        names = self.loader.names("train", indices[:shown])
        more = f" and {len(indices) - shown:,} more" if len(indices) > shown else ""
        return ", ".join(names) + more

    def bad_images(self) -> dict[str, str]:
        """Images that could not be read: name and reason."""
        return {
            self.loader.names(split, [index])[0]: reason
            for split, found in self.loader.bad.items()
            for index, reason in found.copy().items()  # reading goes on in another thread
        }

    def notes(self) -> list[str]:
        """What a person should know of the images so far."""
        return [note for found in self.loader.notes.values() for note in found.copy().values()]

    def thumbnails(self, indices: list[int]) -> NDArray[np.uint8]:
        """Validation images as the model sees them, before normalisation."""
        recipe, source = self.loader.recipe, self.loader.source("valid")
        pictures = np.zeros((len(indices), recipe.image_size, recipe.image_size, 3), np.uint8)
        evaluate = build_transform(recipe.treatment).evaluate
        for row, index in enumerate(indices):
            evaluate(source.read(index), pictures[row])
        return pictures


class SyntheticFeed:
    """One batch of noise, made on the device and used again and again: no host, no disk."""

    def __init__(self, plan: Plan, device: torch.device, seed: int) -> None:
        self._plan = plan
        generator = torch.Generator().manual_seed(seed)
        rows = max(plan.micro_batch, plan.valid_batch)
        shape = (rows, 3, plan.image_size, plan.image_size)
        images = torch.randn(shape, generator=generator)
        labels = torch.randint(plan.num_classes, (rows,), generator=generator)
        self._images = images.to(device, memory_format=torch.channels_last)
        self._labels = labels.to(device)

    def batches_from(self, step: int) -> Iterator[list[MicroBatch]]:
        """The same images for every pass."""
        rows, passes = self._plan.micro_batch, self._plan.accumulation
        images, labels = self._images[:rows], self._labels[:rows]
        for now in range(step, self._plan.total_steps):
            begin = now * self._plan.global_batch
            yield [MicroBatch(images, labels, begin + rows * number) for number in range(passes)]

    def validation(self) -> Iterator[ValidBatch]:
        """The same images until as many are scored as the plan says."""
        rows, images = self._plan.valid_batch, self._plan.valid_images
        for first in range(0, images, rows):
            indices = torch.arange(first, first + rows, device=self._labels.device)
            real = torch.where(indices < images, indices, -1)
            yield ValidBatch(self._images[:rows], self._labels[:rows], real)

    def names(self, indices: NDArray[np.int64]) -> list[str]:
        """Made-up names for made-up images."""
        return [f"synthetic[{index}]" for index in indices.tolist()]

    def images_of(self, step: int) -> str:
        """There is only one batch."""
        return "synthetic noise"

    def bad_images(self) -> dict[str, str]:
        """None can be."""
        return {}

    def notes(self) -> list[str]:
        """Nothing to know."""
        return []

    def thumbnails(self, indices: list[int]) -> NDArray[np.uint8]:
        """Noise has nothing to show."""
        return np.zeros((len(indices), 8, 8, 3), np.uint8)


Feed = LoadedFeed | SyntheticFeed


def normaliser_of(preprocessing: Preprocessing, device: torch.device) -> Normaliser:
    """What turns this preprocessing's bytes into the model's input."""
    return Normaliser(
        preprocessing.mean, preprocessing.std, device=device, how=preprocessing.normalization
    )


@contextmanager
def open_feed(recipe: Recipe, plan: Plan, normaliser: Normaliser) -> Iterator[Feed]:
    """The run's source of batches; worker processes end with the block."""
    if recipe.data == "synthetic":
        yield SyntheticFeed(plan, normaliser.device, recipe.seed)
        return
    with Loader(recipe, workers=plan.workers, max_bad=plan.max_bad) as loader:
        yield LoadedFeed(loader, plan, normaliser)
