"""Optimizer state that lies in host memory, and on the device only while weights are moved."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from phalanx.optim.half_weights import is_slot


class Offload:
    """What an optimizer of any rule remembers, at home on the host; copied there and back.

    Copies change no bit, so results are those of state that stays on the device. Counts of steps
    stay where they are.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._homes: dict[tuple[int, str], Tensor] = {}  # by weight and slot, for good

    @contextmanager
    def brought(self) -> Iterator[None]:
        """Within, the state lies beside the weights; after, it is on its way to the host."""
        self.bring()
        try:
            yield
        finally:
            self.take_back()

    @torch.no_grad()
    def bring(self) -> None:
        """Copy the state to the device of its weights."""
        for weight, name, value in self._slots():
            near = torch.empty_like(value, device=weight.device)
            self.optimizer.state[weight][name] = near.copy_(value, non_blocking=True)

    @torch.no_grad()
    def take_back(self) -> None:
        """Copy the state to the host, and let go of what the device has of it.

        The device is not waited for: `wait` before reading.
        """
        for weight, name, value in self._slots():
            home = self._home(weight, name, value)
            self.optimizer.state[weight][name] = home.copy_(value, non_blocking=True)

    def wait(self) -> None:
        """Return when the host has all that was taken back."""
        devices = {weight.device for weight, _, _ in self._slots()}
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # waits for the device

    def _slots(self) -> list[tuple[Tensor, str, Tensor]]:
        """Every weight with the name and value of what is remembered of all its elements."""
        return [
            (weight, name, value)
            for weight, slots in self.optimizer.state.items()
            for name, value in slots.items()
            if is_slot(value, weight)
        ]

    def _home(self, weight: Tensor, name: str, value: Tensor) -> Tensor:
        """Memory of the host for a slot: the same one at every step, laid out as the slot is."""
        home = self._homes.get((id(weight), name))
        if home is None or home.dtype != value.dtype or home.stride() != value.stride():
            # copies to and from pinned memory need no wait
            home = torch.empty_like(value, device="cpu", pin_memory=weight.device.type == "cuda")
            self._homes[id(weight), name] = home
        return home
