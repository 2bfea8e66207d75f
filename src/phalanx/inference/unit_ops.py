"""Operations for scoring a network's ends: the stem's space-to-depth and pool, the head's mean.

Each is a torch custom op with a plain reference beside it.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.inference.conv_implementations import (
    ACTIVATIONS,
    STEM_CHANNELS,
    count_blocks,
    fits_32_bit_offsets,
    launch_kernel,
    runs_kernels,
)
from phalanx.kernels.choices import make_tiles
from phalanx.kernels.image_layout import new_image

_BLOCK_TILE = make_tiles("BM", (64, 4, 1))[0]
_IMAGE_TILE = make_tiles("BM BC", (16, 64, 4, 1))[0]


# --- the stem: a convolution of stride 2 over three channels as one of stride 1 over blocks ---


def space_to_depth_reference(x: Tensor, padding: Sequence[int], half: torch.dtype) -> Tensor:
    """`space_to_depth` in plain torch."""
    before, after = padding
    odd = [edge % 2 for edge in x.shape[2:]]
    x = F.pad(x.to(half), (2 * before, 2 * after + odd[1], 2 * before, 2 * after + odd[0]))
    n, c, h, w = x.shape
    blocks = x.view(n, c, h // 2, 2, w // 2, 2).permute(0, 3, 5, 1, 2, 4)
    blocks = F.pad(blocks.reshape(n, 4 * c, h // 2, w // 2), (0, 0, 0, 0, 0, STEM_CHANNELS - 4 * c))
    return blocks.contiguous(memory_format=torch.channels_last)


@torch.library.custom_op("phalanx::gather_squares", mutates_args=("out",))
def space_to_depth(x: Tensor, out: Tensor, padding: Sequence[int]) -> None:
    """Space-to-depth: 2 x 2 pixels of 3 channels become a pixel of 16 channels, the last four zero.

    padding: blocks of zeros before and after, in both directions. out: from `empty_space_to_depth`.
    """
    if not runs_kernels(x) or not fits_32_bit_offsets(x, out):
        out.copy_(space_to_depth_reference(x, padding, out.dtype))
        return
    rows = out.numel() // STEM_CHANNELS
    args = (x, out, rows, *x.shape[2:], *out.shape[2:], padding[0], *x.stride())
    launch_kernel(
        "phalanx.inference.layers_fused.space_to_depth",
        (-(-rows // _BLOCK_TILE["BM"]),),
        args,
        _BLOCK_TILE,
    )


space_to_depth.register_fake(lambda x, out, padding: None)


def empty_space_to_depth(x: Tensor, padding: Sequence[int], half: torch.dtype) -> Tensor:
    """An empty tensor for `space_to_depth` of a batch of images."""
    height, width = ((edge + 1) // 2 + sum(padding) for edge in x.shape[2:])
    return new_image(x, STEM_CHANNELS, height, width, dtype=half)


def rearrange_stem_weight(weight: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """The weights [O, 3, KS, KS] of a convolution of stride 2, padded by KS // 2, over blocks.

    Returns [O, 16, T, T] for a convolution of stride 1 without padding, and the blocks of zeros
    that the image needs before and after.
    """
    out_channels, colours, kernel, _ = weight.shape
    reach = kernel // 2
    before, after = -(-reach // 2), reach // 2
    taps = before + after + 1
    shift_by = 2 * before - reach  # of the window within its blocks
    grown = weight.new_zeros(out_channels, colours, 2 * taps, 2 * taps)
    grown[:, :, shift_by : shift_by + kernel, shift_by : shift_by + kernel] = weight
    blocks = grown.view(out_channels, colours, taps, 2, taps, 2).permute(0, 3, 5, 1, 2, 4)
    out = weight.new_zeros(out_channels, STEM_CHANNELS, taps, taps)
    out[:, : 4 * colours] = blocks.reshape(out_channels, 4 * colours, taps, taps)
    return out.contiguous(memory_format=torch.channels_last), (before, after)


def pool_reference(x: Tensor, bias: Tensor, act: int) -> Tensor:
    """`activate_and_pool` in plain torch."""
    y = ACTIVATIONS[act](x.float() + bias[:, None, None])
    return F.max_pool2d(y, 3, stride=2, padding=1).to(x.dtype)


@torch.library.custom_op("phalanx::activate_and_pool", mutates_args=())
def activate_and_pool(x: Tensor, bias: Tensor, act: int) -> Tensor:
    """The 3x3 max-pool of stride 2 of act(x + bias), for a non-decreasing act."""
    if not runs_kernels(x) or not fits_32_bit_offsets(x) or x.shape[1] % 8:
        return pool_reference(x, bias, act)
    channels, out = x.shape[1], _empty_pooled(x)
    rows = out.numel() // channels
    args = (x, bias, out, rows, channels // 8, *x.shape[2:], *out.shape[2:])
    grid = count_blocks(rows, channels, _IMAGE_TILE)
    launch_kernel(
        "phalanx.inference.layers_fused.activate_and_pool", grid, args, _IMAGE_TILE, ACT=act
    )
    return out


activate_and_pool.register_fake(lambda x, bias, act: _empty_pooled(x))


def _empty_pooled(x: Tensor) -> Tensor:
    height, width = ((edge + 1) // 2 for edge in x.shape[2:])
    return new_image(x, x.shape[1], height, width)


# --- the head ---


@torch.library.custom_op("phalanx::average_pixels", mutates_args=())
def average_pixels(x: Tensor) -> Tensor:
    """The mean over the pixels of channels_last images, [N, C]."""
    images, channels, height, width = x.shape
    if not runs_kernels(x) or not fits_32_bit_offsets(x) or channels % 8:
        return x.mean((2, 3))
    out = x.new_empty(images, channels)
    grid = (-(-channels // _IMAGE_TILE["BC"]), images)
    launch_kernel(
        "phalanx.inference.layers_fused.average_pixels",
        grid,
        (x, out, height * width, channels // 8),
        _IMAGE_TILE,
    )
    return out


average_pixels.register_fake(lambda x: x.new_empty(x.shape[:2]))
