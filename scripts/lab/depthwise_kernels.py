"""Triton kernels of depthwise convolutions over channels_last images, with the norm around them.

A program walks down a strip of BW output columns, which may span images, for BC channels. Each row
is read once for each column of the window; what it adds to the output rows above and below stays in
registers. Forward, the input may be the raw output of the convolution before, whose norm and SiLU
are computed on the load (NORM), and the sums for the next norm come with the result. Backward, the
input always is raw, and one pass over the gradient yields both the input's (DATA; through SiLU, and
its sums for that norm's backward come along) and the weights' (WEIGHT).

The input's width is STRIDE times the output's, weights are [KS * KS, C], and vectors lie in rows as
in step_kernels.py. Offsets are 32 bits wide.
"""
# ruff: noqa: PLR0913, PLR0915, PLR0917, C901, PLR0912, RUF005  (kernels take sizes one by one)

import os
from typing import Any

import torch
import triton
import triton.language as tl
from step_kernels import INTERPRETED, launcher, make_tiles
from torch import Tensor

PLAIN_DIVISION = tl.constexpr(INTERPRETED)
BY_TANH = tl.constexpr(os.environ.get("LAB_SIGMOID") == "tanh")
FORWARD_TILES = make_tiles(
    "BW BC",
    *((16, 32, 4, 1), (8, 64, 4, 1), (16, 16, 4, 1), (8, 32, 4, 1), (32, 32, 4, 1)),
)
BACKWARD_TILES = make_tiles("BW BC", (16, 16, 4, 1), (8, 32, 4, 1), (16, 32, 4, 1), (8, 16, 4, 1))
PROGRAMS = 132 * 12  # that share the strips


@triton.jit
def sigmoid(z):
    """1 / (1 + exp(-z)) by the approximate reciprocal, or, cheaper, by the approximate tanh."""
    if BY_TANH:
        half = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [0.5 * z], tl.float32, is_pure=True, pack=1
        )
        return 0.5 + 0.5 * half
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
def load_taps(w, c, C, COUNT: tl.constexpr):
    """The window's weights, to stay in registers."""
    taps = ()
    for k in tl.static_range(COUNT):
        taps = taps + (tl.load(w + k * C + c, mask=c < C, other=0.0).to(tl.float32)[None, :],)
    return taps


