"""A bottleneck block of ResNet or ResNeXt in training, with its last norm folded into a GEMM.

The norm after the last 1x1 convolution, and after a shortcut's, is known before the convolution
runs (phalanx.products.fold): convolution, norm, residual and ReLU are one GEMM, and its backward
pass neither stores nor reads the convolution's output. The 3x3 convolution is cuDNN's.

Of two consecutive blocks, the upper one writes the gradient of its input already masked by the
lower one's ReLU, with its column sums, which the lower one needs next. The sums are passed as the
gradient of a `_Gate`'s carrier.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from phalanx.fused.conv_norm import convolve, convolve_back
from phalanx.fused.half_copies import to_half
from phalanx.fused.module_checks import (
    UnitNotFused,
    check_batch_norm,
    check_conv,
    check_types,
    list_running_statistics,
)
from phalanx.fused.unit import cast_for_linear, without_autocast
from phalanx.kernels.batch_norm import (
    NONE,
    RELU,
    apply_norm,
    apply_norm_back,
    finish_back,
    finish_vectors,
    norm_vectors,
    reduce_norm,
)
from phalanx.kernels.choices import CHOICES
from phalanx.kernels.image_layout import (
    count_rows,
    is_expanded,
    to_channels_last,
    to_image,
    to_rows,
)
from phalanx.models.layers import Dropout, GlobalAvgPool
from phalanx.models.resnet import Bottleneck
from phalanx.models.units import FusedUnit
from phalanx.products.conv import conv_norm, conv_norm_relu, conv_sums
from phalanx.products.fold import (
    fold_covariance,
    fold_gradient,
    fold_input,
    fold_statistics,
    gram_matrix,
    gram_matrix_of_input,
)
from phalanx.products.gradients import (
    input_gradient,
    input_gradient_gated,
    mask_gradient,
    skip_gradient,
    skip_gradient_gated,
    weight_gradient,
)

_CHANNELS = 64  # every layer has a multiple of this
_MOST_ELEMENTS = 2**31  # the kernels' offsets are 32-bit
_WIDEST_GRAM = 512  # channels; beyond, a shortcut's Gram matrix costs more than it saves


class _Gate(NamedTuple):
    """The mask of a block's ReLU as bits, and the carrier whose gradient brings back the sums."""

    bits: Tensor
    carrier: Tensor  # [C]; its values are meaningless


class _NormedConv(NamedTuple):
    """A convolution, its weight in 16 bits and its norm."""

    conv: nn.Conv2d
    weight: Tensor
    norm: nn.BatchNorm2d

    @property
    def matrix(self) -> Tensor:
        """The weight of a 1x1 convolution as [out, in]."""
        return self.weight.reshape(self.weight.shape[:2])

    @property
    def affine(self) -> list[Tensor]:
        """The norm's weight and bias."""
        return [self.norm.weight.detach(), self.norm.bias.detach()]

    @property
    def running(self) -> list[Tensor]:
        """The norm's running mean and variance, and its number of batches."""
        return list_running_statistics(self.norm)

    @property
    def eps_and_momentum(self) -> tuple[float, float]:
        """The norm's two numbers, in the order of the operators' arguments."""
        assert self.norm.momentum is not None
        return self.norm.eps, self.norm.momentum

    def convolve(self, x: Tensor) -> Tensor:
        """The convolution."""
        return convolve(x, self.weight, self.conv)


class _Folded(NamedTuple):
    """A 1x1 convolution's input, its sums, T of phalanx.products.fold and its norm's vectors."""

    x: Tensor
    sums: Tensor
    t: Tensor
    v: Tensor


