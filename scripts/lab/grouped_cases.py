"""What grouped_variants.py compares: a layer's tensors, today's kernels, and each variant's launch.

A task is a pass around a grouped convolution: `forward`, `input`, `weight` or `both` gradients, of
a normalised image and a ready gradient. With * it also finds the sums of what it writes: `forward*`
the vectors of the norm after it, `input*` and `both*` the backward vectors of the norm before it.
With + it also takes in the passes of the norms: `forward+` normalises its operand, the others find
the gradient of the convolution's result from that of its norm's. `norm` and `norm back` are those
passes alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from grouped_kernels import pair, strided_back, tile, walk, weight_tile, weight_walk
from torch import Tensor

from phalanx.kernels.batch_norm import (
    NONE,
    RELU,
    apply_norm,
    apply_norm_back,
    backward_vectors,
    finish_back,
    finish_vectors,
    norm_vectors,
    reduce_norm,
)
from phalanx.kernels.choices import CHOICES, Launch, Tile, make_tiles
from phalanx.kernels.gpu import find_gpu
from phalanx.kernels.image_layout import count_rows, new_image, to_channels_last
from phalanx.products.grouped import ConvShape, convolve_groups, convolve_groups_back
from phalanx.products.sums_fused import add_rows

GROUPS, EPS = 32, 1e-5
_NAMES = "G J JO M WAVES"
_WALK = make_tiles(  # WAVES: programs for each multiprocessor
    _NAMES,
    (4, 16, 16, 32, 4, 4, 1),
    (4, 16, 16, 32, 4, 4, 3),
    (4, 16, 16, 64, 3, 4, 2),
    (2, 16, 16, 64, 6, 2, 2),
    (1, 32, 32, 128, 3, 4, 2),
)
_WALK_SUMS = make_tiles(
    _NAMES, (4, 16, 16, 32, 3, 4, 1), (4, 16, 16, 32, 3, 4, 3), (4, 16, 16, 64, 2, 4, 2)
)
_WALK_WIDE = make_tiles(_NAMES, (4, 32, 16, 32, 3, 4, 1), (4, 32, 16, 32, 3, 4, 2))
_TILE = make_tiles(
    _NAMES, (4, 16, 16, 32, 8, 4, 1), (4, 16, 16, 64, 5, 4, 1), (4, 16, 16, 32, 3, 4, 2)
)
_TILE_SUMS = make_tiles(_NAMES, (4, 16, 16, 32, 4, 4, 1), (4, 16, 16, 32, 3, 4, 2))
_TILE_WIDE = make_tiles(_NAMES, (4, 32, 16, 32, 4, 4, 1), (4, 32, 16, 32, 3, 4, 2))
_WEIGHT_WALK = make_tiles(
    _NAMES,
    (4, 16, 16, 32, 2, 4, 1),
    (4, 16, 16, 32, 2, 4, 2),
    (8, 16, 16, 32, 1, 8, 2),
    (4, 16, 16, 64, 2, 4, 2),
)
_WEIGHT_WALK_WIDE = make_tiles(_NAMES, (4, 32, 16, 32, 2, 4, 1))
_WEIGHT_TILE = make_tiles(
    _NAMES, (4, 16, 16, 64, 6, 4, 1), (4, 16, 16, 64, 4, 4, 2), (4, 16, 16, 32, 4, 4, 3)
)
_WEIGHT_TILE_WIDE = make_tiles(_NAMES, (4, 32, 16, 64, 4, 4, 1), (4, 32, 16, 32, 3, 4, 2))
_PAIR = make_tiles(
    _NAMES, (4, 16, 16, 32, 2, 4, 1), (4, 16, 16, 32, 2, 4, 2), (4, 16, 16, 16, 3, 4, 2)
)


@dataclass(frozen=True)
class Layer:
    """A grouped convolution of the network: of how many blocks, and of which size."""

    edge: int  # of its input
    channels: int
    stride: int
    count: int  # how many a step has

    @property
    def name(self) -> str:
        """As the tables call it."""
        return f"{self.edge}px {self.channels}c" + "/2" * (self.stride == 2)

    @property
    def each(self) -> int:
        """Channels of a group."""
        return self.channels // GROUPS

    @property
    def shape(self) -> ConvShape:
        """For the product's functions."""
        return ConvShape((self.stride,) * 2, (1, 1), (1, 1), GROUPS)


