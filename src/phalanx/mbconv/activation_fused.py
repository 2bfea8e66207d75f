"""Functions shared by the Triton kernels of mbconv: SiLU after a norm, drop-path, tiles."""
# ruff: noqa: RUF005  (tuples are added in Triton)
# mypy: disable-error-code="no-untyped-def,assignment"

import os

import triton
import triton.language as tl

from phalanx.kernels.choices import Tile

_PLAIN_DIVISION = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n and 16: the side of a block."""
    return max(16, triton.next_power_of_2(n))


def select_tiles(tiles: list[Tile], **most: int) -> list[Tile]:
    """The tiles within these limits, or else the smallest tile."""
    found = [tile for tile in tiles if all(tile[key] <= value for key, value in most.items())]
    return found or [min(tiles, key=lambda tile: [tile[key] for key in most])]


@triton.jit
def sigmoid(z):
    """1 / (1 + exp(-z)) by the approximate reciprocal."""
    below = 1.0 + tl.exp(-z)
    if _PLAIN_DIVISION:
        return 1.0 / below
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [below], tl.float32, is_pure=True, pack=1
    )


@triton.jit
def silu_and_derivative(x, scale, shift):
    """silu(z) and its derivative, where z is the normalised x."""
    z = x * scale + shift
    p = sigmoid(z)
    return z * p, p * (1 + z * (1 - p))


@triton.jit
def load_affine(v, c, C, okc):
    """A norm's scale and shift."""
    scale = tl.load(v + 2 * C + c, mask=okc, other=0.0)[None, :]
    return scale, tl.load(v + 3 * C + c, mask=okc, other=0.0)[None, :]


@triton.jit
def load_drop_path_factor(noise, rate, n, ok):
    """The drop-path factor of the images n, as a column: 0 or 1 / (1 - rate)."""
    value = tl.load(noise + n, mask=ok, other=0.0)
    return tl.where(value >= rate, 1 / (1 - rate), 0.0)[:, None]


@triton.jit
def make_zeros(COUNT: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """COUNT tiles of zeros."""
    tiles = ()
    for _ in tl.static_range(COUNT):
        tiles = tiles + (tl.zeros((BM, BC), tl.float32),)
    return tiles


@triton.jit
def add_to_tile(tiles, AT: tl.constexpr, value):
    """The tiles with `value` added to tile AT."""
    return tiles[:AT] + (tiles[AT] + value,) + tiles[AT + 1 :]


@triton.jit
def store_sums(s, g, c, G, C, total, product):
    """Store row g of the partial sums s [2, G, C]."""
    tl.store(s + g * C + c, tl.sum(total, 0), mask=c < C)
    tl.store(s + (G + g) * C + c, tl.sum(product, 0), mask=c < C)
