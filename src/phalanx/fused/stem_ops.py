"""Operations of a network's first unit: the layout of its image, and norm with max-pool."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from phalanx.kernels.batch_norm import RELU, apply_norm, apply_norm_back, reduce_norm
from phalanx.kernels.fused import find_fused_for
from phalanx.kernels.group_norm import reduce_group_norm
from phalanx.kernels.image_layout import to_channels_last

_STEP = 2  # the stride of every pool here


@custom_op("phalanx::arrange_image", mutates_args=())
def arrange_image(x: Tensor, size: int, half: torch.dtype) -> Tensor:
    """An image of three channels in 16 bits, with a fourth of zeros, in channels_last memory.

    size 0: nothing else. Otherwise blocks of 2 x 2 pixels become 16 channels (space-to-depth),
    padded such that a centred convolution of that odd size and stride 2 becomes one of stride 1
    without padding.
    """
    fused = find_fused_for(x, "phalanx.fused.stem_fused.arrange_image_fused")
    if fused is not None:
        return fused(x, size, half)
    x = F.pad(x.to(half), (0, 0, 0, 0, 0, 1))
    if size:
        front, back = size // 2 + 1, size // 2 - 1
        x = space_to_depth(F.pad(x, (front, back, front, back)))
    return to_channels_last(x)


@arrange_image.register_fake
def _(x: Tensor, size: int, half: torch.dtype) -> Tensor:
    shape = (len(x), 4 * (4 if size else 1), *find_arranged_edges(x, size))
    return to_channels_last(x.new_empty(shape, dtype=half))


def find_arranged_edges(x: Tensor, size: int) -> tuple[int, int]:
    """Height and width of an arranged image."""
    height, width = x.shape[2:]
    return (height // 2 + size // 2, width // 2 + size // 2) if size else (height, width)


def space_to_depth(x: Tensor) -> Tensor:
    """[N, C, H, W] as [N, 4 C, H / 2, W / 2]: the pixels of 2 x 2 blocks become channels."""
    n, c, h, w = x.shape
    parts = x.reshape(n, c, h // 2, 2, w // 2, 2).permute(0, 3, 5, 1, 2, 4)
    return parts.reshape(n, 4 * c, h // 2, w // 2)


def depth_to_space(x: Tensor) -> Tensor:
    """The inverse of `space_to_depth`."""
    n, c, h, w = x.shape
    parts = x.reshape(n, 2, 2, c // 4, h, w).permute(0, 3, 4, 1, 5, 2)
    return parts.reshape(n, c // 4, 2 * h, 2 * w)


@custom_op("phalanx::pool_norm", mutates_args=())
def pool_norm(x: Tensor, v: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise + ReLU + max-pool of stride 2 over windows of 2 x 2, or of 3 x 3 padded by one.

    Also returns the index of the maximum in each window, as a byte, and x at that pixel.
    """
    fused = find_fused_for(x, "phalanx.fused.stem_fused.pool_norm_fused")
    if fused is not None:
        return fused(x, v, size)
    value = apply_norm(x.float(), v, RELU)
    y, flat = F.max_pool2d(value, size, _STEP, padding=size // 2 - (size == 2), return_indices=True)
    x_at_max = x.flatten(2).gather(2, flat.flatten(2)).view(y.shape)
    front = 1 if size == 3 else 0
    rows = torch.arange(y.shape[2], device=x.device)[:, None] * _STEP - front
    columns = torch.arange(y.shape[3], device=x.device) * _STEP - front
    argmax = (flat // x.shape[3] - rows) * size + flat % x.shape[3] - columns
    y, argmax = y.to(x.dtype), argmax.to(torch.uint8)
    return to_channels_last(y), to_channels_last(argmax), to_channels_last(x_at_max)


@pool_norm.register_fake
def _(x: Tensor, v: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    n, c, *edges = x.shape
    shape = (n, c, *(find_pooled_edge(edge, size) for edge in edges))
    y = to_channels_last(x.new_empty(shape))
    return y, torch.empty_like(y, dtype=torch.uint8), torch.empty_like(y)


def find_pooled_edge(edge: int, size: int) -> int:
    """The height or width of an image after the pool."""
    return (edge + 1) // 2 if size == 3 else edge // 2


@custom_op("phalanx::pool_norm_back", mutates_args=())
def pool_norm_back(
    dy: Tensor, argmax: Tensor, x_at_max: Tensor, x: Tensor, v: Tensor, size: int, groups: list[int]
) -> tuple[Tensor, Tensor]:
    """The gradient of x and the norm's u, from the gradient of the pool's output.

    groups: those of a group norm; empty for a batch norm.
    """
    fused = find_fused_for(x, "phalanx.fused.stem_fused.pool_norm_back_fused")
    if fused is not None:
        return fused(dy, argmax, x_at_max, x, v, size, groups)
    spread = torch.zeros_like(x, dtype=torch.float32)
    front = 1 if size == 3 else 0
    rows = torch.arange(dy.shape[2], device=x.device)[:, None] * _STEP - front
    columns = torch.arange(dy.shape[3], device=x.device) * _STEP - front
    flat = (rows + argmax.long() // size) * x.shape[3] + columns + argmax.long() % size
    values = dy.float().flatten(2)
    spread = spread.flatten(2).scatter_add_(2, flat.flatten(2), values).view(x.shape)
    spread = to_channels_last(spread)
    u = reduce_group_norm(spread, x, v, groups, RELU) if groups else reduce_norm(spread, x, v, RELU)
    return apply_norm_back(spread, x, v, u, RELU), u


@pool_norm_back.register_fake
def _(
    dy: Tensor, argmax: Tensor, x_at_max: Tensor, x: Tensor, v: Tensor, size: int, groups: list[int]
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), v.new_empty((5, *v.shape[1:]))


@custom_op("phalanx::pool", mutates_args=())
def pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """Max-pool over windows of 2 x 2, and the index of the maximum in each, as a byte."""
    fused = find_fused_for(x, "phalanx.fused.stem_fused.pool_fused")
    if fused is not None:
        return fused(x)
    y, flat = F.max_pool2d(x, _STEP, return_indices=True)
    row, column = flat // x.shape[3], flat % x.shape[3]
    argmax = (row % _STEP * _STEP + column % _STEP).to(torch.uint8)
    return to_channels_last(y), to_channels_last(argmax)


@pool.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    n, c, h, w = x.shape
    y = x.new_empty((n, c, h // _STEP, w // _STEP)).contiguous(memory_format=torch.channels_last)
    return y, torch.empty_like(y, dtype=torch.uint8)


@custom_op("phalanx::unpool_norm_back", mutates_args=())
def unpool_norm_back(
    dy: Tensor, argmax: Tensor, x: Tensor, v: Tensor, u: Tensor, activation: int, edges: list[int]
) -> Tensor:
    """The gradient of `pool`'s input of size `edges`; x: its output, the input of a norm."""
    fused = find_fused_for(x, "phalanx.fused.stem_fused.unpool_norm_back_fused")
    if fused is not None:
        return fused(dy, argmax, x, v, u, activation, edges)
    own = apply_norm_back(dy, x, v, u, activation)
    n, c, h, w = x.shape
    parts = torch.stack([own.where(argmax == place, own.new_zeros(())) for place in range(4)], -1)
    parts = parts.view(n, c, h, w, _STEP, _STEP).transpose(3, 4).reshape(n, c, 2 * h, 2 * w)
    parts = F.pad(parts, (0, edges[1] - 2 * w, 0, edges[0] - 2 * h))
    return to_channels_last(parts)


@unpool_norm_back.register_fake
def _(
    dy: Tensor, argmax: Tensor, x: Tensor, v: Tensor, u: Tensor, activation: int, edges: list[int]
) -> Tensor:
    empty = x.new_empty((*x.shape[:2], *edges))
    return to_channels_last(empty)


@custom_op("phalanx::whiten", mutates_args=())
def whiten(x: Tensor, weight: Tensor, half: torch.dtype) -> Tensor:
    """GELU of the convolution of an image with filters [24, 3, 2, 2], in channels_last memory."""
    fused = find_fused_for(x, "phalanx.fused.stem_fused.whiten_fused")
    if fused is not None:
        return fused(x, weight, half)
    y = F.gelu(F.conv2d(x.to(half).float(), weight.to(half).float())).to(half)
    return to_channels_last(y)


@whiten.register_fake
def _(x: Tensor, weight: Tensor, half: torch.dtype) -> Tensor:
    n, _, h, w = x.shape
    y = x.new_empty((n, len(weight), h - 1, w - 1), dtype=half)
    return to_channels_last(y)
