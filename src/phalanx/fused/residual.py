"""Residual blocks in which every norm takes two passes forward and two backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.fused.conv_norm import ConvNorm, build_conv_norm
from phalanx.fused.module_checks import UnitNotFused, check_types
from phalanx.fused.unit import Gradients, ManualBackwardUnit
from phalanx.kernels.batch_norm import (
    NONE,
    RELU,
    apply_norm,
    apply_norm_back,
)
from phalanx.models.resnet import BasicBlock, Bottleneck, ResidualConvPair, SliceAndPad


class _ResidualBlock(ManualBackwardUnit):
    """Convolutions with norm and ReLU; the last ReLU follows the sum with the shortcut."""

    takes_second = True

    def __init__(
        self,
        block: nn.Module,
        half: torch.dtype,
        pairs: Sequence[ConvNorm],
        shortcut: ConvNorm | SliceAndPad | None,
    ) -> None:
        super().__init__([block], half)
        self._pairs, self._shortcut = pairs, shortcut

    @property
    def parameters(self) -> list[Tensor]:
        """Those of the convolutions and norms in order, then those of the shortcut."""
        own = [*self._pairs]
        if isinstance(self._shortcut, ConvNorm):
            own.append(self._shortcut)
        return [parameter for pair in own for parameter in pair.parameters]

    def run(self, x: Tensor, drop_path: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
        """The block's output."""
        saved: list[Tensor | None] = []
        inner = x
        for pair in self._pairs:
            a, v, weight = pair.run(inner)
            saved += [inner, a, v, weight]
            if pair is not self._pairs[-1]:
                inner = apply_norm(a, v, RELU)
        residual, residual_v = x, None
        if isinstance(self._shortcut, ConvNorm):
            residual, residual_v, weight = self._shortcut.run(x)
            saved += [residual, residual_v, weight]
        elif self._shortcut is not None:
            residual = self._shortcut(x).contiguous(memory_format=torch.channels_last)
        y = apply_norm(a, v, RELU, residual, drop_path, residual_v)
        return y, [y, drop_path, *saved]

    def run_back(
        self, dy: Tensor, second: Tensor | None, saved: Sequence[Any], *, needs_input_grad: bool
    ) -> Gradients:
        """Gradients from those of the output."""
        y, drop_path, *saved = saved
        # of each pair: its input, the convolution of it, the norm's vectors, the 16-bit weight
        saved_by_pair = [saved[4 * i : 4 * i + 4] for i in range(len(self._pairs))]
        inner, a, v, weight = saved_by_pair[-1]
        last = self._pairs[-1]
        gated, u = last.norm.reduce_gated(dy, a, v, y, second, drop_path)
        da = apply_norm_back(gated, a, v, u, NONE, drop_path)
        dx, dw = last.conv_back(da, inner, weight)
        gradients = [dw, *last.norm.list_gradients(u)]
        earlier = zip(self._pairs[-2::-1], saved_by_pair[-2::-1], strict=True)
        for pair, (inner, a, v, weight) in earlier:
            da, dnorm = pair.norm_back(dx, a, v, RELU)
            dx, dw = pair.conv_back(da, inner, weight)
            gradients = [dw, *dnorm, *gradients]
        if isinstance(self._shortcut, ConvNorm):
            x, (a, v, weight) = saved_by_pair[0][0], saved[-3:]
            da, dnorm = self._shortcut.norm_back(gated, a, v, NONE)
            skip, dw = self._shortcut.conv_back(da, x, weight)
            return dx, skip, [*gradients, dw, *dnorm]
        if self._shortcut is not None:
            stride, channels = self._shortcut.stride, dx.shape[1]
            dx[:, :, ::stride, ::stride] += gated[:, :channels]
            return dx, None, gradients
        return dx, gated, gradients


def build_basic_block(modules: Sequence[nn.Module], half: torch.dtype) -> ManualBackwardUnit:
    """A BasicBlock."""
    (block,) = modules
    assert isinstance(block, BasicBlock)
    return _build(block, half, ("conv1", "bn1", "act1"), ("conv2", "bn2", "act2"))


def build_bottleneck(modules: Sequence[nn.Module], half: torch.dtype) -> ManualBackwardUnit:
    """A Bottleneck."""
    (block,) = modules
    assert isinstance(block, Bottleneck)
    last = ("conv3", "bn3", "act3")
    return _build(block, half, ("conv1", "bn1", "act1"), ("conv2", "bn2", "act2"), last)


def _build(
    block: BasicBlock | Bottleneck, half: torch.dtype, *names: tuple[str, str, str]
) -> ManualBackwardUnit:
    """A residual block by the names of its convolutions, norms and activations."""
    pairs = []
    for conv, norm, activation in names:
        check_types([block.get_submodule(activation)], nn.ReLU)
        pairs.append(build_conv_norm(block.get_submodule(conv), block.get_submodule(norm), half))
    return _ResidualBlock(block, half, pairs, _build_shortcut(block.downsample, half))


def _build_shortcut(shortcut: nn.Module, half: torch.dtype) -> ConvNorm | SliceAndPad | None:
    """A projection, a SliceAndPad, or None for the input itself."""
    if type(shortcut) is nn.Sequential and len(shortcut) == 2:
        return build_conv_norm(shortcut[0], shortcut[1], half)
    if isinstance(shortcut, SliceAndPad):
        return shortcut
    if type(shortcut) is nn.Identity:
        return None
    raise UnitNotFused(f"its shortcut is {type(shortcut).__name__}")


class _ResidualPair(ManualBackwardUnit):
    """Two convolutions, each with norm and ReLU, added to the input after the last ReLU."""

    def __init__(
        self, block: nn.Module, half: torch.dtype, first: ConvNorm, second: ConvNorm
    ) -> None:
        super().__init__([block], half)
        self._first, self._second = first, second

    @property
    def parameters(self) -> list[Tensor]:
        """Those of both, in order."""
        return [*self._first.parameters, *self._second.parameters]

    def run(self, x: Tensor, drop_path: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
        """The block's output."""
        a1, v1, weight1 = self._first.run(x)
        y1 = apply_norm(a1, v1, RELU)
        a2, v2, weight2 = self._second.run(y1)
        y = apply_norm(a2, v2, RELU, x, drop_path, None, True)
        return y, [drop_path, x, a1, v1, weight1, y1, a2, v2, weight2]

    def run_back(
        self, dy: Tensor, second: Tensor | None, saved: Sequence[Any], *, needs_input_grad: bool
    ) -> Gradients:
        """Gradients from that of the output."""
        drop_path, x, a1, v1, weight1, y1, a2, v2, weight2 = saved
        da2, dnorm2 = self._second.norm_back(dy, a2, v2, RELU, drop_path)
        dy1, dweight2 = self._second.conv_back(da2, y1, weight2)
        da1, dnorm1 = self._first.norm_back(dy1, a1, v1, RELU)
        dx, dweight1 = self._first.conv_back(da1, x, weight1)
        return dx, dy, [dweight1, *dnorm1, dweight2, *dnorm2]


def build_residual_pair(modules: Sequence[nn.Module], half: torch.dtype) -> ManualBackwardUnit:
    """A ResidualConvPair of FastResNet."""
    (block,) = modules
    assert isinstance(block, ResidualConvPair)
    check_types([block.act1, block.act2], nn.ReLU, nn.ReLU)
    first = build_conv_norm(block.conv1, block.bn1, half)
    return _ResidualPair(block, half, first, build_conv_norm(block.conv2, block.bn2, half))