@dataclass(frozen=True)
class _BottleneckLayers:
    """A block's convolutions with their norms, and its shortcut's if it has weights."""

    first: _NormedConv
    middle: _NormedConv
    last: _NormedConv
    shortcut: _NormedConv | None

    @property
    def pairs(self) -> list[_NormedConv]:
        """All of them."""
        return [self.first, self.middle, self.last, *([self.shortcut] if self.shortcut else [])]

    @property
    def folds_shortcut(self) -> bool:
        """Whether the shortcut's norm is folded: known before its convolution."""
        return self.shortcut is not None and self.shortcut.conv.in_channels <= _WIDEST_GRAM


# --- forward ---


def _run_first(pair: _NormedConv, x: Tensor) -> tuple[Tensor, Tensor]:
    """The first convolution and its norm's vectors: in one pass or two, whichever is faster."""
    count = count_rows(x)

    def joined(running: list[Tensor]) -> tuple[Tensor, Tensor]:
        a, sums = conv_sums(x, pair.matrix)
        return a, finish_vectors(sums[:, None], pair.affine, running, count, *pair.eps_and_momentum)

    def separate(running: list[Tensor]) -> tuple[Tensor, Tensor]:
        a = pair.convolve(x)
        return a, norm_vectors(a, pair.affine, running, *pair.eps_and_momentum)

    implementations = {"joined": joined, "separate": separate}
    key = f"first convolution {list(x.shape)} {len(pair.weight)} {x.dtype}"
    timed = {name: partial(run, []) for name, run in implementations.items()}
    return implementations[CHOICES.choose_name(key, timed)](pair.running)


def _fold(pair: _NormedConv, x: Tensor, v: Tensor | None) -> _Folded:
    """The input of a convolution, normalised with v if that is given, and its norm's vectors."""
    stride = pair.conv.stride[0]
    if v is None and stride == 1:
        gram, sums = gram_matrix(x)
    else:
        x, gram, sums = gram_matrix_of_input(x, v, stride)
    count = count_rows(x)
    t = fold_covariance(gram, sums, pair.matrix, count)
    folded = [sums, pair.matrix, t]
    vectors = fold_statistics(folded, pair.affine, pair.running, count, *pair.eps_and_momentum)
    return _Folded(x, sums, t, vectors)


