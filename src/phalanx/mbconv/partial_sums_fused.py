"""Partial sums of a weight's gradient, added up in order by Triton."""

# mypy: disable-error-code="no-untyped-def,assignment"

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.choices import CHOICES, make_tiles

_TILES = make_tiles("BG BC", (128, 32, 8, 1))


@triton.jit(do_not_specialize=["G", "R", "C"])
def _sum_groups(p, out, G, R, C, BG: tl.constexpr, BC: tl.constexpr):
    """out [C, R]: the sums of p [G, R, C] over G."""
    k, total = tl.program_id(0) * BC + tl.arange(0, BC), tl.zeros((BG, BC), tl.float32)
    okk = k < R * C
    for g0 in range(0, G, BG):
        g = g0 + tl.arange(0, BG)
        ok = (g < G)[:, None] & okk[None, :]
        total += tl.load(p + g[:, None] * (R * C) + k[None, :], mask=ok, other=0.0)
    tl.store(out + (k % C) * R + k // C, tl.sum(total, 0), mask=okk)


def add_partials(partials: Tensor, columns: int) -> Tensor:
    """`phalanx.mbconv.norms.add_partials`."""
    count, rows = len(partials), partials[0].numel() // columns
    out = torch.empty(columns, rows, device=partials.device)
    args = (partials, out, count, rows, columns)
    CHOICES.run(_sum_groups, lambda t: (triton.cdiv(rows * columns, t["BC"]),), args, _TILES)
    return out
