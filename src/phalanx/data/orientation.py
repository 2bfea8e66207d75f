"""Which way up a photograph is to be shown, as EXIF says it, and how its pixels get there.

The tag is looked for in the bytes alone: a few microseconds, where Pillow takes a hundred times
that to open a file. Whatever is cut off, out of range or nonsense counts as upright.
"""

import struct
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

UPRIGHT = 1  # the orientation of an image that is shown as it is stored
_TAG = 0x0112
_BYTE_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
_VALUE_FORMATS = {1: "B", 3: "H", 4: "I"}  # by the type of an entry: 8, 16 or 32 bits
_ENTRY_BYTES, _HEAD_BYTES = 12, 8
_EXIF_PREFIX = b"Exif\0\0"
_MAX_PARTS = 10_000  # segments or chunks of a file that are looked at: more is an attack
_JPEG_PICTURE = (0xD9, 0xDA)  # its end, or its first scan: no notes come behind
_JPEG_APP1 = 0xE1
_PNG_START = b"\x89PNG\r\n\x1a\n"
_FLIP_CODES = {(True, False): 0, (False, True): 1, (True, True): -1}  # OpenCV's


class _Turn(NamedTuple):
    """What brings a stored image upright: rows and columns exchanged first, then mirrored."""

    transpose: bool
    flip_rows: bool  # top and bottom are exchanged
    flip_columns: bool


TURNS = {
    1: _Turn(False, False, False),
    2: _Turn(False, False, True),
    3: _Turn(False, True, True),
    4: _Turn(False, True, False),
    5: _Turn(True, False, False),
    6: _Turn(True, False, True),
    7: _Turn(True, True, True),
    8: _Turn(True, True, False),
}


# --- finding it ---


def read_exif_orientation(exif: bytes) -> int:
    """The orientation in a block of EXIF, 1 to 8; 1 where it has none that makes sense."""
    place = len(_EXIF_PREFIX) if exif.startswith(_EXIF_PREFIX) else 0
    return _read_orientation(exif, place, len(exif))


def _read_orientation(data: bytes, begin: int, end: int) -> int:
    """The orientation in the first directory of the TIFF structure between two places."""
    order = _BYTE_ORDERS.get(data[begin : begin + 4])
    if order is None or end - begin < _HEAD_BYTES + 2:
        return UPRIGHT
    directory = int(struct.unpack_from(f"{order}I", data, begin + 4)[0])
    if not _HEAD_BYTES <= directory <= end - begin - 2:
        return UPRIGHT
    count = struct.unpack_from(f"{order}H", data, begin + directory)[0]
    first, found = begin + directory + 2, UPRIGHT
    last = min(first + _ENTRY_BYTES * count, end - _ENTRY_BYTES + 1)
    for place in range(first, last, _ENTRY_BYTES):
        tag, kind, values = struct.unpack_from(f"{order}HHI", data, place)
        if tag == _TAG and values == 1 and kind in _VALUE_FORMATS:
            value = struct.unpack_from(f"{order}{_VALUE_FORMATS[kind]}", data, place + 8)[0]
            found = value if value in TURNS else UPRIGHT
    return found


def find_jpeg_orientation(data: bytes) -> int:
    """The orientation of a JPEG, 1 to 8, from the segments before its picture."""
    place = 2
    for _ in range(_MAX_PARTS):
        head = data[place : place + 10]
        if len(head) < 10 or head[0] != 0xFF or head[1] in _JPEG_PICTURE:
            return UPRIGHT
        if head[1] == 0xFF:  # a byte that only fills
            place += 1
            continue
        length = head[2] << 8 | head[3]
        if head[1] == _JPEG_APP1 and head[4:] == _EXIF_PREFIX:
            return _read_orientation(data, place + 10, min(place + 2 + length, len(data)))
        place += 2 + length
    return UPRIGHT


def find_png_orientation(data: bytes) -> int:
    """The orientation of a PNG, 1 to 8, from its eXIf chunk, before the picture or behind it."""
    place = len(_PNG_START)
    for _ in range(_MAX_PARTS):
        head = data[place : place + 8]
        if len(head) < 8:
            break
        length = int.from_bytes(head[:4])
        if head[4:] == b"eXIf":
            return _read_orientation(data, place + 8, min(place + 8 + length, len(data)))
        place += 12 + length
    return UPRIGHT


# --- turning ---


def turn_pixels(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """The pixels [height, width, 3] as they are to be shown."""
    if orientation == UPRIGHT:
        return pixels
    turn = TURNS[orientation]
    turned = cv2.transpose(pixels) if turn.transpose else pixels
    if turn.flip_rows or turn.flip_columns:
        turned = cv2.flip(turned, _FLIP_CODES[turn.flip_rows, turn.flip_columns])
    return turned.astype(np.uint8, copy=False)


def turn_shape(shape: tuple[int, int], orientation: int) -> tuple[int, int]:
    """Height and width as they are shown, of those that are stored; and the other way round."""
    height, width = shape
    return (width, height) if TURNS[orientation].transpose else (height, width)


def turn_box(
    box: tuple[float, float, float, float], orientation: int
) -> tuple[float, float, float, float]:
    """A box of the stored image (left, top, right, bottom, as shares) in the one that is shown."""
    left, top, right, bottom = box
    turn = TURNS[orientation]
    if turn.transpose:
        left, top, right, bottom = top, left, bottom, right
    if turn.flip_rows:
        top, bottom = 1 - bottom, 1 - top
    if turn.flip_columns:
        left, right = 1 - right, 1 - left
    return left, top, right, bottom


def count_stored_rows(
    crop: tuple[int, int, int, int], shape: tuple[int, int], orientation: int
) -> int:
    """How many rows of the stored image, from its first, hold a crop of the one that is shown.

    crop: top, left, height and width; shape: height and width, both as shown.
    """
    top, left, tall, wide = crop
    turn = TURNS[orientation]
    begin, length, side = (left, wide, shape[1]) if turn.transpose else (top, tall, shape[0])
    mirrored = turn.flip_columns if turn.transpose else turn.flip_rows
    return side - begin if mirrored else begin + length
