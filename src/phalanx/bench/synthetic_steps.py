"""Training steps on synthetic images that are on the device: the model's speed without data."""

from collections.abc import Callable
from dataclasses import replace

import torch

from phalanx.assemble.session import Session
from phalanx.config.schema import Config
from phalanx.engine.step import MicroBatch
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan


def build_synthetic_step(config: Config, plan: Plan, *, waits: bool = True) -> Callable[[], int]:
    """A call that takes one step of one replica, waits if asked to, and returns its images.

    If replicas share batch statistics, it is a step of all that do. Weights do not change: the
    learning rate is 0.
    """
    turn, rows = plan.layout.turn_size, plan.micro_batch
    images = rows * plan.accumulation * turn
    config = config.replace_options({"init-weights": None, "reset-head": False})
    alone = Layout(turn, bn_span=turn)
    session = Session(config, replace(plan, layout=alone, global_batch=images))
    shape = (rows, 3, plan.image_size, plan.image_size)
    pixels = torch.empty(shape, device=session.device, memory_format=torch.channels_last).normal_()
    labels = torch.arange(rows, device=session.device) % plan.num_classes
    passes = [MicroBatch(pixels, labels, first) for first in range(0, images, rows)]

    def step() -> int:
        session.train_step(passes, 0.0)
        if waits:
            synchronise(session.device)
        return images

    return step


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if device.type == "mps":
        torch.mps.synchronize()
