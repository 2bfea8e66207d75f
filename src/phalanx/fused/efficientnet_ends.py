"""The first and the last unit of an EfficientNet in training, written out over phalanx.mbconv."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from phalanx.fused.half_copies import to_half
from phalanx.fused.mbconv_parts import (
    has_batch_statistics,
    is_plain_conv,
    multiply,
    take_statistics,
    to_gradients,
)
from phalanx.mbconv.image_layout import count_rows, to_channels_last, to_image, to_rows
from phalanx.mbconv.norms import (
    finish_norm_back,
    norm_gate_back,
    norm_silu,
    norm_silu_back,
    sum_channels,
    sum_gradients,
)
from phalanx.mbconv.squeeze_excite import finish_mean_back, sum_images
from phalanx.models.efficientnet import EfficientNet
from phalanx.models.units import FusedUnit

_MOST_ELEMENTS = 2**31  # kernels count in 32 bits


def find_end_obstacle(model: nn.Module) -> str | None:
    """Why the stem and the head of a model have no kernels; None where they have."""
    if not isinstance(model, EfficientNet):
        return f"{type(model).__name__} is not an EfficientNet"
    if not (has_batch_statistics(model.bn1) and has_batch_statistics(model.bn2)):
        return "its norm is not a plain batch norm, of channels that are a multiple of 8"
    if not (is_plain_conv(model.conv_stem) and is_plain_conv(model.conv_head)):
        return "its convolutions pad in another way"
    return None if isinstance(model.act1, nn.SiLU) else "it has no SiLU"


def _name_parameters(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> dict[str, Tensor]:
    """The parameters of a unit by the names that gradients have here."""
    return {"conv": conv.weight, "weight": norm.weight, "bias": norm.bias}


class _StemFunction(torch.autograd.Function):
    """Convolution, norm and SiLU."""

    @staticmethod
    def forward(
        ctx: Any, conv: nn.Conv2d, norm: nn.BatchNorm2d, half: torch.dtype, x: Tensor, *_: Tensor
    ) -> Tensor:
        """What the first block gets."""
        dtype, x, weight = x.dtype, to_channels_last(x.to(half)), to_half(conv.weight, half)
        raw = to_channels_last(F.conv2d(x, weight, None, conv.stride, conv.padding))
        v = take_statistics(norm, sum_channels(raw), raw)
        ctx.conv, ctx.norm, ctx.dtype = conv, norm, dtype
        ctx.save_for_backward(x, weight, raw, v)
        return norm_silu(raw, v, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """Gradients of the image, where it wants one, and of the parameters."""
        x, weight, raw, v = ctx.saved_tensors
        dy, conv, norm = to_channels_last(dy), ctx.conv, ctx.norm
        sums = sum_gradients(dy, raw, v, None, 0.0)
        u, dweight, dbias = finish_norm_back(sums, v, count_rows(raw))
        dc, wanted = norm_silu_back(dy, raw, v, u), ctx.needs_input_grad[3]
        dx, dw, _ = torch.ops.aten.convolution_backward(
            dc, x, weight, None, conv.stride, conv.padding, [1, 1], False, [0, 0], 1,
            [wanted, True, False],
        )  # fmt: skip
        found = {"conv": dw.permute(0, 2, 3, 1), "weight": dweight, "bias": dbias}
        gradients = to_gradients(found, _name_parameters(conv, norm))
        return None, None, None, dx.to(ctx.dtype) if wanted else None, *gradients


class _FeaturesFunction(torch.autograd.Function):
    """1x1 convolution, norm, SiLU and mean over the image."""

    @staticmethod
    def forward(
        ctx: Any, conv: nn.Conv2d, norm: nn.BatchNorm2d, half: torch.dtype, x: Tensor, *_: Tensor
    ) -> Tensor:
        """One vector per image."""
        dtype, x, weight = x.dtype, to_channels_last(x.to(half)), to_half(conv.weight, half)
        raw = to_image(to_rows(x) @ weight.flatten(1).T, x)
        v = take_statistics(norm, sum_channels(raw), raw)
        table = sum_images(raw, v, None)
        ctx.conv, ctx.norm, ctx.dtype = conv, norm, dtype
        ctx.save_for_backward(x, weight, raw, v, table)
        return (table[0].sum(0) / (x.shape[2] * x.shape[3])).to(half)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """Gradients of the input and of the parameters."""
        x, weight, raw, v, table = ctx.saved_tensors
        dmean = dy.float() / (x.shape[2] * x.shape[3])
        u, dweight, dbias = finish_mean_back(table, dmean, v, count_rows(raw))
        dc = to_rows(norm_gate_back(raw, v, u, dmean, None, None))
        dw, dx = multiply(dc.T, to_rows(x)), to_image(dc @ weight.flatten(1), x)
        found = {"conv": dw, "weight": dweight, "bias": dbias}
        gradients = to_gradients(found, _name_parameters(ctx.conv, ctx.norm))
        return None, None, None, dx.to(ctx.dtype), *gradients


def build_stem(model: EfficientNet, half: torch.dtype) -> FusedUnit:
    """A function that runs the stem in training, computing in `half`."""
    conv, norm = model.conv_stem, cast(nn.BatchNorm2d, model.bn1)
    parameters = tuple(_name_parameters(conv, norm).values())

    def run(x: Tensor, _: Tensor | None) -> Tensor:
        rows = count_rows(x)
        if rows * conv.out_channels >= _MOST_ELEMENTS or rows < 2 * conv.stride[0] ** 2:
            return model.act1(norm(conv(x)))
        with torch.autocast(x.device.type, enabled=False):
            return _StemFunction.apply(conv, norm, half, x, *parameters)

    return run


def build_head(model: EfficientNet, half: torch.dtype) -> FusedUnit:
    """A function that runs the head in training; dropout and the linear layer stay torch's."""
    conv, norm = model.conv_head, cast(nn.BatchNorm2d, model.bn2)
    parameters = tuple(_name_parameters(conv, norm).values())

    def run(x: Tensor, noise: Tensor | None) -> Tensor:
        rows = count_rows(x)
        if rows * conv.out_channels >= _MOST_ELEMENTS or rows < 2:
            features = model.global_pool(model.act2(norm(conv(x))))
        else:
            with torch.autocast(x.device.type, enabled=False):
                features = _FeaturesFunction.apply(conv, norm, half, x, *parameters)
        return model.classifier(model.drop(features, noise))

    return run
