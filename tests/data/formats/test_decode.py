import io
import math
import tracemalloc
from contextlib import nullcontext

import cv2
import numpy as np
import pytest
import simplejpeg
from PIL import Image

from phalanx.data.formats.decode import (
    BadImage,
    EncodedImage,
    decode_top,
    find_height_field,
    mirror,
    resize,
    resize_crop,
)
from phalanx.data.pillow_image import read_image_header
from phalanx.data.transforms.transform import resized_crop

PICTURE = np.asarray(
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8)).resize((80, 60))
)


def encoded(image=None, kind="JPEG", **options):
    buffer = io.BytesIO()
    (image or Image.fromarray(PICTURE)).save(buffer, kind, **options)
    return buffer.getvalue()


def test_png_comes_back_exactly():
    assert (EncodedImage(encoded(kind="PNG"), "a.png").decode() == PICTURE).all()


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"quality": 30}])
def test_jpeg_is_what_pillow_reads(options):
    data = encoded(**options)
    image = EncodedImage(data, "a.jpg").decode()
    expected = np.asarray(Image.open(io.BytesIO(data)))
    assert image.shape == (60, 80, 3) and image.dtype == np.uint8
    assert np.abs(image.astype(int) - expected).max() <= 2


def test_jpeg_can_do_without_simplejpeg(monkeypatch):
    data = encoded()
    fast = EncodedImage(data, "a.jpg").decode()
    monkeypatch.setattr("phalanx.data.formats.decode.simplejpeg", None)
    assert np.abs(EncodedImage(data, "a.jpg").decode().astype(int) - fast).max() <= 2


@pytest.mark.parametrize("mode", ["L", "1", "LA", "P", "RGBA", "I;16"])
def test_every_kind_of_png_becomes_rgb(mode):
    grey = Image.fromarray(PICTURE).convert("L")
    if mode == "I;16":
        image = Image.fromarray(np.asarray(grey).astype(np.uint16) << 8)
    else:
        image = grey.convert(mode)
    result = EncodedImage(encoded(image, "PNG"), "a.png").decode()
    expected = grey.convert("1") if mode == "1" else grey
    assert (result == np.asarray(expected.convert("L"))[:, :, None]).all()


def test_a_transparent_palette_becomes_rgb_without_a_warning():
    image = Image.fromarray(PICTURE).quantize(16)
    data = encoded(image, "PNG", transparency=bytes(range(16)))
    assert (EncodedImage(data, "a.png").decode() == np.asarray(image.convert("RGB"))).all()


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_grey_and_cmyk_jpeg_become_rgb(mode):
    image = EncodedImage(encoded(Image.fromarray(PICTURE).convert(mode)), "a.jpg").decode()
    expected = np.asarray(Image.fromarray(PICTURE).convert(mode).convert("RGB"))
    assert image.shape == (60, 80, 3)
    assert np.abs(image.astype(int) - expected).mean() < 5


def test_a_jpeg_with_a_colour_for_four_rows_is_read():
    square = np.ascontiguousarray(PICTURE[:32, :32])
    data = bytearray(simplejpeg.encode_jpeg(square, colorsubsampling="411"))
    data[data.index(b"\xff\xc0") + 11] = 0x14  # 4:4:1, for which simplejpeg's header has no name
    expected = np.asarray(Image.open(io.BytesIO(data)))
    image = EncodedImage(bytes(data), "a.jpg")
    assert (image.height, image.width) == (32, 32)
    for pixels in (image.decode(), image.decode_crop((0, 0, 8, 32), 1.0)):
        assert np.abs(pixels[:8].astype(int) - expected[:8]).max() <= 2


def test_orientation_can_be_ignored():
    exif = Image.Exif()
    exif[0x0112] = 6
    assert EncodedImage(encoded(exif=exif), "a.jpg", upright=False).decode().shape == (60, 80, 3)


def test_stray_bytes_in_a_jpeg_are_forgiven():
    data = encoded()
    assert (
        EncodedImage(data[:-2] + b"\0\0\0" + data[-2:], "a.jpg").decode()
        == EncodedImage(data, "a.jpg").decode()
    ).all()


@pytest.mark.parametrize(("kind", "end"), [("JPEG", 1), ("PNG", 30)])  # PNG ends in checksums
def test_a_truncated_file_is_bad_wherever_it_was_cut(kind, end):
    data = encoded(kind=kind)
    whole = len(data) - end
    for cut_at in [1, 2, 3, 10, 30, *range(100, whole, len(data) // 12), whole]:
        with pytest.raises(BadImage, match=r"cats/a: ."):
            EncodedImage(data[:cut_at], "cats/a").decode()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "empty"),
        (b"hello", "not a JPEG, PNG"),
        (b"\xff\xd8" + b"junk" * 50, "."),
        (b"\x89PNG\r\n\x1a\n" + b"junk" * 50, "."),
    ],
)
def test_what_is_no_image_is_bad(data, why):
    with pytest.raises(BadImage, match=f"a.jpg: .*{why}"):
        EncodedImage(data, "a.jpg").decode()


