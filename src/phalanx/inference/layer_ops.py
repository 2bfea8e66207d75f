"""What scoring is made of: convolutions with bias, residual and activation, in 16 bits.

Each is a torch custom op with a plain reference beside it. Where there are several ways to the
same result (a library's kernel, or one of ours with different tiles), the fastest is measured
for each shape, and remembered.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.choices import CHOICES, Launch, Tile, make_tiles
from phalanx.kernels.fused import find_fused

NONE, RELU, SILU, RELU6, RAW = range(5)  # as in layers_fused; RAW: no bias either
ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x,
    F.relu,
    F.silu,
    F.relu6,
)
PREFETCH = False
_SMALL = 8192  # rows; below, what counts is how many programs there are
_MOST_TILES = 1 << 14  # of a product whose sums are split
_LARGEST = 2**31  # elements that 32-bit offsets reach
_GROUPED_BLOCK = 32  # channels that a program of a grouped convolution sees

_LARGE_TILES = make_tiles(
    "BM BN BK SPLITS",
    *((128, 64, 64, 1, 4, 3), (128, 64, 64, 1, 4, 4), (128, 128, 64, 1, 8, 3)),
    *((128, 256, 64, 1, 8, 3), (64, 64, 64, 1, 4, 4), (128, 32, 32, 1, 4, 4)),
)
SMALL_TILES = make_tiles(
    "BM BN BK SPLITS",
    *((32, 32, 64, 1, 4, 4), (64, 32, 64, 1, 4, 4), (32, 32, 128, 1, 4, 3)),
    *((16, 32, 128, 1, 2, 3), (32, 32, 64, 4, 4, 4), (64, 32, 128, 4, 4, 3)),
    *((64, 32, 64, 8, 4, 4), (64, 32, 128, 8, 4, 3)),
)
_GROUPED_TILES = make_tiles(
    "BM BN BK SPLITS", (128, 32, 32, 1, 4, 4), (64, 32, 32, 1, 4, 4), (256, 32, 32, 1, 8, 3)
)
_SMALL_GROUPED_TILES = make_tiles(
    "BM BN BK SPLITS", (32, 32, 32, 1, 4, 4), (16, 32, 32, 1, 2, 4), (32, 32, 32, 3, 4, 4)
)
_ROWS_TILES = make_tiles(
    "BM BN OCCUPANCY", (64, 64, 4, 4, 3), (64, 128, 2, 8, 3), (128, 64, 3, 4, 2)
)
_AHEAD_TILES = make_tiles(
    "BM BN BK EARLY OCCUPANCY",
    *((128, 64, 64, 1, 2, 4, 4), (128, 128, 64, 1, 1, 8, 4), (128, 256, 64, 0, 1, 8, 3)),
    *((128, 128, 64, 0, 2, 4, 3),),
)
_PASS_TILES = make_tiles("BM BC", (32, 64, 4, 1), (64, 64, 4, 1), (16, 128, 4, 1))


@dataclass(frozen=True)
class Geometry:
    """How a convolution moves over its image."""

    stride: int = 1
    padding: int = 0
    groups: int = 1

    def pack(self) -> list[int]:
        """As a custom op takes it."""
        return [self.stride, self.padding, self.groups]


def runs_kernels(x: Tensor) -> bool:
    """Whether our kernels can run where x is: on a GPU, or in Triton's interpreter."""
    return find_fused("phalanx.inference.layers_fused.convolve") is not None and (
        x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    )


def fits(*tensors: Tensor | None) -> bool:
    """Whether kernels can address all of it, and load 16 bytes at a time."""
    return all(t is None or t.numel() < _LARGEST for t in tensors)


@cache
def _count_programs(device: torch.device) -> int:
    """Multiprocessors of a device."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def counters(device: torch.device) -> Tensor:
    """Counters of split sums: every kernel leaves them at zero for the next."""
    return torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)


def like_image(x: Tensor, channels: int, height: int, width: int) -> Tensor:
    """An empty channels_last image batch."""
    shape = (x.shape[0], channels, height, width)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def out_size(edge: int, kernel: int, stride: int, padding: int) -> int:
    """The edge of a convolution's result."""
    return (edge + 2 * padding - kernel) // stride + 1


