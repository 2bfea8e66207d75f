"""What one image shows of itself when it is looked at closely, as a worker process does it."""

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np
from numpy.typing import NDArray

from phalanx.data.convert.image import form_of
from phalanx.data.convert.origin import Task, open_once, own_name
from phalanx.data.convert.sample import look_at
from phalanx.data.formats.decode import (
    JPEG_START,
    BadImage,
    Pixels,
    decode,
    read_image_shape,
    refuse_bomb,
    resize,
)
from phalanx.data.formats.index import (
    DAMAGED_SHARD,
    NO_LABEL,
    TRUNCATED_SHARD,
    WRONG_LABEL,
    IndexedSource,
)
from phalanx.data.formats.packed import CHANGED_AFTER_PACKING, PackedSource

if TYPE_CHECKING:
    from phalanx.data.formats.sources import Source

try:
    import simplejpeg
except ImportError:  # damage that Pillow overlooks stays unseen
    simplejpeg = None

OUT_OF_RANGE = "label out of range"
KINDS = (
    "zero-size",
    "undecodable",
    "truncated",
    "wrong extension",
    "CMYK",
    "greyscale",
    OUT_OF_RANGE,
)
BIT = {kind: 1 << place for place, kind in enumerate(KINDS)}
_KIND_OF_FAULT = {  # what the index knows to be bad; undecodable where it is none of these
    TRUNCATED_SHARD: "truncated",
    DAMAGED_SHARD: "truncated",
    WRONG_LABEL: OUT_OF_RANGE,
    NO_LABEL: OUT_OF_RANGE,
}
_COMPLAINTS = ("Premature end", "Corrupt JPEG data")  # how libjpeg tells of damage it got over
_CLOSE_UP = 32  # edge of the pictures that are compared
_CLOSE = 0.12  # their distance as a share of their contrast: strong JPEG compression gives as much
_LEAST_CONTRAST = 8.0  # of 255; below it all pictures are one grey
_COLOURS = 4 * 4 * 3  # bytes of a thumbnail that tells pictures of one outline apart
_SAMPLED = 16  # every so many pixels, to see quickly that a picture has colour


Key = tuple[str, Path, str, int]  # an image: its set, folder, split and number


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was found out about a few images, in arrays of one row each."""

    numbers: NDArray[np.int64]
    flags: NDArray[np.uint8]  # the bits of KINDS
    content: NDArray[np.uint8]  # [n, 32], the sha256 of what is stored
    lines: NDArray[np.uint8]  # [n, 32], the sha256 of name, content and label
    outlines: NDArray[np.uint64]  # where the picture gets lighter from left to right
    colours: NDArray[np.uint8]  # [n, COLOURS]
    whys: dict[tuple[int, str], str] = field(default_factory=dict)  # by number and kind


def empty_facts(count: int) -> Facts:
    """Room for so many images."""
    return Facts(
        numbers=np.zeros(count, np.int64),
        flags=np.zeros(count, np.uint8),
        content=np.zeros((count, 32), np.uint8),
        lines=np.zeros((count, 32), np.uint8),
        outlines=np.zeros(count, np.uint64),
        colours=np.zeros((count, _COLOURS), np.uint8),
    )


def examine_task(task: Task) -> Facts:
    """The facts of each image of a task."""
    source = open_once(task.data, task.folder, task.split)
    facts = empty_facts(len(task.numbers))
    facts.numbers[:] = task.numbers
    for row, number in enumerate(task.numbers):
        data, pixels, found = look_closely(source, number)
        facts.flags[row] = sum(BIT[kind] for kind in found)
        facts.whys.update({(number, kind): why for kind, why in found.items() if why})
        digest = hashlib.sha256(data)
        facts.content[row] = np.frombuffer(digest.digest(), np.uint8)
        name = own_name(source, number).rpartition("/")[2]
        line = f"{task.split}\n{name}\n{digest.hexdigest()}\n{source.labels[number]}\n"
        hashed = hashlib.sha256(line.encode(errors="surrogateescape")).digest()
        facts.lines[row] = np.frombuffer(hashed, np.uint8)
        if pixels is not None:
            facts.outlines[row], facts.colours[row] = _summarise(pixels)
    return facts


def look_closely(source: "Source", number: int) -> tuple[bytes, Pixels | None, dict[str, str]]:
    """What is stored of an image, its pixels, and all that is notable with a word on why."""
    name = source.name(number)
    encoded = getattr(source, "encoded", None)
    try:
        if isinstance(source, PackedSource) and not source.is_intact(number):
            raise BadImage(name, CHANGED_AFTER_PACKING)  # though a decoder may get over it
        if encoded is None or getattr(source, "raw", False):
            pixels = source.read(number)
            return b"%d %d\n" % pixels.shape[:2] + pixels.tobytes(), pixels, _grey(pixels)
        data = encoded(number)
    except BadImage as bad:
        fault = source.fault(number) if isinstance(source, IndexedSource) else 0
        return b"", None, {_KIND_OF_FAULT.get(fault, "undecodable"): bad.why}
    found = _judge_header(data, name if _is_file(source) else "")
    if "zero-size" in found:
        return data, None, found
    image, damage = _decode_strictly(data, name)
    return data, image, found | damage | ({} if image is None else _grey(image))


def _is_file(source: "Source") -> bool:
    """Whether images are files with an ending to go by."""
    return isinstance(source, IndexedSource) and source.index.names is None


def _judge_header(data: bytes, name: str) -> dict[str, str]:
    """What an image's first bytes tell: that there are none, another form, other inks."""
    if not data:
        return {"zero-size": "the file is empty"}
    looks, promised = look_at(data), form_of(name)
    found = {}
    if promised and looks.form and looks.form != promised:
        found["wrong extension"] = f"is a {looks.form} inside"
    if looks.mode == "CMYK":
        found["CMYK"] = "four inks, not red, green and blue"
    return found


