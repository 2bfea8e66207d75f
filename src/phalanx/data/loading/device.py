"""From uint8 pixels on the host to the model's input on the device."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.data.transforms.normalization import find_scale_and_shift

_COPIES_KEPT = 2  # steps whose host memory is kept until it is copied

_Item = TypeVar("_Item")
_Copy = TypeVar("_Copy")


class Normaliser:
    """Copies images to the device and normalises them, on the device or before on the host.

    mean-std: values in 0..1, minus the mean, over the std. mean: values in 0..255, minus the mean.
    per-image: minus the image's own mean, over its own std, which is at least 1 / sqrt(values),
    so that an image of one colour is not divided by zero. none: values in 0..1.

    Called with [N, H, W, 3] bytes it returns [N, 3, H, W] floats, in channels_last memory format.
    `copy_pixels` and `normalise` are its two halves, for copies ahead of use.
    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        device: torch.device,
        normalization: str = "mean-std",
        on_host: bool = False,
        as_bytes: bool = True,
    ) -> None:
        constants = torch.tensor(
            find_scale_and_shift(mean, std, normalization), dtype=torch.float64
        )
        self._scale, self._shift = constants.float()
        self._row_constants: dict[int, tuple[Tensor, Tensor]] = {}
        self._per_image = normalization == "per-image"
        self._as_bytes, self._on_host = as_bytes, on_host
        self.device = device

    def __call__(self, pixels: NDArray[np.uint8] | Tensor) -> Tensor:
        """The model's input, on the device."""
        return self.normalise(self.copy_pixels(pixels))

    def copy_pixels(self, pixels: NDArray[np.uint8] | Tensor) -> Tensor:
        """A copy on the device: of bytes, of floats, or of images normalised on the host."""
        raw = torch.from_numpy(pixels) if isinstance(pixels, np.ndarray) else pixels
        if self._on_host:
            raw = self._normalise_values(raw)
        elif not self._as_bytes:
            raw = raw.float()
        return raw.to(self.device, non_blocking=True)

    def copy_integers(self, values: NDArray[np.int64] | Tensor) -> Tensor:
        """A copy of labels or indices on the device."""
        raw = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
        return raw.to(self.device, non_blocking=True)

    def normalise(self, copied: Tensor) -> Tensor:
        """The model's input, from what `copy_pixels` returned."""
        return (copied if self._on_host else self._normalise_values(copied)).permute(0, 3, 1, 2)

    def _normalise_values(self, raw: Tensor) -> Tensor:
        if self._per_image:
            values = raw.flatten(1).float()
            std, mean = torch.std_mean(values, 1, correction=0, keepdim=True)
            return ((values - mean) / std.clamp_min(values.shape[1] ** -0.5)).view(raw.shape)
        # constants for a whole row of pixels: a tenth of the cost of broadcasting three channels
        width = raw.shape[2]
        if width not in self._row_constants:
            scale, shift = self._scale.repeat(width), self._shift.repeat(width)
            self._row_constants[width] = scale.to(raw.device), shift.to(raw.device)
        scale, shift = self._row_constants[width]
        return torch.addcmul(shift, raw.flatten(2).float(), scale).view(raw.shape)


def allocate_pinned(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """An array in pinned memory, which a GPU can copy asynchronously."""
    array: NDArray[np.uint8] = torch.empty(shape, dtype=torch.uint8, pin_memory=True).numpy()
    return array


def copy_ahead(
    items: Iterable[_Item], copy: Callable[[_Item], _Copy], device: torch.device
) -> Generator[tuple[_Copy, Any], None, None]:
    """Each item's copy, made on a separate CUDA stream, and the event of its completion.

    An item is kept until the device has copied it: only then may `items` reuse its host memory.
    """
    stream = torch.cuda.Stream(device)
    in_flight: deque[tuple[_Item, Any]] = deque()
    for item in items:
        with torch.cuda.stream(stream):
            copied = copy(item)
        done = stream.record_event()
        in_flight.append((item, done))
        if len(in_flight) > _COPIES_KEPT:
            in_flight.popleft()[1].synchronize()
        yield copied, done


def wait_for_copy(tensors: Iterable[Tensor], done: Any, device: torch.device) -> None:
    """Make the device's stream wait for tensors copied on another one, and keep their memory.

    It need not be the current device: another one may score. Without record_stream the allocator
    would reuse their memory for the other stream's next copy as soon as Python frees them, though
    work queued on this stream may still read it.
    """
    stream = torch.cuda.current_stream(device)
    stream.wait_event(done)
    for tensor in tensors:
        tensor.record_stream(stream)
