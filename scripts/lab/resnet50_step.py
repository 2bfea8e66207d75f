"""A ResNet-50 training step whose last 1x1 convolution, norm, residual and ReLU are one kernel.

    python scripts/lab/resnet50_step.py [--out DIR] [--seconds 240]

Checks the kernels of step_kernels.py against torch in float64, then measures whole training steps
(batch 256, 224 px, synthetic images on the device, channels_last, one CUDA graph) of the variants
below in turns, in float16 and bfloat16; prints a table of kernels of the fastest and writes
everything to DIR/resnet50_step_PART.json, where the parts are check, float16 and bfloat16. What
fails is reported and the rest goes on.
TRITON_INTERPRET=1 with --device cpu checks small shapes without a GPU.

The baseline has a kernel each for statistics, normalise + ReLU (+ residual), backward reduce and
backward apply, the stem's pool inside its norm, and one update kernel. The others replace what
surrounds each block's last convolution (and most shortcut convolutions) as step_kernels.py says.
`small` adds what needs no new product: the stem's norm takes its backward sums from the pool's
winners, the stem's convolution may read its image as 2 x 2 blocks of pixels, the library may
multiply Gram matrices, and the first convolution of a block may take its statistics along, each
where it is measured to be faster. `rows` lets products walk over the rows with their weights kept.
`side` runs the weight gradients of the first two convolutions of a block on a second stream, where
they fill what the many small kernels of the main one leave idle.
`ahead` (on top of small+rows) lets products of many channels, at 28 px and less, fetch their
factors by the copy engine. `finish` lets the last program of a sum finish it, makes the forward
pass's fold one kernel, and takes 16-bit products for that of the backward pass.
`pairs` (on top of ahead) makes the last product of a block and the first convolution of the block
above one kernel; `raw` does so with the product that ends a block's backward pass and the weight
gradient of the block below; `input`, at 28 px and less, with the larger part of the input gradient
of that block's last convolution (pair_kernels.py). Each only where it is measured to be faster.
Every choice is measured by graphs, so that the time to launch does not count.
"""

import argparse
import gc
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from itertools import product as product_of
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from pair_kernels import (
    PAIR_ROWS_TILES,
    PAIR_WALK_TILES,
    SKIP_RAW_TILES,
    SKIP_WALK_TILES,
    fold_input_affine,
    input_fits,
    pair,
    pair_fits,
    pair_rows,
    pair_walk,
    skip_fits,
    skip_raw,
    skip_walk,
    skip_with_input,
    skip_with_raw,
)
from step_kernels import (
    AHEAD_TILES,
    EPS,
    GEMM_TILES,
    INTERPRETED,
    KEEP_BITS,
    KEEP_NORMAL,
    KEEP_POSITIVE,
    NONE,
    RELU,
    ROWS_TILES,
    SCALE_SHIFT,
    SHIFT,
    TOTAL,
    WITH_GATE,
    WITH_SQUARE,
    apply_norm,
    apply_norm_back,
    ban_key,
    finish,
    finish_back,
    flat,
    fold,
    fold_back,
    fold_back_input,
    gemm,
    gemm_ahead,
    gemm_rows,
    gram_matrix,
    head_back,
    launcher,
    pool,
    pool_back,
    product,
    raw_weight_gradient,
    reduce_norm,
    shorten,
    statistics,
    time_ms,
    update_weights,
)
from torch import Tensor

CAPACITY = 2**25  # weights; ResNet-50 has 25.6 million
WIDEST_GRAM = 512  # a shortcut's Gram matrix costs more than it saves beyond these channels
LAST_NORM = 0.2  # weights of a block's last norm at the start: larger ones make gradients chaotic
ROUNDS, REPLAYS = 7, 12
DRAWS = 5  # of a block's check: which ReLUs rounding flips is a matter of luck
THREADS = 16
CHECK_SECONDS = 140  # leaves time to measure when the checks are slow
SHORTEST_PART = 40  # seconds; less is not enough for a result
HALVES = (torch.float16, torch.bfloat16)
DEAD_DEVICE = 3  # a part's exit status: a tile ended the device's work, is banned now; try again


@dataclass(frozen=True)
class Variant:
    """What a step is made of."""

    name: str
    gram: bool = False  # the last convolution of a block knows its norm from a Gram matrix
    bits: bool = False  # where a block's ReLU let through is kept in bits, not read from its output
    small: bool = False  # the stem's shortcuts and the choices that need no new product
    rows: bool = False  # products may walk over the rows
    ahead: bool = False  # products of many channels may fetch by the copy engine
    finish: bool = False  # sums are finished by their last program, folds are one kernel
    side: bool = False  # the convolutions' weight gradients run beside the rest
    pairs: bool = False  # a block's last product takes along the next block's first convolution
    raw: bool = False  # a block's input gradient takes along the weight gradient of the block below
    input: bool = False  # or the product with the weight of that block's last convolution

    @property
    def meets(self) -> bool:
        """Whether products of two blocks may be one kernel."""
        return self.pairs or self.raw or self.input

    def allow(self) -> None:
        """Tell the launcher what it may use."""
        launcher.rows, launcher.ahead, launcher.finish = self.rows, self.ahead, self.finish


VARIANTS = (
    Variant("baseline"),
    Variant("gram+bits", gram=True, bits=True),
    Variant("small", gram=True, bits=True, small=True),
    Variant("small+rows", gram=True, bits=True, small=True, rows=True),
    Variant("small+rows+side", gram=True, bits=True, small=True, rows=True, side=True),
    Variant("ahead", gram=True, bits=True, small=True, rows=True, ahead=True),
    Variant("finish", gram=True, bits=True, small=True, rows=True, finish=True),
    Variant("ahead+finish", gram=True, bits=True, small=True, rows=True, ahead=True, finish=True),
    Variant("pairs", gram=True, bits=True, small=True, rows=True, ahead=True, pairs=True),
    Variant("raw", gram=True, bits=True, small=True, rows=True, ahead=True, raw=True),
    Variant("input", gram=True, bits=True, small=True, rows=True, ahead=True, input=True),
    Variant(
        "all",
        gram=True,
        bits=True,
        small=True,
        rows=True,
        ahead=True,
        pairs=True,
        raw=True,
        input=True,
    ),
)


# --- weights ---


