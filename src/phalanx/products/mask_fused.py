"""A gradient masked by the bits of a ReLU, with its column sums, in Triton."""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0913, PLR0917  (kernels take pointers and sizes one by one)

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.choices import CHOICES, make_tiles
from phalanx.kernels.image_layout import is_expanded, new_image
from phalanx.kernels.norm_passes_fused import unpack_signs
from phalanx.products.epilogue_fused import load_bytes
from phalanx.products.sums_fused import add_rows

_TILES = make_tiles("BM BC", (32, 64, 4, 3), (16, 128, 4, 3))
_PROGRAMS = 1056  # that share the rows of 64 columns


@triton.jit
def _mask(
    dy, bits, out, s, M, C, G, PIXELS, SPREAD: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr
):
    """out = dy masked by bits, and G rows of its partial sums.

    SPREAD: dy has one row for the PIXELS of an image.
    """
    column, g = tl.program_id(0), tl.program_id(1)
    c = column * BC + tl.arange(0, BC)
    total = tl.zeros((BM, BC), tl.float32)
    for r in range(g * BM, M, G * BM):
        m = r + tl.arange(0, BM)
        o, ok = m[:, None] * C + c[None, :], (m < M)[:, None]
        packed = load_bytes(bits, m, M, C, column, 3, BM, BC)
        row = m // PIXELS if SPREAD else m
        value = tl.load(dy + row[:, None] * C + c[None, :], mask=ok, other=0.0)
        value = tl.where(unpack_signs(packed, BM, BC) > 0, value.to(tl.float32), 0.0)
        tl.store(out + o, value.to(out.dtype.element_ty), mask=ok)
        total += value
    tl.store(s + g * C + c, tl.sum(total, 0))


def mask_fused(dy: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """The masked gradient, and its column sums."""
    n, c, h, w = dy.shape
    m = n * h * w
    programs = max(1, min(_PROGRAMS * 64 // c, triton.cdiv(m, 128)))
    out, s = new_image(dy, c, h, w), torch.empty((1, programs, c), device=dy.device)
    tiles = [t for t in _TILES if c % t["BC"] == 0]
    args = (dy, bits, out, s, m, c, programs, h * w)
    CHOICES.run(_mask, lambda t: (c // t["BC"], programs), args, tiles, SPREAD=int(is_expanded(dy)))
    return out, add_rows(s).view(-1)
