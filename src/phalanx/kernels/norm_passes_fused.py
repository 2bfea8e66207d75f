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

from phalanx.kernels import batch_norm
from phalanx.kernels.choices import CHOICES, Tile, make_tiles
from phalanx.kernels.image_layout import MULTIPROCESSORS

_NARROW_TILES = make_tiles("BM BC", (64, 32, 4, 3), (128, 32, 4, 3))
_TILES = make_tiles("BM BC", (32, 64, 4, 3), (64, 64, 4, 3), (16, 128, 4, 3), (32, 128, 8, 3))
# the activations of batch_norm.py as constexpr, so that kernels can read them
_NONE, _RELU = tl.constexpr(batch_norm.NONE), tl.constexpr(batch_norm.RELU)
_SILU, _RELU6 = tl.constexpr(batch_norm.SILU), tl.constexpr(batch_norm.RELU6)
GELU = tl.constexpr(batch_norm.GELU)


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
    if (ACT == _RELU) | (ACT == _RELU6):
        value = tl.where(value < 0, 0.0, value)
    if ACT == _SILU:
        value = value * tl.sigmoid(value)
    if ACT == _RELU6:
        value = tl.where(value > 6, 6.0, value)
    if ACT == GELU:
        value = 0.5 * value * (1 + tl.erf(value * 0.7071067811865476))
    return value


@triton.jit
def activate_back(d, value, ACT: tl.constexpr):
    """The gradient of the activation's input `value`, from that of its output."""
    if ACT == _RELU:
        d = tl.where(value > 0, d, 0.0)
    if ACT == _SILU:
        gate = tl.sigmoid(value)
        d = d * gate * (1 + value * (1 - gate))
    if ACT == _RELU6:
        d = tl.where((value > 0) & (value < 6), d, 0.0)
    if ACT == GELU:
        density = tl.exp(-0.5 * value * value) * 0.3989422804014327
        d = d * (0.5 * (1 + tl.erf(value * 0.7071067811865476)) + value * density)
    return d


@triton.jit
def unpack_signs(packed, BM: tl.constexpr, BC: tl.constexpr):
    """The bits packed by phalanx.kernels.batch_norm.pack_signs, as 0 and 1."""
    packed = tl.reshape(packed.to(tl.int32), (BM, BC // 64, 1, 8))
    return tl.reshape((packed >> tl.arange(0, 8)[None, None, :, None]) & 1, (BM, BC))


@triton.jit
def sum_rows_by_thread(acc, BM: tl.constexpr, BN: tl.constexpr, WARPS: tl.constexpr):
    """A product [BM, BN] summed over the rows that one thread holds of it: [WARPS, 8, BN]."""
    parts = tl.reshape(acc, (BM // (16 * WARPS), WARPS, 2, 8, BN))
    return tl.sum(tl.sum(parts, 2), 0)


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
            d = tl.where(unpack_signs(packed, BM, BC) > 0, d, 0.0)
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
    if ACT != _NONE:
        d = activate_back(d, value * load_row(v, 2, c, C, R) + load_row(v, 3, c, C, R), ACT)
    if factor is not None:
        d *= _load_factor(factor, m, M, PIXELS)
    d = d * load_row(u, 2, c, C, R) + value * load_row(u, 3, c, C, R) + load_row(u, 4, c, C, R)
    tl.store(dx + before + o, d.to(dx.dtype.element_ty), mask=ok)


# --- how they are launched ---


@dataclass(frozen=True)
class NormSizes:
    """The sizes of a launch: a batch norm takes the pixels of all images as those of one."""

    images: int  # of a group norm; 1 for a batch norm
    pixels: int  # of each of these images
    channels: int
    image_pixels: int  # of one image of the batch
    wide: bool  # offsets need 64 bits

    @property
    def row(self) -> int:
        """The stride between rows of vectors."""
        return self.images * self.channels

    @property
    def programs(self) -> int:
        """Programs that share the pixels of a sum."""
        most = MULTIPROCESSORS * 8 * 64 // max(self.row, 64)
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
        return lambda t: (triton.cdiv(self.channels, t["BC"]), self.programs, self.images)

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
        return torch.empty((2, self.programs, self.row), device=like.device)


def find_sizes(x: Tensor, *, by_image: bool) -> NormSizes:
    """The sizes of a launch over x."""
    images, channels = x.shape[:2]
    image_pixels = x.numel() // channels // images
    if not by_image:
        return NormSizes(1, image_pixels * images, channels, image_pixels, x.numel() >= 2**31)
    wide = x.numel() // images >= 2**31
    return NormSizes(images, image_pixels, channels, image_pixels, wide)


def sum_statistics(x: Tensor, *, by_image: bool) -> Tensor:
    """Partial sums [2, any, C or images * C] of x minus its first pixel, and of the squares."""
    sizes = find_sizes(x, by_image=by_image)
    sums = sizes.new_sums(x)
    args = (x, sums, sizes.pixels, sizes.channels, sizes.row, sizes.programs)
    CHOICES.run(_sum_statistics, sizes.by_channels, args, sizes.tiles, WIDE=sizes.wide)
    return sums


def apply_norm_fused(
    x: Tensor,
    v: Tensor,
    activation: int,
    residual: Tensor | None,
    factor: Tensor | None,
    residual_v: Tensor | None,
    add_last: bool,
) -> Tensor:
    """`phalanx.kernels.batch_norm.apply_norm`."""
    sizes, y = find_sizes(x, by_image=v.ndim == 3), torch.empty_like(x)
    numbers = (sizes.pixels, sizes.channels, sizes.row, sizes.image_pixels)
    args = (x, residual, residual_v, factor, v, y, *numbers)
    flags = {"ACT": activation, "LAST": add_last, "WIDE": sizes.wide}
    CHOICES.run(_apply, sizes.by_pixels, args, sizes.tiles, **flags)
    return y


def sum_gradients(
    dy: Tensor,
    x: Tensor,
    v: Tensor,
    activation: int,
    *,
    factor: Tensor | None = None,
    second: Tensor | None = None,
    gate: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Partial sums for a norm's backward; out: where the gradient dy + second is stored, gated."""
    sizes = find_sizes(x, by_image=v.ndim == 3)
    sums = sizes.new_sums(x)
    numbers = (sizes.pixels, sizes.channels, sizes.row, sizes.programs, sizes.image_pixels)
    signs = gate is not None and gate.dtype == torch.uint8
    flags = {"ACT": activation, "SIGNS": signs, "WIDE": sizes.wide}
    args = (dy, second, x, gate, factor, v, out, sums, *numbers)
    CHOICES.run(_sum_gradients, sizes.by_channels, args, sizes.tiles, **flags)
    return sums


def apply_norm_back_fused(
    dy: Tensor, x: Tensor, v: Tensor, u: Tensor, activation: int, factor: Tensor | None
) -> Tensor:
    """The gradient of a norm's input."""
    sizes, dx = find_sizes(x, by_image=v.ndim == 3), torch.empty_like(x)
    numbers = (sizes.pixels, sizes.channels, sizes.row, sizes.image_pixels)
    args = (dy, x, factor, v, u, dx, *numbers)
    flags = {"ACT": activation, "WIDE": sizes.wide}
    CHOICES.run(_apply_back, sizes.by_pixels, args, sizes.tiles, **flags)
    return dx
