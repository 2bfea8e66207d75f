"""Partial sums added up in a fixed order."""
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.choices import CHOICES, make_tiles

_TILES = make_tiles("BR BC", (32, 64, 4, 3), (256, 16, 8, 3))
_MOST_ROWS = 1056  # that one program adds up; more are added in two steps
_FEWER_ROWS = 64


@triton.jit
def _sum_rows(p, out, R, C, G, BR: tl.constexpr, BC: tl.constexpr):
    """[P, R, C] summed to [P, G, C]."""
    c, g, which = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1), tl.program_id(2)
    total = tl.zeros((BR, BC), tl.float32)
    for r0 in range(g * BR, R, G * BR):
        r = r0 + tl.arange(0, BR)
        ok = (r < R)[:, None] & (c < C)[None, :]
        total += tl.load(p + (which * R + r)[:, None] * C + c[None, :], mask=ok, other=0.0)
    tl.store(out + (which * G + g) * C + c, tl.sum(total, 0), mask=c < C)


def add_rows(p: Tensor) -> Tensor:
    """Float32 [P, R, C] summed to [P, C]."""
    if p.shape[1] > _MOST_ROWS:
        p = _add_rows_to(p, _FEWER_ROWS)
    return _add_rows_to(p, 1).squeeze(1)


def _add_rows_to(p: Tensor, fewer: int) -> Tensor:
    """[P, R, C] summed to [P, fewer, C]."""
    count, rows, c = p.shape
    out = torch.empty((count, fewer, c), device=p.device)
    args = (p, out, rows, c, fewer)
    CHOICES.run(_sum_rows, lambda t: (triton.cdiv(c, t["BC"]), fewer, count), args, _TILES)
    return out
