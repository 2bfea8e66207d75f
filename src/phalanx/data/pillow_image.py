"""Image files opened with Pillow; the format is recognised by the bytes, not by the name.

HEIC is read by pillow-heif, a plugin for Pillow, which is an optional dependency.
"""

import ctypes
import io
import logging
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import AvifImagePlugin, TiffImagePlugin, UnidentifiedImageError
from PIL import Image as Pillow

from phalanx.data.orientation import TURNS, UPRIGHT, find_png_orientation, read_exif_orientation

_PILLOW_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "AVIF")
_NO_IMAGE = "not a JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF or HEIC image"
_HEIC_BRANDS = frozenset(
    (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1")
)
_NO_HEIC = "HEIC needs pillow-heif, which is not installed; pip install 'phalanx[heic]'"
PILLOW_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    RuntimeError,
    struct.error,
    zlib.error,
    Pillow.DecompressionBombError,
)
_PILLOW_LOCK = Lock()
_TIFF_LOGGER = logging.getLogger("PIL.TiffImagePlugin")
_TIFF_ORIENTATION = 0x0112


def open_pillow_image(data: bytes) -> Pillow.Image:
    """The image, of which only the header is read; raises one of PILLOW_ERRORS."""
    with _pillow_settings():
        try:
            return Pillow.open(io.BytesIO(data), formats=_PILLOW_FORMATS)
        except UnidentifiedImageError:
            heif = _import_heif() if _is_heic(data) else None
            if heif is None:
                raise
            opened: Pillow.Image = heif.HeifImageFile(io.BytesIO(data))
            return opened


@contextmanager
def _pillow_settings() -> Iterator[None]:
    """Context without Pillow's warnings and size limit (we have our own), and one AVIF thread.

    These settings are global to the process, and restored at the end.
    """
    with _PILLOW_LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        limit, threads = Pillow.MAX_IMAGE_PIXELS, AvifImagePlugin.DEFAULT_MAX_THREADS
        Pillow.MAX_IMAGE_PIXELS, AvifImagePlugin.DEFAULT_MAX_THREADS = None, 1
        quiet, _TIFF_LOGGER.disabled = _TIFF_LOGGER.disabled, True  # it raises what it logs
        try:
            yield
        finally:
            Pillow.MAX_IMAGE_PIXELS, AvifImagePlugin.DEFAULT_MAX_THREADS = limit, threads
            _TIFF_LOGGER.disabled = quiet


def describe_unidentified(data: bytes) -> str:
    """Why Pillow does not recognise these bytes."""
    return _NO_HEIC if _is_heic(data) and _import_heif() is None else _NO_IMAGE


def _is_heic(data: bytes) -> bool:
    return data[4:8] == b"ftyp" and data[8:12] in _HEIC_BRANDS


@cache
def _import_heif() -> Any:
    """The module that reads HEIC; None if it is not installed."""
    try:
        return import_module("pillow_heif.as_plugin")
    except ImportError:
        return None


def read_rgb(image: Pillow.Image) -> NDArray[np.uint8]:
    """The pixels as RGB bytes; transparency is dropped, so that hidden colours show."""
    if image.format == "TIFF":  # warns and checks the limit while decoding
        _silence_libtiff()
        with _pillow_settings():
            image.load()
    if image.mode.startswith(("I", "F")):
        image = Pillow.fromarray(_to_eight_bits(np.asarray(image)))
    if image.mode == "P":  # converting to RGB directly, Pillow warns about transparent palettes
        image = image.convert("RGBA")
    return np.array(image.convert("RGB"))


@cache
def _silence_libtiff() -> None:
    """Keep libtiff, if it is found, from printing errors that Pillow raises anyway."""
    with suppress(OSError, AttributeError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.rpartition(" ")[2]
            if Path(path).name.startswith("libtiff"):
                ctypes.CDLL(path).TIFFSetErrorHandler(None)
                return


def _to_eight_bits(grey: NDArray[Any]) -> NDArray[np.uint8]:
    """The upper 8 of 16 bits per pixel; ValueError for 32 bits, whose white is unknown."""
    if grey.dtype.kind == "f" or (grey.size and not 0 <= grey.min() <= grey.max() < 2**16):
        raise ValueError("32 bits per pixel without a known white; convert it to 8 or 16 bits")
    return (grey >> 8).astype(np.uint8)


def find_orientation(data: bytes, image: Pillow.Image) -> int:
    """The orientation an image must still be turned by; Pillow turns TIFF and HEIC itself."""
    if image.format == "PNG":  # Pillow would have to read all of it
        return find_png_orientation(data)
    exif = image.info.get("exif")
    return read_exif_orientation(exif) if isinstance(exif, bytes) else UPRIGHT


class _ImageHeader(NamedTuple):
    """The facts in the header of an image file."""

    format: str = ""  # "JPEG", "PNG"; "" if it is not an image
    mode: str = ""
    shape: tuple[int, int] = (0, 0)  # height and width, before it is turned
    orientation: int = UPRIGHT


def read_image_header(data: bytes) -> _ImageHeader:
    """The header of an image file, without decoding it; all empty if it is not an image."""
    try:
        with open_pillow_image(data) as image:
            name = image.format or ""
            orientation = find_orientation(data, image)
            if isinstance(image, TiffImagePlugin.TiffImageFile):
                orientation = image.tag_v2.get(_TIFF_ORIENTATION, UPRIGHT)
            elif name == "HEIF":
                orientation = image.info.get("original_orientation") or UPRIGHT
            return _ImageHeader(
                "JPEG" if name == "MPO" else name,  # MPO: a JPEG followed by others
                image.mode,
                (image.height, image.width),
                orientation if orientation in TURNS else UPRIGHT,
            )
    except PILLOW_ERRORS:
        return _ImageHeader()
