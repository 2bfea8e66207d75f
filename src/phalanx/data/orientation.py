"""The EXIF orientation of photographs, and turning their pixels upright.

The tag is searched for in the bytes, which takes a few microseconds; Pillow takes a hundred times
as long to open a file. Anything truncated, out of range or invalid counts as upright.
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
_MAX_PARTS = 10_000  # segments or chunks of a file that are read: more is an attack
_JPEG_PICTURE = (0xD9, 0xDA)  # end of image, start of scan: no metadata follows
_JPEG_APP1 = 0xE1
_PNG_START = b"\x89PNG\r\n\x1a\n"
_FLIP_CODES = {(True, False): 0, (False, True): 1, (True, True): -1}  # OpenCV's


class _Turn(NamedTuple):
    """How a stored image is turned upright: rows and columns are swapped first, then mirrored."""

    transpose: bool
    flip_rows: bool  # top and bottom are swapped
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


# --- reading the orientation ---


def read_exif_orientation(exif: bytes) -> int:
    """The orientation in a block of EXIF, 1 to 8; 1 if it has no valid one."""
    place = len(_EXIF_PREFIX) if exif.startswith(_EXIF_PREFIX) else 0
    return _read_orientation(exif, place, len(exif))


def _read_orientation(data: bytes, begin: int, end: int) -> int:
    """The orientation in the first directory of the TIFF structure between two offsets."""
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
        if head[1] == 0xFF:  # a fill byte
            place += 1
            continue
        length = head[2] << 8 | head[3]
        if head[1] == _JPEG_APP1 and head[4:] == _EXIF_PREFIX:
            return _read_orientation(data, place + 10, min(place + 2 + length, len(data)))
        place += 2 + length
    return UPRIGHT


def find_png_orientation(data: bytes) -> int:
    """The orientation of a PNG, 1 to 8, from its eXIf chunk, before or after the image data."""
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
    """The pixels [height, width, 3], turned upright."""
    if orientation == UPRIGHT:
        return pixels
    turn = TURNS[orientation]
    turned = cv2.transpose(pixels) if turn.transpose else pixels
    if turn.flip_rows or turn.flip_columns:
        turned = cv2.flip(turned, _FLIP_CODES[turn.flip_rows, turn.flip_columns])
    return turned.astype(np.uint8, copy=False)


def turn_shape(shape: tuple[int, int], orientation: int) -> tuple[int, int]:
    """Height and width of the upright image from those stored, or the other way round."""
    height, width = shape
    return (width, height) if TURNS[orientation].transpose else (height, width)


def turn_box(
    box: tuple[float, float, float, float], orientation: int
) -> tuple[float, float, float, float]:
    """A box (left, top, right, bottom, as shares) of the stored image, in the upright image."""
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
    """How many rows of the stored image, from its first, contain a crop of the upright image.

    crop: top, left, height and width; shape: height and width; both of the upright image.
    """
    top, left, tall, wide = crop
    turn = TURNS[orientation]
    begin, length, side = (left, wide, shape[1]) if turn.transpose else (top, tall, shape[0])
    mirrored = turn.flip_columns if turn.transpose else turn.flip_rows
    return side - begin if mirrored else begin + length
