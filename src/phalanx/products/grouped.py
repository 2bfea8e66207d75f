"""Grouped convolutions, computed with fewer and wider groups where that is faster.

cuDNN is slow on groups of a few channels. Several groups can be joined into a wider one whose
weight is block-diagonal: more to multiply, but in the shapes that tensor cores are made for.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.choices import CHOICES

_WIDTHS = (32, 64)  # channels of the joined groups that are tried; 128 was slower


class ConvShape(NamedTuple):
    """The parameters of a convolution besides its weight."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def convolve_groups(x: Tensor, weight: Tensor, shape: ConvShape) -> Tensor:
    """The convolution, with the fastest grouping."""

    def run(joined: int) -> Tensor:
        wide = _join(weight, joined, shape.groups)
        groups = shape.groups // joined
        return torch.ops.aten.convolution(x, wide, None, *shape[:3], False, [0, 0], groups)

    return _run_fastest("convolution", run, x, weight, shape)


def convolve_groups_back(
    dy: Tensor, x: Tensor, weight: Tensor, shape: ConvShape, *, needs_input_grad: bool
) -> tuple[Any, Tensor]:
    """Gradients of the input, if needed, and of the weight, each with its fastest grouping."""

    def run(joined: int, *, of_weight: bool) -> tuple[Tensor, Tensor]:
        wide = _join(weight, joined, shape.groups)
        rest = (False, [0, 0], shape.groups // joined, [not of_weight, of_weight, False])
        dx, dw, _ = torch.ops.aten.convolution_backward(dy, x, wide, None, *shape[:3], *rest)
        return dx, dw

    def find_weight_gradient(joined: int) -> Tensor:
        return _take_diagonal_blocks(run(joined, of_weight=True)[1], joined, weight, shape.groups)

    dx = None
    if needs_input_grad:
        dx, _ = _run_fastest("input gradient", partial(run, of_weight=False), x, weight, shape)
    return dx, _run_fastest("weight gradient", find_weight_gradient, x, weight, shape)


def _run_fastest(
    what: str, run: Callable[[int], Any], x: Tensor, weight: Tensor, shape: ConvShape
) -> Any:
    """The result with the fastest number of groups joined into one."""
    each = weight.shape[1]
    joined = [1, *(width // each for width in _WIDTHS if width > each and width % each == 0)]
    implementations = {
        f"{number} joined": partial(run, number) for number in joined if shape.groups % number == 0
    }
    key = f"groups, {what} {tuple(x.shape)} {tuple(weight.shape)} {tuple(shape)} {x.dtype}"
    return CHOICES.run_fastest(key, implementations)


def _join(weight: Tensor, joined: int, groups: int) -> Tensor:
    """The weight of fewer groups, block-diagonal in the groups that were joined."""
    if joined == 1:
        return weight
    rows, each, *size = weight.shape
    parts = weight.permute(0, 2, 3, 1).reshape(groups // joined, joined, -1, *size, 1, each)
    wide = parts * _make_block_mask(joined, weight.dtype, weight.device)
    return wide.reshape(rows, *size, joined * each).permute(0, 3, 1, 2)


def _take_diagonal_blocks(wide: Tensor, joined: int, weight: Tensor, groups: int) -> Tensor:
    """The gradient of a weight: the diagonal blocks of the joined weight's gradient."""
    if joined == 1:
        return wide
    rows, each, *size = weight.shape
    parts = wide.permute(0, 2, 3, 1).reshape(groups // joined, joined, -1, *size, joined, each)
    blocks = parts.diagonal(dim1=1, dim2=5).movedim(-1, 1)
    return blocks.reshape(rows, *size, each).permute(0, 3, 1, 2)


@cache
def _make_block_mask(joined: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An identity matrix that keeps the diagonal blocks: [joined, 1, 1, 1, joined, 1]."""
    eye = torch.eye(joined, dtype=dtype, device=device)
    return eye[:, None, None, None, :, None]
