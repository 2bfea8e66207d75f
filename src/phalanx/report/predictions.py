"""The model's predictions for every scored image, and its most confident mistakes."""

import csv
import io
import struct
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phalanx.disk import write_atomically
from phalanx.errors import CheckpointError

_PREDICTIONS_FILE, _WORST_FILE = "predictions.csv", "worst.npz"
_TOP = 5
_BROKEN_ARCHIVE = (  # what numpy and zipfile raise for a damaged archive
    *(OSError, ValueError, KeyError, EOFError, NotImplementedError, RuntimeError, SyntaxError),
    *(zipfile.BadZipFile, zlib.error, struct.error, OverflowError, MemoryError, TypeError),
)
_HEADER = (
    *("index", "id", "label", *(f"top{k}" for k in range(1, _TOP + 1)), "confidence"),
    *("class", "predicted"),  # label and top1 by name
)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The model's prediction for one image."""

    index: int  # in the scored split
    id: str  # the image's name
    label: int
    top: tuple[int, ...]  # class numbers, likeliest first; five, or fewer with fewer classes
    confidence: float  # softmax probability of top[0]

    @property
    def correct(self) -> bool:
        """Whether the first guess is the label."""
        return self.top[0] == self.label


@dataclass(frozen=True, kw_only=True)
class WorstMistakes:
    """Thumbnails of the most confident mistakes of one evaluation."""

    step: int
    indices: NDArray[np.int64]  # in the scored split, the worst first
    pixels: NDArray[np.uint8]  # [n, height, width, 3]


def write_predictions(folder: Path, rows: Iterable[Prediction], *, classes: Sequence[str]) -> None:
    """Write predictions.csv atomically; classes: their names."""
    lines = _CsvLines()
    table = csv.writer(lines)
    table.writerow(_HEADER)
    table.writerows(_prediction_cells(row, classes) for row in rows)
    write_atomically(folder / _PREDICTIONS_FILE, "".join(lines))


class _CsvLines(list[str]):
    """Rows that end in a newline only, though the csv writer ends lines with CR LF.

    The writer keeps its own line end, because it quotes only cells that contain a character of
    it, and a name may contain a carriage return.
    """

    def write(self, line: str) -> None:
        """Add a complete row."""
        self.append(line.removesuffix("\r\n") + "\n")


def _prediction_cells(row: Prediction, classes: Sequence[str]) -> list[object]:
    """One image as the cells of its row."""
    guesses = [*row.top, *[""] * (_TOP - len(row.top))]
    names = classes[row.label], classes[row.top[0]]
    return [row.index, row.id, row.label, *guesses, repr(float(row.confidence)), *names]


def read_predictions(folder: Path) -> list[Prediction]:
    """The predictions of the newest evaluation; empty if there was none."""
    path = folder / _PREDICTIONS_FILE
    try:
        with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
            return [_parse_prediction(row) for row in csv.DictReader(file)]
    except FileNotFoundError:
        return []
    except (KeyError, TypeError, ValueError, csv.Error) as cause:
        raise CheckpointError(
            f"{path}: is damaged ({type(cause).__name__}: {cause}); validate the run again"
        ) from cause


def _parse_prediction(row: dict[str, str]) -> Prediction:
    """One row of predictions.csv."""
    guesses = (row[f"top{k}"] for k in range(1, _TOP + 1))
    return Prediction(
        index=int(row["index"]),
        id=row["id"],
        label=int(row["label"]),
        top=tuple(int(guess) for guess in guesses if guess),
        confidence=float(row["confidence"]),
    )


def write_worst_mistakes(
    folder: Path, indices: Sequence[int], *, pixels: NDArray[np.uint8], step: int
) -> None:
    """Write worst.npz: these images of the scored split, pixels [n, height, width, 3]."""
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[3] != 3:
        raise ValueError(f"expected uint8 [n, h, w, 3], got {pixels.dtype} {pixels.shape}")
    if len(indices) != len(pixels):
        raise ValueError(f"{len(indices)} indices for {len(pixels)} images")
    file = io.BytesIO()
    numbers = np.asarray(indices, dtype=np.int64)
    np.savez_compressed(file, indices=numbers, pixels=pixels, step=np.int64(step))
    write_atomically(folder / _WORST_FILE, file.getvalue())


def read_worst_mistakes(folder: Path) -> WorstMistakes | None:
    """The thumbnails of the newest evaluation; None if there are none."""
    path = folder / _WORST_FILE
    try:
        # opened here: numpy leaves a damaged one open
        with path.open("rb") as file, np.load(file, allow_pickle=False) as saved:
            return WorstMistakes(
                step=int(saved["step"]), indices=saved["indices"], pixels=saved["pixels"]
            )
    except FileNotFoundError:
        return None
    except _BROKEN_ARCHIVE as cause:
        raise CheckpointError(
            f"{path}: is damaged ({type(cause).__name__}); validate the run again"
        ) from cause


def find_worst_mistakes(predictions: Sequence[Prediction], n: int = 24) -> list[int]:
    """Positions in `predictions` of the n most confident mistakes, most confident first."""
    wrong = [at for at, row in enumerate(predictions) if not row.correct]
    return sorted(wrong, key=lambda at: (-predictions[at].confidence, at))[:n]


def confusion_matrix(labels: ArrayLike, predicted: ArrayLike, *, classes: int) -> NDArray[np.int64]:
    """How often each true class (row) was predicted as each class (column)."""
    pairs = np.asarray(labels, dtype=np.int64) * classes + np.asarray(predicted, dtype=np.int64)
    counts = np.bincount(pairs, minlength=classes * classes)
    return counts.reshape(classes, classes).astype(np.int64)
