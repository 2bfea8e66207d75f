"""Launches of the GEMM kernels on images, with the fastest kernel and tile for each shape."""
# ruff: noqa: PLR0913  (products have many operands)

import os
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from phalanx.kernels.choices import CHOICES, Launch, Tile, make_tiles
from phalanx.kernels.gpu import Gpu, count_persistent_bytes, find_gpu
from phalanx.kernels.image_layout import new_image, to_rows
from phalanx.products.gemm_fused import gemm, gemm_rows, gemm_tma
from phalanx.products.sums_fused import add_rows

RELU, MASK_BY_BITS, MASK_BY_NORM = 1, 3, 4  # ACT
TOTAL, WITH_GATE, WITH_SQUARE = 1, 2, 3  # SUMS
_SHIFT, _SCALE_SHIFT = 1, 2  # AFFINE
_SAME_PIXELS, _EVEN_PIXELS = 1, 2  # ADD

_GEMM_TILES = make_tiles("BM BN BK", (128, 64, 64, 4, 3), (64, 64, 64, 4, 3))
# OCCUPANCY: programs per SM. The last column is the number of blocks of rows in flight.
_ROWS_TILES = make_tiles(
    "BM BN OCCUPANCY",
    *((64, 64, 4, 4, 3), (64, 64, 4, 4, 2), (64, 128, 2, 8, 3)),
    *((128, 128, 1, 8, 3), (128, 128, 1, 16, 3), (64, 256, 1, 8, 3)),
)
# OCCUPANCY 0: one program per tile. The last column is the number of blocks of K in flight.
_TMA_TILES = make_tiles(
    "BM BN BK EARLY OCCUPANCY",
    *((128, 64, 64, 1, 2, 4, 4), (128, 128, 64, 1, 0, 8, 3)),
    *((128, 256, 64, 0, 1, 8, 3), (128, 64, 64, 0, 0, 4, 3)),
)
_WIDEST_TMA = 28  # pixels; wider images have few channels, and gemm_rows is near the memory bound
_MOST_KEPT = 640  # input channels whose weights gemm_rows keeps
_MOST_PROGRAMS = 1056  # programs of gemm_rows per block of columns: rows of partial sums
_REGISTERS = 2**16  # per SM
_REGISTERS_OF_A_THREAD = 255


