"""Operations on one image: brightness, colours, geometry. Nothing here is random.

The amounts mean the same as in Pillow, and the results differ from Pillow's by at most one level,
except at the edges of a moved image, which are blended with grey here. Fourteen operations are
those of RandAugment and TrivialAugment, see `augment`; OPERATIONS puts them on a common scale.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from phalanx.data.formats.decode import Pixels

GREY = (128, 128, 128)  # fills what is uncovered when an image is turned or shifted
_GREY_SHARES = np.array([0.299, 0.587, 0.114])  # of red, green and blue, as in JPEG
_BYTES = np.arange(256)
_SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13  # Pillow's


@dataclass(frozen=True, kw_only=True)
class _AugmentationSpace:
    """The strength of each operation at level 1."""

    shear: float  # pixels sideways per pixel down
    turn_degrees: float
    factor: float  # distance from one, in either direction
    bits: int  # how many of the eight are removed
    shift: Callable[[int], float]  # in pixels, from the length of the side


STANDARD_SPACE = _AugmentationSpace(
    shear=0.3, turn_degrees=30, factor=0.9, bits=4, shift=lambda side: side * 150 / 331
)
WIDE_SPACE = _AugmentationSpace(
    shear=0.99, turn_degrees=135, factor=0.99, bits=6, shift=lambda side: 32
)


def brightness(image: Pixels, factor: float) -> Pixels:
    """The image with every byte multiplied by the factor."""
    return _map_bytes(image, _BYTES * factor)


def contrast(image: Pixels, factor: float) -> Pixels:
    """The image with differences from its mean grey multiplied by the factor."""
    middle = math.floor(cv2.mean(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY))[0] + 0.5)
    return _map_bytes(image, middle + (_BYTES - middle) * factor)


def colour(image: Pixels, factor: float) -> Pixels:
    """The image with differences from its grey version multiplied by the factor."""
    matrix = factor * np.eye(3) + (1 - factor) * _GREY_SHARES
    return cv2.transform(image, matrix).astype(np.uint8, copy=False)


def sharpness(image: Pixels, factor: float) -> Pixels:
    """The image with differences from its smoothed version times the factor, except its edge."""
    smooth = np.array(image, order="C")
    if min(image.shape[:2]) > 2:
        smooth[1:-1, 1:-1] = cv2.filter2D(image, -1, _SMOOTH)[1:-1, 1:-1]
    return cv2.addWeighted(image, factor, smooth, 1 - factor, 0).astype(np.uint8, copy=False)


def shift_hue(image: Pixels, share: float) -> Pixels:
    """The image with its hue moved by this share of the colour wheel, in 256 steps."""
    steps = round(share * 256) % 256
    if steps == 0:  # converting to HSV and back changes values by a level or two
        return np.array(image, order="C")
    tables = np.stack([(_BYTES + steps) % 256, _BYTES, _BYTES], axis=-1)
    turned = _map_bytes(cv2.cvtColor(image, cv2.COLOR_RGB2HSV_FULL), tables)
    return cv2.cvtColor(turned, cv2.COLOR_HSV2RGB_FULL).astype(np.uint8, copy=False)


def posterize(image: Pixels, bits: int) -> Pixels:
    """The image with only the upper `bits` bits of each byte."""
    return _map_bytes(image, _BYTES & (0xFF00 >> bits))


def solarize(image: Pixels, threshold: float) -> Pixels:
    """The image with bytes at or above the threshold inverted."""
    return _map_bytes(image, np.where(threshold > _BYTES, _BYTES, 255 - _BYTES))


def autocontrast(image: Pixels) -> Pixels:
    """The image with each channel stretched to 0..255; a channel of one value is unchanged."""
    return _map_channels(image, _autocontrast_table)


def equalize(image: Pixels) -> Pixels:
    """The image with each channel's histogram equalised; a channel of one value is unchanged."""
    return _map_channels(image, _equalize_table)


def rotate(image: Pixels, degrees: float) -> Pixels:
    """The image rotated counter-clockwise around its centre."""
    height, width = image.shape[:2]
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    across = width / 2 - cosine * width / 2 + sine * height / 2
    along = height / 2 - sine * width / 2 - cosine * height / 2
    return _warp(image, ((cosine, -sine, across), (sine, cosine, along)))


