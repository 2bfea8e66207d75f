"""From uint8 on the host to what the model sees on the device. The only torch in this room."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Normaliser:
    """Moves images as uint8 and normalises them where they are used."""

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], *, device: torch.device
    ) -> None:
        exact = torch.tensor([mean, std], dtype=torch.float64)
        self._scale = (1 / (255 * exact[1])).float()
        self._shift = (-exact[0] / exact[1]).float()
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}
        self.device = device

    def images(self, pixels: NDArray[np.uint8]) -> Tensor:
        """[N, H, W, 3] bytes to [N, 3, H, W] floats, which are channels_last as they come."""
        raw = torch.from_numpy(pixels).to(self.device, non_blocking=True)
        scale, shift = self._row(raw.shape[2])
        normal = torch.addcmul(shift, raw.flatten(2).float(), scale)
        return normal.view(raw.shape).permute(0, 3, 1, 2)

    def integers(self, values: NDArray[np.int64]) -> Tensor:
        """Labels or indices on the device."""
        return torch.from_numpy(values).to(self.device, non_blocking=True)

    def _row(self, width: int) -> tuple[Tensor, Tensor]:
        """Scale and shift for a row of pixels: a tenth of the cost of broadcasting over three."""
        if width not in self._rows:
            self._rows[width] = (
                self._scale.repeat(width).to(self.device),
                self._shift.repeat(width).to(self.device),
            )
        return self._rows[width]
