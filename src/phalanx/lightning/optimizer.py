"""Our optimizers and schedule for a Trainer, which only knows a step with a closure."""

from collections.abc import Callable
from typing import Any

import torch

from phalanx.optim.update import apply_decays
from phalanx.plan.plan import Plan


class _DecayMixin:
    """Mixin that makes an optimizer's step do all that our own update does."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure, which computes and clips gradients; then both decays and the update."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        apply_decays(self)  # type: ignore[arg-type]
        super().step()  # type: ignore[misc]
        return loss


def add_decays(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer, whose step now also applies the decays of its groups."""
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (_DecayMixin, kind), {})
    # a fused kernel would unscale gradients by itself, after they were clipped
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    return optimizer


def build_scheduler(
    optimizer: torch.optim.Optimizer, plan: Plan
) -> torch.optim.lr_scheduler.LambdaLR:
    """The plan's learning rate, for a Trainer that asks after every step."""
    last = plan.total_steps - 1
    for group in optimizer.param_groups:
        group["lr"] = group.get("lr_scale", 1.0)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: plan.lr(min(step, last)))
