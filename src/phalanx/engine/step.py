"""One optimizer step."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import nan
from typing import NamedTuple

import torch
from torch import Tensor, nn

from phalanx.engine.loss import LOSSES
from phalanx.engine.mixing import NOTHING_MIXED, Mixed, Mixing, WeightedLabels, mix_batch
from phalanx.engine.state import TrainState
from phalanx.models.dropout_noise import draw_dropout_noise
from phalanx.models.units import find_noise_sizes
from phalanx.optim.update import collect_gradients, set_velocity_scale, update


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
    half: torch.dtype | None  # what passes compute in, where that is 16 bits
    seed: int = 0  # of what is dropped and mixed
    flip: bool = False  # score each image together with its mirror image
    mixing: Mixing = NOTHING_MIXED
    loss: str = "cross-entropy"  # a row of LOSSES
    clip_norm: float = 0.0  # longest gradient; 0 for any
    clip_value: float = 0.0  # largest number of a gradient; 0 for any
    velocity_ratio: float | None = None  # of sgd_combined: loss scale over its velocity's scale
    metrics: bool = True  # whether steps tell their top-1; NaN stands for one that was not taken

    def precision(self) -> AbstractContextManager[None]:
        """The context forward passes run in."""
        if self.half is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.half)


def answer_to(model: nn.Module, images: Tensor, *, rule: StepRule) -> Tensor:
    """Logits of images that are scored."""
    with rule.precision():
        logits: Tensor = model(images).float()
        if rule.flip:
            logits = (logits + model(images.flip(3)).float()) / 2
    return logits


def _mixed_as_told(batch: MicroBatch, rule: StepRule) -> Mixed:
    """The images and targets of a training pass, mixed where the rule says so."""
    if not rule.mixing.on:
        return Mixed(batch.images, (WeightedLabels(batch.labels),))
    return mix_batch(
        batch.images, batch.labels, first=batch.first, seed=rule.seed, mixing=rule.mixing
    )


def _forward(model: nn.Module, batch: MicroBatch, *, rule: StepRule) -> Tensor:
    """Logits of a training pass; what the model drops depends on the images' places alone."""
    noise = draw_dropout_noise(
        find_noise_sizes(model),
        seed=rule.seed,
        first=batch.first,
        images=len(batch.labels),
        device=batch.images.device,
    )
    with rule.precision():
        logits: Tensor = model(batch.images, noise) if noise else model(batch.images)
    return logits.float()


def train_step(
    state: TrainState,
    passes: Sequence[MicroBatch],
    lr: float,
    *,
    rule: StepRule,
    loss_scale: float = 1.0,
) -> Tensor:
    """Accumulate the passes and update once; [loss, gradient norm, top-1], still on the device.

    Waits for nothing: only log points and saves read values. With a loss scale of its own making
    the step waits for one number, whether the gradients are finite; where they are not, nothing
    is updated and the norm is given as 0.
    """
    if not state.model.training:
        state.model.train()
    scaler = state.scaler
    scale = loss_scale if scaler is None else scaler.scale
    loss, top1 = _run_passes(state.model, passes, rule=rule, scale=scale)
    state.step += 1
    with state.wide_update() as counts:
        gradients = collect_gradients(state.optimizer)
        grad_norm = _treat_gradients(gradients, scale=scale, rule=rule)
        if scaler is not None and not bool(torch.isfinite(grad_norm)):
            scaler.overflowed(state.step)
            state.optimizer.zero_grad(set_to_none=True)
            return torch.stack([loss, torch.zeros_like(loss), top1])
        if rule.velocity_ratio is not None:
            set_velocity_scale(state.optimizer, scale / rule.velocity_ratio)
        update(state.optimizer, lr)
    state.follow(counts)
    if scaler is not None:
        scaler.succeeded(state.step)
    return torch.stack([loss, grad_norm, top1])


def _run_passes(
    model: nn.Module, passes: Sequence[MicroBatch], *, rule: StepRule, scale: float
) -> tuple[Tensor, Tensor]:
    """Forward and backward of all passes; mean loss and share of right answers over all images."""
    images = sum(len(batch.labels) for batch in passes)
    tallies = []
    for batch in passes:
        shown, targets = _mixed_as_told(batch, rule)
        logits = _forward(model, batch._replace(images=shown), rule=rule)
        # a sum divided by the step's images: the same gradient however the step is cut
        loss = LOSSES[rule.loss](logits, targets, rule.label_smoothing)
        (loss * (scale / images) if scale != 1 else loss / images).backward()
        with torch.no_grad():  # of mixed images, the label of the one that was there first
            hits = (logits.argmax(1) == batch.labels).sum() if rule.metrics else loss * nan
            tallies.append(torch.stack([loss, hits]))
    loss_sum, right = sum(tallies[1:], tallies[0])
    return loss_sum / images, right / images


@torch.no_grad()
def _treat_gradients(gradients: list[Tensor], *, scale: float, rule: StepRule) -> Tensor:
    """Take the loss scale out and clip; gives their length as it was before clipping."""
    if scale != 1:
        torch._foreach_mul_(gradients, 1 / scale)
    norm = _length_of(gradients)  # whoever keeps no metrics: it shows whether all are finite
    if rule.clip_value:
        torch._foreach_clamp_min_(gradients, -rule.clip_value)
        torch._foreach_clamp_max_(gradients, rule.clip_value)
    if rule.clip_norm:
        longest = rule.clip_norm / (_length_of(gradients) + 1e-6)
        torch._foreach_mul_(gradients, longest.clamp(max=1.0))
    return norm


def _length_of(gradients: list[Tensor]) -> Tensor:
    """The length of all gradients together."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