def _decode_strictly(data: bytes, name: str) -> tuple[Pixels | None, dict[str, str]]:
    """The pixels, and what is damaged; such damage, too, that a decoder gets over."""
    damage: dict[str, str] = {}
    if simplejpeg is not None and data.startswith(JPEG_START):
        try:
            refuse_bomb(*read_image_shape(data, name), name)
            return simplejpeg.decode_jpeg(data), damage
        except BadImage as bad:
            return None, {"undecodable": bad.why}
        except ValueError as complaint:
            if str(complaint).startswith(_COMPLAINTS):
                damage["truncated"] = str(complaint)
    try:
        return decode(data, name), damage
    except BadImage as bad:
        short = "truncated" in bad.why.lower() or "truncated" in damage
        return None, {"truncated" if short else "undecodable": bad.why}


def _grey(pixels: Pixels) -> dict[str, str]:
    for part in (pixels[::_SAMPLED, ::_SAMPLED], pixels):
        if (part[..., :1] != part[..., 1:]).any():
            return {}
    return {"greyscale": ""}


def _summarise(pixels: Pixels) -> tuple[int, NDArray[np.uint8]]:
    """A 64-bit hash of the outline, and a thumbnail of 4x4 pixels.

    The hash has a bit for each of 8x8 places: whether the picture is lighter to the right of it.
    """
    small = resize(pixels, 32, 36)
    grey = cv2.resize(cv2.cvtColor(small, cv2.COLOR_RGB2GRAY), (9, 8), interpolation=cv2.INTER_AREA)
    bits = np.packbits(grey[:, 1:] > grey[:, :-1])
    return int.from_bytes(bits.tobytes(), "big"), resize(small, 4, 4).reshape(-1)


def compare_pairs(pairs: list[tuple[Key, Key]]) -> list[bool]:
    """Whether each pair, alike from afar, is one picture, compressed or sized differently."""
    return [_are_close(_close_up(left), _close_up(right)) for left, right in pairs]


def _are_close(left: NDArray[np.float32], right: NDArray[np.float32]) -> bool:
    """Whether two pictures differ little, measured by their contrast."""
    distance = float(np.sqrt(np.square(left - right).mean()))
    return distance <= _CLOSE * max(_LEAST_CONTRAST, min(float(left.std()), float(right.std())))


@lru_cache(maxsize=256)
def _close_up(key: Key) -> NDArray[np.float32]:
    data, folder, split, number = key
    pixels = open_once(data, folder, split).read(number)
    return resize(pixels, _CLOSE_UP, _CLOSE_UP).astype(np.float32)
