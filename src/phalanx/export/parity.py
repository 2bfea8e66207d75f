"""Compares an exported model with its checkpoint, and finds where the two diverge.

A logit may differ by what rounding explains. The likeliest class must be the same; in 16 bits it
may be another one for a few images, since two classes that are close can change places.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import CheckpointError
from phalanx.export.check_images import CheckImages

_Outputs = tuple[NDArray[np.float32], ...]
Runner = Callable[[NDArray[Any]], _Outputs]
"""Computes a model's outputs for a batch: logits, and the activation map if it has one."""

_LEAST_TOLERANCE = 1e-4  # of logits in 32 bits
_ROUNDING = {"float32": 1e-5, "float16": 0.01, "bfloat16": 0.05}  # relative to the largest logit
_MAY_CHANGE = {"float32": 0.0, "float16": 0.02, "bfloat16": 0.02}  # share of images, their top-1
_SMALL_BATCHES = (1, 2)
_IMAGES_IN_SMALL_BATCHES = 4


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """On which images an export was compared with its checkpoint, and how closely it agreed."""

    images: int
    source: str  # where the images are from, in words
    batches: tuple[int, ...]
    logits_differ_by: float  # the largest difference
    allowed: float
    top1_equal: int  # the number of images with the same top-1
    top1_may_change: int  # for at most that many images

    def describe_batches(self) -> str:
        """The batch sizes, in words."""
        *first, last = map(str, self.batches)
        return f"batches of {', '.join(first)} and {last}" if first else f"batches of {last}"

    def describe_top1(self) -> str:
        """For how many images the top-1 is the same, in words."""
        words = f"{self.top1_equal:,} of {self.images:,}"
        changes = f" ({self.top1_may_change:,} may change in 16 bits)"
        return words + (changes if self.top1_equal < self.images else "")


class RunFailed(Exception):
    """The runtime of an exported model failed; the message says why."""


class _Disagreement(Exception):
    """The two disagree; with a description, and the index of the image."""

    def __init__(self, what: str, row: int) -> None:
        super().__init__(what)
        self.row = row


@dataclass(frozen=True, kw_only=True)
class ParityCase:
    """Inputs, and the original model's outputs for them."""

    images: CheckImages
    inputs: NDArray[Any]  # of the exported model
    outputs: _Outputs  # of the original model
    classes: tuple[str, ...]
    reference: str = "checkpoint"  # what the original model is called


def check_parity(
    exported: Runner,
    case: ParityCase,
    *,
    dtype: str,
    max_batch: int,
    explain: Callable[[int], str],
) -> ParityReport:
    """Compare an export on all images, in batches of one, of two and of the largest size.

    explain: given an image's index, where in the network the two part and what to do, in words.
    Raises CheckpointError where they do.
    """
    comparison, inputs = _ParityComparison(case, dtype=dtype), case.inputs
    sizes = (*_SMALL_BATCHES, max_batch) if max_batch > 2 else _SMALL_BATCHES[:max_batch]
    for size in sizes:
        for rows in _split_into_batches(len(inputs), size, every=size == max_batch):
            try:
                found = exported(np.ascontiguousarray(inputs[rows]))
                comparison.compare(found, rows)
            except RunFailed as failed:
                raise CheckpointError(
                    f"the export cannot run a batch of {size}, so nothing was written: {failed}"
                ) from None
            except _Disagreement as disagreement:
                what = f"in a batch of {size}, {disagreement}"
                raise _refuse(case, what, explain(disagreement.row)) from None
    may_change = int(_MAY_CHANGE[dtype] * len(inputs))
    if len(comparison.changed) > may_change:
        row, words = next(iter(comparison.changed.items()))
        count = f"{len(comparison.changed):,} of {len(inputs):,} images"
        what = f"the most likely class differs for {count} ({may_change:,} allowed): {words}"
        raise _refuse(case, what, explain(row))
    return ParityReport(
        images=len(inputs),
        source=case.images.source,
        batches=tuple(sizes),
        logits_differ_by=comparison.largest_difference,
        allowed=comparison.allowed,
        top1_equal=len(inputs) - len(comparison.changed),
        top1_may_change=may_change,
    )


