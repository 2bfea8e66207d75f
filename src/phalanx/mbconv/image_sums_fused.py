"""phalanx.mbconv.squeeze_excite.sum_images as a Triton kernel."""
# ruff: noqa: PLR0913, PLR0917  (kernels take sizes one by one)
# mypy: disable-error-code="no-untyped-def,assignment"

import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.choices import CHOICES, make_tiles
from phalanx.mbconv.activation_fused import fitting, load_affine, next_power, silu_parts
from phalanx.mbconv.image_layout import count_parts, new_floats

_TILES = make_tiles(
    "BM BC", (32, 64, 4, 1), (64, 32, 4, 1), (16, 64, 2, 1), (16, 128, 4, 1), (32, 32, 2, 1)
)


@triton.jit
def _image_terms(dy, x, o, ok, scale, shift, BACK: tl.constexpr):
    """What the pixels at o add to the three tables."""
    value = tl.load(x + o, mask=ok, other=0.0).to(tl.float32)
    act, slope = silu_parts(value, scale, shift)
    if BACK:
        d = tl.load(dy + o, mask=ok, other=0.0).to(tl.float32)
        act *= d
        slope *= d
    return act, slope, slope * value


@triton.jit(do_not_specialize=["N", "PIXELS", "C8", "PARTS"])
def _sum_images(
    dy, x, v, t, N, PIXELS, C8, PARTS, BACK: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One part of one image; whole tiles first, without masks."""
    C = C8 * 8
    n, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    c, rows = tl.program_id(1) * BC + tl.arange(0, BC), tl.cdiv(PIXELS, PARTS)
    okc, first = c < C, n * PIXELS + part * rows
    last = n * PIXELS + tl.minimum((part + 1) * rows, PIXELS)
    s0, s1 = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    s2 = tl.zeros((BM, BC), tl.float32)
    scale, shift = load_affine(v, c, C, okc)
    whole = first + tl.maximum(last - first, 0) // BM * BM
    for r in range(first, whole, BM):
        o = (r + tl.arange(0, BM))[:, None] * C + c[None, :]
        t0, t1, t2 = _image_terms(dy, x, o, okc[None, :], scale, shift, BACK)
        s0, s1, s2 = s0 + t0, s1 + t1, s2 + t2
    if whole < last:
        m = whole + tl.arange(0, BM)
        o, ok = m[:, None] * C + c[None, :], (m < last)[:, None] & okc[None, :]
        t0, t1, t2 = _image_terms(dy, x, o, ok, scale, shift, BACK)
        s0 += tl.where(ok, t0, 0.0)
        s1 += tl.where(ok, t1, 0.0)
        s2 += tl.where(ok, t2, 0.0)
    place, plane = (part * N + n) * C + c, PARTS * N * C
    tl.store(t + place, tl.sum(s0, 0), mask=okc)
    tl.store(t + plane + place, tl.sum(s1, 0), mask=okc)
    tl.store(t + 2 * plane + place, tl.sum(s2, 0), mask=okc)


def sum_images(x: Tensor, v: Tensor, dy: Tensor | None) -> Tensor:
    """`phalanx.mbconv.squeeze_excite.sum_images`."""
    n, c, h, w = x.shape
    parts = count_parts(n, h * w, c)
    t = new_floats(3, parts, n, c, like=x)
    args = (x if dy is None else dy, x, v, t, n, h * w, c // 8, parts)
    tiles, flags = fitting(_TILES, BC=next_power(c)), {"BACK": int(dy is not None)}
    CHOICES.run(_sum_images, lambda t: (n * parts, triton.cdiv(c, t["BC"])), args, tiles, **flags)
    return t
