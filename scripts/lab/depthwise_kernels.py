"""Triton kernels of depthwise convolutions over channels_last images, with the norm around them.

A program walks down a strip of BW output columns, which may span images, for BC channels. Each row
is read once for each column of the window; what it adds to the output rows above and below stays in
registers. Forward, the input may be the raw output of the convolution before, whose norm and SiLU
are computed on the load (NORM), and the sums for the next norm come with the result. Backward, one
pass over the gradient yields both the input's (DATA; with NORM it goes through SiLU, and its sums
for that norm's backward come along) and the weights' (WEIGHT).

The input's width is STRIDE times the output's, weights are [KS * KS, C], and vectors lie in rows as
in step_kernels.py. Offsets are 32 bits wide.
"""
# ruff: noqa: PLR0913, PLR0917, C901, PLR0912, RUF005  (kernels take sizes one by one)

from typing import Any

import torch
import triton
import triton.language as tl
from step_kernels import INTERPRETED, launcher, make_tiles
from torch import Tensor

PLAIN_DIVISION = tl.constexpr(INTERPRETED)
FORWARD_TILES = make_tiles(
    "BW BC HOLD",
    *((8, 64, 1, 4, 1), (16, 32, 1, 4, 1), (8, 32, 1, 4, 1), (16, 64, 1, 4, 1)),
    *((16, 32, 0, 4, 1), (16, 16, 1, 4, 1)),
)
BACKWARD_TILES = make_tiles(
    "BW BC HOLD",
    *((8, 32, 0, 4, 1), (8, 32, 1, 4, 1), (16, 32, 0, 4, 1), (8, 64, 0, 4, 1), (16, 16, 1, 4, 1)),
)
PROGRAMS = 132 * 12  # that share the strips


@triton.jit
def sigmoid(z):
    """1 / (1 + exp(-z)) by the approximate reciprocal."""
    below = 1.0 + tl.exp(-z)
    if PLAIN_DIVISION:
        return 1.0 / below
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [below], tl.float32, is_pure=True, pack=1
    )


@triton.jit
def make_zeros(COUNT: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr):
    """COUNT tiles of zeros."""
    tiles = ()
    for _ in tl.static_range(COUNT):
        tiles = tiles + (tl.zeros((BW, BC), tl.float32),)
    return tiles


@triton.jit
def add_to(tiles, AT: tl.constexpr, value):
    """The tiles with `value` added to one."""
    return tiles[:AT] + (tiles[AT] + value,) + tiles[AT + 1 :]


@triton.jit
def load_taps(w, c, C, COUNT: tl.constexpr, HOLD: tl.constexpr):
    """The window's weights, where they shall stay in registers."""
    taps = ()
    if HOLD:
        for k in tl.static_range(COUNT):
            taps = taps + (tl.load(w + k * C + c, mask=c < C, other=0.0).to(tl.float32)[None, :],)
    return taps


@triton.jit
def take_tap(taps, w, c, C, AT: tl.constexpr, HOLD: tl.constexpr):
    """One weight of the window for each channel."""
    if HOLD:
        return taps[AT]
    else:
        return tl.load(w + AT * C + c, mask=c < C, other=0.0).to(tl.float32)[None, :]


@triton.jit
def load_active(x, o, ok, scale, shift, NORM: tl.constexpr):
    """The input at o, through norm and SiLU where NORM; zero where not ok."""
    value = tl.load(x + o, mask=ok, other=0.0).to(tl.float32)
    if NORM:
        z = value * scale + shift
        value = tl.where(ok, z * sigmoid(z), 0.0)
    return value


