"""The expansion of an MBConv block, a 1x1 convolution with its norm, and the stem's convolution.

Weights are [E, K]. With `stem` the image has three channels and the convolution is an implicit
GEMM: a row is the 3x3 patch around every second pixel, K is 27 in channels_last order.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.image_layout import (
    MULTIPROCESSORS,
    new_image,
    to_channels_last,
    to_image,
    to_rows,
)
from phalanx.mbconv.kernel_op import kernel_op

# what fits into registers and shared memory, also on smaller GPUs
_MOST_INPUTS, _MOST_INPUTS_BACK, _MOST_OUTPUTS_BACK = 128, 64, 256


def can_expand(weight: Tensor) -> bool:
    """Whether `expand` supports such weights."""
    return weight.shape[1] <= _MOST_INPUTS


def can_expand_back(weight: Tensor) -> bool:
    """Whether `expand_back` supports such weights."""
    return weight.shape[1] <= _MOST_INPUTS_BACK and weight.shape[0] <= _MOST_OUTPUTS_BACK


def count_expand_programs(rows: int, outputs: int) -> int:
    """How many programs share the rows of the forward product: rows of partial sums."""
    return min(-(-rows // 128), max(1, MULTIPROCESSORS * 4 * 64 // outputs))


def _as_kernel(weight: Tensor) -> Tensor:
    """A stem's weights as [E, 3, 3, 3]."""
    return weight.view(-1, 3, 3, 3).permute(0, 3, 1, 2).float()


def _multiply(x: Tensor, weight: Tensor, stem: bool) -> Tensor:
    """The product in float32."""
    if stem:
        return F.conv2d(x.float(), _as_kernel(weight), None, 2, 1)
    return to_image(to_rows(x).float() @ weight.float().T, x)


@kernel_op("phalanx.mbconv.expand_fused.expand")
def expand(x: Tensor, weight: Tensor, stem: bool) -> tuple[Tensor, Tensor]:
    """The product, and its partial sums [2, programs, E]."""
    y = to_channels_last(_multiply(x, weight, stem).to(x.dtype))
    exact = to_rows(y).float()
    sums = torch.stack([exact.sum(0), (exact * exact).sum(0)])
    programs = count_expand_programs(*exact.shape)
    return y, F.pad(sums[:, None], (0, 0, 0, programs - 1))


@kernel_op("phalanx.mbconv.expand_fused.expand_back")
def expand_back(
    ds: Tensor, x: Tensor, weight: Tensor, u: Tensor, add: Tensor | None, stem: bool
) -> tuple[Tensor, Tensor]:
    """The gradient of x, plus `add`, and that of the weights, float32 [E, K].

    ds: the gradient of the norm's output; u: its backward vectors. The product is recomputed.
    A stem's image gets no gradient: the first result is empty.
    """
    raw = to_rows(_multiply(x, weight, stem))
    dc = (to_rows(ds).float() * u[2] + raw * u[3] + u[4]).to(x.dtype)
    if stem:
        _, dw, _ = torch.ops.aten.convolution_backward(
            to_image(dc.float(), ds), x.float(), _as_kernel(weight), None, [2, 2], [1, 1], [1, 1],
            False, [0, 0], 1, [False, True, False],
        )  # fmt: skip
        return new_image(x, 0, 0, 0), dw.permute(0, 2, 3, 1).reshape(weight.shape).contiguous()
    dx = dc.float() @ weight.float()
    if add is not None:
        dx = dx + to_rows(add).float()
    return to_image(dx.to(x.dtype), x), dc.float().T @ to_rows(x).float()
