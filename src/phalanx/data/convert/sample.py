"""One image that is converted from one data format to another."""

from dataclasses import dataclass, replace
from pathlib import PurePosixPath

import cv2

from phalanx.catalog.datasets import MAX_PIXELS
from phalanx.data.formats.decode import EncodedImage, encode_png, resize
from phalanx.data.formats.index import Box
from phalanx.data.orientation import turn_box
from phalanx.data.pillow_image import read_image_header

_PLAIN_JPEG = ("RGB", "L")  # the modes that every JPEG reader supports
_FORMAT_OF_SUFFIX = {
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".jpe": "JPEG",
    ".jfif": "JPEG",
    ".png": "PNG",
    ".webp": "WEBP",
    ".bmp": "BMP",
    ".gif": "GIF",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".avif": "AVIF",
    ".heic": "HEIF",
    ".heif": "HEIF",
}
_SUFFIX_OF_FORMAT = {
    "JPEG": "jpg",
    "PNG": "png",
    "WEBP": "webp",
    "BMP": "bmp",
    "GIF": "gif",
    "TIFF": "tif",
    "AVIF": "avif",
    "HEIF": "heic",
}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """An image with its name, its class and its bounding box."""

    name: str
    data: bytes  # an image file, or RGB pixels if `shape` is given
    label: int
    box: Box | None = None
    shape: tuple[int, int] | None = None  # height and width of raw pixels


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """How images are stored; by default unchanged."""

    only_jpeg: bool = False  # as RGB or grey JPEG, whatever the source
    short_side: int | None = None
    quality: int = 95
    raw: bool = False  # as pixels


def convert_sample(
    sample: Sample, options: EncodeOptions, *, max_pixels: int = MAX_PIXELS
) -> Sample:
    """The image in the wanted encoding: the same object if nothing has to change.

    Every image is decoded, at least to check that it can be: raises BadImage.
    """
    image = EncodedImage(sample.data, sample.name, max_pixels=max_pixels)
    pixels = image.decode()
    height, width = pixels.shape[:2]
    scale = (options.short_side or min(height, width)) / min(height, width)
    if scale < 1:
        pixels = resize(pixels, round(height * scale), round(width * scale))
    # re-encoded pixels are upright and have no EXIF, so the box must be turned, too
    box = sample.box and turn_box(sample.box, image.orientation)
    if options.raw:
        shape = pixels.shape[0], pixels.shape[1]
        return replace(sample, data=pixels.tobytes(), shape=shape, box=box)
    header = read_image_header(sample.data)
    is_plain_jpeg = header.format == "JPEG" and header.mode in _PLAIN_JPEG
    if scale >= 1 and (is_plain_jpeg or not options.only_jpeg):
        return sample
    if not options.only_jpeg and find_promised_format(sample.name) == "PNG":
        return replace(sample, data=encode_png(pixels), box=box)
    quality = [cv2.IMWRITE_JPEG_QUALITY, options.quality]
    _, data = cv2.imencode(".jpg", cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR), quality)
    return replace(sample, data=data.tobytes(), name=name_as_jpeg(sample.name), box=box)


def name_as_jpeg(name: str) -> str:
    """The name of an image after it became a JPEG."""
    if find_promised_format(name) in ("", "JPEG"):
        return name
    return name[: -len(PurePosixPath(name).suffix)] + ".jpg"


def choose_suffix(data: bytes) -> str:
    """The suffix for a file with this image, without a dot; jpg if the format is unknown."""
    return _SUFFIX_OF_FORMAT.get(read_image_header(data).format, "jpg")


def find_promised_format(name: str) -> str:
    """The image format that a file name indicates; empty if it indicates none."""
    return _FORMAT_OF_SUFFIX.get(PurePosixPath(name).suffix.lower(), "")
