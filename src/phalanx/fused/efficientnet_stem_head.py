"""The stem and the head of an EfficientNet in training, written out with phalanx.mbconv."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.fused.half_copies import to_half
from phalanx.fused.mbconv_parts import (
    SizeLimitedUnit,
    check_norm,
    check_square_conv,
    find_norm_vectors,
    multiply,
    to_gradients,
)
from phalanx.fused.module_checks import check_types
from phalanx.fused.unit import Gradients, cast_for_linear
from phalanx.kernels.batch_norm import finish_back
from phalanx.kernels.choices import CHOICES
from phalanx.kernels.image_layout import (
    count_rows,
    to_channels_last,
    to_image,
    to_rows,
)
from phalanx.mbconv.expand import expand, expand_back
from phalanx.mbconv.norms import (
    norm_add_back,
    norm_gate_back,
    norm_silu,
    silu_back,
    sum_channels,
)
from phalanx.mbconv.squeeze_excite import finish_mean_back, sum_images, sum_slopes
from phalanx.models.layers import Dropout, GlobalAvgPool
from phalanx.models.units import FusedUnit


def _run_fastest(part: str, conv: nn.Conv2d, x: Tensor, implementations: dict[str, Any]) -> Any:
    """The result of the fastest; our kernels support 3x3 of stride 2 over three channels only."""
    sizes = (conv.in_channels, conv.kernel_size[0], conv.stride[0], conv.groups)
    if sizes != (3, 3, 2, 1):
        return implementations["apart"]()
    if not x.is_cuda:
        return implementations["own"]()
    shape = (conv.out_channels, *x.shape)
    return CHOICES.run_fastest(f"efficientnet stem {part} {shape} {x.dtype}", implementations)


def _convolve(conv: nn.Conv2d, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The first convolution and its sums."""

    def apart() -> tuple[Tensor, Tensor]:
        raw = to_channels_last(F.conv2d(x, weight, None, conv.stride, conv.padding))
        return raw, sum_channels(raw)

    def own() -> tuple[Tensor, Tensor]:
        return expand(x, weight.permute(0, 2, 3, 1).flatten(1), True)

    return _run_fastest("forward", conv, x, {"own": own, "apart": apart})


def _convolve_back(
    conv: nn.Conv2d, saved: Sequence[Tensor], ds: Tensor, u: Tensor, *, needs_input_grad: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of the image (meaningless unless `needs_input_grad`) and of the weights."""
    x, weight, raw, _ = saved

    def apart() -> tuple[Tensor, Tensor]:
        dc = norm_add_back(ds, raw, u, None, 0.0)
        dx, dw, _ = torch.ops.aten.convolution_backward(
            dc, x, weight, None, conv.stride, conv.padding, [1, 1], False, [0, 0], conv.groups,
            [needs_input_grad, True, False],
        )  # fmt: skip
        return dx if needs_input_grad else x, dw.permute(0, 2, 3, 1)

    def own() -> tuple[Tensor, Tensor]:
        return expand_back(ds, x, weight.permute(0, 2, 3, 1).flatten(1), u, None, True)

    implementations = {"own": own, "apart": apart}
    return apart() if needs_input_grad else _run_fastest("backward", conv, x, implementations)


class _ConvNormUnit(SizeLimitedUnit):
    """A convolution and its norm."""

    def __init__(self, modules: Sequence[nn.Module], half: torch.dtype, kernel: int | None) -> None:
        conv, norm = modules[:2]
        self._conv, self._norm = check_square_conv(conv, kernel), check_norm(norm)
        super().__init__(modules, half, self._conv)

    @property
    def parameters(self) -> list[Tensor]:
        """Of the convolution and of the norm."""
        return [self._conv.weight, self._norm.weight, self._norm.bias]

    def _list_gradients(self, dw: Tensor, u: Tensor) -> Sequence[Tensor]:
        """Their gradients."""
        named = zip("cwb", self.parameters, strict=True)
        return to_gradients({"c": dw, "w": u[0], "b": u[1]}, dict(named))


class _SiluStem(_ConvNormUnit):
    """Convolution, norm and SiLU."""

    def run(self, x: Tensor, drop_path: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
        """The input of the first block."""
        weight = to_half(self._conv.weight, self.half)
        raw, sums = _convolve(self._conv, x, weight)
        v = find_norm_vectors(self._norm, sums, raw)
        return norm_silu(raw, v, None), [x, weight, raw, v]

    def run_back(
        self, dy: Tensor, second: Tensor | None, saved: Sequence[Any], *, needs_input_grad: bool
    ) -> Gradients:
        """Gradients from that of the output."""
        _, _, raw, v = saved
        ds, sums = silu_back(dy, raw, v)
        u = finish_back(sums, v, count_rows(raw))
        dx, dw = _convolve_back(self._conv, saved, ds, u, needs_input_grad=needs_input_grad)
        return dx, None, self._list_gradients(dw, u)


class _HeadFeatures(_ConvNormUnit):
    """1x1 convolution, norm, SiLU and mean over the image: [N, C, 1, 1]."""

    def run(self, x: Tensor, drop_path: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
        """One vector per image."""
        weight = to_half(self._conv.weight, self.half)
        raw = to_image(to_rows(x) @ weight.flatten(1).T, x)
        v = find_norm_vectors(self._norm, sum_channels(raw), raw)
        mean = sum_images(raw, v)[0].sum(0) / (x.shape[2] * x.shape[3])
        return mean.to(self.half)[:, :, None, None], [x, weight, raw, v]

    def run_back(
        self, dy: Tensor, second: Tensor | None, saved: Sequence[Any], *, needs_input_grad: bool
    ) -> Gradients:
        """Gradients from that of the output."""
        x, weight, raw, v = saved
        dmean = dy.flatten(1).float() / (x.shape[2] * x.shape[3])
        u = finish_mean_back(sum_slopes(raw, v), dmean, v, count_rows(raw))
        dc = to_rows(norm_gate_back(raw, v, u, dmean, None, None))
        dx = to_image(dc @ weight.flatten(1), x)
        return dx, None, self._list_gradients(multiply(dc.T, to_rows(x)), u)


def build_efficientnet_stem(modules: Sequence[nn.Module], half: torch.dtype) -> FusedUnit:
    """A function that runs the stem in training, computing in `half`."""
    check_types(modules[2:], nn.SiLU)
    return _SiluStem(modules, half, None)


def build_efficientnet_head(modules: Sequence[nn.Module], half: torch.dtype) -> FusedUnit:
    """A function that runs the head in training; dropout and the linear layer stay torch's."""
    *inner, drop, classifier = modules
    check_types(modules[2:], nn.SiLU, GlobalAvgPool, Dropout, nn.Linear)
    features = _HeadFeatures(inner, half, 1)

    def run(x: Tensor, noise: Tensor | None) -> Tensor:
        return classifier(cast_for_linear(drop(features(x, None).flatten(1), noise), classifier))

    return run
