"""Which weights decay."""

from torch import Tensor, nn

_NORMS = (nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)


def split_by_decay(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """(decayed, spared), chosen by the layer that owns a weight, not by its name."""
    decayed: list[Tensor] = []
    spared: list[Tensor] = []
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            spare = name == "bias" or isinstance(module, _NORMS)
            (spared if spare else decayed).append(weight)
    return decayed, spared
