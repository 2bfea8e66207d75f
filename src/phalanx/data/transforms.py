"""From an image of any size to the model's input, with chance drawn beforehand.

A transform is a pure function of the image and a row of numbers in [0, 1); the numbers are drawn
for a whole batch at once, keyed by each image's position in the training stream.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.data.pixels import Pixels, mirror, resize
from phalanx.plan.draws import draw_uniform

PADDING = 4
AREA_SHARE = (0.08, 1.0)
LOG_RATIO = (math.log(3 / 4), math.log(4 / 3))
CROP_TRIES = 10
CENTRE_SHARE = 0.875  # of the short side, when scoring large images

Draws = Sequence[float]
Columns = tuple[tuple[str, int], ...]  # the name and lane of each number a transform takes


@dataclass(frozen=True, kw_only=True)
class Transform:
    """What happens to images in training, and to one when scoring; both write into `out`."""

    columns: Columns
    train: Callable[[Sequence[Pixels], Sequence[Draws], NDArray[np.uint8]], None]
    evaluate: Callable[[Pixels, Pixels], None]

    def draw(self, seed: int, positions: NDArray[np.int64]) -> list[list[float]]:
        """For each position, the numbers that `train` takes."""
        rows = np.empty((len(positions), len(self.columns)))
        for column, (name, lane) in enumerate(self.columns):
            rows[:, column] = draw_uniform(seed, name, positions, lane)
        return rows.tolist()


def pad_crop(images: Sequence[Pixels], draws: Sequence[Draws], out: NDArray[np.uint8]) -> None:
    """Shift by up to four pixels, black moving in, and mirror every other image."""
    size, places = out.shape[1], 2 * PADDING + 1
    edge = size + 2 * PADDING
    canvas = np.zeros((len(images), edge, edge, 3), np.uint8)  # one for all: this path is hot
    middle = canvas[:, PADDING:-PADDING, PADDING:-PADDING]
    for row, (image, (down, right, flip)) in enumerate(zip(images, draws, strict=True)):
        top, left = int(down * places), int(right * places)
        middle[row] = _maybe_mirror(resize(image, size, size), flip)
        out[row] = canvas[row, top : top + size, left : left + size]


def resized_crop(images: Sequence[Pixels], draws: Sequence[Draws], out: NDArray[np.uint8]) -> None:
    """Cut a part of random area and shape, bring it to size, and mirror every other image."""
    size = out.shape[1]
    for row, (image, (flip, *place)) in enumerate(zip(images, draws, strict=True)):
        top, left, height, width = choose_crop(image.shape[0], image.shape[1], place)
        part = image[top : top + height, left : left + width]
        out[row] = _maybe_mirror(resize(part, size, size), flip)


def choose_crop(height: int, width: int, draws: Draws) -> tuple[int, int, int, int]:
    """Top, left, height and width of a random part; the middle when no try fits the image."""
    down, right, *tries = draws
    for share, shape in zip(tries[::2], tries[1::2], strict=True):
        area = height * width * (AREA_SHARE[0] + share * (AREA_SHARE[1] - AREA_SHARE[0]))
        ratio = math.exp(LOG_RATIO[0] + shape * (LOG_RATIO[1] - LOG_RATIO[0]))
        tall, wide = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < tall <= height and 0 < wide <= width:
            return int(down * (height - tall + 1)), int(right * (width - wide + 1)), tall, wide
    longest = math.exp(LOG_RATIO[1])
    tall = min(height, max(1, round(width * longest)))
    wide = min(width, max(1, round(height * longest)))
    return (height - tall) // 2, (width - wide) // 2, tall, wide


def fit(image: Pixels, out: Pixels) -> None:
    """Bring the image to size, whatever its shape."""
    out[:] = resize(image, len(out), len(out))


def fit_all(images: Sequence[Pixels], draws: Sequence[Draws], out: NDArray[np.uint8]) -> None:
    """Bring images to size and leave them otherwise alone."""
    for image, row in zip(images, out, strict=True):
        fit(image, row)


def centre_crop(image: Pixels, out: Pixels) -> None:
    """Bring the short side to size / 0.875 and keep the middle."""
    size = len(out)
    height, width = image.shape[:2]
    scale = round(size / CENTRE_SHARE) / min(height, width)
    image = resize(image, max(size, round(height * scale)), max(size, round(width * scale)))
    top, left = (image.shape[0] - size) // 2, (image.shape[1] - size) // 2
    out[:] = image[top : top + size, left : left + size]


def _maybe_mirror(image: Pixels, flip: float) -> Pixels:
    return mirror(image) if flip < 0.5 else image


TRANSFORMS: dict[str, Transform] = {
    "pad-crop": Transform(
        columns=(("crop", 0), ("crop", 1), ("flip", 0)), train=pad_crop, evaluate=fit
    ),
    "resized-crop": Transform(
        columns=(
            ("flip", 0),
            ("crop", 0),
            ("crop", 1),
            *(("crop-shape", lane) for lane in range(2 * CROP_TRIES)),
        ),
        train=resized_crop,
        evaluate=centre_crop,
    ),
    "none": Transform(columns=(), train=fit_all, evaluate=fit),
}
