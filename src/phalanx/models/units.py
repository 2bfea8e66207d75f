"""A model as an ordered table of units, used by forward, pipeline splits and reports.

Also the random numbers of dropout and drop-path, which are drawn outside the model. They are the
counter-based draws of phalanx.plan.draws, made on the device: a number is a pure function of the
seed, the module's path, and the image's position in the training stream.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from phalanx.kernels.random_bits import draw_bits, shift_right, to_signed
from phalanx.plan.draws import stream_key

FusedUnit = Callable[[Tensor, Tensor | None], Tensor]
"""Runs a whole unit, given its input and the noise of the module in it that has dropout."""


class UnitModel(nn.Module):
    """A module tree with timm's names, and the order in which its parts are called.

    Modules have no random state. Those with dropout or drop-path are listed in `noise_sizes`, and
    are called with that many uniform numbers per image.
    """

    units: dict[str, tuple[str, ...]]  # unit name to module paths, in the order of execution
    noise_sizes: dict[str, int]  # module path to numbers per image, if the rate is not zero
    fused: dict[str, FusedUnit]  # units with fused kernels for training

    def __init__(self) -> None:
        super().__init__()
        self.units, self.noise_sizes, self.fused = {}, {}, {}

    @property
    def chances(self) -> dict[str, int]:
        """The older name of `noise_sizes`, for plugins."""
        return self.noise_sizes

    @chances.setter
    def chances(self, sizes: dict[str, int]) -> None:
        self.noise_sizes = sizes

    def add_block(self, path: str, block: nn.Module, *, noise: bool = False) -> None:
        """Add a block at the path `stage.index` as a unit; index 0 creates the stage."""
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
        """The output of one unit, from the output of the previous one."""
        if unit in self.fused and self.training and torch.is_grad_enabled():
            drops = [noise[path] for path in self.units[unit] if noise and path in noise]
            return self.fused[unit](x, drops[0] if drops else None)
        for path in self.units[unit]:
            module = self.get_submodule(path)
            x = module(x, noise[path]) if noise and path in noise else module(x)
        return x


class ModelPart(UnitModel):
    """A stage: some consecutive units of a model, whose modules keep their names.

    It shares these modules with the whole model.
    """

    def __init__(self, whole: UnitModel, units: Sequence[str]) -> None:
        super().__init__()
        self.is_first = units[0] == next(iter(whole.units))
        for unit in units:
            self.units[unit] = whole.units[unit]
            for path in whole.units[unit]:
                self._add_at_path(path, whole.get_submodule(path))
        modules = {path for paths in self.units.values() for path in paths}
        self.noise_sizes = {
            path: size for path, size in find_noise_sizes(whole).items() if path in modules
        }

    def _add_at_path(self, path: str, module: nn.Module) -> None:
        """Add a module at a path, creating empty parent modules."""
        *parents, name = path.split(".")
        holder: nn.Module = self
        for parent in parents:
            if not hasattr(holder, parent):
                holder.add_module(parent, nn.Module())
            holder = holder.get_submodule(parent)
        holder.add_module(name, module)


def select_own_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a whole model that belong to this one: all, unless it is a part."""
    if not isinstance(model, ModelPart):
        return dict(tensors)
    own = model.state_dict()  # an optimizer's tensors are named WEIGHT:NAME
    return {name: tensor for name, tensor in tensors.items() if name.partition(":")[0] in own}


def to_unit_model(model: nn.Module) -> UnitModel:
    """The model itself if it has units, else a model with it as the only unit."""
    if isinstance(model, UnitModel):
        return model
    whole = UnitModel()
    whole.add_module("model", model)
    whole.units["model"] = ("model",)
    return whole


def find_noise_sizes(model: nn.Module) -> Mapping[str, int]:
    """How many uniform numbers per image a model's modules need, by module path.

    Plugins may still use the older name `chances`.
    """
    return getattr(model, "noise_sizes", getattr(model, "chances", {}))


@lru_cache(maxsize=64)
def _stream_keys(seed: int, names: tuple[str, ...], device: torch.device) -> Tensor:
    """The keys of the named random streams, [names, 1, 1]."""
    keys = [to_signed(int(stream_key(seed, name, 0))) for name in names]
    return torch.tensor(keys, dtype=torch.int64, device=device)[:, None, None]


def draw_dropout_noise(
    sizes: Mapping[str, int], *, seed: int, first: int | Tensor, images: int, device: torch.device
) -> dict[str, Tensor]:
    """For each module path, [images, size] uniform numbers in [0, 1), multiples of 2**-24.

    Paths of the same size are drawn together: a kernel costs the same for one or fifty.
    """
    noise: dict[str, Tensor] = {}
    for size in sorted(set(sizes.values())):
        paths = tuple(path for path, own in sizes.items() if own == size)
        counters = torch.arange(images * size, device=device) + first * size
        bits = draw_bits(counters.view(images, size), _stream_keys(seed, paths, device))
        noise |= dict(zip(paths, shift_right(bits, 40).float() * 2.0**-24, strict=True))
    return noise
