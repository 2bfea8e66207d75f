"""phalanx.mbconv.depthwise.convolve_back as a Triton kernel.

A program goes down a strip as in the forward pass. The window is the KS input rows that row h of
dy reaches, by WIDE columns: STRIDE for each of NEAR columns of dy. A row's activation and slope are
computed once, when it enters; its gradient is complete when it leaves. One pass over dy yields the
gradients of the input (through SiLU, with the sums for that norm's backward) and of the weights.
"""
# ruff: noqa: PLR0913, PLR0917, RUF005  (kernels take sizes one by one; tuples are added in Triton)
# mypy: disable-error-code="no-untyped-def,assignment"

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.choices import CHOICES, make_tiles
from phalanx.kernels.image_layout import new_floats
from phalanx.mbconv.activation_fused import (
    add_to_tile,
    load_affine,
    make_zeros,
    next_power_of_2,
    select_tiles,
    sigmoid,
    store_sums,
)
from phalanx.mbconv.depthwise import count_strips
from phalanx.mbconv.depthwise_forward_fused import (
    find_columns,
    load_row,
    load_taps,
)

_TILES = {  # by stride
    1: make_tiles("BW BC", (8, 32, 4, 1), (8, 16, 4, 1)),
    2: make_tiles("BW BC", (16, 16, 4, 1), (8, 16, 4, 1)),
}


@triton.jit
def _load_window(x, o, masks, r, H, W, C, STRIDE: tl.constexpr, WIDE: tl.constexpr):
    """Raw tiles of STRIDE rows from r on, WIDE columns each."""
    tiles = ()
    for k in tl.static_range(STRIDE * WIDE):
        at = r + k // WIDE
        ok = masks[k % WIDE] & (at >= 0) & (at < H)
        tiles = tiles + (tl.load(x + o + (at * W + k % WIDE) * C, mask=ok, other=0.0),)
    return tiles


