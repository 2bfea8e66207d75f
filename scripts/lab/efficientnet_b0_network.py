"""EfficientNet-B0 written out, forward and backward, over the kernels of mbconv_ops.py.

What a variant may use is in its flags; where there are several ways to the same result, the fastest
is measured once a shape. Noise (drop-path and dropout) is drawn on the device from a step counter.
"""

from dataclasses import dataclass, field
from typing import Any

import mbconv_kernels as kernels
import mbconv_ops as ops
import torch
import torch.nn.functional as F
import triton
from depthwise_kernels import convolve, convolve_back
from efficientnet_b0_weights import STAGES, Shape, Weights, block_shapes, list_parameters
from mbconv_ops import ADD, GATE, KEEP, SILU, STATISTICS
from step_kernels import launcher
from torch import Tensor

DROP_PATH, DROPOUT = 0.2, 0.2
LOSS_SCALE = 16384.0


@dataclass(frozen=True)
class Variant:
    """What a step may use besides cuDNN, cuBLAS and the kernels for norms and squeeze-excite."""

    name: str
    depthwise: bool = False  # own depthwise convolutions
    expand: bool = False  # own products before them, and the stem
    project: bool = False  # own products behind the squeeze-excite


VARIANTS = (
    Variant("norms"),
    Variant("depthwise", depthwise=True),
    Variant("expand", depthwise=True, expand=True),
    Variant("all", depthwise=True, expand=True, project=True),
)


def rows(x: Tensor) -> Tensor:
    """An NHWC image as [pixels, channels]."""
    return x.view(-1, x.shape[-1])


def count_rows(x: Tensor) -> int:
    """Pixels of all images."""
    return x.numel() // x.shape[-1]


def as_image(x: Tensor, like: Tensor) -> Tensor:
    """[pixels, channels] as NHWC again."""
    return x.view(*like.shape[:3], -1)


