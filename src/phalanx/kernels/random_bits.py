"""The random bits of phalanx.plan.draws in torch, drawn on the device that needs them.

torch computes with signed 64-bit words. Their sums and products wrap around as unsigned ones do;
only a shift to the right would copy the sign. phalanx.kernels.random_bits_fused has the same
functions for Triton kernels.
"""

import torch
from torch import Tensor

from phalanx.plan.draws import GOLDEN, LAST_SHIFT, MIX_ROUNDS


def to_signed(word: int) -> int:
    """A 64-bit word, signed or not, as torch's int64 holds it."""
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)


_GOLDEN = to_signed(int(GOLDEN))
_ROUNDS = tuple((shift, to_signed(factor)) for shift, factor in MIX_ROUNDS)


def shift_right(words: Tensor, bits: int) -> Tensor:
    """Words shifted as if they were unsigned."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def mix_(words: Tensor) -> Tensor:
    """`phalanx.plan.draws.splitmix64`, in place: rounding draws for every weight at every step."""
    for shift, factor in _ROUNDS:
        words.bitwise_xor_(shift_right(words, shift)).mul_(factor)
    return words.bitwise_xor_(shift_right(words, LAST_SHIFT))


def draw_bits(counters: Tensor, key: Tensor | int) -> Tensor:
    """64 random bits for each counter, those of `phalanx.plan.draws.draw_bits` for this key."""
    return mix_(mix_(counters * _GOLDEN + key).bitwise_xor_(key))


def draw_int32(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """32 random bits for each of `count` elements, starting at element `first`, an even number.

    Elements 2n and 2n + 1 share the 64 bits that `draw_bits` returns for n, the lower half first.
    """
    counters = torch.arange(first // 2, (first + count + 1) // 2, device=device)
    return draw_bits(counters, to_signed(key)).view(torch.int32)[:count]