LAYERS = (  # of ResNeXt-101 32x4d at 224 px
    Layer(56, 128, 1, 3),
    Layer(56, 256, 2, 1),
    Layer(28, 256, 1, 3),
    Layer(28, 512, 2, 1),
    Layer(14, 512, 1, 22),
    Layer(14, 1024, 2, 1),
    Layer(7, 1024, 1, 2),
)


@dataclass(frozen=True)
class Tensors:
    """A layer's tensors in a pass: before and after its two norms, forward and backward."""

    layer: Layer
    weight: Tensor
    affine: list[Tensor]
    a: Tensor  # the first convolution's result
    v1: Tensor
    a1: Tensor  # the operand
    b: Tensor  # the result
    v2: Tensor
    u2: Tensor
    g2: Tensor  # gradient of the second norm's result
    db: Tensor
    packed: dict[tuple[int, int, bool], Tensor] = field(default_factory=dict)


def make_tensors(layer: Layer, images: int, half: torch.dtype, device: str) -> Tensors:
    """Random ones."""
    c, edge = layer.channels, layer.edge
    a = to_channels_last(torch.randn(images, c, edge, edge, device=device).add_(0.3).to(half))
    weight = torch.randn(c, layer.each, 3, 3, device=device) / (9 * layer.each) ** 0.5
    weight = to_channels_last(weight.to(half))
    affine = [torch.rand(c, device=device) + 0.5, torch.randn(c, device=device) / 4]
    v1 = norm_vectors(a, affine, [], EPS, 0.1)
    a1 = apply_norm(a, v1, RELU)
    b = to_channels_last(convolve_groups(a1, weight, layer.shape))
    v2, g2 = norm_vectors(b, affine, [], EPS, 0.1), torch.randn_like(b)
    u2 = reduce_norm(g2, b, v2, NONE)
    db = apply_norm_back(g2, b, v2, u2, NONE)
    return Tensors(layer, weight, affine, a, v1, a1, b, v2, u2, g2, db)


