"""Operations for scoring inverted residual blocks: depthwise convolutions, squeeze-and-excite.

Each is a torch custom op with a plain reference beside it. The tiles were tuned on an H200.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.inference.conv_implementations import (
    ACTIVATIONS,
    count_blocks,
    fits_32_bit_offsets,
    launch_kernel,
    runs_kernels,
)
from phalanx.inference.conv_ops import empty_result
from phalanx.kernels.choices import make_tiles

_STRIP_TILE = make_tiles("BM BC", (16, 32, 4, 1))[0]
_STRIP = 4  # pixels of a column, as in the kernel
_MANY_PROGRAMS = 8192  # programs of a depthwise convolution that keep a device busy
_FEW_PROGRAMS = 256  # so few programs that each may use all registers
_FEW_SEEN_ROWS = 6  # rows that a strip reads: those of a 3x3 of stride 1 fit into registers
_SUM_TILES = make_tiles("BP BC", (16, 64, 4, 1), (64, 64, 4, 1), (512, 16, 8, 1))
_SQUEEZE_TILES = make_tiles(
    "BC BS", (256, 4, 4, 1), (1024, 4, 4, 1), (2048, 4, 8, 1), (4096, 4, 8, 1)
)
_EXCITE_TILE = make_tiles("BC", (64, 4, 1))[0]
_MOST_SQUEEZED = 128  # channels that a program holds


def _depthwise_reference(
    x: Tensor, weights: Sequence[Tensor], bias: Tensor, geometry: Sequence[int], act: int
) -> tuple[Tensor, Tensor]:
    """`convolve_depthwise` in plain torch."""
    (stride, padding), channels = geometry, x.shape[1]
    y = F.conv2d(x, weights[0], None, stride, padding, 1, channels).float() + bias[:, None, None]
    y = ACTIVATIONS[act](y)
    return y.to(x.dtype), y.sum((2, 3))[:, None]


@torch.library.custom_op("phalanx::filter_channels", mutates_args=())
def convolve_depthwise(
    x: Tensor, weights: Sequence[Tensor], bias: Tensor, geometry: Sequence[int], act: int
) -> tuple[Tensor, Tensor]:
    """act(conv(x) + bias) of a depthwise convolution, and the result's sums per image.

    weights: as [C, 1, KS, KS] and as [KS, KS, C]; the sums are [N, parts, C], to be added up.
    geometry: stride and padding.
    """
    if not runs_kernels(x) or not fits_32_bit_offsets(x) or x.shape[1] % 8:
        return _depthwise_reference(x, weights, bias, geometry, act)
    (images, channels), kernel, (stride, padding) = x.shape[:2], weights[1].shape[0], geometry
    out = empty_result(x, weights, geometry)
    height, width = out.shape[2:]
    blocks, columns = count_blocks(-(-height // _STRIP) * width, channels, _STRIP_TILE)
    programs, seen = images * columns * blocks, (_STRIP - 1) * stride + kernel
    parts = -(-blocks // max(1, programs // _MANY_PROGRAMS))  # fewer parts are faster to add up
    sums = torch.empty(images, parts, channels, device=x.device)
    launch_kernel(
        "phalanx.inference.depthwise_fused.depthwise_strips",
        (columns, images * parts),
        (x, weights[1], bias, out, sums, *x.shape[2:], height, width, channels // 8, parts),
        _STRIP_TILE,
        KS=kernel,
        STRIDE=stride,
        PAD=padding,
        ACT=act,
        LOOP=int(programs > _FEW_PROGRAMS and seen > _FEW_SEEN_ROWS),
    )
    return out, sums


@convolve_depthwise.register_fake
def _(
    x: Tensor, weights: Sequence[Tensor], bias: Tensor, geometry: Sequence[int], act: int
) -> tuple[Tensor, Tensor]:
    parts = torch.library.get_ctx().new_dynamic_size()
    sums = x.new_empty(x.shape[0], parts, x.shape[1], dtype=torch.float32)
    return empty_result(x, weights, geometry), sums


def _squeeze_and_excite_reference(
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
    """The gate [N, C] of each image's channels, from the sums of its pixels [N, parts, C].

    weights: [S, C], [S], [C, S], [C].
    """
    (images, _, channels), squeezed = sums.shape, weights[0].shape[0]
    if not runs_kernels(sums) or channels % 8 or squeezed > _MOST_SQUEEZED:
        return _squeeze_and_excite_reference(sums, weights, pixels, half)
    gate = torch.empty(images, channels, dtype=half, device=sums.device)
    narrow = sums.new_empty(images, squeezed)
    w1, b1, w2, b2 = weights
    tile = next((t for t in _SQUEEZE_TILES if t["BC"] >= channels), _SQUEEZE_TILES[-1])
    launch_kernel(
        "phalanx.inference.depthwise_fused.squeeze",
        (images, -(-squeezed // tile["BS"])),
        (_add_parts(sums), w1, b1, narrow, pixels, channels // 8, squeezed),
        tile,
    )
    launch_kernel(
        "phalanx.inference.depthwise_fused.excite",
        (images, -(-channels // _EXCITE_TILE["BC"])),
        (narrow, w2, b2, gate, channels // 8, squeezed),
        _EXCITE_TILE,
        BS=max(2, 1 << (squeezed - 1).bit_length()),
    )
    return gate


def _add_parts(sums: Tensor) -> Tensor:
    """The totals, [N, C]."""
    images, parts, channels = sums.shape
    if parts == 1:
        return sums[:, 0]
    totals = sums.new_empty(images, channels)
    tile = next((t for t in _SUM_TILES if t["BP"] >= parts), _SUM_TILES[-1])
    launch_kernel(
        "phalanx.inference.depthwise_fused.add_sums",
        (images, -(-channels // tile["BC"])),
        (sums, totals, parts, channels // 8),
        tile,
    )
    return totals


@squeeze_and_excite.register_fake
def _(sums: Tensor, weights: Sequence[Tensor], pixels: int, half: torch.dtype) -> Tensor:
    return sums.new_empty(sums.shape[0], sums.shape[2], dtype=half)
