"""Partial sums added up, in order, by Triton: into a norm's vectors, or a weight's gradient."""
# ruff: noqa: PLR0913, PLR0917  (kernels take sizes one by one)
# mypy: disable-error-code="no-untyped-def,assignment"

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.choices import CHOICES, make_tiles

_TILES = make_tiles("BG BC", (128, 32, 8, 1))


@triton.jit
def store_back(v, u, c, okc, total, product, M, C):
    """u of a norm from the sums of the gradient and of gradient * x."""
    mean, rstd = tl.load(v + c, mask=okc, other=0.0), tl.load(v + C + c, mask=okc, other=0.0)
    scale = tl.load(v + 2 * C + c, mask=okc, other=0.0)
    dgamma = (product - mean * total) * rstd
    slope = scale * rstd * dgamma / M
    tl.store(u + c, dgamma, mask=okc)
    tl.store(u + C + c, total, mask=okc)
    tl.store(u + 2 * C + c, scale, mask=okc)
    tl.store(u + 3 * C + c, -slope, mask=okc)
    tl.store(u + 4 * C + c, slope * mean - scale * total / M, mask=okc)


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
    groups, rows = len(partials), partials[0].numel() // columns
    out = torch.empty(columns, rows, device=partials.device)
    args = (partials, out, groups, rows, columns)
    CHOICES.run(_sum_groups, lambda t: (triton.cdiv(rows * columns, t["BC"]),), args, _TILES)
    return out
