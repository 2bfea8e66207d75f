"""Decoding image files to pixels, and resizing pixels."""

import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import ImageOps, UnidentifiedImageError

from phalanx.catalog.datasets import MAX_PIXELS
from phalanx.data.orientation import (
    UPRIGHT,
    count_stored_rows,
    find_jpeg_orientation,
    turn_pixels,
    turn_shape,
)
from phalanx.data.pillow_image import (
    PILLOW_ERRORS,
    describe_unidentified,
    find_orientation,
    open_pillow_image,
    read_rgb,
)

try:
    import simplejpeg
except ImportError:  # Pillow is used instead: the same pixels at half the speed
    simplejpeg = None

Pixels = NDArray[np.uint8]  # [height, width, 3], RGB
Crop = tuple[int, int, int, int]  # top, left, height, width

_DECODE_MARGIN = 1.5
JPEG_START = b"\xff\xd8"
# what simplejpeg raises for a header; KeyError if it is 4:4:1, for which it has no name
HEADER_ERRORS = (ValueError, KeyError)
_JPEG_SEQUENTIAL_FRAMES = (0xC0, 0xC1)  # whose rows are stored in order, top to bottom
_JPEG_SCAN = 0xDA
_JPEG_CHANNELS = (1, 3)  # grey or colour; CMYK is left to Pillow
_FRAME_SHAPE = struct.Struct(">HH")  # height and width, in a frame
_JPEG_NOTES = frozenset({0xC4, 0xDB, 0xFE, *range(0xE0, 0xF0)})  # tables, comments, metadata
_EARLY_END = "extraneous bytes before marker 0xd9"  # libjpeg's message about the rows left out
_MOST_SMOOTHED = 2.0  # times smaller; three weights cannot represent a wider triangle
_MIN_WIDTH = 8  # below it, the scale in eighths cannot be told from the width
_EXTRA_ROWS = 4  # subsampled colours are blended with the rows below

cv2.setNumThreads(0)  # workers share the cores already, and results do not vary with threads


class BadImage(Exception):
    """An image that cannot be read: its name and the reason."""

    def __init__(self, name: str, reason: str):
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason


def _decode_intact_jpeg(data: bytes, min_shape: tuple[int, int] | None) -> Pixels | None:
    """A JPEG as it is stored; None if it is CMYK, has stray bytes or damage, or is no JPEG.

    min_shape: height and width that are enough. It is then decoded at a half, a quarter or an
    eighth of its size if that is not smaller, which saves most of the work.
    """
    if simplejpeg is None or not data.startswith(JPEG_START):
        return None
    height, width = min_shape or (0, 0)
    with suppress(ValueError):
        pixels: Pixels = simplejpeg.decode_jpeg(
            data, min_height=height, min_width=width, min_factor=2 if min_shape else 1
        )
        return pixels
    return None


def _decode_by_pillow(data: bytes, name: str, max_pixels: int) -> Pixels:
    """An image as it is stored, of any format that Pillow reads; raises BadImage."""
    with _open_pillow(data, name) as image:
        _refuse_bomb((image.height, image.width), name, max_pixels)
        return read_rgb(image)


def decode_top(data: bytes, rows: int, min_shape: tuple[int, int] | None = None) -> Pixels | None:
    """A JPEG as it is stored, of which only the first `rows` rows are decoded.

    min_shape: as for `_decode_intact_jpeg`, which decodes these rows to the same pixels. Other rows
    of the result are undefined. None if decoding cannot stop early, or if anything is suspicious:
    the whole image must be decoded then, which also finds out what is wrong.
    """
    if simplejpeg is None or (field := find_height_field(data)) is None:
        return None
    factor = 2 if min_shape else 1
    full_height, full_width = _FRAME_SHAPE.unpack_from(data, field)
    with suppress(*HEADER_ERRORS):
        height, width, *_ = simplejpeg.decode_jpeg_header(data, *(min_shape or (0, 0)), factor)
        enough = rows + _EXTRA_ROWS * math.ceil(full_height / height)
        if enough >= full_height or full_width < _MIN_WIDTH:
            return None
        shortened = bytearray(data)
        shortened[field : field + 2] = enough.to_bytes(2)  # decoders stop at the stated height
        size = {"min_height": 1, "min_width": width, "min_factor": factor}
        if simplejpeg.decode_jpeg_header(shortened, **size)[1] == width:
            pixels = np.empty((height, width, 3), np.uint8)
            return pixels if _decode_into(pixels, shortened, size) else None
    return None


