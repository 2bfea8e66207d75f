"""A block of EfficientNet in training: forward and backward written out over phalanx.mbconv.

Tensors by name, in the order of the data: x, the input; raw, its expansion before the norm; d, the
depthwise convolution; gated, what squeeze-excite makes of it; p, the projection. v are the vectors
of norms (phalanx.mbconv.norms). Where there are several ways to one result, the fastest is
measured once a shape.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from phalanx.fused.half_copies import to_half
from phalanx.fused.mbconv_parts import (
    Kept,
    has_batch_statistics,
    is_plain_conv,
    multiply,
    take_statistics,
    to_gradients,
)
from phalanx.mbconv.image_layout import count_rows, to_channels_last, to_image, to_rows
from phalanx.mbconv.norms import (
    finish_norm_back,
    norm_add,
    norm_add_back,
    norm_gate_back,
    norm_silu,
    norm_silu_back,
    sum_channels,
    sum_gradients,
)
from phalanx.mbconv.squeeze_excite import (
    excite,
    excite_back,
    finish_excite_back,
    sum_images,
)
from phalanx.models.efficientnet import DepthwiseSeparableConv, InvertedResidual, SqueezeExcite
from phalanx.models.units import FusedUnit

_MOST_ELEMENTS = 2**31  # kernels count in 32 bits
_Block = InvertedResidual | DepthwiseSeparableConv


@dataclass(frozen=True)
class _Layers:
    """The layers of a block by what they do; the first stage's block has no expansion."""

    expand: nn.Conv2d | None
    expand_norm: nn.BatchNorm2d | None
    depthwise: nn.Conv2d
    depthwise_norm: nn.BatchNorm2d
    excite: SqueezeExcite
    project: nn.Conv2d
    project_norm: nn.BatchNorm2d
    skips: bool
    rate: float

    @property
    def parameters(self) -> dict[str, Tensor]:
        """All parameters by the names that gradients have here."""
        reduce, widen = self.excite.conv_reduce, self.excite.conv_expand
        found: dict[str, Any] = {}
        if self.expand is not None and self.expand_norm is not None:
            found |= {"expand": self.expand.weight}
            found |= {"norm1": self.expand_norm.weight, "bias1": self.expand_norm.bias}
        found |= {"depthwise": self.depthwise.weight}
        found |= {"norm2": self.depthwise_norm.weight, "bias2": self.depthwise_norm.bias}
        found |= {"excite1": reduce.weight, "excite_bias1": reduce.bias}
        found |= {"excite2": widen.weight, "excite_bias2": widen.bias}
        found |= {"project": self.project.weight}
        return found | {"norm3": self.project_norm.weight, "bias3": self.project_norm.bias}

    @property
    def excite_weights(self) -> list[Tensor]:
        """w1 [R, C], b1, w2 [C, R], b2."""
        layers = (self.excite.conv_reduce, self.excite.conv_expand)
        pairs = [(layer.weight.detach().flatten(1), layer.bias) for layer in layers]
        return [each.detach() for pair in pairs for each in pair if each is not None]


def _find_layers(block: _Block) -> _Layers:
    """The layers of either kind of block."""
    layers: tuple[Any, ...] = (None, None, block.conv_dw, block.bn1, block.se, block.conv_pw)
    last = block.bn2
    if isinstance(block, InvertedResidual):
        layers = (block.conv_pw, block.bn1, block.conv_dw, block.bn2, block.se, block.conv_pwl)
        last = block.bn3
    return _Layers(*layers, last, block.skips, block.rate)


def find_block_obstacle(block: nn.Module) -> str | None:
    """Why a block has no kernels; None where it has."""
    if not isinstance(block, InvertedResidual | DepthwiseSeparableConv):
        return f"{type(block).__name__} is not a block of EfficientNet"
    layers = _find_layers(block)
    norms = (layers.expand_norm, layers.depthwise_norm, layers.project_norm)
    if not all(norm is None or has_batch_statistics(norm) for norm in norms):
        return "its norm is not a plain batch norm, of channels that are a multiple of 8"
    convs = (layers.expand, layers.depthwise, layers.project)
    if not all(conv is None or is_plain_conv(conv) for conv in convs):
        return "its convolutions pad in another way"
    if not (isinstance(layers.excite, SqueezeExcite) and isinstance(block.act1, nn.SiLU)):
        return "it has no squeeze-excite or no SiLU"
    return None


def _expand(conv: nn.Conv2d, kept: Kept) -> tuple[Tensor, Tensor]:
    """The first product and its sums."""
    raw = to_image(to_rows(kept["x"]) @ kept["expand"].flatten(1).T, kept["x"])
    return raw, sum_channels(raw)


def _convolve(conv: nn.Conv2d, kept: Kept) -> tuple[Tensor, Tensor]:
    """The depthwise convolution and its sums."""
    x = norm_silu(kept["raw"], kept["v1"], None) if "v1" in kept else kept["x"]
    d = F.conv2d(x, kept["depthwise"], None, conv.stride, conv.padding, 1, conv.groups)
    d = to_channels_last(d)
    return d, sum_channels(d)


