"""Bytes of an image file to pixels, and pixels to another size."""

import io
import struct
import zlib
from contextlib import suppress

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

try:
    import simplejpeg
except ImportError:  # Pillow stands in, with the same pixels at half the speed
    simplejpeg = None

Pixels = NDArray[np.uint8]  # [height, width, 3], RGB

JPEG_START = b"\xff\xd8"
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP")  # what hides behind a .jpg or .png now and then
PILLOW_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)

cv2.setNumThreads(0)  # one image, one thread: workers share the cores, and results do not vary


class BadImage(Exception):
    """An image that cannot be read; says which and why."""

    def __init__(self, name: str, why: str):
        super().__init__(f"{name}: {why}")
        self.name = name
        self.why = why


def decode(data: bytes, name: str) -> Pixels:
    """The image as RGB; its EXIF orientation is ignored. Raises BadImage, with `name` in it."""
    if not data:
        raise BadImage(name, "the file is empty")
    if simplejpeg is not None and data.startswith(JPEG_START):
        with suppress(ValueError):  # CMYK, stray bytes, damage: Pillow reads it or says why not
            return simplejpeg.decode_jpeg(data)
    return _decode_with_pillow(data, name)


def _decode_with_pillow(data: bytes, name: str) -> Pixels:
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return _to_rgb(image)
    except UnidentifiedImageError:
        raise BadImage(name, "neither a JPEG nor a PNG image") from None
    except PILLOW_ERRORS as cause:
        raise BadImage(name, str(cause) or type(cause).__name__) from None


def _to_rgb(image: Image.Image) -> Pixels:
    if image.mode.startswith("I"):  # 16 bits a pixel: the upper eight are the picture
        grey = np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255).astype(np.uint8)
        return grey_to_rgb(grey)
    if image.mode == "P":  # straight to RGB, Pillow warns about transparent palettes
        image = image.convert("RGBA")
    return np.array(image.convert("RGB"))


def resize(image: Pixels, height: int, width: int) -> Pixels:
    """The image at another size: averaged where it shrinks, interpolated where it grows."""
    old_height, old_width = image.shape[:2]
    if (old_height, old_width) == (height, width):
        return image
    shrunk = min(old_height, height), min(old_width, width)
    if shrunk != (old_height, old_width):
        image = _scale(image, shrunk, cv2.INTER_AREA)
    if shrunk != (height, width):
        image = _scale(image, (height, width), cv2.INTER_LINEAR)
    return image


def mirror(image: Pixels) -> Pixels:
    """The image with left and right exchanged."""
    flipped: Pixels = cv2.flip(image, 1)  # type: ignore[assignment]
    return flipped


def grey_to_rgb(grey: NDArray[np.uint8]) -> Pixels:
    """A grey image [height, width] as three equal channels."""
    return cv2.cvtColor(grey, cv2.COLOR_GRAY2RGB).astype(np.uint8, copy=False)


def _scale(image: Pixels, shape: tuple[int, int], how: int) -> Pixels:
    height, width = shape
    scaled = cv2.resize(image, (width, height), interpolation=how)
    return scaled.astype(np.uint8, copy=False)