def _decode_into(pixels: Pixels, data: bytearray, size: dict[str, int]) -> bool:
    """Decode a JPEG into the first rows; whether nothing but its early end was wrong."""
    try:
        simplejpeg.decode_jpeg(data, buffer=pixels, **size)
    except ValueError as complaint:  # libjpeg's first warning, raised after decoding
        return str(complaint).endswith(_EARLY_END)
    return True


def find_height_field(data: bytes) -> int | None:
    """The offset of a JPEG's height, if it is one sequential scan without restarts, else None."""
    frame, marker = None, len(JPEG_START)
    while data.startswith(b"\xff", marker) and marker + 10 < len(data):
        kind, length = data[marker + 1], int.from_bytes(data[marker + 2 : marker + 4])
        if kind == _JPEG_SCAN:
            together = frame is not None and data[marker + 4] == data[frame + 4] in _JPEG_CHANNELS
            return frame if together else None
        if kind in _JPEG_SEQUENTIAL_FRAMES:
            frame = marker + 5
        elif kind not in _JPEG_NOTES:  # progressive, or with restart markers
            return None
        marker += 2 + length
    return None


def _read_layout(data: bytes, name: str, max_pixels: int) -> tuple[tuple[int, int], int]:
    """Height and width as stored, and the orientation, from the header; BadImage if too large."""
    layout = None
    if simplejpeg is not None and data.startswith(JPEG_START):
        with suppress(*HEADER_ERRORS):
            layout = simplejpeg.decode_jpeg_header(data)[:2], find_jpeg_orientation(data)
    if layout is None:
        with _open_pillow(data, name) as image:
            layout = (image.height, image.width), find_orientation(data, image)
    _refuse_bomb(layout[0], name, max_pixels)
    return layout


def _refuse_bomb(shape: tuple[int, int], name: str, max_pixels: int) -> None:
    """Raise BadImage for a decompression bomb: an image of more than max_pixels."""
    height, width = shape
    if height * width > max_pixels:
        raise BadImage(name, f"{width}x{height} pixels, over the {max_pixels:,} of --max-pixels")


@contextmanager
def _open_pillow(data: bytes, name: str) -> Iterator[Pillow.Image]:
    """Context with the image opened by Pillow, whose errors become BadImage."""
    if not data:
        raise BadImage(name, "the file is empty")
    try:
        with open_pillow_image(data) as image:
            yield image
    except UnidentifiedImageError:
        raise BadImage(name, describe_unidentified(data)) from None
    except PILLOW_ERRORS as cause:
        raise BadImage(name, str(cause) or type(cause).__name__) from None


class EncodedImage:
    """An image file in memory: its height and width are known, pixels are decoded on demand.

    upright: whether it is turned as its EXIF says; height and width are those after turning.
    decodes_whole: whether all of it is decoded even for a crop, so that damage anywhere is noticed.
    is_intact: whether libjpeg has decoded it without a complaint, as other decoders then do, too.
    """

    decodes_whole, is_intact = False, False

    def __init__(
        self, data: bytes, name: str, *, max_pixels: int = MAX_PIXELS, upright: bool = True
    ):
        self.data, self.name, self.max_pixels = data, name, max_pixels
        shape, orientation = _read_layout(data, name, max_pixels)
        self.orientation = orientation if upright else UPRIGHT
        self.height, self.width = turn_shape(shape, self.orientation)

    def decode(self, scale: float = 1.0) -> Pixels:
        """The whole image, at least 1.5 times as large as that scale of its size.

        The margin keeps the result within 5/255 of a resize of the fully decoded image.
        """
        pixels = _decode_intact_jpeg(self.data, self._min_shape(scale))
        self.is_intact = pixels is not None
        if pixels is None:
            pixels = _decode_by_pillow(self.data, self.name, self.max_pixels)
        return turn_pixels(pixels, self.orientation)

    def decode_crop(self, crop: Crop, scale: float) -> Pixels:
        """Like `decode`, but pixels outside of the crop, given at full size, are undefined."""
        rows = count_stored_rows(crop, (self.height, self.width), self.orientation)
        scaled_to = self._min_shape(scale)
        pixels = None if self.decodes_whole else decode_top(self.data, rows, scaled_to)
        return self.decode(scale) if pixels is None else turn_pixels(pixels, self.orientation)

    def _min_shape(self, scale: float) -> tuple[int, int] | None:
        """Height and width, as stored, that suffice for a scale; None if it needs the full size."""
        scale *= _DECODE_MARGIN
        shape = math.ceil(self.height * scale), math.ceil(self.width * scale)
        return turn_shape(shape, self.orientation) if scale <= 0.5 else None


