"""The first and the last unit of an EfficientNet in training, written out over phalanx.mbconv."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from phalanx.fused.half_copies import to_half
from phalanx.fused.mbconv_parts import (
    check_norm,
    check_square_conv,
    multiply,
    take_statistics,
    to_gradients,
)
from phalanx.fused.suited import check_types
from phalanx.kernels.choices import CHOICES
from phalanx.mbconv.expand import expand, expand_back
from phalanx.mbconv.image_layout import (
    MOST_ELEMENTS,
    count_rows,
    to_channels_last,
    to_image,
    to_rows,
)
from phalanx.mbconv.norms import (
    finish_norm_back,
    norm_add_back,
    norm_gate_back,
    norm_silu,
    silu_back,
    sum_channels,
)
from phalanx.mbconv.squeeze_excite import finish_mean_back, sum_images
from phalanx.models.layers import Dropout, GlobalAvgPool
from phalanx.models.units import FusedUnit


def _name_parameters(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> dict[str, Tensor]:
    """The parameters of a unit by the names that gradients have here."""
    return {"conv": conv.weight, "weight": norm.weight, "bias": norm.bias}


def _choose(part: str, conv: nn.Conv2d, x: Tensor, ways: dict[str, Any]) -> Any:
    """What the fastest way gives; the kernels know 3x3 of stride 2 over three colours."""
    sizes = (conv.in_channels, conv.kernel_size[0], conv.stride[0], conv.groups)
    if sizes != (3, 3, 2, 1):
        return ways["apart"]()
    if not x.is_cuda:
        return ways["own"]()
    shape = (conv.out_channels, *x.shape)
    return CHOICES.choose(f"efficientnet stem {part} {shape} {x.dtype}", ways)


def _convolve(conv: nn.Conv2d, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The first convolution and its sums."""

    def apart() -> tuple[Tensor, Tensor]:
        raw = to_channels_last(F.conv2d(x, weight, None, conv.stride, conv.padding))
        return raw, sum_channels(raw)

    def own() -> tuple[Tensor, Tensor]:
        return expand(x, weight.permute(0, 2, 3, 1).flatten(1), True)

    return _choose("forward", conv, x, {"own": own, "apart": apart})


def _convolve_back(
    conv: nn.Conv2d, kept: Sequence[Tensor], ds: Tensor, u: Tensor, *, wants_image: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of the image, nothing of use unless it wants one, and of the weights."""
    x, weight, raw, _ = kept

    def apart() -> tuple[Tensor, Tensor]:
        dc = norm_add_back(ds, raw, u, None, 0.0)
        dx, dw, _ = torch.ops.aten.convolution_backward(
            dc, x, weight, None, conv.stride, conv.padding, [1, 1], False, [0, 0], conv.groups,
            [wants_image, True, False],
        )  # fmt: skip
        return dx if wants_image else x, dw.permute(0, 2, 3, 1)

    def own() -> tuple[Tensor, Tensor]:
        return expand_back(ds, x, weight.permute(0, 2, 3, 1).flatten(1), u, None, True)

    ways = {"own": own, "apart": apart}
    return apart() if wants_image else _choose("backward", conv, x, ways)


class _StemFunction(torch.autograd.Function):
    """Convolution, norm and SiLU."""

    @staticmethod
    def forward(
        ctx: Any, conv: nn.Conv2d, norm: nn.BatchNorm2d, half: torch.dtype, x: Tensor, *_: Tensor
    ) -> Tensor:
        """What the first block gets."""
        dtype, x, weight = x.dtype, to_channels_last(x.to(half)), to_half(conv.weight, half)
        raw, sums = _convolve(conv, x, weight)
        v = take_statistics(norm, sums, raw)
        ctx.conv, ctx.norm, ctx.dtype = conv, norm, dtype
        ctx.save_for_backward(x, weight, raw, v)
        return norm_silu(raw, v, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """Gradients of the image, where it wants one, and of the parameters."""
        _, _, raw, v = kept = ctx.saved_tensors
        ds, sums = silu_back(to_channels_last(dy), raw, v)
        u, dweight, dbias = finish_norm_back(sums, v, count_rows(raw))
        wanted = ctx.needs_input_grad[3]
        dx, dw = _convolve_back(ctx.conv, kept, ds, u, wants_image=wanted)
        found = {"conv": dw, "weight": dweight, "bias": dbias}
        gradients = to_gradients(found, _name_parameters(ctx.conv, ctx.norm))
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


def build_efficientnet_stem(modules: Sequence[nn.Module], half: torch.dtype) -> FusedUnit:
    """A function that runs the stem in training, computing in `half`."""
    conv, norm, *others = modules
    conv, norm = check_square_conv(conv), check_norm(norm)
    check_types(others, nn.SiLU)
    parameters = tuple(_name_parameters(conv, norm).values())

    def run(x: Tensor, _: Tensor | None) -> Tensor:
        rows = count_rows(x)
        if rows * conv.out_channels >= MOST_ELEMENTS or rows < 2 * conv.stride[0] ** 2:
            return others[0](norm(conv(x)))
        with torch.autocast(x.device.type, enabled=False):
            return _StemFunction.apply(conv, norm, half, x, *parameters)

    return run


def build_efficientnet_head(modules: Sequence[nn.Module], half: torch.dtype) -> FusedUnit:
    """A function that runs the head in training; dropout and the linear layer stay torch's."""
    conv, norm, *others = modules
    conv, norm = check_square_conv(conv, 1), check_norm(norm)
    check_types(others, nn.SiLU, GlobalAvgPool, Dropout, nn.Linear)
    activation, pool, drop, classifier = others
    parameters = tuple(_name_parameters(conv, norm).values())

    def run(x: Tensor, noise: Tensor | None) -> Tensor:
        rows = count_rows(x)
        if rows * conv.out_channels >= MOST_ELEMENTS or rows < 2:
            features = pool(activation(norm(conv(x))))
        else:
            with torch.autocast(x.device.type, enabled=False):
                features = _FeaturesFunction.apply(conv, norm, half, x, *parameters)
        return classifier(drop(features, noise))

    return run
