"""phalanx.mbconv.expand as Triton kernels.

Persistent programs keep weights and partial sums and loop over the rows. Channels are multiples of
eight, passed divided by eight (K8); blocks are the next powers of two.
"""
# ruff: noqa: PLR0913, PLR0917  (kernels take sizes one by one)
# mypy: disable-error-code="no-untyped-def,assignment"

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.choices import CHOICES, make_tiles
from phalanx.kernels.image_layout import MULTIPROCESSORS, count_rows, new_floats, new_image
from phalanx.kernels.norm_passes_fused import sum_rows_by_thread
from phalanx.mbconv.activation_fused import next_power_of_2, select_tiles
from phalanx.mbconv.depthwise import find_output_size
from phalanx.mbconv.expand import count_expand_programs
from phalanx.mbconv.partial_sums_fused import add_partials

_TILES = make_tiles("BM BN DEPTH WARPS", (128, 64, 2, 4, 4, 1), (64, 128, 3, 4, 4, 1))
_BACK_TILES = make_tiles("BM DEPTH", (64, 2, 4, 1), (64, 1, 4, 1))


@triton.jit
def _load_patches(x, m, k, M, H, W):
    """Rows of 3x3 patches with 3 channels at stride 2, zero beyond the edges of the image."""
    ho, wo = (H + 1) // 2, (W + 1) // 2
    n, h, w = m // (ho * wo), (m // wo) % ho, m % wo
    row, column = (2 * h - 1)[:, None] + (k // 9)[None, :], (2 * w - 1)[:, None]
    column = column + ((k % 9) // 3)[None, :]
    ok = (m < M)[:, None] & (k < 27)[None, :] & (row >= 0) & (column >= 0)
    ok = ok & (row < H) & (column < W)
    o = ((n[:, None] * H + row) * W + column) * 3 + (k % 3)[None, :]
    return tl.load(x + o, mask=ok, other=0.0)


@triton.jit
def _load_rows(x, m, k, M, K, H, W, STEM: tl.constexpr):
    """Rows m of x [M, K], or of an image's patches."""
    if STEM:
        return _load_patches(x, m, k, M, H, W)
    else:
        ok = (m < M)[:, None] & (k < K)[None, :]
        return tl.load(x + m[:, None] * K + k[None, :], mask=ok, other=0.0)


@triton.jit(do_not_specialize=["M", "K8", "K", "E8", "G", "H", "W"])
def _expand(
    x, w, y, s, M, K8, K, E8, G, H, W,
    STEM: tl.constexpr, KP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DEPTH: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """y = x w^T with the sums s [2, G, E] of y and y * y."""
    e, g, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1), tl.arange(0, KP)
    width, E = K, E8 * 8
    if not STEM:
        width = K8 * 8
    ok = (e < E)[:, None] & (k < width)[None, :]
    weights = tl.trans(tl.load(w + e[:, None] * width + k[None, :], mask=ok, other=0.0))
    total, square = tl.zeros((WARPS, 8, BN), tl.float32), tl.zeros((WARPS, 8, BN), tl.float32)
    for row in tl.range(g, tl.cdiv(M, BM), G, num_stages=DEPTH):
        m = row * BM + tl.arange(0, BM)
        rows = _load_rows(x, m, k, M, width, H, W, STEM)
        result = tl.dot(rows, weights).to(y.dtype.element_ty)
        o = m[:, None] * E + e[None, :]
        tl.store(y + o, result, mask=(m < M)[:, None] & (e < E)[None, :])
        exact = result.to(tl.float32)
        total += sum_rows_by_thread(exact, BM, BN, WARPS)
        square += sum_rows_by_thread(exact * exact, BM, BN, WARPS)
    tl.store(s + g * E + e, tl.sum(tl.sum(total, 1), 0), mask=e < E)
    tl.store(s + (G + g) * E + e, tl.sum(tl.sum(square, 1), 0), mask=e < E)


@triton.jit
def _load_weights(w, first, width, E, k, BN: tl.constexpr):
    """Rows of w [E, width] from `first` on."""
    e = first + tl.arange(0, BN)
    ok = (e < E)[:, None] & (k < width)[None, :]
    return tl.load(w + e[:, None] * width + k[None, :], mask=ok, other=0.0)


@triton.jit
def _store_weights(dw, first, width, E, k, value, BN: tl.constexpr):
    """Store rows of a weight gradient from `first` on."""
    e = first + tl.arange(0, BN)
    ok = (e < E)[:, None] & (k < width)[None, :]
    tl.store(dw + e[:, None] * width + k[None, :], value, mask=ok)


@triton.jit
def _norm_back(ds, rows, weights, u, m, first, M, E, BN: tl.constexpr):
    """The gradient of the product's columns from `first` on, rounded to the weights' dtype."""
    e = first + tl.arange(0, BN)
    oke = e < E
    raw = tl.dot(rows, tl.trans(weights))
    d = tl.load(ds + m[:, None] * E + e[None, :], mask=(m < M)[:, None] & oke[None, :], other=0.0)
    d = d.to(tl.float32) * tl.load(u + 2 * E + e, mask=oke, other=0.0)[None, :]
    d += raw * tl.load(u + 3 * E + e, mask=oke, other=0.0)[None, :]
    d += tl.load(u + 4 * E + e, mask=oke, other=0.0)[None, :]
    return tl.where((m < M)[:, None], d, 0.0).to(weights.dtype)


@triton.jit(do_not_specialize=["M", "K8", "K", "E8", "G", "H", "W"])
def _expand_back(
    ds, x, w, u, add, dx, dw, M, K8, K, E8, G, H, W,
    STEM: tl.constexpr, ADD: tl.constexpr, KP: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr,
    BM: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """dx [M, K] and partial weight gradients dw [G, E, K]; E is split into blocks N1 and N2."""
    g, k = tl.program_id(0), tl.arange(0, KP)
    width, E = K, E8 * 8
    if not STEM:
        width = K8 * 8
    w1, dw1 = _load_weights(w, 0, width, E, k, N1), tl.zeros((N1, KP), tl.float32)
    if N2:
        w2, dw2 = _load_weights(w, N1, width, E, k, N2), tl.zeros((N2, KP), tl.float32)
    for row in tl.range(g, tl.cdiv(M, BM), G, num_stages=DEPTH):
        m = row * BM + tl.arange(0, BM)
        rows = _load_rows(x, m, k, M, width, H, W, STEM)
        part = _norm_back(ds, rows, w1, u, m, 0, M, E, N1)
        dw1 = tl.dot(tl.trans(part), rows, dw1)
        if not STEM:
            d = tl.dot(part, w1)
        if N2:
            part2 = _norm_back(ds, rows, w2, u, m, N1, M, E, N2)
            dw2 = tl.dot(tl.trans(part2), rows, dw2)
            if not STEM:
                d = tl.dot(part2, w2, d)
        if not STEM:
            o, ok = m[:, None] * width + k[None, :], (m < M)[:, None] & (k < width)[None, :]
            if ADD:
                d += tl.load(add + o, mask=ok, other=0.0).to(tl.float32)
            tl.store(dx + o, d.to(dx.dtype.element_ty), mask=ok)
    _store_weights(dw + g * E * width, 0, width, E, k, dw1, N1)
    if N2:
        _store_weights(dw + g * E * width, N1, width, E, k, dw2, N2)


def expand(x: Tensor, weight: Tensor, stem: bool) -> tuple[Tensor, Tensor]:
    """`phalanx.mbconv.expand.expand`."""
    (_, _, h, w), (e, k) = x.shape, weight.shape
    y = new_image(x, e, find_output_size(h, 1 + stem), find_output_size(w, 1 + stem))
    programs = count_expand_programs(count_rows(y), e)
    s = new_floats(2, programs, e, like=x)
    args = (x, weight, y, s, count_rows(y), k // 8, k, e // 8, programs, h, w)
    grid = lambda t: (triton.cdiv(e, t["BN"]), programs)  # noqa: E731
    tiles = select_tiles(_TILES, BN=next_power_of_2(e))
    CHOICES.run(_expand, grid, args, tiles, STEM=int(stem), KP=next_power_of_2(k))
    return y, s


def _split_outputs(e: int) -> tuple[int, int]:
    """Two powers of two that together cover e columns; the second may be 0."""
    first = min(128, max(16, 1 << (e.bit_length() - 1)))
    return first, next_power_of_2(e - first) if e > first else 0


def expand_back(
    ds: Tensor, x: Tensor, weight: Tensor, u: Tensor, add: Tensor | None, stem: bool
) -> tuple[Tensor, Tensor]:
    """`phalanx.mbconv.expand.expand_back`."""
    (h, w), (e, k), rows = x.shape[2:], weight.shape, count_rows(ds)
    programs = min(triton.cdiv(rows, 128), MULTIPROCESSORS * (2 if k > 16 else 4))
    dx = new_image(x, 0, 0, 0) if stem else torch.empty_like(x)
    dw = new_floats(programs, e, k, like=x)
    args = (ds, x, weight, u, x if add is None else add, x if stem else dx, dw)
    args += (rows, k // 8, k, e // 8, programs, h, w)
    first, second = _split_outputs(e)
    flags = {"STEM": int(stem), "ADD": int(add is not None), "KP": next_power_of_2(k)}
    flags |= {"N1": first, "N2": second}
    CHOICES.run(_expand_back, lambda t: (programs,), args, _BACK_TILES, **flags)
    return dx, add_partials(dw, e * k).view(e, k)
