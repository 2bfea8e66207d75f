"""What a training step does with an optimizer: gradients, and an update with both decays."""

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.optim.optimizers import Group


@torch.no_grad()
def update_weights(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """w -= lr * (step(gradient + l2 * w) + decay * w); frees the gradients.

    The decay never enters the optimizer's state, l2 always does. A weight without a gradient does
    not change. A group of weights may have its own learning rate, a multiple of lr.
    """
    set_learning_rates(optimizer.param_groups, lr)
    apply_decays(optimizer)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def set_learning_rates(groups: Sequence[Group], lr: float) -> None:
    """Set the learning rate of each group, which may be a multiple of lr."""
    for group in groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


@torch.no_grad()
def apply_decays(optimizer: torch.optim.Optimizer) -> None:
    """Apply weight decay and l2 to every group, with its learning rate."""
    for group in optimizer.param_groups:
        l2, shrink = group["l2"], group["lr"] * group["decoupled_decay"]
        if l2 or shrink:
            _decay_weights(group["params"], l2=l2, shrink=shrink)


def _decay_weights(weights: list[Tensor], *, l2: float, shrink: float) -> None:
    """Add l2 to the gradients, then shrink the weights: l2 uses the weights before shrinking."""
    weights = [weight for weight in weights if weight.grad is not None]
    if l2 and weights:
        # torch's optimizers could do this themselves, but only after the shrinking
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        torch._foreach_add_(gradients, weights, alpha=l2)
    if shrink and weights:
        torch._foreach_mul_(weights, 1 - shrink)


def collect_gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All existing gradients; iterating over the optimizer is far cheaper than over modules."""
    weights = (weight for group in optimizer.param_groups for weight in group["params"])
    return [weight.grad for weight in weights if weight.grad is not None]


def set_velocity_scale(optimizer: torch.optim.Optimizer, scale: float) -> None:
    """Set the scale of SgdCombined's velocities from the next update on; ignored by others."""
    for group in optimizer.param_groups:
        if "velocity_scale" in group:
            group["velocity_scale"] = scale
