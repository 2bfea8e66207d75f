"""The operations of phalanx.products.conv and phalanx.products.gradients in Triton."""

import torch
from torch import Tensor

from phalanx.kernels.image_layout import count_rows
from phalanx.products.product_fused import (
    MASK_BY_BITS,
    MASK_BY_NORM,
    RELU,
    TOTAL,
    WITH_GATE,
    WITH_SQUARE,
    multiply,
)


def conv_sums_fused(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The convolution with the sums that a norm needs."""
    return multiply(x, w, trans=True, sums=WITH_SQUARE)


def conv_norm_fused(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """The convolution with a norm."""
    return multiply(x, w, trans=True, norm=v)[0]


def conv_norm_relu_fused(
    x: Tensor, w: Tensor, v: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """The convolution with a norm, residual and ReLU."""
    bits = torch.empty((count_rows(x), len(w) // 8), device=x.device, dtype=torch.uint8)
    return multiply(x, w, trans=True, norm=v, add=residual, act=RELU, bits=bits)[0], bits


def input_gradient_fused(g: Tensor, wa: Tensor, x: Tensor, q: Tensor, const: Tensor) -> Tensor:
    """The gradient of a convolution's input."""
    return multiply(g, wa, pre=(x, q, const[-1:]), shift=const)[0]


def input_gradient_gated_fused(
    g: Tensor, wa: Tensor, x: Tensor, q: Tensor, const: Tensor, b: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient before the ReLU of a convolution's input, with the sums of the norm there."""
    pre, gate = (x, q, const[-1:]), (b, v)
    return multiply(g, wa, pre=pre, shift=const, act=MASK_BY_NORM, gate=gate, sums=WITH_GATE)


def skip_gradient_fused(da: Tensor, w: Tensor, dz: Tensor) -> Tensor:
    """The gradient of a block's input."""
    return multiply(da, w, add=dz)[0]


def skip_gradient_gated_fused(
    da: Tensor, w: Tensor, dz: Tensor, bits: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient before the ReLU that made a block's input, with its sums."""
    dx, sums = multiply(da, w, add=dz, act=MASK_BY_BITS, bits=bits, sums=TOTAL)
    return dx, sums.view(-1)
