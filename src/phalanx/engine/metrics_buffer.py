"""Each step's numbers, kept on the device until somebody must look."""

from math import isnan

import torch
from torch import Tensor

from phalanx.engine.state import StepNumbers, Sums


class MetricsBuffer:
    """A buffer of [loss, gradient norm, top-1] a step, read in one go."""

    def __init__(self, device: torch.device, capacity: int = 512) -> None:
        self._rows = torch.zeros(capacity, 3, device=device)
        self._count = 0

    @property
    def full(self) -> bool:
        """Whether the buffer must be read before the next step."""
        return self._count == len(self._rows)

    def add(self, numbers: Tensor) -> None:
        """Take one step's numbers, without waiting for them."""
        self._rows[self._count] = numbers
        self._count += 1

    def settle(self, sums: Sums) -> list[StepNumbers]:
        """All steps since the last time, added to the sums. Waits for the device."""
        rows = [
            StepNumbers(loss, grad_norm, None if isnan(top1) else top1)
            for loss, grad_norm, top1 in self._rows[: self._count].tolist()
        ]
        self._count = 0
        for row in rows:
            sums.add(row)
        return rows
