"""Confidence intervals of scores, tests whether two differ, and percentiles of latencies."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

PERCENTILES = {"p50": (50, 1), "p95": (95, 20), "p99": (99, 100)}  # and the calls each needs
_Z95 = 1.96
_SIGNIFICANCE = 0.05  # p-values below it are significant


def wilson_interval(hits: int, n: int) -> tuple[float, float]:
    """The 95 % confidence interval (low, high) of a share.

    Wilson's, not the normal approximation: it stays within 0..1 and is accurate near both ends.
    """
    if n == 0:
        return 0.0, 1.0  # nothing is known
    share, z = hits / n, _Z95
    scale = 1 + z * z / n
    center = (share + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, center - half), min(1.0, center + half)


def paired_test(a_correct: ArrayLike, b_correct: ArrayLike) -> dict[str, Any]:
    """Whether A or B is better on the same images: counts, difference, interval, p and verdict.

    Only images that exactly one of the two predicts correctly count (McNemar's exact test).
    """
    a, b = np.asarray(a_correct, dtype=bool), np.asarray(b_correct, dtype=bool)
    n = len(a)
    if n == 0 or a.shape != b.shape:
        raise ValueError(f"expected two equally long rows of images, got {a.shape} and {b.shape}")
    only_a, only_b = int((a & ~b).sum()), int((b & ~a).sum())
    p = sign_test(only_a, only_b)
    verdict = "A is better" if only_a > only_b else "B is better"
    if p >= _SIGNIFICANCE:
        verdict = f"no difference that {n:,} images can show"
    return {
        "n": n,
        "n10": only_a,
        "n01": only_b,
        "top1_a": float(a.mean()),
        "top1_b": float(b.mean()),
        "difference": (only_a - only_b) / n,
        "interval95": _paired_interval(only_a, only_b, n=n),
        "p": p,
        "verdict": verdict,
    }


def sign_test(only_a: int, only_b: int) -> float:
    """The exact two-sided p-value of the sign test for these counts."""
    tosses, fewer = only_a + only_b, min(only_a, only_b)
    ways, tail = 1, 0
    for heads in range(fewer + 1):
        tail += ways
        ways = ways * (tosses - heads) // (heads + 1)
    return min(1.0, 2 * tail / 2**tosses)  # integers until here: no rounding errors


def _paired_interval(only_a: int, only_b: int, *, n: int) -> list[float]:
    """The 95 % interval of the difference A - B (Bonett and Price's adjusted Wald, 2012)."""
    share_a, share_b = (only_a + 1) / (n + 2), (only_b + 1) / (n + 2)
    center = share_a - share_b
    half = _Z95 * math.sqrt((share_a + share_b - center * center) / (n + 2))
    return [max(-1.0, center - half), min(1.0, center + half)]


def compute_percentiles(times: Sequence[float] | NDArray[np.float64]) -> dict[str, float | None]:
    """The percentiles of latencies by name; None for those that need more calls."""
    return {
        name: float(np.percentile(times, share)) if len(times) >= needed else None
        for name, (share, needed) in PERCENTILES.items()
    }
