"""Gradients of 1x1 convolutions, fused with what precedes and follows them.

Names as in phalanx.products.conv and phalanx.products.fold; g is the gradient of a norm's output.
"""

import torch
from torch import Tensor
from torch.library import custom_op

from phalanx.kernels.batch_norm import unpack_signs
from phalanx.kernels.fused import find_fused_for
from phalanx.kernels.image_layout import new_image, to_image, to_rows
from phalanx.products.conv import widen

# --- of a convolution whose norm was known beforehand (phalanx.products.fold) ---


@custom_op("phalanx::weight_gradient", mutates_args=())
def weight_gradient(g: Tensor, x: Tensor) -> Tensor:
    """g^T x: float32 [out, in]."""
    fused = find_fused_for(x, "phalanx.products.gram_fused.multiply_transposed")
    return (fused or _multiply_transposed)(to_rows(g), to_rows(x))


def _multiply_transposed(x: Tensor, y: Tensor) -> Tensor:
    """x^T y in at least 32 bits."""
    return widen(x).t() @ widen(y)


@weight_gradient.register_fake
def _(g: Tensor, x: Tensor) -> Tensor:
    return x.new_empty((g.shape[1], x.shape[1]), dtype=torch.float32)


@custom_op("phalanx::input_gradient", mutates_args=())
def input_gradient(g: Tensor, wa: Tensor, x: Tensor, q: Tensor, const: Tensor) -> Tensor:
    """g wa + top * (x q) + const, where the last number of const is top."""
    fused = find_fused_for(x, "phalanx.products.ops_fused.input_gradient_fused")
    return (fused or input_gradient_reference)(g, wa, x, q, const)


def input_gradient_reference(g: Tensor, wa: Tensor, x: Tensor, q: Tensor, const: Tensor) -> Tensor:
    """`input_gradient` in torch's own operations."""
    return to_image(_input_rows(g, wa, x, q, const).to(x.dtype), x)


def _input_rows(g: Tensor, wa: Tensor, x: Tensor, q: Tensor, const: Tensor) -> Tensor:
    """The gradient of a convolution's input, including that through its norm's statistics."""
    through_norm = widen(to_rows(x)) @ widen(q) * const[-1] + const[:-1]
    return widen(to_rows(g)) @ widen(wa) + through_norm


@input_gradient.register_fake
def _(g: Tensor, wa: Tensor, x: Tensor, q: Tensor, const: Tensor) -> Tensor:
    return torch.empty_like(x)


@custom_op("phalanx::input_gradient_gated", mutates_args=())
def input_gradient_gated(
    g: Tensor, wa: Tensor, x: Tensor, q: Tensor, const: Tensor, b: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """`input_gradient` where b * scale + shift > 0, the ReLU of which is x.

    Also its column sums, and those of it times b: float32 [2, in].
    """
    fused = find_fused_for(x, "phalanx.products.ops_fused.input_gradient_gated_fused")
    return (fused or input_gradient_gated_reference)(g, wa, x, q, const, b, v)


def input_gradient_gated_reference(
    g: Tensor, wa: Tensor, x: Tensor, q: Tensor, const: Tensor, b: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """`input_gradient_gated` in torch's own operations."""
    before = widen(to_rows(b))
    rows = _input_rows(g, wa, x, q, const) * (before * v[2] + v[3] > 0)
    return to_image(rows.to(x.dtype), x), torch.stack([rows.sum(0), (rows * before).sum(0)])


@input_gradient_gated.register_fake
def _(
    g: Tensor, wa: Tensor, x: Tensor, q: Tensor, const: Tensor, b: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((2, x.shape[1]), dtype=torch.float32)


# --- of a block's input ---


@custom_op("phalanx::skip_gradient", mutates_args=())
def skip_gradient(da: Tensor, w: Tensor, dz: Tensor) -> Tensor:
    """da w + dz; a dz of half the size is added to every second pixel of every second row."""
    fused = find_fused_for(da, "phalanx.products.ops_fused.skip_gradient_fused")
    return (fused or skip_gradient_reference)(da, w, dz)


def skip_gradient_reference(da: Tensor, w: Tensor, dz: Tensor) -> Tensor:
    """`skip_gradient` in torch's own operations."""
    return to_image(_skip_rows(da, w, dz).to(da.dtype), da)


def _skip_rows(da: Tensor, w: Tensor, dz: Tensor) -> Tensor:
    """The gradient of a block's input from its first convolution and its shortcut."""
    rows = widen(to_rows(da)) @ widen(w)
    whole = dz
    if dz.shape[2:] != da.shape[2:]:
        whole = dz.new_zeros((*dz.shape[:2], *da.shape[2:]))
        whole[:, :, ::2, ::2] = dz
    return rows + widen(to_rows(whole))


@skip_gradient.register_fake
def _(da: Tensor, w: Tensor, dz: Tensor) -> Tensor:
    return new_image(da, w.shape[1], *da.shape[2:])


@custom_op("phalanx::skip_gradient_gated", mutates_args=())
def skip_gradient_gated(da: Tensor, w: Tensor, dz: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """`skip_gradient` masked by bits, and its column sums: float32 [in]."""
    fused = find_fused_for(da, "phalanx.products.ops_fused.skip_gradient_gated_fused")
    return (fused or skip_gradient_gated_reference)(da, w, dz, bits)


def skip_gradient_gated_reference(
    da: Tensor, w: Tensor, dz: Tensor, bits: Tensor
) -> tuple[Tensor, Tensor]:
    """`skip_gradient_gated` in torch's own operations."""
    image = to_image(_skip_rows(da, w, dz), da)
    rows = to_rows(image * unpack_signs(bits, image))
    return to_image(rows.to(da.dtype), da), rows.sum(0)


@skip_gradient_gated.register_fake
def _(da: Tensor, w: Tensor, dz: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    sums = da.new_empty(w.shape[1], dtype=torch.float32)
    return new_image(da, w.shape[1], *da.shape[2:]), sums


@custom_op("phalanx::mask_gradient", mutates_args=())
def mask_gradient(dy: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """dy masked by bits, and its column sums: float32 [channels].

    dy is channels_last, or has one row of channels for all pixels of an image (`is_expanded`).
    """
    fused = find_fused_for(dy, "phalanx.products.mask_fused.mask_fused")
    return (fused or mask_gradient_reference)(dy, bits)


def mask_gradient_reference(dy: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """`mask_gradient` in torch's own operations."""
    masked = new_image(dy, *dy.shape[1:]).copy_(dy * unpack_signs(bits, dy))
    return masked, widen(to_rows(masked)).sum(0)


@mask_gradient.register_fake
def _(dy: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    return new_image(dy, *dy.shape[1:]), dy.new_empty(dy.shape[1], dtype=torch.float32)
