"""Stochastic gradient descent with momentum and decoupled decay."""

from typing import Any

import torch
from torch import Tensor, nn

from phalanx.optim.decay import split_by_decay


def build_sgd(model: nn.Module, *, momentum: float, weight_decay: float) -> torch.optim.SGD:
    """The optimizer of a model; `update` brings the learning rate."""
    decayed, spared = split_by_decay(model)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "decay": weight_decay},
        {"params": spared, "decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=0.0, momentum=momentum, fused=True)


@torch.no_grad()
def update(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """One update: w -= lr * (rule(gradient) + decay * w). The decay never enters the momentum."""
    for group in optimizer.param_groups:
        group["lr"] = lr
        if lr * group["decay"]:
            torch._foreach_mul_(group["params"], 1 - lr * group["decay"])
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def gradients_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All gradients there are; walking the groups is far cheaper than walking the modules."""
    weights = (weight for group in optimizer.param_groups for weight in group["params"])
    return [weight.grad for weight in weights if weight.grad is not None]


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor the optimizer remembers, under the name of its parameter."""
    names = {id(weight): name for name, weight in model.named_parameters()}
    return {
        f"{names[id(weight)]}:{key}": value
        for weight, slots in optimizer.state.items()
        for key, value in slots.items()
        if isinstance(value, Tensor)
    }


def restore_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    """Give the optimizer back what `named_state` took from it.

    Each tensor takes its weight's memory layout: torch's fused update walks both as flat memory.
    """
    weights = dict(model.named_parameters())
    for slot, value in tensors.items():
        name, _, key = slot.rpartition(":")
        weight = weights[name]
        optimizer.state[weight][key] = torch.empty_like(weight).copy_(value)
