"""1x1 convolutions in the forward pass, fused with what follows them.

Images are [N, C, H, W] in channels_last memory, weights [out, in]; channels are multiples of 64.
v holds a norm's vectors (phalanx.kernels.batch_norm), bits a mask packed by its `pack_signs`. Every
operation has a reference in plain torch next to it, which runs where there is no Triton.
"""

import torch
from torch import Tensor
from torch.library import custom_op

from phalanx.kernels.batch_norm import pack_signs
from phalanx.kernels.fused import find_fused_for
from phalanx.kernels.image_layout import count_rows, new_image, to_image, to_rows


def widen(x: Tensor) -> Tensor:
    """A tensor in float32, or float64 if it is that already."""
    return x if x.dtype == torch.float64 else x.float()


# --- with the sums that a norm needs ---


@custom_op("phalanx::conv_sums", mutates_args=())
def conv_sums(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """x w^T, and the sums of its columns and of their squares: float32 [2, out]."""
    fused = find_fused_for(x, "phalanx.products.ops_fused.conv_sums_fused")
    return (fused or conv_sums_reference)(x, w)


def conv_sums_reference(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """`conv_sums` in torch's own operations."""
    rows = widen(to_rows(x)) @ widen(w).t()
    return to_image(rows.to(x.dtype), x), torch.stack([rows.sum(0), (rows * rows).sum(0)])


@conv_sums.register_fake
def _(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    sums = w.new_empty((2, len(w)), dtype=torch.float32)
    return _new_output(x, w), sums


# --- with a norm whose vectors are known beforehand ---


@custom_op("phalanx::conv_norm", mutates_args=())
def conv_norm(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """x w^T * scale + shift."""
    fused = find_fused_for(x, "phalanx.products.ops_fused.conv_norm_fused")
    return (fused or conv_norm_reference)(x, w, v)


def conv_norm_reference(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """`conv_norm` in torch's own operations."""
    rows = widen(to_rows(x)) @ widen(w).t() * v[2] + v[3]
    return to_image(rows.to(x.dtype), x)


@conv_norm.register_fake
def _(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return _new_output(x, w)


@custom_op("phalanx::conv_norm_relu", mutates_args=())
def conv_norm_relu(x: Tensor, w: Tensor, v: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """relu(x w^T * scale + shift + residual), and the mask of its positive elements as bits."""
    fused = find_fused_for(x, "phalanx.products.ops_fused.conv_norm_relu_fused")
    return (fused or conv_norm_relu_reference)(x, w, v, residual)


def conv_norm_relu_reference(
    x: Tensor, w: Tensor, v: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """`conv_norm_relu` in torch's own operations."""
    rows = widen(to_rows(x)) @ widen(w).t() * v[2] + v[3]
    rows = (rows + widen(to_rows(residual))).relu()
    y = to_image(rows.to(x.dtype), x)
    return y, pack_signs(y)


@conv_norm_relu.register_fake
def _(x: Tensor, w: Tensor, v: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    bits = x.new_empty((count_rows(x), len(w) // 8), dtype=torch.uint8)
    return _new_output(x, w), bits


def _new_output(x: Tensor, w: Tensor) -> Tensor:
    """An empty tensor for a convolution's output."""
    return new_image(x, w.shape[0], *x.shape[2:])
