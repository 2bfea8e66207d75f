"""From an image of any size to the model's input, with all randomness drawn beforehand.

A transform is a pure function of the image and a row of draws, numbers in [0, 1). The draws of many
images are made at once, keyed by each image's position in the training stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.catalog.datasets import CENTRE_CROP_FRACTION
from phalanx.data.formats.decode import (
    Crop,
    Image,
    Pixels,
    decode_image,
    decode_image_crop,
    image_shape,
    mirror,
    reflect_edges,
    resize,
    resize_crop,
)
from phalanx.data.transforms.augment import (
    AUTO_AUGMENTS,
    BOX_COLUMNS,
    CROP_TRIES,
    Augment,
    Box,
    Columns,
    Draws,
    choose_crop,
    color_jitter,
    random_erasing,
)
from phalanx.plan.draws import draw_uniform
from phalanx.plan.order import Order

_HUE_SHARE = 0.25  # of --color-jitter's strength: hue changes less than brightness
FIXED_COLUMNS = BOX_COLUMNS[: 2 + 2 * CROP_TRIES]  # for crops that ignore boxes

FloatCrop = tuple[float, float, float, float]  # top, left, height, width
_TrainingSample = tuple[Image, Draws, Box | None]  # the bounding box, if crops use it


@dataclass(frozen=True, kw_only=True)
class TransformSpec:
    """How images become the model's input."""

    augment: str  # "pad-crop", "resized-crop" or "none"
    scale: tuple[float, float] = (0.08, 1.0)  # of a resized crop: its share of the image's area
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # of a resized crop: width over height
    shift: int = 4  # of a pad-crop: maximum in pixels, in each direction
    reflects: bool = False  # whether a shifted image is padded by reflection instead of black
    alternates: bool = False  # whether an image is mirrored in every other epoch, not at random
    boxes: bool = False  # whether crops must show part of the object's bounding box
    color_jitter: float = 0.0  # strength
    auto_augment: str = "none"  # "rand-augment" or "trivial-augment"
    random_erasing: float = 0.0  # share of images in which a rectangle is erased
    eval_crop: float = CENTRE_CROP_FRACTION  # share of the short side that is seen when scoring
    smooth_crops: bool = True  # whether crops are smoothed and interpolated, not area-averaged


class Transform:
    """Resizes images to the model's input size, ignoring their aspect; subclasses crop them."""

    crop_columns: Columns = ()

    def __init__(self, spec: TransformSpec):
        self._spec = spec
        self._augments = _build_augments(spec)
        self.columns = sum((augment.columns for augment in self._augments), self.crop_columns)

    def draw(
        self, seed: int, positions: NDArray[np.int64], order: Order | None = None
    ) -> NDArray[np.float64]:
        """A row of draws for `apply_training` for each position of the training stream."""
        rows = np.empty((len(positions), len(self.columns)))
        for column, (name, lane) in enumerate(self.columns):
            if self._spec.alternates and name == "flip" and order is not None:
                # one draw per image, moved by a half in every epoch, so that it alternates
                first = draw_uniform(seed, name, order.indices(positions), lane)
                rows[:, column] = (first + order.epochs(positions) / 2) % 1
            else:
                rows[:, column] = draw_uniform(seed, name, positions, lane)
        return rows

    def apply_training(self, samples: Sequence[_TrainingSample], out: NDArray[np.uint8]) -> None:
        """Write each image, cropped and augmented by its draws, into its row of `out`."""
        if not self._augments:
            self._crop(samples, out)
            return
        end = len(self.crop_columns)
        self._crop([(image, draws[:end], box) for image, draws, box in samples], out)
        for augment in self._augments:
            begin, end = end, end + len(augment.columns)
            for row, (_, draws, _) in enumerate(samples):
                out[row] = augment.apply(out[row], draws[begin:end])

    def apply_evaluation(self, image: Image, out: Pixels) -> None:
        """Write one image into `out`, without any randomness."""
        out[:] = resize(decode_image(image), len(out), len(out))

    def _crop(self, samples: Sequence[_TrainingSample], out: NDArray[np.uint8]) -> None:
        for (image, _, _), row in zip(samples, out, strict=True):
            self.apply_evaluation(image, row)


