"""Gram matrices of a 1x1 convolution's input, which may be normalised or subsampled first."""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0913, PLR0917  (kernels take pointers and sizes one by one)

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.choices import CHOICES, make_tiles
from phalanx.kernels.image_layout import MULTIPROCESSORS, new_image, to_rows
from phalanx.products.sums_fused import add_rows

_GRAM_TILES = make_tiles("BM", (64, 4, 3), (128, 4, 3), (64, 4, 1))  # the last is for a B200
_KEEP_TILES = make_tiles("BM BC", (32, 64, 4, 3), (64, 64, 4, 3), (128, 64, 8, 3), (16, 128, 4, 3))
_JOINED = 64  # channels whose Gram matrix is one tile; for more, cuBLAS is faster
_PROGRAMS = 2 * MULTIPROCESSORS  # that share the rows


@triton.jit
def _load_scale(v, c, C, NORM: tl.constexpr):
    """Scale and shift of the norm; 0.0 without one."""
    if NORM:
        scale, shift = tl.load(v + 2 * C + c)[None, :], tl.load(v + 3 * C + c)[None, :]
    else:
        scale, shift = 0.0, 0.0
    return scale, shift


@triton.jit
def _load_input(x, scale, shift, m, c, M, C, H, W, NORM: tl.constexpr, STRIDE: tl.constexpr):
    """The convolution's input for the output pixels m, zeros beyond the last."""
    ok, source = (m < M)[:, None], m
    if STRIDE == 2:
        ho, wo = (H + 1) // 2, (W + 1) // 2
        source = ((m // (ho * wo)) * H + 2 * ((m // wo) % ho)) * W + 2 * (m % wo)
    value = tl.load(x + source[:, None] * C + c[None, :], mask=ok, other=0.0)
    if NORM:
        normal = tl.maximum(value.to(tl.float32) * scale + shift, 0.0)
        value = tl.where(ok, normal, 0.0).to(x.dtype.element_ty)
    return value


@triton.jit(do_not_specialize=["H", "W"])
def _keep(
    x, out, v, s, M, C, G, H, W,
    NORM: tl.constexpr, STRIDE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store the input, if `out` is given, and G rows of its partial sums."""
    c, g = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1)
    scale, shift = _load_scale(v, c, C, NORM)
    total = tl.zeros((BM, BC), tl.float32)
    for r in range(g * BM, M, G * BM):
        m = r + tl.arange(0, BM)
        value = _load_input(x, scale, shift, m, c, M, C, H, W, NORM, STRIDE)
        if out is not None:
            tl.store(out + m[:, None] * C + c[None, :], value, mask=(m < M)[:, None])
        total += value.to(tl.float32)
    tl.store(s + g * C + c, tl.sum(total, 0))


@triton.jit
def _gram(x, out, v, p, M, G, C: tl.constexpr, NORM: tl.constexpr, BM: tl.constexpr):
    """x^T x by split-K over G shares of the M rows: p [G, C + 1, C], its last row the sums of x."""
    c, g = tl.arange(0, C), tl.program_id(0)
    scale, shift = _load_scale(v, c, C, NORM)
    acc, total = tl.zeros((C, C), tl.float32), tl.zeros((C,), tl.float32)
    for r in range(g * BM, M, G * BM):
        m = r + tl.arange(0, BM)
        value = _load_input(x, scale, shift, m, c, M, C, 0, 0, NORM, 1)
        if out is not None:
            tl.store(out + m[:, None] * C + c[None, :], value, mask=(m < M)[:, None])
        total += tl.sum(value.to(tl.float32), 0)
        acc = tl.dot(tl.trans(value), value, acc)
    tl.store(p + (g * (C + 1) + C) * C + c, total)
    tl.store(p + (g * (C + 1) + c[:, None]) * C + c[None, :], acc)


def gram_fused(x: Tensor, v: Tensor | None, stride: int) -> tuple[Tensor, Tensor, Tensor]:
    """The convolution's input (x itself if nothing is done to it), its Gram matrix and sums."""
    _, c, h, w = x.shape
    out = None
    if v is not None or stride == 2:
        out = new_image(x, c, (h + stride - 1) // stride, (w + stride - 1) // stride)
    source = x if out is None else out
    m = source.numel() // c
    if c == _JOINED and stride == 1:
        programs = min(_PROGRAMS, triton.cdiv(m, 128))
        p = torch.empty((programs, c + 1, c), device=x.device)
        flags = {"C": c, "NORM": int(v is not None)}
        operands = (x, out, v, p, m, programs)
        CHOICES.run(_gram, lambda _: (programs,), operands, _GRAM_TILES, **flags)
        gram_and_sums = add_rows(p.view(1, programs, -1)).view(c + 1, c)
        # the outputs of an operator must not alias
        return source, gram_and_sums[:-1], gram_and_sums[-1].clone()
    programs = max(1, min(_PROGRAMS * 4 * 64 // c, triton.cdiv(m, 128)))
    s = torch.empty((1, programs, c), device=x.device)
    flags = {"NORM": int(v is not None), "STRIDE": stride}
    tiles = [t for t in _KEEP_TILES if c % t["BC"] == 0]
    args = (x, out, v, s, m, c, programs, h, w)
    CHOICES.run(_keep, lambda t: (c // t["BC"], programs), args, tiles, **flags)
    rows = to_rows(source)
    return source, multiply_transposed(rows, rows), add_rows(s).view(-1)


def multiply_transposed(x: Tensor, y: Tensor) -> Tensor:
    """x^T y in float32, by cuBLAS."""
    if x.is_cuda:
        return torch.mm(x.t(), y, out_dtype=torch.float32)
    return x.float().t() @ y.float()
