"""Counter-based randomness: a draw is a pure function of (seed, name, position, lane).

There is no state, so any draw can be repeated by itself, on any machine. All arithmetic is in
wrapping 64-bit integers; no library's random stream is involved.
"""

from functools import lru_cache
from zlib import crc32

import numpy as np
from numpy.typing import ArrayLike, NDArray

Words = NDArray[np.uint64]

MASK = (1 << 64) - 1
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: spreads neighbouring counters apart
MIX_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # of splitmix64: shift, factor
LAST_SHIFT = 31


def splitmix64(words: Words) -> Words:
    """Each word scrambled by the splitmix64 finaliser: one flipped input bit flips half the bits.

    Takes only arrays: numpy warns when a scalar wraps around, but not for arrays. The same in torch
    is in phalanx.kernels.random_bits, in Triton in random_bits_fused.
    """
    for shift, factor in MIX_ROUNDS:
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return words ^ (words >> np.uint64(LAST_SHIFT))


@lru_cache(maxsize=4096)
def stream_key(seed: int, name: str, lane: int) -> np.uint64:
    """The key of one stream of draws."""
    key = np.zeros(1, np.uint64)
    for part in (seed, crc32(name.encode()), lane):
        key = splitmix64(key + GOLDEN + np.uint64(part & MASK))
    return key[0]


def draw_bits(seed: int, name: str, positions: ArrayLike, lane: int = 0) -> Words:
    """64 random bits for each position of the stream `name`."""
    places = np.asarray(positions, np.int64).view(np.uint64)
    key = stream_key(seed, name, lane)
    return splitmix64(splitmix64(np.atleast_1d(places) * GOLDEN + key) ^ key).reshape(places.shape)


def draw_uniform(seed: int, name: str, positions: ArrayLike, lane: int = 0) -> NDArray[np.float64]:
    """A number in [0, 1) for each position, a multiple of 2**-53."""
    bits = draw_bits(seed, name, positions, lane) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def draw_below(bound: int, seed: int, name: str, positions: ArrayLike) -> NDArray[np.int64]:
    """An integer in [0, bound) for each position."""
    if not 1 <= bound <= 1 << 32:
        raise ValueError(f"a bound lies between 1 and 2**32, got {bound}")
    high = draw_bits(seed, name, positions) >> np.uint64(32)
    return ((high * np.uint64(bound)) >> np.uint64(32)).astype(np.int64)


def draw_beta(alpha: float, seed: int, name: str, positions: ArrayLike) -> NDArray[np.float64]:
    """A number in [0, 1] from the distribution Beta(alpha, alpha) for each position."""
    places = np.asarray(positions, np.int64)
    flat = places.reshape(-1)
    # the names of the two streams decide the bits, so they must never change
    first, second = (_draw_log_gamma(alpha, seed, f"{name}-0-{n}", flat) for n in (0, 1))
    return (0.5 + 0.5 * np.tanh((first - second) / 2)).reshape(places.shape)


def _draw_log_gamma(
    alpha: float, seed: int, name: str, positions: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Logarithms of draws from Gamma(alpha), by Marsaglia and Tsang's method (2000).

    The logarithm, because for small alpha most draws are too small for a float.
    """
    depth = alpha + 1 - 1 / 3  # drawn for alpha + 1 and converted: the method needs 1 or more
    drawn = np.zeros(len(positions))
    waiting = np.arange(len(positions))
    lanes = 3
    while waiting.size:
        places = positions[waiting]
        angle, radius, chance = (draw_uniform(seed, name, places, lanes + n) for n in range(3))
        normal = np.sqrt(-2 * np.log1p(-radius)) * np.cos(2 * np.pi * angle)
        cube = (1 + normal / np.sqrt(9 * depth)) ** 3
        positive = np.where(cube > 0, cube, 1.0)
        bound = 0.5 * normal**2 + depth * (1 - positive + np.log(positive))
        taken = (cube > 0) & (np.log1p(-chance) < bound)
        drawn[waiting[taken]] = np.log(depth * positive[taken])
        waiting = waiting[~taken]
        lanes += 3
    return drawn + np.log1p(-draw_uniform(seed, name, positions)) / alpha
