"""Batch norms folded into the convolutions before them, for scoring.

A folded layer has its own copy of the weights beside the live modules; `refresh` brings it up to
date.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx.inference.conv_implementations import NONE, RELU
from phalanx.inference.layers import (
    ACTS,
    FoldedConv,
    FoldedLayer,
    LayerTypes,
    NotFoldable,
)
from phalanx.models.efficientnet import DepthwiseSeparableConv, InvertedResidual, SqueezeExcite
from phalanx.models.layers import Dropout, GlobalAvgPool
from phalanx.models.resnet import BasicBlock, Bottleneck, ConvPool, ResidualConvPair


@dataclass(frozen=True)
class FoldedUnit:
    """A unit's folded layers, and the function that runs them."""

    layers: Sequence[FoldedLayer]
    run: Callable[[Tensor], Tensor]
    # of a stem: see `FoldedConv`
    prepare_images: Callable[[Tensor, Tensor | None], Tensor] | None = None


# --- blocks ---


def _fold_residual(
    convs: Sequence[FoldedConv], shortcut: nn.Module, types: LayerTypes
) -> FoldedUnit:
    """Convolutions in sequence; the shortcut is added before the activation of the last."""
    *inner, last = convs
    layers: list[FoldedLayer] = [*convs]
    shortcut_layer: Callable[[Tensor], Tensor] = shortcut
    if isinstance(shortcut, nn.Sequential):
        shortcut_layer = types.conv(shortcut[0], shortcut[1], nn.Identity())
        layers.append(shortcut_layer)
    elif shortcut.state_dict():
        raise NotFoldable(f"a {type(shortcut).__name__}")

    def run(x: Tensor) -> Tensor:
        y = x
        for conv in inner:
            y = conv(y)
        return last(y, add=shortcut_layer(x))

    return FoldedUnit(layers, run)


def _fold_basic(block: BasicBlock, types: LayerTypes) -> FoldedUnit:
    first = types.conv(block.conv1, block.bn1, block.act1)
    last = types.conv(block.conv2, block.bn2, block.act2)
    return _fold_residual([first, last], block.downsample, types)


def _fold_bottleneck(block: Bottleneck, types: LayerTypes) -> FoldedUnit:
    first = types.conv(block.conv1, block.bn1, block.act1)
    middle = types.conv(block.conv2, block.bn2, block.act2)
    last = types.conv(block.conv3, block.bn3, block.act3)
    return _fold_residual([first, middle, last], block.downsample, types)


def _fold_conv_pool(block: ConvPool, types: LayerTypes) -> FoldedUnit:
    conv, pool = types.conv(block.conv1, block.bn1, block.act1), block.pool
    return FoldedUnit([conv], lambda x: pool(conv(x)))


def _fold_residual_pair(block: ResidualConvPair, types: LayerTypes) -> FoldedUnit:
    first = types.conv(block.conv1, block.bn1, block.act1)
    last = types.conv(block.conv2, block.bn2, block.act2)
    return FoldedUnit([first, last], lambda x: x + last(first(x)))


def _fold_depthwise(
    conv: FoldedConv, gate: nn.Module, last: FoldedConv, types: LayerTypes
) -> tuple[list[FoldedLayer], Callable[[Tensor, Tensor | None], Tensor]]:
    """The common part of inverted residual blocks: depthwise, squeeze-and-excite, projection.

    Returns its layers, and the function that runs them on x and adds a residual, if there is one.
    """
    if not conv.is_depthwise:
        raise NotFoldable("a convolution of groups")
    if types.dtype == torch.bfloat16:
        raise NotFoldable("in bfloat16 its logits err up to twice as much as its modules'")
    excite = types.gate(gate) if isinstance(gate, SqueezeExcite) else None

    def run(x: Tensor, add: Tensor | None) -> Tensor:
        y, sums = conv.convolve_depthwise(x)
        factors = None if excite is None else excite(sums, y.shape[2] * y.shape[3])
        return last(y, add=add, gate=factors)

    return [conv, last, *([] if excite is None else [excite])], run


