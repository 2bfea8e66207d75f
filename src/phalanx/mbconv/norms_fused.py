"""phalanx.mbconv.norms as Triton kernels: passes over whole images.

Images are matrices [M, C] with C contiguous and a multiple of eight, passed as C // 8 so that
loads stay 16 bytes wide. Offsets are 32-bit.
"""
# ruff: noqa: PLR0913, PLR0917  (kernels take sizes one by one)
# mypy: disable-error-code="no-untyped-def,assignment"

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.choices import CHOICES, Tile, make_tiles
from phalanx.kernels.image_layout import count_row_programs, count_rows, new_floats
from phalanx.mbconv.activation_fused import (
    load_affine,
    load_drop_path_factor,
    next_power_of_2,
    select_tiles,
    silu_and_derivative,
    store_sums,
)

_SUM_TILES = make_tiles("BM BC", (32, 64, 4, 1), (64, 32, 4, 1))
_TILES = make_tiles("BM BC", (32, 64, 4, 1), (64, 32, 4, 1), (16, 128, 4, 1))


@triton.jit(do_not_specialize=["M", "PIXELS", "C8", "G"])
def _reduce_rows(
    dy, x, v, noise, ds, s, rate, M, PIXELS, C8, G,
    BACK: tl.constexpr, SILU: tl.constexpr, NOISE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Partial sums s [2, G, C] of x and x * x; BACK: of the gradient and gradient * x.

    SILU: dy is the gradient of SiLU's output; that of its input, ds, is stored.
    """
    C = C8 * 8
    c, g = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1)
    okc = c < C
    if SILU:
        scale, shift = load_affine(v, c, C, okc)
    total, product = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    for r in range(g * BM, M, G * BM):
        m = r + tl.arange(0, BM)
        o, ok = m[:, None] * C + c[None, :], (m < M)[:, None] & okc[None, :]
        value = tl.load(x + o, mask=ok, other=0.0).to(tl.float32)
        d = value
        if BACK:
            d = tl.load(dy + o, mask=ok, other=0.0).to(tl.float32)
        if SILU:
            _, slope = silu_and_derivative(value, scale, shift)
            rounded = (d * slope).to(ds.dtype.element_ty)
            tl.store(ds + o, rounded, mask=ok)
            d = rounded.to(tl.float32)
        if NOISE:
            d *= load_drop_path_factor(noise, rate, m // PIXELS, m < M)
        total += d
        product += d * value
    store_sums(s, g, c, G, C, total, product)


@triton.jit(do_not_specialize=["M", "PIXELS", "C8"])
def _apply_rows(
    x, v, noise, gate, add, y, rate, M, PIXELS, C8,
    SILU: tl.constexpr, GATE: tl.constexpr, NOISE: tl.constexpr, ADD: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """norm(x), with SiLU or without, times gate or drop-path's factor, plus `add`."""
    C = C8 * 8
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    okc, n = c < C, m // PIXELS
    o, ok = m[:, None] * C + c[None, :], (m < M)[:, None] & okc[None, :]
    value = tl.load(x + o, mask=ok, other=0.0).to(tl.float32)
    scale, shift = load_affine(v, c, C, okc)
    if SILU:
        value, _ = silu_and_derivative(value, scale, shift)
    else:
        value = value * scale + shift
    if NOISE:
        value *= load_drop_path_factor(noise, rate, n, m < M)
    if GATE:
        value *= tl.load(gate + n[:, None] * C + c[None, :], mask=ok, other=0.0)
    if ADD:
        value += tl.load(add + o, mask=ok, other=0.0).to(tl.float32)
    tl.store(y + o, value.to(y.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["M", "PIXELS", "C8"])
def _apply_rows_back(
    dy, x, v, u, noise, gate, dmean, dx, rate, M, PIXELS, C8,
    SILU: tl.constexpr, GATE: tl.constexpr, MEAN: tl.constexpr, NOISE: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The gradient of a norm's input. MEAN without GATE: from dmean only."""
    C = C8 * 8
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    okc, n = c < C, m // PIXELS
    o, ok = m[:, None] * C + c[None, :], (m < M)[:, None] & okc[None, :]
    offsets = n[:, None] * C + c[None, :]
    value = tl.load(x + o, mask=ok, other=0.0).to(tl.float32)
    if MEAN:
        d = tl.load(dmean + offsets, mask=ok, other=0.0)
        if GATE:
            direct = tl.load(dy + o, mask=ok, other=0.0).to(tl.float32)
            d += direct * tl.load(gate + offsets, mask=ok, other=0.0)
    else:
        d = tl.load(dy + o, mask=ok, other=0.0).to(tl.float32)
    if NOISE:
        d *= load_drop_path_factor(noise, rate, n, m < M)
    if SILU:
        scale, shift = load_affine(v, c, C, okc)
        _, slope = silu_and_derivative(value, scale, shift)
        d *= slope
    d = d * tl.load(u + 2 * C + c, mask=okc, other=0.0)[None, :]
    d += value * tl.load(u + 3 * C + c, mask=okc, other=0.0)[None, :]
    d += tl.load(u + 4 * C + c, mask=okc, other=0.0)[None, :]
    tl.store(dx + o, d.to(dx.dtype.element_ty), mask=ok)


def _find_sizes(x: Tensor) -> tuple[int, int, int]:
    """Rows, pixels per image, and an eighth of the channels."""
    return count_rows(x), x.shape[2] * x.shape[3], x.shape[1] // 8


def _make_row_grid(x: Tensor) -> Callable[[Tile], tuple[int, ...]]:
    """The grid with one program per tile."""
    return lambda t: (triton.cdiv(count_rows(x), t["BM"]), triton.cdiv(x.shape[1], t["BC"]))


def _make_flags(**operands: Tensor | None) -> dict[str, int]:
    """A kernel's flags: whether each operand is given.

    The kernel reads nothing from one that is not, so that any tensor may take its place.
    """
    return {name: int(tensor is not None) for name, tensor in operands.items()}


def _reduce(
    x: Tensor,
    dy: Tensor | None,
    *,
    v: Tensor | None = None,
    ds: Tensor | None = None,
    noise: Tensor | None = None,
    rate: float = 0.0,
) -> Tensor:
    """Partial sums of x, or of the gradient dy.

    With v, dy is the gradient of SiLU's output; that of its input is summed, and stored in ds.
    """
    c = x.shape[1]
    programs = count_row_programs(count_rows(x), c)
    s = new_floats(2, programs, c, like=x)
    flags = _make_flags(BACK=dy, SILU=v, NOISE=noise)
    v, noise, ds = (s if tensor is None else tensor for tensor in (v, noise, ds))
    args = (x if dy is None else dy, x, v, noise, ds, s, rate, *_find_sizes(x), programs)
    tiles = select_tiles(_SUM_TILES, BC=next_power_of_2(c))
    CHOICES.run(_reduce_rows, lambda t: (triton.cdiv(c, t["BC"]), programs), args, tiles, **flags)
    return s


def sum_channels(x: Tensor) -> Tensor:
    """`phalanx.mbconv.norms.sum_channels`."""
    return _reduce(x, None)


def sum_gradients(dy: Tensor, x: Tensor, noise: Tensor | None, rate: float) -> Tensor:
    """`phalanx.mbconv.norms.sum_gradients`."""
    return _reduce(x, dy, noise=noise, rate=rate)


def silu_back(dy: Tensor, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`phalanx.mbconv.norms.silu_back`."""
    ds = torch.empty_like(x)
    return ds, _reduce(x, dy, v=v, ds=ds)


def _apply(
    x: Tensor,
    v: Tensor,
    *,
    silu: bool,
    gate: Tensor | None = None,
    noise: Tensor | None = None,
    rate: float = 0.0,
    add: Tensor | None = None,
) -> Tensor:
    """A norm with what follows it."""
    y = torch.empty_like(x)
    flags = {"SILU": int(silu), **_make_flags(GATE=gate, NOISE=noise, ADD=add)}
    noise, gate = (v if tensor is None else tensor for tensor in (noise, gate))
    args = (x, v, noise, gate, x if add is None else add, y, rate, *_find_sizes(x))
    tiles = select_tiles(_TILES, BC=next_power_of_2(x.shape[1]))
    CHOICES.run(_apply_rows, _make_row_grid(x), args, tiles, **flags)
    return y


def norm_silu(x: Tensor, v: Tensor, gate: Tensor | None) -> Tensor:
    """`phalanx.mbconv.norms.norm_silu`."""
    return _apply(x, v, silu=True, gate=gate)


def norm_add(x: Tensor, v: Tensor, add: Tensor | None, noise: Tensor | None, rate: float) -> Tensor:
    """`phalanx.mbconv.norms.norm_add`."""
    return _apply(x, v, silu=False, noise=noise, rate=rate, add=add)


def _apply_back(
    x: Tensor,
    u: Tensor,
    dy: Tensor | None,
    *,
    v: Tensor | None = None,
    gate: Tensor | None = None,
    dmean: Tensor | None = None,
    noise: Tensor | None = None,
    rate: float = 0.0,
) -> Tensor:
    """The gradient of a norm's input; with v, through the SiLU that follows the norm."""
    dx = torch.empty_like(x)
    flags = _make_flags(SILU=v, GATE=gate, MEAN=dmean, NOISE=noise)
    v, noise, gate, dmean = (u if tensor is None else tensor for tensor in (v, noise, gate, dmean))
    args = (x if dy is None else dy, x, v, u, noise, gate, dmean, dx, rate, *_find_sizes(x))
    tiles = select_tiles(_TILES, BC=next_power_of_2(x.shape[1]))
    CHOICES.run(_apply_rows_back, _make_row_grid(x), args, tiles, **flags)
    return dx


def norm_add_back(dy: Tensor, x: Tensor, u: Tensor, noise: Tensor | None, rate: float) -> Tensor:
    """`phalanx.mbconv.norms.norm_add_back`."""
    return _apply_back(x, u, dy, noise=noise, rate=rate)


def norm_gate_back(
    x: Tensor, v: Tensor, u: Tensor, dmean: Tensor, dy: Tensor | None, gate: Tensor | None
) -> Tensor:
    """`phalanx.mbconv.norms.norm_gate_back`."""
    return _apply_back(x, u, dy, v=v, gate=gate, dmean=dmean)
