"""Checks of single images, in a worker process."""

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING

import cv2
import numpy as np
from numpy.typing import NDArray

from phalanx.catalog.datasets import MAX_PIXELS
from phalanx.data.convert.sample import find_promised_format
from phalanx.data.convert.source_splits import ImageTask, SplitKey, open_once
from phalanx.data.formats.decode import (
    JPEG_START,
    BadImage,
    EncodedImage,
    Pixels,
    resize,
)
from phalanx.data.formats.index import (
    DAMAGED_SHARD,
    NO_LABEL,
    TRUNCATED_SHARD,
    WRONG_LABEL,
    IndexedSource,
)
from phalanx.data.formats.sources import find_portable_name
from phalanx.data.orientation import UPRIGHT, turn_pixels
from phalanx.data.pillow_image import read_image_header

if TYPE_CHECKING:
    from phalanx.data.formats.sources import Source

try:
    import simplejpeg
except ImportError:  # damage that Pillow tolerates is not found
    simplejpeg = None

OUT_OF_RANGE = "label out of range"
TURNED = "rotated by EXIF"
KINDS = (
    "zero-size",
    "undecodable",
    "truncated",
    "wrong extension",
    "CMYK",
    "greyscale",
    OUT_OF_RANGE,
    TURNED,
)
KIND_BITS = {kind: 1 << place for place, kind in enumerate(KINDS)}
_KIND_OF_FAULT = {  # by the fault in the index; "undecodable" for any other
    TRUNCATED_SHARD: "truncated",
    DAMAGED_SHARD: "truncated",
    WRONG_LABEL: OUT_OF_RANGE,
    NO_LABEL: OUT_OF_RANGE,
}
_JPEG_WARNINGS = ("Premature end", "Corrupt JPEG data")  # of libjpeg, about damage it tolerates
_COMPARED_EDGE = 32  # side in pixels of the images that are compared
_MAX_DISTANCE = 0.12  # as a share of their contrast: as caused by strong JPEG compression
_MIN_CONTRAST = 8.0  # of 255; below it all images look like the same grey
_THUMBNAIL_EDGE = 4
_GREY_STRIDE = 16  # pixels at this distance are tested first, to find colour quickly


ImageKey = tuple[SplitKey, int]  # the split of an image, and its number there


CHECK = np.dtype(  # the result for one image
    [
        ("flags", np.uint16),  # the bits of KINDS
        ("content", np.uint8, 32),  # the sha256 of the stored bytes
        ("identity", np.uint8, 32),  # the sha256 of split, name, content and label
        ("hash", np.uint64),  # a difference hash: where the image gets lighter to the right
        ("thumbnail", np.uint8, 3 * _THUMBNAIL_EDGE**2),  # distinguishes images of the same hash
    ]
)
Checks = NDArray[np.void]  # rows of CHECK
Reasons = dict[tuple[int, str], str]  # why an image is of a kind, by its row and the kind


def check_task(task: ImageTask) -> tuple[Checks, Reasons]:
    """The checks of each image of a task."""
    source = open_once(task.split)
    checks, reasons = np.zeros(len(task.numbers), CHECK), Reasons()
    for row, number in enumerate(task.numbers):
        data, pixels, found = check_image(source, number)
        digest = hashlib.sha256(data)
        name = find_portable_name(source, number).rpartition("/")[2]
        line = f"{task.split.split}\n{name}\n{digest.hexdigest()}\n{source.labels[number]}\n"
        identity = hashlib.sha256(line.encode(errors="surrogateescape"))
        checks["flags"][row] = sum(KIND_BITS[kind] for kind in found)
        checks["content"][row] = np.frombuffer(digest.digest(), np.uint8)
        checks["identity"][row] = np.frombuffer(identity.digest(), np.uint8)
        if pixels is not None:
            checks["hash"][row], checks["thumbnail"][row] = _hash_pixels(pixels)
        reasons |= {(row, kind): reason for kind, reason in found.items() if reason}
    return checks, reasons


