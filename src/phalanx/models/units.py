"""A model as an ordered table of units: forward, splits and per-layer reports go through it."""

from collections.abc import Mapping

from torch import Tensor, nn


class UnitModel(nn.Module):
    """A module tree with timm's names, and the order in which its parts are called.

    Modules hold no random state. Those that drop something are listed in `noise_sizes`, and are
    called with that many uniform numbers for each image.
    """

    units: dict[str, tuple[str, ...]]  # unit name to module paths, in the order of the data
    noise_sizes: dict[str, int]  # module path to numbers per image, where the rate is not zero

    def __init__(self) -> None:
        super().__init__()
        self.units, self.noise_sizes = {}, {}

    @property
    def chances(self) -> dict[str, int]:
        """The older name of `noise_sizes`, for plugins."""
        return self.noise_sizes

    @chances.setter
    def chances(self, sizes: dict[str, int]) -> None:
        self.noise_sizes = sizes

    def add_block(self, path: str, block: nn.Module, *, noise: bool = False) -> None:
        """Add a block at the path `stage.index` as a unit of its own; index 0 makes the stage."""
        stage, _, index = path.rpartition(".")
        parent, _, name = stage.rpartition(".")
        if index == "0":
            self.get_submodule(parent).add_module(name, nn.Sequential())
        self.get_submodule(stage).add_module(index, block)
        self.units[path.replace(".", "/")] = (path,)
        if noise:
            self.noise_sizes[path] = 1

    def forward(self, x: Tensor, noise: Mapping[str, Tensor] | None = None) -> Tensor:
        """Logits of a normalised batch; without noise nothing is dropped."""
        for unit in self.units:
            x = self.run_unit(unit, x, noise)
        return x

    def run_unit(self, unit: str, x: Tensor, noise: Mapping[str, Tensor] | None = None) -> Tensor:
        """What one unit makes of the output of the one before it."""
        for path in self.units[unit]:
            module = self.get_submodule(path)
            x = module(x, noise[path]) if noise and path in noise else module(x)
        return x


def to_unit_model(model: nn.Module) -> UnitModel:
    """The model itself if it has units, else a model of which it is the only unit."""
    if isinstance(model, UnitModel):
        return model
    whole = UnitModel()
    whole.add_module("model", model)
    whole.units["model"] = ("model",)
    return whole


def find_noise_sizes(model: nn.Module) -> Mapping[str, int]:
    """How many uniform numbers per image a model's modules want, by module path.

    Plugins may still use the older name `chances`.
    """
    return getattr(model, "noise_sizes", getattr(model, "chances", {}))
