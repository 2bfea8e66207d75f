"""The implementations of a convolution with its epilogue, best first.

Which comes first, and with which tile, follows from the shape, by rules that were tuned on an
H200: it is the same every time.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.choices import CHOICES, Launch, Tile, make_tiles
from phalanx.kernels.fused import find_fused
from phalanx.kernels.gpu import count_persistent_bytes, find_gpu
from phalanx.kernels.image_layout import count_rows, to_image, to_rows

NONE, RELU, SILU, RELU6, RAW = range(5)  # as in layers_fused; RAW: no bias either
ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (lambda x: x, F.relu, F.silu, F.relu6)
GROUPED_BLOCK = 32  # channels that a program of a grouped convolution reads
STEM_CHANNELS = 16  # of a stem's input after space-to-depth
_SMALL = 4e8  # multiplications; below, what matters is the number of programs
_MANY_RESULTS = 1.2e6  # of a GEMM: they keep a device busy with large tiles
_MOST_TILES = 1 << 14  # of a split-K GEMM
_LARGEST = 2**31  # elements that 32-bit offsets reach
_FEW_ROWS = 64  # of a GEMM; with fewer, cuBLAS is slow

LARGE_TILES = make_tiles(
    "BM BN BK SPLITS",
    *((128, 64, 64, 1, 4, 3), (128, 128, 64, 1, 8, 3)),
    *((128, 32, 32, 1, 4, 4), (128, 64, 32, 1, 4, 4)),
)
_WHOLE, _SQUARE_TILE, _NARROW, _SHALLOW = LARGE_TILES
SMALL_TILES = make_tiles(
    "BM BN BK SPLITS",
    *((32, 32, 64, 1, 4, 4), (64, 32, 64, 1, 4, 4), (32, 32, 128, 1, 4, 4)),
    *((32, 32, 64, 4, 4, 4), (64, 32, 128, 8, 4, 3)),
)
GATED_TILES = make_tiles(
    "BM BN BK SPLITS",
    *((32, 32, 64, 1, 4, 4), (64, 32, 64, 1, 4, 3), (128, 32, 32, 1, 4, 4)),
    *((64, 64, 64, 1, 4, 3), (128, 128, 64, 1, 8, 3), (32, 32, 64, 4, 4, 4)),
)
_GATED_32, _GATED_64X32, _GATED_128X32, _GATED_64, _GATED_128, _GATED_SPLIT = GATED_TILES
# a GEMM of fewer tiles of 32 x 32 than the number uses the tile beside it
_NARROW_GATED = ((256, _GATED_32), (1400, _GATED_64X32), (math.inf, _GATED_128X32))
_WIDE_GATED = (
    *((256, _GATED_32), (800, _GATED_64X32)),
    *((5000, _GATED_64), (math.inf, _GATED_128)),
)
_GROUPED_TILE, _SMALL_GROUPED_TILE = make_tiles(
    "BM BN BK SPLITS", (128, 32, 32, 1, 4, 4), (32, 32, 32, 1, 4, 4)
)
_ROWS_TILES = make_tiles("BM BN OCCUPANCY", (64, 128, 2, 8, 3), (64, 64, 4, 4, 3))
_TMA_TILES = make_tiles(
    "BM BN BK EARLY OCCUPANCY", (128, 128, 64, 0, 2, 4, 3), (128, 64, 64, 1, 2, 4, 4)
)
_PASS_TILE = make_tiles("BM BC", (16, 128, 4, 1))[0]


def launch_kernel(
    kernel: str, grid: tuple[int, ...], args: tuple[Any, ...], tile: Tile, **flags: int
) -> None:
    """Launch a kernel, given by its dotted name."""
    CHOICES.launch_fastest([Launch(find_fused(kernel), grid, args, tile, flags)])


def runs_kernels(x: Tensor) -> bool:
    """Whether our kernels can run where x is: on a GPU, or in Triton's interpreter."""
    return find_fused("phalanx.inference.layers_fused.convolve") is not None and (
        x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    )


def fits_32_bit_offsets(*tensors: Tensor | None) -> bool:
    """Whether 32-bit offsets reach all elements."""
    return all(t is None or t.numel() < _LARGEST for t in tensors)


@cache
def find_split_counters(device: torch.device) -> Tensor:
    """Counters of split-K tiles: every kernel leaves them at zero for the next."""
    with torch.inference_mode(mode=False):
        return torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)


