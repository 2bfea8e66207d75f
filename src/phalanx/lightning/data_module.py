"""Our data under any Trainer: the batches of `phalanx train`, shared among its processes."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from math import ceil
from typing import Any

import torch

from phalanx.assemble.build import build_normaliser
from phalanx.assemble.dataset_summary import build_input_spec, build_preprocessing
from phalanx.assemble.feed import Feed, open_feed
from phalanx.assemble.rank_context import RankContext
from phalanx.assemble.torch_setup import set_cuda_queues
from phalanx.engine.evaluate import ValidBatch
from phalanx.engine.step import MicroBatch
from phalanx.errors import ConfigError
from phalanx.lightning.package import import_lightning
from phalanx.lightning.recipe import Recipe
from phalanx.plan.plan import Plan

_pl: Any = import_lightning()


class DataModule(_pl.LightningDataModule):  # type: ignore[misc]
    """Training and validation images of a preset or file, decoded, augmented and on the device.

    DataModule("imagenet-resnet50", data_dir="~/imagenet", batch_size=256): options are keywords.
    Each process of the Trainer reads its own share of every step; an epoch takes each image once,
    except the last ones that do not fill a step. Batches are named tuples: images, labels and
    `first`, the first image's position in the stream; or `indices` of validation images, -1 for
    padding.
    """

    def __init__(self, preset: str | None = None, **options: Any) -> None:
        super().__init__()
        set_cuda_queues()  # a Trainer starts CUDA in `fit`, before it calls `setup`
        self.recipe = Recipe(preset, options)
        self._exits = ExitStack()
        self._feed: Feed | None = None
        self._plan: Plan | None = None

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, by label."""
        return self.recipe.classes

    def setup(self, stage: str) -> None:
        """Open this process's share of the data."""
        self.teardown(stage)  # what another Trainer left open has that Trainer's length and batches
        found = self.recipe.fit_to_trainer(self.trainer)
        plan, config = found.plan, found.config
        device = self.trainer.strategy.root_device
        normaliser = build_normaliser(build_preprocessing(config, plan), device, config)
        context = _TrainerRankContext(plan.layout, number=found.rank)
        feed = open_feed(build_input_spec(config, plan), plan, normaliser, config, context=context)
        self._feed, self._plan = self._exits.enter_context(feed), plan

    def teardown(self, stage: str) -> None:
        """End the reading processes."""
        self._feed = None
        self._exits.close()

    def on_exception(self, exception: BaseException) -> None:
        """The same: a Trainer that fails or is interrupted does not call teardown."""
        self.teardown("fit")

    def train_dataloader(self) -> "_TrainBatches":
        """The micro-batches of an epoch, from the step that the Trainer has reached."""
        assert self._feed is not None and self._plan is not None
        return _TrainBatches(self._feed, self._plan, self.trainer)

    def val_dataloader(self) -> "_ValidBatches | list[Any]":
        """Every validation image once, over all processes; empty if there are no images."""
        assert self._feed is not None and self._plan is not None
        if not self._plan.valid_images:
            return []
        return _ValidBatches(self._feed, self._plan, self.trainer.strategy.root_device)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """The batch unchanged: it has been copied to the device asynchronously."""
        return batch


@dataclass(frozen=True)
class _TrainerRankContext(RankContext):
    """One of a Trainer's processes, which do not communicate through us."""

    number: int = 0

    @property
    def rank(self) -> int:
        """Its number."""
        return self.number


class _TrainBatches:
    """The training stream, a micro-batch at a time.

    Its position is the Trainer's step, not a state of its own: after a checkpoint of Lightning's it
    continues exactly where that was made, even in the middle of an epoch.
    """

    def __init__(self, feed: Feed, plan: Plan, trainer: Any) -> None:
        self._feed, self._plan, self._trainer = feed, plan, trainer
        self._stream: Iterator[MicroBatch] = iter(())
        self._next = -1  # the next micro-batch of the stream

    def __len__(self) -> int:
        """Micro-batches of this process in an epoch."""
        return int(self._plan.steps_per_epoch) * self._plan.accumulation

    def __iter__(self) -> Iterator[MicroBatch]:
        self._refuse_other_accumulation()
        step = self._trainer.global_step
        if self._next != step * self._plan.accumulation:
            steps = self._feed.batches_from(step)
            self._stream, self._next = chain.from_iterable(steps), step * self._plan.accumulation
        for batch in self._stream:  # continues from epoch to epoch, so that readers never pause
            self._next += 1
            yield batch

    def _refuse_other_accumulation(self) -> None:
        """Raise ConfigError if the Trainer's steps are no longer those of the plan."""
        now, planned = self._trainer.accumulate_grad_batches, self._plan.accumulation
        if now != planned:
            raise ConfigError(
                f"the Trainer accumulates {now} batches in epoch {self._trainer.current_epoch}, "
                f"and began with {planned}: images would be trained twice or not at all; leave "
                f"out GradientAccumulationScheduler and use Trainer(accumulate_grad_batches={now})"
            )

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the Trainer's step determines the position."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: there is no state to restore."""


class _ValidBatches:
    """This process's share of the validation images, in the same number of batches everywhere.

    Processes may communicate at every batch: one that has no images left yields padding.
    """

    def __init__(self, feed: Feed, plan: Plan, device: torch.device) -> None:
        self._feed, self._plan, self._device = feed, plan, device

    def __len__(self) -> int:
        batches = ceil(self._plan.valid_images / self._plan.valid_batch)
        return ceil(batches / self._plan.layout.ranks)

    def __iter__(self) -> Iterator[ValidBatch]:
        left, size = len(self), self._plan.image_size
        for batch in self._feed.validation_batches():
            yield batch
            left -= 1
        if left:
            images = torch.zeros(self._plan.valid_batch, 3, size, size, device=self._device)
            labels = torch.zeros(self._plan.valid_batch, dtype=torch.int64, device=self._device)
            yield from [ValidBatch(images, labels, torch.full_like(labels, -1))] * left
