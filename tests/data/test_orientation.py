"""EXIF orientation: found in the bytes, never wrong, and applied as Pillow applies it."""

import io
import struct
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from phalanx.data.formats.decode import EncodedImage
from phalanx.data.orientation import (
    TURNS,
    count_stored_rows,
    find_jpeg_orientation,
    find_png_orientation,
    read_exif_orientation,
    turn_box,
    turn_pixels,
    turn_shape,
)
from phalanx.data.pillow_image import read_image_header
from phalanx.data.transforms.transform import resized_crop

TAG = 0x0112
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8)).resize(
    (160, 120)
)


def make_exif(orientation):
    exif = Image.Exif()
    exif[0x010E] = "a harbour"  # another tag before it
    exif[TAG] = orientation
    exif[0x0131] = "a camera"
    return exif


@cache
def encode(kind="JPEG", orientation=1, **options):
    file = io.BytesIO()
    PICTURE.save(file, kind, exif=make_exif(orientation), **options)
    return file.getvalue()


def show(data):
    """What Pillow shows."""
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


@pytest.mark.parametrize("orientation", TURNS)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_every_orientation_is_shown_as_pillow_shows_it(kind, orientation):
    data = encode(kind, orientation)
    image, expected = EncodedImage(data, "a"), show(data)
    assert (image.height, image.width) == expected.shape[:2]
    most = 2 if kind == "JPEG" else 0  # simplejpeg rounds otherwise
    pixels = image.decode()
    assert np.abs(pixels.astype(int) - expected).max() <= most
    assert pixels.flags.c_contiguous
    assert read_image_header(data).orientation == orientation
    if kind != "TIFF":  # which Pillow itself turns
        stored = EncodedImage(data, "a", upright=False)
        assert (stored.height, stored.width) == (120, 160)
        assert stored.decode().shape == (120, 160, 3)


@pytest.mark.parametrize("orientation", TURNS)
def test_a_crop_is_of_the_upright_image_however_little_is_decoded(orientation):
    data = encode("JPEG", orientation, quality=95)
    image, whole = EncodedImage(data, "a"), EncodedImage(data, "a").decode()
    height, width = whole.shape[:2]
    for crop in [(0, 0, 32, 40), (height - 30, 0, 30, 20), (5, width - 24, 50, 24), (40, 60, 8, 9)]:
        top, left, tall, wide = crop
        part = image.decode_crop(crop, 1.0)[top : top + tall, left : left + wide]
        assert (part == whole[top : top + tall, left : left + wide]).all()
        # decoded at a half or a quarter: another rounding, the same place
        small, exact = resized_crop(image, crop, 8), resized_crop(whole, crop, 8)
        assert np.abs(small.astype(int) - exact).mean() < 6


def test_rows_below_a_crop_are_left_out_in_every_orientation():
    shape, crop = (120, 160), (10, 20, 30, 40)  # shown: rows 10 to 40, columns 20 to 60
    rows = {number: count_stored_rows(crop, shape, number) for number in TURNS}
    assert rows == {1: 40, 2: 40, 3: 110, 4: 110, 5: 60, 6: 140, 7: 140, 8: 60}


@pytest.mark.parametrize("orientation", TURNS)
def test_a_box_stays_on_its_object(orientation):
    stored = np.zeros((120, 160, 3), np.uint8)
    stored[12:36, 32:48] = 255  # left 0.2, top 0.1, right 0.3, bottom 0.3
    shown = turn_pixels(stored, orientation)
    assert shown.shape[:2] == turn_shape((120, 160), orientation)
    rows, columns = np.flatnonzero(shown.any((1, 2))), np.flatnonzero(shown.any((0, 2)))
    height, width = shown.shape[:2]
    place = (columns[0] / width, rows[0] / height, (columns[-1] + 1) / width)
    expected = (*place, (rows[-1] + 1) / height)
    assert turn_box((0.2, 0.1, 0.3, 0.3), orientation) == pytest.approx(expected)


def test_a_png_may_tell_its_orientation_behind_its_picture():
    data = encode("PNG", 6)
    begin = data.index(b"eXIf") - 4
    end = begin + 12 + int.from_bytes(data[begin : begin + 4])
    moved = data[:begin] + data[end:-12] + data[begin:end] + data[-12:]
    assert find_png_orientation(moved) == 6
    assert (EncodedImage(moved, "a").decode() == EncodedImage(data, "a").decode()).all()


# --- hostile EXIF ---