@triton.jit(do_not_specialize=["COLUMNS", "H", "W", "HO", "WO", "G"])
def depthwise_forward(
    x, w, v, y, s, COLUMNS, H, W, HO, WO, C, G,
    KS: tl.constexpr, STRIDE: tl.constexpr, NORM: tl.constexpr, SUMS: tl.constexpr,
    HOLD: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y = the convolution of x; s [2, G, C] gets the sums of y and y * y, one row a program."""
    PAD: tl.constexpr = KS // 2
    LOW: tl.constexpr = PAD // STRIDE  # output rows under way above that of the input row
    ROWS: tl.constexpr = LOW + 1 + (STRIDE - 1 + PAD) // STRIDE
    c, g = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1)
    okc, scale, shift = (c < C)[None, :], 1.0, 0.0
    if NORM:
        scale = tl.load(v + 2 * C + c, mask=c < C, other=0.0)[None, :]
        shift = tl.load(v + 3 * C + c, mask=c < C, other=0.0)[None, :]
    taps = load_taps(w, c, C, KS * KS, HOLD)
    total, square = tl.zeros((BW, BC), tl.float32), tl.zeros((BW, BC), tl.float32)
    for tile in range(g, tl.cdiv(COLUMNS, BW), G):
        m = tile * BW + tl.arange(0, BW)
        n, column = m // WO, m % WO
        acc = make_zeros(ROWS, BW, BC)
        for h in range(0, HO + LOW):
            for below in tl.static_range(STRIDE):
                r = h * STRIDE + below
                for j in tl.static_range(KS):
                    at = column * STRIDE + j - PAD
                    ok = ((m < COLUMNS) & (at >= 0) & (at < W) & (r < H))[:, None] & okc
                    o = ((n * H + r) * W + at)[:, None] * C + c[None, :]
                    value = load_active(x, o, ok, scale, shift, NORM)
                    for i in tl.static_range(KS):
                        if (below + PAD - i) % STRIDE == 0:
                            tap = take_tap(taps, w, c, C, i * KS + j, HOLD)
                            acc = add_to(acc, (below + PAD - i) // STRIDE + LOW, value * tap)
            row = h - LOW
            ok = ((m < COLUMNS) & (row >= 0))[:, None] & okc
            result = acc[0].to(y.dtype.element_ty)
            tl.store(y + ((n * HO + row) * WO + column)[:, None] * C + c[None, :], result, mask=ok)
            if SUMS:
                exact = tl.where(ok, result.to(tl.float32), 0.0)
                total += exact
                square += exact * exact
            acc = acc[1:] + make_zeros(1, BW, BC)
    if SUMS:
        tl.store(s + g * C + c, tl.sum(total, 0), mask=c < C)
        tl.store(s + (G + g) * C + c, tl.sum(square, 0), mask=c < C)


@triton.jit
def load_window(
    x, acts, r, n, column, inside, c, scale, shift, H, W, C,
    STRIDE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The activations with those of STRIDE rows from r on."""
    for below in tl.static_range(STRIDE):
        for q in tl.static_range(STRIDE):
            row, at = r + below, column * STRIDE + q
            ok = (inside & (row >= 0) & (row < H))[:, None] & (c < C)[None, :]
            o = ((n * H + row) * W + at)[:, None] * C + c[None, :]
            acts = acts + (load_active(x, o, ok, scale, shift, NORM),)
    return acts


@triton.jit(do_not_specialize=["COLUMNS", "H", "W", "HO", "WO", "G"])
def depthwise_backward(
    dy, x, w, v, dx, s, dw, COLUMNS, H, W, HO, WO, C, G,
    KS: tl.constexpr, STRIDE: tl.constexpr, NORM: tl.constexpr, DATA: tl.constexpr,
    WEIGHT: tl.constexpr, HOLD: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dx from dy, its sums s [2, G, C] of dx and dx * x (NORM), partial weights dw [G, KS * KS, C].

    The window is the KS input rows that row h of dy reaches, by STRIDE columns for each of dy's.
    """
    PAD: tl.constexpr = KS // 2
    NEW: tl.constexpr = STRIDE * STRIDE  # tiles that enter and leave the window with each row
    c, g = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1)
    okc, scale, shift = (c < C)[None, :], 1.0, 0.0
    if NORM:
        scale = tl.load(v + 2 * C + c, mask=c < C, other=0.0)[None, :]
        shift = tl.load(v + 3 * C + c, mask=c < C, other=0.0)[None, :]
    taps = load_taps(w, c, C, KS * KS, HOLD & DATA)
    dtaps = make_zeros(KS * KS * WEIGHT, BW, BC)
    total, product = tl.zeros((BW, BC), tl.float32), tl.zeros((BW, BC), tl.float32)
    for tile in range(g, tl.cdiv(COLUMNS, BW), G):
        m = tile * BW + tl.arange(0, BW)
        inside, n, column = m < COLUMNS, m // WO, m % WO
        acts = make_zeros((KS - STRIDE) * STRIDE * WEIGHT, BW, BC)
        grads = make_zeros(KS * STRIDE * DATA, BW, BC)
        for h in range(-(PAD // STRIDE), HO + (PAD + STRIDE - 1) // STRIDE):
            if WEIGHT:
                acts = load_window(
                    x, acts, h * STRIDE + PAD - STRIDE + 1, n, column, inside, c, scale, shift,
                    H, W, C, STRIDE, NORM,
                )  # fmt: skip
            for t in tl.static_range(KS):
                at = column + t - PAD
                ok = (inside & (at >= 0) & (at < WO) & (h >= 0) & (h < HO))[:, None] & okc
                o = ((n * HO + h) * WO + at)[:, None] * C + c[None, :]
                value = tl.load(dy + o, mask=ok, other=0.0).to(tl.float32)
                for q in tl.static_range(STRIDE):
                    # the window's column is q + PAD - STRIDE * (t - PAD)
                    if (q + PAD >= STRIDE * (t - PAD)) & (q + PAD - STRIDE * (t - PAD) < KS):
                        for i in tl.static_range(KS):
                            if DATA:
                                tap = take_tap(
                                    taps, w, c, C, i * KS + q + PAD - STRIDE * (t - PAD), HOLD
                                )
                                grads = add_to(grads, i * STRIDE + q, value * tap)
                            if WEIGHT:
                                more = value * acts[i * STRIDE + q]
                                dtaps = add_to(dtaps, i * KS + q + PAD - STRIDE * (t - PAD), more)
            if DATA:
                for below in tl.static_range(STRIDE):
                    for q in tl.static_range(STRIDE):
                        r, at = h * STRIDE + below - PAD, column * STRIDE + q
                        ok = (inside & (r >= 0) & (r < H))[:, None] & okc
                        o = ((n * H + r) * W + at)[:, None] * C + c[None, :]
                        d = grads[below * STRIDE + q]
                        if NORM:
                            raw = tl.load(x + o, mask=ok, other=0.0).to(tl.float32)
                            z = raw * scale + shift
                            p = sigmoid(z)
                            d = tl.where(ok, d * p * (1 + z * (1 - p)), 0.0)
                            d = d.to(dx.dtype.element_ty).to(tl.float32)
                            total += d
                            product += d * raw
                        tl.store(dx + o, d.to(dx.dtype.element_ty), mask=ok)
                grads = grads[NEW:] + make_zeros(NEW, BW, BC)
            if WEIGHT:
                acts = acts[NEW:]
    if NORM & DATA:
        tl.store(s + g * C + c, tl.sum(total, 0), mask=c < C)
        tl.store(s + (G + g) * C + c, tl.sum(product, 0), mask=c < C)
    if WEIGHT:
        for k in tl.static_range(KS * KS):
            tl.store(dw + (g * KS * KS + k) * C + c, tl.sum(dtaps[k], 0), mask=c < C)


def count_strips(columns: int, channels: int) -> int:
    """How many programs share the strips: rows of partial sums."""
    return max(1, min(columns // 16, PROGRAMS * 32 // channels))


def convolve(
    x: Tensor, weight: Tensor, v: Tensor | None, stride: int, sums: bool = True
) -> tuple[Tensor, Tensor]:
    """The convolution of an NHWC image, raw with the norm's vectors v, and sums for the next norm.

    weight is [KS, KS, C].
    """
    (n, h, w, c), ks = x.shape, weight.shape[0]
    ho, wo = h // stride, w // stride
    groups = count_strips(n * wo, c)
    y = torch.empty(n, ho, wo, c, dtype=x.dtype, device=x.device)
    s = torch.empty(2, groups, c, device=x.device)
    args = (x, weight, s if v is None else v, y, s, n * wo, h, w, ho, wo, c, groups)
    flags = {"KS": ks, "STRIDE": stride, "NORM": int(v is not None), "SUMS": int(sums)}
    grid = lambda t: (triton.cdiv(c, t["BC"]), groups)  # noqa: E731
    launcher.run(depthwise_forward, grid, args, FORWARD_TILES, **flags)
    return y, s


def convolve_back(
    dy: Tensor, x: Tensor, weight: Tensor, v: Tensor | None, stride: int,
    parts: tuple[bool, bool] = (True, True),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradient of the input (behind norm and SiLU with v), its sums, partial weight gradients."""
    (n, h, w, c), ks = x.shape, weight.shape[0]
    ho, wo = dy.shape[1:3]
    groups = count_strips(n * wo, c)
    data, weights = parts
    dx, s = torch.empty_like(x), torch.empty(2, groups, c, device=x.device)
    dw = torch.empty(groups, ks * ks * c, device=x.device)
    args: tuple[Any, ...] = (dy, x, weight, s if v is None else v, dx, s, dw)
    args += (n * wo, h, w, ho, wo, c, groups)
    flags = {"KS": ks, "STRIDE": stride, "NORM": int(v is not None)}
    flags |= {"DATA": int(data), "WEIGHT": int(weights)}
    grid = lambda t: (triton.cdiv(c, t["BC"]), groups)  # noqa: E731
    launcher.run(depthwise_backward, grid, args, BACKWARD_TILES, **flags)
    return dx, s, dw
