"""phalanx.kernels.rounding as a single Triton kernel for any number of tensors."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.gpu import use_device
from phalanx.kernels.random_bits import to_signed
from phalanx.kernels.random_bits_fused import draw_int32
from phalanx.kernels.rounding import COUNTS, INFINITY, LARGEST_FINITE, find_layout

_BLOCK = tl.constexpr(4096)
_COLUMNS = tl.constexpr(7)  # addresses of value, target and gradient; elements, layout, key


@triton.jit
def _round_magnitudes(values, magnitudes, random, HALF: tl.constexpr, STOCHASTIC: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bits of finite magnitudes after rounding, as float32."""
    if HALF:
        dropped = tl.minimum(tl.maximum(126 - (magnitudes >> 23), 13), 23)
    else:
        dropped = tl.full(magnitudes.shape, 16, tl.int32)
    mask = (tl.full(magnitudes.shape, 1, tl.int32) << dropped) - 1
    if STOCHASTIC:
        added = random & mask
        up = (random & 0x7FFFFFFF) < (tl.abs(values) * 36028797018963968.0).to(tl.int32)  # 2**55
    else:
        added = (mask >> 1) + ((magnitudes >> dropped) & 1)
        up = magnitudes > 0x33000000  # 2**-25, half of the smallest float16
    rounded = (magnitudes + added) & ~mask
    if HALF:
        rounded = tl.where(magnitudes < 0x33800000, tl.where(up, 0x33800000, 0), rounded)
    return rounded


@triton.jit
def _to_float32(short, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """16 bits as the float32 they stand for."""
    if HALF:
        value = short.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        value = (short.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return value


@triton.jit
def _to_16_bits(bits, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """The 16 bits of a rounded float32, from its 32."""
    if HALF:
        short = bits.to(tl.float32, bitcast=True).to(tl.float16).to(tl.int16, bitcast=True)
    else:
        short = (bits >> 16).to(tl.int16)
    return short


@triton.jit
def _store_sum(pointer, parts):  # type: ignore[no-untyped-def]
    """Store a sum of this block; with atomic additions, floats would depend on their order."""
    tl.store(pointer, tl.sum(parts.to(tl.float64)))


@triton.jit
def _round(  # type: ignore[no-untyped-def]
    table,
    blocks,
    counts,
    overflow,
    HALF: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """Round one block of one tensor, in memory order."""
    row = table + tl.load(blocks + 2 * tl.program_id(0)) * _COLUMNS
    start = tl.load(blocks + 2 * tl.program_id(0) + 1).to(tl.int32)
    source = tl.load(row).to(tl.pointer_type(tl.float32))
    target = tl.load(row + 1).to(tl.pointer_type(tl.int16))
    channels, pixels = tl.load(row + 4).to(tl.int32), tl.load(row + 5).to(tl.int32)
    where = start + tl.arange(0, _BLOCK)
    inside = where < tl.load(row + 3)
    # memory holds [images, pixels, channels], elements are counted [images, channels, pixels]
    image, rest = where // (channels * pixels), where % (channels * pixels)
    elements = image * (channels * pixels) + (rest % channels) * pixels + rest // channels

    values = tl.load(source + where, mask=inside, other=0.0)
    bits = values.to(tl.int32, bitcast=True)
    magnitudes = bits & 0x7FFFFFFF
    random = draw_int32(elements, tl.load(row + 6))
    rounded = _round_magnitudes(values, magnitudes, random, HALF, STOCHASTIC)
    over = (magnitudes if STOCHASTIC else rounded) > (0x477FE000 if HALF else 0x7F7F0000)
    rounded = tl.where(over, overflow, rounded)
    rounded = tl.where(magnitudes == 0x7F800000, magnitudes, rounded)
    rounded = tl.where(magnitudes > 0x7F800000, 0x7FC00000, rounded)
    rounded = rounded | (bits ^ magnitudes)
    new = rounded.to(tl.float32, bitcast=True)
    if COUNTED:
        old = _to_float32(tl.load(target + where, mask=inside, other=0), HALF)
        gradients = tl.load(row + 2).to(tl.pointer_type(tl.int16))
        gradient = tl.load(gradients + where, mask=inside, other=1).to(tl.int32) & 0x7FFF
        updated = inside & (values != old)
        change, rounded_change = values - old, new - old
        finite = inside & (tl.abs(change) < float("inf"))
        finite = finite & (tl.abs(rounded_change) < float("inf"))
        counts += 7 * tl.program_id(0)
        _store_sum(counts, updated & (new == old))
        _store_sum(counts + 1, updated)
        _store_sum(counts + 2, inside & (gradient == 0))
        _store_sum(counts + 3, inside & (gradient >= (0x7C00 if HALF else 0x7F80)))
        _store_sum(counts + 4, inside)
        _store_sum(counts + 5, tl.where(finite, tl.abs(change), 0.0))
        distance = tl.where(change < 0, -rounded_change, rounded_change)
        _store_sum(counts + 6, tl.where(finite, distance, 0.0))
    tl.store(target + where, _to_16_bits(rounded, HALF), mask=inside)


@lru_cache(maxsize=64)
def find_blocks(sizes: tuple[int, ...], block: int, device: torch.device) -> Tensor:
    """(index of the tensor, first element) of every block of `block` elements, on the device."""
    counts = [-(-size // block) for size in sizes]
    starts = [np.arange(count) * block for count in counts]
    rows = np.stack([np.repeat(np.arange(len(sizes)), counts), np.concatenate(starts)], axis=1)
    return torch.from_numpy(rows.astype(np.int64)).to(device)


def round_fused(
    values: Sequence[Tensor],
    targets: Sequence[Tensor],
    gradients: Sequence[Tensor] | None,
    *,
    keys: Sequence[int],
    saturate: bool,
    stochastic: bool,
) -> Tensor:
    """`phalanx.kernels.rounding.round_each`; gradients have the dtype of the targets."""
    device, dtype = values[0].device, targets[0].dtype
    addresses = (
        [tensor.data_ptr() for tensor in tensors]
        for tensors in (values, targets, gradients or targets)
    )
    layouts = [find_layout(value) or (1, 1) for value in values]
    sizes = tuple(value.numel() for value in values)
    columns = (*addresses, sizes, *zip(*layouts, strict=True), map(to_signed, keys))
    table = torch.tensor(list(zip(*columns, strict=True)), dtype=torch.int64)
    if device.type == "cuda":
        table = table.pin_memory()  # so that the copy does not wait for the device
    table = table.to(device, non_blocking=True)
    blocks = find_blocks(sizes, _BLOCK.value, device)
    counts = torch.zeros((len(blocks), len(COUNTS)), dtype=torch.float64, device=device)
    if len(blocks):
        with use_device(device):
            _round[(len(blocks),)](
                table,
                blocks,
                counts,
                LARGEST_FINITE[dtype] if saturate else INFINITY,
                HALF=dtype == torch.float16,
                STOCHASTIC=stochastic,
                COUNTED=gradients is not None,
                num_warps=8,
            )
    return counts.sum(0)