def write_entries(order, entries, *, offset=8):
    """EXIF of these entries: tag, type, number of values and the four bytes of the value."""
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", offset)
    body = struct.pack(f"{order}H", len(entries))
    for tag, kind, count, value in entries:
        body += struct.pack(f"{order}HHI", tag, kind, count) + value
    return head + bytes(offset - 8) + body + bytes(4)


def read_plainly(exif):
    """The orientation by a second reading of the format: slow, with nothing shared."""
    order = {b"II*\0": "little", b"MM\0*": "big"}.get(bytes(exif[:4]))
    if order is None:
        return 1

    def number(at, size):
        return int.from_bytes(exif[at : at + size], order)

    start, found = number(4, 4), 1
    if len(exif) < 10 or start < 8 or start + 2 > len(exif):
        return 1
    entries = [exif[at : at + 12] for at in range(start + 2, len(exif), 12)][: number(start, 2)]
    for entry in entries:
        if len(entry) == 12 and int.from_bytes(entry[:2], order) == TAG:
            kind, count = int.from_bytes(entry[2:4], order), int.from_bytes(entry[4:8], order)
            size = {1: 1, 3: 2, 4: 4}.get(kind)
            if size and count == 1:
                value = int.from_bytes(entry[8 : 8 + size], order)
                found = value if 1 <= value <= 8 else 1
    return found


ENTRY = st.tuples(
    st.one_of(st.just(TAG), st.integers(0, 0xFFFF)),
    st.one_of(st.sampled_from([1, 3, 4]), st.integers(0, 0xFFFF)),
    st.one_of(st.just(1), st.integers(0, 2**32 - 1)),
    st.one_of(
        st.integers(0, 9).map(lambda n: struct.pack("<HH", n, 0)),
        st.integers(0, 9).map(lambda n: struct.pack(">HH", n, 0)),
        st.binary(min_size=4, max_size=4),
    ),
)


@st.composite
def hostile_exif(draw):
    order = draw(st.sampled_from("<>"))
    entries = draw(st.lists(ENTRY, max_size=5))
    data = bytearray(write_entries(order, entries, offset=draw(st.integers(8, 20))))
    for at, value in draw(
        st.lists(st.tuples(st.integers(0, len(data) - 1), st.integers(0, 255)), max_size=3)
    ):
        data[at] = value
    return bytes(data[: draw(st.integers(0, len(data)))])


@settings(max_examples=100, deadline=None)
@given(hostile_exif())
def test_no_exif_raises_or_gives_a_wrong_tag(exif):
    expected = read_plainly(exif)
    assert read_exif_orientation(exif) == expected
    assert read_exif_orientation(b"Exif\0\0" + exif) == expected
    jpeg, png = encode_around(exif)
    assert find_jpeg_orientation(jpeg) == expected
    assert find_png_orientation(png) == expected


def encode_around(exif):
    """A JPEG and a PNG with that block of EXIF, behind other segments."""
    segment = b"\xff\xe1" + struct.pack(">H", len(exif) + 8) + b"Exif\0\0" + exif
    jpeg = b"\xff\xd8\xff\xe0\0\x08JFIF\0\0\xff\xff" + segment + b"\xff\xda\0\x08" + bytes(16)
    chunk = struct.pack(">I", len(exif)) + b"eXIf" + exif + bytes(4)
    png = b"\x89PNG\r\n\x1a\n" + b"\0\0\0\x02IDAT" + bytes(6) + chunk + b"\0\0\0\0IEND" + bytes(4)
    return jpeg, png


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_damage_to_a_photo_raises_where_its_tag_is_looked_for(data):
    photo = bytearray(encode(data.draw(st.sampled_from(["JPEG", "PNG"])), 6)[:1000])
    for at, value in data.draw(
        st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=4)
    ):
        photo[at] = value
    cut = bytes(photo[: data.draw(st.integers(0, len(photo)))])
    assert find_jpeg_orientation(cut) in TURNS and find_png_orientation(cut) in TURNS


def test_a_file_of_nothing_but_segments_is_given_up():
    assert find_jpeg_orientation(b"\xff\xd8" + b"\xff" * 50_000_000) == 1
    assert find_jpeg_orientation(b"\xff\xd8" + b"\xff\xe2\0\0" * 1_000_000) == 1
    assert find_png_orientation(b"\x89PNG\r\n\x1a\n" + b"\0\0\0\0tEXt1234" * 1_000_000) == 1
