"""One image on its way into a file of another form, and what all writers of such files share."""

import io
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import cv2
from PIL import Image

from phalanx.data.formats.decode import (
    PILLOW_ERRORS,
    PILLOW_FORMATS,
    BadImage,
    Pixels,
    decode,
    resize,
)
from phalanx.disk import disk_errors, remove_quietly, sync_folder, write_atomically
from phalanx.errors import DataError

_QUALITY = 95
PLAIN_JPEG = ("RGB", "L")  # the modes every reader of a JPEG takes

Box = tuple[float, float, float, float]  # left, top, right, bottom in 0..1


@dataclass(frozen=True, kw_only=True)
class Sample:
    """An encoded image with its name and its class."""

    name: str
    data: bytes
    label: int
    box: Box | None = None


@dataclass(frozen=True)
class Looks:
    """What the header of an encoded image says, without its pixels being decoded."""

    form: str  # "JPEG", "PNG"; "" where nothing can be made of it
    mode: str
    width: int
    height: int


def look_at(data: bytes) -> Looks:
    """The form and size of an encoded image; all empty when it is none."""
    try:
        with Image.open(io.BytesIO(data), formats=PILLOW_FORMATS) as image:
            return Looks(image.format or "", image.mode, image.width, image.height)
    except PILLOW_ERRORS:
        return Looks("", "", 0, 0)


def to_jpeg(sample: Sample, short_side: int | None = None) -> bytes:
    """The image as an RGB or grey JPEG, shrunk to a short side; one that is so already is kept.

    An image that cannot be decoded is kept as it is: whoever reads it later names it.
    """
    looks = look_at(sample.data)
    small = short_side is None or min(looks.width, looks.height) <= short_side
    if looks.form == "JPEG" and looks.mode in PLAIN_JPEG and small:
        return sample.data
    try:
        pixels = decode(sample.data, sample.name)
    except BadImage:
        return sample.data
    return _encode_jpeg(shrink(pixels, short_side))


def shrink(image: Pixels, short_side: int | None) -> Pixels:
    """The image with its short side at most so long; small ones stay as they are."""
    height, width = image.shape[:2]
    if short_side is None or min(height, width) <= short_side:
        return image
    scale = short_side / min(height, width)
    return resize(image, round(height * scale), round(width * scale))


def _encode_jpeg(image: Pixels) -> bytes:
    """RGB pixels as a JPEG; the same pixels give the same bytes."""
    return _encode(image, ".jpg", [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])


def _encode(image: Pixels, ending: str, options: list[int]) -> bytes:
    _, data = cv2.imencode(ending, cv2.cvtColor(image, cv2.COLOR_RGB2BGR), options)
    return data.tobytes()


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that appears under its name when it is whole and on the disk."""
    part = path.with_name(f"{path.name}.part")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            remove_quietly(part)
            raise
        sync_folder(path.parent)


def counted(samples: Iterable[Sample], count: int, where: Path) -> Iterator[Sample]:
    """The same samples; raises DataError when they are not as many as was promised."""
    given = 0
    for given, sample in enumerate(samples, 1):
        if given > count:
            break
        yield sample
    if given != count:
        more = "more than" if given > count else f"{given:,} instead of"
        raise DataError(
            f"{where}: the source gave {more} {count:,} images; it changed while it was read, "
            "build again"
        )


def write_class_names(path: Path, classes: tuple[str, ...]) -> None:
    """A file with one class name a line."""
    strange = [name for name in classes if "\n" in name or not name.strip()]
    if strange:
        raise DataError(f"{path}: {strange[0]!r} cannot be a line of this file; rename the class")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(f"{name}\n" for name in classes))