@dataclass(frozen=True)
class Conv:
    """A convolution's 16-bit weight and where its float32 gradient belongs."""

    name: str
    weight: Tensor
    grad: Tensor
    stride: int
    pad: int

    @property
    def matrix(self) -> Tensor:
        """The weight of a 1x1 convolution as [out, in]."""
        return flat(self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        """cuDNN's convolution."""
        y = F.conv2d(x, self.weight, stride=self.stride, padding=self.pad)
        return y.contiguous(memory_format=torch.channels_last)  # as it comes, or the kernels err

    def backward(self, dy: Tensor, x: Tensor, wanted: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
        """Gradients of x and of the weight, as far as wanted."""
        pads, strides = [self.pad] * 2, [self.stride] * 2
        dx, dw, _ = torch.ops.aten.convolution_backward(
            dy, x, self.weight, None, strides, pads, [1, 1], False, [0, 0], 1, [*wanted, False]
        )
        if wanted[0]:
            dx = dx.contiguous(memory_format=torch.channels_last)
        return dx, dw


@dataclass(frozen=True)
class Norm:
    """A BatchNorm's float32 weight, bias, their gradients and its running mean and variance."""

    name: str
    weight: Tensor
    bias: Tensor
    weight_grad: Tensor
    bias_grad: Tensor
    running: Tensor


class Weights:
    """Flat float32 weights, momenta and gradients with a 16-bit copy, handed out as views."""

    def __init__(self, dtype: torch.dtype, device: str, seed: int):
        self.generator = torch.Generator(device).manual_seed(seed)
        self.p, self.m, self.g = (torch.zeros(CAPACITY, device=device) for _ in range(3))
        self.q = torch.zeros(CAPACITY, device=device, dtype=dtype)
        self.used = 0
        self.pending: list[tuple[Tensor, Tensor]] = []  # gradients to be copied into g, all at once

    def take(self, *shape: int, std: float) -> tuple[slice, Tensor]:
        """The next weights' place and their float32 values, normal with std around 0 (or 1)."""
        count = torch.Size(shape).numel()
        place = slice(self.used, self.used + count)
        self.used += (count + 63) // 64 * 64
        values = self.p[place]
        values.normal_(0.0, std, generator=self.generator)
        return place, values

    def conv(self, name: str, into: int, out: int, size: int = 1, stride: int = 1) -> Conv:
        """A convolution with He's initial weights."""
        shape = (out, size, size, into)
        place, values = self.take(*shape, std=(2 / (out * size * size)) ** 0.5)
        self.q[place].copy_(values)
        images = [t[place].view(shape).permute(0, 3, 1, 2) for t in (self.q, self.g)]
        return Conv(name, *images, stride, size // 2)

    def norm(self, name: str, channels: int, around: float = 1.0) -> Norm:
        """A norm; its weights are spread so that a check sees a wrong channel."""
        places = []
        for centre in (around, 0.0):
            place, values = self.take(channels, std=0.1 * around)
            values.add_(centre)
            places.append(place)
        running = torch.zeros(2, channels, device=self.p.device)
        running[1] = 1
        return Norm(name, *(t[p] for t in (self.p, self.g) for p in places), running)

    def collect(self, norm: Norm, u: Tensor) -> None:
        """Note a norm's gradients, the first two rows of its backward vectors."""
        self.pending += [(norm.weight_grad, u[0]), (norm.bias_grad, u[1])]

    def collect_conv(self, conv: Conv, dw: Tensor) -> None:
        """Note a convolution's gradient as a plain row, so that the copy below stays one kernel."""
        self.pending.append((flat(conv.grad).view(-1), flat(dw).reshape(-1)))

    def finish(self) -> None:
        """Copy what is pending: one launch for each type of gradient."""
        for dtype in {value.dtype for _, value in self.pending}:
            pairs = [pair for pair in self.pending if pair[1].dtype == dtype]
            torch._foreach_copy_([to for to, _ in pairs], [value for _, value in pairs])
        self.pending = []


class SideStream:
    """Work that nothing waits for before the update; without a stream it is done at once.

    The memory it reads is held until the main stream has waited for it, a block later.
    """

    def __init__(self, wanted: bool):
        self.stream = torch.cuda.Stream() if wanted else None
        self.held: list[list[Any]] = [[], []]  # of the block before and of this one
        self.done: Any = None  # when the block before is

    def run(self, work: Callable[[], None], *held: Tensor) -> None:
        """Do the work beside what follows."""
        if self.stream is None:
            work()
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            work()
        self.held[-1].append(held)

    def end_block(self) -> None:
        """Wait for the block before this one, and let go of its memory."""
        if self.stream is None:
            return
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)
        self.done = self.stream.record_event()
        self.held = [self.held[-1], []]

    def join(self) -> None:
        """Wait for everything."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            self.held, self.done = [[], []], None


# --- the stem's convolution ---


def by_quads(x: Tensor) -> Tensor:
    """[N, C, H, W] as [N, 4 C, H / 2, W / 2]: the pixels of 2 x 2 blocks become channels."""
    n, c, h, w = x.shape
    parts = x.reshape(n, c, h // 2, 2, w // 2, 2).permute(0, 3, 5, 1, 2, 4)
    return parts.reshape(n, 4 * c, h // 2, w // 2)


class Stem:
    """The 7x7 convolution of stride 2 over an image laid out as `form` says.

    plain: three channels. padded: a fourth of zeros. quads: 2 x 2 blocks of the padded pixels as 16
    channels, so that the convolution is 4x4 of stride 1. Whoever writes the image lays it out.
    """

    def __init__(self, form: str, conv: Conv, weights: Weights, place: slice):
        self.form, self.conv, self.weights = form, conv, weights
        if form == "plain":
            return
        zero = CAPACITY - 1  # where q is 0, being beyond all weights
        out, channels, size, _ = conv.weight.shape
        own = torch.arange(place.start, place.stop, device=weights.q.device)
        own = own.view(out, size, size, channels).permute(0, 3, 1, 2)
        own = F.pad(own, (0, 0, 0, 0, 0, 1), value=zero)
        if form == "quads":
            own = by_quads(F.pad(own, (1, 0, 1, 0), value=zero))
        self.shape = own.permute(0, 2, 3, 1).shape
        self.source = own.permute(0, 2, 3, 1).reshape(-1)
        real = torch.nonzero(self.source != zero).view(-1)
        self.back = torch.empty(len(real), dtype=torch.long, device=real.device)
        self.back[self.source[real] - place.start] = real

    def arrange(self, x: Tensor) -> Tensor:
        """An image of three channels as this form wants it."""
        if self.form == "plain":
            return x
        x = F.pad(x, (0, 0, 0, 0, 0, 1))
        x = by_quads(F.pad(x, (4, 2, 4, 2))) if self.form == "quads" else x
        return x.contiguous(memory_format=torch.channels_last)

    def convolve(self, x: Tensor) -> Tensor:
        """The convolution of an arranged image."""
        if self.form == "plain":
            return self.conv(x)
        return self.arranged()(x)

    def arranged(self) -> Conv:
        """The convolution with its weight in this form."""
        weight = self.weights.q.index_select(0, self.source).view(self.shape).permute(0, 3, 1, 2)
        stride, pad = (1, 0) if self.form == "quads" else (2, 3)
        return Conv("stem", weight, self.conv.grad, stride, pad)

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        """The weight's gradient as a row, in the order of the flat weights."""
        conv = self.conv if self.form == "plain" else self.arranged()
        row = flat(conv.backward(dy, x, (False, True))[1]).reshape(-1)
        return row if self.form == "plain" else row.index_select(0, self.back)


# --- blocks ---


@dataclass
class Block:
    """A bottleneck: 1x1, 3x3, 1x1, each with a norm, and a shortcut."""

    weights: Weights
    convs: tuple[Conv, Conv, Conv]
    norms: tuple[Norm, Norm, Norm]
    short: tuple[Conv, Norm] | None
    variant: Variant
    side: SideStream
    saved: Any = None
    bits: Tensor | None = None

    def middle(self, x: Tensor) -> tuple[Tensor, ...]:
        """a, its vectors, a behind its norm, b and its vectors: the first two convolutions."""
        a, v1 = self.first(x)
        a1 = apply_norm(a, v1, 0)
        b = self.convs[1](a1)
        return a, v1, a1, b, statistics(b, self.norms[1])

    def first(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The first convolution and the vectors of its norm."""
        conv, norm = self.convs[0], self.norms[0]

        def separate() -> tuple[Tensor, Tensor]:
            a = conv(x)
            return a, statistics(a, norm)

        def joined() -> tuple[Tensor, Tensor]:
            a, s = product(x, conv.matrix, trans=True, sums=WITH_SQUARE)
            return a, finish(s, norm, x.numel() // x.shape[1])

        if not self.variant.small:
            return separate()
        key = f"first convolution {tuple(x.shape)} {conv.weight.shape[0]} {x.dtype} {launcher.rows}"
        key += " ahead" * launcher.ahead + " finished" * launcher.finish
        return launcher.choose(key, {"joined": joined, "separate": separate})

    def norm_back(self, norm: Norm, x: Tensor, v: Tensor, kind: int, dy: Tensor) -> Tensor:
        """The gradient of a norm's input; kind as in norm_reduce."""
        _, u = reduce_norm(x, v, kind, dy)
        self.weights.collect(norm, u)
        return apply_norm_back(dy, x, v, u, kind)

    def conv_back(self, conv: Conv, dy: Tensor, x: Tensor) -> Tensor:
        """The gradient of a convolution's input; its weight's is noted."""
        self.side.run(lambda: self.conv_weight_back(conv, dy, x), dy, x)
        return conv.backward(dy, x, (True, False))[0]

    def conv_weight_back(self, conv: Conv, dy: Tensor, x: Tensor) -> None:
        """Note the gradient of a convolution's weight."""
        self.weights.collect_conv(conv, conv.backward(dy, x, (False, True))[1])

    def middle_back(self, db: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
        """The gradient of a, from that of b."""
        a, v1, a1, *_ = parts
        return self.norm_back(self.norms[0], a, v1, 0, self.conv_back(self.convs[1], db, a1))

    def shortcut(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """What the block adds, with separate kernels, and what their backward needs."""
        if self.short is None:
            return x, ()
        conv, norm = self.short
        d = conv(x)
        v = statistics(d, norm)
        return apply_norm(d, v, 2), (d, v)

    def shortcut_back(self, g: Tensor, x: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
        """The shortcut's gradient with separate kernels."""
        if self.short is None:
            return g
        conv, norm = self.short
        return self.conv_back(conv, self.norm_back(norm, *parts, 2, g), x)


class PlainBlock(Block):
    """Every norm in kernels of its own, as in an earlier prototype."""

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        parts = self.middle(x)
        *_, b, v2 = parts
        b1 = apply_norm(b, v2, 0)
        c = self.convs[2](b1)
        v3 = statistics(c, self.norms[2])
        added, short = self.shortcut(x)
        y = apply_norm(c, v3, 1, added)
        self.saved = x, parts, b1, c, v3, y, short
        return y

    def backward(self, dy: Tensor, dz: Tensor) -> tuple[Tensor, Tensor]:
        """The input's gradients from the first convolution and the shortcut; dy + dz come in."""
        (x, parts, b1, c, v3, y, short), self.saved = self.saved, None
        *_, b, v2 = parts
        g, u = reduce_norm(c, v3, 1, dy, dz, y)
        self.weights.collect(self.norms[2], u)
        db1 = self.conv_back(self.convs[2], apply_norm_back(g, c, v3, u, 2), b1)
        da = self.middle_back(self.norm_back(self.norms[1], b, v2, 0, db1), parts)
        return self.conv_back(self.convs[0], da, x), self.shortcut_back(g, x, short)


class GramBlock(Block):
    """The last convolution, its norm, the residual and ReLU are one product each way.

    The gradient that comes in is masked by this block's ReLU already and brings its partial sums;
    the one that goes out is masked by the ReLU of the block below, which wrote this one's input.
    """

    def joined_shortcut(self) -> bool:
        """Whether the shortcut's convolution gets its norm from a Gram matrix."""
        return self.short is not None and self.short[0].weight.shape[1] <= WIDEST_GRAM

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        parts = self.middle(x)
        *_, b, v2 = parts
        if self.joined_shortcut():
            assert self.short is not None
            conv, norm = self.short
            short = self.fold(conv, norm, x, None)
            added, _ = product(short[0], conv.matrix, trans=True, affine=SCALE_SHIFT, v=short[1])
        else:
            added, short = self.shortcut(x)
        last = self.fold(self.convs[2], self.norms[2], b, v2)
        b1, v3 = last[:2]
        if self.variant.bits:
            shape = (added.numel() // added.shape[1], added.shape[1] // 8)
            self.bits = torch.empty(shape, device=x.device, dtype=torch.uint8)
        y = self.last_product(b1, v3, added)
        self.saved = x, parts, last, short
        return y

    def last_product(self, b1: Tensor, v3: Tensor, added: Tensor) -> Tensor:
        """The block's output from its last convolution's input."""
        options: Any = {"affine": SCALE_SHIFT, "v": v3, "add": added, "bits": self.bits}
        return product(b1, self.convs[2].matrix, trans=True, act=RELU, **options)[0]

    def own_weight_gradient(self, g: Tensor, b1: Tensor) -> Tensor:
        """g^T b1 of the last convolution."""
        return raw_weight_gradient(g, b1)

    def fold(self, conv: Conv, norm: Norm, x: Tensor, v: Tensor | None) -> tuple[Tensor, ...]:
        """The convolution's input and its norm's forward vectors, weight @ Cov and x's sums."""
        kept, gram, sums = gram_matrix(x, v, conv.stride, self.variant.small)
        return kept, *fold(gram, sums, conv.matrix, norm, kept.numel() // kept.shape[1]), sums

    def joined_back(
        self, conv: Conv, norm: Norm, g: Tensor, s: Tensor, parts: tuple[Tensor, ...], **gate: Any
    ) -> tuple[Tensor, Tensor]:
        """The gradient of the convolution's input, from g behind its norm with sums s."""
        x, *saved = parts
        m, weight = g.numel() // g.shape[1], conv.matrix
        own = conv is self.convs[2]
        raw = self.own_weight_gradient(g, x) if own else raw_weight_gradient(g, x)
        wa, u = fold_back(raw, s, weight, tuple(saved), flat(conv.grad), m)
        self.weights.collect(norm, u)
        return self.joined_input(conv, (g, x), (wa, u), gate)

    def joined_input(
        self,
        conv: Conv,
        images: tuple[Tensor, Tensor],
        folded: tuple[Tensor, Tensor],
        gate: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """The gradient of the convolution's input from g and that input."""
        (g, x), (wa, u) = images, folded
        q, const = fold_back_input(conv.matrix, u)
        return product(g, wa, pre=(x, q, const[-1:]), affine=SHIFT, v=const, **gate)

    def backward(self, g: Tensor, s: Tensor, below: Block | None) -> tuple[Tensor, Tensor]:
        """The input's gradient, masked by the block below, and its partial sums."""
        (x, parts, last, short), self.saved = self.saved, None
        *_, b, v2 = parts
        conv, norm = self.convs[2], self.norms[2]
        gate: Any = {"act": KEEP_NORMAL, "gate": b, "gate_norm": v2, "sums": WITH_GATE}
        g2, s2 = self.joined_back(conv, norm, g, s, last, **gate)
        u2 = finish_back(s2, v2, b.numel() // b.shape[1])
        self.weights.collect(self.norms[1], u2)
        da = self.middle_back(apply_norm_back(g2, b, v2, u2, 2), parts)
        if self.joined_shortcut():
            assert self.short is not None
            dz, _ = self.joined_back(*self.short, g, s, short)
        else:
            dz = self.shortcut_back(g, x, short)
        first = self.convs[0]
        self.side.run(lambda: self.conv_weight_back(first, da, x), da, x)
        gate = {}
        if below is not None:
            act = KEEP_POSITIVE if below.bits is None else KEEP_BITS
            gate = {"gate": x} if below.bits is None else {"bits": below.bits}
            gate |= {"act": act, "sums": TOTAL}
            below.bits = None
        result = self.first_product(da, dz, gate, below)
        self.side.end_block()
        return result

    def first_product(
        self, da: Tensor, dz: Tensor, gate: dict[str, Any], below: Block | None
    ) -> tuple[Tensor, Tensor]:
        """The gradient of the block's input with its partial sums; gate says what passes."""
        return product(da, self.convs[0].matrix, add=dz, **gate)


@dataclass
class PairBlock(GramBlock):
    """Where two blocks meet, the product that ends one takes along a product of the other."""

    above: "PairBlock | None" = None
    given: tuple[Tensor, Tensor] | None = None  # the first convolution and its norm's vectors
    raw: Tensor | None = None  # the weight gradient of the last convolution
    part: Tensor | None = None  # the gradient that comes in, times that convolution's weight

    def first(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The first convolution and its norm's vectors, from the block below if it has them."""
        given, self.given = self.given, None
        return given or super().first(x)

    def last_product(self, b1: Tensor, v3: Tensor, added: Tensor) -> Tensor:
        """The block's output, and the first convolution of the block above."""
        weight, above = self.convs[2].matrix, self.above
        plain = super().last_product
        if not self.variant.pairs or above is None:
            return plain(b1, v3, added)
        conv, norm = above.convs[0], above.norms[0]
        if not pair_fits(*weight.shape[::-1], conv.matrix.shape[0]):
            return plain(b1, v3, added)

        def joined() -> tuple[Tensor, tuple[Tensor, Tensor]]:
            y, a, s = pair(b1, weight, v3, added, self.bits, conv.matrix)
            return y, (a, finish(s, norm, y.numel() // y.shape[1]))

        def apart() -> tuple[Tensor, tuple[Tensor, Tensor]]:
            y = plain(b1, v3, added)
            return y, above.first(y)

        key = f"pair {tuple(b1.shape)} {conv.matrix.shape} {b1.dtype}"
        y, above.given = launcher.choose(key, {"joined": joined, "apart": apart})
        return y

    def own_weight_gradient(self, g: Tensor, b1: Tensor) -> Tensor:
        """g^T b1 of the last convolution, from the block above if it has it."""
        raw, self.raw = self.raw, None
        return raw_weight_gradient(g, b1) if raw is None else raw

    def joined_input(
        self,
        conv: Conv,
        images: tuple[Tensor, Tensor],
        folded: tuple[Tensor, Tensor],
        gate: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """The gradient of the convolution's input, which the block above may have begun."""
        if conv is not self.convs[2] or self.part is None:
            return super().joined_input(conv, images, folded, gate)
        part, self.part = self.part, None
        q, v = fold_input_affine(conv.matrix, folded[1])
        return product(images[1], q, affine=SCALE_SHIFT, v=v, add=part, **gate)

    def first_product(
        self, da: Tensor, dz: Tensor, gate: dict[str, Any], below: Block | None
    ) -> tuple[Tensor, Tensor]:
        """The gradient of the block's input, and what the block below would read it again for."""
        weight, plain = self.convs[0].matrix, super().first_product
        if not isinstance(below, PairBlock) or "bits" not in gate:
            return plain(da, dz, gate, below)
        b1 = below.saved[2][0]
        if self.variant.raw and skip_fits(*weight.shape, b1.shape[1]):
            return self.product_with_raw(da, dz, gate, below)
        if self.variant.input and input_fits(*weight.shape, b1.shape[1]):
            return self.product_with_input(da, dz, gate, below)
        return plain(da, dz, gate, below)

    def product_with_raw(
        self, da: Tensor, dz: Tensor, gate: dict[str, Any], below: "PairBlock"
    ) -> tuple[Tensor, Tensor]:
        """With the weight gradient of the last convolution of the block below."""
        weight, plain, b1 = self.convs[0].matrix, super().first_product, below.saved[2][0]

        def apart() -> tuple[Tensor, Tensor, Tensor]:
            g, s = plain(da, dz, gate, below)
            return g, s, raw_weight_gradient(g, b1)

        key = f"skip {tuple(da.shape)} {weight.shape} {dz.shape[2]} {da.dtype}"
        joined = lambda: skip_with_raw(da, weight, dz, gate["bits"], b1)  # noqa: E731
        g, s, below.raw = launcher.choose(key, {"joined": joined, "apart": apart})
        return g, s

    def product_with_input(
        self, da: Tensor, dz: Tensor, gate: dict[str, Any], below: "PairBlock"
    ) -> tuple[Tensor, Tensor]:
        """With the product that begins the input gradient of that convolution.

        Which way is faster is measured over both kernels that differ, the second with the block's
        own weight and vectors in place of those that are not known yet.
        """
        weight, plain = self.convs[0].matrix, super().first_product
        _, (*_, b, v2), (b1, v3, *_), _ = below.saved
        last = below.convs[2].matrix
        q, own = last[: last.shape[1]], {"act": KEEP_NORMAL, "gate": b, "gate_norm": v2}

        def with_part() -> tuple[Tensor, Tensor, Tensor]:
            scaled = torch.mul(last, v3[2][:, None], out=torch.empty_like(last))
            return skip_with_input(da, weight, dz, gate["bits"], scaled)

        def joined() -> None:
            part = with_part()[2]
            product(b1, q, affine=SCALE_SHIFT, v=v2, add=part, sums=WITH_GATE, **own)

        def apart() -> None:
            g, pre = plain(da, dz, gate, below)[0], (b1, q, v2[2, :1])
            product(g, last, pre=pre, affine=SHIFT, v=v2, sums=WITH_GATE, **own)

        key = f"input {tuple(da.shape)} {weight.shape} {dz.shape[2]} {da.dtype}"
        if launcher.fastest(key, {"joined": joined, "apart": apart}) == "apart":
            return plain(da, dz, gate, below)
        g, s, below.part = with_part()
        return g, s


class Network:
    """ResNet-50 with a forward and backward pass written out, and its update."""

    def __init__(
        self,
        variant: Variant,
        dtype: torch.dtype,
        *,
        device: str = "cuda",
        depths: tuple[int, ...] = (3, 4, 6, 3),
        classes: int = 1000,
    ):
        w = self.weights = Weights(dtype, device, seed=0)
        self.variant, self.dtype = variant, dtype
        self.stem = w.conv("stem", 3, 64, 7, 2)
        place = slice(0, self.stem.weight.numel())
        forms = ("quads", "padded", "plain") if variant.small else ("plain",)
        self.stems = {form: Stem(form, self.stem, w, place) for form in forms}
        self.form, self.stem_norm = forms[0], w.norm("stem.norm", 64)
        self.side = SideStream(variant.side and device == "cuda")
        kind: Any = GramBlock if variant.gram else PlainBlock
        if variant.meets:
            kind = PairBlock
        self.blocks: list[Any] = []
        into = 64
        for stage, depth in enumerate(depths):
            width = 64 * 2**stage
            for i in range(depth):
                stride, name = 2 if stage and not i else 1, f"{stage}.{i}."
                convs = (
                    w.conv(name + "conv1", into, width),
                    w.conv(name + "conv2", width, width, 3, stride),
                    w.conv(name + "conv3", width, 4 * width),
                )
                sizes = (width, width, 4 * width)
                norms = tuple(
                    w.norm(f"{name}norm{j + 1}", size, LAST_NORM if j == 2 else 1.0)
                    for j, size in enumerate(sizes)
                )
                short = None
                if i == 0:
                    conv = w.conv(name + "short", into, 4 * width, 1, stride)
                    short = conv, w.norm(name + "short.norm", 4 * width)
                self.blocks.append(kind(w, convs, norms, short, variant, self.side))
                into = 4 * width
        if kind is PairBlock:
            for block, above in pairwise(self.blocks):
                block.above = above
        place, values = w.take(classes, into, std=0.01)
        w.q[place].copy_(values)
        self.fc, self.fc_grad = (t[place].view(classes, into) for t in (w.q, w.g))
        place, _ = w.take(classes, std=0.0)
        self.bias, self.bias_grad = w.p[place], w.g[place]
        self.scale, self.smoothing = 1024.0 if dtype == torch.float16 else 1.0, 0.0

    def arrange(self, x: Tensor) -> Tensor:
        """An image of three channels as the stem wants it; the first time, measures which form."""
        if len(self.stems) > 1:
            images = {form: stem.arrange(x) for form, stem in self.stems.items()}
            dy = self.stem(x)  # any values will do; random ones would shift what is drawn later

            def both(form: str) -> tuple[Tensor, Tensor]:
                stem, image = self.stems[form], images[form]
                return stem.convolve(image), stem.weight_gradient(dy, image)

            key = f"stem {tuple(x.shape)} {x.dtype}"
            launcher.choose(key, {form: lambda form=form: both(form) for form in self.stems})
            self.form = launcher.options.get(key, self.form)
        return self.stems[self.form].arrange(x)

    def gradients(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss of an arranged image; scaled gradients are then in weights.g."""
        self.variant.allow()
        stem = self.stems[self.form]
        c0 = stem.convolve(x)
        v0 = statistics(c0, self.stem_norm)
        y, at, won = pool(c0, v0, self.variant.small)
        for block in self.blocks:
            y = block.forward(y)
        mean = y.mean((2, 3)).requires_grad_()
        fc, bias = self.fc.detach().requires_grad_(), self.bias.detach().requires_grad_()
        logits = F.linear(mean, fc, bias.to(self.dtype))
        loss = F.cross_entropy(logits.float(), labels, label_smoothing=self.smoothing)
        d, *head = torch.autograd.grad(loss * self.scale, [mean, fc, bias])
        self.weights.pending += list(zip((self.fc_grad, self.bias_grad), head, strict=True))
        dp = self.blocks_back(d, y)
        dx, u = pool_back(dp, at, won, c0, v0)
        self.weights.collect(self.stem_norm, u)
        row = flat(self.stem.grad).view(-1)
        self.weights.pending.append((row, stem.weight_gradient(dx, x)))
        self.side.join()
        self.weights.finish()
        return loss.detach()

    def blocks_back(self, d: Tensor, y: Tensor) -> Tensor:
        """The gradient of the pool's output from that of the mean."""
        if self.variant.gram:
            g, s = head_back(d, y)
            belows: list[Any] = [None, *self.blocks[:-1]]
            for block, below in zip(self.blocks[::-1], belows[::-1], strict=True):
                g, s = block.backward(g, s, below)
            return g
        half = (d / (2 * y.shape[2] * y.shape[3]))[:, :, None, None].expand(y.shape)
        dy = dz = half.contiguous(memory_format=torch.channels_last)
        for block in self.blocks[::-1]:
            dy, dz = block.backward(dy, dz)
        return dy + dz

    def update(self) -> None:
        """One step of SGD."""
        w, n = self.weights, self.weights.used
        update_weights(w.p[:n], w.m[:n], w.g[:n], w.q[:n], 1 / self.scale)

    def parameters(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Names, values as the forward pass reads them, and gradients."""
        yield "fc", self.fc, self.fc_grad
        pairs: list[Any] = [(self.stem, self.stem_norm)]
        for block in self.blocks:
            pairs += zip(block.convs, block.norms, strict=True)
            pairs += [block.short] if block.short else []
        for conv, norm in pairs:
            yield conv.name, conv.weight, conv.grad
            yield norm.name, norm.weight, norm.weight_grad
            yield norm.name + ".bias", norm.bias, norm.bias_grad


# --- plain torch, for comparison ---


def plain_block(block: Block, leaf: dict[str, Tensor], x: Tensor) -> Tensor:
    """A block in plain torch."""

    def pair(conv: Conv, norm: Norm, x: Tensor) -> Tensor:
        weight = leaf[conv.name]
        y = F.conv2d(x, weight, stride=conv.stride, padding=weight.shape[2] // 2)
        scale, shift = leaf[norm.name], leaf[norm.name + ".bias"]
        return F.batch_norm(y, None, None, scale, shift, True, 0.1, EPS)

    added = pair(*block.short, x) if block.short else x
    for conv, norm in zip(block.convs[:2], block.norms[:2], strict=True):
        x = pair(conv, norm, x).relu()
    return (pair(block.convs[2], block.norms[2], x) + added).relu()


def plain_gradients(
    net: Network, x: Tensor, labels: Tensor, dtype: torch.dtype, norms: torch.dtype
) -> dict[str, Tensor]:
    """Every gradient of the same weights in plain torch, in dtype, with norms' weights in norms."""
    leaf = {}
    for name, value, _ in net.parameters():
        own = norms if value.ndim == 1 else dtype
        leaf[name] = value.detach().to(own, copy=True).requires_grad_()
    y = F.conv2d(x.to(dtype), leaf["stem"], stride=2, padding=3)
    y = F.batch_norm(y, None, None, leaf["stem.norm"], leaf["stem.norm.bias"], True, 0.1, EPS)
    y = F.max_pool2d(y.relu(), 3, 2, 1)
    for block in net.blocks:
        y = plain_block(block, leaf, y)
    logits = F.linear(y.mean((2, 3)), leaf["fc"], net.bias.to(dtype))
    loss = F.cross_entropy(logits.float() if dtype in HALVES else logits, labels)
    found = torch.autograd.grad(loss * net.scale, list(leaf.values()))
    return {name: grad.to(norms) / net.scale for name, grad in zip(leaf, found, strict=True)}


def error(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted|."""
    wanted = wanted.double()
    return float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))


def rounded(errors: dict[str, float]) -> dict[str, float]:
    """As many digits as one looks at."""
    return {name: float(f"{value:.2g}") for name, value in errors.items()}


# --- checks ---


def random_image(n: int, c: int, size: int, device: str, dtype: torch.dtype) -> Tensor:
    """Normal numbers in channels_last memory."""
    x = torch.randn(n, c, size, size, device=device).to(dtype)
    return x.contiguous(memory_format=torch.channels_last)


def product_uses(device: str, dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any], Tensor]]:
    """Every use of `gemm` with its arguments and its result in float64."""
    n, size, k, width = 4, 12, 128, 256
    a, x = (random_image(n, k, size, device, dtype) for _ in range(2))
    add, gate = (random_image(n, width, size, device, dtype) for _ in range(2))
    small = random_image(n, width, size // 2, device, dtype)
    b, q = (torch.randn(k, width, device=device).to(dtype) / k**0.5 for _ in range(2))
    v, beta = torch.randn(4, width, device=device), torch.rand(1, device=device)
    plain = flat(a).double() @ b.double()
    scaled = plain * v[2].double() + v[3].double()
    shifted = plain + (flat(x).double() @ q.double()) * beta.double() + v[0].double()
    even = torch.zeros_like(add)
    even[:, :, ::2, ::2] = small
    bits = torch.empty(n * size * size, width // 8, device=device, dtype=torch.uint8)
    packed = packed_signs(gate)
    open_gate = (flat(gate).double() * v[2].double() + v[3].double()) > 0
    rest, positive = plain + flat(add).double(), flat(gate) > 0
    forward = {"a": a, "b": b.t().contiguous(), "trans": True, "affine": SCALE_SHIFT, "v": v}
    back = {"a": a, "b": b, "pre": (x, q, beta), "affine": SHIFT, "v": v}
    residual = (scaled + flat(add).double()).relu()
    yield "residual", {**forward, "add": add, "act": RELU}, residual
    yield "residual, bits", {**forward, "add": add, "act": RELU, "bits": bits}, residual
    yield "shortcut", {**forward, "act": NONE}, scaled
    keep = {"act": KEEP_NORMAL, "gate": gate, "gate_norm": v, "sums": WITH_GATE}
    yield "input gradient, gate", {**back, **keep}, torch.where(open_gate, shifted, 0)
    yield "input gradient", back, shifted
    given = torch.where(open_gate, scaled + flat(add).double(), 0)
    begun = {"a": a, "b": b, "affine": SCALE_SHIFT, "v": v, "add": add}
    yield "input gradient, begun", {**begun, **keep}, given
    joined = {"a": a, "b": b, "sums": TOTAL}
    keep = {"act": KEEP_POSITIVE, "gate": gate}
    wanted = torch.where(positive, rest, 0)
    yield "skip, gate", {**joined, "add": add, **keep}, wanted
    yield "skip, bits", {**joined, "add": add, "act": KEEP_BITS, "bits": packed}, wanted
    wanted = torch.where(positive, plain + flat(even).double(), 0)
    yield "strided skip, gate", {**joined, "add": small, **keep}, wanted
    yield "strided skip, bits", {**joined, "add": small, "act": KEEP_BITS, "bits": packed}, wanted
    yield "pool's skip", {"a": a, "b": b, "add": add}, rest
    yield "statistics", {"a": a, "b": b.t().contiguous(), "trans": True, "sums": WITH_SQUARE}, plain


def packed_signs(x: Tensor) -> Tensor:
    """Where x > 0, in the order of pack_bits."""
    places = (2 ** torch.arange(8, device=x.device)).view(8, 1)
    kept = (flat(x) > 0).view(-1, x.shape[1] // 64, 8, 8) * places
    return kept.sum(2).to(torch.uint8).view(-1, x.shape[1] // 8)


def check_products(device: str, dtype: torch.dtype, limit: float) -> list[dict[str, Any]]:
    """The worst error of each use over all tiles; a tile that errs or fails is banned."""
    rows = []
    few = INTERPRETED or dtype == torch.bfloat16  # every tile once, in float16, is enough
    tried = [(gemm, tile) for tile in GEMM_TILES[: 1 if few else None]]
    tried += [(gemm_rows, tile) for tile in ROWS_TILES[: 3 if few else None]]
    tried += [(gemm_ahead, tile) for tile in AHEAD_TILES[: 2 if few else None]]
    for name, options, wanted in product_uses(device, dtype):
        worst = {"result": 0.0, "sums": 0.0, "bits": 0.0}
        for kernel, tile in tried:
            try:
                found = product_errors(options, wanted, kernel, tile)
            except Exception as problem:
                print(f"product {name} {tile}: {str(problem)[:160]}", flush=True)
                found = {"result": float("inf")}
                if not device_answers(device):
                    launcher.banned.add(ban_key(kernel, launcher.last_flags, tile))
                    raise SystemExit(DEAD_DEVICE) from problem
            if launcher.mode == "record first":
                continue
            if not max(found.values()) < limit:
                key = ban_key(kernel, launcher.last_flags, tile)
                launcher.banned.add(key)
                print(f"BANNED {key}: {found}", flush=True)
            else:
                worst = {key: max(worst[key], found[key]) for key in worst}
        rows.append({"use": name, "dtype": str(dtype), **rounded(worst)})
    return rows


NARROW_PAIRS = ((64, 256, 64), (64, 256, 128))  # channels of a pair: into, between, after
SKIPS = (
    (64, 256, False),
    (128, 256, True),
    (128, 512, False),
    (256, 512, True),
    (256, 1024, False),
)
WIDE_PAIRS = ((128, 512, 128), (128, 512, 256), (256, 1024, 256))


def pair_uses(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, list[Any], str, Any, Any]]:
    """Every kernel of pair_kernels.py with its tiles, a name, its call and what float64 gives."""
    n, size = 4, 14  # 784 rows: no block of rows divides them

    def image(channels: int, size: int = size) -> Tensor:
        return random_image(n, channels, size, device, dtype)

    def matrix(rows: int, columns: int, k: int) -> Tensor:
        return torch.randn(rows, columns, device=device).to(dtype) / k**0.5

    kernels: Any = ((pair_rows, PAIR_ROWS_TILES), (pair_walk, PAIR_WALK_TILES))
    for kernel, tiles in kernels:
        wide = kernel is pair_walk
        for k, width, after in WIDE_PAIRS if wide else NARROW_PAIRS:
            a, add, v = image(k), image(width), torch.randn(4, width, device=device)
            b, w = matrix(width, k, k), matrix(after, width, width)
            bits = torch.zeros(n * size * size, width // 8, device=device, dtype=torch.uint8)
            y = flat(a).double() @ b.double().t() * v[2].double() + v[3].double()
            y = (y + flat(add).double()).relu()
            name = f"{kernel.__name__} {k} {width} {after}"
            yield kernel, tiles, name, partial(pair, a, b, v, add, bits, w), y
    for k, width, even in SKIPS:
        a, x, gate = image(k), image(64), image(width)
        b, add = matrix(k, width, k), image(width, size // 2 if even else size)
        more = torch.zeros_like(gate)
        if even:
            more[:, :, ::2, ::2] = add
        more = more if even else add
        packed = packed_signs(gate)
        g = flat(a).double() @ b.double() + flat(more).double()
        g = torch.where(flat(gate) > 0, g, 0)
        name = f"{k} {width} {even}"
        if width == 256:
            call = partial(skip_with_raw, a, b, add, packed, x)
            yield skip_raw, SKIP_RAW_TILES, f"skip_raw {name}", call, g
        else:
            call = partial(skip_with_input, a, b, add, packed, matrix(width, width // 4, width))
            yield skip_walk, SKIP_WALK_TILES, f"skip_walk {name}", call, g


def pair_errors(kernel: Any, call: Any, wanted: Tensor, held: list[Any]) -> dict[str, float]:
    """Errors against float64; the second product's against that of the stored first.

    The results are held, so that no later one finds the right values in its memory.
    """
    found = call()
    held.append(found)
    if wanted.is_cuda:
        torch.cuda.synchronize()  # so that a fault is this tile's
    first, stored = {"result": error(flat(found[0]), wanted)}, flat(found[0]).double()
    if kernel is skip_raw:
        (_, s, raw), x = found, call.args[-1]
        second = {"sums": error(s.sum((0, 1)), wanted.sum(0))}
        return {**first, **second, "raw": error(raw, stored.t() @ flat(x).double())}
    if kernel is skip_walk:
        (_, s, after), w = found, call.args[-1]
        second = {"sums": error(s.sum((0, 1)), wanted.sum(0))}
        return {**first, **second, "after": error(flat(after), stored @ w.double())}
    (y, after, s), (*_, bits, w) = found, call.args
    product_two = stored @ w.double().t()
    sums = [product_two.sum(0), (product_two**2).sum(0)]
    worst = max(error(a, b) for a, b in zip(s.sum(1), sums, strict=True))
    wrong = float((bits != packed_signs(y)).float().mean())
    return {**first, "after": error(flat(after), product_two), "sums": worst, "bits": wrong}


def check_pairs(device: str, dtype: torch.dtype, limit: float) -> list[dict[str, Any]]:
    """The worst errors of each pair over all tiles; a tile that errs or fails is banned."""
    torch.manual_seed(6)
    rows, few = [], INTERPRETED or dtype == torch.bfloat16  # as in check_products
    for kernel, tiles, name, call, wanted in pair_uses(device, dtype):
        worst: dict[str, float] = {}
        held: list[Any] = []
        for tile in tiles[:2] if few else tiles:
            launcher.forced = {kernel.__name__: tile}
            launcher.multiprocessors = 2  # so that a program walks over several blocks of rows
            try:
                found = pair_errors(kernel, call, wanted, held)
            except Exception as problem:
                print(f"{name} {tile}: {str(problem)[:160]}", flush=True)
                found = {"result": float("inf")}
                if not device_answers(device):
                    launcher.banned.add(ban_key(kernel, launcher.last_flags, tile))
                    raise SystemExit(DEAD_DEVICE) from problem
            finally:
                launcher.forced, launcher.multiprocessors = {}, 132
            if launcher.mode != "first":
                continue
            if not all(value < limit for value in found.values()):
                key = ban_key(kernel, launcher.last_flags, tile)
                launcher.banned.add(key)
                print(f"BANNED {key}: {found}", flush=True)
            else:
                worst = {key: max(worst.get(key, 0.0), found[key]) for key in found}
        rows.append({"use": name, "dtype": str(dtype), **rounded(worst)})
    return rows


def device_answers(device: str) -> bool:
    """Whether the device still works after a fault: most faults end all work of a process."""
    try:
        return float(torch.ones(1, device=device)) == 1
    except Exception:  # noqa: BLE001  whatever it says
        return False


def product_errors(
    options: dict[str, Any], wanted: Tensor, kernel: Any, tile: dict[str, int]
) -> dict[str, float]:
    """Errors of the result, its sums and its bits."""
    out_bits = options.get("bits") if options.get("act") == RELU else None
    launcher.forced, launcher.rows = {kernel.__name__: tile}, kernel is gemm_rows
    launcher.ahead = kernel is gemm_ahead
    launcher.multiprocessors = 2  # so that a program walks over several blocks of rows
    try:
        out, s = product(**options)
        if out.is_cuda:
            torch.cuda.synchronize()  # so that a fault is this tile's
    finally:
        launcher.forced, launcher.rows, launcher.multiprocessors = {}, False, 132
        launcher.ahead = False
    found = {"result": error(flat(out), wanted), "sums": 0.0, "bits": 0.0}
    sums = options.get("sums")
    if sums:
        second = {TOTAL: None, WITH_SQUARE: wanted**2}.get(sums, wanted)
        second = wanted * flat(options["gate"]).double() if sums == WITH_GATE else second
        columns = [wanted.sum(0), *([] if second is None else [second.sum(0)])]
        found["sums"] = max(error(a, b) for a, b in zip(s.sum(1), columns, strict=True))
    if out_bits is not None:
        found["bits"] = float((out_bits != packed_signs(out)).float().mean())
    return found


def check_gram(device: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Gram matrices, and the statistics they give, against float64 over the product itself."""
    rows = []
    uses = ((64, 1, 0.0, True), (128, 2, 0.0, False), (256, 1, 4.0, True))
    ways = (("joined", False), ("separate", False), ("joined", True), ("separate", True))
    for (k, stride, mean, normed), (way, finished) in product_of(uses, ways):
        launcher.finish = finished
        x, v = random_image(4, k, 12, device, dtype), torch.rand(4, k, device=device) + 0.5
        v[3] += mean
        weights = Weights(dtype, device, 1)
        conv, norm = weights.conv("c", k, 4 * k), weights.norm("n", 4 * k)
        key = f"gram matrix {tuple(x.shape)} {stride} {x.dtype}" + " finished" * finished
        launcher.options[key] = way
        kept, gram, sums = gram_matrix(x, v if normed else None, stride, True)
        launcher.options.clear()
        found, t = fold(gram, sums, conv.matrix, norm, kept.numel() // k)
        wanted = flat(x[:, :, ::stride, ::stride]).double()
        if normed:
            wanted = (wanted * v[2].double() + v[3].double()).relu()
        rows_in, weight = flat(kept).double(), conv.matrix.double()
        c = rows_in @ weight.t()
        rstd = (c.var(0, unbiased=False) + EPS).rsqrt()
        scale = norm.weight.double() * rstd
        cov = (rows_in.t() @ rows_in) / len(c) - torch.outer(rows_in.mean(0), rows_in.mean(0))
        errors = {
            "input": error(flat(kept), wanted),
            "gram": error(gram, rows_in.t() @ rows_in),
            "mean": error(found[0], c.mean(0)),
            "rstd": error(found[1], rstd),
            "shift": error(found[3], norm.bias.double() - c.mean(0) * scale),
            "t": error(t, weight @ cov),
            "running": error(norm.running[1], 0.9 + 0.1 * c.var(0)),
        }
        rows.append(
            {
                "way": way + ", finished" * finished,
                "channels": k,
                "stride": stride,
                "offset": mean,
                "dtype": str(dtype),
                **rounded(errors),
            }
        )
    launcher.finish = False
    return rows


def check_vectors(device: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    """A norm's vectors from one kernel against those from two, and the same with an odd size."""
    rows = []
    for channels, size in ((64, 12), (256, 7), (512, 5)):
        x, dy = (random_image(4, channels, size, device, dtype) for _ in range(2))
        found: list[tuple[Tensor, ...]] = []
        for finished in (False, True):
            launcher.finish = finished
            norm = Weights(dtype, device, 1).norm("n", channels)
            v = statistics(x, norm)
            v = statistics(x, norm)  # again: the counters must be as before
            vectors = [reduce_norm(x, v, kind, dy)[1] for kind in (0, 2)]
            conv = Weights(dtype, device, 2).conv("c", channels, 4 * channels)
            u = (torch.rand(5, 4 * channels, device=device) - 0.5) * 1e-4
            if found:
                u = found[0][-1]
            q, const = fold_back_input(conv.matrix, u)
            q = q.float() * const[-1]
            found.append((v, norm.running, *vectors, q, const[:-1], u))
        names = ("v", "running", "u0", "u2", "q", "const")
        errors = {name: error(b, a) for name, a, b in zip(names, *found, strict=False)}
        rows.append({"channels": channels, "size": size, "dtype": str(dtype), **rounded(errors)})
    launcher.finish = False
    return rows


def check_stems(device: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    """The stem's forms, their pools and gradients against float64."""
    torch.manual_seed(5)
    x = random_image(2, 3, 32, device, dtype)
    net = Network(VARIANTS[-1], dtype, device=device, depths=(1,), classes=16)
    leaf = net.stem.weight.detach().double().requires_grad_()
    wanted = F.conv2d(x.double(), leaf, stride=2, padding=3)
    dy = random_image(2, 64, 16, device, dtype)
    (dw,) = torch.autograd.grad(wanted, leaf, dy.double())
    v = torch.rand(4, 64, device=device) + 0.5
    v[3] -= 0.5
    c0, rows = wanted.detach().to(dtype).contiguous(memory_format=torch.channels_last), []
    old, new = (pool_gradients(c0, v, keep) for keep in (False, True))
    for form, stem in net.stems.items():
        image = stem.arrange(x)
        errors = {
            "result": error(stem.convolve(image), wanted.detach()),
            "gradient": error(stem.weight_gradient(dy, image), flat(dw).reshape(-1)),
        }
        rows.append({"form": form, "dtype": str(dtype), **rounded(errors)})
    errors = {name: error(new[name], old[name]) for name in old}
    return [*rows, {"pool": "winners against windows", "dtype": str(dtype), **rounded(errors)}]


def pool_gradients(x: Tensor, v: Tensor, keep: bool) -> dict[str, Tensor]:
    """The pool's output, the gradient of its input and the norm's backward vectors."""
    y, at, won = pool(x, v, keep)
    dx, u = pool_back(y.flip(0).contiguous(memory_format=torch.channels_last), at, won, x, v)
    return {"y": y, "dx": dx, "vectors": u}


def check_block(
    variant: Variant, device: str, dtype: torch.dtype, layout: tuple[int, int, int, bool]
) -> dict[str, Any]:
    """One block's output and gradients against float64, with plain torch's errors beside them."""
    count = 1 if INTERPRETED or launcher.mode != "first" else DRAWS
    draws = [draw_block(variant, device, dtype, layout, seed) for seed in range(count)]
    errors = {
        name: [(sum(d[1][name][i] ** 2 for d in draws) / count) ** 0.5 for i in range(2)]
        for name in draws[0][1]
    }
    ratios = {name: own / max(torchs, 1e-6) for name, (own, torchs) in errors.items()}
    worst = max(ratios, key=lambda name: ratios[name])
    return {
        "variant": variant.name, "dtype": str(dtype), "layout": layout,
        "sums": round(max(d[0] for d in draws), 8), "draws": count,
        "ratio_to_torch": round(median(ratios.values()), 2),
        "worst_ratio": [worst, round(ratios[worst], 2)],
        "errors": {name: [f"{a:.1e}", f"{b:.1e}"] for name, (a, b) in errors.items()},
    }  # fmt: skip


def draw_block(
    variant: Variant,
    device: str,
    dtype: torch.dtype,
    layout: tuple[int, int, int, bool],
    seed: int,
) -> tuple[float, dict[str, tuple[float, float]]]:
    """For one draw of weights and data: the sums' error, and ours and torch's errors by name."""
    torch.manual_seed(4 + seed)
    variant.allow()
    into, width, stride, short = layout
    w, names = Weights(dtype, device, 2 + seed), ("1", "2", "3")
    sizes = ((into, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
    convs: Any = tuple(w.conv("c" + n, *size) for n, size in zip(names, sizes, strict=True))
    norms: Any = tuple(w.norm("n" + n, size[1]) for n, size in zip(names, sizes, strict=True))
    pair = (w.conv("cs", into, 4 * width, 1, stride), w.norm("ns", 4 * width)) if short else None
    side = SideStream(False)
    block = (GramBlock if variant.gram else PlainBlock)(w, convs, norms, pair, variant, side)
    below = Block(w, convs, norms, None, variant, side)
    x = random_image(4, into, 12, device, dtype).relu()
    if variant.bits:
        below.bits = packed_signs(x)
    dy = random_image(4, 4 * width, 12 // stride, device, dtype)
    y = block.forward(x)
    if isinstance(block, GramBlock):
        g = dy * (y > 0)
        g = g.contiguous(memory_format=torch.channels_last)
        dx, s = block.backward(g, shorten(flat(g).float()[None]), below)
        sums = error(s.sum((0, 1)), flat(dx).double().sum(0))
    else:
        half, sums = dy / 2, 0.0
        dx = sum(block.backward(half, half)) * (x > 0)
    w.finish()
    pairs = list(zip(convs, norms, strict=True)) + ([pair] if pair else [])
    found = {"y": y, "dx": dx}
    for conv, norm in pairs:
        found |= {conv.name: conv.grad, norm.name: norm.weight_grad}
        found[norm.name + ".bias"] = norm.bias_grad
    exact, plain = (block_in_torch(block, pairs, x, dy, to) for to in (torch.float64, dtype))
    rows = {
        name: (error(found[name], exact[name]), error(plain[name], exact[name]))
        for name in y_first(exact)
    }
    return sums, rows


def y_first(rows: dict[str, Tensor]) -> list[str]:
    """Names in the order they are printed."""
    return sorted(rows, key=lambda name: (name not in ("y", "dx"), name))


def block_in_torch(
    block: Block, pairs: list[Any], x: Tensor, dy: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """A block's output and gradients by autograd in dtype; dx masked by x > 0."""
    leaf = {"x": x.detach().to(dtype).requires_grad_()}
    double = dtype == torch.float64
    for conv, norm in pairs:
        leaf[conv.name] = conv.weight.detach().to(dtype).requires_grad_()
        for name, value in ((norm.name, norm.weight), (norm.name + ".bias", norm.bias)):
            leaf[name] = (value.double() if double else value.detach().clone()).requires_grad_()
    y = plain_block(block, leaf, leaf["x"])
    found = dict(zip(leaf, torch.autograd.grad(y, list(leaf.values()), dy.to(dtype)), strict=True))
    dx = found.pop("x") * (x > 0)
    return {"y": y.detach(), "dx": dx, **found}


def compare(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, Any]:
    """Errors over a network's gradients: the median, the worst, and of all as one vector."""
    errors = {name: error(found[name], wanted[name]) for name in wanted}
    worst = max(errors, key=lambda name: errors[name])
    whole = error(*(torch.cat([t[name].flatten() for name in wanted]) for t in (found, wanted)))
    row = {"median": median(errors.values()), "worst": errors[worst], "whole": whole}
    return {**rounded(row), "worst_name": worst}


def check_network(
    chosen: list[Variant],
    dtype: torch.dtype,
    device: str,
    batch: int,
    size: int,
    depths: tuple[int, ...],
) -> list[Any]:
    """Gradients of a whole network against float64, plain torch's beside."""
    torch.manual_seed(3)
    x, labels = random_image(batch, 3, size, device, dtype), torch.arange(batch, device=device)
    if launcher.mode != "first":  # only what is to be compiled matters
        for variant in chosen:
            net = Network(variant, dtype, device=device, depths=depths)
            net.gradients(net.arrange(x), labels)
        return []
    net = Network(VARIANTS[0], dtype, device=device, depths=depths)
    exact = plain_gradients(net, x, labels, torch.float64, torch.float64)
    plain = plain_gradients(net, x, labels, dtype, torch.float32)
    rows = [{"network": "plain torch", "dtype": str(dtype), **compare(plain, exact)}]
    for variant in chosen:
        net = Network(variant, dtype, device=device, depths=depths)
        net.gradients(net.arrange(x), labels)
        found = {name: grad / net.scale for name, _, grad in net.parameters()}
        ratios = [
            error(found[name], exact[name]) / max(error(plain[name], exact[name]), 1e-9)
            for name in exact
        ]
        row = {"network": variant.name, "dtype": str(dtype), **compare(found, exact)}
        row |= {"ratio_to_torch": round(median(ratios), 2), "most": round(max(ratios), 2)}
        rows.append(row)
    return rows


# --- measuring ---


class Step:
    """One variant's training step over one batch, eager and as a graph.

    Image and labels are drawn before anything of the variant's, so that all variants share them;
    the weights come from a generator of their own.
    """

    def __init__(
        self, variant: Variant, dtype: torch.dtype, batch: int, size: int, device: str = "cuda"
    ):
        torch.manual_seed(0)
        image = random_image(batch, 3, size, device, dtype)
        self.labels = torch.randint(0, 1000, (batch,), device=device)
        self.net = Network(variant, dtype, device=device)
        self.x = self.net.arrange(image)
        self.loss = torch.zeros((), device=device)

    def __call__(self) -> None:
        """A step."""
        self.loss.copy_(self.net.gradients(self.x, self.labels))
        self.net.update()

    def capture(self) -> Callable[[], None]:
        """The step as a graph; returns its replay."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self()
        return graph.replay


def compile_variants(
    variants: list[Variant], dtype: torch.dtype, words: argparse.Namespace, report: "Report"
) -> None:
    """Compile every kernel that a step of these variants may ask for."""
    launcher.mode = "record"
    for variant in variants:
        run = lambda v=variant: Step(v, dtype, words.batch, words.size)()  # noqa: E731
        report.attempt(f"record {variant.name}", run)
    torch.cuda.synchronize()
    compile_now(f"steps {dtype}")


def copy_rate() -> float:
    """TB/s of a large copy on the device, bytes read and written: the ceiling of most kernels."""
    source = torch.empty(2**31, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return round(2 * 2**31 / time_ms(lambda: target.copy_(source)) / 1e9, 2)


def compile_now(what: str) -> None:
    """Compile what was recorded, in parallel, and say how long it took."""
    begin = time.perf_counter()
    count, failed = launcher.compile_recorded(THREADS)
    print(f"compiled {count} for {what} in {time.perf_counter() - begin:.0f} s", flush=True)
    for line in failed:
        print("compile failed:", line, flush=True)


def prepare(variant: Variant, dtype: torch.dtype, words: argparse.Namespace) -> tuple[Step, Any]:
    """A tuned and captured step, with its peak memory and gradients before the first update."""
    before = torch.cuda.memory_allocated()
    step = Step(variant, dtype, words.batch, words.size)
    step.net.gradients(step.x, step.labels)  # measures tiles and cuDNN's algorithms
    torch.cuda.reset_peak_memory_stats()
    step.net.gradients(step.x, step.labels)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    gradients = {name: grad.clone() for name, _, grad in step.net.parameters()}
    return step, {"replay": step.capture(), "peak_gib": round(peak, 1), "gradients": gradients}


def prepare_all(
    variants: list[Variant], dtype: torch.dtype, words: argparse.Namespace, report: "Report"
) -> dict[str, tuple[Step, Any]]:
    """The steps that could be prepared, by name; what was found on the way is reported."""
    ready: dict[str, tuple[Step, Any]] = {}
    for variant in variants:
        gc.collect()
        pair = report.attempt(f"prepare {variant.name}", prepare, variant, dtype, words)
        if pair is None:
            continue
        row = {"variant": variant.name, "alone_ms": round(time_ms(pair[1]["replay"], 10), 3)}
        if ready:
            first = next(iter(ready.values()))[1]["gradients"]
            row["gradients_against_first"] = compare(pair[1]["gradients"], first)
        report.add("prepared", {**row, "peak_gib": pair[1]["peak_gib"], "dtype": str(dtype)})
        ready[variant.name] = pair
    for row in launcher.timings:
        if row.get("kernel", "gemm").startswith(
            ("gemm", "outer", "pool", "norm_keep", "pair", "skip")
        ):
            text = [f"{value}" for key, value in row.items() if key not in ("tile", "mb")]
            print(*text, *row.get("tile", {}).values(), flush=True)
    report.data["tiles"] = launcher.timings
    report.save()
    return ready


def choose_variants(words: argparse.Namespace) -> list[Variant]:
    """Those that were asked for, in the order of VARIANTS."""
    return [v for v in VARIANTS if not words.variants or v.name in words.variants.split(",")]


def measure(dtype: torch.dtype, words: argparse.Namespace, report: "Report") -> None:
    """Images/s of the variants in turns, then the kernels of the fastest and of the baseline."""
    chosen = choose_variants(words)
    name = str(dtype).removeprefix("torch.")
    report.add("device", {"copy_tb_per_s": report.attempt("copy", copy_rate)})
    report.attempt(f"compile {name}", compile_variants, chosen, dtype, words, report)
    launcher.mode = "tune"
    ready = prepare_all(chosen, dtype, words, report)
    if not ready:
        return
    times: dict[str, list[float]] = {key: [] for key in ready}
    for turn in range(ROUNDS):
        names = list(ready)
        if turn and time.perf_counter() - report.begin > words.left - 24:
            print(f"only {turn} rounds: time is short", flush=True)
            break
        for key in names[turn % len(names) :] + names[: turn % len(names)]:
            times[key].append(time_ms(ready[key][1]["replay"], REPLAYS))
    for key, values in times.items():
        middle = median(values)
        rates = [round(words.batch / ms * 1e3) for ms in (middle, max(values), min(values))]
        row = {"variant": key, "dtype": name, "ms": round(middle, 3), "images_per_s": rates[0]}
        row |= {"range": rates[1:], "loss": round(float(ready[key][0].loss), 3)}
        report.add("speed", {**row, "all_ms": [round(ms, 3) for ms in values]})
    for key in sorted(times, key=lambda key: median(times[key])):  # the fastest first
        if time.perf_counter() - report.begin < words.left - 16:
            report.attempt(f"kernels {key}", kernels, key, name, ready[key][1]["replay"], report)


def kernels(variant: str, dtype: str, replay: Callable[[], None], report: "Report") -> None:
    """Milliseconds of a step by kind of kernel and by kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            replay()
        torch.cuda.synchronize()
    events = [e for e in profiler.key_averages() if e.device_time_total > 0]
    kinds: dict[str, float] = {}
    ours: tuple[str, ...] = (
        "gemm_",
        "rows_",
        "ahead_",
        "pair_",
        "skip_",
        "outer_",
        "norm_",
        "pool_",
        "finish_",
        "fold_",
    )
    ours += ("sum_rows", "head_", "update")
    vendors = ("dgrad", "wgrad", "fprop", "nvjet", "gemm", "splitK")
    for event in events:
        kind = event.key if event.key.startswith(ours) else None
        kind = kind or next((word for word in vendors if word in event.key), "other")
        kinds[kind] = kinds.get(kind, 0.0) + event.device_time_total / 3e3
    order = sorted(kinds.items(), key=lambda pair: -pair[1])
    table = {"variant": variant, "dtype": dtype, "total": round(sum(kinds.values()), 2)}
    table["launches"] = sum(e.count for e in events) // 3
    report.add("kernels", {**table, "ms": {key: round(value, 3) for key, value in order}}, 3000)
    rest = sorted(events, key=lambda e: -e.device_time_total)
    report.data.setdefault("every_kernel", []).extend(
        {"variant": variant, "dtype": dtype, "ms": round(e.device_time_total / 3e3, 4),
         "launches": e.count // 3, "name": e.key[:160]} for e in rest
    )  # fmt: skip
    report.save()


# --- the run ---


class Report:
    """Results as they come: printed, and kept in a JSON file; without a folder, neither."""

    def __init__(self, out: Path | None, part: str):
        self.path, self.begin = out and out / f"resnet50_step_{part}.json", time.perf_counter()
        self.data: dict[str, Any] = {"torch": torch.__version__, "failed": []}

    def add(self, section: str, row: dict[str, Any], width: int = 420) -> None:
        """Print, as far as `width` goes, and keep one row."""
        seconds = round(time.perf_counter() - self.begin)
        print(f"[{seconds:3d} s] {section}: {json.dumps(row, default=str)[:width]}", flush=True)
        self.data.setdefault(section, []).append(row)
        self.save()

    def save(self) -> None:
        """Write the file."""
        if self.path:
            self.path.write_text(json.dumps(self.data, indent=1, default=str), encoding="utf-8")

    def attempt(self, what: str, run: Callable[..., Any], *args: Any) -> Any:
        """What `run` returns; if it fails, its traceback is printed and None returned."""
        try:
            return run(*args)
        except Exception:  # noqa: BLE001  one failure must not waste the machine
            print(f"FAILED {what}\n{traceback.format_exc()}", flush=True)
            self.data["failed"].append(what)
            self.save()
            return None


LAYOUTS = ((256, 64, 1, False), (64, 64, 1, True), (256, 128, 2, True), (1024, 512, 2, True))


def check(words: argparse.Namespace, report: Report) -> None:
    """All comparisons with torch; tiles that err are banned from the measurements."""
    on_gpu, chosen = words.device == "cuda", choose_variants(words)
    for dtype in HALVES if on_gpu else (torch.float32,):
        if on_gpu:  # once without running a kernel, to compile all of them in parallel
            report.attempt(f"compile checks {dtype}", compile_checks, chosen, words.device, dtype)
        launcher.mode = "first"
        for section, rows in checks(chosen, words.device, dtype, report):
            for row in rows or ():
                report.add(section, row)


def checks(
    chosen: list[Variant], device: str, dtype: torch.dtype, report: Report
) -> Iterator[tuple[str, Any]]:
    """Sections with their rows, or None for one that failed."""
    limit = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}.get(dtype, 1e-5)
    yield "product", report.attempt("products", check_products, device, dtype, limit)
    if any(v.meets for v in chosen):
        yield "pair", report.attempt("pairs", check_pairs, device, dtype, limit)
    yield "gram", report.attempt("gram", check_gram, device, dtype)
    yield "vectors", report.attempt("vectors", check_vectors, device, dtype)
    yield "stem", report.attempt("stem", check_stems, device, dtype)
    for variant in (v for v in chosen if not v.meets):  # one block alone has no pairs
        for layout in LAYOUTS[: 4 if device == "cuda" else 3]:
            row = report.attempt(f"block {layout}", check_block, variant, device, dtype, layout)
            yield "block", row and [row]
    size: Any = (32, 128, (3, 4, 6, 3)) if device == "cuda" else (2, 32, (2, 1))
    args = (chosen, dtype, device, *size)
    yield "network", report.attempt("network", check_network, *args)


def compile_checks(chosen: list[Variant], device: str, dtype: torch.dtype) -> None:
    """Compile what the checks run."""
    launcher.mode = "record first"
    silent = Report(None, "silent")
    for _ in checks(chosen, device, dtype, silent):
        pass
    torch.cuda.synchronize()
    compile_now(f"checks {dtype}")


def run_part(words: argparse.Namespace) -> None:
    """One part in this process; what it learns about tiles is left for the next."""
    state = words.out / "resnet50_step_state.json"
    if state.exists():
        known = json.loads(state.read_text(encoding="utf-8"))
        launcher.tiles, launcher.options = known["tiles"], known["options"]
        launcher.banned = set(known["banned"])
    report = Report(words.out, words.part)
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = words.part != "check"
    torch.backends.cudnn.allow_tf32 = False  # float32 is the reference
    status: Any = 0
    try:
        if words.part == "check":
            check(words, report)
        else:
            measure(getattr(torch, words.part), words, report)
    except SystemExit as ended:
        status = ended.code
    known = {"tiles": launcher.tiles, "options": launcher.options, "banned": [*launcher.banned]}
    state.write_text(json.dumps(known), encoding="utf-8")
    sys.exit(status)


def main() -> None:
    """All parts, each in a process of its own: a fault on the device ends only its part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--part", choices=("check", "float16", "bfloat16"))
    parser.add_argument("--parts", default="check,float16,bfloat16")
    parser.add_argument("--variants", default="", help="names, joined by commas; all by default")
    parser.add_argument("--seconds", type=float, default=240, help="no part begins or lasts beyond")
    parser.add_argument("--left", type=float, default=240, help="seconds that --part may last")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    words = parser.parse_args()
    words.out.mkdir(parents=True, exist_ok=True)
    if words.part:
        run_part(words)
        return
    begin = time.perf_counter()
    for part in words.parts.split(","):
        status: int | None = DEAD_DEVICE
        while status == DEAD_DEVICE:
            left = words.seconds - (time.perf_counter() - begin)
            left = min(left, CHECK_SECONDS) if part == "check" else left
            print(f"=== {part}, {left:.0f} s left", flush=True)
            if left < SHORTEST_PART:
                break
            status = start_part(part, left, words)
            print(f"=== {part} ended with {status}", flush=True)
        if part == "check" and status != 0:  # what was not checked may hang
            names = [v.name for v in choose_variants(words) if not v.ahead]
            words.variants = ",".join(names)
    summarise(words.out)


def start_part(part: str, left: float, words: argparse.Namespace) -> int | None:
    """Run one part in a process; its exit status, or None if it ran out of time."""
    own = ["--part", part, "--left", f"{left:.0f}", "--variants", words.variants]
    try:
        command = [sys.executable, *sys.argv, *own]
        return subprocess.run(command, timeout=left, check=False).returncode
    except subprocess.TimeoutExpired:
        return None


def summarise(out: Path) -> None:
    """The speeds of all parts, last, where a reader of the output's end finds them."""
    for path in sorted(out.glob("resnet50_step_*float16.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        print(f"{path.name}: failed {data['failed'] or 'nothing'}")
        for row in data.get("speed", ()):
            rate, (low, high) = row["images_per_s"], row["range"]
            print(f"{row['dtype']:<9}{row['variant']:<20}{row['ms']:8.3f} ms {rate:7,} images/s "
                  f"({low:,} to {high:,}), loss {row['loss']}")  # fmt: skip


if __name__ == "__main__":
    main()