def pack_weight(t: Tensors, j: int, jo: int, *, back: bool) -> Tensor:
    """The weight as block-diagonal packs [9, packs, j, jo]; made once, outside what is timed."""
    if (j, jo, back) not in t.packed:
        c, each = t.layer.channels, t.layer.each
        n = torch.arange(c, device=t.weight.device).view(-1, 1, jo)
        k = n[:, :, :1] // j * j + torch.arange(j, device=n.device)[:, None]
        taps = t.weight.permute(2, 3, 0, 1).reshape(9, c, each)
        rows, columns = (k + 0 * n, n % each) if back else (n + 0 * k, k % each)
        wide = (taps.flip(0) if back else taps)[:, rows, columns + 0 * rows]
        t.packed[j, jo, back] = wide * (n // each == k // each)
    return t.packed[j, jo, back]


def make_empty_tensors(layer: Layer) -> Tensors:
    """Two images of zeros on the CPU, for compilers."""
    c, edge = layer.channels, 8
    a, b = (
        new_image(torch.zeros(2).half(), c, size, size) for size in (edge, edge // layer.stride)
    )
    weight = to_channels_last(torch.zeros(c, layer.each, 3, 3).half())
    v, u = torch.zeros(4, c), torch.zeros(5, c)
    return Tensors(replace(layer, edge=edge), weight, [v[0], v[1]], a, v, a, b, v, u, b, b)


Results = dict[str, Tensor]

LAUNCHED: list[Launch] = []
"""Our launches, the latest last."""


def _start(launch: Launch) -> None:
    """Launch a kernel, or record it where kernels are compiled first."""
    LAUNCHED.append(launch)
    CHOICES.launch_fastest([launch])


# --- the reference, and today's kernels ---


def compute_reference(t: Tensors, *, plus: bool) -> Results:
    """All results in float64."""
    wide, shape = t.weight.double(), t.layer.shape
    _, _, scale, shift = (row.double()[:, None, None] for row in t.v1)
    a, before = t.a.double(), t.a.double() * scale + shift
    a1, db = (before.relu(), _norm_back(t)) if plus else (t.a1.double(), t.db.double())
    y = F.conv2d(a1, wide, None, t.layer.stride, 1, 1, GROUPS)
    back = torch.ops.aten.convolution_backward
    dx, dw, _ = back(db, a1, wide, None, *shape[:3], False, [0, 0], GROUPS, [True, True, False])
    var, mean = torch.var_mean(y, (0, 2, 3), correction=0)
    gated = dx * (before > 0)
    product = (gated * (a - t.v1[0].double()[:, None, None])).sum((0, 2, 3))
    u = backward_vectors(gated.sum((0, 2, 3)), product, t.v1.double(), count_rows(a))
    return {
        "y": y,
        "v": torch.stack([mean, torch.rsqrt(var + EPS)]),
        "dx": dx,
        "dw": dw,
        "u": u[:2],
    }


def _norm_back(t: Tensors) -> Tensor:
    """db in float64."""
    _, _, a, b, c = (row.double()[:, None, None] for row in t.u2)
    return a * t.g2.double() + b * t.b.double() + c


def run_today(t: Tensors, task: str) -> Results:
    """A task by the product's kernels."""
    shape, plus, sums = t.layer.shape, task.endswith("+"), task[-1] in "*+"
    if task == "norm":
        return {"a1": apply_norm(t.a, t.v1, RELU)}
    if task == "norm back":
        return {"db": apply_norm_back(t.g2, t.b, t.v2, t.u2, NONE)}
    if task.startswith("forward"):
        a1 = apply_norm(t.a, t.v1, RELU) if plus else t.a1
        y = to_channels_last(convolve_groups(a1, t.weight, shape))
        return {"y": y} | ({"v": norm_vectors(y, t.affine, [], EPS, 0.1)} if sums else {})
    wants = not task.startswith("weight")
    db = apply_norm_back(t.g2, t.b, t.v2, t.u2, NONE) if plus else t.db
    dx, dw = convolve_groups_back(db, t.a1, t.weight, shape, needs_input_grad=wants)
    if not wants:
        return {"dw": dw}
    dx = to_channels_last(dx)
    u = {"u": reduce_norm(dx, t.a, t.v1, RELU)} if sums else {}
    return {"dx": dx, "dw": dw} | u


def run_torch(t: Tensors, task: str, width: int) -> Results:
    """A task without norms by cuDNN, with groups joined to a width."""
    from phalanx.products.grouped import _join, _take_diagonal_blocks

    joined, rest = width // t.layer.each, (False, [0, 0], GROUPS * t.layer.each // width)
    wide = _join(t.weight, joined, GROUPS)
    if task == "forward":
        return {"y": torch.ops.aten.convolution(t.a1, wide, None, *t.layer.shape[:3], *rest)}
    found = [task == "input", task == "weight", False]
    back = torch.ops.aten.convolution_backward
    dx, dw, _ = back(t.db, t.a1, wide, None, *t.layer.shape[:3], *rest, found)
    if task == "input":
        return {"dx": dx}
    return {"dw": _take_diagonal_blocks(dw, joined, t.weight, GROUPS)}


# --- variants ---


@dataclass(frozen=True)
class Geometry:
    """The sizes a kernel needs, of the image [edge, edge] it calls [H, W]."""

    images: int
    edge: int
    channels: int
    each: int

    def count_units(self, tile: Tile, *, walks: bool, pixels: int) -> int:
        """How many pieces of work the programs of a block of channels share."""
        if not walks:
            return -(-pixels // tile["M"])
        width = min(self.width, tile["M"])
        return -(-self.images // (tile["M"] // width)) * -(-self.edge // width)

    @property
    def width(self) -> int:
        """The power of two that a row of pixels fits into."""
        return 1 << (self.edge - 1).bit_length()

    @property
    def numbers(self) -> tuple[int, ...]:
        """The kernels' integer arguments."""
        return self.images, self.edge, self.edge, self.width, self.channels, self.each


def _count_programs(x: Tensor, tile: Tile, units: int, blocks: int) -> int:
    """How many programs share a block of channels."""
    wanted = find_gpu(x).multiprocessors * tile["WAVES"] // blocks
    return max(1, min(units, wanted))


def run_conv(t: Tensors, task: str, kernel: Any, tile: Tile) -> Results:
    """`forward` or `input` by one of the kernels for both."""
    plus, sums_wanted = task.endswith("+"), task[-1] in "*+"
    back, strided, layer = task.startswith("input"), kernel is strided_back, t.layer
    x, x2, vectors = (t.a if plus else t.a1), t.a, t.v1
    if back:
        x, x2, vectors = (t.g2 if plus else t.db), t.b, t.u2
    edge = x.shape[2]
    out = new_image(x, x.shape[1], *(t.a if back else t.b).shape[2:])
    size = Geometry(len(x), edge, layer.channels, layer.each)
    steps = count_rows(x) if strided else count_rows(out)
    units = size.count_units(tile, walks=kernel is walk, pixels=steps)
    blocks = layer.channels // (tile["G"] * tile["JO"])
    programs = _count_programs(x, tile, units, blocks)
    sums = x.new_empty(2, programs, layer.channels, dtype=torch.float32)
    flags = {"PRE": (1 + back) * plus, "POST": (1 + back) * sums_wanted}
    flags |= {} if kernel in (walk, strided_back) else {"STRIDE": layer.stride}
    w = pack_weight(t, tile["J"], tile["JO"], back=back)
    args = (x, x2, vectors, w, out, t.a, t.v1, sums, *size.numbers)
    _start(Launch(kernel, (programs * blocks,), args, tile, flags))
    if not sums_wanted:
        return {"dx" if back else "y": out}
    if back:
        return {"dx": out, "u": finish_back(sums, t.v1, count_rows(t.a))}
    count = count_rows(out)
    return {"y": out, "v": finish_vectors(sums, t.affine, [], count, EPS, 0.1)}


def _finish_weight(parts: Tensor, t: Tensors) -> Tensor:
    """The weight's gradient from partial sums [P, out, 9, each]."""
    dw = add_rows(parts.view(1, len(parts), -1))
    return dw.view(t.layer.channels, 3, 3, t.layer.each).permute(0, 3, 1, 2)


def run_weight(t: Tensors, task: str, kernel: Any, tile: Tile) -> Results:
    """`weight` by one of its kernels."""
    plus, layer = task.endswith("+"), t.layer
    x, dy = (t.a, t.g2) if plus else (t.a1, t.db)
    size = Geometry(len(x), layer.edge, layer.channels, layer.each)
    units = size.count_units(tile, walks=kernel is weight_walk, pixels=count_rows(dy))
    blocks = layer.channels // (tile["G"] * tile["JO"]) * (1 if kernel is weight_walk else 3)
    programs = _count_programs(x, tile, units, blocks)
    parts = x.new_empty(programs, layer.channels, 9, layer.each, dtype=torch.float32)
    flags = {"PRE": int(plus)} | ({} if kernel is weight_walk else {"STRIDE": layer.stride})
    args = (x, t.v1, dy, t.b, t.u2, parts, *size.numbers)
    _start(Launch(kernel, (programs * blocks,), args, tile, flags))
    return {"dw": _finish_weight(parts, t)}


def run_pair(t: Tensors, task: str, kernel: Any, tile: Tile) -> Results:
    """`both` by one kernel."""
    plus, sums_wanted, layer = task.endswith("+"), task[-1] in "*+", t.layer
    x, dy = (t.a, t.g2) if plus else (t.a1, t.db)
    size = Geometry(len(x), layer.edge, layer.channels, layer.each)
    blocks = layer.channels // (tile["G"] * tile["J"])
    units = size.count_units(tile, walks=True, pixels=0)
    programs = _count_programs(x, tile, units, blocks)
    parts = x.new_empty(programs, layer.channels, 9, layer.each, dtype=torch.float32)
    sums = x.new_empty(2, programs, layer.channels, dtype=torch.float32)
    out = torch.empty_like(x)
    w = pack_weight(t, tile["J"], tile["J"], back=True)
    args = (x, t.v1, dy, t.b, t.u2, w, out, parts, t.a, sums, *size.numbers)
    tile = {name: value for name, value in tile.items() if name != "JO"}
    flags = {"PRE": int(plus), "POST": 2 * sums_wanted}
    _start(Launch(kernel, (programs * blocks,), args, tile, flags))
    found = {"dx": out, "dw": _finish_weight(parts, t)}
    return found | ({"u": finish_back(sums, t.v1, count_rows(x))} if sums_wanted else {})


_TODAY, _SIGNS = ("forward", "weight", "both"), ("", "*", "+")


@dataclass(frozen=True)
class Case:
    """One way to do a layer's task."""

    task: str
    way: str  # today, cudnn, walk, tile, pair
    tile: str  # the tile of ours, the width of cuDNN's
    run: Callable[[Tensors], Results]


def list_cases(layer: Layer) -> Iterator[Case]:
    """All of a layer, today's first."""
    for task in ("norm", "norm back", *(f"{name}{sign}" for name in _TODAY for sign in _SIGNS)):
        if task not in ("weight*", "weight+"):
            yield Case(task, "today", "", partial(run_today, task=task))
    for task in ("forward", "input", "weight"):
        for width in dict.fromkeys((layer.each, 16, 32, 64, 128)):
            if width >= layer.each:
                run = partial(run_torch, task=task, width=width)
                yield Case(task, "cudnn", f"width {width}", run)
    for task, way, run, kernel, tiles in _list_own(layer):
        for one in tiles:
            words = " ".join(str(value) for value in one.values())
            yield Case(task, way, words, partial(run, task=task, kernel=kernel, tile=one))


_Row = tuple[str, str, Callable[..., Results], Any, list[Tile]]


def _list_own(layer: Layer) -> Iterator[_Row]:
    """Task, way, and how our kernels do it, with their tiles; wide groups have fewer ways."""
    wide = layer.each > 16
    for sign in _SIGNS:
        walked = _WALK_WIDE if wide else _WALK_SUMS if sign else _WALK
        tiled = _TILE_WIDE if wide else _TILE_SUMS if sign else _TILE
        if layer.stride == 2:
            yield f"forward{sign}", "tile", run_conv, tile, tiled
            yield f"input{sign}", "tile", run_conv, strided_back, tiled
            continue
        for task in (f"forward{sign}", f"input{sign}"):
            yield task, "walk", run_conv, walk, walked
            yield task, "tile", run_conv, tile, tiled[:2]
        if not wide:
            yield f"both{sign}", "pair", run_pair, pair, _PAIR
    for sign in ("", "+"):
        if layer.stride == 1:
            walked = _WEIGHT_WALK_WIDE if wide else _WEIGHT_WALK[: 3 if sign else 4]
            yield f"weight{sign}", "walk", run_weight, weight_walk, walked
        tiled = _WEIGHT_TILE_WIDE if wide else _WEIGHT_TILE
        yield f"weight{sign}", "tile", run_weight, weight_tile, tiled