def _run_shortcut(layers: _BottleneckLayers, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The shortcut's output, and what its backward pass needs."""
    pair = layers.shortcut
    if pair is None:
        return x, ()
    if layers.folds_shortcut:
        folded = _fold(pair, x, None)
        return conv_norm(folded.x, pair.matrix, folded.v), folded
    stride = pair.conv.stride[0]
    x = to_channels_last(x[:, :, ::stride, ::stride])
    d = to_image(to_rows(x) @ pair.matrix.t(), x)
    v = norm_vectors(d, pair.affine, pair.running, *pair.eps_and_momentum)
    return apply_norm(d, v, NONE), (x, d, v)


# --- backward ---


def _fold_back(
    pair: _NormedConv, g: Tensor, s: Tensor, folded: _Folded
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Gradients of a convolution's weight and norm, and the arguments of `input_gradient`."""
    x, sums, t, v = folded
    raw, count, parts = weight_gradient(g, x), count_rows(x), [sums, pair.matrix, t]
    dw, wa, u = fold_gradient(raw, s, parts, v, count, pair.conv.weight.dtype)
    q, const = fold_input(pair.matrix, u)
    return (dw, u[0], u[1]), (g, wa, x, q, const)


def _shortcut_back(
    layers: _BottleneckLayers, g: Tensor, s: Tensor, saved: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Gradients of the shortcut's input, subsampled if it is strided, and of its weights."""
    pair = layers.shortcut
    if pair is None:
        return g, ()
    if layers.folds_shortcut:
        grads, operands = _fold_back(pair, g, s, _Folded(*saved))
        return input_gradient(*operands), grads
    x, d, v = saved
    u = reduce_norm(g, d, v, NONE)
    dd = apply_norm_back(g, d, v, u, NONE)
    dz = to_image(to_rows(dd) @ pair.matrix, x)
    return dz, (weight_gradient(dd, x), u[0], u[1])


def _apply_gate(dy: Tensor, s: Tensor | None, bits: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient masked by the block's ReLU, and its sums; the block above may have made both."""
    if s is not None and getattr(s, "summed", None) is dy:
        return dy, s
    if not is_expanded(dy):
        dy = to_channels_last(dy)
    return mask_gradient(dy, bits)


class _BottleneckFunction(torch.autograd.Function):
    """A block with its backward pass written out."""

    @staticmethod
    def forward(
        ctx: Any,
        layers: _BottleneckLayers,
        x: Tensor,
        bits: Tensor | None,
        carrier: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The block's output, its bits and its carrier; the arguments are those of x."""
        a, v1 = _run_first(layers.first, x)
        a1, middle = apply_norm(a, v1, RELU), layers.middle
        b = middle.convolve(a1)
        v2 = norm_vectors(b, middle.affine, middle.running, *middle.eps_and_momentum)
        residual, shortcut = _run_shortcut(layers, x)
        last = _fold(layers.last, b, v2)
        y, own_bits = conv_norm_relu(last.x, layers.last.matrix, last.v, residual)
        own_carrier = x.new_empty(y.shape[1], dtype=torch.float32)
        ctx.layers = layers
        ctx.save_for_backward(x, bits, own_bits, a, v1, a1, b, v2, *last, *shortcut)
        ctx.mark_non_differentiable(own_bits)
        ctx.set_materialize_grads(False)
        return y, own_bits, own_carrier

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, _: Any, s: Tensor | None) -> tuple[Any, ...]:
        """The gradients of the input, of its carrier and of the weights."""
        layers: _BottleneckLayers = ctx.layers
        if dy is None:
            return (None,) * (4 + 3 * len(layers.pairs))
        x, bits, own_bits, a, v1, a1, b, v2, *rest = ctx.saved_tensors
        last, shortcut = _Folded(*rest[:4]), tuple(rest[4:])
        g, s = _apply_gate(dy, s, own_bits)
        last_grads, operands = _fold_back(layers.last, g, s, last)
        g2, sums = input_gradient_gated(*operands, b, v2)
        u2 = finish_back(sums[:, None], v2, count_rows(b))
        db = apply_norm_back(g2, b, v2, u2, NONE)
        middle = layers.middle
        da1, dw2 = convolve_back(db, a1, middle.weight, middle.conv, needs_input_grad=True)
        u1 = reduce_norm(da1, a, v1, RELU)
        da = apply_norm_back(da1, a, v1, u1, RELU)
        dz, shortcut_grads = _shortcut_back(layers, g, s, shortcut)
        dw1 = weight_gradient(da, x)
        dx, below = _input_back(layers.first, da, dz, bits)
        grads = (dw1, u1[0], u1[1], dw2, u2[0], u2[1], *last_grads, *shortcut_grads)
        return None, dx, None, below, *_shape_gradients(layers, grads)


def _input_back(
    pair: _NormedConv, da: Tensor, dz: Tensor, bits: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The gradient of a block's input; with bits, masked for the block below, and its sums."""
    if bits is None:
        return skip_gradient(da, pair.matrix, dz), None
    dx, sums = skip_gradient_gated(da, pair.matrix, dz, bits)
    sums.summed = dx  # says which gradient they are the sums of
    return dx, sums


def _shape_gradients(layers: _BottleneckLayers, grads: Sequence[Tensor]) -> list[Tensor]:
    """Gradients in the dtypes and shapes of the block's weights."""
    return [
        grad.to(weight.dtype).view(weight.shape) if grad.ndim < 4 else grad.to(weight.dtype)
        for grad, weight in zip(grads, _find_weights(layers.pairs), strict=True)
    ]


def _find_weights(pairs: Sequence[_NormedConv]) -> list[Tensor]:
    """The weights of convolutions and norms, in the order of their gradients."""
    return [w for pair in pairs for w in (pair.conv.weight, pair.norm.weight, pair.norm.bias)]


class _MeanFunction(torch.autograd.Function):
    """Mean pooling, whose gradient is one row expanded to all pixels of an image, not copied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """[N, C, H, W] to [N, C]."""
        ctx.shape = x.shape
        return x.mean((2, 3))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> Tensor:
        """The gradient of x."""
        return (d / (ctx.shape[2] * ctx.shape[3]))[:, :, None, None].expand(ctx.shape)


# --- which units ---


class _BottleneckUnit:
    """A block's modules, run by the function above."""

    def __init__(self, block: Bottleneck, half: torch.dtype) -> None:
        self._block, self._half, self._pairs = block, half, _check_block(block)

    def __call__(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """The block's output with its gate."""
        if self._is_too_large(x) or not all(norm.training for _, norm in self._pairs):
            return self._block(x, noise)
        gate: _Gate | None = getattr(x, "gate", None)
        x = to_channels_last(x.to(self._half))
        first, middle, last, *shortcut = [
            _NormedConv(conv, to_half(conv.weight, self._half), norm) for conv, norm in self._pairs
        ]
        layers = _BottleneckLayers(first, middle, last, shortcut[0] if shortcut else None)
        weights = _find_weights(layers.pairs)
        with without_autocast(x):
            y, *own = _BottleneckFunction.apply(layers, x, *(gate or (None, None)), *weights)
        y.gate = _Gate(*own)
        return y

    def _is_too_large(self, x: Tensor) -> bool:
        """Whether one of the block's tensors has more elements than 32-bit offsets reach."""
        channels = max(max(conv.in_channels, conv.out_channels) for conv, _ in self._pairs)
        return count_rows(x) * channels >= _MOST_ELEMENTS


def build_folded_bottleneck(modules: Sequence[nn.Module], half: torch.dtype) -> FusedUnit:
    """The function of a block; raises UnitNotFused."""
    (block,) = modules
    assert isinstance(block, Bottleneck)
    return _BottleneckUnit(block, half)


class _MeanHead:
    """Mean over pixels, dropout and linear layer after the last block."""

    def __init__(self, drop: nn.Module, linear: nn.Module) -> None:
        self._drop, self._linear = drop, linear

    def __call__(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """The logits."""
        pooled = self._drop(_MeanFunction.apply(x), noise)
        return self._linear(cast_for_linear(pooled, self._linear))


def build_mean_head(modules: Sequence[nn.Module], half: torch.dtype) -> FusedUnit:
    """The function of a ResNet's head; raises UnitNotFused."""
    check_types(modules, GlobalAvgPool, Dropout, nn.Linear)
    return _MeanHead(*modules[1:])


def _check_block(block: Bottleneck) -> list[tuple[nn.Conv2d, nn.BatchNorm2d]]:
    """The block's convolutions with their norms, if the kernels support all of them."""
    if block.rate:
        raise UnitNotFused("it drops paths")
    check_types([block.act1, block.act2, block.act3], nn.ReLU, nn.ReLU, nn.ReLU)
    found = [(block.get_submodule(f"conv{n}"), block.get_submodule(f"bn{n}")) for n in (1, 2, 3)]
    if isinstance(block.downsample, nn.Sequential) and len(block.downsample) == 2:
        conv, norm = block.downsample
        found.append((conv, norm))
    elif not isinstance(block.downsample, nn.Identity):
        raise UnitNotFused("its shortcut has no weights")
    pairs = [(check_conv(conv), check_batch_norm(norm)) for conv, norm in found]
    if any(c % _CHANNELS for conv, _ in pairs for c in (conv.in_channels, conv.out_channels)):
        raise UnitNotFused(f"its channels are no multiples of {_CHANNELS}")
    if pairs[0][0].stride != (1, 1):
        raise UnitNotFused("its first convolution is strided")
    if any(conv.stride not in ((1, 1), (2, 2)) for conv, _ in pairs):
        raise UnitNotFused("its stride is neither 1 nor 2")
    return pairs
