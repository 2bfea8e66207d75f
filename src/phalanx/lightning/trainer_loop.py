"""The engine behind --engine lightning: Lightning's Trainer drives our loop, step by step.

Model, optimizer, precision, folding, schedules and devices are the session's, as in the native
loop: the Trainer neither sees nor moves them. It only triggers the next step, so that both engines
give the same bits.
"""

import logging
import os
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from phalanx.engine.state import TrainState
from phalanx.engine.step import MicroBatch
from phalanx.engine.train import LoopDependencies, MetricsBuffer, TrainingLoop
from phalanx.lightning.package import import_environments, import_lightning
from phalanx.plan.plan import Plan

_pl: Any = import_lightning()
_VARIABLES = "PL_TRAINER_"  # prefix of environment variables that set a Trainer's options
_LOGGERS = ("pytorch_lightning", "lightning.pytorch", "lightning_fabric", "lightning.fabric")


class _StepModule(_pl.LightningModule):  # type: ignore[misc]
    """Manual optimization: a training step is one of ours, with its passes and its update."""

    def __init__(self, loop: TrainingLoop) -> None:
        super().__init__()
        self.automatic_optimization = False
        self._loop = loop

    def training_step(self, passes: Sequence[MicroBatch], batch_idx: int) -> None:
        """Take the step, without waiting for the device."""
        self._loop.train_step(passes)

    def configure_optimizers(self) -> list[Any]:
        """None for Lightning: the step has its own optimizer."""
        return []


class _StepData(_pl.LightningDataModule):  # type: ignore[misc]
    """The passes of all remaining steps, as one epoch of Lightning's."""

    def __init__(self, loop: TrainingLoop) -> None:
        super().__init__()
        self._loop, self._steps = loop, len(loop)

    def train_dataloader(self) -> "_StepData":
        """Itself: it has a length, so that Lightning does not prefetch the next step."""
        return self

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """The passes unchanged: the feed has put them on the right device."""
        return batch

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Sequence[MicroBatch]]:
        return self._loop.batches()


class _RunCallback(_pl.Callback):  # type: ignore[misc]
    """Our checkpoints, records, scores and stops, after each step."""

    def __init__(self, loop: TrainingLoop) -> None:
        self._loop, self._on_sigterm = loop, signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore our SIGTERM handler: Lightning would exit without a checkpoint."""
        if signal.getsignal(signal.SIGTERM) is not self._on_sigterm:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def on_train_batch_end(self, *step: Any) -> None:
        """Do what is due after the step."""
        self._loop.finish_step()


def fit_with_trainer(
    state: TrainState, plan: Plan, *, deps: LoopDependencies, metrics: MetricsBuffer
) -> None:
    """`phalanx.engine.train.fit`, driven by a Trainer."""
    loop = TrainingLoop(state, plan, deps=deps, metrics=metrics)
    loop.begin()
    if not len(loop):
        return
    with _suppress_messages():
        trainer = _build_trainer(_RunCallback(loop))
        try:
            trainer.fit(_StepModule(loop), _StepData(loop))
        except SystemExit as end:  # the Trainer turns an interrupt into this, too
            if isinstance(end.__context__, KeyboardInterrupt):
                raise end.__context__ from None
            raise


def _build_trainer(callback: _RunCallback) -> Any:
    """A Trainer with nothing enabled but its loop."""
    # environment variables that limit Trainers would end a run early, as if it were finished
    limits = {name: os.environ.pop(name) for name in [*os.environ] if name.startswith(_VARIABLES)}
    try:
        return _pl.Trainer(
            # whatever the session's device is: the Trainer would free memory that graphs use
            accelerator="cpu",
            devices=1,
            # ranks are managed by us, whoever launched them
            plugins=[import_environments().LightningEnvironment()],
            max_epochs=1,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            logger=False,
            callbacks=[callback],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
    finally:
        os.environ.update(limits)


@contextmanager
def _suppress_messages() -> Iterator[None]:
    """Within the block, Lightning's messages on devices, launchers and tips are suppressed."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="(pytorch_)?lightning")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
