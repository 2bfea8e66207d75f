"""What scoring needs beside dense convolutions: the stem's squares and pool, depthwise, gates.

Each is a torch custom op with a plain reference beside it.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.inference.conv_ops import empty_result
from phalanx.inference.conv_ways import (
    ACTIVATIONS,
    SQUARE,
    count_blocks,
    fits,
    launch,
    runs_kernels,
)
from phalanx.kernels.choices import make_tiles
from phalanx.kernels.image_layout import new_image

_SQUARE_TILE = make_tiles("BM", (64, 4, 1))[0]
_IMAGE_TILE = make_tiles("BM BC", (16, 64, 4, 1))[0]
_SQUEEZE_TILES = make_tiles("BP BC BS", (4, 512, 16, 8, 1), (16, 256, 16, 8, 1), (64, 64, 16, 8, 1))
_EXCITE_TILE = make_tiles("BC", (64, 4, 1))[0]
_MOST_SQUEEZED = 128  # channels that a program holds
_FILTERS = 8192  # programs of a depthwise convolution that keep a device busy


# --- the stem: a convolution of stride 2 over three channels as one over squares ---


def gather_squares_reference(x: Tensor, padding: Sequence[int], half: torch.dtype) -> Tensor:
    """`gather_squares` in plain torch."""
    before, after = padding
    odd = [edge % 2 for edge in x.shape[2:]]
    x = F.pad(x.to(half), (2 * before, 2 * after + odd[1], 2 * before, 2 * after + odd[0]))
    n, c, h, w = x.shape
    squares = x.view(n, c, h // 2, 2, w // 2, 2).permute(0, 3, 5, 1, 2, 4)
    squares = F.pad(squares.reshape(n, 4 * c, h // 2, w // 2), (0, 0, 0, 0, 0, SQUARE - 4 * c))
    return squares.contiguous(memory_format=torch.channels_last)


@torch.library.custom_op("phalanx::gather_squares", mutates_args=("out",))
def gather_squares(x: Tensor, out: Tensor, padding: Sequence[int]) -> None:
    """Squares of 2 x 2 pixels of 3 channels as pixels of 16 channels, the last four zero.

    padding: squares of zeros before and after, in both directions. out: from `empty_squares`.
    """
    if not runs_kernels(x) or not fits(x):
        out.copy_(gather_squares_reference(x, padding, out.dtype))
        return
    rows = out.numel() // SQUARE
    args = (x, out, rows, *x.shape[2:], *out.shape[2:], padding[0], *x.stride())
    launch(
        "phalanx.inference.layers_fused.gather_squares",
        (-(-rows // _SQUARE_TILE["BM"]),),
        args,
        _SQUARE_TILE,
    )


gather_squares.register_fake(lambda x, out, padding: None)


def empty_squares(x: Tensor, padding: Sequence[int], half: torch.dtype) -> Tensor:
    """Room for the squares of an image batch."""
    high, wide = ((edge + 1) // 2 + sum(padding) for edge in x.shape[2:])
    return new_image(x, SQUARE, high, wide, dtype=half)


def fold_into_squares(weight: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """The weights [O, 3, KS, KS] of a convolution of stride 2, padded by KS // 2, over squares.

    Gives [O, 16, T, T] for a convolution of stride 1 without padding, and the squares of zeros
    that the image needs before and after.
    """
    wide, colours, kernel, _ = weight.shape
    reach = kernel // 2
    before, after = -(-reach // 2), reach // 2
    taps = before + after + 1
    shift_by = 2 * before - reach  # of the window within its squares
    grown = weight.new_zeros(wide, colours, 2 * taps, 2 * taps)
    grown[:, :, shift_by : shift_by + kernel, shift_by : shift_by + kernel] = weight
    squares = grown.view(wide, colours, taps, 2, taps, 2).permute(0, 3, 5, 1, 2, 4)
    out = weight.new_zeros(wide, SQUARE, taps, taps)
    out[:, : 4 * colours] = squares.reshape(wide, 4 * colours, taps, taps)
    return out.contiguous(memory_format=torch.channels_last), (before, after)


def pool_reference(x: Tensor, bias: Tensor, act: int) -> Tensor:
    """`activate_and_pool` in plain torch."""
    y = ACTIVATIONS[act](x.float() + bias[:, None, None])
    return F.max_pool2d(y, 3, stride=2, padding=1).to(x.dtype)


@torch.library.custom_op("phalanx::activate_and_pool", mutates_args=())
def activate_and_pool(x: Tensor, bias: Tensor, act: int) -> Tensor:
    """The 3x3 max-pool of stride 2 of act(x + bias), where act never falls."""
    if not runs_kernels(x) or not fits(x) or x.shape[1] % 8:
        return pool_reference(x, bias, act)
    channels, out = x.shape[1], _empty_pooled(x)
    rows = out.numel() // channels
    args = (x, bias, out, rows, channels // 8, *x.shape[2:], *out.shape[2:])
    grid = count_blocks(rows, channels, _IMAGE_TILE)
    launch("phalanx.inference.layers_fused.activate_and_pool", grid, args, _IMAGE_TILE, ACT=act)
    return out


activate_and_pool.register_fake(lambda x, bias, act: _empty_pooled(x))


def _empty_pooled(x: Tensor) -> Tensor:
    high, wide = ((edge + 1) // 2 for edge in x.shape[2:])
    return new_image(x, x.shape[1], high, wide)


# --- depthwise convolutions and squeeze-and-excite ---


def filter_reference(
    x: Tensor, weights: Sequence[Tensor], bias: Tensor, geometry: Sequence[int], act: int
) -> tuple[Tensor, Tensor]:
    """`filter_channels` in plain torch."""
    (stride, padding), channels = geometry, x.shape[1]
    y = F.conv2d(x, weights[0], None, stride, padding, 1, channels).float() + bias[:, None, None]
    y = ACTIVATIONS[act](y)
    return y.to(x.dtype), y.sum((2, 3))[:, None]


@torch.library.custom_op("phalanx::filter_channels", mutates_args=())
def filter_channels(
    x: Tensor, weights: Sequence[Tensor], bias: Tensor, geometry: Sequence[int], act: int
) -> tuple[Tensor, Tensor]:
    """act(conv(x) + bias) of a depthwise convolution, and the sums of the result by image.

    weights: as [C, 1, KS, KS] and as [KS, KS, C]; the sums are [N, parts, C], to be added up.
    geometry: stride and padding.
    """
    if not runs_kernels(x) or not fits(x) or x.shape[1] % 8:
        return filter_reference(x, weights, bias, geometry, act)
    (images, channels), kernel, (stride, padding) = x.shape[:2], weights[1].shape[0], geometry
    out = empty_result(x, weights, geometry)
    high, wide = out.shape[2:]
    blocks, columns = count_blocks(high * wide, channels, _IMAGE_TILE)
    parts = -(-blocks // max(1, images * columns * blocks // _FILTERS))  # few are soon added up
    sums = torch.empty(images, parts, channels, device=x.device)
    args = (x, weights[1], bias, out, sums, *x.shape[2:], high, wide, channels // 8, parts)
    grid = (columns, images * parts)
    flags = {"KS": kernel, "STRIDE": stride, "PAD": padding, "ACT": act}
    launch("phalanx.inference.layers_fused.filter_channels", grid, args, _IMAGE_TILE, **flags)
    return out, sums


@filter_channels.register_fake
def _(
    x: Tensor, weights: Sequence[Tensor], bias: Tensor, geometry: Sequence[int], act: int
) -> tuple[Tensor, Tensor]:
    parts = torch.library.get_ctx().new_dynamic_size()
    sums = x.new_empty(x.shape[0], parts, x.shape[1], dtype=torch.float32)
    return empty_result(x, weights, geometry), sums


def gate_reference(
    sums: Tensor, weights: Sequence[Tensor], pixels: int, half: torch.dtype
) -> Tensor:
    """`squeeze_and_excite` in plain torch."""
    w1, b1, w2, b2 = (weight.float() for weight in weights)
    hidden = F.silu(F.linear(sums.sum(1) / pixels, w1, b1))
    return F.linear(hidden, w2, b2).sigmoid().to(half)


@torch.library.custom_op("phalanx::squeeze_and_excite", mutates_args=())
def squeeze_and_excite(
    sums: Tensor, weights: Sequence[Tensor], pixels: int, half: torch.dtype
) -> Tensor:
    """The factor of each image's channels, [N, C], from the sums of its pixels [N, parts, C].

    weights: [S, C], [S], [C, S], [C].
    """
    (images, parts, channels), squeezed = sums.shape, weights[0].shape[0]
    if not runs_kernels(sums) or channels % 8 or squeezed > _MOST_SQUEEZED:
        return gate_reference(sums, weights, pixels, half)
    gate = torch.empty(images, channels, dtype=half, device=sums.device)
    narrow = sums.new_empty(images, squeezed)
    w1, b1, w2, b2 = weights
    tile = next(t for t in reversed(_SQUEEZE_TILES) if 4 * parts >= t["BP"])
    launch(
        "phalanx.inference.layers_fused.squeeze",
        (images, -(-squeezed // tile["BS"])),
        (sums, w1, b1, narrow, parts, pixels, channels // 8, squeezed),
        tile,
    )
    launch(
        "phalanx.inference.layers_fused.excite",
        (images, -(-channels // _EXCITE_TILE["BC"])),
        (narrow, w2, b2, gate, channels // 8, squeezed),
        _EXCITE_TILE,
        BS=max(2, 1 << (squeezed - 1).bit_length()),
    )
    return gate


@squeeze_and_excite.register_fake
def _(sums: Tensor, weights: Sequence[Tensor], pixels: int, half: torch.dtype) -> Tensor:
    return sums.new_empty(sums.shape[0], sums.shape[2], dtype=half)


# --- the head ---


@torch.library.custom_op("phalanx::average_pixels", mutates_args=())
def average_pixels(x: Tensor) -> Tensor:
    """The mean over the pixels of channels_last images, [N, C]."""
    images, channels, high, wide = x.shape
    if not runs_kernels(x) or not fits(x) or channels % 8:
        return x.mean((2, 3))
    out = x.new_empty(images, channels)
    grid = (-(-channels // _IMAGE_TILE["BC"]), images)
    launch(
        "phalanx.inference.layers_fused.average_pixels",
        grid,
        (x, out, high * wide, channels // 8),
        _IMAGE_TILE,
    )
    return out


average_pixels.register_fake(lambda x: x.new_empty(x.shape[:2]))
