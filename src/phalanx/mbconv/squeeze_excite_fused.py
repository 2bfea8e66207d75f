"""phalanx.mbconv.squeeze_excite as Triton kernels: its small matrix products, in float32."""
# ruff: noqa: PLR0913, PLR0917  (kernels take sizes one by one)
# mypy: disable-error-code="no-untyped-def,assignment"

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.choices import CHOICES, make_tiles
from phalanx.kernels.image_layout import new_floats
from phalanx.kernels.norm_finish_fused import store_backward_vectors
from phalanx.mbconv.activation_fused import next_power_of_2, sigmoid

# the last of both are for wide blocks on GPUs with little shared memory, such as an L4
_TILES = make_tiles("BI BC BK", (16, 64, 64, 4, 2), (16, 64, 64, 4, 1))
_BACK_TILES = make_tiles("BI BC BK", (16, 64, 64, 4, 2), (16, 128, 128, 4, 1), (16, 64, 64, 4, 1))
_WEIGHT_TILES = make_tiles("BI BC", (64, 16, 4, 1))


@triton.jit
def _load_plane(t, n, c, N, C, PARTS: tl.constexpr):
    """One plane of sums for images n and channels c, with its parts added up."""
    ok, offsets = (n < N)[:, None] & (c < C)[None, :], n[:, None] * C + c[None, :]
    value = tl.load(t + offsets, mask=ok, other=0.0)
    for part in tl.static_range(1, PARTS):
        value += tl.load(t + part * N * C + offsets, mask=ok, other=0.0)
    return value


@triton.jit
def _load_matrix(w, row, column, ROWS, COLUMNS):
    """A tile of a matrix as float32, zero beyond its edges."""
    ok = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    value = tl.load(w + row[:, None] * COLUMNS + column[None, :], mask=ok, other=0.0)
    return value.to(tl.float32)


