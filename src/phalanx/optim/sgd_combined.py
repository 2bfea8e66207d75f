"""Momentum whose velocity is kept larger than it is, for formats with few small numbers."""

import torch
from torch import Tensor

from phalanx.optim.rule import Group, Rule


class SgdCombined(Rule):
    """v = momentum * v + scale * g; w -= lr / scale * v.

    The scale changes no result but what rounding does to the velocity. It follows the loss scale
    (PopART: velocity scaling = loss scaling / ratio), which may change during a run; every
    velocity remembers the scale it is kept at, and is brought to a new one.
    """

    def move(self, weights: list[Tensor], gradients: list[Tensor], group: Group) -> None:
        """Change weights and their velocities."""
        scale = group["velocity_scale"]
        velocities = self.slots(weights, "velocity")
        self._rescale(velocities, self.numbers(weights, "velocity_scale", scale), scale)
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, gradients, alpha=scale)
        torch._foreach_add_(weights, velocities, alpha=-group["lr"] / scale)

    @staticmethod
    def _rescale(velocities: list[Tensor], kept_at: list[Tensor], scale: float) -> None:
        """Bring velocities to a scale they are not kept at yet."""
        factors = [scale / float(kept) for kept in kept_at]
        if any(factor != 1.0 for factor in factors):
            torch._foreach_mul_(velocities, factors)
            for kept in kept_at:
                kept.fill_(scale)


def set_velocity_scale(optimizer: torch.optim.Optimizer, scale: float) -> None:
    """Keep velocities at this scale from the next update on; rules without one stay as they are."""
    for group in optimizer.param_groups:
        if "velocity_scale" in group:
            group["velocity_scale"] = scale
