"""The sums per image of phalanx.mbconv.squeeze_excite as a Triton kernel."""
# ruff: noqa: PLR0913, PLR0917, RUF005  (kernels take sizes one by one; tuples are added in Triton)
# mypy: disable-error-code="no-untyped-def,assignment"

import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.choices import CHOICES, make_tiles
from phalanx.kernels.image_layout import count_parts, new_floats
from phalanx.mbconv.activation_fused import (
    add_to_tile,
    load_affine,
    make_zeros,
    next_power_of_2,
    select_tiles,
    silu_and_derivative,
)

_TILES = make_tiles("BM BC", (16, 64, 2, 1), (32, 32, 2, 1))


@triton.jit
def _image_terms(dy, x, o, ok, scale, shift, BACK: tl.constexpr, SLOPE: tl.constexpr):
    """The summands of the pixels at o for each plane; loads are zero where not ok."""
    value = tl.load(x + o, mask=ok, other=0.0).to(tl.float32)
    act, slope = silu_and_derivative(value, scale, shift)
    terms = ()
    if BACK:
        d = tl.load(dy + o, mask=ok, other=0.0).to(tl.float32)
        terms = (act * d, slope * d, slope * d * value)
    elif not SLOPE:
        terms = (act,)
    if SLOPE:
        terms = terms + (slope, slope * value)
    return terms


@triton.jit(do_not_specialize=["N", "PIXELS", "C8", "PARTS"])
def _sum_images(
    dy, x, v, t, N, PIXELS, C8, PARTS,
    BACK: tl.constexpr, SLOPE: tl.constexpr, PLANES: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The sums of one part of one image; full tiles first, without row masks."""
    C = C8 * 8
    n, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    c, rows = tl.program_id(1) * BC + tl.arange(0, BC), tl.cdiv(PIXELS, PARTS)
    okc, first = c < C, n * PIXELS + part * rows
    last = n * PIXELS + tl.minimum((part + 1) * rows, PIXELS)
    sums = make_zeros(PLANES, BM, BC)
    scale, shift = load_affine(v, c, C, okc)
    whole = first + tl.maximum(last - first, 0) // BM * BM
    for r in range(first, whole, BM):
        o = (r + tl.arange(0, BM))[:, None] * C + c[None, :]
        terms = _image_terms(dy, x, o, okc[None, :], scale, shift, BACK, SLOPE)
        for k in tl.static_range(PLANES):
            sums = add_to_tile(sums, k, terms[k])
    if whole < last:
        m = whole + tl.arange(0, BM)
        o, ok = m[:, None] * C + c[None, :], (m < last)[:, None] & okc[None, :]
        terms = _image_terms(dy, x, o, ok, scale, shift, BACK, SLOPE)
        for k in tl.static_range(PLANES):
            sums = add_to_tile(sums, k, tl.where(ok, terms[k], 0.0))
    for k in tl.static_range(PLANES):
        offsets = ((k * PARTS + part) * N + n) * C + c
        tl.store(t + offsets, tl.sum(sums[k], 0), mask=okc)


def _sum(x: Tensor, v: Tensor, dy: Tensor, *, back: bool, slope: bool) -> Tensor:
    """Sums per image [planes, parts, N, C]."""
    n, c, h, w = x.shape
    planes, parts = (3 if back else 1 - slope) + 2 * slope, count_parts(n, h * w, c)
    t = new_floats(planes, parts, n, c, like=x)
    args = (dy, x, v, t, n, h * w, c // 8, parts)
    flags = {"BACK": int(back), "SLOPE": int(slope), "PLANES": planes}
    tiles = select_tiles(_TILES, BC=next_power_of_2(c))
    CHOICES.run(_sum_images, lambda t: (n * parts, triton.cdiv(c, t["BC"])), args, tiles, **flags)
    return t


def sum_images(x: Tensor, v: Tensor) -> Tensor:
    """`phalanx.mbconv.squeeze_excite.sum_images`."""
    return _sum(x, v, x, back=False, slope=False)


def sum_slopes(x: Tensor, v: Tensor) -> Tensor:
    """`phalanx.mbconv.squeeze_excite.sum_slopes`."""
    return _sum(x, v, x, back=False, slope=True)


def sum_images_back(x: Tensor, v: Tensor, dy: Tensor) -> Tensor:
    """`phalanx.mbconv.squeeze_excite.sum_images_back`."""
    return _sum(x, v, dy, back=True, slope=True)