@dataclass
class Block:
    """One inverted bottleneck with squeeze-excite."""

    shape: Shape
    weights: Weights
    variant: Variant
    kept: dict[str, Any] = field(default_factory=dict)

    def half(self, part: str) -> Tensor:
        """16-bit weights of one part."""
        return self.weights.half[f"{self.shape.name}.{part}"]

    def grad(self, part: str) -> Tensor:
        """Where a gradient goes."""
        return self.weights.grad[f"{self.shape.name}.{part}"]

    def choose(self, part: str, x: Tensor, ways: dict[str, Any]) -> Any:
        """The result of the fastest way."""
        if len(ways) == 1:
            return next(iter(ways.values()))()
        key = f"{part} {self.shape.kernel} {self.shape.stride} {self.shape.skip}"
        return launcher.choose(f"{key} {tuple(x.shape)} {self.shape.out}", ways)

    def forward(self, x: Tensor, v: Tensor | None, keep: Tensor) -> Tensor:
        """The block's output; v where x is the stem's raw output and there is no expansion."""
        weights, name, kept = self.weights, self.shape.name, self.kept
        raw = x
        if v is None:
            raw, s = self.expand(x)
            v = ops.finish(s, weights.norm(f"{name}.1"), count_rows(raw))
        d, s = self.convolve(raw, v)
        v2 = ops.finish(s, weights.norm(f"{name}.2"), count_rows(d))
        t = ops.image_sums(d, v2)
        pixels = d.shape[1] * d.shape[2]
        excited = weights.excite(name).forward(t, pixels)
        p, s = self.project(d, v2, excited[2])
        v3 = ops.finish(s, weights.norm(f"{name}.3"), count_rows(p))
        kept |= {"x": x, "raw": raw, "v": v, "d": d, "v2": v2, "t": t, "excited": excited}
        kept |= {"p": p, "v3": v3, "keep": keep}
        return ops.apply(ADD if self.shape.skip else KEEP, p, v3, keep=keep, add=x)

    def expand(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The first product and its sums."""

        def apart() -> tuple[Tensor, Tensor]:
            raw = as_image(rows(x) @ self.half("expand").T, x)
            return raw, ops.reduce(STATISTICS, raw)

        ways: dict[str, Any] = {}
        if self.variant.expand:
            ways["own"] = lambda: ops.expand(x, self.half("expand"))
        ways["apart"] = apart
        return self.choose("expand", x, ways)

    def convolve(self, raw: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The depthwise convolution and its sums."""
        stride, weight = self.shape.stride, self.half("depthwise")

        def by_cudnn() -> tuple[Tensor, Tensor]:
            a = ops.apply(SILU, raw, v)
            kernel = weight.permute(2, 0, 1)[:, None].contiguous()
            if not self.variant.depthwise:  # else backward computes it anew
                self.kept |= {"a": a, "kernel": kernel}
            pad, groups = self.shape.kernel // 2, self.shape.middle
            d = F.conv2d(a.permute(0, 3, 1, 2), kernel, None, stride, pad, 1, groups)
            d = d.permute(0, 2, 3, 1).contiguous()
            return d, ops.reduce(STATISTICS, d)

        if not self.variant.depthwise:
            return by_cudnn()
        ways: dict[str, Any] = {
            "pass": lambda: convolve(ops.apply(SILU, raw, v), weight, None, stride),
            "cudnn": by_cudnn,
        }
        if stride == 2 and self.shape.kernel == 3:
            ways["load"] = lambda: convolve(raw, weight, v, stride)
        return self.choose("convolve", raw, ways)

    def project(self, d: Tensor, v: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        """The last product and its sums."""

        def apart() -> tuple[Tensor, Tensor]:
            gated = self.kept["gated"] = ops.apply(GATE, d, v, gate=gate)
            p = as_image(rows(gated) @ self.half("project").T, d)
            return p, ops.reduce(STATISTICS, p)

        ways: dict[str, Any] = {}
        if self.variant.project and self.shape.out <= 128:  # more take too many registers
            ways["own"] = lambda: ops.project(d, v, gate, self.half("project"))
        ways["apart"] = apart
        return self.choose("project", d, ways)

    def backward(self, dy: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of the input; of a stem's norm and its vectors, where it is the input."""
        kept, name, weights = self.kept, self.shape.name, self.weights
        p, v3, keep, d, v2 = (kept[key] for key in ("p", "v3", "keep", "d", "v2"))
        s = ops.reduce(KEEP, p, dy, keep=keep)
        u = ops.finish_back(s, v3, weights.norm(f"{name}.3"), count_rows(p))
        dp = ops.apply_back(KEEP, p, v3, u, dy, keep=keep)
        dt, t = self.project_back(dp)
        pixels, excite = d.shape[1] * d.shape[2], weights.excite(name)
        mean, hidden, gate = kept["excited"]
        dhidden, dmean = excite.backward(t, kept["excited"], pixels)
        back = (t, mean, hidden, gate, dhidden)
        norm, m = weights.norm(f"{name}.2"), count_rows(d)
        u = ops.finish_images(kept["t"], dmean, v2, norm, m, excite, back)
        dd = ops.apply_back(GATE, d, v2, u, dt, gate=gate, dmean=dmean)
        ds, s = self.convolve_back(dd)
        stem = self.shape.middle == self.shape.into
        norm = weights.norm("stem" if stem else f"{name}.1")
        u = ops.finish_back(s, kept["v"], norm, count_rows(ds))
        result = (ds, u) if stem else (self.expand_back(ds, u, dy), u)
        self.kept = {}
        return result

    def project_back(self, dp: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of the gated activation, and its sums by image."""
        d, v2, gate = self.kept["d"], self.kept["v2"], self.kept["excited"][2]
        weight, grad = self.half("project"), self.grad("project")

        def apart() -> tuple[Tensor, Tensor]:
            gated = self.kept.get("gated")  # where the forward product was own, it was not kept
            gated = ops.apply(GATE, d, v2, gate=gate) if gated is None else gated
            ops.multiply(rows(dp).T, rows(gated), grad)
            dt = as_image(rows(dp) @ weight, d)
            return dt, ops.image_sums(d, v2, dt)

        ways: dict[str, Any] = {}
        if self.variant.project and self.shape.out <= 192:
            ways["own"] = lambda: ops.project_back(dp, d, v2, gate, weight, grad)
        ways["apart"] = apart
        return self.choose("project back", d, ways)

    def convolve_back(self, dd: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient before the depthwise convolution, and its sums; the latter behind SiLU."""
        raw, v, stride = self.kept["raw"], self.kept["v"], self.shape.stride
        weight, grad = self.half("depthwise"), self.grad("depthwise")
        if not self.variant.depthwise:
            pad = self.shape.kernel // 2
            a = self.kept["a"].permute(0, 3, 1, 2)
            da, dw, _ = torch.ops.aten.convolution_backward(
                dd.permute(0, 3, 1, 2), a, self.kept["kernel"], None, [stride] * 2, [pad] * 2,
                [1, 1], False, [0, 0], self.shape.middle, [True, True, False],
            )  # fmt: skip
            grad.copy_(dw[:, 0].permute(1, 2, 0))
            da = da.permute(0, 2, 3, 1).contiguous()
            return da, ops.reduce(SILU, raw, da, v)

        def run(*parts: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
            found = [convolve_back(dd, raw, weight, v, stride, part) for part in parts]
            ops.add_rows(found[-1][2], grad)
            return found[0][:2]

        ways = {
            "joined": lambda: run((True, True)),
            "apart": lambda: run((True, False), (False, True)),
        }
        return self.choose("convolve back", raw, ways)

    def expand_back(self, ds: Tensor, u: Tensor, dy: Tensor) -> Tensor:
        """The gradient of the block's input, the skip's with it."""
        x, raw, v = self.kept["x"], self.kept["raw"], self.kept["v"]
        weight, grad = self.half("expand"), self.grad("expand")

        def apart() -> Tensor:
            dc = rows(ops.apply_back(STATISTICS if self.variant.depthwise else SILU, raw, v, u, ds))
            ops.multiply(dc.T, rows(x), grad)
            if self.shape.skip:
                return as_image(torch.addmm(rows(dy), dc, weight), x)
            return as_image(dc @ weight, x)

        ways: dict[str, Any] = {}
        if self.variant.expand and ds.shape[-1] in ops.BLOCKS_OF_EXPANSION:
            add = dy if self.shape.skip else None
            ways["own"] = lambda: ops.expand_back(ds, x, weight, u, grad, add)
        ways["apart"] = apart
        return self.choose("expand back", ds, ways)


class Network:
    """The whole network."""

    def __init__(
        self, variant: Variant, dtype: torch.dtype, batch: int, device: str = "cuda",
        stages: tuple[tuple[int, ...], ...] = STAGES, classes: int = 1000, head: int = 1280,
    ):  # fmt: skip
        self.variant, self.dtype, self.head = variant, dtype, head
        self.weights = Weights(list_parameters(stages, classes, head), dtype, device)
        shapes = list(block_shapes(stages, 32))
        self.blocks = [Block(shape, self.weights, variant) for shape in shapes]
        rates = [DROP_PATH * i / len(shapes) * shape.skip for i, shape in enumerate(shapes)]
        self.rates = torch.tensor(rates, device=device)
        self.keep = torch.ones(len(shapes), batch, device=device)
        self.drop = torch.ones(batch, head, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.scale = LOSS_SCALE if dtype == torch.float16 else 1.0
        self.hyper = torch.tensor([0.003, 1 / self.scale, 1e-5], device=device)

    def draw(self) -> None:
        """New noise."""
        layers, batch = self.keep.shape
        count = layers * batch + self.drop.numel()
        args = (self.step, self.rates, self.keep, self.drop, batch, layers, self.drop.numel())
        kernels.draw[(triton.cdiv(count, 1024),)](*args, DROPOUT, B=1024)

    def gradients(self, image: Tensor, labels: Tensor) -> Tensor:
        """The loss; gradients, times the loss scale, are left in weights.g."""
        weights = self.weights
        raw, s = self.stem(image)
        v = ops.finish(s, weights.norm("stem"), count_rows(raw))
        x, first = raw, v
        for i, block in enumerate(self.blocks):
            x = block.forward(x, first if i == 0 else None, self.keep[i])
        loss, dy = self.close(x, labels)
        for block in reversed(self.blocks):
            dy, u = block.backward(dy)
        self.stem_back(image, raw, v, u, dy)
        return loss

    def stem(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """The stem's raw output and its sums."""

        def apart() -> tuple[Tensor, Tensor]:
            kernel = self.weights.half["stem.w"].view(32, 3, 3, 3).permute(0, 3, 1, 2)
            raw = F.conv2d(image.permute(0, 3, 1, 2), kernel, None, 2, 1)
            raw = raw.permute(0, 2, 3, 1).contiguous()
            return raw, ops.reduce(STATISTICS, raw)

        ways: dict[str, Any] = {}
        if self.variant.expand:
            ways["own"] = lambda: ops.expand(image, self.weights.half["stem.w"], stem=True)
        ways["apart"] = apart
        return launcher.choose(f"stem {len(ways)} {tuple(image.shape)} {self.dtype}", ways)

    def stem_back(self, image: Tensor, raw: Tensor, v: Tensor, u: Tensor, ds: Tensor) -> None:
        """The stem's weight gradient."""
        weight, grad = self.weights.half["stem.w"], self.weights.grad["stem.w"]

        def apart() -> None:
            kind = STATISTICS if self.variant.depthwise else SILU
            dc = ops.apply_back(kind, raw, v, u, ds).permute(0, 3, 1, 2)
            kernel = weight.view(32, 3, 3, 3).permute(0, 3, 1, 2)
            _, dw, _ = torch.ops.aten.convolution_backward(
                dc, image.permute(0, 3, 1, 2), kernel, None, [2, 2], [1, 1], [1, 1], False, [0, 0],
                1, [False, True, False],
            )  # fmt: skip
            grad.view(32, 3, 3, 3).copy_(dw.permute(0, 2, 3, 1))

        ways: dict[str, Any] = {}
        if self.variant.expand:
            ways["own"] = lambda: ops.expand_back(ds, image, weight, u, grad, stem=True)
        ways["apart"] = apart
        launcher.choose(f"stem back {len(ways)} {tuple(image.shape)} {self.dtype}", ways)

    def close(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and the gradient of the last block's output."""
        weights = self.weights
        raw = as_image(rows(x) @ weights.half["head.w"].T, x)
        norm, m = weights.norm("head"), count_rows(raw)
        v = ops.finish(ops.reduce(STATISTICS, raw), norm, m)
        t = ops.image_sums(raw, v)
        share = self.drop / (x.shape[1] * x.shape[2])
        pooled = (t[0].sum(0) * share).to(self.dtype)
        logits = pooled @ weights.half["fc.w"].T
        logits = logits.float() + weights.master["fc.b"]
        loss = F.cross_entropy(logits, labels)
        d = torch.softmax(logits, 1)
        d.scatter_add_(1, labels[:, None], torch.full_like(d[:, :1], -1.0))
        d *= self.scale / len(labels)
        torch.sum(d, 0, out=weights.grad["fc.b"])
        half = d.to(self.dtype)
        ops.multiply(half.T, pooled, weights.grad["fc.w"])
        dmean = (half @ weights.half["fc.w"]).float() * share
        u = ops.finish_images(t, dmean, v, norm, m)
        dc = rows(ops.apply_back(GATE, raw, v, u, dmean=dmean))
        ops.multiply(dc.T, rows(x), weights.grad["head.w"])
        return loss, as_image(dc @ weights.half["head.w"], x)

    def update(self) -> None:
        """RMSprop over everything."""
        w = self.weights
        args = (w.p, w.m, w.square, w.g, w.q, self.hyper, self.step, w.p.numel(), w.decayed)
        kernels.update[(triton.cdiv(w.p.numel(), 1024),)](*args, RMS=True, B=1024)
