"""The cost of a model, found on the meta device, where tensors have shapes but no values.

For each unit: parameters, multiply-adds, and the bytes saved for the backward pass.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from phalanx.catalog.models import ModelSize
from phalanx.catalog.variant import Variant
from phalanx.errors import ConfigError
from phalanx.models.build import build_model
from phalanx.models.units import UnitModel, to_unit_model

_FLOPS_PER_MAC = 2
AUTOCAST_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)  # these compute in 16 bits
_FLOAT32_NORMS = (nn.GroupNorm, nn.LayerNorm)  # under autocast
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, *_FLOAT32_NORMS)


Fuse = Callable[[UnitModel], object]
"""Sets a model's `fused` to the units for which there are fused kernels."""


@dataclass(frozen=True, kw_only=True)
class UnitCost:
    """The figures of one unit."""

    name: str
    shape: tuple[int, ...]  # of its output, for one image
    parameters: int
    macs: int  # multiply-adds of convolutions and linear layers, for one image
    activation_bytes: int  # saved for the backward pass of the whole batch


def count_units(
    variant: Variant, *, num_classes: int, batch: int, image_size: int, half: bool = False
) -> list[UnitCost]:
    """The figures of every unit in order; half: activations as with precision 16.32."""
    model = to_unit_model(build_on_meta(variant, num_classes=num_classes, half=half))
    images = torch.empty(batch, 3, image_size, image_size, device="meta")
    try:
        return count_model(model, images)
    except ConfigError:
        raise
    except Exception as error:
        raise explain_meta_error(error) from error


def build_on_meta(
    variant: Variant, *, num_classes: int, half: bool, fuse: Fuse | None = None
) -> nn.Module:
    """A network on the meta device; half: its tensors have the dtypes of precision 16.32.

    fuse: makes units use fused kernels.
    """
    full_norms = variant.norm.full_precision
    # these norms call autocast, which does not support meta; emulate_autocast replaces it
    variant = replace(variant, norm=replace(variant.norm, full_precision=False))
    try:
        with torch.device("meta"):
            model = build_model(variant, num_classes=num_classes)
    except Exception as error:  # from a plugin: our own networks never read values
        raise explain_meta_error(error) from error
    if fuse is not None and isinstance(model, UnitModel):
        fuse(model.to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    if half:
        emulate_autocast(model, full_norms=full_norms)
    return model


def explain_meta_error(error: Exception) -> ConfigError:
    """The error for a plugin's network that cannot be built or run on meta tensors."""
    return ConfigError(
        f"--plugin: its network cannot be counted: {error}; it is built on torch's device meta, "
        "where tensors have shapes but no values"
    )


def count_size(variant: Variant) -> tuple[ModelSize, int]:
    """The size of a model at its own image size and classes, and its number of units."""
    counts = count_units(
        variant, num_classes=variant.classes, batch=2, image_size=variant.image_size
    )
    size = ModelSize(sum(unit.parameters for unit in counts), sum(unit.macs for unit in counts))
    return size, len(counts)


def count_model(model: UnitModel, images: Tensor) -> list[UnitCost]:
    """The figures of every unit for a batch, in training without dropout."""
    model.train()
    saved = _SavedBytes([*model.parameters(), *model.buffers()])
    counted: set[nn.Parameter] = set()
    counts, x = [], images
    for unit, paths in model.units.items():
        before = saved.bytes
        hooks = saved_tensors_hooks(saved.add, _refuse_backward)
        with hooks, FlopCounterMode(display=False) as flops:
            x = _run_unit(model, unit, x)
        own = {weight for path in paths for weight in model.get_submodule(path).parameters()}
        counts.append(
            UnitCost(
                name=unit,
                shape=tuple(x.shape[1:]),
                parameters=sum(weight.numel() for weight in own - counted),
                macs=flops.get_total_flops() // (_FLOPS_PER_MAC * len(images)),
                activation_bytes=saved.bytes - before,
            )
        )
        counted |= own
    return counts


def _run_unit(model: UnitModel, unit: str, x: Tensor) -> Tensor:
    """The unit's output; ConfigError if it does not accept a batch of this shape."""
    try:
        return model.run_unit(unit, x)
    except (RuntimeError, ValueError) as error:
        shape = " x ".join(map(str, x.shape))
        raise ConfigError(
            f"{unit} cannot take a batch of {shape}: {str(error).rstrip('.')}; "
            "try another --batch-size or --image-size"
        ) from error


class _SavedBytes:
    """Bytes of the storages that autograd saves, each counted once, without `existing` ones."""

    def __init__(self, existing: Iterable[Tensor]):
        self.bytes = 0
        # the tensors are kept alive, so that no address is reused
        self._seen = {tensor.untyped_storage()._cdata: tensor for tensor in existing}

    def add(self, tensor: Tensor) -> None:
        """Count the whole storage that a saved tensor, maybe a view, keeps alive."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen[storage._cdata] = tensor.detach()
            self.bytes += storage.nbytes()


def _refuse_backward(saved: None) -> Tensor:
    """Raise: tensors were only counted, not saved."""
    raise AssertionError("a count has no backward pass")


def emulate_autocast(model: nn.Module, *, full_norms: bool) -> None:
    """Give each tensor of a model on meta the dtype that it has under autocast on a GPU.

    Convolutions and linear layers compute in 16 bits, batch norm in the dtype of its input, group
    norm in 32 bits. Weights become 16-bit, too, which does not matter: they are not counted.
    """
    for module in model.modules():
        if isinstance(module, AUTOCAST_LAYERS):
            module.bfloat16()
            module.register_forward_pre_hook(lambda _, inputs: inputs[0].bfloat16())
        elif type(module) in _FLOAT32_NORMS or (full_norms and isinstance(module, _NORMS)):
            module.register_forward_pre_hook(lambda _, inputs: inputs[0].float())
            if full_norms:
                module.register_forward_hook(lambda _, inputs, output: output.bfloat16())
