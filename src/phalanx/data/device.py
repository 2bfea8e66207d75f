"""From uint8 on the host to what the model sees on the device. The only torch in this room."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Normaliser:
    """Moves images as uint8 and normalises them where they are used."""

    def __init__(
        self, mean: tuple[float, ...], std: tuple[float, ...], *, device: torch.device
    ) -> None:
        wide = torch.tensor([mean, std], dtype=torch.float64).view(2, 1, 3, 1, 1)
        self._scale = (1 / (255 * wide[1])).float().to(device)
        self._shift = (-wide[0] / wide[1]).float().to(device)
        self.device = device

    def images(self, pixels: NDArray[np.uint8]) -> Tensor:
        """[N, H, W, 3] bytes to [N, 3, H, W] floats, which are channels_last as they come."""
        raw = torch.from_numpy(pixels).to(self.device, non_blocking=True)
        return torch.addcmul(self._shift, raw.permute(0, 3, 1, 2).float(), self._scale)

    def integers(self, values: NDArray[np.int64]) -> Tensor:
        """Labels or indices on the device."""
        return torch.from_numpy(values).to(self.device, non_blocking=True)