def shear_x(image: Pixels, slope: float) -> Pixels:
    """The image with rows moved left, by more the lower they are; the top stays."""
    return _warp(image, ((1, slope, 0), (0, 1, 0)))


def shear_y(image: Pixels, slope: float) -> Pixels:
    """The image with columns moved up, by more the further right they are; the left stays."""
    return _warp(image, ((1, 0, 0), (slope, 1, 0)))


def translate_x(image: Pixels, pixels: float) -> Pixels:
    """The image moved to the left."""
    return _warp(image, ((1, 0, pixels), (0, 1, 0)))


def translate_y(image: Pixels, pixels: float) -> Pixels:
    """The image moved up."""
    return _warp(image, ((1, 0, 0), (0, 1, pixels)))


def _map_bytes(
    image: NDArray[np.uint8] | cv2.typing.MatLike, table: NDArray[np.integer | np.floating]
) -> Pixels:
    """Each byte replaced by its entry, in one table [256] or in one per channel [256, 3]."""
    entries = np.clip(np.rint(table), 0, 255).astype(np.uint8)
    entries = entries.reshape(1, 256, -1)  # cv2 takes the last side for channels
    return cv2.LUT(image, entries).astype(np.uint8, copy=False)


def _map_channels(
    image: Pixels, build_table: Callable[[NDArray[np.int64]], NDArray[np.int64]]
) -> Pixels:
    """Each channel's bytes replaced by the table that is built from its histogram."""
    histograms = [cv2.calcHist([image], [channel], None, [256], [0, 256]) for channel in range(3)]
    tables = [build_table(counts.ravel().astype(np.int64)) for counts in histograms]
    return _map_bytes(image, np.stack(tables, axis=-1))


def _autocontrast_table(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The table that maps the lowest value that occurs to 0, and the highest to 255."""
    low, high = np.flatnonzero(counts)[[0, -1]]
    if low == high:
        return _BYTES
    return ((_BYTES - low) * 510 + high - low) // (2 * (high - low))  # integers, rounded half up


def _equalize_table(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The table that equalises a histogram, with Pillow's rounding."""
    step = (counts.sum() - counts[np.flatnonzero(counts)[-1]]) // 255
    if step == 0:
        return _BYTES
    return (np.cumsum(counts) - counts + step // 2) // step


def _warp(image: Pixels, matrix: tuple[tuple[float, ...], tuple[float, ...]]) -> Pixels:
    """The image sampled where the matrix maps each point; the origin is the corner."""
    centred = np.array(matrix, np.float64)
    centred[:, 2] += centred[:, :2].sum(axis=1) / 2 - 0.5  # cv2's origin is a pixel's centre
    height, width = image.shape[:2]
    how = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    warped = cv2.warpAffine(image, centred, (width, height), flags=how, borderValue=GREY)
    return warped.astype(np.uint8, copy=False)


# a function of an image, a level in [-1, 1], whose sign is random, and a space
Operation = Callable[[Pixels, float, _AugmentationSpace], Pixels]

OPERATIONS: dict[str, Operation] = {
    "identity": lambda image, level, space: np.array(image, order="C"),
    "autocontrast": lambda image, level, space: autocontrast(image),
    "equalize": lambda image, level, space: equalize(image),
    "rotate": lambda image, level, space: rotate(image, level * space.turn_degrees),
    "solarize": lambda image, level, space: solarize(image, 256 * (1 - abs(level))),
    "colour": lambda image, level, space: colour(image, 1 + level * space.factor),
    "posterize": lambda image, level, space: posterize(image, 8 - round(abs(level) * space.bits)),
    "contrast": lambda image, level, space: contrast(image, 1 + level * space.factor),
    "brightness": lambda image, level, space: brightness(image, 1 + level * space.factor),
    "sharpness": lambda image, level, space: sharpness(image, 1 + level * space.factor),
    "shear-x": lambda image, level, space: shear_x(image, level * space.shear),
    "shear-y": lambda image, level, space: shear_y(image, level * space.shear),
    "translate-x": lambda image, level, space: translate_x(
        image, level * space.shift(image.shape[1])
    ),
    "translate-y": lambda image, level, space: translate_y(
        image, level * space.shift(image.shape[0])
    ),
}
