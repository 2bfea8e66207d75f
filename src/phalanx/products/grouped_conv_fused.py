"""Grouped 3x3 convolutions of stride 1 in Triton, forward and backward.

Some groups side by side are one dense product of their channels, with zeros in the weight where a
group meets another: tensor cores have time to spare, memory has not.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0913, PLR0917  (kernels take pointers and sizes one by one)

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.choices import CHOICES, Launch, make_tiles
from phalanx.products.sums_fused import add_rows

_TILES = make_tiles(
    "BM", (128, 4, 3), (128, 4, 5), (256, 8, 3), (64, 4, 4), (128, 4, 1), (64, 4, 1), (256, 8, 1)
)
_WEIGHT_TILES = make_tiles(
    "BM CB",
    *((64, 64, 4, 3), (128, 64, 4, 2), (64, 32, 4, 3), (128, 32, 4, 3), (64, 64, 4, 1)),
)
_FEWEST_CHANNELS = 32  # side by side, of as many groups as they hold
_PROGRAMS = 1056  # of the weight's gradient, at most


@triton.jit
def _spread(w, wide, C, G: tl.constexpr, BACK: tl.constexpr, CB: tl.constexpr):
    """Weights [C, 9, G] as [C / CB, 9, CB, CB], in by out; BACK: for the gradient, out by in."""
    block, tap = tl.program_id(0), tl.program_id(1)
    k, n = tl.arange(0, CB)[:, None], tl.arange(0, CB)[None, :]
    out, into, source = n, k, tap
    if BACK:
        out, into, source = k, n, 8 - tap
    place = ((block * CB + out) * 9 + source) * G + into % G
    value = tl.load(w + place, mask=k // G == n // G, other=0.0)
    tl.store(wide + ((block * 9 + tap) * CB + k) * CB + n, value)


@triton.jit
def _load_tap(x, m, h, w, c, dh, dw, M, C, H, W):
    """The pixels dh below and dw beside the pixels m, zeros outside of the image."""
    ok = (m < M) & (h + dh >= 0) & (h + dh < H) & (w + dw >= 0) & (w + dw < W)
    place = (m + dh * W + dw)[:, None] * C + c[None, :]
    return tl.load(x + place, mask=ok[:, None], other=0.0)


@triton.jit(do_not_specialize=["H", "W"])
def _convolve(x, wide, y, M, C, H, W, BM: tl.constexpr, CB: tl.constexpr):
    """y = the convolution of x for BM pixels and CB channels."""
    blocks = C // CB
    block, row = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    m, k = row * BM + tl.arange(0, BM), tl.arange(0, CB)
    h, w, c = (m // W) % H, m % W, block * CB + tl.arange(0, CB)
    acc = tl.zeros((BM, CB), tl.float32)
    for tap in range(9):
        left = _load_tap(x, m, h, w, c, tap // 3 - 1, tap % 3 - 1, M, C, H, W)
        right = tl.load(wide + ((block * 9 + tap) * CB + k[:, None]) * CB + k[None, :])
        acc = tl.dot(left, right, acc)
    place = m[:, None] * C + c[None, :]
    tl.store(y + place, acc.to(y.dtype.element_ty), mask=(m < M)[:, None])


@triton.jit
def _store_own(p, acc, split, block, tap, C, G: tl.constexpr, CB: tl.constexpr):
    """The part of acc [in, out] where in and out are of one group, as [C, 9, G]."""
    k, n = tl.arange(0, CB)[:, None], tl.arange(0, CB)[None, :]
    place = split * C * 9 * G + ((block * CB + n) * 9 + tap) * G + k % G
    tl.store(p + place, acc, mask=k // G == n // G)


@triton.jit(do_not_specialize=["H", "W"])
def _weight_gradient(
    x, dy, p, M, C, SPLITS, H, W, G: tl.constexpr, BM: tl.constexpr, CB: tl.constexpr
):
    """x^T dy for the three taps of a row, over one of SPLITS shares of the pixels."""
    block, dh, split = tl.program_id(0), tl.program_id(1) - 1, tl.program_id(2)
    c = block * CB + tl.arange(0, CB)
    left, middle = tl.zeros((CB, CB), tl.float32), tl.zeros((CB, CB), tl.float32)
    right = tl.zeros((CB, CB), tl.float32)
    for r in range(split * BM, M, SPLITS * BM):
        m = r + tl.arange(0, BM)
        h, w = (m // W) % H, m % W
        d = tl.load(dy + m[:, None] * C + c[None, :], mask=(m < M)[:, None], other=0.0)
        left = tl.dot(tl.trans(_load_tap(x, m, h, w, c, dh, -1, M, C, H, W)), d, left)
        middle = tl.dot(tl.trans(_load_tap(x, m, h, w, c, dh, 0, M, C, H, W)), d, middle)
        right = tl.dot(tl.trans(_load_tap(x, m, h, w, c, dh, 1, M, C, H, W)), d, right)
    tap = 3 * (dh + 1)
    _store_own(p, left, split, block, tap, C, G, CB)
    _store_own(p, middle, split, block, tap + 1, C, G, CB)
    _store_own(p, right, split, block, tap + 2, C, G, CB)


def grouped_conv_fused(x: Tensor, weight: Tensor, back: bool) -> Tensor:
    """The convolution of x; `back`: with the weight turned round, as for the gradient of x."""
    n, c, h, w = x.shape
    m, group, y = n * h * w, weight.shape[1], torch.empty_like(x)
    beside = max(group, _FEWEST_CHANNELS)
    blocks, wide = c // beside, weight.new_empty((c, 9, beside))
    flags, tile = {"G": group, "BACK": int(back), "CB": beside}, {"num_warps": 4}
    CHOICES.run(_spread, lambda _: (blocks, 9), (weight, wide, c), [tile], **flags)
    args = (x, wide, y, m, c, h, w)
    grid = lambda t: (triton.cdiv(m, t["BM"]) * blocks,)  # noqa: E731
    CHOICES.run(_convolve, grid, args, _TILES, CB=beside)
    return y


def grouped_weight_gradient_fused(dy: Tensor, x: Tensor, group: int) -> Tensor:
    """The gradient of the weight: float32 [C, group, 3, 3]."""
    n, c, h, w = x.shape
    m, launches = n * h * w, []
    for t in [t for t in _WEIGHT_TILES if group <= t["CB"]]:
        blocks = c // t["CB"]
        splits = max(1, min(_PROGRAMS // (3 * blocks), triton.cdiv(m, 4 * t["BM"])))
        p = torch.empty((1, splits, c * 9 * group), device=x.device)
        args = (x, dy, p, m, c, splits, h, w)
        launches.append(Launch(_weight_gradient, (blocks, 3, splits), args, t, {"G": group}))
    used = CHOICES.run_fastest(launches)
    return add_rows(used.args[2]).view(c, 3, 3, group).permute(0, 3, 1, 2)
