"""phalanx.kernels.shift in Triton: one kernel instead of fifteen."""
# ruff: noqa: PLR0913, PLR0917  (kernels take pointers and sizes one by one)

import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.gpu import use_device

_BLOCK = tl.constexpr(4096)  # bytes per program; a CIFAR image has 3072


@triton.jit
def _shift(  # type: ignore[no-untyped-def]
    images, crops, stride, out, height, width, CHANNELS: tl.constexpr, REFLECTS: tl.constexpr
):
    """Program (image, block) writes one block of one image."""
    number, size = tl.program_id(0), height * width * 3
    image = tl.load(crops + number).to(tl.int64)
    top, left = tl.load(crops + stride + number), tl.load(crops + 2 * stride + number)
    mirrored = tl.load(crops + 3 * stride + number)

    byte = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    pixel, channel = byte // 3, byte % 3
    row, column = pixel // width + top, pixel % width + left
    column = tl.where(mirrored > 0, width - 1 - column, column)
    if REFLECTS:
        row = height - 1 - tl.abs(height - 1 - tl.abs(row))
        column = width - 1 - tl.abs(width - 1 - tl.abs(column))
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    offsets = ((image * height + row) * width + column) * CHANNELS
    if CHANNELS == 3:
        offsets += channel
    value = tl.load(images + offsets, mask=inside & (byte < size), other=0)
    tl.store(out + number.to(tl.int64) * size + byte, value, mask=byte < size)


def shift_fused(images: Tensor, crops: Tensor, *, reflects: bool) -> Tensor:
    """Images of a dataset, shifted and mirrored as `crops` says."""
    height, width = images.shape[1:3]
    crops, count = crops.int(), crops.shape[1]
    out = images.new_empty((count, height, width, 3))
    blocks = triton.cdiv(height * width * 3, _BLOCK.value)
    channels = 1 if images.ndim == 3 else 3
    with use_device(images.device):
        _shift[(count, blocks)](
            *(images, crops, crops.stride(0), out, height, width),
            CHANNELS=channels,
            REFLECTS=reflects,
            num_warps=8,
        )
    return out
