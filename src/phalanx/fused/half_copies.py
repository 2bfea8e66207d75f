"""16-bit copies of the weights of fused units, cast all together once per pass."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from phalanx.models.units import UnitModel

_COPY = "half_copy"  # the attribute of a weight that holds its copy


def cast_before_passes(model: UnitModel, half: torch.dtype) -> None:
    """Refresh the copies of fused units' weights before every training pass, by a hook."""
    paths = [path for unit in model.fused for path in model.units[unit]]
    modules = [layer for path in paths for layer in model.get_submodule(path).modules()]
    weights, copies = attach_half_copies(modules, half)

    def refresh(model: nn.Module, _: object) -> None:
        if copies and model.training and torch.is_grad_enabled():
            with torch.no_grad():
                torch._foreach_copy_(copies, weights)

    model.register_forward_pre_hook(refresh)


def attach_half_copies(
    modules: Iterable[nn.Module], half: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Attach a copy to each float32 weight of convolutions and linear layers; returns both."""
    layers = [module for module in modules if isinstance(module, nn.Conv2d | nn.Linear)]
    weights: list[Tensor] = [m.weight for m in layers if m.weight.dtype == torch.float32]
    copies = [weight.detach().to(half) for weight in weights]
    for weight, copy in zip(weights, copies, strict=True):
        setattr(weight, _COPY, copy)
    return weights, copies


def find_half_copy(weight: Tensor) -> Tensor | None:
    """The copy of a weight, if it has one; code that changes the weight must change both."""
    return getattr(weight, _COPY, None)


def to_half(weight: Tensor, half: torch.dtype) -> Tensor:
    """A weight in 16 bits, detached: its copy if it has one, else cast now."""
    copy = find_half_copy(weight)
    if copy is not None and copy.dtype == half:
        return copy
    return weight.detach().to(half)
