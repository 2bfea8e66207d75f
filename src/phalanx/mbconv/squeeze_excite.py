"""Squeeze-and-excite between a norm with SiLU and the 1x1 convolution that follows.

x is the norm's input, z its output. Sums per image are [planes, parts, N, C]; kernels that read
them add up the parts in order.

The backward sums of the norm need no pass over the images of their own: the gradient of z is
(dy * gate + dmean) * silu'(z), where gate and dmean are the same for all pixels of an image, so
they follow from sums per image.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.batch_norm import backward_vectors
from phalanx.kernels.image_layout import count_parts
from phalanx.mbconv.kernel_op import kernel_op
from phalanx.mbconv.norms import silu_and_derivative


def _sum_by_image(x: Tensor, *terms: Tensor) -> Tensor:
    """The sums per image of each term, in the first part; the other parts are zero."""
    n, c, h, w = x.shape
    sums = torch.stack(terms).sum((3, 4))
    return F.pad(sums[:, None], (0, 0, 0, 0, 0, count_parts(n, h * w, c) - 1))


@kernel_op("phalanx.mbconv.image_sums_fused.sum_images")
def sum_images(x: Tensor, v: Tensor) -> Tensor:
    """Sums per image of silu(z), one plane; v holds the vectors of the norm."""
    return _sum_by_image(x, silu_and_derivative(x, v)[0])


@kernel_op("phalanx.mbconv.image_sums_fused.sum_slopes")
def sum_slopes(x: Tensor, v: Tensor) -> Tensor:
    """Sums per image of silu'(z) and silu'(z) * x."""
    slope = silu_and_derivative(x, v)[1]
    return _sum_by_image(x, slope, slope * x.float())


@kernel_op("phalanx.mbconv.image_sums_fused.sum_images_back")
def sum_images_back(x: Tensor, v: Tensor, dy: Tensor) -> Tensor:
    """Sums per image of silu(z), silu'(z) and silu'(z) * x times dy, and of the last two alone."""
    (act, slope), d = silu_and_derivative(x, v), dy.float()
    return _sum_by_image(x, act * d, slope * d, slope * d * x.float(), slope, slope * x.float())


@kernel_op("phalanx.mbconv.squeeze_excite_fused.excite")
def excite(sums: Tensor, weights: list[Tensor], pixels: int) -> tuple[Tensor, Tensor, Tensor]:
    """From `sum_images`: mean [N, C], the hidden layer before its SiLU [N, R], and the gate [N, C].

    weights: w1 [R, C], b1, w2 [C, R], b2, of any dtype; everything is computed in float32.
    """
    w1, b1, w2, b2 = (each.float() for each in weights)
    mean = sums[0].sum(0) / pixels
    hidden = F.linear(mean, w1, b1)
    return mean, hidden, F.linear(F.silu(hidden), w2, b2).sigmoid()


def _gate_slope(back: Tensor, gate: Tensor) -> Tensor:
    """The gradient of the gate's logits, before the sigmoid."""
    return back[0].sum(0) * gate * (1 - gate)


@kernel_op("phalanx.mbconv.squeeze_excite_fused.excite_back")
def excite_back(
    back: Tensor, weights: list[Tensor], hidden: Tensor, gate: Tensor, pixels: int
) -> tuple[Tensor, Tensor]:
    """The gradient of the hidden layer, and dmean: the mean's gradient divided by the pixels.

    back: from `sum_images_back`. weights: w1, w2.
    """
    w1, w2 = (each.float() for each in weights)
    p = hidden.sigmoid()
    dhidden = (_gate_slope(back, gate) @ w2) * p * (1 + hidden * (1 - p))
    return dhidden, (dhidden @ w1) / pixels


@kernel_op("phalanx.mbconv.squeeze_excite_fused.finish_excite_back")
def finish_excite_back(
    back: Tensor, excited: list[Tensor], dmean: Tensor, v: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Backward vectors of the preceding norm, and the gradients of w1, b1, w2, b2.

    back: from `sum_images_back`. excited: mean, hidden, gate and the gradient of hidden.
    """
    mean, hidden, gate, dhidden = excited
    dbeta, product = (back[3:].sum(1) * dmean + back[1:3].sum(1) * gate).sum(1)
    outer = _gate_slope(back, gate)
    gradients = (dhidden.T @ mean, dhidden.sum(0), outer.T @ F.silu(hidden), outer.sum(0))
    return backward_vectors(dbeta, product - v[0] * dbeta, v, count), *gradients


@kernel_op("phalanx.mbconv.squeeze_excite_fused.finish_mean_back")
def finish_mean_back(slopes: Tensor, dmean: Tensor, v: Tensor, count: int) -> Tensor:
    """Backward vectors of a norm whose SiLU is followed by global mean pooling only.

    slopes: from `sum_slopes`.
    """
    dbeta, product = (slopes.sum(1) * dmean).sum(1)
    return backward_vectors(dbeta, product - v[0] * dbeta, v, count)
