"""What our own update rules share; torch's classes serve where torch has the very formula."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Group = dict[str, Any]  # weights that share settings: "params", "lr" and the rule's own


class Rule(torch.optim.Optimizer):
    """An optimizer that moves all weights of a group at once and never waits for the device."""

    def __init__(self, groups: list[Group], **settings: Any) -> None:
        super().__init__(groups, {"lr": 0.0, **settings})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move every weight that has a gradient; gradients are only read."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self.move(weights, [weight.grad for weight in weights], group)

    @abstractmethod
    def move(self, weights: list[Tensor], gradients: list[Tensor], group: Group) -> None:
        """Change weights and their slots by the group's settings."""

    def slots(self, weights: list[Tensor], name: str, start: float = 0.0) -> list[Tensor]:
        """A remembered tensor per weight, in the weight's own memory layout."""
        for weight in weights:
            if name not in self.state[weight]:
                self.state[weight][name] = torch.full_like(weight, start)
        return [self.state[weight][name] for weight in weights]

    def numbers(self, weights: list[Tensor], name: str, start: float) -> list[Tensor]:
        """A remembered number per weight, kept in host memory: to read it waits for nothing.

        In float64, which holds any setting as it is.
        """
        for weight in weights:
            if name not in self.state[weight]:
                self.state[weight][name] = torch.tensor(start, dtype=torch.float64)
        return [self.state[weight][name] for weight in weights]
