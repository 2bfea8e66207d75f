"""A norm's vectors and gradients from the Gram matrix of the convolution before it, in Triton."""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0913, PLR0917  (kernels take pointers and sizes one by one)

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.choices import CHOICES, make_tiles
from phalanx.kernels.norm_finish_fused import update_running

_COVARIANCE_TILES = make_tiles("BN BK", (32, 64, 4, 3), (16, 64, 4, 3))
_STATISTICS_TILES = make_tiles("BN BK", (8, 64, 4, 3))  # only one: timing would repeat an update
_GRADIENT_TILES = make_tiles("BN BK", (8, 64, 4, 3), (4, 64, 4, 3), (16, 64, 8, 3))
_INPUT_TILES = make_tiles("BN BK", (64, 32, 4, 3), (128, 32, 4, 3))


@triton.jit
def _fold_covariance(gram, sums, w, t, M, K, BN: tl.constexpr, BK: tl.constexpr):
    """t = w Cov from a Gram matrix.

    Tensor cores take tf32, which holds a 16-bit weight exactly; Cov is split into two summands, so
    that the variance is accurate to about 2**-22.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    j = tl.program_id(1) * BK + tl.arange(0, BK)
    mean_j, acc = tl.load(sums + j) / M, tl.zeros((BN, BK), tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        mean_k = tl.load(sums + k) / M
        cov = tl.load(gram + k[:, None] * K + j[None, :]) / M - mean_k[:, None] * mean_j[None, :]
        high = (cov.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        left = tl.load(w + n[:, None] * K + k[None, :]).to(tl.float32)
        acc = tl.dot(left, high, acc, input_precision="tf32")
        acc = tl.dot(left, cov - high, acc, input_precision="tf32")
    tl.store(t + n[:, None] * K + j[None, :], acc)


@triton.jit
def _fold_statistics(
    sums, w, t, weight, bias, running_mean, running_var, batches, v, M, N, K, eps, momentum,
    RUNNING: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """v of the norm after x @ w^T from the sums of x and t = w Cov."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    mean, var = tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        own = tl.load(w + n[:, None] * K + k[None, :]).to(tl.float32)
        mean += tl.sum(own * (tl.load(sums + k) / M)[None, :], 1)
        var += tl.sum(own * tl.load(t + n[:, None] * K + k[None, :]), 1)
    var = tl.maximum(var, 0.0)
    rstd = 1 / tl.sqrt_rn(var + eps)
    scale = tl.load(weight + n).to(tl.float32) * rstd
    tl.store(v + n, mean)
    tl.store(v + N + n, rstd)
    tl.store(v + 2 * N + n, scale)
    tl.store(v + 3 * N + n, tl.load(bias + n).to(tl.float32) - mean * scale)
    if RUNNING:
        update_running(running_mean, running_var, batches, n, mean, var, M, N, momentum)


