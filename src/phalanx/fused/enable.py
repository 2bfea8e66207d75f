"""Which units of a model train with our own kernels instead of their modules."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from phalanx.fused.bottleneck import build_folded_bottleneck, build_mean_head
from phalanx.fused.efficientnet_stem_head import build_efficientnet_head, build_efficientnet_stem
from phalanx.fused.mbconv_block import build_mbconv_block
from phalanx.fused.module_checks import UnitNotFused, check_modules
from phalanx.fused.residual import build_basic_block, build_bottleneck, build_residual_pair
from phalanx.fused.stem import build_conv_pool, build_pooled_pair, build_stem, build_whitening
from phalanx.kernels.gpu import find_gpu_problem
from phalanx.models.airbench import PooledConvPair
from phalanx.models.efficientnet import DepthwiseSeparableConv, InvertedResidual
from phalanx.models.resnet import BasicBlock, Bottleneck, ConvPool, ResidualConvPair
from phalanx.models.units import FusedUnit, UnitModel
from phalanx.units import format_plural

_Builder = Callable[[Sequence[nn.Module], torch.dtype], FusedUnit]
"""Makes the function of a unit from its modules and the 16-bit type, or raises UnitNotFused."""

# by the class of a unit's only module, or by the name of a unit of several; the first that works
_BUILDERS: dict[type[nn.Module] | str, tuple[_Builder, ...]] = {
    BasicBlock: (build_basic_block,),
    Bottleneck: (build_folded_bottleneck, build_bottleneck),
    ConvPool: (build_conv_pool,),
    PooledConvPair: (build_pooled_pair,),
    ResidualConvPair: (build_residual_pair,),
    DepthwiseSeparableConv: (build_mbconv_block,),
    InvertedResidual: (build_mbconv_block,),
    "stem": (build_efficientnet_stem, build_whitening, build_stem),
    "head": (build_mean_head, build_efficientnet_head),
}

_HALF_TYPES = (torch.float16, torch.bfloat16)


def fuse_units(model: UnitModel, half: torch.dtype, *, interpreted: bool = False) -> dict[str, str]:
    """Add every supported unit to `model.fused`; returns why the others are not supported.

    interpreted: also on the CPU, for tests in Triton's interpreter; then `half` may be any dtype.
    """
    device = next(model.parameters()).device
    on_gpu = device.type == "cuda" and not interpreted
    problem = find_gpu_problem(device) if on_gpu else None
    if problem:
        return dict.fromkeys(model.units, problem)
    reasons: dict[str, str] = {}
    for unit, paths in model.units.items():
        modules = [model.get_submodule(path) for path in paths]
        try:
            if not (half in _HALF_TYPES or interpreted):
                raise UnitNotFused(f"{half} is not a 16-bit type")
            check_modules(modules, interpreted=interpreted)
            model.fused[unit] = _build(unit, modules, half)
        except UnitNotFused as reason:
            model.fused.pop(unit, None)
            reasons[unit] = str(reason)
    return reasons


def describe_unfused_units(reasons: Mapping[str, str], model: UnitModel) -> list[str]:
    """A line for the user if units keep their modules, with the reason for the first.

    Heads do not count: they are a small part of any network.
    """
    reasons = {unit: reason for unit, reason in reasons.items() if unit != "head"}
    if not reasons:
        return []
    unit, reason = next(iter(reasons.items()))
    which = "all units" if len(reasons) == len(model.units.keys() - {"head"}) else unit
    more = len(reasons) - 1 if which == unit else 0
    others = f" and {format_plural(more, 'other unit')}" if more else ""
    return [f"kernels: torch's own for {which}{others}, because {reason}"]


def _build(unit: str, modules: Sequence[nn.Module], half: torch.dtype) -> FusedUnit:
    """The function of a unit by the first builder that supports it, or the last one's reason."""
    key = type(modules[0]) if len(modules) == 1 else unit
    reason = UnitNotFused("there are no kernels for it")
    for build in _BUILDERS.get(key, ()):
        try:
            return build(modules, half)
        except UnitNotFused as own:
            reason = own
    raise reason
