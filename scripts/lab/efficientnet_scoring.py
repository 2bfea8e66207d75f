"""Other kernels for scoring EfficientNets, each layer of B0 and B4 with each, beside today's.

    python scripts/lab/efficientnet_scoring.py [MODEL:PIXELS:BATCH ...] [--seconds 85] [--out FILE]
    TRITON_INTERPRET=1 python scripts/lab/efficientnet_scoring.py --check

Microseconds in a CUDA graph, launch included (a profile's numbers are about 1 us less a launch),
inputs as warm in L2 as the layer before leaves them. `now` is what the library runs. Floor: bytes
at 4.3 TB/s and 1.6 us a launch. Four tables for each network and batch: filter (depthwise, with
sums by image), gate (sums to factors, for each number of rows of sums that a filter leaves),
project and expand (1x1). Then, for the network: each way everywhere, the best way for each layer,
and whole blocks, today's and the best, measured as chains. --check compares all of them with plain
torch on small shapes; on a GPU every way is compared before it is timed.

What is expected, in us over B0's 16 layers at batch 1 / 32, launches included (now: filter 81 and
587, gate 201 and 232), and why:

filter, larger tiles 80 / 370: compiled for sm_90, `now` issues 186 instructions for each output of
    a 5x5 and 99 of a 3x3: weights are loaded and converted for 8 outputs a thread. 64 x 64 has 32:
    114 and 60. `now` reaches 59 % of the issue rate, so this should too. Batch 1: too few programs.
filter, R rows a thread 70 / 280: a pixel is loaded once for all output rows that see it: 82 and 48
    instructions at R = 4, 112 and 64 at R = 2. Strides of 2 share fewer. Floor by bytes: 116.
filter, LOOP: columns of a window one after the other, 62 registers instead of 126 (5x5), and at
    R = 4 134 instead of 255: more programs in flight, less overlap in each; within 10 % either way.
filter, LIMIT 1024 to 4096: up to 5 % slower at batch 32, nothing at batch 1.
filter, LAST + 1.5 us a layer: an atomic, then one program adds up a channel block's rows of sums.
    Leaves one row, so that what follows has no loop over rows.
gate, squeeze 128 or 256 rows high 170 / 180: 784 rows of sums in fewer steps, but channel blocks
    are still one after the other, and late layers (1152 channels, 4 rows) gain nothing.
gate, squeeze_ahead 140 / 150: the same loads, three or four in flight.
gate, apart 110 / 125: totals, product, excite: three launches, one round trip deep each.
gate, whole 80 / 160: totals, then both products in one launch; a program of 64 channels squeezes
    for itself and reads w1 anew: good for few images, bad for 256. From one row 45 / 110.
project, GATE 2 and 3 -15 % at batch 32: a tile of one image loads BK factors a step, not BM x BK.
project, SPLITS -1 us a layer at batch 1 from 480 channels on: 8 to 18 serial steps become 4.
project, expand, tiles -15 % at batch 32: 16 to 320 columns waste much of 128 x 64.

In all: B0 0.37 to 0.25 ms at batch 1, 1.38 to 0.9 ms at batch 32; B4 1.38 to 0.9 ms at batch 1.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0913, PLR0917, BLE001  (kernels take pointers and sizes one by one; drivers raise)

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from phalanx.catalog.models import MODELS
from phalanx.inference import layers_fused, unit_ops
from phalanx.inference.conv_ops import convolve_and_activate
from phalanx.inference.conv_ways import NONE, SILU, counters
from phalanx.inference.layers_fused import _SILU, _activate, _add_split, _finish
from phalanx.kernels.choices import CHOICES, Launch, Tile, _time_on_device, make_tiles

# --- kernels ---


@triton.jit
def _add_tap(acc, value, w, c, okc, C, j, i: tl.constexpr, KS: tl.constexpr):
    """acc + value times the weight at (i, j), if there is one."""
    if (i >= 0) & (i < KS):
        weight = tl.load(w + (i * KS + j) * C + c, mask=okc, other=0.0).to(tl.float32)
        acc += value * weight[None, :]
    return acc


@triton.jit
def _add_column(
    accs, x, w, start, top, inside, c, okc, H, W, C, j,
    KS: tl.constexpr, STRIDE: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """What column j of all windows adds to R rows of output pixels."""
    a0, a1, a2, a3 = accs
    for i in tl.static_range((R - 1) * STRIDE + KS):
        ok = (inside & (top + i >= 0) & (top + i < H))[:, None] & okc[None, :]
        value = tl.load(x + start + (i * W + j) * C, mask=ok, other=0.0).to(tl.float32)
        a0 = _add_tap(a0, value, w, c, okc, C, j, i, KS)
        if R > 1:
            a1 = _add_tap(a1, value, w, c, okc, C, j, i - STRIDE, KS)
        if R > 2:
            a2 = _add_tap(a2, value, w, c, okc, C, j, i - 2 * STRIDE, KS)
            a3 = _add_tap(a3, value, w, c, okc, C, j, i - 3 * STRIDE, KS)
    return a0, a1, a2, a3


@triton.jit
def _store_row(acc, shift, out, total, place, ok, okc):
    """Store the activation of a row of pixels, and add it to the total."""
    acc = _activate(acc + shift, _SILU)
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=ok[:, None] & okc[None, :])
    return total + tl.where(ok[:, None], acc, 0.0)


@triton.jit(do_not_specialize=["H", "W", "HO", "WO", "C8", "PARTS"])
def filter_strips(
    x, w, bias, out, sums, totals, count, H, W, HO, WO, C8, PARTS,
    KS: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    R: tl.constexpr, LOOP: tl.constexpr, LAST: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """`filter_channels` of R (1, 2, 4) output rows at a time: pixels that rows share load once.

    LAST: the last program of an image's channels adds up its rows of sums, as totals [images, C].
    """
    C, image, part = C8 * 8, tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    okc, strips = c < C, tl.cdiv(HO, R) * WO
    shift = tl.load(bias + c, mask=okc, other=0.0)[None, :]
    total = tl.zeros((BM, BC), tl.float32)
    for block in range(part, tl.cdiv(strips, BM), PARTS):
        m = block * BM + tl.arange(0, BM)
        high, wide = (m // WO) * R, m % WO
        top, left, inside = high * STRIDE - PAD, wide * STRIDE - PAD, m < strips
        start = ((image * H + top) * W + left)[:, None] * C + c[None, :]
        zero = tl.zeros((BM, BC), tl.float32)
        accs = (zero, zero, zero, zero)
        if LOOP:
            for j in range(KS):
                seen = inside & (left + j >= 0) & (left + j < W)
                accs = _add_column(
                    accs, x, w, start, top, seen, c, okc, H, W, C, j, KS, STRIDE, R
                )  # fmt: skip
        else:
            for j in tl.static_range(KS):
                seen = inside & (left + j >= 0) & (left + j < W)
                accs = _add_column(
                    accs, x, w, start, top, seen, c, okc, H, W, C, j, KS, STRIDE, R
                )  # fmt: skip
        a0, a1, a2, a3 = accs
        place = ((image * HO + high) * WO + wide)[:, None] * C + c[None, :]
        total = _store_row(a0, shift, out, total, place, inside, okc)
        if R > 1:
            ok = inside & (high + 1 < HO)
            total = _store_row(a1, shift, out, total, place + WO * C, ok, okc)
        if R > 2:
            ok = inside & (high + 2 < HO)
            total = _store_row(a2, shift, out, total, place + 2 * WO * C, ok, okc)
            ok = inside & (high + 3 < HO)
            total = _store_row(a3, shift, out, total, place + 3 * WO * C, ok, okc)
    tl.store(sums + (image * PARTS + part) * C + c, tl.sum(total, 0), mask=okc)
    if LAST:
        counter = count + image * tl.num_programs(0) + tl.program_id(0)
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel") == PARTS - 1:
            whole = tl.zeros((64, BC), tl.float32)
            for p0 in range(0, PARTS, 64):
                p = p0 + tl.arange(0, 64)
                row = sums + (image * PARTS + p)[:, None] * C + c[None, :]
                known = (p < PARTS)[:, None] & okc[None, :]
                whole += tl.load(row, mask=known, other=0.0, cache_modifier=".cg")
            tl.store(totals + image * C + c, tl.sum(whole, 0), mask=okc)
            tl.store(counter, 0)


@triton.jit(do_not_specialize=["PARTS", "C8"])
def add_sums(sums, totals, PARTS, C8, BP: tl.constexpr, BC: tl.constexpr):
    """totals [images, C] of sums [images, PARTS, C], BC channels of an image a program."""
    C, image, p = C8 * 8, tl.program_id(0), tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    okc, total = c < C, tl.zeros((BP, BC), tl.float32)
    for p0 in range(0, PARTS, BP):
        place = (image * PARTS + p0 + p)[:, None] * C + c[None, :]
        total += tl.load(sums + place, mask=(p0 + p < PARTS)[:, None] & okc[None, :], other=0.0)
    tl.store(totals + image * C + c, tl.sum(total, 0), mask=okc)


@triton.jit(do_not_specialize=["PARTS", "PIXELS", "C8", "S"])
def squeeze_ahead(
    sums, w, bias, squeezed, PARTS, PIXELS, C8, S,
    BP: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """`squeeze` as one loop over rows and channels, DEPTH loads in flight."""
    C, image, p = C8 * 8, tl.program_id(0), tl.arange(0, BP)
    s = tl.program_id(1) * BS + tl.arange(0, BS)
    oks, acc, blocks = s < S, tl.zeros((BS, BC), tl.float32), tl.cdiv(PARTS, BP)
    for step in tl.range(0, tl.cdiv(C, BC) * blocks, num_stages=DEPTH):
        c, row = (step // blocks) * BC + tl.arange(0, BC), (step % blocks) * BP + p
        okc = c < C
        place = (image * PARTS + row)[:, None] * C + c[None, :]
        rows = tl.load(sums + place, mask=(row < PARTS)[:, None] & okc[None, :], other=0.0)
        ok = oks[:, None] & okc[None, :]
        weight = tl.load(w + s[:, None] * C + c[None, :], mask=ok, other=0.0).to(tl.float32)
        acc += weight * (tl.sum(rows, 0) / PIXELS)[None, :]
    value = _activate(tl.sum(acc, 1) + tl.load(bias + s, mask=oks, other=0.0), _SILU)
    tl.store(squeezed + image * S + s, value, mask=oks)


@triton.jit(do_not_specialize=["PIXELS", "C8", "S"])
def gate_whole(
    totals, w1, b1, w2, b2, gate, PIXELS, C8, S,
    BC: tl.constexpr, BS: tl.constexpr, BO: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """BO factors of an image from totals [images, C <= BC]: each program squeezes for itself."""
    C, image, c = C8 * 8, tl.program_id(0), tl.arange(0, BC)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    okc, oko, z = c < C, o < C, tl.zeros((BO, BS), tl.float32)
    mean = tl.load(totals + image * C + c, mask=okc, other=0.0) / PIXELS
    for s0 in tl.range(0, S, BS, num_stages=DEPTH):
        s = s0 + tl.arange(0, BS)
        oks = s < S
        narrow = tl.load(
            w1 + s[:, None] * C + c[None, :], mask=oks[:, None] & okc[None, :], other=0.0
        )
        broad = tl.load(
            w2 + o[:, None] * S + s[None, :], mask=oko[:, None] & oks[None, :], other=0.0
        )
        hidden = tl.sum(narrow.to(tl.float32) * mean[None, :], 1)
        hidden = _activate(hidden + tl.load(b1 + s, mask=oks, other=0.0), _SILU)
        z += broad.to(tl.float32) * hidden[None, :]
    value = tl.sum(z, 1) + tl.load(b2 + o, mask=oko, other=0.0)
    factor = (1.0 / (1.0 + tl.exp(-value))).to(gate.dtype.element_ty)
    tl.store(gate + image * C + o, factor, mask=oko)


@triton.jit(do_not_specialize=["M", "PIXELS", "C8", "N8"])
def multiply(
    x, w, bias, add, gate, out, part, count, M, PIXELS, C8, N8,
    GATE: tl.constexpr, ADD: tl.constexpr, ACT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """A 1x1 `convolve` that is compiled once for all channels.

    GATE: 1 loads a factor for each row and channel; the rows of 2 and 3 are of one image, and its
    factors go on the rows (2) or on the weights (3).
    """
    C, N, blocks = C8 * 8, N8 * 8, tl.cdiv(N8 * 8, BN)
    row, column, split = tl.program_id(0) // blocks, tl.program_id(0) % blocks, tl.program_id(1)
    m, n = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
    image = m // PIXELS
    if GATE > 1:
        each = tl.cdiv(PIXELS, BM)
        inner = (row % each) * BM + tl.arange(0, BM)
        m = tl.where(inner < PIXELS, (row // each) * PIXELS + inner, M)
    okm, okn, steps = m < M, n < N, tl.cdiv(C, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(split * steps // SPLITS, (split + 1) * steps // SPLITS):
        k = step * BK + tl.arange(0, BK)
        okk = k < C
        ok, okw = okm[:, None] & okk[None, :], okn[:, None] & okk[None, :]
        rows = tl.load(x + m[:, None] * C + k[None, :], mask=ok, other=0.0)
        weights = tl.load(w + n[:, None] * C + k[None, :], mask=okw, other=0.0)
        if GATE == 1:
            rows *= tl.load(gate + image[:, None] * C + k[None, :], mask=ok, other=0.0)
        if GATE == 2:
            rows *= tl.load(gate + (row // each) * C + k, mask=okk, other=0.0)[None, :]
        if GATE == 3:
            weights *= tl.load(gate + (row // each) * C + k, mask=okk, other=0.0)[None, :]
        acc = tl.dot(rows, tl.trans(weights), acc)
    if SPLITS > 1:
        counter = count + tl.program_id(0)
        acc, is_last = _add_split(acc, part, counter, m, n, M, N, split, SPLITS, BM, BN)
        if is_last:
            _finish(acc, bias, add, out, m, n, M, N, ADD, ACT)
    else:
        _finish(acc, bias, add, out, m, n, M, N, ADD, ACT)


# --- what is tried ---

_JOBS = "efficientnet_b0:224:1 efficientnet_b4:380:1 efficientnet_b0:224:32 efficientnet_b4:380:5"
_JOBS += " efficientnet_b0:224:8 efficientnet_b0:224:256"
# LIMIT: programs from which on each takes several blocks. BC < threads: else weights go through
# shared memory at every tap
_FILTERS = make_tiles(
    "R LOOP LAST BM BC LIMIT",
    *((1, 0, 0, 16, 64, limit, 4, 1) for limit in (4096, 2048, 1024)),
    *((1, 0, 0, 32, 32, 8192, 4, 1), (1, 0, 0, 32, 64, 8192, 4, 1), (1, 0, 0, 64, 64, 4096, 8, 1)),
    *((1, 1, 0, 16, 64, 8192, 4, 1), (1, 1, 0, 32, 64, 8192, 4, 1), (1, 1, 0, 64, 64, 4096, 4, 1)),
    *(
        (1, 1, 0, 128, 64, 2048, 8, 1),
        (1, 1, 0, 32, 128, 4096, 8, 1),
        (2, 0, 0, 16, 64, 8192, 4, 1),
    ),
    *((2, 1, 0, 16, 32, 8192, 4, 1), (2, 1, 0, 16, 64, 8192, 4, 1), (2, 1, 0, 32, 64, 4096, 4, 1)),
    *((4, 0, 0, 16, 32, 8192, 4, 1), (4, 1, 0, 16, 32, 8192, 4, 1), (4, 1, 0, 16, 64, 8192, 4, 1)),
    *((4, 1, 0, 16, 128, 4096, 8, 1), (4, 1, 0, 32, 64, 4096, 8, 1)),
    *((1, 1, 1, 16, 64, 8192, 4, 1), (2, 1, 1, 16, 64, 4096, 4, 1), (4, 1, 1, 16, 64, 4096, 4, 1)),
)
_TALL = make_tiles("BP BC BS", (128, 64, 16, 8, 1), (256, 32, 16, 8, 1))
_AHEAD = make_tiles("BP BC BS DEPTH", (64, 64, 16, 4, 8, 1), (16, 256, 16, 3, 8, 1))
_ADDED = make_tiles("BP BC", (16, 64, 4, 1), (64, 64, 4, 1), (512, 16, 8, 1))
_SHOT = make_tiles("BP BC BS", (1, 256, 4, 4, 1), (1, 1024, 4, 4, 1), (1, 4096, 4, 8, 1))
_WHOLE = make_tiles(
    "BC BS BO DEPTH",
    *((256, 16, 64, 2, 8, 1), (512, 16, 64, 3, 8, 1), (1024, 16, 64, 3, 8, 1)),
    *((2048, 8, 64, 3, 8, 1), (4096, 4, 64, 3, 8, 1)),
)
_PRODUCT = "BM BN BK SPLITS GATE"
_FEW_ROWS = make_tiles(  # tried below 8,192 rows
    _PRODUCT,
    *((32, 32, 64, 1, 1, 4, 4), (32, 32, 128, 1, 1, 4, 3), (32, 32, 64, 2, 1, 4, 4)),
    *((32, 32, 64, 4, 1, 4, 4), (16, 32, 128, 2, 1, 4, 3), (32, 64, 64, 2, 1, 4, 4)),
    *((32, 32, 64, 1, 2, 4, 4), (32, 32, 64, 4, 2, 4, 4), (16, 32, 128, 2, 2, 4, 3)),
)
_MANY_ROWS = make_tiles(  # tried from 2,048 rows on
    _PRODUCT,
    *((64, 32, 32, 1, 1, 4, 4), (64, 64, 64, 1, 1, 4, 3), (128, 32, 32, 1, 1, 4, 4)),
    *((128, 64, 32, 1, 1, 4, 4), (128, 64, 64, 1, 1, 4, 3), (128, 128, 64, 1, 1, 8, 3)),
    *((64, 32, 64, 1, 2, 4, 3), (64, 64, 64, 1, 2, 4, 3), (128, 32, 32, 1, 2, 4, 4)),
    *((128, 64, 64, 1, 2, 4, 3), (128, 64, 64, 1, 2, 8, 2), (128, 128, 64, 1, 2, 8, 3)),
    *((128, 64, 64, 1, 3, 4, 3), (128, 128, 64, 1, 3, 8, 3)),
)
_CLOSE = 2e-3  # relative error of 16-bit results
_KINDS = ("filter", "gate", "project", "expand")
_FAILURES: list[str] = []

Times = dict[str, float]  # microseconds by way


class Shape(NamedTuple):
    """An inverted block."""

    channels_in: int
    width: int
    squeezed: int
    channels_out: int
    kernel: int
    stride: int
    edge: int
    skips: bool
    widens: bool

    def __str__(self) -> str:
        move = f"{self.kernel}/{self.stride} {self.edge}px"
        return f"{self.channels_in}-{self.width}({self.squeezed})-{self.channels_out} {move}"


_SMALL = Counter(
    {
        Shape(16, 40, 6, 24, 5, 2, 11, False, True): 1,
        Shape(24, 136, 10, 24, 3, 1, 6, True, True): 2,
        Shape(32, 32, 8, 16, 5, 1, 7, False, False): 1,
        Shape(16, 72, 20, 16, 3, 2, 9, False, True): 1,
    }
)


class Way(NamedTuple):
    """One way to compute a layer; of a filter, with the rows of sums it leaves."""

    run: Callable[[], Any]
    parts: int = 0


def list_shapes(model: str, pixels: int) -> Counter[Shape]:
    """The blocks of a model, and how often it has each."""
    edge, found = -(-pixels // 2), Counter[Shape]()
    for b in MODELS[model].blocks:  # type: ignore[attr-defined]
        sizes = (b.channels_in, b.width, b.squeeze_width, b.channels_out, b.kernel, b.stride)
        found[Shape(*sizes, edge, b.skips, b.widens)] += 1
        edge = -(-edge // b.stride)
    return found


def describe(tile: Tile) -> str:
    """A tile as the head of a column, without what is zero."""
    short = {"num_warps": "w", "num_stages": "s"}
    return " ".join(f"{short.get(name, name)}{value}" for name, value in tile.items() if value)


@dataclass
class Block:
    """A block's tensors, with all ways to compute its layers."""

    shape: Shape
    batch: int
    device: str
    shrink: int = 1  # by what limits of programs are divided: small shapes reach them too

    def __post_init__(self) -> None:
        s = self.shape
        self.edge = -(-s.edge // s.stride)
        self.pixels, self.images = self.edge**2, sorted({0, self.batch // 2, self.batch - 1})
        self.x = self._image(s.channels_in, s.edge)
        self.mid = self._image(s.width, s.edge)
        self.filtered, self.out = (self._image(c, self.edge) for c in (s.width, s.channels_out))
        self.gate = torch.rand(self.batch, s.width, device=self.device).half()
        filters = self._random(s.width, 1, s.kernel, s.kernel, scale=s.kernel).half()
        self.filters = [filters, filters[:, 0].permute(1, 2, 0).contiguous()]
        self.weights = {
            "expand": self._random(s.width, s.channels_in, scale=s.channels_in**0.5).half(),
            "project": self._random(s.channels_out, s.width, scale=s.width**0.5).half(),
        }
        self.biases = {c: self._random(c) for c in (s.width, s.channels_out)}
        self.gates = [
            self._random(s.squeezed, s.width, scale=s.width**0.5).half(),
            self._random(s.squeezed),
            self._random(s.width, s.squeezed, scale=s.squeezed**0.5).half(),
            self._random(s.width),
        ]
        self._sums: dict[int, Tensor] = {}
        self.results = {"expand": self.mid, "filter": self.filtered}
        self.results |= {"gate": self.gate, "project": self.out}

    def _random(self, *sizes: int, scale: float = 1.0) -> Tensor:
        return torch.randn(sizes, device=self.device) / scale

    def _image(self, channels: int, edge: int) -> Tensor:
        sizes, half = (self.batch, edge, edge, channels), torch.float16
        return torch.randn(sizes, dtype=half, device=self.device).permute(0, 3, 1, 2)

    def sums(self, parts: int) -> Tensor:
        """Rows of sums of which the means are about one."""
        if parts not in self._sums:
            rows = self._random(self.batch, parts, self.shape.width, scale=parts**0.5)
            self._sums[parts] = rows * self.pixels
        return self._sums[parts]

    def _launch(
        self, kernel: Any, grid: tuple[int, ...], args: Any, tile: Tile, **flags: int
    ) -> None:
        CHOICES.run_fastest([Launch(kernel, grid, tuple(args), tile, flags)])

    def find_ways(self, kind: str, parts: int = 0) -> dict[str, Way]:
        """All ways to compute a layer, today's first."""
        if kind == "filter":
            return self._filter_ways()
        return self._gate_ways(parts) if kind == "gate" else self._product_ways(kind)

    def list_parts(self, kind: str) -> list[int]:
        """Of gates: how many rows of sums there are to add up, behind any of the filters."""
        if kind == "expand" and not self.shape.widens:
            return []
        return sorted({w.parts for w in self._filter_ways().values()}) if kind == "gate" else [0]

    def chain(self, *names: str) -> Callable[[], object]:
        """The whole block: how it widens, filters, weighs and narrows."""
        widen, first, second, narrow = names
        behind = self._filter_ways()[first]
        ways = [self._product_ways("expand")[widen]] if self.shape.widens else []
        ways += [behind, self._gate_ways(behind.parts)[second]]
        ways += [self._product_ways("project")[narrow]]
        return lambda: [way.run() for way in ways]

    def _count_parts(self, tile: Tile) -> int:
        blocks = -(-(-(-self.edge // tile["R"]) * self.edge) // tile["BM"])
        programs = self.batch * -(-self.shape.width // tile["BC"]) * blocks
        return -(-blocks // max(1, programs * self.shrink // tile["LIMIT"]))

    def _filter_ways(self) -> dict[str, Way]:
        s, bias = self.shape, self.biases[self.shape.width]
        move = [s.stride, s.kernel // 2]
        limits = {"R": 1, "LIMIT": unit_ops._FILTERS * self.shrink} | unit_ops._IMAGE_TILE

        def run_now() -> tuple[Tensor, Tensor]:
            return unit_ops.filter_channels(self.mid, self.filters, bias, move, SILU)

        found = {"now": Way(run_now, self._count_parts(limits))}
        for row in _FILTERS:
            parts = self._count_parts(row)
            tile = {name: value for name, value in row.items() if name != "LIMIT"}
            left = 1 if row["LAST"] else parts
            found[describe(row)] = Way(partial(self._filter, tile, parts), left)
        return found

    def _filter(self, tile: Tile, parts: int) -> tuple[Tensor, Tensor]:
        s, rows, totals = self.shape, self.sums(parts), self.sums(1)
        args: list[Any] = [self.mid, self.filters[1], self.biases[s.width], self.filtered]
        args += [rows, totals, counters(self.mid.device), s.edge, s.edge, self.edge, self.edge]
        args += [s.width // 8, parts]
        grid = (-(-s.width // tile["BC"]), self.batch * parts)
        flags = {"KS": s.kernel, "STRIDE": s.stride, "PAD": s.kernel // 2}
        self._launch(filter_strips, grid, args, tile, **flags)
        return self.filtered, totals if tile["LAST"] else rows

    def _gate_ways(self, parts: int) -> dict[str, Way]:
        sums, half = self.sums(parts), torch.float16

        def run_now() -> Tensor:
            return unit_ops.squeeze_and_excite(sums, self.gates, self.pixels, half)

        ways: dict[str, Callable[[], Tensor]] = {"now": run_now}
        is_now = parts == self._filter_ways()["now"].parts
        tried = [(squeeze_ahead, tile) for tile in (_AHEAD if is_now else _AHEAD[:1])]
        tried += [(layers_fused.squeeze, tile) for tile in _TALL if is_now]
        for kernel, tile in tried if parts > 1 else []:
            run = partial(
                lambda *squeeze: self._excite(self._squeeze(*squeeze)), kernel, sums, tile
            )
            ways[f"{kernel.__name__} {tile['BP']}x{tile['BC']}"] = run
        shot = next(tile for tile in _SHOT if tile["BC"] >= self.shape.width)
        squeeze = layers_fused.squeeze
        ways["apart"] = lambda: self._excite(self._squeeze(squeeze, self._add(sums), shot))
        ways["whole"] = lambda: self._whole(self._add(sums))
        return {name: Way(run) for name, run in ways.items()}

    def _add(self, sums: Tensor) -> Tensor:
        """One row of sums."""
        parts, width = sums.shape[1:]
        if parts == 1:
            return sums
        totals = torch.empty_like(sums[:, :1])
        tile = next((tile for tile in _ADDED if tile["BP"] >= parts), _ADDED[-1])
        grid = (self.batch, -(-width // tile["BC"]))
        self._launch(add_sums, grid, (sums, totals, parts, width // 8), tile)
        return totals

    def _squeeze(self, kernel: Any, sums: Tensor, tile: Tile) -> Tensor:
        narrow = sums.new_empty(self.batch, self.shape.squeezed)
        args = (sums, *self.gates[:2], narrow, sums.shape[1], self.pixels)
        grid = (self.batch, -(-self.shape.squeezed // tile["BS"]))
        self._launch(kernel, grid, (*args, self.shape.width // 8, self.shape.squeezed), tile)
        return narrow

    def _excite(self, narrow: Tensor) -> Tensor:
        width, squeezed, tile = self.shape.width, self.shape.squeezed, unit_ops._EXCITE_TILE
        args = (narrow, *self.gates[2:], self.gate, width // 8, squeezed)
        size = max(2, 1 << (squeezed - 1).bit_length())
        grid = (self.batch, -(-width // tile["BC"]))
        self._launch(layers_fused.excite, grid, args, tile, BS=size)
        return self.gate

    def _whole(self, totals: Tensor) -> Tensor:
        width = self.shape.width
        tile = next(tile for tile in _WHOLE if tile["BC"] >= width)
        args = (totals, *self.gates, self.gate, self.pixels, width // 8, self.shape.squeezed)
        self._launch(gate_whole, (self.batch, -(-width // tile["BO"])), args, tile)
        return self.gate

    def _product(self, kind: str) -> tuple[Tensor, Tensor | None, Tensor | None, int]:
        """What goes in, what is added, the factors, the activation."""
        if kind == "expand":
            return self.x, None, None, SILU
        return self.filtered, self.x if self.shape.skips else None, self.gate, NONE

    def _product_ways(self, kind: str) -> dict[str, Way]:
        (x, add, gate, act), weight = self._product(kind), self.weights[kind]
        bias, rows = self.biases[weight.shape[0]], x.numel() // x.shape[1]
        whole = weight[:, :, None, None].contiguous(memory_format=torch.channels_last)
        biases = [bias, bias.half()]

        def run_now() -> Tensor:
            return convolve_and_activate(x, [whole], biases, add, gate, [1, 0, 1], act)

        found = {"now": Way(run_now)}
        tiles = _FEW_ROWS * (rows < 8192) + _MANY_ROWS * (rows >= 2048 or self.shrink > 1)
        for tile in tiles:
            splits = tile["SPLITS"] > 1 and tile["SPLITS"] * tile["BK"] > x.shape[1]
            if (gate is None and tile["GATE"] > 1) or (splits and self.shrink == 1):
                continue
            found[describe(tile)] = Way(partial(self._multiply, kind, tile))
        return found

    def _multiply(self, kind: str, tile: Tile) -> Tensor:
        (x, add, gate, act), weight = self._product(kind), self.weights[kind]
        out = self.mid if kind == "expand" else self.out
        wide, rows, bias = weight.shape[0], x.numel() // x.shape[1], self.biases[weight.shape[0]]
        tile = tile | ({"GATE": 0} if gate is None else {})
        shares = tile["SPLITS"] if tile["SPLITS"] > 1 else 0
        part = torch.empty(shares * rows * wide, device=self.device)
        args: list[Any] = [x, weight, bias, bias if add is None else add]
        args += [bias if gate is None else gate, out]
        args += [part, counters(out.device), rows, x.shape[2] * x.shape[3], x.shape[1] // 8]
        blocks = -(-rows // tile["BM"])
        if tile["GATE"] > 1:
            blocks = self.batch * -(-self.pixels // tile["BM"])
        grid = (blocks * -(-wide // tile["BN"]), tile["SPLITS"])
        self._launch(multiply, grid, [*args, wide // 8], tile, ADD=int(add is not None), ACT=act)
        return out

    def spoil(self, kind: str) -> None:
        """Leave nothing of what another way wrote."""
        for tensor in [self.results[kind], *(self._sums.values() if kind == "filter" else ())]:
            tensor.fill_(math.nan)

    def renew(self, kind: str) -> None:
        """Values for the layers that read what this one writes, whatever became of it."""
        self.results[kind].normal_()
        if kind == "filter":
            self._sums.clear()

    # --- references and floors ---

    def find_floor(self, kind: str, parts: int = 0) -> float:
        """Microseconds of a launch that reads and writes everything once."""
        s, before, after = self.shape, self.batch * self.shape.edge**2, self.batch * self.pixels
        moved = {
            "filter": 2 * s.width * (before + after),
            "gate": 4 * s.width * (s.squeezed + self.batch * parts),
            "project": 2 * (after * (s.width + s.channels_out * (1 + s.skips)))
            + 2 * s.width * s.channels_out,
            "expand": 2 * (before * (s.width + s.channels_in) + s.width * s.channels_in),
        }
        return moved[kind] / 4.3e6 + 1.6

    def compute_reference(self, kind: str, parts: int = 0) -> list[Tensor]:
        """A layer in plain torch and 32 bits, for some of the images."""
        s, images = self.shape, self.images
        if kind == "filter":
            x, weight, bias = self.mid[images].float(), self.filters[0].float(), self.biases
            y = F.conv2d(x, weight, bias[s.width], s.stride, s.kernel // 2, 1, s.width)
            return [F.silu(y), F.silu(y).sum((2, 3))]
        if kind == "gate":
            rows = self.sums(parts)[images]
            return [unit_ops.gate_reference(rows, self.gates, self.pixels, torch.float32)]
        x, add, gate, act = self._product(kind)
        weight = self.weights[kind].float()[:, :, None, None]
        x = x[images].float()
        x = x if gate is None else x * gate[images].float()[:, :, None, None]
        y = F.conv2d(x, weight, self.biases[weight.shape[0]])
        return [F.silu(y) if act == SILU else y if add is None else y + add[images].float()]

    def find_error(self, kind: str, found: Any, wanted: list[Tensor]) -> float:
        """The relative errors of what a way gave, added up: what is no number stays none."""
        found = (found[0], found[1].sum(1)) if kind == "filter" else (found,)
        pairs = zip(found, wanted, strict=True)
        return sum(float((f[self.images].float() - w).norm() / w.norm()) for f, w in pairs)


# --- measuring ---


def time_run(run: Callable[[], object], device: str) -> float:
    """Microseconds; in the interpreter those of the clock, which say nothing."""
    if device == "cuda":
        return 1e3 * _time_on_device(run)
    began = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - began)


def measure_ways(block: Block, kind: str, parts: int = 0) -> Times:
    """Microseconds of each way that gives what plain torch gives."""
    wanted, found = block.compute_reference(kind, parts), {}
    for name, way in block.find_ways(kind, parts).items():
        block.spoil(kind)
        try:
            result = way.run()
            error = block.find_error(kind, result, wanted)
            if not error < _CLOSE:
                raise ValueError(f"relative error {error:.3g}")
            if kind == "filter" and result[1].shape[1] != way.parts:
                raise ValueError(f"{result[1].shape[1]} rows of sums, not {way.parts}")
            found[name] = time_run(way.run, block.device)
        except Exception as failure:
            print(f"FAILED {kind} {block.shape} x{block.batch} {name}: {failure!r:.200}")
            _FAILURES.append(name)
    block.renew(kind)
    return found


class Network:
    """The blocks of a model at a batch size, and the microseconds of their layers."""

    def __init__(self, name: str, blocks: list[tuple[Block, int]]):
        self.name, self.blocks = name, blocks
        self.found: dict[str, list[dict[int, Times]]] = {kind: [] for kind in _KINDS}

    def run_all(self) -> None:
        """Run every way once, as a compiler wants to see it."""
        for block, _ in self.blocks:
            for kind in _KINDS:
                for parts in block.list_parts(kind):
                    for way in block.find_ways(kind, parts).values():
                        way.run()

    def measure(self, deadline: float) -> bool:
        """Time all layers in all ways, row by row; whether there was time enough."""
        for kind in _KINDS:
            print(f"\n{self.name} {kind}, us (* best)")
            heads: dict[str, str] = {}
            for block, count in self.blocks:
                if time.perf_counter() > deadline:
                    return False
                found = {p: measure_ways(block, kind, p) for p in block.list_parts(kind)}
                self.found[kind].append(found)
                for parts, times in found.items():
                    label = f"{count} x {block.shape}" + (f" {parts} rows" if parts else "")
                    print_row(label, block.find_floor(kind, parts), times, heads)
        return True

    def summarise(self) -> dict[str, Any]:
        """What the network would take, by kind: as now, each way everywhere, the best of each."""
        print(f"\n{self.name}, us of all {sum(count for _, count in self.blocks)} blocks")
        sums: dict[str, Any] = {}
        chosen: dict[str, list[str]] = {}
        for kind in ("filter", "gate", "filter + gate", "project", "expand"):
            rows = [self._find_times(kind, place) for place in range(len(self.blocks))]
            chosen[kind] = [min(row, key=lambda name: row[name], default="") for row in rows]
            counted = [(n, row) for (_, n), row in zip(self.blocks, rows, strict=True) if row]
            names = [name for name in counted[0][1] if all(name in row for _, row in counted)]
            whole = {name: sum(n * row[name] for n, row in counted) for name in names}
            best = sum(n * min(row.values()) for n, row in counted)
            floor = sum(
                n * b.find_floor(k, 1)
                for k in kind.split(" + ")
                for b, n in self.blocks
                if b.list_parts(k)
            )
            sums[kind] = {"floor": floor, "best": best, "everywhere": whole}
            shown = sorted(whole.items(), key=lambda item: item[1])[:5]
            print(
                f"{kind}: floor {floor:.0f}, now {whole.get('now', math.nan):.0f}, best {best:.0f}"
            )
            print("    everywhere: " + "; ".join(f"{name} {us:.0f}" for name, us in shown))
        return sums | {"blocks": self._measure_chains(chosen)}

    def _find_times(self, kind: str, place: int) -> Times:
        """The times of a block's layer; of gates, behind today's filter."""
        if kind in ("project", "expand"):
            return self.found[kind][place].get(0, {})
        ways = self.blocks[place][0].find_ways("filter")
        filters, gates = self.found["filter"][place][0], self.found["gate"][place]
        if kind == "filter":
            return filters
        if kind == "gate":
            return gates[ways["now"].parts]
        pairs = [(f, g) for f in filters for g in gates[ways[f].parts]]
        times = {f"{f} + {g}": filters[f] + gates[ways[f].parts][g] for f, g in pairs}
        return {"now": times.get("now + now", math.nan)} | times

    def _measure_chains(self, chosen: dict[str, list[str]]) -> list[dict[str, Any]]:
        """Whole blocks, today's and the best, one layer behind the other."""
        found: list[dict[str, Any]] = []
        for place, (block, count) in enumerate(self.blocks):
            pair, narrow, widen = (chosen[k][place] for k in ("filter + gate", "project", "expand"))
            first, second = ["now", "now"] if pair == "now" else pair.split(" + ")
            chains = [["now"] * 4, [widen, first, second, narrow]]
            now, best = (time_run(block.chain(*names), block.device) for names in chains)
            row = {"block": str(block.shape), "count": count, "now": now, "best": best}
            found.append(row | {"ways": chains[1]})
            print(f"  {count} x {block.shape!s:34} {now:7.1f} -> {best:7.1f}: {chains[1]}")
        now, best = (sum(row["count"] * row[k] for row in found) for k in ("now", "best"))
        print(f"  as chains: now {now:.0f}, best {best:.0f}", flush=True)
        return found


def print_row(label: str, floor: float, times: Times, heads: dict[str, str]) -> None:
    """A layer's times under letters, with the meaning of those that are new."""
    for name in times:
        if name not in heads:
            heads[name] = chr(ord("a") + len(heads))
            print(f"  {heads[name]}: {name}")
    best = min(times.values(), default=0.0)
    cells = [f"{heads[n]}{'*' if us == best else ' '}{us:<6.1f}" for n, us in times.items()]
    print(f"  {label:44} floor {floor:6.1f} | {' '.join(cells)}", flush=True)


@torch.no_grad()
def main() -> None:
    """Check, or measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("jobs", nargs="*", default=_JOBS.split(), metavar="MODEL:PIXELS:BATCH")
    parser.add_argument("--check", action="store_true", help="small shapes, in the interpreter")
    parser.add_argument("--seconds", type=float, default=85, help="no new layer after these")
    parser.add_argument("--out", type=Path, help="a JSON file with all numbers")
    words = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    written: dict[str, Any] = {}
    began = time.perf_counter()
    deadline = math.inf if words.check else began + words.seconds
    for job in ["small:0:2"] if words.check else words.jobs:
        if time.perf_counter() > deadline:
            print(f"{words.seconds:.0f} s are over: {job} is not measured")
            continue
        model, pixels, batch = job.split(":")
        device, shrink = ("cpu", 512) if words.check else ("cuda", 1)
        shapes = _SMALL if words.check else list_shapes(model, int(pixels))
        blocks = [(Block(s, int(batch), device, shrink), n) for s, n in shapes.items()]
        network = Network(job, blocks)
        if not words.check:
            kernels = CHOICES.compile_all(network.run_all)
            print(f"\n{job}: {kernels} kernels after {time.perf_counter() - began:.1f} s")
        is_whole = network.measure(deadline)
        written[job] = {"shapes": [str(s) for s in shapes], "layers": network.found}
        if is_whole:
            written[job]["sums"] = network.summarise()
        print(f"{time.perf_counter() - began:.1f} s", flush=True)
        if words.out:
            words.out.write_text(json.dumps(written, indent=1))
    if _FAILURES:
        raise SystemExit(f"{len(_FAILURES)} ways failed: {sorted(set(_FAILURES))}")


if __name__ == "__main__":
    main()
