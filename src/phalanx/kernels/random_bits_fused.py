"""phalanx.kernels.random_bits in Triton, to be called by kernels."""

import triton
import triton.language as tl

from phalanx.plan.draws import GOLDEN, LAST_SHIFT, MIX_ROUNDS

# constexpr are the only globals that a kernel can read
_GOLDEN, _LAST_SHIFT = tl.constexpr(int(GOLDEN)), tl.constexpr(LAST_SHIFT)
_SHIFT_1, _FACTOR_1 = (tl.constexpr(number) for number in MIX_ROUNDS[0])
_SHIFT_2, _FACTOR_2 = (tl.constexpr(number) for number in MIX_ROUNDS[1])


@triton.jit
def mix(words):  # type: ignore[no-untyped-def]
    """`phalanx.plan.draws.splitmix64`, of uint64."""
    words = (words ^ (words >> _SHIFT_1)) * _FACTOR_1
    words = (words ^ (words >> _SHIFT_2)) * _FACTOR_2
    return words ^ (words >> _LAST_SHIFT)


@triton.jit
def draw_int32(elements, key):  # type: ignore[no-untyped-def]
    """`phalanx.kernels.random_bits.draw_int32`, for any element indices; key is an int64."""
    key = key.to(tl.uint64, bitcast=True)
    words = (elements >> 1).to(tl.uint64) * _GOLDEN + key
    words = mix(mix(words) ^ key)
    halves = words >> ((elements & 1) * 32).to(tl.uint64)
    return (halves & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
