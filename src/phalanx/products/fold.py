"""The batch norm after a 1x1 convolution, with statistics known before the convolution runs.

A convolution c = x W^T followed by batch norm needs no pass over c: with the Gram matrix
G = x^T x and the sums s of x's columns,

    mean(c) = W s / M        var(c) = diag(W Cov W^T),  Cov = G / M - s s^T / M^2

so that the norm, a residual and ReLU fit into the GEMM's epilogue and c is never stored. With g the
gradient of the norm's output and r = g^T x (which the weight gradient needs anyway), the backward
pass neither reads c nor writes its gradient:

    sum(g c) = rowsum(r * W)
    dW       = scale * (r - sum(g) s^T / M - rstd * dgamma * T),  T = W Cov
    dx       = g (scale W) + x Q + const,  Q = W^T diag(b) W,  b = -scale * rstd * dgamma / M

The variance is a difference of larger numbers where the input's mean is far from zero. Up to a mean
of 16 standard deviations its error is below that of rounding c to 16 bits, as torch does.

v and u are the vectors of phalanx.kernels.batch_norm; `folded` is [s, W, T].
"""

import torch
from torch import Tensor
from torch.library import custom_op

from phalanx.kernels.batch_norm import backward_vectors, finish_statistics
from phalanx.kernels.fused import find_fused_for
from phalanx.kernels.image_layout import new_image, to_rows
from phalanx.products.conv import widen

# --- forward ---


@custom_op("phalanx::gram_matrix", mutates_args=())
def gram_matrix(x: Tensor) -> tuple[Tensor, Tensor]:
    """x^T x and the sums of x's columns, in float32."""
    fused = find_fused_for(x, "phalanx.products.gram_fused.gram_fused")
    return fused(x, None, 1)[1:] if fused else gram_matrix_reference(x)


def gram_matrix_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """`gram_matrix` in torch's own operations."""
    rows = widen(to_rows(x))
    return rows.t() @ rows, rows.sum(0)


@gram_matrix.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    c = x.shape[1]
    return _new_floats(x, c, c), _new_floats(x, c)


@custom_op("phalanx::gram_matrix_of_input", mutates_args=())
def gram_matrix_of_input(x: Tensor, v: Tensor | None, stride: int) -> tuple[Tensor, Tensor, Tensor]:
    """A convolution's input, and its Gram matrix and sums.

    The input is relu(x * scale + shift) if v is given, else x; of every second pixel at stride 2.
    """
    fused = find_fused_for(x, "phalanx.products.gram_fused.gram_fused")
    return (fused or gram_matrix_of_input_reference)(x, v, stride)


