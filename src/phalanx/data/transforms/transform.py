"""From an image of any size to the model's input, with chance drawn beforehand.

A transform is a pure function of the image and a row of numbers in [0, 1); the numbers are drawn
for a whole batch at once, keyed by each image's position in the training stream.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.data.formats.decode import (
    Image,
    Pixels,
    decode_image,
    decode_image_top,
    image_shape,
    mirror,
    resize,
)
from phalanx.data.transforms.augment import (
    AUGMENTS,
    BOX_COLUMNS,
    CROP_TRIES,
    Augment,
    Box,
    Columns,
    Draws,
    Part,
    box_crop,
    colour_jitter,
    random_erasing,
)
from phalanx.plan.draws import draw_uniform

PADDING = 4
_AREA_SHARE = (0.08, 1.0)
_RATIO = (3 / 4, 4 / 3)
CENTRE_SHARE = 0.875  # of the short side, when scoring large images
_HUE_SHARE = 0.25  # of --color-jitter's strength: colours turn less than they brighten
FIXED_COLUMNS = BOX_COLUMNS[: 2 + 2 * CROP_TRIES]  # of crops that look for no box
_PAD_COLUMNS: Columns = (("crop", 0), ("crop", 1), ("flip", 0))

FloatPart = tuple[float, float, float, float]  # top, left, height, width
_Boxes = Sequence[Box | None] | None
_Train = Callable[[Sequence[Image], Sequence[Draws], NDArray[np.uint8], _Boxes], None]
_Evaluate = Callable[[Image, Pixels], None]


@dataclass(frozen=True, kw_only=True)
class TransformSpec:
    """How images become the model's input."""

    augment: str  # "pad-crop", "resized-crop" or "none"
    scale: tuple[float, float] = _AREA_SHARE  # of a resized crop: its share of the image's area
    ratio: tuple[float, float] = _RATIO  # of a resized crop: width over height
    boxes: bool = False  # crops look for the object's box
    jitter: float = 0.0  # strength of changes of colour
    auto: str = "none"  # "rand-augment" or "trivial-augment"
    erasing: float = 0.0  # share of images that lose a part
    centre: float = CENTRE_SHARE  # of the short side, when scoring


