"""phalanx.mbconv.depthwise.convolve as a Triton kernel.

A program walks down a strip of BW output columns, which may span images, for BC channels. Each row
is read once for each column of the window; what it adds to the output rows above and below stays in
registers. Offsets are 32 bits wide.
"""
# ruff: noqa: PLR0913, PLR0917, RUF005  (kernels take sizes one by one; tuples are added in Triton)
# mypy: disable-error-code="no-untyped-def,assignment"

import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.choices import CHOICES, make_tiles
from phalanx.mbconv.activation_fused import fitting, load_affine, next_power, sigmoid
from phalanx.mbconv.depthwise import count_strips, reduced
from phalanx.mbconv.image_layout import new_floats, new_image

_TILES = make_tiles(
    "BW BC", (16, 32, 4, 1), (8, 64, 4, 1), (16, 16, 4, 1), (8, 32, 4, 1), (32, 32, 4, 1)
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
        taps = taps + (tl.load(w + c * COUNT + k, mask=c < C, other=0.0).to(tl.float32)[None, :],)
    return taps


@triton.jit
def find_columns(column, inside, W, STRIDE: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Masks of COUNT columns from STRIDE * column + FIRST on: within the image."""
    masks = ()
    for j in tl.static_range(COUNT):
        at = column * STRIDE + j + FIRST
        masks = masks + (inside & ((at >= 0) & (at < W))[:, None],)
    return masks


@triton.jit
def load_row(x, o, masks, on, C, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Raw tiles of COUNT columns from FIRST on, C apart; zero where not masks or not `on`."""
    tiles = ()
    for j in tl.static_range(COUNT):
        place = x + o + (FIRST + j) * C
        tiles = tiles + (tl.load(place, mask=masks[FIRST + j] & on, other=0.0),)
    return tiles


@triton.jit
def _add_column(
    acc, value, taps, J: tl.constexpr, BELOW: tl.constexpr, KS: tl.constexpr, STRIDE: tl.constexpr
):
    """acc with what one column of one row adds to the output rows that it reaches."""
    PAD: tl.constexpr = KS // 2
    for i in tl.static_range(KS):
        if (BELOW + PAD - i) % STRIDE == 0:
            more = value * taps[i * KS + J]
            acc = add_to(acc, (BELOW + PAD - i) // STRIDE + PAD // STRIDE, more)
    return acc


@triton.jit
def _add_rows(
    acc, now, taps, masks, scale, shift, r, H,
    KS: tl.constexpr, STRIDE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """acc with what STRIDE rows of the input from r on add."""
    for k in tl.static_range(STRIDE * KS):
        value = now[k].to(tl.float32)
        if NORM:
            z = value * scale + shift
            value = tl.where(masks[k % KS] & (r + k // KS < H), z * sigmoid(z), 0.0)
        acc = _add_column(acc, value, taps, k % KS, k // KS, KS, STRIDE)
    return acc


@triton.jit
def _load_rows(x, place, masks, r, H, W, C, KS: tl.constexpr, STRIDE: tl.constexpr):
    """Raw tiles of STRIDE rows from r on."""
    tiles = ()
    for below in tl.static_range(STRIDE):
        at = r + below
        tiles = tiles + load_row(x, place + at * W * C, masks, at < H, C, 0, KS)
    return tiles


@triton.jit(do_not_specialize=["COLUMNS", "H", "W", "HO", "WO", "C8", "G"])
def _depthwise_forward(
    x, w, v, y, s, COLUMNS, H, W, HO, WO, C8, G,
    KS: tl.constexpr, STRIDE: tl.constexpr, NORM: tl.constexpr,
    BW: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y = the convolution of x; s [2, G, C] gets the sums of y and y * y, one row a program.

    The rows that the next step needs are asked for before this step's are used.
    """
    PAD: tl.constexpr = KS // 2
    LOW: tl.constexpr = PAD // STRIDE  # output rows under way above that of the input row
    ROWS: tl.constexpr = LOW + 1 + (STRIDE - 1 + PAD) // STRIDE
    C = C8 * 8
    c, g = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1)
    okc, scale, shift = (c < C)[None, :], 1.0, 0.0
    if NORM:
        scale, shift = load_affine(v, c, C, c < C)
    taps = load_taps(w, c, C, KS * KS)
    total, square = tl.zeros((BW, BC), tl.float32), tl.zeros((BW, BC), tl.float32)
    for tile in range(g, tl.cdiv(COLUMNS, BW), G):
        m = tile * BW + tl.arange(0, BW)
        n, column = m // WO, m % WO
        place = (n * H * W + column * STRIDE - PAD)[:, None] * C + c[None, :]
        out, inside = (n * HO * WO + column)[:, None] * C + c[None, :], (m < COLUMNS)[:, None] & okc
        masks = find_columns(column, inside, W, STRIDE, -PAD, KS)
        acc = make_zeros(ROWS, BW, BC)
        ahead = _load_rows(x, place, masks, 0, H, W, C, KS, STRIDE)
        for h in range(0, HO + LOW):
            now, ahead = ahead, _load_rows(x, place, masks, (h + 1) * STRIDE, H, W, C, KS, STRIDE)
            acc = _add_rows(acc, now, taps, masks, scale, shift, h * STRIDE, H, KS, STRIDE, NORM)
            row = h - LOW
            ok = inside & (row >= 0)
            result = acc[0].to(y.dtype.element_ty)
            tl.store(y + out + row * WO * C, result, mask=ok)
            exact = tl.where(ok, result.to(tl.float32), 0.0)
            total += exact
            square += exact * exact
            acc = acc[1:] + make_zeros(1, BW, BC)
    tl.store(s + g * C + c, tl.sum(total, 0), mask=c < C)
    tl.store(s + (G + g) * C + c, tl.sum(square, 0), mask=c < C)


def convolve(x: Tensor, weight: Tensor, v: Tensor | None, stride: int) -> tuple[Tensor, Tensor]:
    """`phalanx.mbconv.depthwise.convolve`."""
    n, c, h, w = x.shape
    ho, wo = reduced(h, stride), reduced(w, stride)
    groups = count_strips(n * wo, c)
    y, s = new_image(x, c, ho, wo), new_floats(2, groups, c, like=x)
    args = (x, weight, s if v is None else v, y, s, n * wo, h, w, ho, wo, c // 8, groups)
    flags = {"KS": weight.shape[2], "STRIDE": stride, "NORM": int(v is not None)}
    tiles = fitting(_TILES, BC=next_power(c))
    grid = lambda t: (triton.cdiv(c, t["BC"]), groups)  # noqa: E731
    CHOICES.run(_depthwise_forward, grid, args, tiles, **flags)
    return y, s
