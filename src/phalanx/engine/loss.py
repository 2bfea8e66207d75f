"""The losses for training."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.engine.mixing import WeightedLabels


def cross_entropy(logits: Tensor, targets: Sequence[WeightedLabels], smoothing: float) -> Tensor:
    """Cross-entropy summed over the images; if an image has several labels, weighted by theirs."""
    if len(targets) == 1 and targets[0].weights is None:
        labels = targets[0].labels
        return F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
    parts = [
        F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="none").mul(weights)
        for labels, weights in targets
        if weights is not None
    ]
    return torch.stack(parts).sum()


def binary_cross_entropy(
    logits: Tensor, targets: Sequence[WeightedLabels], smoothing: float
) -> Tensor:
    """Binary cross-entropy per class, averaged over the classes and summed over the images."""
    classes = logits.shape[1]
    wanted = torch.zeros_like(logits)
    for labels, weights in targets:
        share = torch.ones_like(labels, dtype=logits.dtype) if weights is None else weights
        wanted.scatter_add_(1, labels[:, None], share[:, None].to(logits.dtype))
    wanted = wanted * (1 - smoothing) + smoothing / classes
    return F.binary_cross_entropy_with_logits(logits, wanted, reduction="sum") / classes


LOSSES: dict[str, Callable[[Tensor, Sequence[WeightedLabels], float], Tensor]] = {
    "cross-entropy": cross_entropy,
    "bce": binary_cross_entropy,
}


def smoothing_over_all(smoothing: float, *, over: str, classes: int) -> float:
    """The smoothing over all classes that equals a smoothing over the wrong classes only.

    >>> smoothing_over_all(0.25, over="others", classes=2)
    0.5
    """
    return smoothing * classes / (classes - 1) if over == "others" and classes > 1 else smoothing
