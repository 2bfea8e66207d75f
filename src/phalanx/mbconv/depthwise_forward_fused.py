"""phalanx.mbconv.depthwise.convolve as a Triton kernel.

A program goes down a strip of BW output columns, which may span images, for BC channels; each of
them stands for NEAR adjacent columns, which share loads. A row is read once for each column of the
window; its contributions to the output rows above and below stay in registers. Offsets are 32-bit.
"""
# ruff: noqa: PLR0913, PLR0917, RUF005  (kernels take sizes one by one; tuples are added in Triton)
# mypy: disable-error-code="no-untyped-def,assignment"

import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.choices import CHOICES, make_tiles
from phalanx.kernels.image_layout import new_floats, new_image
from phalanx.mbconv.activation_fused import (
    add_to_tile,
    load_affine,
    make_zeros,
    next_power_of_2,
    select_tiles,
    sigmoid,
    store_sums,
)
from phalanx.mbconv.depthwise import count_strips, find_output_size

_TILES = make_tiles("BW BC", (8, 32, 4, 1), (16, 32, 4, 1))


@triton.jit
def load_taps(w, c, C, COUNT: tl.constexpr):
    """The weights of the window, kept in registers."""
    taps = ()
    for k in tl.static_range(COUNT):
        taps = taps + (tl.load(w + c * COUNT + k, mask=c < C, other=0.0).to(tl.float32)[None, :],)
    return taps