@triton.jit
def load_row(x, o, masks, on, C, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Raw tiles of COUNT columns from FIRST on, C apart; zero where not masks or not `on`."""
    tiles = ()
    for j in tl.static_range(COUNT):
        place = x + o + (FIRST + j) * C
        tiles = tiles + (tl.load(place, mask=masks[FIRST + j] & on, other=0.0),)
    return tiles


@triton.jit
def depthwise_forward(
    x, w, v, y, s, COLUMNS, H, W, HO, WO, C, G,
    KS: tl.constexpr, STRIDE: tl.constexpr, NORM: tl.constexpr, SUMS: tl.constexpr,
    BW: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y = the convolution of x; s [2, G, C] gets the sums of y and y * y, one row a program.

    The rows that the next step needs are asked for before this step's are used.
    """
    PAD: tl.constexpr = KS // 2
    LOW: tl.constexpr = PAD // STRIDE  # output rows under way above that of the input row
    ROWS: tl.constexpr = LOW + 1 + (STRIDE - 1 + PAD) // STRIDE
    c, g = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1)
    okc, scale, shift = (c < C)[None, :], 1.0, 0.0
    if NORM:
        scale = tl.load(v + 2 * C + c, mask=c < C, other=0.0)[None, :]
        shift = tl.load(v + 3 * C + c, mask=c < C, other=0.0)[None, :]
    taps = load_taps(w, c, C, KS * KS)
    total, square = tl.zeros((BW, BC), tl.float32), tl.zeros((BW, BC), tl.float32)
    for tile in range(g, tl.cdiv(COLUMNS, BW), G):
        m = tile * BW + tl.arange(0, BW)
        n, column = m // WO, m % WO
        place = (n * H * W + column * STRIDE - PAD)[:, None] * C + c[None, :]
        out = (n * HO * WO + column)[:, None] * C + c[None, :]
        inside, masks = (m < COLUMNS)[:, None] & okc, ()
        for j in tl.static_range(KS):
            at = column * STRIDE + j - PAD
            masks = masks + (inside & ((at >= 0) & (at < W))[:, None],)
        acc = make_zeros(ROWS, BW, BC)
        ahead = ()
        for below in tl.static_range(STRIDE):
            ahead = ahead + load_row(x, place + below * W * C, masks, below < H, C, 0, KS)
        for h in range(0, HO + LOW):
            now, ahead = ahead, ()
            for below in tl.static_range(STRIDE):
                r = (h + 1) * STRIDE + below
                ahead = ahead + load_row(x, place + r * W * C, masks, r < H, C, 0, KS)
            for below in tl.static_range(STRIDE):
                for j in tl.static_range(KS):
                    value = now[below * KS + j].to(tl.float32)
                    if NORM:
                        z = value * scale + shift
                        value = tl.where(masks[j] & (h < HO), z * sigmoid(z), 0.0)
                    for i in tl.static_range(KS):
                        if (below + PAD - i) % STRIDE == 0:
                            more = value * taps[i * KS + j]
                            acc = add_to(acc, (below + PAD - i) // STRIDE + LOW, more)
            row = h - LOW
            ok = inside & (row >= 0)
            result = acc[0].to(y.dtype.element_ty)
            tl.store(y + out + row * WO * C, result, mask=ok)
            if SUMS:
                exact = tl.where(ok, result.to(tl.float32), 0.0)
                total += exact
                square += exact * exact
            acc = acc[1:] + make_zeros(1, BW, BC)
    if SUMS:
        tl.store(s + g * C + c, tl.sum(total, 0), mask=c < C)
        tl.store(s + (G + g) * C + c, tl.sum(square, 0), mask=c < C)


@triton.jit
def load_square(x, o, inside, r, H, W, C, STRIDE: tl.constexpr):
    """Raw tiles of STRIDE rows from r on, STRIDE columns each."""
    tiles = ()
    for below in tl.static_range(STRIDE):
        for q in tl.static_range(STRIDE):
            ok = inside & (r + below >= 0) & (r + below < H)
            tiles = tiles + (tl.load(x + o + ((r + below) * W + q) * C, mask=ok, other=0.0),)
    return tiles


@triton.jit
def depthwise_backward(
    dy, x, w, v, dx, s, dw, COLUMNS, H, W, HO, WO, C, G,
    KS: tl.constexpr, STRIDE: tl.constexpr, DATA: tl.constexpr, WEIGHT: tl.constexpr,
    BW: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dx from dy behind norm and SiLU, its sums s [2, G, C], partial weights dw [G, KS * KS, C].

    The window is the KS input rows that row h of dy reaches, by STRIDE columns for each of dy's. A
    row's activation and slope are computed once, when it enters; its gradient is complete when it
    leaves. What the next step needs is asked for before this step's rows are used.
    """
    PAD: tl.constexpr = KS // 2
    NEW: tl.constexpr = STRIDE * STRIDE  # tiles that enter and leave the window with each row
    OLD: tl.constexpr = (KS - STRIDE) * STRIDE
    LEFT: tl.constexpr = STRIDE - 1  # of dy's columns around, the first that is reached
    REACH: tl.constexpr = (KS + STRIDE - 1) // STRIDE
    ENTER: tl.constexpr = PAD - STRIDE + 1  # the first row that enters, counted from STRIDE * h
    c, g = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1)
    okc = (c < C)[None, :]
    scale = tl.load(v + 2 * C + c, mask=c < C, other=0.0)[None, :]
    shift = tl.load(v + 3 * C + c, mask=c < C, other=0.0)[None, :]
    taps = load_taps(w, c, C, KS * KS * DATA)
    dtaps = make_zeros(KS * KS * WEIGHT, BW, BC)
    total, product = tl.zeros((BW, BC), tl.float32), tl.zeros((BW, BC), tl.float32)
    for tile in range(g, tl.cdiv(COLUMNS, BW), G):
        m = tile * BW + tl.arange(0, BW)
        n, column = m // WO, m % WO
        inside, masks = (m < COLUMNS)[:, None] & okc, ()
        for t in tl.static_range(KS):
            at = column + t - PAD
            masks = masks + (inside & ((at >= 0) & (at < WO))[:, None],)
        place = (n * HO * WO + column - PAD)[:, None] * C + c[None, :]
        wide = (n * H * W + column * STRIDE)[:, None] * C + c[None, :]
        acts, slopes = make_zeros(OLD * WEIGHT, BW, BC), make_zeros(OLD * DATA, BW, BC)
        raws = make_zeros(OLD * DATA, BW, BC)
        grads = make_zeros(KS * STRIDE * DATA, BW, BC)
        first = -(PAD // STRIDE)
        ahead = load_row(dy, place + first * WO * C, masks, first >= 0, C, LEFT, REACH)
        fresh = load_square(x, wide, inside, first * STRIDE + ENTER, H, W, C, STRIDE)
        for h in range(first, HO + (PAD + STRIDE - 1) // STRIDE):
            now, entered = ahead, fresh
            on = (h + 1 >= 0) & (h + 1 < HO)
            ahead = load_row(dy, place + (h + 1) * WO * C, masks, on, C, LEFT, REACH)
            fresh = load_square(x, wide, inside, (h + 1) * STRIDE + ENTER, H, W, C, STRIDE)
            for k in tl.static_range(NEW):
                raw = entered[k].to(tl.float32)
                z = raw * scale + shift
                p = sigmoid(z)
                act = z * p
                if WEIGHT:  # beyond the image, dy is masked where this column would count
                    r = h * STRIDE + ENTER + k // STRIDE
                    acts = acts + (tl.where((r >= 0) & (r < H), act, 0.0),)
                if DATA:
                    slopes, raws = slopes + (p + act * (1 - p),), raws + (raw,)
            for t in tl.static_range(REACH):
                value = now[t].to(tl.float32)
                for q in tl.static_range(STRIDE):
                    # the window's column is q + PAD - STRIDE * (t + LEFT - PAD)
                    if (q + PAD >= STRIDE * (t + LEFT - PAD)) & (
                        q + PAD - STRIDE * (t + LEFT - PAD) < KS
                    ):
                        for i in tl.static_range(KS):
                            if DATA:
                                more = value * taps[i * KS + q + PAD - STRIDE * (t + LEFT - PAD)]
                                grads = add_to(grads, i * STRIDE + q, more)
                            if WEIGHT:
                                more = value * acts[i * STRIDE + q]
                                dtaps = add_to(
                                    dtaps, i * KS + q + PAD - STRIDE * (t + LEFT - PAD), more
                                )
            if DATA:
                for k in tl.static_range(NEW):
                    r = h * STRIDE - PAD + k // STRIDE
                    ok = inside & (r >= 0) & (r < H)
                    d = (grads[k] * slopes[k]).to(dx.dtype.element_ty)
                    tl.store(dx + wide + (r * W + k % STRIDE) * C, d, mask=ok)
                    exact = tl.where(ok, d.to(tl.float32), 0.0)
                    total += exact
                    product += exact * raws[k]
                grads = grads[NEW:] + make_zeros(NEW, BW, BC)
                slopes, raws = slopes[NEW:], raws[NEW:]
            if WEIGHT:
                acts = acts[NEW:]
    if DATA:
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
    dy: Tensor, x: Tensor, weight: Tensor, v: Tensor, stride: int,
    parts: tuple[bool, bool] = (True, True),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradient of the input behind norm and SiLU, its sums, partial weight gradients."""
    (n, h, w, c), ks = x.shape, weight.shape[0]
    ho, wo = dy.shape[1:3]
    groups = count_strips(n * wo, c)
    data, weights = parts
    dx, s = torch.empty_like(x), torch.empty(2, groups, c, device=x.device)
    dw = torch.empty(groups, ks * ks * c, device=x.device)
    args: tuple[Any, ...] = (dy, x, weight, v, dx, s, dw, n * wo, h, w, ho, wo, c, groups)
    flags = {"KS": ks, "STRIDE": stride, "DATA": int(data), "WEIGHT": int(weights)}
    grid = lambda t: (triton.cdiv(c, t["BC"]), groups)  # noqa: E731
    launcher.run(depthwise_backward, grid, args, BACKWARD_TILES, **flags)
    return dx, s, dw
