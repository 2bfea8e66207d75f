"""Every image format by real files: the same set for training, verify, build and predict."""

import io
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from phalanx.data.convert.build import BuildOptions, build_dataset
from phalanx.data.convert.source_splits import find_source_splits
from phalanx.data.formats.decode import BadImage, EncodedImage
from phalanx.data.formats.folder import open_folder
from phalanx.data.formats.image_file import ReadLimits
from phalanx.data.layouts.image_files import find_image_suffixes
from phalanx.data.loading.image_inputs import collect_images
from phalanx.data.pillow_image import read_image_header
from phalanx.data.verify.verify import verify_dataset
from small_photos import photo

KINDS = {  # suffix to what Pillow calls it, and the options that lose nothing
    "png": ("PNG", {}),
    "webp": ("WEBP", {"lossless": True}),
    "bmp": ("BMP", {}),
    "tif": ("TIFF", {"compression": "tiff_lzw"}),
    "tiff": ("TIFF", {}),
    "gif": ("GIF", {}),
    "jpg": ("JPEG", {}),
    "jpeg": ("JPEG", {"progressive": True}),
    "jfif": ("JPEG", {}),
    "avif": ("AVIF", {}),
}
EXACT = ("png", "webp", "bmp", "tif", "tiff")


def encode(image, suffix, **more):
    kind, options = KINDS[suffix]
    file = io.BytesIO()
    image.save(file, kind, **options | more)
    return file.getvalue()


@pytest.fixture
def mixed(tmp_path):
    """A file of every format in two classes and two splits, some suffixes in capitals."""
    for place, split in enumerate(("train", "val")):
        for label, name in enumerate(("a", "b")):
            folder = tmp_path / "mixed" / split / name
            folder.mkdir(parents=True)
            for number, suffix in enumerate(KINDS):
                picture = photo(100 * place + 20 * label + number)
                ending = suffix.upper() if number % 2 else suffix
                (folder / f"{number}.{ending}").write_bytes(encode(picture, suffix))
    return tmp_path / "mixed"


@pytest.mark.parametrize("suffix", KINDS)
def test_the_pixels_are_those_of_pillow(suffix):
    data = encode(photo(1), suffix)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    pixels = EncodedImage(data, "a").decode()
    assert pixels.shape == (72, 96, 3)
    assert np.abs(pixels.astype(int) - expected).max() <= 2 * (KINDS[suffix][0] == "JPEG")
    if suffix in EXACT:
        assert np.array_equal(pixels, np.asarray(photo(1)))
    assert (
        f".{suffix}" in find_image_suffixes() and read_image_header(data).format == KINDS[suffix][0]
    )


def test_training_verify_build_and_predict_read_all_formats(mixed, tmp_path):
    source = open_folder(mixed, "train")
    assert len(source) == 2 * len(KINDS)
    assert len(collect_images(mixed / "train")) == 2 * len(KINDS)
    result = verify_dataset(mixed, workers=1)
    assert result.images == {"train": 20, "valid": 20} and result.wrong == 0, result.totals
    for to in ("folder", "tar", "parquet"):  # byte for byte
        build_dataset(mixed, tmp_path / to, BuildOptions(to=to), workers=1)
        copied = find_source_splits(tmp_path / to)[0].source
        assert [copied.read_encoded(n) for n in range(20)] == [
            source.read_encoded(n) for n in range(20)
        ]
    build_dataset(mixed, tmp_path / "raw", BuildOptions(to="packed", raw=True), workers=1)
    packed = find_source_splits(tmp_path / "raw")[0].source
    assert all(np.array_equal(packed.read(n), source.read(n)) for n in range(20))
    build_dataset(mixed, tmp_path / "jpeg", BuildOptions(to="packed", short_side=32), workers=1)
    shrunk = find_source_splits(tmp_path / "jpeg")[0].source
    assert {read_image_header(shrunk.read_encoded(n)).format for n in range(20)} == {"JPEG"}