@triton.jit
def _multiply(a, b):
    """a b in float32: plain TF32 truncates, an error with the same sign for every image."""
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit(do_not_specialize=["N", "PIXELS", "C8", "R"])
def _excite(
    t, w1, b1, w2, b2, mean, hidden, gate, N, PIXELS, C8, R,
    PARTS: tl.constexpr, RP: tl.constexpr, BI: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """gate = sigmoid(w2 silu(w1 mean + b1) + b2) for BI images and BC channels."""
    C = C8 * 8
    n, r = tl.program_id(0) * BI + tl.arange(0, BI), tl.arange(0, RP)
    inner = tl.zeros((BI, RP), tl.float32)
    for k0 in range(0, C, BK):
        k = k0 + tl.arange(0, BK)
        value = _load_plane(t, n, k, N, C, PARTS) / PIXELS
        if tl.program_id(1) == 0:
            ok = (n < N)[:, None] & (k < C)[None, :]
            tl.store(mean + n[:, None] * C + k[None, :], value, mask=ok)
        inner += _multiply(value, tl.trans(_load_matrix(w1, r, k, R, C)))
    inner += tl.load(b1 + r, mask=r < R, other=0.0).to(tl.float32)[None, :]
    if tl.program_id(1) == 0:
        ok = (n < N)[:, None] & (r < R)[None, :]
        tl.store(hidden + n[:, None] * R + r[None, :], inner, mask=ok)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    outer = _multiply(inner * sigmoid(inner), tl.trans(_load_matrix(w2, c, r, C, R)))
    outer += tl.load(b2 + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    ok = (n < N)[:, None] & (c < C)[None, :]
    tl.store(gate + n[:, None] * C + c[None, :], sigmoid(outer), mask=ok)


@triton.jit(do_not_specialize=["N", "PIXELS", "C8", "R"])
def _excite_back(
    t, w1, w2, hidden, gate, dhidden, dmean, N, PIXELS, C8, R,
    PARTS: tl.constexpr, RP: tl.constexpr, BI: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The gradient of hidden, and dmean: the mean's gradient divided by the pixels."""
    C = C8 * 8
    n, r = tl.program_id(0) * BI + tl.arange(0, BI), tl.arange(0, RP)
    d = tl.zeros((BI, RP), tl.float32)
    for k0 in range(0, C, BK):
        k = k0 + tl.arange(0, BK)
        value = _load_matrix(gate, n, k, N, C)
        value = _load_plane(t, n, k, N, C, PARTS) * value * (1 - value)
        d += _multiply(value, _load_matrix(w2, k, r, C, R))
    inner = _load_matrix(hidden, n, r, N, R)
    p = sigmoid(inner)
    d *= p * (1 + inner * (1 - p))
    if tl.program_id(1) == 0:
        ok = (n < N)[:, None] & (r < R)[None, :]
        tl.store(dhidden + n[:, None] * R + r[None, :], d, mask=ok)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    ok = (n < N)[:, None] & (c < C)[None, :]
    share = _multiply(d, _load_matrix(w1, r, c, R, C)) / PIXELS
    tl.store(dmean + n[:, None] * C + c[None, :], share, mask=ok)


@triton.jit
def _sum_planes(t, factor, n, c, N, C, FIRST: tl.constexpr, PARTS: tl.constexpr):
    """Contributions of the images n to the norm's two sums, from two planes."""
    t += FIRST * PARTS * N * C
    total = tl.sum(factor * _load_plane(t, n, c, N, C, PARTS), 0)
    return total, tl.sum(factor * _load_plane(t + PARTS * N * C, n, c, N, C, PARTS), 0)


@triton.jit(do_not_specialize=["M", "N", "C8", "R"])
def _excite_back_weights(
    back, mean, hidden, gate, dhidden, dmean, v, u, dw1, db1, dw2, db2,
    M, N, C8, R,
    PARTS: tl.constexpr, RP: tl.constexpr, BI: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Weight gradients of a squeeze-excite, and the backward vectors of the preceding norm."""
    C = C8 * 8
    c, r = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, RP)
    okc = c < C
    d1, d2 = tl.zeros((BC, RP), tl.float32), tl.zeros((BC, RP), tl.float32)
    e1, e2 = tl.zeros((RP,), tl.float32), tl.zeros((BC,), tl.float32)
    dbeta, product = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
    for n0 in range(0, N, BI):
        n = n0 + tl.arange(0, BI)
        g = _load_matrix(gate, n, c, N, C)
        far = _sum_planes(back, _load_matrix(dmean, n, c, N, C), n, c, N, C, 3, PARTS)
        near = _sum_planes(back, g, n, c, N, C, 1, PARTS)
        dbeta += far[0] + near[0]
        product += far[1] + near[1]
        outer = _load_plane(back, n, c, N, C, PARTS) * g * (1 - g)
        inner, dinner = _load_matrix(hidden, n, r, N, R), _load_matrix(dhidden, n, r, N, R)
        d2 += _multiply(tl.trans(outer), inner * sigmoid(inner))
        d1 += _multiply(tl.trans(_load_matrix(mean, n, c, N, C)), dinner)
        e2 += tl.sum(outer, 0)
        e1 += tl.sum(dinner, 0)
    store_backward_vectors(v, u, c, C, M, dbeta, product, False)
    ok = okc[:, None] & (r < R)[None, :]
    tl.store(dw1 + r[None, :] * C + c[:, None], d1, mask=ok)
    tl.store(dw2 + c[:, None] * R + r[None, :], d2, mask=ok)
    tl.store(db2 + c, e2, mask=okc)
    if tl.program_id(0) == 0:
        tl.store(db1 + r, e1, mask=r < R)


@triton.jit(do_not_specialize=["M", "N", "C8"])
def _mean_back(
    slopes, dmean, v, u, M, N, C8,
    PARTS: tl.constexpr, BI: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The backward vectors of a norm whose output's gradient is dmean * silu'(z)."""
    C = C8 * 8
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    dbeta, product = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
    for n0 in range(0, N, BI):
        n = n0 + tl.arange(0, BI)
        more = _sum_planes(slopes, _load_matrix(dmean, n, c, N, C), n, c, N, C, 0, PARTS)
        dbeta += more[0]
        product += more[1]
    store_backward_vectors(v, u, c, C, M, dbeta, product, False)


def _run_products(kernel: Any, sums: Tensor, args: tuple[Any, ...], pixels: int, r: int) -> None:
    """Launch over tiles of images and channels."""
    tiles = _TILES if kernel is _excite else _BACK_TILES
    _, parts, n, c = sums.shape
    CHOICES.run(
        kernel,
        lambda t: (triton.cdiv(n, t["BI"]), triton.cdiv(c, t["BC"])),
        (sums, *args, n, pixels, c // 8, r),
        tiles,
        PARTS=parts,
        RP=next_power_of_2(r),
    )


def excite(sums: Tensor, weights: list[Tensor], pixels: int) -> tuple[Tensor, Tensor, Tensor]:
    """`phalanx.mbconv.squeeze_excite.excite`."""
    (_, _, n, c), r = sums.shape, len(weights[1])
    mean, hidden, gate = (new_floats(n, width, like=sums) for width in (c, r, c))
    _run_products(_excite, sums, (*weights, mean, hidden, gate), pixels, r)
    return mean, hidden, gate


def excite_back(
    back: Tensor, weights: list[Tensor], hidden: Tensor, gate: Tensor, pixels: int
) -> tuple[Tensor, Tensor]:
    """`phalanx.mbconv.squeeze_excite.excite_back`."""
    dhidden, dmean = new_floats(*hidden.shape, like=back), new_floats(*gate.shape, like=back)
    args = (*weights, hidden, gate, dhidden, dmean)
    _run_products(_excite_back, back, args, pixels, hidden.shape[1])
    return dhidden, dmean


def finish_excite_back(
    back: Tensor, excited: list[Tensor], dmean: Tensor, v: Tensor, count: int
) -> tuple[Tensor, ...]:
    """`phalanx.mbconv.squeeze_excite.finish_excite_back`."""
    (_, parts, n, c), r = back.shape, excited[1].shape[1]
    shapes = ((5, c), (r, c), (r,), (c, r), (c,))
    out = tuple(new_floats(*shape, like=v) for shape in shapes)
    args = (back, *excited, dmean, v, *out, count, n, c // 8, r)
    flags = {"PARTS": parts, "RP": next_power_of_2(r)}
    grid = lambda t: (triton.cdiv(c, t["BC"]),)  # noqa: E731
    CHOICES.run(_excite_back_weights, grid, args, _WEIGHT_TILES, **flags)
    return out


def finish_mean_back(slopes: Tensor, dmean: Tensor, v: Tensor, count: int) -> Tensor:
    """`phalanx.mbconv.squeeze_excite.finish_mean_back`."""
    _, parts, n, c = slopes.shape
    u = new_floats(5, c, like=v)
    args = (slopes, dmean, v, u, count, n, c // 8)
    grid = lambda t: (triton.cdiv(c, t["BC"]),)  # noqa: E731
    CHOICES.run(_mean_back, grid, args, _WEIGHT_TILES, PARTS=parts)
    return u