def gram_matrix_of_input_reference(
    x: Tensor, v: Tensor | None, stride: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`gram_matrix_of_input` in torch's own operations."""
    y = new_image(x, *_find_subsampled_shape(x, stride)).copy_(x[:, :, ::stride, ::stride])
    if v is not None:
        rows = (widen(to_rows(y)) * v[2] + v[3]).relu()
        to_rows(y).copy_(rows)
    return y, *gram_matrix_reference(y)


@gram_matrix_of_input.register_fake
def _(x: Tensor, v: Tensor | None, stride: int) -> tuple[Tensor, Tensor, Tensor]:
    c = x.shape[1]
    y = new_image(x, *_find_subsampled_shape(x, stride))
    return y, _new_floats(x, c, c), _new_floats(x, c)


@custom_op("phalanx::fold_covariance", mutates_args=())
def fold_covariance(gram: Tensor, sums: Tensor, w: Tensor, count: int) -> Tensor:
    """T from the Gram matrix and the sums of `count` rows: float32 [out, in]."""
    fused = find_fused_for(w, "phalanx.products.fold_fused.fold_covariance_fused")
    return (fused or fold_covariance_reference)(gram, sums, w, count)


def fold_covariance_reference(gram: Tensor, sums: Tensor, w: Tensor, count: int) -> Tensor:
    """`fold_covariance` in torch's own operations."""
    mean = sums / count
    return widen(w) @ (gram / count - torch.outer(mean, mean))


@fold_covariance.register_fake
def _(gram: Tensor, sums: Tensor, w: Tensor, count: int) -> Tensor:
    return _new_floats(w, *w.shape)


@custom_op("phalanx::fold_statistics", mutates_args=("running",))
def fold_statistics(
    folded: list[Tensor],
    affine: list[Tensor],
    running: list[Tensor],
    count: int,
    eps: float,
    momentum: float,
) -> Tensor:
    """v of the norm after a convolution; updates the running statistics.

    affine: weight and bias. running: mean, variance and the number of batches, or an empty list.
    """
    fused = find_fused_for(folded[1], "phalanx.products.fold_fused.fold_statistics_fused")
    if fused is not None:
        return fused(folded, affine, running, count, eps, momentum)
    sums, w, t = folded
    mean, variance = widen(w) @ (sums / count), (widen(w) * t).sum(1).clamp_min(0)
    return finish_statistics(mean, variance, affine, running, count, eps, momentum)


@fold_statistics.register_fake
def _(
    folded: list[Tensor],
    affine: list[Tensor],
    running: list[Tensor],
    count: int,
    eps: float,
    momentum: float,
) -> Tensor:
    return _new_floats(folded[1], 4, len(folded[1]))


# --- backward ---


@custom_op("phalanx::fold_gradient", mutates_args=())
def fold_gradient(
    raw: Tensor, s: Tensor, folded: list[Tensor], v: Tensor, count: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """dW in `dtype`, scale * W in W's dtype, and u; raw: g^T x, s: the sums of g's columns."""
    fused = find_fused_for(folded[1], "phalanx.products.fold_fused.fold_gradient_fused")
    return (fused or fold_gradient_reference)(raw, s, folded, v, count, dtype)


def fold_gradient_reference(
    raw: Tensor, s: Tensor, folded: list[Tensor], v: Tensor, count: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """`fold_gradient` in torch's own operations."""
    (sums, w, t), (mean, rstd, scale, _) = folded, v
    u = backward_vectors(s, (raw * widen(w)).sum(1) - mean * s, v, count)
    dw = raw - torch.outer(s, sums / count) - (rstd * u[0])[:, None] * t
    return (scale[:, None] * dw).to(dtype), (scale[:, None] * widen(w)).to(w.dtype), u


@fold_gradient.register_fake
def _(
    raw: Tensor, s: Tensor, folded: list[Tensor], v: Tensor, count: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    w = folded[1]
    return torch.empty_like(w, dtype=dtype), torch.empty_like(w), _new_floats(w, 5, len(w))


@custom_op("phalanx::fold_input", mutates_args=())
def fold_input(w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Q / max|b| in w's dtype, and const with max|b| appended.

    b is a mean over all pixels and too small for float16; divided by max|b| it fits.
    """
    fused = find_fused_for(w, "phalanx.products.fold_fused.fold_input_fused")
    return (fused or fold_input_reference)(w, u)


def fold_input_reference(w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """`fold_input` in torch's own operations."""
    top = u[3].abs().max().clamp_min(1e-30)
    q = widen(w).t() @ (widen(w) * (u[3] / top)[:, None])
    return q.to(w.dtype), torch.cat([u[4] @ widen(w), top[None]])


@fold_input.register_fake
def _(w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    channels = w.shape[1]
    return w.new_empty((channels, channels)), _new_floats(w, channels + 1)


def _new_floats(like: Tensor, *shape: int) -> Tensor:
    """An empty float32 tensor."""
    return like.new_empty(shape, dtype=torch.float32)


def _find_subsampled_shape(x: Tensor, stride: int) -> tuple[int, int, int]:
    """(C, H, W) of an image subsampled by a stride."""
    _, c, h, w = x.shape
    return c, (h + stride - 1) // stride, (w + stride - 1) // stride