@pytest.mark.parametrize("suffix", ["png", "webp", "bmp", "gif", "tiff", "avif", "jpg"])
def test_every_format_has_the_limits(tmp_path, suffix):
    data = encode(photo(1), suffix)
    with pytest.raises(BadImage, match="96x72 pixels, over the 6,911 of --max-pixels"):
        EncodedImage(data, "a", max_pixels=96 * 72 - 1).decode()
    with pytest.raises(BadImage, match="96x72 pixels, over the 6,911 of --max-pixels"):
        EncodedImage(data, "a", max_pixels=96 * 72 - 1)
    for name in ("a", "b"):
        (tmp_path / "train" / name).mkdir(parents=True)
        (tmp_path / "train" / name / f"x.{suffix}").write_bytes(data + bytes(2**20))
    source = open_folder(tmp_path, "train")
    source.limits = ReadLimits(max_file_mib=1)
    with pytest.raises(BadImage, match="over the 1 MiB of --max-file-mib"):
        source.read(0)


def test_sixteen_bits_keep_their_upper_eight(tmp_path):
    grey = (np.arange(48 * 64, dtype=np.uint16) * 21).reshape(48, 64)
    for suffix in ("png", "tiff"):
        pixels = EncodedImage(encode(Image.fromarray(grey), suffix), "a").decode()
        assert np.array_equal(pixels, np.repeat((grey >> 8).astype(np.uint8)[..., None], 3, 2))


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_thirty_two_bits_without_a_known_white_are_bad(dtype):
    values = np.linspace(-5, 2_000_000, 48 * 64).reshape(48, 64).astype(dtype)
    with pytest.raises(BadImage, match="32 bits per pixel without a known white; convert it to 8"):
        EncodedImage(encode(Image.fromarray(values), "tiff"), "a").decode()


@pytest.mark.parametrize("mode", ["P", "RGBA", "LA", "CMYK", "1", "L"])
def test_every_mode_of_a_tiff_becomes_rgb(mode):
    image = photo(2).convert(mode)
    assert np.array_equal(
        EncodedImage(encode(image, "tiff"), "a").decode(), np.asarray(image.convert("RGB"))
    )


def test_of_several_pictures_the_first_is_taken():
    first, others = photo(3), [photo(4), photo(5)]
    for suffix in ("gif", "tiff", "webp", "avif", "png"):
        several = encode(first, suffix, save_all=True, append_images=others)
        pixels = EncodedImage(several, "a").decode().astype(int)
        assert np.abs(pixels - np.asarray(first)).mean() < 12  # and not one of the others


def test_an_mpo_of_a_camera_is_a_jpeg():
    file = io.BytesIO()
    photo(6).save(file, "MPO", save_all=True, append_images=[photo(7)])
    header = read_image_header(file.getvalue())
    assert (header.format, header.shape) == ("JPEG", (72, 96))


def test_heic_without_its_extra_says_how_to_get_it():
    data = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(40)
    code = (
        "import sys; sys.modules['pillow_heif'] = None\n"
        "from phalanx.data.formats.decode import BadImage, EncodedImage\n"
        f"try: EncodedImage({data!r}, 'a.heic').decode()\nexcept BadImage as bad: print(bad)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == (
        "a.heic: HEIC needs pillow-heif, which is not installed; pip install 'phalanx[heic]'\n"
    )


@pytest.mark.parametrize("orientation", [1, 6])
def test_heic_is_read_with_its_extra(orientation):
    heif = pytest.importorskip("pillow_heif")
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    picture = heif.from_pillow(photo(8))
    picture.save(file, quality=95, exif=exif.tobytes())
    image = EncodedImage(file.getvalue(), "a.heic")
    shown = np.asarray(photo(8)).astype(int)
    shown = np.rot90(shown, -1) if orientation == 6 else shown
    assert (image.height, image.width) == shown.shape[:2]
    assert np.abs(image.decode() - shown).mean() < 5
    header = read_image_header(file.getvalue())
    assert (header.format, header.orientation) == ("HEIF", orientation)
    with pytest.raises(BadImage, match="over the 10 of --max-pixels"):
        EncodedImage(file.getvalue(), "a.heic", max_pixels=10).decode()


def test_a_damaged_tiff_is_bad_and_quiet(capfd):
    data = bytearray(encode(photo(9), "tif"))
    data[40:400] = bytes(360)
    with pytest.raises(BadImage):
        EncodedImage(bytes(data), "a.tif").decode()
    assert capfd.readouterr().err == ""