@triton.jit
def find_columns(column, inside, W, STRIDE: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Masks of the COUNT columns from STRIDE * column + FIRST on that are within the image."""
    masks = ()
    for j in tl.static_range(COUNT):
        at = column * STRIDE + j + FIRST
        masks = masks + (inside & ((at >= 0) & (at < W))[:, None],)
    return masks


@triton.jit
def load_row(x, o, masks, on, C, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Raw tiles of COUNT columns from FIRST on, C apart; zero where masked or not `on`."""
    tiles = ()
    for j in tl.static_range(COUNT):
        offsets = x + o + (FIRST + j) * C
        tiles = tiles + (tl.load(offsets, mask=masks[FIRST + j] & on, other=0.0),)
    return tiles


@triton.jit
def _add_column(
    acc, value, taps, COLUMN: tl.constexpr, OUT: tl.constexpr, BELOW: tl.constexpr,
    KS: tl.constexpr, STRIDE: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """acc plus the contribution of an input value to the rows of one of NEAR output columns."""
    PAD: tl.constexpr = KS // 2
    if (COLUMN >= 0) & (COLUMN < KS):
        for i in tl.static_range(KS):
            if (BELOW + PAD - i) % STRIDE == 0:
                more = value * taps[i * KS + COLUMN]
                acc = add_to_tile(
                    acc, ((BELOW + PAD - i) // STRIDE + PAD // STRIDE) * NEAR + OUT, more
                )
    return acc


@triton.jit
def _add_rows(
    acc, now, taps, masks, scale, shift, r, H,
    KS: tl.constexpr, STRIDE: tl.constexpr, NEAR: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """acc plus the contributions of STRIDE input rows from r on."""
    REACH: tl.constexpr = KS + STRIDE * (NEAR - 1)
    for k in tl.static_range(STRIDE * REACH):
        value = now[k].to(tl.float32)
        if NORM:
            z = value * scale + shift
            value = tl.where(masks[k % REACH] & (r + k // REACH < H), z * sigmoid(z), 0.0)
        for p in tl.static_range(NEAR):
            acc = _add_column(
                acc, value, taps, k % REACH - STRIDE * p, p, k // REACH, KS, STRIDE, NEAR
            )
    return acc


@triton.jit
def _load_rows(x, offsets, masks, r, H, W, C, REACH: tl.constexpr, STRIDE: tl.constexpr):
    """Raw tiles of STRIDE rows from r on."""
    tiles = ()
    for below in tl.static_range(STRIDE):
        at = r + below
        tiles = tiles + load_row(x, offsets + at * W * C, masks, at < H, C, 0, REACH)
    return tiles


@triton.jit
def _store_row(y, o, acc, masks, on, C, total, square, NEAR: tl.constexpr):
    """Store the first row of acc; returns the sums including it."""
    for p in tl.static_range(NEAR):
        ok = masks[p] & on
        result = acc[p].to(y.dtype.element_ty)
        tl.store(y + o + p * C, result, mask=ok)
        exact = tl.where(ok, result.to(tl.float32), 0.0)
        total += exact
        square += exact * exact
    return total, square


@triton.jit(do_not_specialize=["N", "H", "W", "HO", "WO", "C8", "G"])
def _depthwise_forward(
    x, w, v, y, s, N, H, W, HO, WO, C8, G,
    KS: tl.constexpr, STRIDE: tl.constexpr, NORM: tl.constexpr,
    BW: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y = the convolution of x; s [2, G, C] gets the sums of y and y * y, one row per program.

    The rows of the next iteration are loaded before those of this one are used.
    """
    NEAR: tl.constexpr = 2
    PAD: tl.constexpr = KS // 2
    LOW: tl.constexpr = PAD // STRIDE  # unfinished output rows above that of the input row
    ROWS: tl.constexpr = LOW + 1 + (STRIDE - 1 + PAD) // STRIDE
    REACH: tl.constexpr = KS + STRIDE * (NEAR - 1)
    C, each = C8 * 8, tl.cdiv(WO, NEAR)
    c, g = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1)
    okc, scale, shift = (c < C)[None, :], 1.0, 0.0
    if NORM:
        scale, shift = load_affine(v, c, C, c < C)
    taps = load_taps(w, c, C, KS * KS)
    total, square = tl.zeros((BW, BC), tl.float32), tl.zeros((BW, BC), tl.float32)
    for tile in range(g, tl.cdiv(N * each, BW), G):
        m = tile * BW + tl.arange(0, BW)
        n, column, inside = m // each, m % each, (m < N * each)[:, None] & okc
        offsets = (n * H * W + column * (STRIDE * NEAR) - PAD)[:, None] * C + c[None, :]
        out = (n * HO * WO + column * NEAR)[:, None] * C + c[None, :]
        masks = find_columns(column, inside, W, STRIDE * NEAR, -PAD, REACH)
        out_masks = find_columns(column, inside, WO, NEAR, 0, NEAR)
        acc = make_zeros(ROWS * NEAR, BW, BC)
        ahead = _load_rows(x, offsets, masks, 0, H, W, C, REACH, STRIDE)
        for h in range(0, HO):
            now, r = ahead, h * STRIDE
            ahead = _load_rows(x, offsets, masks, r + STRIDE, H, W, C, REACH, STRIDE)
            acc = _add_rows(acc, now, taps, masks, scale, shift, r, H, KS, STRIDE, NEAR, NORM)
            row = out + (h - LOW) * WO * C
            total, square = _store_row(y, row, acc, out_masks, h >= LOW, C, total, square, NEAR)
            acc = acc[NEAR:] + make_zeros(NEAR, BW, BC)
        for p in tl.static_range(LOW):  # rows to which no row below contributes
            row, on = out + (HO - LOW + p) * WO * C, HO - LOW + p >= 0
            total, square = _store_row(y, row, acc, out_masks, on, C, total, square, NEAR)
            acc = acc[NEAR:] + make_zeros(NEAR, BW, BC)
    store_sums(s, g, c, G, C, total, square)


def convolve(x: Tensor, weight: Tensor, v: Tensor | None, stride: int) -> tuple[Tensor, Tensor]:
    """`phalanx.mbconv.depthwise.convolve`."""
    n, c, h, w = x.shape
    ho, wo = find_output_size(h, stride), find_output_size(w, stride)
    programs = count_strips(n * wo, c)
    y, s = new_image(x, c, ho, wo), new_floats(2, programs, c, like=x)
    args = (x, weight, s if v is None else v, y, s, n, h, w, ho, wo, c // 8, programs)
    flags = {"KS": weight.shape[2], "STRIDE": stride, "NORM": int(v is not None)}
    tiles = select_tiles(_TILES, BC=next_power_of_2(c))
    grid = lambda t: (triton.cdiv(c, t["BC"]), programs)  # noqa: E731
    CHOICES.run(_depthwise_forward, grid, args, tiles, **flags)
    return y, s
