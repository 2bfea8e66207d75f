"""One optimizer step."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.engine.state import TrainState
from phalanx.optim.sgd import update


class MicroBatch(NamedTuple):
    """Images of one forward pass, normalised and on the device, with their labels."""

    images: Tensor  # [N, 3, H, W], channels_last in memory
    labels: Tensor  # [N]


@dataclass(frozen=True)
class StepRule:
    """What a step does besides the update rule."""

    label_smoothing: float
    device_type: str
    half: bool  # 16-bit compute, 32-bit weights

    def precision(self) -> AbstractContextManager[None]:
        """The context forward passes run in."""
        return torch.autocast(self.device_type, dtype=torch.bfloat16, enabled=self.half)


def train_step(
    state: TrainState, passes: Sequence[MicroBatch], lr: float, *, rule: StepRule
) -> Tensor:
    """Accumulate the passes and update once; [loss, gradient norm, top-1], still on the device.

    Waits for nothing: only log points and saves read values.
    """
    state.model.train()
    images = sum(len(labels) for _, labels in passes)
    loss_sum = torch.zeros((), device=passes[0].labels.device)
    hits = torch.zeros((), device=passes[0].labels.device)
    for pixels, labels in passes:
        with rule.precision():
            logits = state.model(pixels).float()
        # a sum divided by the step's images: the same gradient however the step is cut
        loss = F.cross_entropy(
            logits, labels, label_smoothing=rule.label_smoothing, reduction="sum"
        )
        (loss / images).backward()
        with torch.no_grad():
            loss_sum += loss
            hits += (logits.argmax(1) == labels).sum()
    gradients = [w.grad for w in state.model.parameters() if w.grad is not None]
    grad_norm = torch.nn.utils.get_total_norm(gradients)
    update(state.optimizer, lr)
    state.step += 1
    return torch.stack([loss_sum / images, grad_norm, hits / images])