@triton.jit
def _append_rows(
    acts, slopes, raws, raw_rows, scale, shift, masks, r, H,
    STRIDE: tl.constexpr, WIDE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The window (activations, slopes, raw values) with STRIDE rows from r on appended."""
    for k in tl.static_range(STRIDE * WIDE):
        raw = raw_rows[k].to(tl.float32)
        act = raw
        if NORM:
            z = raw * scale + shift
            p = sigmoid(z)
            act = z * p
            slopes, raws = slopes + (p + act * (1 - p),), raws + (raw,)
        # left and right of the image, dy is masked wherever this column would contribute
        ok = (r + k // WIDE >= 0) & (r + k // WIDE < H)
        if k % WIDE > 0:  # a column beyond an odd width
            ok = masks[k % WIDE] & ok
        acts = acts + (tl.where(ok, act, 0.0),)
    return acts, slopes, raws


@triton.jit
def _fill_window(
    x, wide, masks, scale, shift, H, W, C, KS: tl.constexpr, STRIDE: tl.constexpr,
    WIDE: tl.constexpr, NORM: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The window of KS - STRIDE rows before the first row of dy; its last rows are the image's."""
    OLD: tl.constexpr = (KS - STRIDE) * WIDE
    NEW: tl.constexpr = STRIDE * WIDE
    acts, slopes = make_zeros(OLD, BW, BC), make_zeros(OLD * NORM, BW, BC)
    raws = make_zeros(OLD * NORM, BW, BC)
    for p in tl.static_range(KS // 2 // STRIDE):
        r = (p - KS // 2 // STRIDE) * STRIDE + KS // 2 - STRIDE + 1
        fresh = _load_window(x, wide, masks, r, H, W, C, STRIDE, WIDE)
        acts, slopes, raws = _append_rows(
            acts, slopes, raws, fresh, scale, shift, masks, r, H, STRIDE, WIDE, NORM
        )
        acts, slopes, raws = acts[NEW:], slopes[NEW * NORM :], raws[NEW * NORM :]
    return acts, slopes, raws


@triton.jit
def _add_dy_column(
    grads, dtaps, value, acts, taps,
    Q: tl.constexpr, COLUMN: tl.constexpr, KS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Both gradients plus the contribution of a column of dy by a column of the window, if any."""
    if (COLUMN >= 0) & (COLUMN < KS):
        for i in tl.static_range(KS):
            grads = add_to_tile(grads, i * WIDE + Q, value * taps[i * KS + COLUMN])
            dtaps = add_to_tile(dtaps, i * KS + COLUMN, value * acts[i * WIDE + Q])
    return grads, dtaps


@triton.jit
def _add_dy_row(
    grads, dtaps, now, acts, taps,
    KS: tl.constexpr, STRIDE: tl.constexpr, WIDE: tl.constexpr, REACH: tl.constexpr,
):  # fmt: skip
    """Both gradients plus the contributions of a row of dy."""
    FIRST: tl.constexpr = KS // 2 - STRIDE * (STRIDE - 1 - KS // 2)  # of the window's columns
    for k in tl.static_range(REACH * WIDE):
        # column k // WIDE of dy meets the image's column k % WIDE
        value = now[k // WIDE].to(tl.float32)
        grads, dtaps = _add_dy_column(
            grads, dtaps, value, acts, taps,
            k % WIDE, FIRST + k % WIDE - STRIDE * (k // WIDE), KS, WIDE,
        )  # fmt: skip
    return grads, dtaps


@triton.jit
def _store_gradients(
    dx, o, grads, slopes, raws, masks, r, H, W, C, total, product,
    ROWS: tl.constexpr, WIDE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Store the gradients of ROWS rows from r on; returns the sums including them."""
    for k in tl.static_range(ROWS * WIDE):
        at = r + k // WIDE
        ok, d = masks[k % WIDE] & (at >= 0) & (at < H), grads[k]
        if NORM:
            d *= slopes[k]
        rounded = d.to(dx.dtype.element_ty)
        tl.store(dx + o + (at * W + k % WIDE) * C, rounded, mask=ok)
        if NORM:
            exact = tl.where(ok, rounded.to(tl.float32), 0.0)
            total += exact
            product += exact * raws[k]
    return total, product


@triton.jit(do_not_specialize=["N", "H", "W", "HO", "WO", "C8", "G"])
def _depthwise_backward(
    dy, x, w, v, dx, s, dw, N, H, W, HO, WO, C8, G,
    KS: tl.constexpr, STRIDE: tl.constexpr, NORM: tl.constexpr,
    BW: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dx, its sums s [2, G, C], partial weight gradients dw [G, KS * KS, C].

    The rows of the next iteration are loaded before those of this one are used.
    """
    PAD: tl.constexpr = KS // 2
    NEAR: tl.constexpr = 2 // STRIDE
    WIDE: tl.constexpr = STRIDE * NEAR
    NEW: tl.constexpr = STRIDE * WIDE  # tiles that enter and leave the window with each row
    LEFT: tl.constexpr = STRIDE - 1  # the first of dy's surrounding columns that is reached
    REACH: tl.constexpr = (WIDE - 1 + PAD + STRIDE * PAD) // STRIDE - LEFT + 1
    ENTER: tl.constexpr = PAD - STRIDE + 1  # the first row that enters, counted from STRIDE * h
    C, each = C8 * 8, tl.cdiv(WO, NEAR)
    c, g = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1)
    okc, scale, shift = (c < C)[None, :], 1.0, 0.0
    if NORM:
        scale, shift = load_affine(v, c, C, c < C)
    taps = load_taps(w, c, C, KS * KS)
    dtaps = make_zeros(KS * KS, BW, BC)
    total, product = tl.zeros((BW, BC), tl.float32), tl.zeros((BW, BC), tl.float32)
    for tile in range(g, tl.cdiv(N * each, BW), G):
        m = tile * BW + tl.arange(0, BW)
        n, column, inside = m // each, m % each, (m < N * each)[:, None] & okc
        masks = find_columns(column, inside, WO, NEAR, -PAD, LEFT + REACH)
        wide_masks = find_columns(column, inside, W, WIDE, 0, WIDE)
        offsets = (n * HO * WO + column * NEAR - PAD)[:, None] * C + c[None, :]
        wide = (n * H * W + column * WIDE)[:, None] * C + c[None, :]
        grads = make_zeros(KS * WIDE, BW, BC)
        acts, slopes, raws = _fill_window(
            x, wide, wide_masks, scale, shift, H, W, C, KS, STRIDE, WIDE, NORM, BW, BC
        )
        ahead = load_row(dy, offsets, masks, HO > 0, C, LEFT, REACH)
        fresh = _load_window(x, wide, wide_masks, ENTER, H, W, C, STRIDE, WIDE)
        for h in range(0, HO):
            now, raw_rows, r = ahead, fresh, h * STRIDE
            ahead = load_row(dy, offsets + (h + 1) * WO * C, masks, h + 1 < HO, C, LEFT, REACH)
            fresh = _load_window(x, wide, wide_masks, r + STRIDE + ENTER, H, W, C, STRIDE, WIDE)
            acts, slopes, raws = _append_rows(
                acts, slopes, raws, raw_rows, scale, shift, wide_masks, r + ENTER, H,
                STRIDE, WIDE, NORM,
            )  # fmt: skip
            grads, dtaps = _add_dy_row(grads, dtaps, now, acts, taps, KS, STRIDE, WIDE, REACH)
            total, product = _store_gradients(
                dx, wide, grads, slopes, raws, wide_masks, r - PAD, H, W, C, total, product,
                STRIDE, WIDE, NORM,
            )  # fmt: skip
            grads, acts = grads[NEW:] + make_zeros(NEW, BW, BC), acts[NEW:]
            slopes, raws = slopes[NEW * NORM :], raws[NEW * NORM :]
        total, product = _store_gradients(
            dx, wide, grads, slopes, raws, wide_masks, HO * STRIDE - PAD, H, W, C, total, product,
            PAD, WIDE, NORM,
        )  # fmt: skip
    if NORM:
        store_sums(s, g, c, G, C, total, product)
    for k in tl.static_range(KS * KS):
        tl.store(dw + (g * KS * KS + k) * C + c, tl.sum(dtaps[k], 0), mask=c < C)


def convolve_back(
    dy: Tensor, x: Tensor, weight: Tensor, v: Tensor | None, stride: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`phalanx.mbconv.depthwise.convolve_back`."""
    (n, c, h, w), ks = x.shape, weight.shape[2]
    ho, wo = dy.shape[2:]
    programs, dx = count_strips(n * wo, c), torch.empty_like(x)
    s, dw = new_floats(2, programs, c, like=x), new_floats(programs, ks * ks, c, like=x)
    args = (dy, x, weight, s if v is None else v, dx, s, dw, n, h, w, ho, wo, c // 8, programs)
    flags = {"KS": ks, "STRIDE": stride, "NORM": int(v is not None)}
    tiles = select_tiles(_TILES[stride], BC=next_power_of_2(c))
    grid = lambda t: (triton.cdiv(c, t["BC"]), programs)  # noqa: E731
    CHOICES.run(_depthwise_backward, grid, args, tiles, **flags)
    return dx, s, dw
