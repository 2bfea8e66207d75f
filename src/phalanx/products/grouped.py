"""Convolutions in groups, as fewer and wider groups where that is faster.

Libraries are slow on groups of a few channels. Several of them make one wider group whose weights
are zero between what was apart: more to multiply, but in the shapes that tensor cores are made for.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.choices import CHOICES

_WIDTHS = (32, 64)  # of the groups that are tried, in channels; 128 lost


class ConvShape(NamedTuple):
    """What a convolution needs to know besides its weight."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def convolve_groups(x: Tensor, weight: Tensor, shape: ConvShape) -> Tensor:
    """The convolution by the fastest grouping."""

    def run(joined: int) -> Tensor:
        wide = _join(weight, joined, shape.groups)
        groups = shape.groups // joined
        return torch.ops.aten.convolution(x, wide, None, *shape[:3], False, [0, 0], groups)

    return _choose("convolution", run, x, weight, shape)


def convolve_groups_back(
    dy: Tensor, x: Tensor, weight: Tensor, shape: ConvShape, *, wanted: bool
) -> tuple[Any, Tensor]:
    """Gradients of the input, if wanted, and of the weight, each by its fastest grouping."""

    def run(joined: int, *, own: bool) -> tuple[Tensor, Tensor]:
        wide = _join(weight, joined, shape.groups)
        found = (False, [0, 0], shape.groups // joined, [not own, own, False])
        dx, dw, _ = torch.ops.aten.convolution_backward(dy, x, wide, None, *shape[:3], *found)
        return dx, dw

    def find_own(joined: int) -> Tensor:
        return _part(run(joined, own=True)[1], joined, weight, shape.groups)

    dx = None
    if wanted:
        dx, _ = _choose("input gradient", partial(run, own=False), x, weight, shape)
    return dx, _choose("weight gradient", find_own, x, weight, shape)


def _choose(
    what: str, run: Callable[[int], Any], x: Tensor, weight: Tensor, shape: ConvShape
) -> Any:
    """What the fastest number of groups gives that are joined to one."""
    each = weight.shape[1]
    joined = [1, *(width // each for width in _WIDTHS if width > each and width % each == 0)]
    ways = {
        f"{number} joined": partial(run, number) for number in joined if shape.groups % number == 0
    }
    key = f"groups, {what} {tuple(x.shape)} {tuple(weight.shape)} {tuple(shape)} {x.dtype}"
    return CHOICES.choose(key, ways)


def _join(weight: Tensor, joined: int, groups: int) -> Tensor:
    """The weight of fewer groups, with zeros between those that were apart."""
    if joined == 1:
        return weight
    rows, each, *size = weight.shape
    parts = weight.permute(0, 2, 3, 1).reshape(groups // joined, joined, -1, *size, 1, each)
    wide = parts * _diagonal(joined, weight.dtype, weight.device)
    return wide.reshape(rows, *size, joined * each).permute(0, 3, 1, 2)


def _part(wide: Tensor, joined: int, weight: Tensor, groups: int) -> Tensor:
    """The gradient of a weight from that of the joined one."""
    if joined == 1:
        return wide
    rows, each, *size = weight.shape
    parts = wide.permute(0, 2, 3, 1).reshape(groups // joined, joined, -1, *size, joined, each)
    own = parts.diagonal(dim1=1, dim2=5).movedim(-1, 1)
    return own.reshape(rows, *size, each).permute(0, 3, 1, 2)


@cache
def _diagonal(joined: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One where a group meets itself: [joined, 1, 1, 1, joined, 1]."""
    eye = torch.eye(joined, dtype=dtype, device=device)
    return eye[:, None, None, None, :, None]
