"""The passes over pixels of batch norm and group norm, in Triton.

Each reads every tensor once. Sums take two kernels: the programs of the first write partial sums,
and the second adds these up in a fixed order (phalanx.kernels.norm_finish_fused).

Vectors of a batch norm are [rows, C], those of a group norm [rows, images, C]; R is the stride
between rows. For a group norm, axis 2 of the grid is the image and M the pixels of one image; for a
batch norm that axis has length 1 and M counts all pixels. WIDE: offsets need 64 bits.
"""
# ruff: noqa: PLR0913, PLR0917  (kernels take pointers and sizes one by one)
# mypy: disable-error-code="no-untyped-def"

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.choices import CHOICES, Tile, make_tiles

_NARROW_TILES = make_tiles("BM BC", (64, 32, 4, 3), (128, 32, 4, 3))
_TILES = make_tiles("BM BC", (32, 64, 4, 3), (64, 64, 4, 3), (16, 128, 4, 3), (32, 128, 8, 3))
_MULTIPROCESSORS = 132  # of an H100 or H200


# --- shared by the kernels ---


@triton.jit
def find_offsets(m, c, M, C, WIDE: tl.constexpr):
    """Offsets of the pixels m and channels c, and the mask of those in bounds."""
    if WIDE:
        m = m.to(tl.int64)
    return m[:, None] * C + c[None, :], (m < M)[:, None] & (c < C)[None, :]


@triton.jit
def find_first_pixel(pixels):
    """The index of the first pixel of a program's image."""
    return tl.program_id(2).to(tl.int64) * pixels


@triton.jit
def load_row(v, row, c, C, R):
    """One row of a buffer of vectors for a program's image, as [1, channels]."""
    return tl.load(v + row * R + tl.program_id(2) * C + c, mask=c < C, other=0.0)[None, :]


@triton.jit
def _load_factor(factor, m, M, PIXELS):
    """The factor of each pixel's image, as [pixels, 1]."""
    image = tl.program_id(2) + m // PIXELS
    return tl.load(factor + image, mask=m < M, other=0.0).to(tl.float32)[:, None]


@triton.jit
def activate(value, ACT: tl.constexpr):
    """The activation; NaN stays NaN."""
    if (ACT == 1) | (ACT == 3):
        value = tl.where(value < 0, 0.0, value)
    if ACT == 2:
        value = value * tl.sigmoid(value)
    if ACT == 3:
        value = tl.where(value > 6, 6.0, value)
    if ACT == 4:
        value = 0.5 * value * (1 + tl.erf(value * 0.7071067811865476))
    return value


@triton.jit
def activate_back(d, value, ACT: tl.constexpr):
    """The gradient of the activation's input `value`, from that of its output."""
    if ACT == 1:
        d = tl.where(value > 0, d, 0.0)
    if ACT == 2:
        gate = tl.sigmoid(value)
        d = d * gate * (1 + value * (1 - gate))
    if ACT == 3:
        d = tl.where((value > 0) & (value < 6), d, 0.0)
    if ACT == 4:
        density = tl.exp(-0.5 * value * value) * 0.3989422804014327
        d = d * (0.5 * (1 + tl.erf(value * 0.7071067811865476)) + value * density)
    return d