def _forward(layers: _Layers, kept: Kept) -> Tensor:
    """The block's output; what backward needs is added to `kept`."""
    if layers.expand is not None and layers.expand_norm is not None:
        kept["raw"], sums = _expand(layers.expand, kept)
        kept["v1"] = take_statistics(layers.expand_norm, sums, kept["raw"])
    d, sums = _convolve(layers.depthwise, kept)
    v = take_statistics(layers.depthwise_norm, sums, d)
    table = sum_images(d, v, None)
    excited = excite(table, layers.excite_weights, d.shape[2] * d.shape[3])
    gated = norm_silu(d, v, excited[2])
    p = to_image(to_rows(gated) @ kept["project"].flatten(1).T, d)
    v3 = take_statistics(layers.project_norm, sum_channels(p), p)
    kept |= {"d": d, "v2": v, "table": table, "gated": gated, "p": p, "v3": v3}
    kept |= dict(zip(("mean", "hidden", "gate"), excited, strict=True))
    return norm_add(p, v3, kept["x"] if layers.skips else None, kept.get("noise"), layers.rate)


def _project_back(layers: _Layers, kept: Kept, dy: Tensor, found: Kept) -> Tensor:
    """The gradient of what squeeze-excite made."""
    p, noise = kept["p"], kept.get("noise")
    sums = sum_gradients(dy, p, None, noise, layers.rate)
    u, found["norm3"], found["bias3"] = finish_norm_back(sums, kept["v3"], count_rows(p))
    dp = to_rows(norm_add_back(dy, p, u, noise, layers.rate))
    found["project"] = multiply(dp.T, to_rows(kept["gated"]))
    return to_image(dp @ kept["project"].flatten(1), p)


def _excite_back(layers: _Layers, kept: Kept, dt: Tensor, found: Kept) -> Tensor:
    """The gradient of the depthwise convolution's result."""
    d, v, gate = kept["d"], kept["v2"], kept["gate"]
    back = sum_images(d, v, dt)
    pixels, weights = d.shape[2] * d.shape[3], layers.excite_weights[::2]
    dhidden, dmean = excite_back(back, weights, kept["hidden"], gate, pixels)
    excited = [kept["mean"], kept["hidden"], gate, dhidden]
    u, *gradients = finish_excite_back(kept["table"], back, excited, dmean, v, count_rows(d))
    names = ("norm2", "bias2", "excite1", "excite_bias1", "excite2", "excite_bias2")
    found |= dict(zip(names, gradients, strict=True))
    return norm_gate_back(d, v, u, dmean, dt, gate)


def _convolve_back(conv: nn.Conv2d, kept: Kept, dd: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the depthwise convolution's input and of its weights."""
    x = norm_silu(kept["raw"], kept["v1"], None) if "v1" in kept else kept["x"]
    da, dw, _ = torch.ops.aten.convolution_backward(
        dd, x, kept["depthwise"], None, conv.stride, conv.padding, [1, 1], False, [0, 0],
        conv.groups, [True, True, False],
    )  # fmt: skip
    return to_channels_last(da), dw.permute(0, 2, 3, 1)


def _backward(layers: _Layers, kept: Kept, dy: Tensor) -> tuple[Tensor, Kept]:
    """The gradients of the input and of all parameters, by name."""
    found: Kept = {}
    dt = _project_back(layers, kept, dy, found)
    dd = _excite_back(layers, kept, dt, found)
    da, found["depthwise"] = _convolve_back(layers.depthwise, kept, dd)
    if layers.expand is None:
        return (da + dy if layers.skips else da), found
    raw, v, x = kept["raw"], kept["v1"], kept["x"]
    sums = sum_gradients(da, raw, v, None, 0.0)
    u, found["norm1"], found["bias1"] = finish_norm_back(sums, v, count_rows(raw))
    dc, weight = to_rows(norm_silu_back(da, raw, v, u)), kept["expand"].flatten(1)
    found["expand"] = multiply(dc.T, to_rows(x))
    dx = torch.addmm(to_rows(dy), dc, weight) if layers.skips else dc @ weight
    return to_image(dx, x), found


class _BlockFunction(torch.autograd.Function):
    """One block, with its parameters as inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        layers: _Layers,
        half: torch.dtype,
        x: Tensor,
        noise: Tensor | None,
        *_: Tensor,
    ) -> Tensor:
        """The block's output."""
        kept = {"x": to_channels_last(x.to(half))}
        if noise is not None:
            kept["noise"] = noise.float().contiguous()
        for name in ("expand", "depthwise", "project"):
            conv = getattr(layers, name)
            if conv is not None:
                kept[name] = to_half(conv.weight, half)
        y = _forward(layers, kept)
        ctx.layers, ctx.names, ctx.dtype = layers, tuple(kept), x.dtype
        ctx.save_for_backward(*kept.values())
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """Gradients of the input and of every parameter."""
        kept = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        dx, found = _backward(ctx.layers, kept, to_channels_last(dy))
        gradients = to_gradients(found, ctx.layers.parameters)
        return None, None, dx.to(ctx.dtype), None, *gradients


def build_mbconv_block(block: _Block, half: torch.dtype) -> FusedUnit:
    """A function that runs a block in training, computing in `half`."""
    layers = _find_layers(block)
    parameters = tuple(layers.parameters.values())
    width = layers.depthwise.in_channels

    def run(x: Tensor, noise: Tensor | None) -> Tensor:
        rows = count_rows(x)
        if rows * width >= _MOST_ELEMENTS or rows < 2 * layers.depthwise.stride[0] ** 2:
            return block(x, noise)
        with torch.autocast(x.device.type, enabled=False):
            drops = noise if layers.skips else None
            return _BlockFunction.apply(layers, half, x, drops, *parameters)

    return run
