"""Batch norms folded into the convolutions before them, for scoring.

A folded layer keeps 16-bit weights of its own beside the live modules. `refresh` recomputes them
in place, because CUDA graphs hold their addresses.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from phalanx.inference.conv_implementations import NONE, RAW, RELU, RELU6, SILU, Geometry
from phalanx.inference.conv_ops import convolve_and_activate, expand_groups
from phalanx.inference.depthwise_ops import convolve_depthwise, squeeze_and_excite
from phalanx.inference.unit_ops import (
    activate_and_pool,
    average_pixels,
    empty_space_to_depth,
    rearrange_stem_weight,
    space_to_depth,
)
from phalanx.models.efficientnet import DepthwiseSeparableConv, InvertedResidual, SqueezeExcite
from phalanx.models.layers import Dropout, GlobalAvgPool, SameConv2d, pad_same
from phalanx.models.resnet import BasicBlock, Bottleneck, ConvPool, ResidualConvPair

_ACTS: dict[type[nn.Module], int] = {
    nn.Identity: NONE,
    nn.ReLU: RELU,
    nn.SiLU: SILU,
    nn.ReLU6: RELU6,
}


class _Layer(Protocol):
    def refresh(self) -> None: ...


@dataclass(frozen=True)
class FoldedUnit:
    """A unit's folded layers, and the function that runs them."""

    layers: Sequence[_Layer]
    run: Callable[[Tensor], Tensor]
    prepare_images: Callable[[Tensor, Tensor | None], Tensor] | None = (
        None  # of a stem: see `_FoldedConv`
    )


class NotFoldable(Exception):
    """A unit has a part that cannot be folded; the message says which."""


