"""An optimizer's state under the names of the parameters."""

import torch
from torch import Tensor, nn


def name_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of the optimizer's state, as `parameter:name`."""
    names = {id(weight): name for name, weight in model.named_parameters()}
    return {
        f"{names[id(weight)]}:{key}": value
        for weight, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def restore_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    """Restore what `name_optimizer_state` returned, each tensor in its own dtype.

    A tensor gets its weight's memory layout: torch's fused updates treat both as flat memory.
    A count of steps is on the weight's device in fused optimizers, in host memory in all others.
    """
    weights = dict(model.named_parameters())
    fused = {
        id(weight): bool(group.get("fused"))
        for group in optimizer.param_groups
        for weight in group["params"]
    }
    for entry, value in tensors.items():
        name, _, key = entry.rpartition(":")
        weight = weights[name]
        if value.shape == weight.shape:
            copy = torch.empty_like(weight, dtype=value.dtype, requires_grad=False).copy_(value)
        else:
            copy = value.to(weight.device if fused[id(weight)] else "cpu", copy=True)
        optimizer.state[weight][key] = copy
    _match_momentum_buffers(optimizer)


def _match_momentum_buffers(optimizer: torch.optim.Optimizer) -> None:
    """Drop velocities that are no longer used, and add those that a fork has turned on.

    torch's RMSprop expects a velocity wherever it finds mean squares and has a momentum.
    """
    for group in (group for group in optimizer.param_groups if "momentum" in group):
        for state in (optimizer.state.get(weight, {}) for weight in group["params"]):
            if not group["momentum"]:
                state.pop("momentum_buffer", None)
            elif "square_avg" in state and "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(state["square_avg"])