@dataclass(frozen=True)
class _Product:
    """One product's operands in the order of the kernels, its sizes and flags."""

    operands: tuple[Any, ...]  # a, b, a2, b2, beta, out, v, add, gate, gv, bits, s
    m: int
    n: int
    k: int
    k2: int
    height: int
    width: int
    flags: dict[str, int]

    @property
    def gpu(self) -> Gpu:
        """The GPU that it runs on."""
        return find_gpu(self.operands[0])

    def select_tiles(self, tiles: list[Tile]) -> list[Tile]:
        """The tiles that divide the columns."""
        return [t for t in tiles if self.n % t["BN"] == 0]

    def list_gemm_launches(self) -> list[Launch]:
        """Launches of gemm."""
        sizes = (self.m, self.n, self.k, self.k2, self.height, self.width)
        return [
            Launch(gemm, (self.count_tiles(t),), (*self.operands, *sizes), t, self.flags)
            for t in self.select_tiles(_GEMM_TILES)
        ]

    def count_tiles(self, tile: Tile) -> int:
        """Tiles of the result."""
        return triton.cdiv(self.m, tile["BM"]) * triton.cdiv(self.n, tile["BN"])

    def list_rows_launches(self) -> list[Launch]:
        """Launches of gemm_rows that fit into shared memory."""
        k, k2 = self.k, self.k2
        if k & (k - 1) or k2 & (k2 - 1) or k + k2 > _MOST_KEPT:
            return []
        return [
            launch for t in self.select_tiles(_ROWS_TILES) for launch in self.build_rows_launches(t)
        ]

    def build_rows_launches(self, tile: Tile) -> list[Launch]:
        """The launch of gemm_rows with one tile; none if it does not fit into shared memory."""
        rows, columns = tile["BM"], tile["BN"]
        depth, warps = tile["num_stages"], tile["num_warps"]
        read = (self.flags["ADD"] > 0) + (self.flags["ACT"] == MASK_BY_NORM)
        needed = count_persistent_bytes(
            rows, columns, depth=self.k + self.k2, stages=depth, images_read=read
        )
        occupancy = min(tile["OCCUPANCY"], self.gpu.shared_memory // needed)
        if not occupancy:
            return []
        blocks = self.n // columns
        programs = occupancy * self.gpu.multiprocessors // blocks
        programs = max(1, min(programs, triton.cdiv(self.m, rows), _MOST_PROGRAMS))
        constants = {"BM": rows, "BN": columns, "DEPTH": depth, "WARPS": min(warps, rows // 16)}
        constants |= {"num_warps": warps, "num_stages": depth}
        registers = _REGISTERS // (32 * warps * occupancy) // 8 * 8
        if registers < _REGISTERS_OF_A_THREAD and not _is_interpreted():
            constants["maxnreg"] = registers
        sizes = (self.m, self.n, programs, self.height, self.width)
        flags = {**self.flags, "K": self.k, "K2": self.k2}
        args = (*self.operands, *sizes)
        return [Launch(gemm_rows, (blocks * programs,), args, constants, flags)]

    def list_tma_launches(self) -> list[Launch]:
        """Launches of gemm_tma, for products of many channels."""
        small = self.k < 128 or self.m < 128 or self.height > _WIDEST_TMA
        if small or not self.gpu.has_tma:
            return []
        return [self.build_tma_launch(t) for t in self.select_tiles(_TMA_TILES)]

    def build_tma_launch(self, tile: Tile) -> Launch:
        """The launch of gemm_tma with one tile."""
        (a, b, a2, b2, *rest), flags = self.operands, self.flags
        bm, bn, bk = tile["BM"], tile["BN"], tile["BK"]
        weights = _make_descriptor(b, bn, bk) if flags["TRANS"] else _make_descriptor(b, bk, bn)
        factors = (_make_descriptor(to_rows(a), bm, bk), weights, None, None)
        if a2 is not None:
            factors = (
                *factors[:2],
                _make_descriptor(to_rows(a2), bm, bk),
                _make_descriptor(b2, bk, bn),
            )
        programs, is_persistent = self.count_tiles(tile), tile["OCCUPANCY"] > 0
        if is_persistent:
            programs = min(tile["OCCUPANCY"] * self.gpu.multiprocessors, programs)
        sizes = (self.m, self.n, self.k, self.k2, programs, self.height, self.width)
        constants = {name: value for name, value in tile.items() if name != "OCCUPANCY"}
        constants["FLAT"] = int(is_persistent and not flags["PRE"])
        return Launch(gemm_tma, (programs,), (*factors, *rest, *sizes), constants, flags)


def _is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _make_descriptor(matrix: Tensor, *block: int) -> TensorDescriptor:
    """A matrix as a tensor descriptor, from which TMA loads such blocks."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), list(block))


def multiply(
    a: Tensor,
    b: Tensor,
    *,
    trans: bool = False,
    pre: tuple[Tensor, Tensor, Tensor] | None = None,
    shift: Tensor | None = None,
    norm: Tensor | None = None,
    add: Tensor | None = None,
    act: int = 0,
    gate: tuple[Tensor, Tensor] | None = None,
    bits: Tensor | None = None,
    sums: int = 0,
) -> tuple[Tensor, Tensor]:
    """The product of an image's pixels with b, and its column sums [0, 1 or 2, N].

    trans: b is [N, K] instead of [K, N]. pre: a2, b2 and beta, whose product is added. shift: added
    to each row. norm: vectors whose scale and shift are applied instead. add: an image to add.
    act, sums: flags of epilogue_fused. bits: the mask that `act` stores or applies. gate: for
    MASK_BY_NORM and WITH_GATE, an image and its norm's vectors.
    """
    n, k, h, w = a.shape
    width, m = b.shape[0 if trans else 1], n * h * w
    out = new_image(a, width, h, w)
    planes = min(sums, 2)  # of column sums
    most_partials = max(triton.cdiv(m, 64), _MOST_PROGRAMS)  # no kernel writes more rows
    s = torch.empty(planes * most_partials * width, device=a.device)
    a2, b2, beta = pre or (None, None, None)
    added = 0 if add is None else _SAME_PIXELS if add.shape == out.shape else _EVEN_PIXELS
    affine = _SCALE_SHIFT if norm is not None else 0 if shift is None else _SHIFT
    flags = {"TRANS": int(trans), "PRE": int(pre is not None), "AFFINE": affine, "ADD": added}
    flags |= {"ACT": act, "SUMS": sums}
    v = shift if norm is None else norm
    operands = (a, b, a2, b2, beta, out, v, add, *(gate or (None, None)), bits, s)
    k2 = 0 if a2 is None else a2.shape[1]
    product = _Product(operands, m, width, k, k2, h, w, flags)
    launches = [*product.list_gemm_launches(), *product.list_rows_launches()]
    used = CHOICES.launch_fastest([*launches, *product.list_tma_launches()])
    if not planes:
        return out, s.view(0, width)
    if used.kernel is gemm_rows:
        partials = used.grid[0] // (width // used.tile["BN"])
    else:
        partials = triton.cdiv(m, used.tile["BM"])
    return out, add_rows(s[: planes * partials * width].view(planes, partials, width))
