"""Augmentations whose randomness is drawn beforehand, and the choice of a random crop.

An augmentation is a pure function of an image and a row of draws, numbers in [0, 1); it returns a
new image of the same size. All pixels stay uint8.

RandAugment (Cubuk et al. 2019) and TrivialAugment (Müller and Hutter 2021) choose among the same
fourteen operations. The ranges are torchvision's, with two differences: solarize starts at 256, so
that a level of zero does not change white, and pixels from outside are grey. RandAugment's
magnitude goes to ten, as in its authors' code and in timm; torchvision's goes to thirty.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, permutations, repeat
from statistics import NormalDist

import cv2
import numpy as np

from phalanx.data.formats.decode import Crop, Pixels
from phalanx.data.transforms.operations import (
    OPERATIONS,
    STANDARD_SPACE,
    WIDE_SPACE,
    Operation,
    brightness,
    colour,
    contrast,
    shift_hue,
)

Draws = Sequence[float]  # random numbers in [0, 1), one for each column
Columns = tuple[tuple[str, int], ...]  # the name and lane that each draw is keyed by
Box = tuple[float, float, float, float]  # left, top, right, bottom as shares of the sides
_Range = tuple[float, float]
_Pairs = list[tuple[float, float]]

CROP_TRIES = 10
_BOX_SHARE = 0.1  # of the object's box that a crop must show
_ERASE_TRIES = 4  # one shape in a thousand does not fit into a square image
_MAX_MAGNITUDE = 10
_LEVELS = 31  # of TrivialAugment
_NORMAL = NormalDist()
_OPERATIONS = tuple(OPERATIONS.values())


@dataclass(frozen=True, kw_only=True)
class Augment:
    """An augmentation, and the draws it needs."""

    columns: Columns
    apply: Callable[[Pixels, Draws], Pixels]


_JITTERS = (brightness, contrast, colour, shift_hue)
_ORDERS = tuple(permutations(range(len(_JITTERS))))


def color_jitter(brightness: float, contrast: float, *, saturation: float, hue: float) -> Augment:
    """Changes brightness, contrast, saturation and hue by up to their strengths, in random order.

    The first three multiply by a factor from 1 - strength (or 0) to 1 + strength; the hue moves by
    up to its strength in either direction, where 1 is the whole colour wheel. As in torchvision.
    """
    strengths = (brightness, contrast, saturation)
    ranges = [(max(0.0, 1 - strength), 1 + strength) for strength in strengths] + [(-hue, hue)]

    def apply(image: Pixels, draws: Draws) -> Pixels:
        order, *rest = draws
        amounts = [_interpolate(ends, draw) for ends, draw in zip(ranges, rest, strict=True)]
        for number in _ORDERS[int(order * len(_ORDERS))]:
            image = _JITTERS[number](image, amounts[number])
        return image

    return Augment(columns=_columns("colour-jitter", 5), apply=apply)


def rand_augment(operations: int = 2, magnitude: float = 9, *, spread: float = 0.5) -> Augment:
    """Several operations in turn, each with a normally distributed magnitude clipped to 0..10."""

    def apply(image: Pixels, draws: Draws) -> Pixels:
        for choice, size, sign in zip(draws[::3], draws[1::3], draws[2::3], strict=True):
            # the normal quantile of 0 is infinite: use half of the smallest draw instead
            normal = _NORMAL.inv_cdf(max(size, 2.0**-54))
            level = min(max(magnitude + spread * normal, 0.0), _MAX_MAGNITUDE) / _MAX_MAGNITUDE
            operation = _choose_operation(choice)
            image = operation(image, level if sign < 0.5 else -level, STANDARD_SPACE)
        return image

    return Augment(columns=_columns("rand-augment", 3 * operations), apply=apply)


def trivial_augment() -> Augment:
    """One operation at one of 31 levels of the wide ranges."""

    def apply(image: Pixels, draws: Draws) -> Pixels:
        choice, size, sign = draws
        level = int(size * _LEVELS) / (_LEVELS - 1)
        return _choose_operation(choice)(image, level if sign < 0.5 else -level, WIDE_SPACE)

    return Augment(columns=_columns("trivial-augment", 3), apply=apply)


def random_erasing(
    probability: float, area: _Range = (0.02, 1 / 3), *, ratio: _Range = (0.3, 3.3)
) -> Augment:
    """With this probability, fills a rectangle with the image's mean colour.

    Its area is a share of the image's, its ratio height over width (Zhong et al. 2017). The paper
    fills with noise, which would need a draw for every byte. If none of the tries fits, the image
    is not changed.
    """
    width_ratio = (1 / ratio[1], 1 / ratio[0])

    def apply(image: Pixels, draws: Draws) -> Pixels:
        chance, down, right, *shapes = draws
        erased = np.array(image, order="C")
        if chance >= probability:
            return erased
        place = repeat((down, right))
        fitting = _fitting_crops(
            image.shape[:2], _pairs(shapes), places=place, scale=area, ratio=width_ratio
        )
        for top, left, height, width in islice(fitting, 1):
            mean = np.rint(cv2.mean(image)[:3]).astype(np.uint8)
            erased[top : top + height, left : left + width] = mean
        return erased

    return Augment(columns=_columns("erase", 3 + 2 * _ERASE_TRIES), apply=apply)


def _columns(name: str, count: int) -> Columns:
    return tuple((name, lane) for lane in range(count))


def _choose_operation(draw: float) -> Operation:
    return _OPERATIONS[int(draw * len(_OPERATIONS))]


def _interpolate(ends: _Range, draw: float) -> float:
    return ends[0] + draw * (ends[1] - ends[0])


AUTO_AUGMENTS = {"rand-augment": rand_augment(), "trivial-augment": trivial_augment()}

BOX_COLUMNS: Columns = (  # every try has its own position, so that one of them finds the box
    *_columns("crop", 2),
    *_columns("crop-shape", 2 * CROP_TRIES),
    *_columns("crop", 2 * CROP_TRIES)[2:],
)


def choose_crop(
    height: int, width: int, box: Box | None, draws: Draws, *, scale: _Range, ratio: _Range
) -> Crop:
    """A random crop that shows at least a tenth of the box; a centre crop if no try fits.

    scale: share of the image's area. ratio: width over height. The draws are a position, the area
    and ratio of each of ten tries, and the positions of the other nine tries; without these last
    ones every try has the first position. If no try shows enough of the box, or there is no box,
    the first that fits is taken, at the first position.
    """
    first, *rest = _pairs(draws)
    shapes, places = rest[:CROP_TRIES], chain([first], rest[CROP_TRIES:], repeat(first))
    sides = height, width
    if box is not None:
        for crop in _fitting_crops(sides, shapes, places=places, scale=scale, ratio=ratio):
            if _shows_box(sides, crop, box):
                return crop
    for crop in _fitting_crops(sides, shapes, places=repeat(first), scale=scale, ratio=ratio):
        return crop
    tall = min(height, max(1, round(width / ratio[0])))
    wide = min(width, max(1, round(height * ratio[1])))
    return (height - tall) // 2, (width - wide) // 2, tall, wide


def _fitting_crops(
    sides: tuple[int, ...],
    shapes: _Pairs,
    *,
    places: Iterable[_Range],
    scale: _Range,
    ratio: _Range,
) -> Iterator[Crop]:
    """The tries that fit into an image of these sides, each at its position."""
    height, width = sides
    log_ratio = math.log(ratio[0]), math.log(ratio[1])
    for (area_draw, ratio_draw), (down, right) in zip(shapes, places, strict=False):
        area = height * width * _interpolate(scale, area_draw)
        aspect = math.exp(_interpolate(log_ratio, ratio_draw))
        tall, wide = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < tall <= height and 0 < wide <= width:
            yield int(down * (height - tall + 1)), int(right * (width - wide + 1)), tall, wide


def _shows_box(sides: tuple[int, int], crop: Crop, box: Box) -> bool:
    """Whether enough of the box is inside the crop."""
    (height, width), (top, left, tall, wide) = sides, crop
    across = min(left + wide, box[2] * width) - max(left, box[0] * width)
    along = min(top + tall, box[3] * height) - max(top, box[1] * height)
    whole = (box[2] - box[0]) * width * (box[3] - box[1]) * height
    return max(across, 0) * max(along, 0) >= _BOX_SHARE * whole


def _pairs(draws: Draws) -> _Pairs:
    return list(zip(draws[::2], draws[1::2], strict=True))