def _fold_separable(block: DepthwiseSeparableConv, types: LayerTypes) -> FoldedUnit:
    conv = types.conv(block.conv_dw, block.bn1, block.act1)
    last = types.conv(block.conv_pw, block.bn2, nn.Identity())
    (layers, run), skips = _fold_depthwise(conv, block.se, last, types), block.skips
    return FoldedUnit(layers, lambda x: run(x, x if skips else None))


def _fold_inverted(block: InvertedResidual, types: LayerTypes) -> FoldedUnit:
    first = types.conv(block.conv_pw, block.bn1, block.act1)
    conv = types.conv(block.conv_dw, block.bn2, block.act2)
    last = types.conv(block.conv_pwl, block.bn3, nn.Identity())
    (layers, run), skips = _fold_depthwise(conv, block.se, last, types), block.skips
    return FoldedUnit([first, *layers], lambda x: run(first(x), x if skips else None))


_BLOCKS: dict[type[nn.Module], Callable[..., FoldedUnit]] = {
    BasicBlock: _fold_basic,
    Bottleneck: _fold_bottleneck,
    ConvPool: _fold_conv_pool,
    ResidualConvPair: _fold_residual_pair,
    DepthwiseSeparableConv: _fold_separable,
    InvertedResidual: _fold_inverted,
}


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module runs hooks, too."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def fold_unit(modules: Sequence[nn.Module], types: LayerTypes) -> FoldedUnit:
    """A unit's modules, which run in sequence, folded; raises NotFoldable if they cannot be."""
    parts = [part for module in modules for part in module.modules()]
    if any(map(has_hooks, parts)):
        raise NotFoldable("hooks")
    if len(modules) == 1 and type(modules[0]) in _BLOCKS:
        return _BLOCKS[type(modules[0])](modules[0], types)
    layers: list[FoldedLayer] = []
    calls: list[Callable[[Tensor], Tensor]] = []
    rest = list(modules)
    while rest:
        module = rest.pop(0)
        if isinstance(module, nn.Conv2d):
            conv, call = _fold_conv_sequence(module, rest, types)
            layers.append(conv)
            calls.append(call)
        elif type(module) is nn.Linear:
            linear = types.linear(module)
            layers.append(linear)
            calls.append(linear)
        elif module.state_dict():
            raise NotFoldable(f"a {type(module).__name__}")
        elif not isinstance(module, nn.Identity | Dropout):
            calls.append(types.average if isinstance(module, GlobalAvgPool) else module)

    def run(x: Tensor) -> Tensor:
        for call in calls:
            x = call(x)
        return x

    first = layers[0] if layers and isinstance(modules[0], nn.Conv2d) else None
    return FoldedUnit(layers, run, first.prepare_images if isinstance(first, FoldedConv) else None)


def _fold_conv_sequence(
    module: nn.Module, rest: list[nn.Module], types: LayerTypes
) -> tuple[FoldedConv, Callable[[Tensor], Tensor]]:
    """A convolution fused with the norm, activation and pool after it, as far as possible."""
    norm = rest.pop(0) if rest else nn.Identity()
    act = rest.pop(0) if rest and type(rest[0]) in ACTS else nn.Identity()
    conv = types.conv(module, norm, act)
    pools = bool(rest) and _is_stem_pool(rest[0]) and conv.act in (NONE, RELU)
    if pools:
        rest.pop(0)
    return conv, conv.pool if pools else conv


def _is_stem_pool(pool: nn.Module) -> bool:
    """Whether it is a 3x3 max-pool of stride 2."""
    if not isinstance(pool, nn.MaxPool2d):
        return False
    return (pool.kernel_size, pool.stride, pool.padding) == (3, 2, 1) and not pool.ceil_mode
