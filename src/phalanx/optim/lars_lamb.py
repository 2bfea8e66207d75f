"""Rules whose step is measured by the weight's own length, for large batches.

A group with `trusts` false, that of norms and biases, moves by the plain rule. `trust_decay` is
the decay these rules have of their own: inside the step whose length is measured.
"""

import torch
from torch import Tensor

from phalanx.optim.rule import Group, Rule


def _lengths(tensors: list[Tensor]) -> Tensor:
    """The Euclidean norm of each tensor, as one vector on the device."""
    return torch.stack(torch._foreach_norm(tensors))


def _ratios(weights: Tensor, divisors: Tensor, *, zero: Tensor) -> list[Tensor]:
    """weights / divisors one by one, 1 where the weight is all zeros or `zero` says so."""
    safe = torch.where((weights == 0) | zero, 1.0, weights / divisors)
    return list(safe.unbind())


class Lars(Rule):
    """v = momentum * v + lr * ratio * (g + d * w); w -= v.

    ratio = coefficient * |w| / (|g| + d * |w| + eps), and 1 where |w| or |g| is 0 (You et al.
    2017, as TensorFlow's LARS has it).
    """

    def move(self, weights: list[Tensor], gradients: list[Tensor], group: Group) -> None:
        """Change weights and their velocities."""
        velocities = self.slots(weights, "velocity")
        steps = self._trusted(weights, gradients, group) if group["trusts"] else gradients
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, steps, alpha=group["lr"])
        torch._foreach_sub_(weights, velocities)

    @staticmethod
    def _trusted(weights: list[Tensor], gradients: list[Tensor], group: Group) -> list[Tensor]:
        """Gradients with the rule's own decay, each times its weight's ratio."""
        sizes, slopes, decay = _lengths(weights), _lengths(gradients), group["trust_decay"]
        trust = _ratios(
            group["trust_coefficient"] * sizes,
            slopes + decay * sizes + group["eps"],
            zero=slopes == 0,
        )
        steps = torch._foreach_add(gradients, weights, alpha=decay)
        torch._foreach_mul_(steps, trust)
        return list(steps)


class Lamb(Rule):
    """u = m̂ / (sqrt(v̂) + eps) + d * w; w -= lr * ratio * u, with Adam's m̂ and v̂.

    ratio = |w| / |u|, and 1 where either is 0 (You et al. 2020, no bounds on |w|).
    """

    def move(self, weights: list[Tensor], gradients: list[Tensor], group: Group) -> None:
        """Change weights, both averages and the count of steps."""
        steps = self._adam(weights, gradients, group)
        if group["trust_decay"]:
            torch._foreach_add_(steps, weights, alpha=group["trust_decay"])
        if group["trusts"]:
            sizes, strides = _lengths(weights), _lengths(steps)
            torch._foreach_mul_(steps, _ratios(sizes, strides, zero=strides == 0))
        torch._foreach_add_(weights, steps, alpha=-group["lr"])

    def _adam(self, weights: list[Tensor], gradients: list[Tensor], group: Group) -> list[Tensor]:
        """Adam's steps, without a learning rate."""
        keep_mean, keep_square = group["betas"]
        means, squares = self.slots(weights, "exp_avg"), self.slots(weights, "exp_avg_sq")
        taken = self.numbers(weights, "step", 0.0)
        torch._foreach_add_(taken, 1.0)
        counts = [float(number) for number in taken]
        torch._foreach_lerp_(means, gradients, 1 - keep_mean)
        torch._foreach_mul_(squares, keep_square)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - keep_square)
        roots = torch._foreach_div(squares, [1 - keep_square**count for count in counts])
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        steps = torch._foreach_div(means, [1 - keep_mean**count for count in counts])
        torch._foreach_div_(steps, roots)
        return list(steps)
