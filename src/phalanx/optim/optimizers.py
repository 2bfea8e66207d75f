"""Optimizers that torch does not have, or not with the same formula."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Group = dict[str, Any]  # weights that share settings: "params", "lr" and the optimizer's own


class _ForeachOptimizer(torch.optim.Optimizer):
    """Updates all weights of a group at once, and never waits for the device."""

    def __init__(self, groups: list[Group], **defaults: Any) -> None:
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient; gradients are only read."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self.update_group(weights, [weight.grad for weight in weights], group)

    @abstractmethod
    def update_group(self, weights: list[Tensor], gradients: list[Tensor], group: Group) -> None:
        """Update weights and their state with the group's settings."""

    def tensors(self, name: str, weights: list[Tensor], start: float = 0.0) -> list[Tensor]:
        """A state tensor for each weight, in the weight's memory layout."""
        for weight in weights:
            if name not in self.state[weight]:
                self.state[weight][name] = torch.full_like(weight, start)
        return [self.state[weight][name] for weight in weights]

    def numbers(self, name: str, weights: list[Tensor], start: float) -> list[Tensor]:
        """A scalar state for each weight, in host memory, so that reading it does not wait.

        In float64, which represents any setting exactly.
        """
        for weight in weights:
            if name not in self.state[weight]:
                self.state[weight][name] = torch.tensor(start, dtype=torch.float64)
        return [self.state[weight][name] for weight in weights]


class RmspropTf(_ForeachOptimizer):
    """s = d * s + (1 - d) * g²; b = momentum * b + lr * g / sqrt(s + eps); w -= b.

    TensorFlow's RMSprop: PyTorch's has eps outside the root and the learning rate outside the
    buffer. `start` is the initial s: 1 in TensorFlow 1 and in PopART's variant of that name, 0 in
    Keras.
    """

    def update_group(self, weights: list[Tensor], gradients: list[Tensor], group: Group) -> None:
        """Update weights, mean squares and momentum buffers."""
        squares = self.tensors("square_avg", weights, group["start"])
        torch._foreach_mul_(squares, group["decay_rate"])
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - group["decay_rate"])
        roots = torch._foreach_add(squares, group["eps"])
        torch._foreach_sqrt_(roots)
        if not group["momentum"]:
            torch._foreach_addcdiv_(weights, gradients, roots, value=-group["lr"])
            return
        buffers = self.tensors("momentum_buffer", weights)
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_addcdiv_(buffers, gradients, roots, value=group["lr"])
        torch._foreach_sub_(weights, buffers)


class SgdCombined(_ForeachOptimizer):
    """v = momentum * v + scale * g; w -= lr / scale * v.

    The velocity is stored scaled, for formats with few small numbers: the scale only affects how
    the velocity is rounded. It follows the loss scale (PopART: velocity scaling = loss scaling /
    ratio), which may change during a run, so every velocity has its own scale in the state and is
    rescaled when that changes (`phalanx.optim.update.set_velocity_scale`).
    """

    def update_group(self, weights: list[Tensor], gradients: list[Tensor], group: Group) -> None:
        """Update weights and velocities."""
        scale = group["velocity_scale"]
        velocities = self.tensors("velocity", weights)
        old_scales = self.numbers("velocity_scale", weights, scale)
        factors = [scale / float(old) for old in old_scales]
        if any(factor != 1.0 for factor in factors):
            torch._foreach_mul_(velocities, factors)
            for old in old_scales:
                old.fill_(scale)
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, gradients, alpha=scale)
        torch._foreach_add_(weights, velocities, alpha=-group["lr"] / scale)


# Lars and Lamb, for large batches: a step is proportional to the norm of its weight. A group with
# "trust_ratio" false, that of norms and biases, is updated by the plain formula. "trust_decay" is
# the weight decay of these two optimizers, inside the step whose norm is measured.


def _norms(tensors: list[Tensor]) -> Tensor:
    """The Euclidean norm of each tensor, as one vector on the device."""
    return torch.stack(torch._foreach_norm(tensors))


def _trust_ratios(weight_norms: Tensor, divisors: Tensor, *, zero: Tensor) -> list[Tensor]:
    """One ratio for each weight: 1 if the weight is all zeros, or if `zero` is true."""
    ratios = torch.where((weight_norms == 0) | zero, 1.0, weight_norms / divisors)
    return list(ratios.unbind())


class Lars(_ForeachOptimizer):
    """v = momentum * v + lr * ratio * (g + d * w); w -= v.

    ratio = coefficient * |w| / (|g| + d * |w| + eps), and 1 where |w| or |g| is 0 (You et al.
    2017, as in TensorFlow's LARS).
    """

    def update_group(self, weights: list[Tensor], gradients: list[Tensor], group: Group) -> None:
        """Update weights and velocities."""
        velocities, steps = self.tensors("velocity", weights), gradients
        if group["trust_ratio"]:
            norms, slopes, decay = _norms(weights), _norms(gradients), group["trust_decay"]
            ratios = _trust_ratios(
                group["coefficient"] * norms,
                slopes + decay * norms + group["eps"],
                zero=slopes == 0,
            )
            steps = list(torch._foreach_add(gradients, weights, alpha=decay))
            torch._foreach_mul_(steps, ratios)
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, steps, alpha=group["lr"])
        torch._foreach_sub_(weights, velocities)


class Lamb(_ForeachOptimizer):
    """u = m̂ / (sqrt(v̂) + eps) + d * w; w -= lr * ratio * u, with Adam's m̂ and v̂.

    ratio = |w| / |u|, and 1 where either is 0 (You et al. 2020, no bounds on |w|).
    """

    def update_group(self, weights: list[Tensor], gradients: list[Tensor], group: Group) -> None:
        """Update weights, both averages and the count of steps."""
        steps = self._adam_steps(weights, gradients, group)
        if group["trust_decay"]:
            torch._foreach_add_(steps, weights, alpha=group["trust_decay"])
        if group["trust_ratio"]:
            norms, lengths = _norms(weights), _norms(steps)
            torch._foreach_mul_(steps, _trust_ratios(norms, lengths, zero=lengths == 0))
        torch._foreach_add_(weights, steps, alpha=-group["lr"])

    def _adam_steps(
        self, weights: list[Tensor], gradients: list[Tensor], group: Group
    ) -> list[Tensor]:
        """Adam's steps, without the learning rate."""
        beta1, beta2 = group["betas"]
        means, squares = self.tensors("exp_avg", weights), self.tensors("exp_avg_sq", weights)
        counters = self.numbers("step", weights, 0.0)
        torch._foreach_add_(counters, 1.0)
        counts = [float(counter) for counter in counters]
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
        roots = torch._foreach_div(squares, [1 - beta2**count for count in counts])
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        steps = torch._foreach_div(means, [1 - beta1**count for count in counts])
        torch._foreach_div_(steps, roots)
        return list(steps)
