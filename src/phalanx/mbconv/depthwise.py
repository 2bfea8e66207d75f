"""Depthwise convolutions of channels_last images, with the norm before and the sums for the next.

Weights are [C, 1, K, K]. The input may be the raw output of the preceding convolution: then v holds
the vectors of the norm between them, and norm and SiLU are applied on load.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.image_layout import MULTIPROCESSORS, to_channels_last
from phalanx.mbconv.kernel_op import kernel_op
from phalanx.mbconv.norms import silu_and_derivative


def count_strips(columns: int, channels: int) -> int:
    """How many programs share the columns of all images: rows of partial sums."""
    return max(1, min(columns // 16, MULTIPROCESSORS * 12 * 32 // channels))


def find_output_size(size: int, stride: int) -> int:
    """The output's height or width from the input's."""
    return (size - 1) // stride + 1


def _as_partial_sums(sums: Tensor, x: Tensor, stride: int) -> Tensor:
    """Sums [2, C] as partial sums [2, programs, C], in the first row; others are zero."""
    programs = count_strips(len(x) * find_output_size(x.shape[3], stride), x.shape[1])
    return F.pad(sums[:, None], (0, 0, 0, programs - 1))


def _activate(x: Tensor, v: Tensor | None) -> Tensor:
    """The input of the convolution, in float32."""
    return x.float() if v is None else silu_and_derivative(x, v)[0]


@kernel_op("phalanx.mbconv.depthwise_forward_fused.convolve")
def convolve(x: Tensor, weight: Tensor, v: Tensor | None, stride: int) -> tuple[Tensor, Tensor]:
    """The convolution, and its partial sums [2, programs, C]."""
    pad, c = weight.shape[2] // 2, x.shape[1]
    y = F.conv2d(_activate(x, v), weight.float(), None, stride, pad, 1, c).to(x.dtype)
    exact = y.float()
    sums = torch.stack([exact.sum((0, 2, 3)), (exact * exact).sum((0, 2, 3))])
    return to_channels_last(y), _as_partial_sums(sums, x, stride)


@kernel_op("phalanx.mbconv.depthwise_backward_fused.convolve_back")
def convolve_back(
    dy: Tensor, x: Tensor, weight: Tensor, v: Tensor | None, stride: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the norm's output, its partial sums, and partial weight gradients.

    The latter are [programs, K * K, C] (see `phalanx.mbconv.norms.add_partials`). Without v, the
    first is the gradient of x and the sums are meaningless.
    """
    c, _, k, _ = weight.shape
    dx, dw, _ = torch.ops.aten.convolution_backward(
        dy.float(), _activate(x, v), weight.float(), None, [stride] * 2, [k // 2] * 2, [1, 1],
        False, [0, 0], c, [True, True, False],
    )  # fmt: skip
    if v is not None:
        dx = dx * silu_and_derivative(x, v)[1]
    dx = to_channels_last(dx.to(x.dtype))
    exact = dx.float()
    sums = torch.stack([exact.sum((0, 2, 3)), (exact * x.float()).sum((0, 2, 3))])
    sums = _as_partial_sums(sums, x, stride)
    partials = F.pad(dw.view(1, c, k * k).mT, (0, 0, 0, 0, 0, sums.shape[1] - 1))
    return dx, sums, partials.contiguous()