@triton.jit
def _unpack_signs(packed, BM: tl.constexpr, BC: tl.constexpr):
    """The bits packed by phalanx.kernels.batch_norm.pack_signs, as 0 and 1."""
    packed = tl.reshape(packed.to(tl.int32), (BM, BC // 64, 1, 8))
    return tl.reshape((packed >> tl.arange(0, 8)[None, None, :, None]) & 1, (BM, BC))


@triton.jit
def _store_sums(s, first, second, g, c, C, R, G):
    """Store two rows of partial sums."""
    s += tl.program_id(2) * C + c
    tl.store(s + g * R, first, mask=c < C)
    tl.store(s + (G + g) * R, second, mask=c < C)


# --- forward ---


@triton.jit
def _sum_statistics(x, s, M, C, R, G, WIDE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """Partial sums of x and x * x, one row for each of G programs.

    The first pixel is subtracted from x: otherwise the variance, a difference of large numbers,
    would lose precision.
    """
    c, g = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1)
    x += find_first_pixel(M) * C
    first = tl.load(x + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    total, square = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    for r in range(g * BM, M, G * BM):
        o, ok = find_offsets(r + tl.arange(0, BM), c, M, C, WIDE)
        value = tl.load(x + o, mask=ok, other=0.0).to(tl.float32)
        value = tl.where(ok, value - first, 0.0)
        total += value
        square += value * value
    _store_sums(s, tl.sum(total, 0), tl.sum(square, 0), g, c, C, R, G)


@triton.jit
def _apply(
    x, residual, residual_v, factor, v, y, M, C, R, PIXELS,
    ACT: tl.constexpr, LAST: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Normalise, with factor, residual and activation; LAST: the residual is added after it."""
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    o, ok = find_offsets(m, c, M, C, WIDE)
    before = find_first_pixel(M) * C
    value = tl.load(x + before + o, mask=ok, other=0.0).to(tl.float32)
    value = value * load_row(v, 2, c, C, R) + load_row(v, 3, c, C, R)
    if LAST:
        value = activate(value, ACT)
    if factor is not None:
        value *= _load_factor(factor, m, M, PIXELS)
    if residual is not None:
        added = tl.load(residual + before + o, mask=ok, other=0.0).to(tl.float32)
        if residual_v is not None:
            added = added * load_row(residual_v, 2, c, C, R) + load_row(residual_v, 3, c, C, R)
        value += added
    if not LAST:
        value = activate(value, ACT)
    tl.store(y + before + o, value.to(y.dtype.element_ty), mask=ok)


# --- backward ---


@triton.jit
def _sum_gradients(
    dy, second, x, gate, factor, v, out, s, M, C, R, G, PIXELS,
    ACT: tl.constexpr, SIGNS: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Partial sums of the gradient of the activation's input, and of it times x - mean.

    With a gate, which is an output or its packed SIGNS, the gated gradient is stored as well.
    """
    c, g = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1)
    mean, scale = load_row(v, 0, c, C, R), load_row(v, 2, c, C, R)
    shift, before = load_row(v, 3, c, C, R), find_first_pixel(M) * C
    total, product = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    for r in range(g * BM, M, G * BM):
        m = r + tl.arange(0, BM)
        o, ok = find_offsets(m, c, M, C, WIDE)
        d = tl.load(dy + before + o, mask=ok, other=0.0).to(tl.float32)
        value = tl.load(x + before + o, mask=ok, other=0.0).to(tl.float32)
        if second is not None:
            d += tl.load(second + before + o, mask=ok, other=0.0).to(tl.float32)
        if gate is None:
            d = activate_back(d, value * scale + shift, ACT)
        elif SIGNS:
            b = tl.program_id(0) * (BC // 8) + tl.arange(0, BC // 8)
            at, there = find_offsets(m, b, M, C // 8, WIDE)
            packed = tl.load(gate + before // 8 + at, mask=there, other=0)
            d = tl.where(_unpack_signs(packed, BM, BC) > 0, d, 0.0)
        else:
            d = tl.where(tl.load(gate + before + o, mask=ok, other=0.0) > 0, d, 0.0)
        if out is not None:
            tl.store(out + before + o, d.to(out.dtype.element_ty), mask=ok)
        if factor is not None:
            d *= _load_factor(factor, m, M, PIXELS)
        total += d
        product += d * (value - mean)
    _store_sums(s, tl.sum(total, 0), tl.sum(product, 0), g, c, C, R, G)


@triton.jit
def _apply_back(
    dy, x, factor, v, u, dx, M, C, R, PIXELS,
    ACT: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The gradient of a norm's input."""
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    o, ok = find_offsets(m, c, M, C, WIDE)
    before = find_first_pixel(M) * C
    d = tl.load(dy + before + o, mask=ok, other=0.0).to(tl.float32)
    value = tl.load(x + before + o, mask=ok, other=0.0).to(tl.float32)
    if ACT != 0:
        d = activate_back(d, value * load_row(v, 2, c, C, R) + load_row(v, 3, c, C, R), ACT)
    if factor is not None:
        d *= _load_factor(factor, m, M, PIXELS)
    d = d * load_row(u, 2, c, C, R) + value * load_row(u, 3, c, C, R) + load_row(u, 4, c, C, R)
    tl.store(dx + before + o, d.to(dx.dtype.element_ty), mask=ok)


# --- how they are launched ---


@dataclass(frozen=True)
class NormSizes:
    """The sizes of a launch."""

    images: int  # of a group norm; 1 for a batch norm
    pixels: int  # of each
    channels: int
    each: int  # pixels of one image of the batch
    wide: bool  # offsets need 64 bits

    @property
    def row(self) -> int:
        """The stride between rows of vectors."""
        return self.images * self.channels

    @property
    def groups(self) -> int:
        """Programs that share the pixels of a sum."""
        most = _MULTIPROCESSORS * 8 * 64 // max(self.row, 64)
        return max(1, min(most, triton.cdiv(self.pixels, 128)))

    @property
    def tiles(self) -> list[Tile]:
        """Tiles of pixels and channels, none much wider than the layer."""
        if self.channels <= 32:
            return _NARROW_TILES
        return [tile for tile in _TILES if tile["BC"] <= max(64, self.channels)]

    @property
    def by_channels(self) -> Callable[[Tile], tuple[int, ...]]:
        """The grid of a sum over pixels."""
        return lambda t: (triton.cdiv(self.channels, t["BC"]), self.groups, self.images)

    @property
    def by_pixels(self) -> Callable[[Tile], tuple[int, ...]]:
        """The grid of an elementwise pass."""
        return lambda t: (
            triton.cdiv(self.pixels, t["BM"]),
            triton.cdiv(self.channels, t["BC"]),
            self.images,
        )

    def new_sums(self, like: Tensor) -> Tensor:
        """An empty tensor for two rows of partial sums per program."""
        return torch.empty((2, self.groups, self.row), device=like.device)


def find_sizes(x: Tensor, *, by_image: bool) -> NormSizes:
    """The sizes of a launch over x."""
    images, channels = x.shape[:2]
    each = x.numel() // channels // images
    own = images if by_image else 1
    wide = x.numel() // own >= 2**31
    return NormSizes(own, each * images // own, channels, each, wide)


def sum_statistics(x: Tensor, *, by_image: bool) -> Tensor:
    """Partial sums [2, any, C or images * C] of x minus its first pixel, and of the squares."""
    sizes = find_sizes(x, by_image=by_image)
    sums = sizes.new_sums(x)
    args = (x, sums, sizes.pixels, sizes.channels, sizes.row, sizes.groups)
    CHOICES.run(_sum_statistics, sizes.by_channels, args, sizes.tiles, WIDE=sizes.wide)
    return sums


def apply_norm_fused(
    x: Tensor, v: Tensor, activation: int, added: tuple[Tensor | None, ...], *, last: bool
) -> Tensor:
    """The norm's output; added: the residual, the residual's v, and the factor."""
    sizes, y = find_sizes(x, by_image=v.ndim == 3), torch.empty_like(x)
    args = (x, *added, v, y, sizes.pixels, sizes.channels, sizes.row, sizes.each)
    flags = {"ACT": activation, "LAST": last, "WIDE": sizes.wide}
    CHOICES.run(_apply, sizes.by_pixels, args, sizes.tiles, **flags)
    return y


def sum_gradients(
    tensors: tuple[Tensor | None, ...], v: Tensor, out: Tensor | None, activation: int
) -> Tensor:
    """Partial sums for a norm's backward; tensors: dy, second gradient, x, gate, factor."""
    _, _, x, gate, _ = tensors
    assert x is not None
    sizes = find_sizes(x, by_image=v.ndim == 3)
    sums = sizes.new_sums(x)
    numbers = (sizes.pixels, sizes.channels, sizes.row, sizes.groups, sizes.each)
    signs = gate is not None and gate.dtype == torch.uint8
    flags = {"ACT": activation, "SIGNS": signs, "WIDE": sizes.wide}
    args = (*tensors, v, out, sums, *numbers)
    CHOICES.run(_sum_gradients, sizes.by_channels, args, sizes.tiles, **flags)
    return sums


def apply_norm_back_fused(
    dy: Tensor, x: Tensor, v: Tensor, u: Tensor, activation: int, factor: Tensor | None
) -> Tensor:
    """The gradient of a norm's input."""
    sizes, dx = find_sizes(x, by_image=v.ndim == 3), torch.empty_like(x)
    args = (dy, x, factor, v, u, dx, sizes.pixels, sizes.channels, sizes.row, sizes.each)
    flags = {"ACT": activation, "WIDE": sizes.wide}
    CHOICES.run(_apply_back, sizes.by_pixels, args, sizes.tiles, **flags)
    return dx
