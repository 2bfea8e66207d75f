"""The results of requests in numbers: latency, throughput, accuracy."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from phalanx.client.load_generator import LoadResult
from phalanx.report.scores import compute_percentiles, wilson_interval


def summarize_latency(result: LoadResult) -> dict[str, float | int | None]:
    """Latencies of the answered requests in milliseconds, and their number; None if too few."""
    times = 1e3 * np.array([request.took_s for request in result.requests])
    found = compute_percentiles(times)
    if len(times):
        found |= {"mean": float(times.mean()), "min": float(times.min())}
        found["max"] = float(times.max())
    return {**found, "n": len(times)}


def summarize_accuracy(result: LoadResult, labels: Sequence[str | None]) -> dict[str, Any] | None:
    """Top-1 and its interval over the images whose class is known; None if there are none."""

    scored = [
        (answer, labels[place])
        for place, answer in result.answers.items()
        if answer.guesses and labels[place] is not None
    ]
    if not scored:
        return None
    hits = sum(answer.guesses[0][0] == label for answer, label in scored)
    return {
        "top1": hits / len(scored),
        "interval95": list(wilson_interval(hits, len(scored))),
        "n": len(scored),
    }


def summarize_result(result: LoadResult) -> dict[str, Any]:
    """All counts and rates, for JSON."""
    return {
        "images": result.sent_images,
        "answered": result.answered_images,
        "unreadable": result.unreadable_images,
        "failed": result.failed_images,
        "failures": dict(result.failures),
        "retries": dict(result.retries),
        "waited_s": result.waited_s,
        "requests": len(result.requests),
        "seconds": result.took_s,
        "images_per_second": result.answered_images / result.took_s,
        "latency_ms": summarize_latency(result),
    }
