"""The Triton twin of phalanx.kernels.rounding: any number of tensors in one kernel."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.rounding import COUNTS, INFINITY, LARGEST, layout_of, signed

_BLOCK = tl.constexpr(4096)
COLUMNS = tl.constexpr(7)  # addresses of value, kept and gradient; elements, layout, key


@triton.jit
def _mix(words):  # type: ignore[no-untyped-def]
    """Twin of phalanx.plan.draws.mix, on uint64."""
    words = (words ^ (words >> 30)) * 0xBF58476D1CE4E5B9
    words = (words ^ (words >> 27)) * 0x94D049BB133111EB
    return words ^ (words >> 31)


@triton.jit
def _draw(places, key):  # type: ignore[no-untyped-def]
    """Twin of phalanx.kernels.rounding.draw_words."""
    key = key.to(tl.uint64, bitcast=True)
    words = (places >> 1).to(tl.uint64) * 0x9E3779B97F4A7C15 + key
    words = _mix(_mix(words) ^ key)
    halves = words >> ((places & 1) * 32).to(tl.uint64)
    return (halves & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def _round_sizes(values, sizes, draws, HALF: tl.constexpr, STOCHASTIC: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bits of finite sizes after rounding, as float32."""
    if HALF:
        gone = tl.minimum(tl.maximum(126 - (sizes >> 23), 13), 23)
    else:
        gone = tl.full(sizes.shape, 16, tl.int32)
    mask = (tl.full(sizes.shape, 1, tl.int32) << gone) - 1
    if STOCHASTIC:
        added = draws & mask
        up = (draws & 0x7FFFFFFF) < (tl.abs(values) * 36028797018963968.0).to(tl.int32)  # 2**55
    else:
        added = (mask >> 1) + ((sizes >> gone) & 1)
        up = sizes > 0x33000000  # 2**-25, half of the smallest float16
    rounded = (sizes + added) & ~mask
    if HALF:
        rounded = tl.where(sizes < 0x33800000, tl.where(up, 0x33800000, 0), rounded)
    return rounded


@triton.jit
def _as_float(kept, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """16 bits as the float32 they stand for."""
    if HALF:
        value = kept.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        value = (kept.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return value


@triton.jit
def _as_short(bits, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """The 16 bits of a rounded float32, from its 32."""
    if HALF:
        short = bits.to(tl.float32, bitcast=True).to(tl.float16).to(tl.int16, bitcast=True)
    else:
        short = (bits >> 16).to(tl.int16)
    return short


@triton.jit
def _sum(place, parts):  # type: ignore[no-untyped-def]
    """Put down a sum of this block; floats that blocks add up together depend on their order."""
    tl.store(place, tl.sum(parts.to(tl.float64)))


@triton.jit
def _round(  # type: ignore[no-untyped-def]
    table,
    blocks,
    counts,
    edge,
    HALF: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """One block of one tensor, in the order of memory."""
    row = table + tl.load(blocks + 2 * tl.program_id(0)) * COLUMNS
    start = tl.load(blocks + 2 * tl.program_id(0) + 1).to(tl.int32)
    source = tl.load(row).to(tl.pointer_type(tl.float32))
    goal = tl.load(row + 1).to(tl.pointer_type(tl.int16))
    channels, pixels = tl.load(row + 4).to(tl.int32), tl.load(row + 5).to(tl.int32)
    where = start + tl.arange(0, _BLOCK)
    inside = where < tl.load(row + 3)
    # memory holds [images, pixels, channels], places count [images, channels, pixels]
    image, rest = where // (channels * pixels), where % (channels * pixels)
    places = image * (channels * pixels) + (rest % channels) * pixels + rest // channels

    values = tl.load(source + where, mask=inside, other=0.0)
    bits = values.to(tl.int32, bitcast=True)
    sizes = bits & 0x7FFFFFFF
    rounded = _round_sizes(values, sizes, _draw(places, tl.load(row + 6)), HALF, STOCHASTIC)
    over = (sizes if STOCHASTIC else rounded) > (0x477FE000 if HALF else 0x7F7F0000)
    rounded = tl.where(over, edge, rounded)
    rounded = tl.where(sizes == 0x7F800000, sizes, rounded)
    rounded = tl.where(sizes > 0x7F800000, 0x7FC00000, rounded)
    rounded = rounded | (bits ^ sizes)
    new = rounded.to(tl.float32, bitcast=True)
    if COUNTED:
        old = _as_float(tl.load(goal + where, mask=inside, other=0), HALF)
        slopes = tl.load(row + 2).to(tl.pointer_type(tl.int16))
        slope = tl.load(slopes + where, mask=inside, other=1).to(tl.int32) & 0x7FFF
        updated = inside & (values != old)
        wish, move = values - old, new - old
        finite = inside & (tl.abs(wish) < float("inf")) & (tl.abs(move) < float("inf"))
        counts += 7 * tl.program_id(0)
        _sum(counts, updated & (new == old))
        _sum(counts + 1, updated)
        _sum(counts + 2, inside & (slope == 0))
        _sum(counts + 3, inside & (slope >= (0x7C00 if HALF else 0x7F80)))
        _sum(counts + 4, inside)
        _sum(counts + 5, tl.where(finite, tl.abs(wish), 0.0))
        _sum(counts + 6, tl.where(finite, tl.where(wish < 0, -move, move), 0.0))
    tl.store(goal + where, _as_short(rounded, HALF), mask=inside)


@lru_cache(maxsize=64)
def _blocks_of(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """(number of the tensor, first element) of every block, on the device."""
    counts = [-(-size // _BLOCK.value) for size in sizes]
    starts = [np.arange(count) * _BLOCK.value for count in counts]
    rows = np.stack([np.repeat(np.arange(len(sizes)), counts), np.concatenate(starts)], axis=1)
    return torch.from_numpy(rows.astype(np.int64)).to(device)


def _table_of(
    values: Sequence[Tensor],
    kept: Sequence[Tensor],
    gradients: Sequence[Tensor] | None,
    keys: Sequence[int],
) -> Tensor:
    """Where each tensor lies, how, and its key: [tensors, COLUMNS]."""
    slopes = [0] * len(values) if gradients is None else [g.data_ptr() for g in gradients]
    rows = [
        (
            value.data_ptr(),
            goal.data_ptr(),
            slope,
            value.numel(),
            *(layout_of(value) or (1, 1)),
            signed(key),
        )
        for value, goal, slope, key in zip(values, kept, slopes, keys, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), COLUMNS.value)


def round_fused(
    values: Sequence[Tensor],
    kept: Sequence[Tensor],
    gradients: Sequence[Tensor] | None,
    *,
    keys: Sequence[int],
    saturate: bool,
    stochastic: bool,
) -> Tensor:
    """Values rounded into `kept`; what was counted, if there are gradients of the kept type."""
    device, dtype = values[0].device, kept[0].dtype
    sizes = tuple(value.numel() for value in values)
    # from pinned memory the copy does not wait for the device
    table = _table_of(values, kept, gradients, keys).pin_memory().to(device, non_blocking=True)
    blocks = _blocks_of(sizes, device)
    counts = torch.zeros((len(blocks), len(COUNTS)), dtype=torch.float64, device=device)
    if len(blocks):
        with torch.cuda.device(device):
            _round[(len(blocks),)](
                table,
                blocks,
                counts,
                LARGEST[dtype] if saturate else INFINITY,
                HALF=dtype == torch.float16,
                STOCHASTIC=stochastic,
                COUNTED=gradients is not None,
                num_warps=8,
            )
    return counts.sum(0)