# --- convolution, bias, residual, activation ---


def convolve_reference(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor,
    add: Tensor | None,
    gate: Tensor | None,
    geometry: Sequence[int],
    act: int,
) -> Tensor:
    """`convolve_and_activate` in plain torch."""
    stride, padding, groups = geometry
    x = x if gate is None else x * gate[:, :, None, None]
    y = F.conv2d(x, weights[0], None, stride, padding, 1, groups)
    if act == RAW:
        return y
    y = y.float() + bias[:, None, None]
    return ACTIVATIONS[act](y if add is None else y + add.float()).to(x.dtype)


@torch.library.custom_op("phalanx::convolve_and_activate", mutates_args=())
def convolve_and_activate(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor,
    add: Tensor | None,
    gate: Tensor | None,
    geometry: Sequence[int],
    act: int,
) -> Tensor:
    """act(conv(x * gate, weight) + bias + add) of channels_last images.

    weights: [O, C, KS, KS], channels_last; of a grouped convolution, also in the dense blocks that
    `expand_groups` makes, or none. gate: [N, C]. geometry: stride, padding, groups.
    """
    kernel, move = weights[0].shape[2], Geometry(*geometry)
    height, width = (out_size(edge, kernel, move.stride, move.padding) for edge in x.shape[2:])
    layer = Convolution(x, weights, bias, add, gate, move, act)
    if not runs_kernels(x) or not fits(x, add) or layer.rows(height, width) >= _LARGEST:
        return convolve_reference(x, weights, bias, add, gate, geometry, act)
    out = like_image(x, weights[0].shape[0], height, width)
    ways = layer.find_ways(out)
    result: Tensor = CHOICES.choose(layer.key, ways)
    return result


@convolve_and_activate.register_fake
def _(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor,
    add: Tensor | None,
    gate: Tensor | None,
    geometry: Sequence[int],
    act: int,
) -> Tensor:
    kernel, (stride, padding, _) = weights[0].shape[2], geometry
    sizes = [out_size(edge, kernel, stride, padding) for edge in x.shape[2:]]
    return like_image(x, weights[0].shape[0], sizes[0], sizes[1])


