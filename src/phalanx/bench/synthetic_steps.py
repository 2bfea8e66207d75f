"""Training steps on made-up images that lie on the device: the model's own speed, without data."""

from collections.abc import Callable
from dataclasses import replace

import torch

from phalanx.assemble.session import Session
from phalanx.config.schema import Config
from phalanx.engine.step import MicroBatch
from phalanx.plan.plan import Plan


def build_synthetic_step(
    config: Config, plan: Plan, *, micro_batch: int, accumulation: int
) -> Callable[[], int]:
    """A call that takes one step of the run, cut as asked, and gives its images.

    It waits for nothing, and weights do not move: the learning rate is 0.
    """
    fresh = config.model.model_copy(update={"init_weights": None, "reset_head": False})
    images = micro_batch * accumulation
    session = Session(
        config.model_copy(update={"model": fresh}),
        replace(plan, micro_batch=micro_batch, accumulation=accumulation, global_batch=images),
    )
    shape = (micro_batch, 3, plan.image_size, plan.image_size)
    pixels = torch.empty(shape, device=session.device, memory_format=torch.channels_last).normal_()
    labels = torch.arange(micro_batch, device=session.device) % plan.num_classes
    passes = [MicroBatch(pixels, labels, number * micro_batch) for number in range(accumulation)]

    def step() -> int:
        session.train_step(passes, 0.0)
        return images

    return step


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
