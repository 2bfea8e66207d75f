"""Each step's metrics, kept on the device until somebody must look."""

from math import isnan

import torch
from torch import Tensor

from phalanx.engine.state import MetricSums, StepMetrics


class MetricsBuffer:
    """[loss, gradient norm, top-1] of each step, read in one go."""

    def __init__(self, device: torch.device, capacity: int = 512) -> None:
        self._rows = torch.zeros(capacity, 3, device=device)
        self._count = 0

    @property
    def is_full(self) -> bool:
        """Whether the buffer must be read before the next step."""
        return self._count == len(self._rows)

    def add(self, metrics: Tensor) -> None:
        """Take one step's metrics, without waiting for them."""
        self._rows[self._count] = metrics
        self._count += 1

    def read(self, sums: MetricSums) -> list[StepMetrics]:
        """All steps since the last time, added to the sums. Waits for the device."""
        rows = [
            StepMetrics(loss, grad_norm, None if isnan(top1) else top1)
            for loss, grad_norm, top1 in self._rows[: self._count].tolist()
        ]
        self._count = 0
        for row in rows:
            sums.add(row)
        return rows