def test_shrinking_averages():
    image = np.random.default_rng(0).integers(0, 256, (64, 60, 3), np.uint8)
    blocks = image.reshape(16, 4, 20, 3, 3).mean(axis=(1, 3))
    assert np.abs(resize(image, 16, 20) - blocks).max() <= 1


def test_shrinking_one_way_and_growing_the_other_still_averages():
    stripes = np.zeros((8, 64, 3), np.uint8)
    stripes[:, ::4] = 200
    assert resize(stripes, 32, 16).shape == (32, 16, 3)
    assert (resize(stripes, 32, 16) == 50).all()


def test_growing_interpolates_and_the_same_size_is_the_same():
    ramp = np.tile(np.array([0, 200], np.uint8)[None, :, None], (2, 1, 3))
    assert resize(ramp, 8, 8)[0, :, 0].tolist() == [0, 0, 25, 75, 125, 175, 200, 200]
    assert (resize(PICTURE, 60, 80) == PICTURE).all()


@pytest.mark.parametrize("sides", [(70, 70), (96, 64), (64, 90), (113, 128), (60, 128)])
def test_a_crop_shrinks_as_by_pillow(sides):
    noise = np.random.default_rng(3).integers(0, 256, (*sides, 3), np.uint8)
    grainy = cv2.addWeighted(cv2.GaussianBlur(noise, (0, 0), 2), 0.8, noise, 0.2, 0)
    shrunk = resize_crop(grainy, 64, 64)
    pillow = np.asarray(Image.fromarray(grainy).resize((64, 64), Image.Resampling.BILINEAR))
    apart, averaged = (
        np.abs(i.astype(int) - pillow).mean() for i in (shrunk, resize(grainy, 64, 64))
    )
    assert shrunk.shape == (64, 64, 3) and apart < min(2, 2 * averaged + 0.5)


def test_fine_stripes_of_a_crop_become_grey():
    stripes = np.zeros((100, 100, 3), np.uint8)
    stripes[:, ::2] = 200
    plain = cv2.resize(stripes, (64, 64), interpolation=cv2.INTER_LINEAR)
    assert resize_crop(stripes, 64, 64).std() < 0.6 * plain.std()
    assert resize_crop(stripes, 64, 64).mean() == pytest.approx(100, abs=1)


@pytest.mark.parametrize("sides", [(64, 64), (20, 60), (300, 64), (129, 60)])
def test_other_crops_are_resized_as_images_are(sides):
    image = np.random.default_rng(0).integers(0, 256, (*sides, 3), np.uint8)
    assert (resize_crop(image, 64, 64) == resize(image, 64, 64)).all()


@pytest.mark.parametrize("sides", [(70, 40), (100, 128), (128, 128)])
def test_a_plain_crop_stays_plain(sides):
    assert (resize_crop(np.full((*sides, 3), 77, np.uint8), 64, 64) == 77).all()


def test_views_can_be_resized_and_mirrored():
    view = PICTURE[10:50, 5:70]
    assert (resize(view, 20, 20) == resize(view.copy(), 20, 20)).all()
    assert (resize_crop(view, 20, 20) == resize_crop(view.copy(), 20, 20)).all()
    assert (mirror(view) == view[:, ::-1]).all()


def test_one_thread_works_on_an_image():
    assert cv2.getNumThreads() == 1


LARGE = Image.fromarray(PICTURE).resize((203, 301))


def decode_scaled(data, min_shape):
    """A whole JPEG at the smallest scale that is enough."""
    height, width = min_shape or (0, 0)
    factor = 2 if min_shape else 1
    return simplejpeg.decode_jpeg(data, min_height=height, min_width=width, min_factor=factor)


@pytest.mark.parametrize("min_shape", [None, (150, 101), (100, 60), (70, 40), (37, 25)])
@pytest.mark.parametrize("rows", [1, 40, 97, 180, 240])
@pytest.mark.parametrize("kind", ["4:4:4", "4:2:2", "4:2:0", "4:1:1", "grey"])
def test_the_top_of_a_jpeg_is_that_of_the_whole(kind, rows, min_shape):
    colours = {"grey": {}}.get(kind, {"subsampling": kind})
    data = encoded(LARGE.convert("L") if kind == "grey" else LARGE, quality=90, **colours)
    whole, top = decode_scaled(data, min_shape), decode_top(data, rows, min_shape)
    assert top is not None and top.shape == whole.shape
    wanted = math.ceil(rows * len(whole) / 301) + 1
    assert (top[:wanted] == whole[:wanted]).all()


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_rows_below_the_top_are_not_decoded(mode):
    data = bytearray(encoded(LARGE.convert(mode), quality=90))
    top = decode_top(bytes(data), 100)
    data[-200:-100] = b"\x55" * 100  # damage near the end changes nothing above
    again = decode_top(bytes(data), 100)
    assert top is not None and again is not None
    assert (again[:100] == top[:100]).all()


