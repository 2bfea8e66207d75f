"""From uint8 on the host to what the model sees on the device."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_COPIES_KEPT = 2  # steps whose host memory is held until the device has it

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


class Normaliser:
    """Moves images to the device and normalises them, there or before.

    mean-std: values in 0..1, minus the mean, over the std. mean: values in 0..255, minus the mean.
    per-image: minus the image's own mean, over its own std, which counts as 1 / sqrt(values) at
    the least, so that a plain image does not blow up. none: values in 0..1.
    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        device: torch.device,
        how: str = "mean-std",
        on_host: bool = False,
        as_bytes: bool = True,
    ) -> None:
        exact = torch.tensor([mean, std], dtype=torch.float64)
        ones = torch.ones_like(exact[1])
        scale, shift = {
            "mean": (ones, -255 * exact[0]),
            "none": (ones / 255, 0 * ones),
        }.get(how, (1 / (255 * exact[1]), -exact[0] / exact[1]))
        self._scale, self._shift = scale.float(), shift.float()
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}
        self._own = how == "per-image"
        self._as_bytes, self._on_host = as_bytes, on_host
        self.device = device

    def images(self, pixels: NDArray[np.uint8] | Tensor) -> Tensor:
        """[N, H, W, 3] bytes to [N, 3, H, W] floats, which are channels_last as they come."""
        return self.normal(self.move(pixels))

    def move(self, pixels: NDArray[np.uint8] | Tensor) -> Tensor:
        """What travels: bytes, floats, or images that are normalised already."""
        raw = torch.from_numpy(pixels) if isinstance(pixels, np.ndarray) else pixels
        if self._on_host:
            raw = self._normalised(raw)
        elif not self._as_bytes:
            raw = raw.float()
        return raw.to(self.device, non_blocking=True)

    def normal(self, moved: Tensor) -> Tensor:
        """What `move` brought, as the model sees it."""
        return (moved if self._on_host else self._normalised(moved)).permute(0, 3, 1, 2)

    def _normalised(self, raw: Tensor) -> Tensor:
        normal = _by_themselves(raw) if self._own else self._by_constants(raw)
        return normal.view(raw.shape)

    def _by_constants(self, raw: Tensor) -> Tensor:
        scale, shift = self._row(raw.shape[2], raw.device)
        return torch.addcmul(shift, raw.flatten(2).float(), scale)

    def integers(self, values: NDArray[np.int64] | Tensor) -> Tensor:
        """Labels or indices on the device."""
        raw = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
        return raw.to(self.device, non_blocking=True)

    def _row(self, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Scale and shift for a row of pixels: a tenth of the cost of broadcasting over three."""
        if width not in self._rows:
            self._rows[width] = (
                self._scale.repeat(width).to(device),
                self._shift.repeat(width).to(device),
            )
        return self._rows[width]


def _by_themselves(raw: Tensor) -> Tensor:
    """Each image with its own mean and spread."""
    values = raw.flatten(1).float()
    spread, mean = torch.std_mean(values, 1, correction=0, keepdim=True)
    return (values - mean) / spread.clamp_min(values.shape[1] ** -0.5)


def pinned_memory(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """An array to fill that a GPU can copy from by itself."""
    array: NDArray[np.uint8] = torch.empty(shape, dtype=torch.uint8, pin_memory=True).numpy()
    return array


def copied_ahead(
    items: Iterable[_Item], move: Callable[[_Item], _Made], device: torch.device
) -> Generator[tuple[_Made, Any], None, None]:
    """What `move` brings to the device, on a stream of its own, and the event that it is there.

    Host memory is let go only when the device has taken it: `items` may reuse it then.
    """
    stream = torch.cuda.Stream(device)
    under_way: deque[tuple[_Item, Any]] = deque()
    for item in items:
        with torch.cuda.stream(stream):
            made = move(item)
        done = stream.record_event()
        under_way.append((item, done))
        if len(under_way) > _COPIES_KEPT:
            under_way.popleft()[1].synchronize()
        yield made, done


def take_over(tensors: Iterable[Tensor], done: Any) -> None:
    """Make tensors of another stream safe to use on this one, once their event has come."""
    stream = torch.cuda.current_stream()
    stream.wait_event(done)
    for tensor in tensors:
        tensor.record_stream(stream)
