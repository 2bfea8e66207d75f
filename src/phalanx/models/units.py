"""A model as an ordered table of units: forward, splits and per-layer reports walk it."""

from torch import Tensor, nn


class UnitModel(nn.Module):
    """A module tree with timm's names, and the order in which its parts are called."""

    units: dict[str, tuple[str, ...]]  # unit name to module paths, in the order of the data

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a normalised batch."""
        for paths in self.units.values():
            for path in paths:
                x = self.get_submodule(path)(x)
        return x
