"""One update by any rule, with the two decays around it."""

import torch
from torch import Tensor


@torch.no_grad()
def update(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """One update: w -= lr * (rule(gradient + l2 * w) + decay * w); then no gradients are left.

    The decay never enters what a rule remembers, l2 always does. A weight without a gradient
    stays as it is.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
        _apply_decays(group["params"], l2=group["l2"], shrink=lr * group["decay"])
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _apply_decays(weights: list[Tensor], *, l2: float, shrink: float) -> None:
    """Add l2 to the gradients, then shrink the weights: l2 is of weights not yet shrunk."""
    if not (l2 or shrink):
        return
    pairs = [(weight, weight.grad) for weight in weights if weight.grad is not None]
    if l2 and pairs:
        # torch's rules could do this inside, but only after the shrinking
        torch._foreach_add_([grad for _, grad in pairs], [w for w, _ in pairs], alpha=l2)
    if shrink and pairs:
        torch._foreach_mul_([weight for weight, _ in pairs], 1 - shrink)


def gradients_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All gradients there are; walking the groups is far cheaper than walking the modules."""
    weights = (weight for group in optimizer.param_groups for weight in group["params"])
    return [weight.grad for weight in weights if weight.grad is not None]