@dataclass(frozen=True, kw_only=True)
class _Transform:
    """What happens to images in training, and to one when scoring; both write into `out`."""

    columns: Columns
    train: _Train
    evaluate: _Evaluate

    def draw(self, seed: int, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        """For each position a row of the numbers that `train` takes."""
        rows = np.empty((len(positions), len(self.columns)))
        for column, (name, lane) in enumerate(self.columns):
            rows[:, column] = draw_uniform(seed, name, positions, lane)
        return rows


def pad_crop(
    images: Sequence[Image], draws: Sequence[Draws], out: NDArray[np.uint8], boxes: _Boxes = None
) -> None:
    """Shift by up to four pixels, black moving in, and mirror every other image."""
    size, places = out.shape[1], 2 * PADDING + 1
    edge = size + 2 * PADDING
    canvas = np.zeros((len(images), edge, edge, 3), np.uint8)  # one for all: this path is hot
    middle = canvas[:, PADDING:-PADDING, PADDING:-PADDING]
    for row, (image, (down, right, flip)) in enumerate(zip(images, draws, strict=True)):
        top, left = int(down * places), int(right * places)
        middle[row] = _maybe_mirror(resize(decode_image(image), size, size), flip)
        out[row] = canvas[row, top : top + size, left : left + size]


def _resized_crop(treatment: TransformSpec) -> _Train:
    """Cut a part of random area and shape, bring it to size, and mirror every other image."""

    def train(
        images: Sequence[Image],
        draws: Sequence[Draws],
        out: NDArray[np.uint8],
        boxes: _Boxes = None,
    ) -> None:
        for row, (image, numbers) in enumerate(zip(images, draws, strict=True)):
            box = boxes[row] if boxes is not None else None
            part, flip = choose_part(treatment, image_shape(image), box, numbers)
            square = cut(image, part, out.shape[1])
            out[row] = mirror(square) if flip else square

    return train


def choose_part(
    treatment: TransformSpec, sides: tuple[int, int], box: Box | None, draws: Draws
) -> tuple[Part, bool]:
    """The part of an image of these sides that a resized crop takes, and whether it is mirrored."""
    flip, *place = draws
    part = box_crop(*sides, box, place, scale=treatment.scale, ratio=treatment.ratio)
    return part, flip < 0.5


def cut(image: Image, part: Part, size: int) -> Pixels:
    """A part of an image as a square of that size; no more is decoded than that needs."""
    top, left, tall, wide = part
    height, width = image_shape(image)
    pixels = decode_image_top(image, top + tall, scale=max(size / tall, size / wide))
    down, across = pixels.shape[0] / height, pixels.shape[1] / width  # 1, or what was decoded
    top, bottom = round(top * down), max(round((top + tall) * down), round(top * down) + 1)
    left, right = round(left * across), max(round((left + wide) * across), round(left * across) + 1)
    return resize(pixels[top:bottom, left:right], size, size)


def fit(image: Image, out: Pixels) -> None:
    """Bring the image to size, whatever its shape."""
    out[:] = resize(decode_image(image), len(out), len(out))


def _fit_all(
    images: Sequence[Image], draws: Sequence[Draws], out: NDArray[np.uint8], boxes: _Boxes = None
) -> None:
    """Bring images to size and leave them otherwise alone."""
    for image, row in zip(images, out, strict=True):
        fit(image, row)


def centre_crop(share: float) -> _Evaluate:
    """Bring the short side to size / share and keep the middle."""

    def evaluate(image: Image, out: Pixels) -> None:
        size = len(out)
        height, width = image_shape(image)
        scale = round(size / share) / min(height, width)
        pixels = resize(
            decode_image(image, scale=scale),
            max(size, round(height * scale)),
            max(size, round(width * scale)),
        )
        top, left = (pixels.shape[0] - size) // 2, (pixels.shape[1] - size) // 2
        out[:] = pixels[top : top + size, left : left + size]

    return evaluate


def centre_part(height: int, width: int, size: int, *, share: float) -> FloatPart:
    """The part of an image that `centre_crop` shows; its ends lie between pixels."""
    scale = round(size / share) / min(height, width)
    tall, wide = max(size, round(height * scale)), max(size, round(width * scale))
    down, across = height / tall, width / wide
    return (tall - size) // 2 * down, (wide - size) // 2 * across, size * down, size * across


def _maybe_mirror(image: Pixels, flip: float) -> Pixels:
    return mirror(image) if flip < 0.5 else image


def build_transform(treatment: TransformSpec) -> _Transform:
    """The transform that a treatment describes."""
    crop = CROPS[treatment.augment](treatment)
    augments = list(_chosen(treatment))
    if not augments:
        return crop
    ends = np.cumsum([len(crop.columns), *(len(augment.columns) for augment in augments)]).tolist()

    def train(
        images: Sequence[Image],
        draws: Sequence[Draws],
        out: NDArray[np.uint8],
        boxes: _Boxes = None,
    ) -> None:
        crop.train(images, [row[: ends[0]] for row in draws], out, boxes)
        for row, numbers in enumerate(draws):
            for augment, begin, end in zip(augments, ends, ends[1:], strict=False):
                out[row] = augment.apply(out[row], numbers[begin:end])

    columns = sum((augment.columns for augment in augments), crop.columns)
    return _Transform(columns=columns, train=train, evaluate=crop.evaluate)


def _chosen(treatment: TransformSpec) -> Iterator[Augment]:
    """The augmentations after the crop, in their order."""
    strength = treatment.jitter
    if strength:
        hue = min(strength * _HUE_SHARE, 0.5)
        yield colour_jitter(strength, strength, saturation=strength, hue=hue)
    if treatment.auto != "none":
        yield AUGMENTS[treatment.auto]
    if treatment.erasing:
        yield random_erasing(treatment.erasing)


CROPS: dict[str, Callable[[TransformSpec], _Transform]] = {
    "pad-crop": lambda _: _Transform(columns=_PAD_COLUMNS, train=pad_crop, evaluate=fit),
    "resized-crop": lambda treatment: _Transform(
        columns=(("flip", 0), *(BOX_COLUMNS if treatment.boxes else FIXED_COLUMNS)),
        train=_resized_crop(treatment),
        evaluate=centre_crop(treatment.centre),
    ),
    "none": lambda _: _Transform(columns=(), train=_fit_all, evaluate=fit),
}