def _fold_norm(conv: nn.Conv2d, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Float32 weights and bias of a convolution with the norm folded in."""
    weight = conv.weight.detach().float()
    bias = torch.zeros_like(weight[:, 0, 0, 0]) if conv.bias is None else conv.bias.detach().float()
    if isinstance(norm, nn.Identity):
        return weight, bias
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None and norm.running_var is not None
    scale = norm.weight.detach() * torch.rsqrt(norm.running_var + norm.eps)
    shift = norm.bias.detach() + (bias - norm.running_mean) * scale
    return weight * scale[:, None, None, None], shift.float()


def _check_foldable(conv: nn.Module, norm: nn.Module, act: nn.Module) -> None:
    """Refuse what cannot be folded."""
    if type(conv) not in (nn.Conv2d, SameConv2d):
        raise NotFoldable(f"a {type(conv).__name__}")
    assert isinstance(conv, nn.Conv2d)
    if conv.dilation != (1, 1):
        raise NotFoldable("a dilated convolution")
    if conv.kernel_size[0] != conv.kernel_size[1] or conv.padding_mode != "zeros":
        raise NotFoldable("a convolution that is not square")
    is_batch = isinstance(norm, nn.BatchNorm2d) and norm.affine and norm.track_running_stats
    if not is_batch and type(norm) is not nn.Identity:
        raise NotFoldable(f"a {type(norm).__name__}")
    if type(act) not in _ACTS:
        raise NotFoldable(f"a {type(act).__name__}")


class _FoldedConv:
    """A convolution with its norm and activation."""

    def __init__(self, conv: nn.Module, norm: nn.Module, act: nn.Module, half: torch.dtype):
        _check_foldable(conv, norm, act)
        assert isinstance(conv, nn.Conv2d)
        self._conv, self._norm, self._half = conv, norm, half
        self.act = _ACTS[type(act)]
        self._same = isinstance(conv, SameConv2d)
        padding = 0 if self._same else conv.padding[0]
        self.geometry = Geometry(conv.stride[0], int(padding), conv.groups)
        self.is_depthwise = conv.groups == conv.in_channels == conv.out_channels > 1
        self._block_padding: tuple[int, int] | None = None
        edge = conv.kernel_size[0]
        if (
            conv.in_channels == 3
            and self.geometry.stride == 2
            and self.geometry.padding == edge // 2
        ):
            self._block_padding = rearrange_stem_weight(conv.weight.detach())[1]
        self._weights: list[Tensor] = []
        self.refresh()

    def refresh(self) -> None:
        """Fold the weights and statistics as they are now."""
        weight, bias = _fold_norm(self._conv, self._norm)
        weights, biases = self._arrange(weight.to(self._half)), [bias, bias.to(self._half)]
        if not self._weights:
            self._weights, self._biases = weights, [tensor.clone() for tensor in biases]
            return
        torch._foreach_copy_([*self._weights, *self._biases], [*weights, *biases])

    def _arrange(self, weight: Tensor) -> list[Tensor]:
        """The weights in the layouts that kernels read."""
        if self.is_depthwise:
            return [weight.contiguous(), weight[:, 0].permute(1, 2, 0).contiguous()]
        if self._block_padding:
            return [rearrange_stem_weight(weight)[0]]
        weight = weight.contiguous(memory_format=torch.channels_last)
        blocks = expand_groups(weight, self.geometry.groups)
        return [weight] if blocks is None else [weight, blocks]

    def __call__(
        self,
        x: Tensor,
        *,
        add: Tensor | None = None,
        gate: Tensor | None = None,
        act: int | None = None,
    ) -> Tensor:
        """act(norm(conv(x * gate)) + add); act: instead of its own."""
        act, geometry = self.act if act is None else act, self.geometry
        if not self._block_padding:
            x = x.to(self._half, memory_format=torch.channels_last)
        else:
            geometry = Geometry()
            x = self.prepare_images(x) if x.shape[1] == self._conv.in_channels else x
        return convolve_and_activate(
            self._pad(x), self._weights, self._biases, add, gate, geometry.pack(), act
        )

    def prepare_images(self, images: Tensor, out: Tensor | None = None) -> Tensor:
        """The images in the layout that a stem reads: in `out`, or in new memory."""
        if self._block_padding:
            out = (
                empty_space_to_depth(images, self._block_padding, self._half)
                if out is None
                else out
            )
            space_to_depth(images, out, self._block_padding)
            return out
        if out is None:
            return images.to(self._half, memory_format=torch.channels_last, copy=True)
        return out.copy_(images)

    def convolve_depthwise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output of a depthwise convolution, and its sums per image [N, parts, C]."""
        geometry = [self.geometry.stride, self.geometry.padding]
        return convolve_depthwise(self._pad(x), self._weights, self._biases[0], geometry, self.act)

    def pool(self, x: Tensor) -> Tensor:
        """The output of a 3x3 max-pool of stride 2 after the activation."""
        return activate_and_pool(self(x, act=RAW), self._biases[0], self.act)

    def _pad(self, x: Tensor) -> Tensor:
        return pad_same(x, self._conv.kernel_size[0], self.geometry.stride) if self._same else x


class _FoldedLinear:
    """A linear layer in 16 bits."""

    def __init__(self, linear: nn.Linear, half: torch.dtype):
        self._linear, self._half = linear, half
        self._weight = linear.weight.detach().to(half, copy=True)
        self._biases = [tensor.clone() for tensor in self._find_biases()]

    def _find_biases(self) -> list[Tensor]:
        bias = self._linear.bias
        wide = self._linear.weight.detach()[:, 0].float() * 0 if bias is None else bias.detach()
        return [wide.float(), wide.to(self._half)]

    def refresh(self) -> None:
        biases = self._find_biases()
        torch._foreach_copy_([self._weight, *self._biases], [self._linear.weight.detach(), *biases])

    def __call__(self, x: Tensor) -> Tensor:
        pixel, weight = x[:, :, None, None], self._weight[:, :, None, None]
        pixel = pixel.contiguous(memory_format=torch.channels_last)
        y = convolve_and_activate(
            pixel, [weight], self._biases, None, None, Geometry().pack(), NONE
        )
        return y[:, :, 0, 0]


class _FoldedGate:
    """Squeeze-and-excite: a factor for each image and channel."""

    def __init__(self, module: SqueezeExcite, half: torch.dtype):
        self._convs, self._half = (module.conv_reduce, module.conv_expand), half
        self._weights = [tensor.clone() for tensor in self._find_weights()]

    def _find_weights(self) -> list[Tensor]:
        found = []
        for conv in self._convs:
            assert conv.bias is not None
            found += [conv.weight.detach()[:, :, 0, 0].to(self._half).contiguous()]
            found += [conv.bias.detach().float()]
        return found

    def refresh(self) -> None:
        torch._foreach_copy_(self._weights, self._find_weights())

    def __call__(self, sums: Tensor, pixels: int) -> Tensor:
        return squeeze_and_excite(sums, self._weights, pixels, self._half)


# --- blocks ---


def _fold_residual(
    convs: Sequence[_FoldedConv], shortcut: nn.Module, half: torch.dtype
) -> FoldedUnit:
    """Convolutions in sequence; the shortcut is added before the activation of the last."""
    *inner, last = convs
    layers: list[_Layer] = [*convs]
    shortcut_layer: Callable[[Tensor], Tensor] = shortcut
    if isinstance(shortcut, nn.Sequential):
        shortcut_layer = _FoldedConv(shortcut[0], shortcut[1], nn.Identity(), half)
        layers.append(shortcut_layer)
    elif shortcut.state_dict():
        raise NotFoldable(f"a {type(shortcut).__name__}")

    def run(x: Tensor) -> Tensor:
        y = x
        for conv in inner:
            y = conv(y)
        return last(y, add=shortcut_layer(x))

    return FoldedUnit(layers, run)


def _fold_basic(block: BasicBlock, half: torch.dtype) -> FoldedUnit:
    first = _FoldedConv(block.conv1, block.bn1, block.act1, half)
    last = _FoldedConv(block.conv2, block.bn2, block.act2, half)
    return _fold_residual([first, last], block.downsample, half)


def _fold_bottleneck(block: Bottleneck, half: torch.dtype) -> FoldedUnit:
    first = _FoldedConv(block.conv1, block.bn1, block.act1, half)
    middle = _FoldedConv(block.conv2, block.bn2, block.act2, half)
    last = _FoldedConv(block.conv3, block.bn3, block.act3, half)
    return _fold_residual([first, middle, last], block.downsample, half)


def _fold_conv_pool(block: ConvPool, half: torch.dtype) -> FoldedUnit:
    conv, pool = _FoldedConv(block.conv1, block.bn1, block.act1, half), block.pool
    return FoldedUnit([conv], lambda x: pool(conv(x)))


def _fold_residual_pair(block: ResidualConvPair, half: torch.dtype) -> FoldedUnit:
    first = _FoldedConv(block.conv1, block.bn1, block.act1, half)
    last = _FoldedConv(block.conv2, block.bn2, block.act2, half)
    return FoldedUnit([first, last], lambda x: x + last(first(x)))


def _fold_depthwise(
    conv: _FoldedConv, gate: nn.Module, last: _FoldedConv, half: torch.dtype
) -> FoldedUnit:
    """The common part of inverted residual blocks: depthwise, squeeze-and-excite, projection."""
    if not conv.is_depthwise:
        raise NotFoldable("a convolution of groups")
    if half == torch.bfloat16:
        raise NotFoldable("in bfloat16 its logits err up to twice as much as its modules'")
    excite = _FoldedGate(gate, half) if isinstance(gate, SqueezeExcite) else None

    def run(x: Tensor, add: Tensor | None = None) -> Tensor:
        y, sums = conv.convolve_depthwise(x)
        found = None if excite is None else excite(sums, y.shape[2] * y.shape[3])
        return last(y, add=add, gate=found)

    layers: list[_Layer] = [conv, last] if excite is None else [conv, last, excite]
    return FoldedUnit(layers, run)


def _fold_separable(block: DepthwiseSeparableConv, half: torch.dtype) -> FoldedUnit:
    conv = _FoldedConv(block.conv_dw, block.bn1, block.act1, half)
    last = _FoldedConv(block.conv_pw, block.bn2, nn.Identity(), half)
    unit, skips = _fold_depthwise(conv, block.se, last, half), block.skips
    return FoldedUnit(unit.layers, lambda x: unit.run(x, x if skips else None))  # type: ignore[call-arg]


def _fold_inverted(block: InvertedResidual, half: torch.dtype) -> FoldedUnit:
    first = _FoldedConv(block.conv_pw, block.bn1, block.act1, half)
    conv = _FoldedConv(block.conv_dw, block.bn2, block.act2, half)
    last = _FoldedConv(block.conv_pwl, block.bn3, nn.Identity(), half)
    unit, skips = _fold_depthwise(conv, block.se, last, half), block.skips
    layers = [first, *unit.layers]
    return FoldedUnit(layers, lambda x: unit.run(first(x), x if skips else None))  # type: ignore[call-arg]


_BLOCKS: dict[type[nn.Module], Callable[..., FoldedUnit]] = {
    BasicBlock: _fold_basic,
    Bottleneck: _fold_bottleneck,
    ConvPool: _fold_conv_pool,
    ResidualConvPair: _fold_residual_pair,
    DepthwiseSeparableConv: _fold_separable,
    InvertedResidual: _fold_inverted,
}


def fold_unit(modules: Sequence[nn.Module], half: torch.dtype) -> FoldedUnit:
    """A unit's modules, which run in sequence, folded; raises NotFoldable if they cannot be."""
    parts = [part for module in modules for part in module.modules()]
    if any(part._forward_hooks or part._forward_pre_hooks for part in parts):
        raise NotFoldable("hooks")
    if len(modules) == 1 and type(modules[0]) in _BLOCKS:
        return _BLOCKS[type(modules[0])](modules[0], half)
    layers: list[_Layer] = []
    calls: list[Callable[[Tensor], Tensor]] = []
    rest = list(modules)
    while rest:
        module = rest.pop(0)
        if isinstance(module, nn.Conv2d):
            conv, call = _fold_conv_sequence(module, rest, half)
            layers.append(conv)
            calls.append(call)
        elif isinstance(module, nn.Linear):
            linear = _FoldedLinear(module, half)
            layers.append(linear)
            calls.append(linear)
        elif module.state_dict():
            raise NotFoldable(f"a {type(module).__name__}")
        elif not isinstance(module, nn.Identity | Dropout):
            calls.append(average_pixels if isinstance(module, GlobalAvgPool) else module)

    def run(x: Tensor) -> Tensor:
        for call in calls:
            x = call(x)
        return x

    first = layers[0] if layers and isinstance(modules[0], nn.Conv2d) else None
    return FoldedUnit(layers, run, first.prepare_images if isinstance(first, _FoldedConv) else None)


def _fold_conv_sequence(
    module: nn.Module, rest: list[nn.Module], half: torch.dtype
) -> tuple[_FoldedConv, Callable[[Tensor], Tensor]]:
    """A convolution fused with the norm, activation and pool after it, as far as possible."""
    norm = rest.pop(0) if rest else nn.Identity()
    act = rest.pop(0) if rest and type(rest[0]) in _ACTS else nn.Identity()
    conv = _FoldedConv(module, norm, act, half)
    pools = bool(rest) and _is_stem_pool(rest[0]) and conv.act in (NONE, RELU)
    if pools:
        rest.pop(0)
    return conv, conv.pool if pools else conv


def _is_stem_pool(pool: nn.Module) -> bool:
    """Whether it is a 3x3 max-pool of stride 2."""
    if not isinstance(pool, nn.MaxPool2d):
        return False
    return (pool.kernel_size, pool.stride, pool.padding) == (3, 2, 1) and not pool.ceil_mode