def count_blocks(rows: int, channels: int, tile: Tile) -> tuple[int, int]:
    """The grid of a kernel whose tiles are BM rows by BC channels."""
    return -(-rows // tile["BM"]), -(-channels // tile["BC"])


def _shift_and_activate(raw: Tensor, bias: Tensor, add: Tensor | None, act: int) -> Tensor:
    """act(raw + bias + add), written over raw."""
    rows, channels = count_rows(raw), raw.shape[1]
    if channels % 8 or not runs_kernels(raw) or not fits_32_bit_offsets(raw):
        y = raw.float() + bias[:, None, None]
        return ACTIVATIONS[act](y if add is None else y + add.float()).to(raw.dtype)
    args = (raw, bias, bias if add is None else add, raw, rows, channels // 8)
    grid = count_blocks(rows, channels, _PASS_TILE)
    launch_kernel(
        "phalanx.inference.layers_fused.shift_and_activate",
        grid,
        args,
        _PASS_TILE,
        ADD=int(add is not None),
        ACT=act,
    )
    return raw


@dataclass(frozen=True)
class Geometry:
    """The stride, padding and groups of a convolution."""

    stride: int = 1
    padding: int = 0
    groups: int = 1

    def pack(self) -> list[int]:
        """A list, as a custom op takes it."""
        return [self.stride, self.padding, self.groups]


@dataclass(frozen=True)
class Convolution:
    """A convolution with bias, residual and activation; see `convolve_and_activate`."""

    x: Tensor
    weights: Sequence[Tensor]
    biases: Sequence[Tensor]
    add: Tensor | None
    gate: Tensor | None
    geometry: Geometry
    act: int

    @property
    def _kernel(self) -> int:
        return self.weights[0].shape[2]

    @property
    def _is_product(self) -> bool:
        return self._kernel == 1 and self.geometry.stride == 1

    def list_implementations(self, out: Tensor) -> dict[str, Callable[[], Tensor]]:
        """All that apply, best first; our kernels write to `out`, libraries to new memory."""
        if not runs_kernels(self.x) or not fits_32_bit_offsets(self.x, out):
            return {"unfused": self._unfused}
        x, geometry, columns = self.x, self.geometry, out.shape[1]
        is_product = self._is_product
        by_library = x.is_cuda and self.gate is None and self.act in (NONE, RELU)
        large = self._is_large(out)
        implementations: dict[str, Callable[[], Tensor]] = {}
        if (
            x.shape[1] % 8 == 0
            and columns % 8 == 0
            and (geometry.groups == 1 or len(self.weights) > 1)
        ):
            implementations["implicit_gemm"] = lambda: self._by_implicit_gemm(out)
        if is_product and large and self.gate is None and columns % 64 == 0:
            if (rows_tile := self._find_rows_tile(columns)) is not None:
                implementations["rows"] = lambda: self._by_rows(out, rows_tile)
            if x.shape[1] % 64 == 0 and find_gpu(x).has_tma:
                implementations["tma"] = lambda: self._by_tma(out)
        if by_library and is_product and self.add is None:
            implementations["cublas"] = self._by_cublas
        if by_library and self.act == RELU:
            implementations["cudnn"] = self._by_cudnn
        implementations["unfused"] = self._unfused
        best = self._rank_implementations(large, is_product, count_rows(out))
        return {
            name: implementations[name]
            for name in [*best, *implementations]
            if name in implementations
        }

    def _is_large(self, out: Tensor) -> bool:
        return out.numel() * self._depth >= _SMALL

    @property
    def _depth(self) -> int:
        """The length of each output's sum: K of the GEMM."""
        weight = self.weights[0]
        return weight.shape[1] * weight.shape[2] ** 2

    def _rank_implementations(self, large: bool, is_product: bool, rows: int) -> tuple[str, ...]:
        """The names of the best; the caller leaves out those that do not apply."""
        depth = self.x.shape[1]
        if self._is_linear and rows >= _FEW_ROWS:
            return ("cublas",)
        if not large:
            return ()
        if not is_product:
            return ("cudnn",)
        if self.add is not None and depth == 128:
            return ("cudnn", "rows")
        if self.act == RELU and self.add is None and depth < 512:
            return ("cudnn",) if depth > 64 else ("rows", "cudnn")
        return ("rows", "tma", "cudnn") if depth < 2048 and self.act == RELU else ("rows", "cudnn")

    @property
    def _is_linear(self) -> bool:
        return self.x.shape[2:] == (1, 1)

    def _by_implicit_gemm(self, out: Tensor) -> Tensor:
        grouped, columns, rows = self.geometry.groups > 1, out.shape[1], count_rows(out)
        weight, nothing = self.weights[1 if grouped else 0], self.biases[0]
        tile = self._choose_tile(rows, columns, large=self._is_large(out))
        flags = self._view(columns) | self._flags | ({"C": tile["BN"]} if grouped else {})
        shares = tile["SPLITS"] if tile["SPLITS"] > 1 else 0
        part = torch.empty(shares * rows * columns, device=out.device)
        args = (
            *(self.x, weight, nothing, self._residual, nothing if self.gate is None else self.gate),
            *(out, part, find_split_counters(out.device), rows, *self.x.shape[2:], *out.shape[2:]),
        )
        grid = (self._count_tiles(tile, rows, columns), tile["SPLITS"])
        gate = int(self.gate is not None)
        launch_kernel(
            "phalanx.inference.layers_fused.convolve",
            grid,
            args,
            tile,
            **flags,
            GROUPED=int(grouped),
            GATE=gate,
        )
        return out

    @property
    def _flags(self) -> dict[str, int]:
        return {"ADD": int(self.add is not None), "ACT": self.act}

    @property
    def _residual(self) -> Tensor:
        """The residual; if there is none, a placeholder that no kernel reads."""
        return self.biases[0] if self.add is None else self.add

    def _view(self, columns: int) -> dict[str, int]:
        """The windows as an implicit GEMM sees them: a row of a stem's blocks is contiguous."""
        channels, kernel, geometry = self.x.shape[1], self._kernel, self.geometry
        across = kernel
        if channels == STEM_CHANNELS and kernel > 1 and geometry == Geometry():
            channels, across = channels * kernel, 1
        view = {"C": channels, "N": columns, "PITCH": self.x.shape[1], "KH": kernel, "KW": across}
        return view | {"STRIDE": geometry.stride, "PAD": geometry.padding}

    def _choose_tile(self, rows: int, columns: int, *, large: bool) -> Tile:
        if self.geometry.groups > 1:
            return _GROUPED_TILE if large else _SMALL_GROUPED_TILE
        if self.gate is not None:
            return self._choose_gated(rows, columns)
        if self._is_product and (large or rows * columns >= _MANY_RESULTS):
            return self._choose_for_many(columns, large=large)
        if large:
            is_square = columns % 128 == 0 and self.add is None
            return _NARROW if columns <= 32 else _SQUARE_TILE if is_square else _WHOLE
        best = 0
        if self._kernel == 1:
            best = 1 if rows >= 512 else 2 if self._depth >= 1024 else 0
        if rows < 512 and self._depth >= 2048:
            best = 4 if rows <= 64 and self._depth > 4096 else 3
        tile = SMALL_TILES[best]
        fits = tile["SPLITS"] == 1 or self._can_split(tile, rows, columns)
        return tile if fits else SMALL_TILES[0]

    def _choose_for_many(self, columns: int, *, large: bool) -> Tile:
        """The tile of a GEMM with many outputs: steps of 32 where one of 64 would be half empty."""
        if columns <= 32:
            return _NARROW
        if large and columns % 128 == 0 and self.add is None and self._depth >= 192:
            return _SQUARE_TILE
        return _SHALLOW if (self._depth - 1) % 64 < 32 else _WHOLE

    def _choose_gated(self, rows: int, columns: int) -> Tile:
        """The tile of a gated GEMM; split-K where sums are long and tiles are few."""
        tiles = self._count_tiles(_GATED_32, rows, columns)
        if self._depth >= 16 * tiles and self._can_split(_GATED_SPLIT, rows, columns):
            return _GATED_SPLIT
        table = _NARROW_GATED if columns <= 32 else _WIDE_GATED
        best = next(tile for most, tile in table if tiles < most)
        if best == _GATED_128 and min(rows // self.x.shape[0], columns) <= 64:
            return _GATED_64  # the larger one would be half empty
        return best

    def _count_tiles(self, tile: Tile, rows: int, columns: int) -> int:
        """Tiles of a GEMM; with a gate, each tile belongs to one image."""
        images = 1 if self.gate is None else self.x.shape[0]
        return images * -(-rows // images // tile["BM"]) * -(-columns // tile["BN"])

    def _can_split(self, tile: Tile, rows: int, columns: int) -> bool:
        """Whether with split-K each program has something to add up, and each tile a counter."""
        blocks = self._count_tiles(tile, rows, columns)
        return tile["SPLITS"] * tile["BK"] <= self._depth and blocks <= _MOST_TILES

    def _find_rows_tile(self, columns: int) -> Tile | None:
        """The best tile of `rows` that fits into the GPU's shared memory."""
        if self.x.shape[1] not in (64, 128, 256):
            return None
        sizes = {"depth": self.x.shape[1], "images_read": int(self.add is not None)}
        for tile in _ROWS_TILES:
            needed = count_persistent_bytes(
                tile["BM"], tile["BN"], stages=tile["num_stages"], **sizes
            )
            if columns % tile["BN"] == 0 and needed <= find_gpu(self.x).shared_memory:
                return tile
        return None

    def _by_rows(self, out: Tensor, tile: Tile) -> Tensor:
        columns, channels, rows = out.shape[1], self.x.shape[1], count_rows(out)
        blocks = columns // tile["BN"]
        programs = find_gpu(out).multiprocessors * tile["OCCUPANCY"] // blocks
        programs = max(1, min(programs, -(-rows // tile["BM"])))
        operands = (self.x, self.weights[0], self.biases[0], self._residual, out)
        shape = {"BM": tile["BM"], "BN": tile["BN"], "DEPTH": tile["num_stages"]}
        shape |= {"num_warps": tile["num_warps"]}
        launch_kernel(
            "phalanx.inference.layers_fused.convolve_rows",
            (programs * blocks,),
            (*operands, rows, columns, programs),
            shape,
            K=channels,
            **self._flags,
        )
        return out

    def _by_tma(self, out: Tensor) -> Tensor:
        from triton.tools.tensor_descriptor import TensorDescriptor

        columns, channels, rows = out.shape[1], self.x.shape[1], count_rows(out)
        flat = to_rows(self.x)
        matrix = self.weights[0].reshape(columns, channels)
        tile = next(tile for tile in _TMA_TILES if columns % tile["BN"] == 0)
        blocks = -(-rows // tile["BM"]) * (columns // tile["BN"])
        programs = min(blocks, find_gpu(out).multiprocessors * tile["OCCUPANCY"])
        left = TensorDescriptor.from_tensor(flat, [tile["BM"], tile["BK"]])
        right = TensorDescriptor.from_tensor(matrix, [tile["BN"], tile["BK"]])
        args = (left, right, self.biases[0], self._residual, out, rows, columns, channels, programs)
        shape = {name: value for name, value in tile.items() if name != "OCCUPANCY"}
        launch_kernel(
            "phalanx.inference.layers_fused.convolve_tma",
            (programs,),
            args,
            shape,
            FLAT=1,
            **self._flags,
        )
        return out

    def _by_cublas(self) -> Tensor:
        flat, matrix, bias = to_rows(self.x), self.weights[0].flatten(1).t(), self.biases[1]
        multiply = torch._addmm_activation if self.act == RELU else torch.addmm
        out: Tensor = multiply(bias, flat, matrix)
        return to_image(out, self.x)

    def _by_cudnn(self) -> Tensor:
        geometry, weight, bias = self.geometry, self.weights[0], self.biases[1]
        pair = [geometry.stride] * 2, [geometry.padding] * 2, [1, 1], geometry.groups
        if self.add is None:
            return torch.cudnn_convolution_relu(self.x, weight, bias, *pair)
        return torch.cudnn_convolution_add_relu(self.x, weight, self.add, 1.0, bias, *pair)

    def _unfused(self) -> Tensor:
        geometry, x = self.geometry, self.x
        if self.gate is not None:
            x = x * self.gate[:, :, None, None]
        raw = F.conv2d(
            x, self.weights[0], None, geometry.stride, geometry.padding, 1, geometry.groups
        )
        return (
            raw if self.act == RAW else _shift_and_activate(raw, self.biases[0], self.add, self.act)
        )
