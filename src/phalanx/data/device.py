"""From uint8 on the host to what the model sees on the device. The only torch in this room."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Normaliser:
    """Moves images as uint8 and normalises them where they are used.

    mean-std: values in 0..1, minus the mean, over the std. mean: values in 0..255, minus the mean.
    per-image: minus the image's own mean, over its own std, which counts as 1 / sqrt(values) at
    the least, so that a plain image does not blow up.
    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        device: torch.device,
        how: str = "mean-std",
    ) -> None:
        exact = torch.tensor([mean, std], dtype=torch.float64)
        scale, shift = 1 / (255 * exact[1]), -exact[0] / exact[1]
        if how == "mean":
            scale, shift = torch.ones_like(scale), -255 * exact[0]
        self._scale, self._shift = scale.float(), shift.float()
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}
        self._own = how == "per-image"
        self.device = device

    def images(self, pixels: NDArray[np.uint8]) -> Tensor:
        """[N, H, W, 3] bytes to [N, 3, H, W] floats, which are channels_last as they come."""
        raw = torch.from_numpy(pixels).to(self.device, non_blocking=True)
        normal = by_themselves(raw) if self._own else self._by_constants(raw)
        return normal.view(raw.shape).permute(0, 3, 1, 2)

    def _by_constants(self, raw: Tensor) -> Tensor:
        scale, shift = self._row(raw.shape[2])
        return torch.addcmul(shift, raw.flatten(2).float(), scale)

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


def by_themselves(raw: Tensor) -> Tensor:
    """Each image with its own mean and spread."""
    values = raw.flatten(1).float()
    spread, mean = torch.std_mean(values, 1, correction=0, keepdim=True)
    return (values - mean) / spread.clamp_min(values.shape[1] ** -0.5)
