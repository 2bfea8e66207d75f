"""Units without a shortcut: stems, and the pooling blocks of FastResNet and airbench."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.fused.conv_norm import ConvNorm, build_conv_norm, convolve, convolve_back
from phalanx.fused.half_copies import to_half
from phalanx.fused.module_checks import UnitNotFused, check_types
from phalanx.fused.stem_ops import (
    arrange_image,
    depth_to_space,
    pool,
    pool_norm,
    pool_norm_back,
    space_to_depth,
    unpool_norm_back,
    whiten,
)
from phalanx.fused.unit import Gradients, ManualBackwardUnit
from phalanx.kernels.batch_norm import GELU, RELU, RELU6, SILU, apply_norm
from phalanx.kernels.choices import CHOICES
from phalanx.models.airbench import PatchWhitening, PooledConvPair
from phalanx.models.resnet import ConvPool
from phalanx.models.units import FusedUnit

_ACTIVATIONS: dict[type[nn.Module], int] = {nn.ReLU: RELU, nn.SiLU: SILU, nn.ReLU6: RELU6}
_PLAIN, _PADDED, _SPACE_TO_DEPTH = "three channels", "four channels", "blocks of pixels"


class _ConvUnit(ManualBackwardUnit):
    """A convolution, its norm, an activation, and perhaps a max-pool of stride 2."""

    def __init__(
        self, modules: Sequence[nn.Module], pair: ConvNorm, activation: int, window: int
    ) -> None:
        super().__init__(modules, pair.half)
        self._pair, self._activation, self._window = pair, activation, window

    @property
    def parameters(self) -> list[Tensor]:
        """Those of the convolution and its norm."""
        return self._pair.parameters

    def run(self, x: Tensor, drop_path: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
        """The unit's output."""
        x, weight = self.arrange(x)
        a = self.convolve(x, weight)
        v = self._pair.norm.find_vectors(a)
        if not self._window:
            return apply_norm(a, v, self._activation), [x, weight, a, v]
        y, argmax, x_at_max = pool_norm(a, v, self._window)
        return y, [x, weight, a, v, argmax, x_at_max]

    def run_back(
        self, dy: Tensor, second: Tensor | None, saved: Sequence[Any], *, needs_input_grad: bool
    ) -> Gradients:
        """Gradients from that of the output."""
        x, weight, a, v, *pooled = saved
        if pooled:
            da, u = pool_norm_back(dy, *pooled, a, v, self._window, self._pair.norm.groups)
            own = self._pair.norm.list_gradients(u)
        else:
            da, own = self._pair.norm_back(dy, a, v, self._activation)
        dx, dw = self.convolve_back(da, x, weight, needs_input_grad=needs_input_grad)
        return dx, None, [dw, *own]

    def arrange(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The input and the 16-bit weight in the layout of the convolution."""
        return x, to_half(self._pair.conv.weight, self.half)

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        """The convolution of an arranged input."""
        return convolve(x, weight, self._pair.conv)

    def convolve_back(
        self, da: Tensor, x: Tensor, weight: Tensor, *, needs_input_grad: bool
    ) -> tuple[Tensor | None, Tensor]:
        """Gradients of the input, if needed, and of the weight."""
        return convolve_back(da, x, weight, self._pair.conv, needs_input_grad=needs_input_grad)


class _ImageStem(_ConvUnit):
    """A unit whose convolution reads an image, in the layout that is fastest.

    cuDNN is slow on three channels. The image gets a fourth channel of zeros or, for a stride of 2,
    blocks of 2 x 2 pixels become 16 channels (space-to-depth): a smaller convolution of stride 1.
    """

    casts_input = False

    def arrange(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The image and the weight in the layout that is fastest for forward and backward."""
        forms = self._list_forms(x)
        key = f"stem {tuple(x.shape)} {tuple(self._pair.conv.weight.shape)} {x.dtype} {self.half}"
        implementations = {form: partial(self._run_both_passes, x, form) for form in forms}
        return self._arrange_as(x, CHOICES.choose_name(key, implementations))

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        """The convolution of an arranged input."""
        return convolve(x, weight, self._shape_for(x))

    def convolve_back(
        self, da: Tensor, x: Tensor, weight: Tensor, *, needs_input_grad: bool
    ) -> tuple[Tensor | None, Tensor]:
        """The gradient of the weight; an image has none."""
        _, dw = convolve_back(da, x, weight, self._shape_for(x), needs_input_grad=False)
        if x.shape[1] == 16:
            dw = depth_to_space(dw)[:, :, 1:, 1:]
        return None, dw[:, :3]

    def _list_forms(self, x: Tensor) -> list[str]:
        """The layouts that this convolution supports."""
        conv = self._pair.conv
        size = conv.kernel_size[0]
        even = x.shape[2] % 2 == x.shape[3] % 2 == 0
        centred = conv.kernel_size == (size, size) and conv.padding == (size // 2, size // 2)
        if even and centred and size % 2 and conv.stride == (2, 2) and conv.dilation == (1, 1):
            return [_SPACE_TO_DEPTH, _PADDED, _PLAIN]
        return [_PADDED, _PLAIN]

    def _arrange_as(self, x: Tensor, form: str) -> tuple[Tensor, Tensor]:
        """Image and weight in one layout."""
        weight = to_half(self._pair.conv.weight, self.half)
        if form == _PLAIN:
            return x.to(self.half).contiguous(memory_format=torch.channels_last), weight
        weight = F.pad(weight, (0, 0, 0, 0, 0, 1))
        size = 0
        if form == _SPACE_TO_DEPTH:
            size = weight.shape[2]
            weight = space_to_depth(F.pad(weight, (1, 0, 1, 0)))
        weight = weight.contiguous(memory_format=torch.channels_last)
        return arrange_image(x, size, self.half), weight

    def _shape_for(self, x: Tensor) -> nn.Conv2d:
        """The convolution whose shape applies to an arranged image."""
        return _SPACE_TO_DEPTH_CONV if x.shape[1] == 16 else self._pair.conv

    def _run_both_passes(self, x: Tensor, form: str) -> None:
        """Run the convolution of a layout forward and backward, to be timed."""
        arranged, weight = self._arrange_as(x, form)
        a = self.convolve(arranged, weight)
        self.convolve_back(a, arranged, weight, needs_input_grad=False)


_SPACE_TO_DEPTH_CONV = nn.Conv2d(16, 1, 1, bias=False, device="meta")  # stride 1, no padding


def build_stem(modules: Sequence[nn.Module], half: torch.dtype) -> ManualBackwardUnit:
    """The stem of a network: convolution of an image, norm, activation, perhaps a max-pool."""
    if len(modules) not in (3, 4):
        raise UnitNotFused("it has another form than convolution, norm, activation, pool")
    conv, norm, activation, *rest = modules
    pair = build_conv_norm(conv, norm, half)
    if pair.conv.in_channels != 3 or pair.conv.groups != 1:
        raise UnitNotFused("its convolution does not read an image of three channels")
    if type(activation) not in _ACTIVATIONS:
        raise UnitNotFused(f"its activation is {type(activation).__name__}")
    window = _find_pool(rest[0]) if rest else 0
    if window and type(activation) is not nn.ReLU:
        raise UnitNotFused("it has a pool behind another activation than ReLU")
    return _ImageStem(modules, pair, _ACTIVATIONS[type(activation)], window)


def build_conv_pool(modules: Sequence[nn.Module], half: torch.dtype) -> ManualBackwardUnit:
    """A ConvPool of FastResNet."""
    (block,) = modules
    assert isinstance(block, ConvPool)
    check_types([block.act1], nn.ReLU)
    window = _find_pool(block.pool)
    return _ConvUnit(modules, build_conv_norm(block.conv1, block.bn1, half), RELU, window)


def _find_pool(module: nn.Module) -> int:
    """The window of a max-pool of stride 2: 3 padded by one, or 2; 0 for an Identity."""
    if type(module) is nn.Identity:
        return 0
    if type(module) is nn.MaxPool2d and module.dilation == 1 and not module.ceil_mode:
        shape = tuple(
            value if isinstance(value, int) else value[0]
            for value in (module.kernel_size, module.stride, module.padding)
        )
        if shape in ((3, 2, 1), (2, 2, 0)):
            return shape[0]
    raise UnitNotFused(f"its pool is {type(module).__name__} of another shape")


class _PooledPair(ManualBackwardUnit):
    """Two convolutions with norm and GELU; the first has a max-pool before its norm."""

    def __init__(
        self, modules: Sequence[nn.Module], half: torch.dtype, first: ConvNorm, second: ConvNorm
    ) -> None:
        super().__init__(modules, half)
        self._first, self._second = first, second

    @property
    def parameters(self) -> list[Tensor]:
        """Those of both, in order."""
        return [*self._first.parameters, *self._second.parameters]

    def run(self, x: Tensor, drop_path: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
        """The block's output."""
        weight1 = to_half(self._first.conv.weight, self.half)
        a1, argmax = pool(convolve(x, weight1, self._first.conv))
        v1 = self._first.norm.find_vectors(a1)
        y1 = apply_norm(a1, v1, GELU)
        a2, v2, weight2 = self._second.run(y1)
        return apply_norm(a2, v2, GELU), [x, a1, argmax, v1, weight1, y1, a2, v2, weight2]

    def run_back(
        self, dy: Tensor, second: Tensor | None, saved: Sequence[Any], *, needs_input_grad: bool
    ) -> Gradients:
        """Gradients from that of the output."""
        x, a1, argmax, v1, weight1, y1, a2, v2, weight2 = saved
        da2, dnorm2 = self._second.norm_back(dy, a2, v2, GELU)
        dy1, dweight2 = self._second.conv_back(da2, y1, weight2)
        u1 = self._first.norm.reduce(dy1, a1, v1, GELU, None)
        dconv1 = unpool_norm_back(dy1, argmax, a1, v1, u1, GELU, list(x.shape[2:]))
        dx, dweight1 = self._first.conv_back(dconv1, x, weight1, needs_input_grad=needs_input_grad)
        return dx, None, [dweight1, *self._first.norm.list_gradients(u1), dweight2, *dnorm2]


def build_pooled_pair(modules: Sequence[nn.Module], half: torch.dtype) -> ManualBackwardUnit:
    """A PooledConvPair of airbench's network."""
    (block,) = modules
    assert isinstance(block, PooledConvPair)
    check_types([block.pool, block.act1, block.act2], nn.MaxPool2d, nn.GELU, nn.GELU)
    if block.act1.approximate != "none" or block.act2.approximate != "none":
        raise UnitNotFused("its GELU is approximate")
    first = build_conv_norm(block.conv1, block.bn1, half)
    if _find_pool(block.pool) != 2:
        raise UnitNotFused("its pool is of another shape")
    if first.conv.stride != (1, 1) or first.conv.padding != (1, 1):
        raise UnitNotFused("its first convolution changes the size of the image")
    return _PooledPair(modules, half, first, build_conv_norm(block.conv2, block.bn2, half))


class _Whitening:
    """The stem of airbench: a whitening filter that is not trained, and GELU."""

    def __init__(self, modules: Sequence[nn.Module], half: torch.dtype) -> None:
        self._modules, self._half = modules, half

    def __call__(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """The filtered image."""
        filters, activation = self._modules
        if x.requires_grad:
            return activation(filters(x))
        return whiten(x, filters.get_buffer("weight"), self._half)


def build_whitening(modules: Sequence[nn.Module], half: torch.dtype) -> FusedUnit:
    """The stem of airbench's network."""
    check_types(modules, PatchWhitening, nn.GELU)
    return _Whitening(modules, half)