@triton.jit
def _fold_gradient(raw, s, w, t, sums, v, dw, wa, u, M, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """u and the weight gradient dw from raw = g^T x and the sums s of g; wa = scale * w."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    dbeta, product = tl.load(s + n), tl.zeros((BN,), tl.float32)
    for k0 in range(0, K, BK):
        o = n[:, None] * K + (k0 + tl.arange(0, BK))[None, :]
        product += tl.sum(tl.load(raw + o) * tl.load(w + o).to(tl.float32), 1)
    mean, rstd, scale = tl.load(v + n), tl.load(v + N + n), tl.load(v + 2 * N + n)
    dgamma = (product - mean * dbeta) * rstd
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        o, mean_k = n[:, None] * K + k[None, :], tl.load(sums + k) / M
        d = tl.load(raw + o) - dbeta[:, None] * mean_k[None, :]
        d -= (rstd * dgamma)[:, None] * tl.load(t + o)
        tl.store(dw + o, (scale[:, None] * d).to(dw.dtype.element_ty))
        tl.store(wa + o, (scale[:, None] * tl.load(w + o).to(tl.float32)).to(wa.dtype.element_ty))
    slope = scale * rstd * dgamma / M
    tl.store(u + n, dgamma)
    tl.store(u + N + n, dbeta)
    tl.store(u + 2 * N + n, scale)
    tl.store(u + 3 * N + n, -slope)
    tl.store(u + 4 * N + n, slope * mean - scale * dbeta / M)


@triton.jit
def _round_to_tf32(value):
    """The nearest tf32 number: tensor cores would truncate the remaining bits."""
    bits = (value.to(tl.int32, bitcast=True) + 4096) & -8192
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _fold_input(w, u, q, const, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """q = w^T diag(b) w / max|b|, and const = c w with max|b| as its last element.

    b is a mean over all pixels and too small for float16; divided by max|b| it fits.
    """
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    j = tl.program_id(1) * BK + tl.arange(0, BK)
    largest = tl.zeros((BN,), tl.float32)
    for n0 in range(0, N, BN):
        largest = tl.maximum(largest, tl.abs(tl.load(u + 3 * N + n0 + tl.arange(0, BN))))
    top = tl.maximum(tl.max(largest, 0), 1e-30)
    acc, total = tl.zeros((BK, BK), tl.float32), tl.zeros((BK,), tl.float32)
    for n0 in range(0, N, BN):
        n = n0 + tl.arange(0, BN)
        left = tl.load(w + n[:, None] * K + k[None, :]).to(tl.float32)
        right = tl.load(w + n[:, None] * K + j[None, :]).to(tl.float32)
        total += tl.sum(left * tl.load(u + 4 * N + n)[:, None], 0)
        left = left * (tl.load(u + 3 * N + n) / top)[:, None]
        if w.dtype.element_ty.primitive_bitwidth == 16:  # float32 is for tests only, without tf32
            left = _round_to_tf32(left)
        acc = tl.dot(tl.trans(left), right, acc, input_precision="tf32")
    tl.store(q + k[:, None] * K + j[None, :], acc.to(q.dtype.element_ty))
    first = tl.program_id(1) == 0
    tl.store(const + k, total, mask=(k < K) & first)
    if first & (tl.program_id(0) == 0):
        tl.store(const + K, top)


def fold_covariance_fused(gram: Tensor, sums: Tensor, w: Tensor, count: int) -> Tensor:
    """w Cov."""
    n, k = w.shape
    t = torch.empty((n, k), device=w.device)
    args = (gram, sums, w, t, count, k)
    CHOICES.run(_fold_covariance, lambda t: (n // t["BN"], k // t["BK"]), args, _COVARIANCE_TILES)
    return t


def fold_statistics_fused(
    folded: list[Tensor],
    affine: list[Tensor],
    running: list[Tensor],
    count: int,
    eps: float,
    momentum: float,
) -> Tensor:
    """v of the norm after a convolution; folded: the sums of its input, its weight and w Cov."""
    n, k = folded[1].shape
    v = torch.empty((4, n), device=folded[0].device)
    args = (*folded, *affine, *(running or (None, None, None)), v, count, n, k, eps, momentum)
    grid = lambda t: (n // t["BN"],)  # noqa: E731
    CHOICES.run(_fold_statistics, grid, args, _STATISTICS_TILES, RUNNING=bool(running))
    return v


def fold_gradient_fused(
    raw: Tensor, s: Tensor, folded: list[Tensor], v: Tensor, count: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The weight's gradient, scale * weight and u."""
    sums, w, t = folded
    n, k = w.shape
    dw, wa = torch.empty((n, k), device=w.device, dtype=dtype), torch.empty_like(w)
    u = torch.empty((5, n), device=w.device)
    args = (raw, s, w, t, sums, v, dw, wa, u, count, n, k)
    CHOICES.run(_fold_gradient, lambda t: (n // t["BN"],), args, _GRADIENT_TILES)
    return dw, wa, u


def fold_input_fused(w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """q [K, K], and const [K + 1], whose last element is q's scale."""
    n, k = w.shape
    q, const = w.new_empty((k, k)), torch.empty(k + 1, device=w.device)
    tiles = [t for t in _INPUT_TILES if n % t["BN"] == 0]
    args = (w, u, q, const, n, k)
    CHOICES.run(_fold_input, lambda t: (k // t["BK"], k // t["BK"]), args, tiles)
    return q, const
