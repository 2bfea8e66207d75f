"""One optimizer step."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.engine.mixing import NOTHING_MIXED, Mixed, Mixing, Target, mix_batch
from phalanx.engine.state import TrainState
from phalanx.models.chance import draw_chances
from phalanx.optim.sgd import gradients_of, update


class MicroBatch(NamedTuple):
    """Images of one forward pass, normalised and on the device, with their labels."""

    images: Tensor  # [N, 3, H, W], channels_last in memory
    labels: Tensor  # [N]
    first: int  # place of the first image in the training stream; the others follow


@dataclass(frozen=True)
class StepRule:
    """What a step does besides the update rule."""

    label_smoothing: float
    device_type: str
    half: bool  # 16-bit compute, 32-bit weights
    seed: int = 0  # of what is dropped
    flip: bool = False  # score each image together with its mirror image
    mixing: Mixing = NOTHING_MIXED

    def precision(self) -> AbstractContextManager[None]:
        """The context forward passes run in."""
        if not self.half:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=torch.bfloat16)


def answer_to(model: nn.Module, images: Tensor, *, rule: StepRule) -> Tensor:
    """Logits of images that are scored."""
    with rule.precision():
        logits: Tensor = model(images).float()
        if rule.flip:
            logits = (logits + model(images.flip(3)).float()) / 2
    return logits


def mixed_as_told(batch: MicroBatch, rule: StepRule) -> Mixed:
    """The images and targets of a training pass, mixed where the rule says so."""
    if not rule.mixing.on:
        return Mixed(batch.images, (Target(batch.labels),))
    return mix_batch(
        batch.images, batch.labels, first=batch.first, seed=rule.seed, mixing=rule.mixing
    )


def loss_of(logits: Tensor, targets: Sequence[Target], *, smoothing: float) -> Tensor:
    """Cross-entropy summed over the images; of several labels each counts by its weight."""
    if len(targets) == 1 and targets[0].weights is None:
        labels = targets[0].labels
        return F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
    parts = [
        F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="none").mul(weights)
        for labels, weights in targets
        if weights is not None
    ]
    return torch.stack(parts).sum()


def forward(model: nn.Module, batch: MicroBatch, *, rule: StepRule) -> Tensor:
    """Logits of a training pass; what the model drops depends on the images' places alone."""
    chances = draw_chances(
        getattr(model, "chances", {}),
        seed=rule.seed,
        first=batch.first,
        images=len(batch.labels),
        device=batch.images.device,
    )
    with rule.precision():
        logits: Tensor = model(batch.images, chances) if chances else model(batch.images)
    return logits.float()


def train_step(
    state: TrainState, passes: Sequence[MicroBatch], lr: float, *, rule: StepRule
) -> Tensor:
    """Accumulate the passes and update once; [loss, gradient norm, top-1], still on the device.

    Waits for nothing: only log points and saves read values.
    """
    if not state.model.training:
        state.model.train()
    images = sum(len(batch.labels) for batch in passes)
    tallies = []
    for batch in passes:
        shown, targets = mixed_as_told(batch, rule)
        logits = forward(state.model, batch._replace(images=shown), rule=rule)
        # a sum divided by the step's images: the same gradient however the step is cut
        loss = loss_of(logits, targets, smoothing=rule.label_smoothing)
        (loss / images).backward()
        with torch.no_grad():  # of mixed images, the label of the one that was there first
            tallies.append(torch.stack([loss, (logits.argmax(1) == batch.labels).sum()]))
    norms = torch._foreach_norm(gradients_of(state.optimizer))
    grad_norm = torch.linalg.vector_norm(torch.stack(norms))
    update(state.optimizer, lr)
    state.step += 1
    loss_sum, hits = sum(tallies[1:], tallies[0])
    return torch.stack([loss_sum / images, grad_norm, hits / images])