Image = Pixels | EncodedImage


def image_shape(image: Image) -> tuple[int, int]:
    """Height and width of a decoded or encoded image."""
    if isinstance(image, EncodedImage):
        return image.height, image.width
    return image.shape[0], image.shape[1]


def decode_image(image: Image, *, scale: float = 1.0) -> Pixels:
    """The pixels of the whole image, at no less than that scale of its size."""
    return image.decode(scale) if isinstance(image, EncodedImage) else image


def decode_image_crop(image: Image, crop: Crop, *, scale: float) -> Pixels:
    """Like `decode_image`, but pixels outside of the crop are undefined."""
    return image.decode_crop(crop, scale) if isinstance(image, EncodedImage) else image


def resize(image: Pixels, height: int, width: int) -> Pixels:
    """The image at another size: area-averaged where it shrinks, interpolated where it grows."""
    old_height, old_width = image.shape[:2]
    if (old_height, old_width) == (height, width):
        return image
    shrunk = min(old_height, height), min(old_width, width)
    if shrunk != (old_height, old_width):
        image = _interpolate(image, shrunk, cv2.INTER_AREA)
    if shrunk != (height, width):
        image = _interpolate(image, (height, width), cv2.INTER_LINEAR)
    return image


def resize_crop(image: Pixels, height: int, width: int) -> Pixels:
    """Like `resize`, but in a third of the time if the image shrinks by a factor of at most two.

    It is smoothed, then interpolated: the combined weights are nearly the triangle of Pillow's
    bilinear filter, and the result is as close to Pillow's as an area average is.
    """
    factors = image.shape[0] / height, image.shape[1] / width
    if not 1 < max(factors) <= _MOST_SMOOTHED:
        return resize(image, height, width)
    down, across = map(_smoothing_kernel, factors)
    smoothed = cv2.sepFilter2D(image, -1, across, down, borderType=cv2.BORDER_REPLICATE)
    return _interpolate(smoothed.astype(np.uint8, copy=False), (height, width), cv2.INTER_LINEAR)


def _smoothing_kernel(factor: float) -> NDArray[np.float32]:
    """Three weights that widen an interpolation's triangle to `factor` pixels on each side.

    They match its variance: that of a triangle is a sixth of its squared half-width.
    """
    side = max(factor**2 - 1, 0) / 12
    return np.array([side, 1 - 2 * side, side], np.float32)


def _interpolate(image: Pixels, shape: tuple[int, int], method: int) -> Pixels:
    height, width = shape
    return cv2.resize(image, (width, height), interpolation=method).astype(np.uint8, copy=False)


def mirror(image: Pixels) -> Pixels:
    """The image with left and right swapped."""
    flipped: Pixels = cv2.flip(image, 1)  # type: ignore[assignment]
    return flipped


def reflect_edges(image: Pixels, width: int) -> Pixels:
    """The image with a border of that width, of pixels reflected at the outermost ones."""
    sides = (width,) * 4
    return cv2.copyMakeBorder(image, *sides, cv2.BORDER_REFLECT_101).astype(np.uint8, copy=False)


def grey_to_rgb(grey: NDArray[np.uint8]) -> Pixels:
    """A grey image [height, width] as three equal channels."""
    return cv2.cvtColor(grey, cv2.COLOR_GRAY2RGB).astype(np.uint8, copy=False)


def encode_png(image: Pixels) -> bytes:
    """RGB pixels as a PNG file."""
    _, data = cv2.imencode(".png", cv2.cvtColor(image, cv2.COLOR_RGB2BGR))
    return data.tobytes()


def pillow_to_pixels(image: Pillow.Image, name: str, *, max_pixels: int, upright: bool) -> Pixels:
    """The RGB pixels of a Pillow image of any mode; raises BadImage."""
    _refuse_bomb((image.height, image.width), name, max_pixels)
    if not image.height * image.width:
        raise BadImage(name, "has no pixels")
    try:
        return read_rgb(ImageOps.exif_transpose(image) if upright else image)
    except PILLOW_ERRORS as cause:  # its file is read only now
        raise BadImage(name, str(cause) or type(cause).__name__) from None