def _refuse(case: ParityCase, what: str, where: str) -> CheckpointError:
    return CheckpointError(
        f"the export disagrees with the {case.reference}, so nothing was written: {what}; {where}"
    )


def _split_into_batches(images: int, size: int, *, every: bool) -> Iterator[NDArray[np.int64]]:
    """Indices of images, batch by batch; a short last batch is filled from the start."""
    count = images if every else min(images, max(_IMAGES_IN_SMALL_BATCHES, size))
    for first in range(0, count, size):
        yield np.arange(first, first + size) % images


class _ParityComparison:
    """The comparison of all batches so far."""

    def __init__(self, case: ParityCase, *, dtype: str) -> None:
        self._expected, self._images, self._classes = case.outputs, case.images, case.classes
        self._reference = case.reference
        largest = float(np.abs(case.outputs[0]).max())
        least = _LEAST_TOLERANCE if dtype == "float32" else _ROUNDING[dtype]
        self.allowed = max(least, _ROUNDING[dtype] * largest)
        self._rounding = self.allowed / max(largest, 1e-30)
        self.largest_difference = 0.0
        self.changed: dict[int, str] = {}  # images whose top-1 differs, with a description

    def compare(self, found: _Outputs, rows: NDArray[np.int64]) -> None:
        """Compare one batch; raises _Disagreement."""
        expected = tuple(part[rows] for part in self._expected)
        for part, wanted in zip(found, expected, strict=True):
            if part.shape != wanted.shape:
                raise _Disagreement(
                    f"the output has shape {list(part.shape)} instead of {list(wanted.shape)}", 0
                )
        self._compare_logits(found[0], expected[0], rows)
        same = found[0].argmax(1) == expected[0].argmax(1)
        for part, wanted in zip(found[1:], expected[1:], strict=True):
            self._compare_maps(part[same], wanted[same], rows[same])

    def _compare_logits(
        self, found: NDArray[np.float32], wanted: NDArray[np.float32], rows: NDArray[np.int64]
    ) -> None:
        difference = np.where(np.isfinite(found), np.abs(found - wanted), np.inf)
        self.largest_difference = max(self.largest_difference, float(difference.max()))
        row, label = np.unravel_index(difference.argmax(), difference.shape)
        if difference[row, label] > self.allowed:
            raise _Disagreement(
                f"{self._images.names[rows[row]]} gets {found[row, label]:.5g} for "
                f"{self._classes[label]} instead of {wanted[row, label]:.5g} (differs by "
                f"{difference[row, label]:.2g}, allowed are {self.allowed:.2g})",
                int(rows[row]),
            )
        # both are within the tolerance: in the original model the two differ by at most twice that
        likeliest, others = wanted.argmax(1), found.argmax(1)
        for row in np.flatnonzero(others != likeliest):
            first, other = likeliest[row], others[row]
            self.changed[int(rows[row])] = (
                f"{self._images.names[rows[row]]} becomes {self._classes[other]} instead of "
                f"{self._classes[first]}, for which the {self._reference} gives "
                f"{wanted[row, other]:.6g} and {wanted[row, first]:.6g}"
            )

    def _compare_maps(
        self, found: NDArray[np.float32], wanted: NDArray[np.float32], rows: NDArray[np.int64]
    ) -> None:
        if not len(rows):
            return
        difference = np.where(np.isfinite(found), np.abs(found - wanted), np.inf).max((1, 2))
        largest = np.abs(wanted).max()
        if difference.max() > max(self.allowed, self._rounding * largest):
            row = int(difference.argmax())
            name = self._images.names[rows[row]]
            raise _Disagreement(
                f"the activation map of {name} differs by {difference[row]:.2g}", int(rows[row])
            )
