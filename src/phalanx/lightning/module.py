"""Our models and recipes under any Trainer."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.assemble.build import build_network, build_optim_settings, build_step_options
from phalanx.assemble.prepare import refuse_missing_weights
from phalanx.config.schema import Config
from phalanx.engine.evaluate import ValidBatch
from phalanx.engine.step import MicroBatch, PassParts, clip_gradients, compute_logits
from phalanx.errors import ConfigError
from phalanx.lightning.data_module import DataModule
from phalanx.lightning.optimizer import add_decays, build_scheduler
from phalanx.lightning.package import import_lightning
from phalanx.lightning.recipe import Recipe
from phalanx.models.airbench import has_whitening
from phalanx.optim.build import build_optimizer
from phalanx.optim.update import collect_gradients

_pl: Any = import_lightning()


class Module(_pl.LightningModule):  # type: ignore[misc]
    """The model of a preset or file, with its loss, mixing, dropout, optimizer and schedule.

    Module("imagenet-resnet50", data_dir="~/imagenet", batch_size=256): options are keywords, the
    same as those of the DataModule. Logs train_loss and train_top1, and of every validation image
    once: val_loss, val_top1 and val_images. Batches of other data are pairs of images and labels.
    restored: the weights come from a checkpoint of Lightning's, so init_weights is not read.
    """

    def __init__(
        self, preset: str | None = None, *, restored: bool = False, **options: Any
    ) -> None:
        super().__init__()
        given = {"preset": preset, **options}
        # a checkpoint that contains a Path cannot be loaded with weights_only
        self.save_hyperparameters(
            {
                name: str(value) if isinstance(value, Path) else value
                for name, value in given.items()
            }
        )
        self.recipe = Recipe(preset, options)
        config, plan = self.recipe.config, self.recipe.plan
        _warn_of_half_weights(config)
        if not restored:
            refuse_missing_weights(config)
        self.model = build_network(
            config, plan, torch.device("cpu"), with_init_weights=not restored
        )
        if has_whitening(self.model) and config.model.init_weights is None:
            raise ConfigError(
                f"--model {config.model.model}: its first layer is made from training images, "
                "which only phalanx train does; give init_weights, or another model"
            )
        self._plan, self._rank = plan, 0
        self._sums = torch.zeros(3)

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **options: Any) -> Any:
        """Lightning's own, except that the file of init_weights may no longer exist."""
        given = {"restored": True, **options}
        return super().load_from_checkpoint(checkpoint_path, *args, **given)

    def setup(self, stage: str) -> None:
        """Adopt what the Trainer decides."""
        data = self.trainer.datamodule
        if isinstance(data, DataModule):
            _refuse_differences(self.recipe, data.recipe)
        found = self.recipe.fit_to_trainer(self.trainer)
        self._plan, self._rank = found.plan, found.rank
        options = build_step_options(found.config, found.plan, self.trainer.strategy.root_device)
        self._options = replace(options, half=None)  # the Trainer casts
        # the Trainer averages over accumulation and processes
        self._parts = PassParts(self.model, self._options, global_batch=found.plan.micro_batch)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.model(images)
        return logits

    def training_step(self, batch: MicroBatch | Sequence[Tensor], batch_idx: int) -> Tensor:
        """The mean loss of a micro-batch."""
        micro_batch = self._add_positions(batch, batch_idx)
        mixes = self._parts.draw_mixes([micro_batch])
        images = self._parts.join_images([micro_batch], mixes)
        logits = self._parts.forward(images, [micro_batch.first])
        targets = self._parts.mix_targets([micro_batch], mixes)
        loss, totals = self._parts.compute_loss(logits, targets, None)
        rows = len(micro_batch.labels)
        self.log("train_loss", totals[0] / rows, batch_size=rows, prog_bar=True)
        if self._options.metrics:
            self.log("train_top1", totals[1] / rows, batch_size=rows)
        return loss

    def _add_positions(self, batch: MicroBatch | Sequence[Tensor], batch_idx: int) -> MicroBatch:
        """The batch with its position in the stream, invented if the data is not ours."""
        if isinstance(batch, MicroBatch):
            return batch
        images, labels = batch
        micro = self.trainer.global_step * self._plan.accumulation
        micro += batch_idx % self._plan.accumulation
        return MicroBatch(
            images.contiguous(memory_format=torch.channels_last),
            labels,
            (micro * self._plan.replicas + self._rank) * len(labels),
        )

    def on_validation_epoch_start(self) -> None:
        """Reset the counts."""
        self._sums = torch.zeros(3, device=self.device)

    def validation_step(self, batch: ValidBatch | Sequence[Tensor], batch_idx: int) -> None:
        """Add up loss, correct predictions and images of a batch."""
        images, labels = batch[:2]
        indices = batch.indices if isinstance(batch, ValidBatch) else torch.zeros_like(labels)
        logits = compute_logits(self.model, images, self._options)
        is_real = indices >= 0
        losses = F.cross_entropy(logits, labels, reduction="none")
        right = logits.argmax(1) == labels
        counts = (torch.where(is_real, column, 0).sum() for column in (losses, right, is_real))
        self._sums += torch.stack([count.float() for count in counts])

    def on_validation_epoch_end(self) -> None:
        """Log the score of all processes' images."""
        loss, right, images = self.trainer.strategy.reduce(self._sums, reduce_op="sum")
        # the same in every process: the mean, which Lightning asks for, changes nothing
        self.log("val_loss", loss / images, sync_dist=True)
        self.log("val_top1", right / images, sync_dist=True, prog_bar=True)
        self.log("val_images", images, sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """The optimizer, and the learning rate after every step."""
        settings = build_optim_settings(self.recipe.config)
        optimizer = add_decays(build_optimizer(self.model, settings))
        scheduler = {"scheduler": build_scheduler(optimizer, self._plan), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip as the Trainer says, else as the recipe says."""
        if gradient_clip_val is None:
            clip_gradients(collect_gradients(optimizer), self._options)
            return
        self.clip_gradients(
            optimizer,
            gradient_clip_val=gradient_clip_val,
            gradient_clip_algorithm=gradient_clip_algorithm,
        )


def _warn_of_half_weights(config: Config) -> None:
    """Warn if a preset keeps weights in 16 bits, which changes what it learns."""
    if config.machine.precision == "16.16":
        _pl.utilities.rank_zero_warn(
            "precision 16.16, which this preset has, is not done under a Trainer of your own: "
            "weights are kept in 32 bits, and Trainer(precision=...) decides the rest; for weights "
            "in 16 bits, run phalanx train",
            stacklevel=6,  # where the Module is made
        )


def _refuse_differences(own: Recipe, data: Recipe) -> None:
    """Raise ConfigError if the model and its data were given different options."""
    ours, theirs = own.config.flat(), data.config.flat()
    for name, value in ours.items():
        if theirs[name] != value:
            raise ConfigError(
                f"{name}: the Module has {value}, the DataModule {theirs[name]}; give both the "
                "same preset and options"
            )
