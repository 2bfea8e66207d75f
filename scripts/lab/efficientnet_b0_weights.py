"""The shape of EfficientNet-B0 and its weights: flat buffers, handed out as views by name."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from mbconv_ops import Excite, Norm
from torch import Tensor

# kernel, stride, expansion, channels, blocks
STAGES = (
    *((3, 1, 1, 16, 1), (3, 2, 6, 24, 2), (5, 2, 6, 40, 2), (3, 2, 6, 80, 3)),
    *((5, 1, 6, 112, 3), (5, 2, 6, 192, 4), (3, 1, 6, 320, 1)),
)
SMALL = ((3, 1, 1, 16, 1), (3, 2, 3, 24, 2), (5, 2, 2, 24, 2))  # for Triton's interpreter


@dataclass(frozen=True)
class Shape:
    """What one block is made of."""

    name: str
    kernel: int
    stride: int
    into: int
    middle: int
    out: int

    @property
    def skip(self) -> bool:
        """Whether the input is added to the output."""
        return self.stride == 1 and self.into == self.out


def block_shapes(stages: tuple[tuple[int, ...], ...], width: int) -> Iterator[Shape]:
    """The blocks of a network behind a stem of `width` channels."""
    for stage, (kernel, stride, expansion, out, count) in enumerate(stages):
        for i in range(count):
            name = f"{stage}.{i}"
            yield Shape(name, kernel, stride if i == 0 else 1, width, width * expansion, out)
            width = out


def list_parameters(stages: tuple[tuple[int, ...], ...], classes: int, head: int) -> dict[str, Any]:
    """Shapes by name; matrices first, as decay spares vectors."""
    found: dict[str, tuple[int, ...]] = {"stem.w": (32, 27)}
    vectors: dict[str, tuple[int, ...]] = {}
    norms = {"stem": 32, "head": head}
    width = 32
    for shape in block_shapes(stages, 32):
        squeezed = max(1, shape.into // 4)
        if shape.middle != shape.into:
            found[f"{shape.name}.expand"] = (shape.middle, shape.into)
            norms[f"{shape.name}.1"] = shape.middle
        found[f"{shape.name}.depthwise"] = (shape.kernel, shape.kernel, shape.middle)
        found[f"{shape.name}.w1"] = (squeezed, shape.middle)
        found[f"{shape.name}.w2"] = (shape.middle, squeezed)
        found[f"{shape.name}.project"] = (shape.out, shape.middle)
        vectors[f"{shape.name}.b1"], vectors[f"{shape.name}.b2"] = (squeezed,), (shape.middle,)
        norms |= {f"{shape.name}.2": shape.middle, f"{shape.name}.3": shape.out}
        width = shape.out
    found |= {"head.w": (head, width), "fc.w": (classes, head)}
    for name, channels in norms.items():
        vectors[f"{name}.weight"] = vectors[f"{name}.bias"] = (channels,)
    return {**found, **vectors, "fc.b": (classes,)}


class Weights:
    """Flat float32 weights, momenta, squares and gradients with a 16-bit copy, as views by name."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, device: str):
        places, used = {}, 0
        for name, shape in shapes.items():
            places[name] = slice(used, used + torch.Size(shape).numel())
            used += (torch.Size(shape).numel() + 63) // 64 * 64
        self.p, self.m, self.square, self.g = (torch.zeros(used, device=device) for _ in range(4))
        self.q = torch.zeros(used, device=device, dtype=dtype)
        self.decayed = next(places[n].start for n, shape in shapes.items() if len(shape) == 1)
        view = lambda flat: {n: flat[places[n]].view(s) for n, s in shapes.items()}  # noqa: E731
        self.master, self.grad, self.half = view(self.p), view(self.g), view(self.q)
        generator = torch.Generator(device).manual_seed(0)
        for name, value in self.master.items():
            spread = (2 / max(1, value[0].numel())) ** 0.5 if value.ndim == 2 else 0.1
            if value.ndim == 3:
                spread = (2 / value.shape[0] ** 2) ** 0.5
            value.normal_(0.0, spread, generator=generator)
            if name.endswith("weight"):
                value.add_(1.0 if not name.endswith("3.weight") else 0.2)
        self.q.copy_(self.p)
        self.running: dict[str, Tensor] = {}

    def norm(self, name: str) -> Norm:
        """The parts of a norm."""
        weight, bias = f"{name}.weight", f"{name}.bias"
        if name not in self.running:
            self.running[name] = torch.zeros(2, *self.master[weight].shape, device=self.p.device)
        views = (self.master[weight], self.master[bias], self.grad[weight], self.grad[bias])
        return Norm(*views, self.running[name])

    def excite(self, name: str) -> Excite:
        """The parts of a squeeze-excite."""
        parts = [f"{name}.{part}" for part in ("w1", "b1", "w2", "b2")]
        values = [(self.master if part[-2] == "b" else self.half)[part] for part in parts]
        return Excite(*values, tuple(self.grad[part] for part in parts))
