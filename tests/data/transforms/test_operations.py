import colorsys
import itertools

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from phalanx.data.transforms import operations
from phalanx.data.transforms.operations import GREY, OPERATIONS, STANDARD_SPACE, WIDE_SPACE

RANDOM = np.random.default_rng(0)
NOISE = RANDOM.integers(0, 256, (40, 52, 3), np.uint8)
COARSE = Image.fromarray(RANDOM.integers(30, 220, (6, 7, 3), np.uint8))
SMOOTH = np.array(COARSE.resize((84, 72), Image.Resampling.BICUBIC))
PLAIN = np.full((20, 30, 3), (200, 40, 90), np.uint8)
GREYS = np.repeat(RANDOM.integers(0, 256, (24, 24, 1), np.uint8), 3, axis=2)
SMALL = [RANDOM.integers(0, 256, (*shape, 3), np.uint8) for shape in [(1, 1), (1, 7), (9, 2)]]
IMAGES = [NOISE, SMOOTH, PLAIN, GREYS, *SMALL]
FACTORS = [0, 0.1, 0.5, 1, 1.3, 1.9]


def furthest(ours, theirs):
    theirs = np.asarray(theirs)
    assert ours.dtype == np.uint8 and ours.shape == theirs.shape
    return np.abs(ours.astype(int) - theirs.astype(int)).max()


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("brightness", ImageEnhance.Brightness),
        ("contrast", ImageEnhance.Contrast),
        ("colour", ImageEnhance.Color),
        ("sharpness", ImageEnhance.Sharpness),
    ],
)
def test_factors_mean_what_they_mean_to_pillow(name, theirs, factor):
    for image in IMAGES:
        expected = theirs(Image.fromarray(image)).enhance(factor)
        assert furthest(getattr(operations, name)(image, factor), expected) <= 1


@pytest.mark.parametrize("name", ["brightness", "contrast", "colour", "sharpness"])
def test_a_factor_of_one_changes_nothing_and_others_something(name):
    for image in IMAGES:
        assert (getattr(operations, name)(image, 1.0) == image).all()
    assert furthest(getattr(operations, name)(NOISE, 0.3), NOISE) > 30


def test_posterize_keeps_upper_bits_as_pillow_does():
    for image, bits in itertools.product(IMAGES, range(1, 9)):
        expected = ImageOps.posterize(Image.fromarray(image), bits)
        assert furthest(operations.posterize(image, bits), expected) == 0
    assert (operations.posterize(NOISE, 0) == 0).all()


def test_solarize_inverts_from_the_threshold_on_as_pillow_does():
    for image, threshold in itertools.product(IMAGES, [0, 1, 100, 128, 255, 256]):
        expected = ImageOps.solarize(Image.fromarray(image), threshold)
        assert furthest(operations.solarize(image, threshold), expected) == 0


def test_autocontrast_stretches_each_channel_as_pillow_does():
    for image in IMAGES:
        expected = ImageOps.autocontrast(Image.fromarray(image))
        assert furthest(operations.autocontrast(image), expected) <= 1
    stretched = operations.autocontrast(SMOOTH)
    assert (stretched.min((0, 1)) == 0).all() and (stretched.max((0, 1)) == 255).all()
    assert (operations.autocontrast(PLAIN) == PLAIN).all()


