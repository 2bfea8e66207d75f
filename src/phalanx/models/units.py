"""A model as an ordered table of units: forward, splits and per-layer reports walk it."""

from collections.abc import Mapping

from torch import Tensor, nn


def as_units(model: nn.Module) -> "UnitModel":
    """A model as a table of units: any that has none is one unit."""
    if isinstance(model, UnitModel):
        return model
    whole = UnitModel()
    whole.add_module("model", model)
    whole.units["model"] = ("model",)
    return whole


class UnitModel(nn.Module):
    """A module tree with timm's names, and the order in which its parts are called.

    Modules hold no random state: those that drop something are listed in `chances` with how many
    uniform numbers an image they want, and are called with them.
    """

    units: dict[str, tuple[str, ...]]  # unit name to module paths, in the order of the data
    chances: dict[str, int]  # module path to numbers an image; only where the rate is not zero

    def __init__(self) -> None:
        super().__init__()
        self.units, self.chances = {}, {}

    def forward(self, x: Tensor, chances: Mapping[str, Tensor] | None = None) -> Tensor:
        """Logits of a normalised batch; without chances nothing is dropped."""
        for unit in self.units:
            x = self.run_unit(unit, x, chances)
        return x

    def run_unit(self, unit: str, x: Tensor, chances: Mapping[str, Tensor] | None = None) -> Tensor:
        """What one unit makes of the output of the one before it."""
        for path in self.units[unit]:
            module = self.get_submodule(path)
            x = module(x, chances[path]) if chances and path in chances else module(x)
        return x