def check_image(source: "Source", number: int) -> tuple[bytes, Pixels | None, dict[str, str]]:
    """The stored bytes of an image, its pixels, and its findings: kind to reason."""
    name = source.name(number)
    read_encoded = getattr(source, "read_encoded", None)
    try:
        if read_encoded is None or getattr(source, "raw", False):
            pixels = source.read(number)
            return b"%d %d\n" % pixels.shape[:2] + pixels.tobytes(), pixels, _check_grey(pixels)
        data = read_encoded(number)
    except BadImage as bad:
        fault = source.fault(number) if isinstance(source, IndexedSource) else 0
        return b"", None, {_KIND_OF_FAULT.get(fault, "undecodable"): bad.reason}
    if not data:
        return data, None, {"zero-size": "the file is empty"}
    is_file = isinstance(source, IndexedSource) and source.index.names is None
    found = _check_header(data, find_promised_format(name) if is_file else "")
    max_pixels = source.limits.max_pixels if isinstance(source, IndexedSource) else MAX_PIXELS
    image, damage = _decode_strictly(data, name, max_pixels)
    return data, image, found | damage | ({} if image is None else _check_grey(image))


def _check_header(data: bytes, promised_format: str) -> dict[str, str]:
    """Findings from the header of an image: wrong extension, CMYK, rotated by EXIF."""
    header, found = read_image_header(data), {}
    if promised_format and header.format and header.format != promised_format:
        found["wrong extension"] = f"is really a {header.format}"
    if header.mode == "CMYK":
        found["CMYK"] = "has CMYK colours, not RGB"
    if header.orientation != UPRIGHT:
        found[TURNED] = ""
    return found


def _decode_strictly(
    data: bytes, name: str, max_pixels: int
) -> tuple[Pixels | None, dict[str, str]]:
    """The pixels, and findings of damage, including damage that a decoder tolerates."""
    damage: dict[str, str] = {}
    if simplejpeg is not None and data.startswith(JPEG_START):
        try:
            image = EncodedImage(data, name, max_pixels=max_pixels)
            return turn_pixels(simplejpeg.decode_jpeg(data), image.orientation), damage
        except BadImage as bad:
            return None, {"undecodable": bad.reason}
        except ValueError as warning:
            if str(warning).startswith(_JPEG_WARNINGS):
                damage["truncated"] = str(warning)
    try:
        return EncodedImage(data, name, max_pixels=max_pixels).decode(), damage
    except BadImage as bad:
        is_truncated = "truncated" in bad.reason.lower() or "truncated" in damage
        return None, {"truncated" if is_truncated else "undecodable": bad.reason}


def _check_grey(pixels: Pixels) -> dict[str, str]:
    for some in (pixels[::_GREY_STRIDE, ::_GREY_STRIDE], pixels):
        if (some[..., :1] != some[..., 1:]).any():
            return {}
    return {"greyscale": ""}


def _hash_pixels(pixels: Pixels) -> tuple[int, NDArray[np.uint8]]:
    """A difference hash of 64 bits, and a thumbnail of 4x4 pixels.

    The hash has a bit for each of 8x8 cells: whether the image is lighter to the right of it.
    """
    small = resize(pixels, 32, 36)
    grey = cv2.resize(cv2.cvtColor(small, cv2.COLOR_RGB2GRAY), (9, 8), interpolation=cv2.INTER_AREA)
    bits = np.packbits(grey[:, 1:] > grey[:, :-1])
    thumbnail = resize(small, _THUMBNAIL_EDGE, _THUMBNAIL_EDGE)
    return int.from_bytes(bits.tobytes(), "big"), thumbnail.reshape(-1)


def compare_pairs(pairs: list[tuple[ImageKey, ImageKey]]) -> list[bool]:
    """Whether each pair of similar hashes is one image, compressed or sized differently."""
    found = []
    for left, right in ((_read_small(first), _read_small(second)) for first, second in pairs):
        distance = float(np.sqrt(np.square(left - right).mean()))
        contrast = max(_MIN_CONTRAST, min(float(left.std()), float(right.std())))
        found.append(distance <= _MAX_DISTANCE * contrast)
    return found


@lru_cache(maxsize=256)
def _read_small(key: ImageKey) -> NDArray[np.float32]:
    split, number = key
    pixels = open_once(split).read(number)
    return resize(pixels, _COMPARED_EDGE, _COMPARED_EDGE).astype(np.float32)
