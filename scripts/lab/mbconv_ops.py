"""Calls of the EfficientNet kernels: shapes, tiles and the buffers between them.

Images are NHWC, partial sums and vectors float32; the kernels' files say what they hold.
"""

from dataclasses import dataclass
from typing import Any

import mbconv_kernels as kernels
import mbconv_products as products
import torch
import triton
from step_kernels import Tile, launcher, make_tiles
from torch import Tensor

STATISTICS, SILU, KEEP, GATE, ADD = range(5)
EPS, MOMENTUM = 1e-5, 0.1
ROW_TILES = make_tiles(
    "BM BC", (32, 64, 4, 1), (64, 32, 4, 1), (16, 128, 4, 1), (128, 16, 4, 1), (64, 64, 8, 1)
)
IMAGE_TILES = make_tiles(
    "BM BC", (32, 64, 4, 1), (64, 32, 4, 1), (16, 64, 2, 1), (16, 128, 4, 1), (32, 32, 2, 1)
)
EXPAND_TILES = make_tiles(
    "BM BN DEPTH WARPS",
    *((128, 64, 2, 4, 4, 1), (128, 128, 2, 8, 8, 1), (64, 128, 3, 4, 4, 1), (128, 32, 3, 4, 4, 1)),
)
EXPAND_BACK_TILES = make_tiles(
    "BM DEPTH", (64, 1, 4, 1), (64, 2, 4, 1), (64, 2, 8, 1), (128, 1, 8, 1), (128, 2, 8, 1)
)
PROJECT_TILES = make_tiles(
    "BM BK WARPS",
    *((64, 32, 4, 4, 3), (128, 32, 4, 4, 3), (64, 64, 4, 4, 3), (128, 64, 8, 8, 3)),
    *((128, 32, 8, 8, 3),),
)
PROJECT_BACK_TILES = make_tiles(
    "BM BC", (64, 32, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (32, 32, 4, 2), (128, 32, 8, 2)
)
SUM_TILES = make_tiles("BR BC", (32, 64, 4, 1), (128, 32, 8, 1), (16, 128, 4, 1))
FINISH_TILES = make_tiles("BG BC", (64, 16, 4, 1), (256, 8, 8, 1))
MULTIPROCESSORS = 132
BLOCKS_OF_EXPANSION = {32: (32, 0), 96: (64, 32), 144: (128, 16), 240: (128, 128)}


@dataclass(frozen=True)
class Norm:
    """Weights, gradients and running statistics of one BatchNorm."""

    weight: Tensor
    bias: Tensor
    weight_grad: Tensor
    bias_grad: Tensor
    running: Tensor


def power(n: int) -> int:
    """The power of two that holds n, 16 at least."""
    return max(16, triton.next_power_of_2(n))


def fitting(tiles: list[Tile], **most: int) -> list[Tile]:
    """The tiles no larger than asked for, or else the smallest."""
    found = [t for t in tiles if all(t[key] <= value for key, value in most.items())]
    return found or [min(tiles, key=lambda t: [t[key] for key in most])]


def floats(*shape: int, like: Tensor) -> Tensor:
    """Room for float32 numbers."""
    return torch.empty(*shape, device=like.device)


def count_groups(m: int, c: int) -> int:
    """Rows of partial sums: programs that share the rows of an image."""
    return max(1, min(MULTIPROCESSORS * 8 * 64 // c, triton.cdiv(m, 128)))


def count_parts(pixels: int) -> int:
    """Into how many parts an image is cut, so that there are programs enough."""
    return {12544: 8, 3136: 4, 784: 2}.get(pixels, 1)


def by_rows(m: int, c: int) -> Any:
    """A program for each tile."""
    return lambda t: (triton.cdiv(m, t["BM"]), triton.cdiv(c, t["BC"]))


def reduce(kind: int, x: Tensor, dy: Tensor | None = None, v: Tensor | None = None,
           keep: Tensor | None = None) -> Tensor:  # fmt: skip
    """Partial sums for a norm, forward (STATISTICS) or backward."""
    n, h, w, c = x.shape
    m, groups = n * h * w, count_groups(n * h * w, c)
    s = floats(2, groups, c, like=x)
    args = (x if dy is None else dy, x, s if v is None else v, s if keep is None else keep, s)
    grid = lambda t: (triton.cdiv(c, t["BC"]), groups)  # noqa: E731
    tiles = fitting(ROW_TILES, BC=power(c))
    launcher.run(kernels.reduce_rows, grid, (*args, m, h * w, c // 8, groups), tiles, KIND=kind)
    return s


def finish(s: Tensor, norm: Norm, m: int) -> Tensor:
    """A norm's forward vectors."""
    _, groups, c = s.shape
    v = floats(4, c, like=s)
    args = (s, norm.weight, norm.bias, norm.running, v, m, c, groups, EPS, MOMENTUM)
    grid = lambda t: (triton.cdiv(c, t["BC"]),)  # noqa: E731
    launcher.run(kernels.finish_forward, grid, args, FINISH_TILES)
    return v


def finish_back(s: Tensor, v: Tensor, norm: Norm, m: int) -> Tensor:
    """A norm's backward vectors; its gradients are stored."""
    _, groups, c = s.shape
    u = floats(3, c, like=s)
    args = (s, v, u, norm.weight_grad, norm.bias_grad, m, c, groups)
    grid = lambda t: (triton.cdiv(c, t["BC"]),)  # noqa: E731
    launcher.run(kernels.finish_back, grid, args, FINISH_TILES)
    return u


def apply(kind: int, x: Tensor, v: Tensor, keep: Tensor | None = None,
          gate: Tensor | None = None, add: Tensor | None = None) -> Tensor:  # fmt: skip
    """Norm with what follows it."""
    n, h, w, c = x.shape
    y = torch.empty_like(x)
    held = (v if keep is None else keep, v if gate is None else gate, x if add is None else add)
    args = (x, v, *held, y, n * h * w, h * w, c // 8)
    tiles = fitting(ROW_TILES, BC=power(c))
    launcher.run(kernels.apply_rows, by_rows(n * h * w, c), args, tiles, KIND=kind)
    return y


def apply_back(kind: int, x: Tensor, v: Tensor, u: Tensor, dy: Tensor | None = None,
               **held: Tensor) -> Tensor:  # fmt: skip
    """The gradient of a norm's input; held may have keep, gate and dmean."""
    n, h, w, c = x.shape
    dx = torch.empty_like(x)
    more = tuple(held.get(name, v) for name in ("keep", "gate", "dmean"))
    args = (x if dy is None else dy, x, v, u, *more, dx, n * h * w, h * w, c // 8)
    flags, tiles = {"KIND": kind, "HEAD": int(dy is None)}, fitting(ROW_TILES, BC=power(c))
    launcher.run(kernels.apply_rows_back, by_rows(n * h * w, c), args, tiles, **flags)
    return dx


def image_sums(x: Tensor, v: Tensor, dy: Tensor | None = None) -> Tensor:
    """Tables of sums by image."""
    n, h, w, c = x.shape
    parts = count_parts(h * w)
    t = floats(3, parts, n, c, like=x)
    args = (x if dy is None else dy, x, v, t, n, h * w, c // 8, parts)
    grid = lambda t: (n * parts, triton.cdiv(c, t["BC"]))  # noqa: E731
    tiles = fitting(IMAGE_TILES, BC=power(c))
    launcher.run(kernels.sum_images, grid, args, tiles, BACK=int(dy is not None))
    return t


@dataclass(frozen=True)
class Excite:
    """Weights of a squeeze-excite, [R, C] and [C, R], and their gradients."""

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor
    grads: tuple[Tensor, ...]  # in this order

    def forward(self, t: Tensor, pixels: int) -> tuple[Tensor, ...]:
        """Mean, hidden and gate."""
        (r, c), n = self.w1.shape, t.shape[2]
        mean, gate, hidden = (floats(n, k, like=t) for k in (c, c, r))
        args = (t, self.w1, self.b1, self.w2, self.b2, mean, hidden, gate, n, pixels, c, r)
        tiles = make_tiles("BI BC BK", (16, 64, 64, 4, 2), (16, 128, 128, 4, 1))
        grid = lambda t: (triton.cdiv(n, t["BI"]), triton.cdiv(c, t["BC"]))  # noqa: E731
        launcher.run(kernels.excite, grid, args, tiles, SPLIT=t.shape[1], RP=power(r))
        return mean, hidden, gate

    def backward(self, t: Tensor, kept: tuple[Tensor, ...], pixels: int) -> tuple[Tensor, Tensor]:
        """The gradient of hidden, and each pixel's share of that of the mean."""
        (r, c), n = self.w1.shape, t.shape[2]
        dhidden, dmean = floats(n, r, like=t), floats(n, c, like=t)
        args = (t, self.w1, self.w2, *kept[1:], dhidden, dmean, n, pixels, c, r)
        tiles = make_tiles("BI BC BK", (16, 64, 64, 4, 2), (16, 128, 128, 4, 1))
        grid = lambda t: (triton.cdiv(n, t["BI"]), triton.cdiv(c, t["BC"]))  # noqa: E731
        launcher.run(kernels.excite_back, grid, args, tiles, SPLIT=t.shape[1], RP=power(r))
        return dhidden, dmean


def finish_images(
    forward: Tensor, dmean: Tensor, v: Tensor, norm: Norm, m: int, excite: Excite | None = None,
    back: tuple[Tensor, ...] = (),
) -> Tensor:  # fmt: skip
    """Backward vectors of a norm from tables, with a squeeze-excite's weight gradients.

    back: its tables, mean, hidden, gate and the gradient of hidden.
    """
    _, parts, n, c = forward.shape
    u, r = floats(3, c, like=v), excite.w1.shape[0] if excite else 1
    t, mean, hidden, gate, dhidden = back or (forward, dmean, v, v, v)
    grads = excite.grads if excite else (v,) * 4
    args = (t, forward, mean, hidden, gate, dhidden, dmean, *grads, v, u)
    args += (norm.weight_grad, norm.bias_grad, m, n, c, r)
    tiles = make_tiles("BI BC", (32, 16, 4, 1), (64, 16, 4, 1), (128, 16, 8, 1), (256, 16, 8, 1))
    flags = {"SPLIT": parts, "EXCITE": int(excite is not None), "RP": power(r)}
    grid = lambda t: (triton.cdiv(c, t["BC"]),)  # noqa: E731
    launcher.run(kernels.excite_back_weights, grid, args, tiles, **flags)
    return u


def add_rows(p: Tensor, out: Tensor) -> None:
    """Add partial rows up, into a gradient."""
    rows, c = p.shape[0], p[0].numel()
    grid = lambda t: (triton.cdiv(c, t["BC"]),)  # noqa: E731
    launcher.run(kernels.sum_rows, grid, (p, out, rows, c), SUM_TILES)


def expand(x: Tensor, weight: Tensor, stem: bool = False) -> tuple[Tensor, Tensor]:
    """x w^T with partial sums; a stem's x is the image and its weight [E, 27]."""
    (n, h, w, _), (e, k) = x.shape, weight.shape
    ho, wo = (h // 2, w // 2) if stem else (h, w)
    m = n * ho * wo
    groups = min(triton.cdiv(m, 128), max(1, MULTIPROCESSORS * 4 * 64 // e))
    y = torch.empty(n, ho, wo, e, dtype=x.dtype, device=x.device)
    s = floats(2, groups, e, like=x)
    args = (x, weight, y, s, m, k // 8, k, e, groups, h, w)
    grid = lambda t: (triton.cdiv(e, t["BN"]), groups)  # noqa: E731
    tiles = fitting(EXPAND_TILES, BN=power(e))
    launcher.run(products.expand, grid, args, tiles, STEM=int(stem), KP=power(k))
    return y, s


def expand_back(ds: Tensor, x: Tensor, weight: Tensor, u: Tensor, grad: Tensor,
                add: Tensor | None = None, stem: bool = False) -> Tensor:  # fmt: skip
    """The gradient of x, with `add`; the weights' is stored. u: the norm's backward vectors."""
    (n, ho, wo, e), k = ds.shape, weight.shape[1]
    m, (h, w) = n * ho * wo, x.shape[1:3]
    n1, n2 = BLOCKS_OF_EXPANSION[e]
    groups = min(triton.cdiv(m, 128), MULTIPROCESSORS * (2 if k > 16 else 4))
    dx = x if stem else torch.empty_like(x)
    dw = floats(groups, e * k, like=x)
    args = (ds, x, weight, u, dx if add is None else add, dx, dw)
    args += (m, k // 8, k, e, groups, h, w)
    flags = {"STEM": int(stem), "ADD": int(add is not None), "KP": power(k), "N1": n1, "N2": n2}
    launcher.run(products.expand_back, lambda t: (groups,), args, EXPAND_BACK_TILES, **flags)
    add_rows(dw, grad)
    return dx


def project(d: Tensor, v: Tensor, gate: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(silu(norm(d)) * gate) w^T with partial sums."""
    (n, h, w, c), p = d.shape, weight.shape[0]
    m = n * h * w
    groups = min(triton.cdiv(m, 64), MULTIPROCESSORS * 6)
    y = torch.empty(n, h, w, p, dtype=d.dtype, device=d.device)
    s = floats(2, groups, p, like=d)
    args = (d, v, gate, weight, y, s, m, h * w, c, p // 8, groups)
    launcher.run(products.project, lambda t: (groups,), args, PROJECT_TILES, PP=power(p))
    return y, s


def project_back(dp: Tensor, d: Tensor, v: Tensor, gate: Tensor, weight: Tensor,
                 grad: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of the gated activation and its tables; the weights' is stored."""
    (n, h, w, c), p = d.shape, weight.shape[0]
    parts = count_parts(h * w)
    wanted = max(1, MULTIPROCESSORS * 4 * 32 // max(c, 32))
    groups = min(n * parts, wanted)
    dt, t = torch.empty_like(d), floats(3, parts, n, c, like=d)
    dw = floats(groups, p * c, like=d)
    args = (dp, d, v, gate, weight, dt, t, dw, n, h * w, c, p // 8, groups, parts)
    grid = lambda t: (triton.cdiv(c, t["BC"]), groups)  # noqa: E731
    tiles = fitting(PROJECT_BACK_TILES, BC=32 if p > 128 else power(c))
    launcher.run(products.project_back, grid, args, tiles, PP=power(p))
    add_rows(dw, grad)
    return dt, t


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a b in float32, by cuBLAS."""
    if a.dtype == torch.float32:
        torch.mm(a, b, out=out)
        return
    try:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    except (RuntimeError, TypeError):  # where torch has no such product
        out.copy_(a @ b)
