"""The weights of a model in 16 bits, cast once a step instead of once a use."""

import torch
from torch import Tensor, nn

_COPY = "half_copy"  # the attribute of a weight that holds its copy


class HalfCopies:
    """16-bit copies of the float32 weights of convolutions and linear layers."""

    def __init__(self, model: nn.Module, half: torch.dtype) -> None:
        layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
        self._weights = [m.weight for m in layers if m.weight.dtype == torch.float32]
        self._copies = [torch.empty_like(weight, dtype=half) for weight in self._weights]
        for weight, copy in zip(self._weights, self._copies, strict=True):
            setattr(weight, _COPY, copy.detach())
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast all weights; after every update, and before the first pass."""
        torch._foreach_copy_(self._copies, self._weights)


def find_half_copy(weight: Tensor) -> Tensor | None:
    """The copy of a weight, where it has one; whoever changes the weight changes both."""
    return getattr(weight, _COPY, None)


def to_half(weight: Tensor, half: torch.dtype) -> Tensor:
    """A weight in 16 bits: its copy, where there is one, else cast now; no gradient passes."""
    copy = find_half_copy(weight)
    if copy is not None and copy.dtype == half:
        return copy
    return weight.detach().to(half)
