"""A Triton kernel that does nothing but mix and draw: jit wants its source in a file."""

import triton
import triton.language as tl

from phalanx.kernels.random_bits_fused import draw_int32, mix


@triton.jit
def mix_and_draw(words, mixed, drawn, key, COUNT: tl.constexpr):
    """Words mixed, and the random bits of elements 0, 1, 2... for a key."""
    where = tl.arange(0, COUNT)
    tl.store(mixed + where, mix(tl.load(words + where).to(tl.uint64, bitcast=True)))
    tl.store(drawn + where, draw_int32(where, tl.load(key)))