class _PadCrop(Transform):
    """Pads with black or a reflection, crops at a random offset, and mirrors half of the images."""

    crop_columns = (("crop", 0), ("crop", 1), ("flip", 0))

    def _crop(self, samples: Sequence[_TrainingSample], out: NDArray[np.uint8]) -> None:
        size, most = out.shape[1], self._spec.shift
        offsets, edge = 2 * most + 1, size + 2 * most
        canvas = np.zeros((len(samples), edge, edge, 3), np.uint8)  # one for all, for speed
        middle = canvas[:, most : most + size, most : most + size]
        for row, (image, (down, right, flip), _) in enumerate(samples):
            top, left = int(down * offsets), int(right * offsets)
            resized = resize(decode_image(image), size, size)
            middle[row] = mirror(resized) if flip < 0.5 else resized
            if self._spec.reflects:
                canvas[row] = reflect_edges(middle[row], most)
            out[row] = canvas[row, top : top + size, left : left + size]


class _ResizedCrop(Transform):
    """Crops a random area and aspect ratio, resizes it, and mirrors half of the images.

    When scoring, the short side is resized to size / eval_crop and the centre is cropped.
    """

    def __init__(self, spec: TransformSpec):
        self.crop_columns = (("flip", 0), *(BOX_COLUMNS if spec.boxes else FIXED_COLUMNS))
        super().__init__(spec)

    def _crop(self, samples: Sequence[_TrainingSample], out: NDArray[np.uint8]) -> None:
        for row, (image, draws, box) in enumerate(samples):
            crop, flip = choose_crop_and_flip(self._spec, image_shape(image), box, draws)
            square = resized_crop(image, crop, out.shape[1], smooth=self._spec.smooth_crops)
            out[row] = mirror(square) if flip else square

    def apply_evaluation(self, image: Image, out: Pixels) -> None:
        """Write the centre crop of one image into `out`."""
        size = len(out)
        scale, tall, wide = _scale_short_side(*image_shape(image), size, share=self._spec.eval_crop)
        pixels = resize(decode_image(image, scale=scale), tall, wide)
        top, left = (tall - size) // 2, (wide - size) // 2
        out[:] = pixels[top : top + size, left : left + size]


CROPS = {"none": Transform, "pad-crop": _PadCrop, "resized-crop": _ResizedCrop}


def build_transform(spec: TransformSpec) -> Transform:
    """The transform that a spec describes."""
    return CROPS[spec.augment](spec)


def _build_augments(spec: TransformSpec) -> list[Augment]:
    """The augmentations after the crop, in order."""
    augments = []
    strength = spec.color_jitter
    if strength:
        hue = min(strength * _HUE_SHARE, 0.5)
        augments.append(color_jitter(strength, strength, saturation=strength, hue=hue))
    if spec.auto_augment != "none":
        augments.append(AUTO_AUGMENTS[spec.auto_augment])
    if spec.random_erasing:
        augments.append(random_erasing(spec.random_erasing))
    return augments


def choose_crop_and_flip(
    spec: TransformSpec, sides: tuple[int, int], box: Box | None, draws: Draws
) -> tuple[Crop, bool]:
    """The crop of an image of these sides, and whether it is mirrored."""
    flip, *rest = draws
    return choose_crop(*sides, box, rest, scale=spec.scale, ratio=spec.ratio), flip < 0.5


def resized_crop(image: Image, crop: Crop, size: int, *, smooth: bool = True) -> Pixels:
    """The crop resized to a square; no more of the image is decoded than needed."""
    top, left, tall, wide = crop
    height, width = image_shape(image)
    pixels = decode_image_crop(image, crop, scale=max(size / tall, size / wide))
    down, across = pixels.shape[0] / height, pixels.shape[1] / width  # the scale of decoding
    top, bottom = round(top * down), max(round((top + tall) * down), round(top * down) + 1)
    left, right = round(left * across), max(round((left + wide) * across), round(left * across) + 1)
    shrink = resize_crop if smooth else resize
    return shrink(pixels[top:bottom, left:right], size, size)


def find_centre_crop(height: int, width: int, size: int, *, share: float) -> FloatCrop:
    """The centre crop of an image when scoring; its edges may lie between pixels."""
    _, tall, wide = _scale_short_side(height, width, size, share=share)
    down, across = height / tall, width / wide
    return (tall - size) // 2 * down, (wide - size) // 2 * across, size * down, size * across


def _scale_short_side(
    height: int, width: int, size: int, *, share: float
) -> tuple[float, int, int]:
    """The scale that makes the short side size / share, and the resulting sides."""
    scale = round(size / share) / min(height, width)
    return scale, max(size, round(height * scale)), max(size, round(width * scale))
