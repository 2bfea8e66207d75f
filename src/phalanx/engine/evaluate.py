"""Scores that count every image exactly once."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.engine.step import StepOptions, compute_logits
from phalanx.errors import DataError

_Answers = dict[str, np.ndarray]  # columns with a row for each image


class ValidBatch(NamedTuple):
    """Images to score; index -1 marks rows that only pad the batch or could not be read."""

    images: Tensor  # [N, 3, H, W]
    labels: Tensor  # [N]
    indices: Tensor  # [N]


@dataclass(frozen=True)
class Score:
    """A model's score on a split, with the predictions for each image."""

    indices: np.ndarray  # int64 [n], index of each image in its split
    labels: np.ndarray  # int64 [n]
    ranked: np.ndarray  # int64 [n, min(5, classes)], best guess first
    confidence: np.ndarray  # float32 [n], of the best guess
    losses: np.ndarray  # float32 [n]
    classes: int

    @property
    def scored(self) -> int:
        """The number of images scored."""
        return len(self.indices)

    @property
    def hits(self) -> int:
        """The number of images whose best guess is correct."""
        return int((self.ranked[:, 0] == self.labels).sum())

    @property
    def top1(self) -> float:
        """The share of images whose best guess is correct."""
        return self.hits / self.scored

    @property
    def top5(self) -> float | None:
        """The share of images with the label among five guesses; None for five classes or fewer."""
        if self.classes <= 5:
            return None
        return int((self.ranked == self.labels[:, None]).any(1).sum()) / self.scored

    @property
    def loss(self) -> float:
        """Mean cross-entropy, without label smoothing."""
        return float(self.losses.mean(dtype=np.float64))


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    batches: Iterable[ValidBatch],
    *,
    options: StepOptions,
    interrupted: Callable[[], bool] = lambda: False,
    gather: Callable[[_Answers | None], list[_Answers | None]] = lambda answers: [answers],
) -> Score | None:
    """The score over all batches; None if it was interrupted.

    gather: returns the results of all ranks, each of which scores other batches.
    """
    shares = gather(_compute_answers(model, batches, options, interrupted))
    if None in shares:
        return None
    answered = [share for share in shares if share]
    if not answered:
        raise DataError(
            "there is no image to score: the validation split is empty; check --data-dir"
        )
    columns = {name: np.concatenate([share[name] for share in answered]) for name in answered[0]}
    # ranks score batches in turn; after sorting, rows of index -1 (padding, unreadable) come first
    in_order = np.argsort(columns["indices"], kind="stable")
    places = in_order[np.count_nonzero(columns["indices"] < 0) :]
    if not len(places):
        raise DataError(
            "there is no image to score: no image of the validation split can be decoded; "
            "`phalanx data verify DIR` says why"
        )
    classes = int(columns.pop("classes")[0])
    return Score(**{name: column[places] for name, column in columns.items()}, classes=classes)


def _compute_answers(
    model: nn.Module,
    batches: Iterable[ValidBatch],
    options: StepOptions,
    interrupted: Callable[[], bool],
) -> _Answers | None:
    """The model's results for each row, on the host; None if it was interrupted."""
    model.eval()
    results = []
    for batch in batches:
        if interrupted():
            return None
        results.append(_compute_row_results(compute_logits(model, batch.images, options), batch))
    names = results[0] if results else ()
    return {name: torch.cat([row[name] for row in results]).cpu().numpy() for name in names}


def _compute_row_results(logits: Tensor, batch: ValidBatch) -> dict[str, Tensor]:
    """The results for each row of a batch."""
    best = logits.softmax(1).topk(min(5, logits.shape[1]))
    return {
        "indices": batch.indices,
        "labels": batch.labels,
        "ranked": best.indices,
        "confidence": best.values[:, 0],
        "losses": F.cross_entropy(logits, batch.labels, reduction="none"),
        "classes": torch.full_like(batch.labels, logits.shape[1]),
    }