@dataclass(frozen=True)
class Convolution:
    """The ways to compute one convolution with what stands behind it."""

    x: Tensor
    weights: Sequence[Tensor]
    bias: Tensor
    add: Tensor | None
    gate: Tensor | None
    move: Geometry
    act: int

    @property
    def key(self) -> str:
        """What is computed."""
        parts = [tuple(self.x.shape), tuple(self.weights[0].shape), *self.move.pack()]
        added = (self.add is not None, self.gate is not None, self.act)
        return f"convolve {parts} {added} {self.x.dtype}"

    def rows(self, height: int, width: int) -> int:
        """Elements of the result."""
        return self.x.shape[0] * height * width * self.weights[0].shape[0]

    def find_ways(self, out: Tensor) -> dict[str, Callable[[], Tensor]]:
        """All that can do it; the first runs everywhere."""
        x, move, kernel = self.x, self.move, self.weights[0].shape[2]
        is_product = kernel == 1 and move.stride == 1
        aligned = x.shape[1] % 8 == 0 and out.shape[1] % 8 == 0
        ways: dict[str, Callable[[], Tensor]] = {}
        if aligned and (move.groups == 1 or len(self.weights) > 1):
            ways["own"] = lambda: self._own(out)
        if is_product and self.gate is None and self._count_rows(out) >= _SMALL:
            if self._keeps_weights():
                ways["rows"] = lambda: self._by_rows(out)
            if x.shape[1] % 64 == 0 and out.shape[1] % 64 == 0 and x.is_cuda:
                ways["ahead"] = lambda: self._ahead(out)
        by_library = x.is_cuda and self.gate is None
        if by_library and is_product and self.add is None and self.act in (NONE, RELU):
            ways["cublas"] = self._by_cublas
        if by_library and self.act == RELU:
            ways["cudnn"] = self._by_cudnn
        ways["apart"] = self._apart
        return ways

    def _count_rows(self, out: Tensor) -> int:
        return out.numel() // out.shape[1]

    def _keeps_weights(self) -> bool:
        channels, wide = self.x.shape[1], self.weights[0].shape[0]
        return channels in (64, 128, 256) and wide % 64 == 0

    def _own(self, out: Tensor) -> Tensor:
        move, grouped = self.move, self.move.groups > 1
        (_, channels, high, wide), kernel = self.x.shape, self.weights[0].shape[2]
        rows, columns = self._count_rows(out), out.shape[1]
        small = rows < _SMALL
        tiles = SMALL_TILES if small else _LARGE_TILES
        if grouped:
            tiles = _SMALL_GROUPED_TILES if small else _GROUPED_TILES
        tiles = [t for t in tiles if t["SPLITS"] == 1 or t["SPLITS"] * t["BK"] <= self._depth]
        tiles = [t for t in tiles if t["BN"] <= max(columns, tiles[0]["BN"])]
        nothing, launches = self.bias, []
        for tile in tiles:
            shares = tile["SPLITS"] if tile["SPLITS"] > 1 else 0
            part = torch.empty(shares * rows * columns, device=out.device)
            grid = (-(-rows // tile["BM"]) * -(-columns // tile["BN"]), tile["SPLITS"])
            if shares and grid[0] > _MOST_TILES:
                continue
            weight = self.weights[1] if grouped else self.weights[0]
            add = self.add if self.add is not None else nothing
            gate = self.gate if self.gate is not None else nothing
            args = (
                *(self.x, weight, self.bias, add, gate, out, part, counters(out.device)),
                *(rows, channels // 8, columns // 8, high, wide, *out.shape[2:]),
            )
            width = tile["BN"] if grouped else channels
            flags = {
                **{"KS": kernel, "STRIDE": move.stride, "PAD": move.padding},
                **{"GROUPED": int(grouped), "GATE": int(self.gate is not None)},
                **{"ADD": int(self.add is not None), "ACT": self.act},
                **{"WHOLE": int(width % tile["BK"] == 0), **start_early(out)},
                **{"PREFETCH": int(PREFETCH and small and width % tile["BK"] == 0)},
            }
            launches.append(
                Launch(
                    find_fused("phalanx.inference.layers_fused.convolve"), grid, args, tile, flags
                )
            )
        CHOICES.run_fastest(launches)
        return out

    @property
    def _depth(self) -> int:
        """What a sum goes over."""
        weight = self.weights[0]
        return weight.shape[1] * weight.shape[2] ** 2

    def _by_rows(self, out: Tensor) -> Tensor:
        rows, columns, channels = self._count_rows(out), out.shape[1], self.x.shape[1]
        launches = []
        for tile in _ROWS_TILES:
            if columns % tile["BN"]:
                continue
            blocks = columns // tile["BN"]
            walkers = _count_programs(out.device) * tile["OCCUPANCY"] // blocks
            walkers = max(1, min(walkers, -(-rows // tile["BM"])))
            add = self.bias if self.add is None else self.add
            args = (self.x, self.weights[0], self.bias, add, out, rows, columns, walkers)
            flags = {"K": channels, "ADD": int(self.add is not None), "ACT": self.act}
            shape = {"BM": tile["BM"], "BN": tile["BN"], "DEPTH": tile["num_stages"]}
            shape |= {"num_warps": tile["num_warps"]}
            kernel = find_fused("phalanx.inference.layers_fused.convolve_rows")
            launches.append(Launch(kernel, (walkers * blocks,), args, shape, flags))
        CHOICES.run_fastest(launches)
        return out

    def _ahead(self, out: Tensor) -> Tensor:
        from triton.tools.tensor_descriptor import TensorDescriptor

        rows, columns, channels = self._count_rows(out), out.shape[1], self.x.shape[1]
        flat, weight = self.x.permute(0, 2, 3, 1).reshape(rows, channels), self.weights[0]
        launches = []
        for tile in _AHEAD_TILES:
            if columns % tile["BN"]:
                continue
            blocks = -(-rows // tile["BM"]) * (columns // tile["BN"])
            walkers = min(blocks, _count_programs(out.device) * tile["OCCUPANCY"])
            left = TensorDescriptor.from_tensor(flat, [tile["BM"], tile["BK"]])
            matrix = weight.reshape(columns, channels)
            right = TensorDescriptor.from_tensor(matrix, [tile["BN"], tile["BK"]])
            add = self.bias if self.add is None else self.add
            args = (left, right, self.bias, add, out, rows, columns, channels, walkers)
            flags = {"ADD": int(self.add is not None), "ACT": self.act, "FLAT": 1}
            shape = {name: value for name, value in tile.items() if name != "OCCUPANCY"}
            kernel = find_fused("phalanx.inference.layers_fused.convolve_ahead")
            launches.append(Launch(kernel, (walkers,), args, shape, flags))
        CHOICES.run_fastest(launches)
        return out

    def _by_cublas(self) -> Tensor:
        (images, channels, high, wide), columns = self.x.shape, self.weights[0].shape[0]
        flat = self.x.permute(0, 2, 3, 1).reshape(-1, channels)
        matrix, bias = self.weights[0].reshape(columns, channels).t(), self.bias.to(self.x.dtype)
        if self.act == RELU:
            out = torch._addmm_activation(bias, flat, matrix)
        else:
            out = torch.addmm(bias, flat, matrix)
        return out.view(images, high, wide, columns).permute(0, 3, 1, 2)

    def _by_cudnn(self) -> Tensor:
        move, bias = self.move, self.bias.to(self.x.dtype)
        pair = [move.stride] * 2, [move.padding] * 2, [1, 1], move.groups
        if self.add is None:
            return torch.cudnn_convolution_relu(self.x, self.weights[0], bias, *pair)
        return torch.cudnn_convolution_add_relu(self.x, self.weights[0], self.add, 1.0, bias, *pair)

    def _apart(self) -> Tensor:
        move, x = self.move, self.x
        if self.gate is not None:
            x = x * self.gate[:, :, None, None]
        pair = move.stride, move.padding, 1, move.groups
        raw = F.conv2d(x, self.weights[0], None, *pair)
        return raw if self.act == RAW else shift(raw, self.bias, self.add, self.act)


def start_early(x: Tensor) -> dict[str, int]:
    """Flags of a kernel that may be launched while the one before it is at work."""
    on = int(x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0))
    return {"EARLY_START": on, "launch_pdl": on} if on else {"EARLY_START": 0}


def count_blocks(rows: int, channels: int) -> Callable[[Tile], tuple[int, ...]]:
    """The grid of a kernel that cuts an image into BM rows by BC channels."""
    return lambda t: (-(-rows // t["BM"]), -(-channels // t["BC"]))


def shift(raw: Tensor, bias: Tensor, add: Tensor | None, act: int) -> Tensor:
    """act(raw + bias + add), written over raw."""
    rows, channels = raw.numel() // raw.shape[1], raw.shape[1]
    if channels % 8:
        y = raw.float() + bias[:, None, None]
        return ACTIVATIONS[act](y if add is None else y + add.float()).to(raw.dtype)
    added = bias if add is None else add
    args = (raw, bias, added, raw, rows, channels // 8)
    flags = {"ADD": int(add is not None), "ACT": act}
    kernel = find_fused("phalanx.inference.layers_fused.shift_and_activate")
    CHOICES.run(kernel, count_blocks(rows, channels), args, _PASS_TILES, **flags)
    return raw


def expand_groups(weight: Tensor, groups: int, block: int = _GROUPED_BLOCK) -> Tensor | None:
    """The weights [O, C / groups, KS, KS] of a grouped convolution as [O, KS, KS, block].

    Each output channel sees the `block` input channels of its own block, with zeros for those of
    other groups. None where groups and blocks do not fit.
    """
    wide, own, kernel, _ = weight.shape
    if groups == 1 or wide != own * groups or wide % block or block % own:
        return None
    out = weight.new_zeros(wide, kernel, kernel, block)
    places = (torch.arange(wide, device=weight.device) % block) // own * own
    index = places[:, None] + torch.arange(own, device=weight.device)
    out.scatter_(
        3,
        index[:, None, None, :].expand(wide, kernel, kernel, own),
        weight.permute(0, 2, 3, 1).contiguous(),
    )
    return out
