"""Checks of the EfficientNet kernels against float64 on random data.

An error is the largest difference over the largest value.
"""

from collections.abc import Callable, Iterator
from typing import Any

import mbconv_ops as ops
import torch
import torch.nn.functional as F
from depthwise_bench import worst
from mbconv_ops import ADD, GATE, KEEP, SILU, STATISTICS, Excite, Norm
from torch import Tensor

Errors = dict[str, float]


def random(*shape: int, like: Tensor, spread: float = 1.0) -> Tensor:
    """Normal numbers of the type and device of `like`."""
    return (torch.randn(*shape, device=like.device) * spread).to(like.dtype)


def make_norm(c: int, like: Tensor) -> Norm:
    """A norm with random weights."""
    weight, bias = torch.randn(2, c, device=like.device) * 0.3 + 1
    grads = torch.zeros(2, c, device=like.device)
    return Norm(weight, bias, grads[0], grads[1], torch.zeros(2, c, device=like.device))


def leaves(*values: Tensor) -> list[Tensor]:
    """float64 copies that take gradients."""
    return [value.double().detach().requires_grad_() for value in values]


def normalise(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """BatchNorm of an NHWC image in training."""
    x = F.batch_norm(x.permute(0, 3, 1, 2), None, None, weight, bias, True, 0.1, ops.EPS)
    return x.permute(0, 2, 3, 1)


def check_excite(like: Tensor, n: int, side: int, c: int, r: int) -> Errors:
    """Norm, SiLU, squeeze-excite and gate, forward and backward."""
    d, norm = random(n, side, side, c, like=like) + 0.5, make_norm(c, like)
    w1, w2 = random(r, c, like=like, spread=c**-0.5), random(c, r, like=like, spread=r**-0.5)
    b1, b2 = (torch.randn(k, device=like.device) * 0.3 for k in (r, c))
    grads = tuple(torch.zeros(t.shape, device=like.device) for t in (w1, b1, w2, b2))
    excite, pixels, m = Excite(w1, b1, w2, b2, grads), side * side, n * side * side
    exact = leaves(d, norm.weight, norm.bias, w1, b1, w2, b2)
    act = F.silu(normalise(*exact[:3]))
    hidden = F.silu(F.linear(act.mean((1, 2)), exact[3], exact[4]))
    wanted = act * torch.sigmoid(F.linear(hidden, exact[5], exact[6]))[:, None, None]
    dt = random(*d.shape, like=like)
    gradients = torch.autograd.grad(wanted, exact, dt.double())
    v = ops.finish(ops.reduce(STATISTICS, d), norm, m)
    forward = ops.image_sums(d, v)
    kept = excite.forward(forward, pixels)
    t = ops.image_sums(d, v, dt)
    dhidden, dmean = excite.backward(t, kept, pixels)
    u = ops.finish_images(forward, dmean, v, norm, m, excite, (t, *kept, dhidden))
    dd = ops.apply_back(GATE, d, v, u, dt, gate=kept[2], dmean=dmean)
    found = (dd, norm.weight_grad, norm.bias_grad, *grads)
    names = ("dd", "dgamma", "dbeta", "dw1", "db1", "dw2", "db2")
    errors = {"gated": worst(ops.apply(GATE, d, v, gate=kept[2]), wanted)}
    pairs = zip(names, found, gradients, strict=True)
    return errors | {name: worst(value, true) for name, value, true in pairs}


def check_norms(like: Tensor, n: int, side: int, c: int) -> Errors:
    """Norm with SiLU, and norm with drop-path and skip, forward and backward."""
    x, dy, added = (random(n, side, side, c, like=like) for _ in range(3))
    norm, m, keep = make_norm(c, like), n * side * side, torch.rand(n, device=like.device)
    v = ops.finish(ops.reduce(STATISTICS, x), norm, m)
    errors = {}
    for name, kind in (("silu", SILU), ("keep", KEEP)):
        exact = leaves(x, norm.weight, norm.bias)
        wanted = normalise(*exact)
        wanted = F.silu(wanted) if kind == SILU else wanted * keep.double()[:, None, None, None]
        gradients = torch.autograd.grad(wanted, exact, dy.double())
        final = wanted if kind == SILU else wanted + added.double()
        y = ops.apply(SILU if kind == SILU else ADD, x, v, keep=keep, add=added)
        u = ops.finish_back(ops.reduce(kind, x, dy, v, keep), v, norm, m)
        dx = ops.apply_back(kind, x, v, u, dy, keep=keep)
        errors |= {f"{name}_y": worst(y, final), f"{name}_dx": worst(dx, gradients[0])}
        errors[f"{name}_dgamma"] = worst(norm.weight_grad, gradients[1])
        errors[f"{name}_dbeta"] = worst(norm.bias_grad, gradients[2])
    return errors


def check_expand(like: Tensor, n: int, side: int, k: int, e: int) -> Errors:
    """The first product both ways; k 27: the stem's."""
    stem = k == 27
    x = random(
        n, 2 * side if stem else side, 2 * side if stem else side, 3 if stem else k, like=like
    )
    weight, u = random(e, k, like=like, spread=k**-0.5), torch.randn(3, e, device=like.device)
    flat = x.double().reshape(-1, x.shape[-1])
    if stem:
        patches = F.unfold(x.double().permute(0, 3, 1, 2), 3, padding=1, stride=2)
        patches = patches.view(n, 3, 9, -1).permute(0, 3, 2, 1)  # images, places, taps, colours
        flat = patches.reshape(-1, 27)
    wanted = flat @ weight.double().T
    y, s = ops.expand(x, weight, stem)
    sums = torch.stack([wanted.sum(0), (wanted * wanted).sum(0)])
    errors = {"y": worst(y.view(-1, e), wanted), "sums": worst(s.sum(1), sums)}
    if e not in ops.BLOCKS_OF_EXPANSION:
        return errors
    ds, grad = random(*y.shape, like=like), torch.zeros(e, k, device=like.device)
    add = None if stem else random(*x.shape, like=like)
    dx = ops.expand_back(ds, x, weight, u, grad, add, stem)
    dc = ds.double().view(-1, e) * u[0] + wanted * u[1].double() + u[2].double()
    errors["dw"] = worst(grad, dc.T @ flat)
    if add is not None:
        errors["dx"] = worst(dx.view(-1, k), dc @ weight.double() + add.double().view(-1, k))
    return errors


def check_project(like: Tensor, n: int, side: int, c: int, p: int) -> Errors:
    """The last product both ways."""
    d, dp = random(n, side, side, c, like=like), random(n, side, side, p, like=like)
    weight, v = random(p, c, like=like, spread=c**-0.5), torch.randn(4, c, device=like.device)
    gate, grad = torch.rand(n, c, device=like.device), torch.zeros(p, c, device=like.device)
    z = d.double() * v[2].double() + v[3].double()
    act, p_z = F.silu(z), torch.sigmoid(z)
    gated, slope = act * gate.double()[:, None, None], p_z * (1 + z * (1 - p_z))
    wanted = gated @ weight.double().T
    y, s = ops.project(d, v, gate, weight)
    flat = wanted.view(-1, p)
    sums = torch.stack([flat.sum(0), (flat * flat).sum(0)])
    dt, t = ops.project_back(dp, d, v, gate, weight, grad)
    true = dp.double() @ weight.double()
    tables = torch.stack([true * act, true * slope, true * slope * d.double()]).sum((2, 3))
    return {
        "y": worst(y, wanted), "sums": worst(s.sum(1), sums), "dt": worst(dt, true),
        "tables": worst(t.sum(1), tables),
        "dw": worst(grad, dp.double().view(-1, p).T @ gated.view(-1, c)),
    }  # fmt: skip


def list_checks(small: bool) -> Iterator[tuple[str, Callable[..., Errors], tuple[int, ...]]]:
    """Every check with its sizes; few and small for Triton's interpreter."""
    if small:
        yield "excite", check_excite, (3, 4, 48, 6)
        yield "norms", check_norms, (3, 4, 24)
        yield from ((f"expand {k}", check_expand, (2, 4, k, e)) for k, e in ((27, 32), (16, 96)))
        yield "project", check_project, (2, 4, 48, 24)
        return
    for side, c, r in ((112, 32, 8), (56, 96, 4), (14, 480, 20), (7, 1152, 48)):
        yield f"excite {c}", check_excite, (4, side, c, r)
    for side, c in ((112, 16), (56, 24), (28, 240), (7, 320)):
        yield f"norms {c}", check_norms, (4, side, c)
    for side, k, e in ((112, 27, 32), (112, 16, 96), (56, 24, 144), (28, 40, 240), (7, 192, 1152)):
        yield f"expand {k}", check_expand, (4, side, k, e)
    for side, c, p in (
        (112, 32, 16),
        (56, 144, 24),
        (14, 672, 112),
        (14, 480, 80),
    ):
        yield f"project {c} {p}", check_project, (4, side, c, p)


def run_checks(device: str, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Errors of every check, or why it failed."""
    like = torch.zeros(1, device=device, dtype=dtype)
    for name, run, sizes in list_checks(device == "cpu"):
        torch.manual_seed(0)
        try:
            errors = {key: float(f"{value:.1e}") for key, value in run(like, *sizes).items()}
            yield {"check": name, **errors}
        except Exception as problem:  # noqa: BLE001  the others shall run
            yield {"check": name, "failed": str(problem)[:300]}
