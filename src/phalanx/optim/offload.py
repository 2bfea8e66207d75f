"""Optimizer state that stays in host memory, and is on the device only during an update."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from phalanx.optim.half_weights import is_per_element


class OffloadedState:
    """The state of any optimizer, kept in host memory and copied to the device for each update.

    Copies are exact, so results are the same as with state on the device. Counts of steps are not
    moved.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._buffers: dict[tuple[int, str], Tensor] = {}  # by weight and name, reused every step

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Context in which the state is on the device; its end starts the copy to the host."""
        try:
            with torch.no_grad():
                for weight, name, value in self._tensors():
                    copy = torch.empty_like(value, device=weight.device)
                    self.optimizer.state[weight][name] = copy.copy_(value, non_blocking=True)
            yield
        finally:
            self.to_host()

    @torch.no_grad()
    def to_host(self) -> None:
        """Copy the state to the host, and free it on the device.

        Does not wait for the device: call `synchronize` before reading the state.
        """
        for weight, name, value in self._tensors():
            buffer = self._find_buffer(weight, name, value)
            self.optimizer.state[weight][name] = buffer.copy_(value, non_blocking=True)

    def synchronize(self) -> None:
        """Wait until all copies to the host are done."""
        for device in {weight.device for weight, _, _ in self._tensors()}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def _tensors(self) -> list[tuple[Tensor, str, Tensor]]:
        """(weight, name, value) of all state tensors with the shape of their weight."""
        return [
            (weight, name, value)
            for weight, state in self.optimizer.state.items()
            for name, value in state.items()
            if is_per_element(value, weight)
        ]

    def _find_buffer(self, weight: Tensor, name: str, value: Tensor) -> Tensor:
        """Host memory in the layout of `value`, the same in every step."""
        buffer = self._buffers.get((id(weight), name))
        if buffer is None or buffer.dtype != value.dtype or buffer.stride() != value.stride():
            # copies to and from pinned memory are asynchronous
            buffer = torch.empty_like(value, device="cpu", pin_memory=weight.device.type == "cuda")
            self._buffers[id(weight), name] = buffer
        return buffer
