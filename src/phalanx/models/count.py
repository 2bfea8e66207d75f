"""What each unit of a model holds, costs and keeps, counted on the meta device: nothing is run."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from phalanx.catalog.models import ModelSize
from phalanx.catalog.variant import Variant
from phalanx.errors import ConfigError
from phalanx.models.build import build_model
from phalanx.models.units import UnitModel, as_units

_MULTIPLY_ADD_FLOPS = 2
IN_HALF = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
_IN_FULL = (nn.GroupNorm, nn.LayerNorm)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, *_IN_FULL)


@dataclass(frozen=True, kw_only=True)
class UnitCount:
    """The figures of one unit."""

    name: str
    shape: tuple[int, ...]  # of its output, for one image
    parameters: int
    macs: int  # multiply-adds of convolutions and linear layers, for one image
    activation_bytes: int  # what the backward pass of the whole batch needs from it


def count_units(
    variant: Variant, *, num_classes: int, batch: int, image_size: int, half: bool = False
) -> list[UnitCount]:
    """The figures of every unit in the order of the data; half: activations as 16.32 keeps them."""
    model = as_units(build_on_meta(variant, num_classes=num_classes, half=half))
    images = torch.empty(batch, 3, image_size, image_size, device="meta")
    try:
        return walk(model, images)
    except ConfigError:
        raise
    except Exception as error:
        raise uncountable(error) from error


def build_on_meta(variant: Variant, *, num_classes: int, half: bool) -> nn.Module:
    """A network of shapes without values; half: its tensors have the bits of 16.32."""
    full_norms = variant.norm.full_precision
    # these norms name the device to autocast, which knows no meta; to_half does what they do
    variant = replace(variant, norm=replace(variant.norm, full_precision=False))
    try:
        with torch.device("meta"):
            model = build_model(variant, num_classes=num_classes)
    except Exception as error:  # of a plugin: our own networks never look at values
        raise uncountable(error) from error
    if half:
        to_half(model, full_norms=full_norms)
    return model


def uncountable(error: Exception) -> ConfigError:
    """What to say of a plugin's network that cannot be built or run without values."""
    return ConfigError(
        f"--plugin: its network cannot be counted: {error}; it is built on torch's device meta, "
        "where tensors have shapes but no values"
    )


def count_size(variant: Variant) -> tuple[ModelSize, int]:
    """The whole model's figures at its own image size and classes, and how many units it has."""
    counts = count_units(
        variant, num_classes=variant.classes, batch=2, image_size=variant.image_size
    )
    size = ModelSize(sum(unit.parameters for unit in counts), sum(unit.macs for unit in counts))
    return size, len(counts)


def walk(model: UnitModel, images: Tensor) -> list[UnitCount]:
    """The figures of every unit for that batch, in training and with nothing dropped."""
    model.train()
    kept = _Kept([*model.parameters(), *model.buffers()])
    counted: set[nn.Parameter] = set()
    found, x = [], images
    for unit in model.units:
        before = kept.bytes
        with saved_tensors_hooks(kept.add, _refuse), FlopCounterMode(display=False) as flops:
            x = _run_unit(model, unit, x)
        own = _parameters_of(model, unit) - counted
        counted |= own
        found.append(
            UnitCount(
                name=unit,
                shape=tuple(x.shape[1:]),
                parameters=sum(parameter.numel() for parameter in own),
                macs=flops.get_total_flops() // (_MULTIPLY_ADD_FLOPS * len(images)),
                activation_bytes=kept.bytes - before,
            )
        )
    return found


def _run_unit(model: UnitModel, unit: str, x: Tensor) -> Tensor:
    """The unit's output; what it cannot take is a mistake in the sizes, or a plugin's."""
    try:
        return model.run_unit(unit, x)
    except (RuntimeError, ValueError) as error:
        shape = " x ".join(map(str, x.shape))
        raise ConfigError(
            f"{unit} cannot take a batch of {shape}: {str(error).rstrip('.')}; "
            "try another --batch-size or --image-size"
        ) from error


def _parameters_of(model: UnitModel, unit: str) -> set[nn.Parameter]:
    """The weights that a unit calls its own."""
    return {
        parameter
        for path in model.units[unit]
        for parameter in model.get_submodule(path).parameters()
    }


class _Kept:
    """The storages autograd holds on to, each counted once, without those there anyway."""

    def __init__(self, anyway: Iterable[Tensor]):
        self.bytes = 0
        # held, so that no address is given out a second time
        self._seen = {tensor.untyped_storage()._cdata: tensor for tensor in anyway}

    def add(self, tensor: Tensor) -> None:
        """Count what a saved tensor keeps alive: of a view, all it is a view of."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen[storage._cdata] = tensor.detach()
            self.bytes += storage.nbytes()


def _refuse(kept: None) -> Tensor:
    """Nothing goes backward here: what was counted is not there to be taken out again."""
    raise AssertionError("a count has no backward pass")


def to_half(model: nn.Module, *, full_norms: bool) -> None:
    """Make a model on meta give each tensor the bits that it has under autocast on a GPU.

    Convolutions and linear layers compute in 16 bits, batch norm in what comes in, group norm
    in 32. Weights are made 16 bits too, which changes no figure: they are not counted in bytes.
    """
    for module in model.modules():
        if isinstance(module, IN_HALF):
            module.bfloat16()
            module.register_forward_pre_hook(_narrow_input)
        elif full_norms and isinstance(module, _NORMS):
            module.register_forward_pre_hook(_widen_input)
            module.register_forward_hook(_narrow_output)
        elif type(module) in _IN_FULL:
            module.register_forward_pre_hook(_widen_input)


def _narrow_input(module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """The input in 16 bits."""
    return inputs[0].bfloat16()


def _widen_input(module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """The input in 32 bits."""
    return inputs[0].float()


def _narrow_output(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """The output in 16 bits."""
    return output.bfloat16()
