"""Squeeze-and-excite between a norm with SiLU and the product behind it.

Tables of sums by image are [3, parts, N, C]: of silu(z), of silu'(z) and of silu'(z) * x, where x
is the norm's input and z its output; backward each is times dy. Whoever needs them adds the parts.

No pass over an image is needed for the sums of the norm before it: with the gradient of z
(dy * gate + dmean) * silu'(z), they follow from these tables, gate and dmean being the same for all
pixels of an image.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.mbconv.image_layout import count_parts
from phalanx.mbconv.kernel_op import kernel_op
from phalanx.mbconv.norms import norm_gradients, silu_parts


@kernel_op("phalanx.mbconv.image_sums_fused.sum_images")
def sum_images(x: Tensor, v: Tensor, dy: Tensor | None) -> Tensor:
    """The tables of x with the vectors v of its norm; with dy, those of backward."""
    act, slope = silu_parts(x, v)
    if dy is not None:
        act, slope = act * dy.float(), slope * dy.float()
    table = torch.stack([act, slope, slope * x.float()]).sum((3, 4))
    n, c, h, w = x.shape
    return F.pad(table[:, None], (0, 0, 0, 0, 0, count_parts(n, h * w, c) - 1))


@kernel_op("phalanx.mbconv.squeeze_excite_fused.excite")
def excite(table: Tensor, weights: list[Tensor], pixels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean [N, C], the hidden layer before its SiLU [N, R], and the gate [N, C].

    weights: w1 [R, C], b1, w2 [C, R], b2, of any type; everything is computed in float32.
    """
    w1, b1, w2, b2 = (each.float() for each in weights)
    mean = table[0].sum(0) / pixels
    hidden = F.linear(mean, w1, b1)
    return mean, hidden, F.linear(F.silu(hidden), w2, b2).sigmoid()


def _gate_slope(table: Tensor, gate: Tensor) -> Tensor:
    """The gradient of what the gate is the sigmoid of."""
    return table[0].sum(0) * gate * (1 - gate)


@kernel_op("phalanx.mbconv.squeeze_excite_fused.excite_back")
def excite_back(
    table: Tensor, weights: list[Tensor], hidden: Tensor, gate: Tensor, pixels: int
) -> tuple[Tensor, Tensor]:
    """The gradient of the hidden layer, and dmean, each pixel's share of that of the mean.

    table: backward's. weights: w1, w2.
    """
    w1, w2 = (each.float() for each in weights)
    p = hidden.sigmoid()
    dhidden = (_gate_slope(table, gate) @ w2) * p * (1 + hidden * (1 - p))
    return dhidden, (dhidden @ w1) / pixels


@kernel_op("phalanx.mbconv.squeeze_excite_fused.finish_excite_back")
def finish_excite_back(
    forward: Tensor, back: Tensor, excited: list[Tensor], dmean: Tensor, v: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Backward vectors of the norm before, its two gradients, and those of w1, b1, w2, b2.

    forward, back: the tables. excited: mean, hidden, gate and the gradient of hidden.
    """
    mean, hidden, gate, dhidden = excited
    sums = (forward[1:].sum(1) * dmean + back[1:].sum(1) * gate).sum(1)
    outer = _gate_slope(back, gate)
    gradients = (dhidden.T @ mean, dhidden.sum(0), outer.T @ F.silu(hidden), outer.sum(0))
    return *norm_gradients(sums[0], sums[1], v, count), *gradients


@kernel_op("phalanx.mbconv.squeeze_excite_fused.finish_mean_back")
def finish_mean_back(
    forward: Tensor, dmean: Tensor, v: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward vectors of a norm, and its two gradients, where a mean is all that follows SiLU."""
    total, product = (forward[1:].sum(1) * dmean).sum(1)
    return norm_gradients(total, product, v, count)