def test_equalize_spreads_values_as_pillow_does():
    large = np.array(COARSE.resize((200, 150), Image.Resampling.BICUBIC))
    for image in [*IMAGES, large, large // 4]:
        expected = ImageOps.equalize(Image.fromarray(image))
        assert furthest(operations.equalize(image), expected) == 0
    assert (operations.equalize(large) != large).any()


def pillow_affine(image, matrix):
    return Image.fromarray(image).transform(
        image.shape[1::-1],
        Image.Transform.AFFINE,
        matrix,
        Image.Resampling.BILINEAR,
        fillcolor=GREY,
    )


AFFINE = {
    "shear_x": lambda amount: (1, amount, 0, 0, 1, 0),
    "shear_y": lambda amount: (1, 0, 0, amount, 1, 0),
    "translate_x": lambda amount: (1, 0, amount, 0, 1, 0),
    "translate_y": lambda amount: (1, 0, 0, 0, 1, amount),
}


def far_from_grey(image, matrix):
    """Where Pillow takes nothing from outside, nor from the rim, which it does not blend."""
    inside = np.zeros_like(image)
    inside[2:-2, 2:-2] = 255
    return np.asarray(pillow_affine(inside, matrix)).min(axis=-1) == 255


@pytest.mark.parametrize("amount", [-9.25, -0.3, 0.17, 5])
@pytest.mark.parametrize("name", AFFINE)
def test_shears_and_shifts_go_where_pillow_goes(name, amount):
    amount = amount / 10 if name.startswith("shear") else amount
    ours, matrix = getattr(operations, name)(SMOOTH, amount), AFFINE[name](amount)
    whole = far_from_grey(SMOOTH, matrix)
    expected = np.asarray(pillow_affine(SMOOTH, matrix))
    assert whole.mean() > 0.4
    assert furthest(ours[whole], expected[whole]) <= 3  # cv2 knows 32 places between pixels
    assert furthest(SMOOTH[whole], expected[whole]) > 3


@pytest.mark.parametrize("degrees", [-135, -30, 7.5, 90])
def test_rotation_is_about_the_middle_against_the_clock(degrees):
    turned = {"resample": Image.Resampling.BILINEAR, "fillcolor": (0, 0, 0)}
    inside = np.zeros_like(SMOOTH)
    inside[2:-2, 2:-2] = 255
    whole = np.asarray(Image.fromarray(inside).rotate(degrees, **turned)).min(axis=-1) == 255
    expected = np.asarray(Image.fromarray(SMOOTH).rotate(degrees, **turned))
    assert whole.mean() > 0.5
    assert furthest(operations.rotate(SMOOTH, degrees)[whole], expected[whole]) <= 3


def test_whole_pixels_are_moved_exactly_and_grey_moves_in():
    left = operations.translate_x(NOISE, 5)
    assert (left[:, :-5] == NOISE[:, 5:]).all() and (left[:, -5:] == 128).all()
    down = operations.translate_y(NOISE, -3)
    assert (down[3:] == NOISE[:-3]).all() and (down[:3] == 128).all()
    assert (operations.rotate(NOISE, 180) == NOISE[::-1, ::-1]).all()
    assert (operations.rotate(NOISE, 45)[0, 0] == 128).all()


@pytest.mark.parametrize("share", [-0.5, -0.2, 0.1, 0.37])
def test_hue_moves_around_the_wheel(share):
    moved = operations.shift_hue(SMOOTH, share)
    expected = np.empty(SMOOTH.shape)
    for place in np.ndindex(SMOOTH.shape[:2]):
        hue, saturation, value = colorsys.rgb_to_hsv(*(SMOOTH[place] / 255.0))
        expected[place] = colorsys.hsv_to_rgb((hue + share) % 1, saturation, value)
    off = np.abs(expected * 255 - moved)
    assert off.max() < 9 and off.mean() < 1  # a 256th of the wheel is up to six levels


def test_hue_leaves_grey_alone_and_by_a_whole_turn_everything():
    assert (operations.shift_hue(GREYS, 0.3) == GREYS).all()
    assert (operations.shift_hue(NOISE, 0) == NOISE).all()
    assert (operations.shift_hue(NOISE, 1) == NOISE).all()


@pytest.mark.parametrize("space", [STANDARD_SPACE, WIDE_SPACE])
def test_a_level_of_zero_changes_nothing(space):
    for name, image in itertools.product(set(OPERATIONS) - {"autocontrast", "equalize"}, IMAGES):
        assert (OPERATIONS[name](image, 0.0, space) == image).all(), name


def test_levels_reach_as_far_as_the_ranges_say():
    def at(name, level, space):
        return OPERATIONS[name](SMOOTH, level, space)

    height, width = SMOOTH.shape[:2]
    half = operations.translate_x(SMOOTH, width * 75 / 331)
    assert (at("translate-x", 0.5, STANDARD_SPACE) == half).all()
    assert (at("translate-y", -1, WIDE_SPACE) == operations.translate_y(SMOOTH, -32)).all()
    full = operations.translate_y(SMOOTH, height * 150 / 331)
    assert (at("translate-y", 1, STANDARD_SPACE) == full).all()
    assert (at("rotate", -0.5, STANDARD_SPACE) == operations.rotate(SMOOTH, -15)).all()
    assert (at("rotate", 1, WIDE_SPACE) == operations.rotate(SMOOTH, 135)).all()
    assert (at("shear-x", 1, STANDARD_SPACE) == operations.shear_x(SMOOTH, 0.3)).all()
    assert (at("shear-y", -1, WIDE_SPACE) == operations.shear_y(SMOOTH, -0.99)).all()
    assert (at("brightness", -1, STANDARD_SPACE) == operations.brightness(SMOOTH, 1 - 0.9)).all()
    assert (at("colour", 1, WIDE_SPACE) == operations.colour(SMOOTH, 1.99)).all()
    assert (at("contrast", 0.5, STANDARD_SPACE) == operations.contrast(SMOOTH, 1.45)).all()
    assert (at("sharpness", 1, STANDARD_SPACE) == operations.sharpness(SMOOTH, 1.9)).all()
    assert (at("posterize", -1, STANDARD_SPACE) == operations.posterize(SMOOTH, 4)).all()
    assert (at("posterize", 1, WIDE_SPACE) == operations.posterize(SMOOTH, 2)).all()
    assert (at("solarize", 0.5, STANDARD_SPACE) == operations.solarize(SMOOTH, 128)).all()
    assert (at("solarize", -1, WIDE_SPACE) == 255 - SMOOTH).all()