@pytest.mark.parametrize(
    "data",
    [
        encoded(LARGE, progressive=True),
        encoded(LARGE, restart_marker_rows=2),
        encoded(LARGE.convert("CMYK")),
        encoded(LARGE, "PNG"),
        encoded(LARGE)[:2],
        b"\xff\xd8" + b"junk" * 50,
        b"",
    ],
    ids=["progressive", "restarts", "cmyk", "png", "two bytes", "junk", "empty"],
)
def test_what_cannot_be_left_early_is_decoded_whole(data):
    assert decode_top(data, 100) is None


@pytest.mark.parametrize("options", [{"progressive": True}, {"restart_marker_rows": 2}])
def test_what_cannot_be_left_early_is_known_before_it_is_decoded(options):
    assert find_height_field(encoded(LARGE)) is not None
    assert find_height_field(encoded(LARGE, **options)) is None


def test_rows_near_the_end_are_decoded_with_the_whole():
    data = encoded(LARGE)
    assert decode_top(data, 296) is not None
    assert decode_top(data, 297) is None


@pytest.mark.parametrize("width", [3, 7, 8, 9])
@pytest.mark.parametrize("min_shape", [None, (40, 1)])
def test_a_narrow_image_has_the_same_top(width, min_shape):
    data = encoded(LARGE.resize((width, 301)))
    whole = decode_scaled(data, min_shape)
    top = decode_top(data, 100, min_shape)
    assert (top is None) == (width < 8)
    assert top is None or (top[: len(whole) // 3] == whole[: len(whole) // 3]).all()


def test_a_truncated_file_is_no_better_for_its_top():
    data = encoded(LARGE, quality=90)
    for cut_at in [1, 2, 3, 10, 30, *range(100, len(data) - 1, len(data) // 12), len(data) - 1]:
        assert decode_top(data[:cut_at], 20) is None
        with pytest.raises(BadImage, match=r"cats/a: ."):
            EncodedImage(data[:cut_at], "cats/a").decode_crop((0, 0, 20, 20), 1.0)


def test_an_end_amid_the_rows_that_are_wanted_is_noticed():
    data = encoded(LARGE, quality=90)
    broken = data[: len(data) // 3] + b"\xff\xd9" + data[len(data) // 3 :]
    assert decode_top(broken, 200) is None


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("has_simplejpeg", [True, False])
def test_an_image_of_too_many_pixels_is_bad_before_it_is_decoded(
    format, has_simplejpeg, monkeypatch
):
    if not has_simplejpeg:
        monkeypatch.setattr("phalanx.data.formats.decode.simplejpeg", None)
    data = encoded(LARGE, format)
    for limit, is_bad in ((203 * 301 - 1, True), (203 * 301, False)):
        with (
            pytest.raises(BadImage, match=r"^a: 203x301 pixels, over the 61,102 of --max-pixels")
            if is_bad
            else nullcontext()
        ):
            EncodedImage(data, "a", max_pixels=limit).decode()


def test_our_limit_stands_in_for_pillows_and_pillows_is_back_afterwards(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # it warns above, and refuses twice as many
    for size in ((15, 10), (30, 20)):
        data = encoded(LARGE.resize(size), "PNG")
        assert EncodedImage(data, "a").decode().shape[:2] == size[::-1]
        assert read_image_header(data).shape == size[::-1]
    assert Image.MAX_IMAGE_PIXELS == 100


def test_sixteen_bits_a_pixel_take_no_more_memory_than_colours_do():
    data = encoded(Image.fromarray(np.full((1000, 1000), 2**15, np.uint16)), "PNG")
    tracemalloc.start()
    assert (EncodedImage(data, "a").decode() == 128).all()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * 1000 * 1000


@pytest.mark.parametrize("part", [(0, 0, 60, 80), (30, 20, 100, 90), (200, 3, 101, 200)])
def test_a_crop_of_a_file_is_that_of_its_pixels(part):
    data = encoded(LARGE, quality=90)
    assert (
        resized_crop(EncodedImage(data, "a.jpg"), part, 64)
        == resized_crop(EncodedImage(data, "a.jpg").decode(), part, 64)
    ).all()


def test_a_crop_can_do_without_simplejpeg(monkeypatch):
    picture = EncodedImage(encoded(LARGE, quality=90), "a.jpg")
    fast = resized_crop(picture, (30, 20, 100, 90), 64)
    monkeypatch.setattr("phalanx.data.formats.decode.simplejpeg", None)
    assert np.abs(resized_crop(picture, (30, 20, 100, 90), 64).astype(int) - fast).max() <= 2
