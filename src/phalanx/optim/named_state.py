"""What an optimizer remembers, under the names of the parameters."""

import torch
from torch import Tensor, nn


def name_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor the optimizer remembers, under the name of its parameter."""
    names = {id(weight): name for name, weight in model.named_parameters()}
    return {
        f"{names[id(weight)]}:{key}": value
        for weight, slots in optimizer.state.items()
        for key, value in slots.items()
        if isinstance(value, Tensor)
    }


def restore_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    """Give the optimizer back what `named_state` took from it, in the dtype it was kept in."""
    weights = dict(model.named_parameters())
    fused = {
        id(weight): bool(group.get("fused"))
        for group in optimizer.param_groups
        for weight in group["params"]
    }
    for slot, value in tensors.items():
        name, _, key = slot.rpartition(":")
        weight = weights[name]
        optimizer.state[weight][key] = _placed(value, weight, fused=fused[id(weight)])


def _placed(value: Tensor, weight: Tensor, *, fused: bool) -> Tensor:
    """A copy of a slot's value, where and how its weight's rule expects it.

    A tensor takes its weight's memory layout: torch's fused updates walk both as flat memory. A
    count of steps lies beside the weight in fused rules and in host memory in all others.
    """
    if value.shape == weight.shape:
        return torch.empty_like(weight, dtype=value.dtype, requires_grad=False).copy_(value)
    return value.to(weight.device if fused else "cpu", copy=True)
