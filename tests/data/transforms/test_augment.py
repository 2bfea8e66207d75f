import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest
from PIL import Image

from phalanx.data.transforms import operations
from phalanx.data.transforms.augment import (
    AUTO_AUGMENTS,
    BOX_COLUMNS,
    choose_crop,
    color_jitter,
    rand_augment,
    random_erasing,
    trivial_augment,
)
from phalanx.data.transforms.operations import OPERATIONS, WIDE_SPACE
from phalanx.data.transforms.transform import (
    CROPS,
    TransformSpec,
    build_transform,
    choose_crop_and_flip,
)
from phalanx.plan.draws import draw_uniform

TRANSFORMS = {kind: build_transform(TransformSpec(augment=kind)) for kind in CROPS}

RANDOM = np.random.default_rng(0)
NOISE = RANDOM.integers(0, 256, (40, 52, 3), np.uint8)
COARSE = Image.fromarray(RANDOM.integers(30, 220, (6, 7, 3), np.uint8))
SMOOTH = np.array(COARSE.resize((84, 72), Image.Resampling.BICUBIC))
PLAIN = np.full((20, 30, 3), (200, 40, 90), np.uint8)
GREYS = np.repeat(RANDOM.integers(0, 256, (24, 24, 1), np.uint8), 3, axis=2)
SMALL = [RANDOM.integers(0, 256, (*shape, 3), np.uint8) for shape in [(1, 1), (1, 7), (9, 2)]]
IMAGES = [NOISE, SMOOTH, PLAIN, GREYS, *SMALL]
POSITIONS = np.arange(4000)

AUGMENTS = {
    "colour-jitter": color_jitter(0.4, 0.4, saturation=0.4, hue=0.1),
    **AUTO_AUGMENTS,
    "random-erasing": random_erasing(0.25),
}


def draws_of(columns, seed=1, positions=POSITIONS):
    rows = [draw_uniform(seed, name, positions, lane) for name, lane in columns]
    return np.stack(rows, axis=1).tolist()


def choice_of(name):
    return (list(OPERATIONS).index(name) + 0.5) / len(OPERATIONS)


@pytest.mark.parametrize("name", AUGMENTS)
def test_an_image_of_any_kind_gives_a_new_one_of_the_same_size(name):
    rows = draws_of(AUGMENTS[name].columns, positions=POSITIONS[:60])
    for image in IMAGES:
        before = image.copy()
        for row in rows:
            after = AUGMENTS[name].apply(image, row)
            assert after.dtype == np.uint8 and after.shape == image.shape
            assert not np.shares_memory(after, image) and after.flags.writeable
        assert (image == before).all()


@pytest.mark.parametrize("name", AUGMENTS)
def test_the_same_numbers_give_the_same_image_however_it_lies_in_memory(name):
    lying = NOISE.transpose(1, 0, 2)[::-1, 3:40]
    packed = np.ascontiguousarray(lying)
    packed.flags.writeable = False
    for row in draws_of(AUGMENTS[name].columns, positions=POSITIONS[:60]):
        once = AUGMENTS[name].apply(packed, row)
        assert (AUGMENTS[name].apply(packed, tuple(row)) == once).all()
        assert (AUGMENTS[name].apply(lying, row) == once).all()


EVERY_NUMBER = {**AUGMENTS, "random-erasing": random_erasing(0.9, ratio=(0.1, 10))}


@pytest.mark.parametrize(
    ("name", "column"),
    [(name, column) for name, made in EVERY_NUMBER.items() for column in range(len(made.columns))],
)
def test_every_number_has_a_say(name, column):
    made = EVERY_NUMBER[name]
    for row in draws_of(made.columns, positions=POSITIONS[:1500]):
        other = [*row[:column], (row[column] + 0.5) % 1, *row[column + 1 :]]
        if (made.apply(SMOOTH, row) != made.apply(SMOOTH, other)).any():
            return
    raise AssertionError(f"number {column} of {name} changes nothing")


def test_no_two_augmentations_share_a_number():
    columns = [column for made in AUGMENTS.values() for column in made.columns]
    columns += {column for transform in TRANSFORMS.values() for column in transform.columns}
    assert len(set(columns)) == len(columns)


def test_colour_jitter_of_no_strength_changes_nothing():
    still = color_jitter(0, 0, saturation=0, hue=0)
    for image, row in itertools.product(IMAGES, draws_of(still.columns, positions=POSITIONS[:30])):
        assert (still.apply(image, row) == image).all()


def test_colour_jitter_goes_from_one_less_the_strength_to_one_more():
    def alone(strength, draw, name):
        strengths = {"brightness": 0, "contrast": 0, "saturation": 0, "hue": 0, name: strength}
        return color_jitter(**strengths).apply(NOISE, [0.4, *draw])

    for draw, factor in [(0.0, 0.6), (0.5, 1.0), (0.75, 1.2)]:
        expected = operations.brightness(NOISE, factor)
        assert (alone(0.4, [draw, 0.5, 0.5, 0.5], "brightness") == expected).all()
        expected = operations.contrast(NOISE, factor)
        assert (alone(0.4, [0.5, draw, 0.5, 0.5], "contrast") == expected).all()
        expected = operations.colour(NOISE, factor)
        assert (alone(0.4, [0.5, 0.5, draw, 0.5], "saturation") == expected).all()
        expected = operations.shift_hue(NOISE, (factor - 1) / 2)
        assert (alone(0.2, [0.5, 0.5, 0.5, draw], "hue") == expected).all()
    strong = alone(3.0, [0.25, 0.5, 0.5, 0.5], "brightness")  # from 0 to 4: none below zero
    assert (strong == NOISE).all()


def test_colour_jitter_takes_its_four_operations_in_every_order():
    made = color_jitter(0.8, 0.8, saturation=0.8, hue=0.3)
    steps = [
        lambda image: operations.brightness(image, 1.4),
        lambda image: operations.contrast(image, 0.6),
        lambda image: operations.colour(image, 1.6),
        lambda image: operations.shift_hue(image, 0.15),
    ]
    seen = [made.apply(NOISE, [(n + 0.5) / 24, 0.75, 0.25, 0.875, 0.75]) for n in range(24)]
    for order in itertools.permutations(steps):
        image = NOISE
        for step in order:
            image = step(image)
        assert any((image == one).all() for one in seen)
    assert len({one.tobytes() for one in seen}) == 24


def test_each_of_the_fourteen_operations_comes_equally_often():
    for made, count in ((rand_augment(3), 3), (trivial_augment(), 1)):
        rows = np.array(draws_of(made.columns))
        chosen = (rows[:, ::3] * len(OPERATIONS)).astype(int)
        assert len(OPERATIONS) == 14 and chosen.shape[1] == count
        for column in chosen.T:
            shares = np.bincount(column, minlength=14) / len(POSITIONS)
            assert np.abs(shares - 1 / 14).max() < 0.016
    for name in OPERATIONS:  # the number of an operation is its row of the table
        expected = OPERATIONS[name](SMOOTH, 20 / 30, WIDE_SPACE)
        row = [choice_of(name), 20.5 / 31, 0.1]
        assert (trivial_augment().apply(SMOOTH, row) == expected).all()


def test_rand_augment_does_its_operations_in_turn():
    made = rand_augment(2, 10, spread=0)
    row = [choice_of("rotate"), 0.5, 0.2, choice_of("posterize"), 0.5, 0.8]
    expected = operations.posterize(operations.rotate(SMOOTH, 30), 4)
    assert (made.apply(SMOOTH, row) == expected).all()
    row[2] = 0.7
    expected = operations.posterize(operations.rotate(SMOOTH, -30), 4)
    assert (made.apply(SMOOTH, row) == expected).all()


def test_rand_augment_spreads_its_magnitude_normally_and_keeps_it_in_bounds():
    made, choice = rand_augment(1, 8, spread=1), choice_of("brightness")
    flat = np.full((2, 2, 3), 100, np.uint8)

    def level(draw):
        return (made.apply(flat, [choice, draw, 0.1])[0, 0, 0] / 100 - 1) / 0.9 * 10

    for draw in (0.1, 0.5, 0.9):
        assert abs(level(draw) - NormalDist(8, 1).inv_cdf(draw)) < 0.1
    assert abs(level(0.9999) - 10) < 0.1
    always = rand_augment(1, 0, spread=1)
    assert (always.apply(flat, [choice, 0.0, 0.1]) == flat).all()


def test_trivial_augment_takes_all_thirty_one_levels_and_both_signs():
    flat, choice = np.full((1, 1, 3), 100, np.uint8), choice_of("brightness")
    rows = [[choice, size, sign] for size, sign in RANDOM.random((3000, 2)).tolist()]
    found = np.array([trivial_augment().apply(flat, row)[0, 0, 0] for row in rows])
    assert len(np.unique(found)) == 61 and found.min() == 1 and found.max() == 199
    assert abs((found > 100).mean() - 15 / 31) < 0.03


def erased_boxes(made, shape, count=2000):
    """Top, left, height and width of what was erased, from images of two colours far apart."""
    image = np.zeros((*shape, 3), np.uint8)
    image[:, ::2] = 255  # the mean is neither
    for row in draws_of(made.columns, positions=POSITIONS[:count]):
        gone = (made.apply(image, row) != image).any(axis=-1)
        rows, columns = np.flatnonzero(gone.any(1)), np.flatnonzero(gone.any(0))
        if len(rows):
            assert gone[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
            yield rows[0], columns[0], len(rows), len(columns)


def test_erasing_has_the_promised_probability_areas_shapes_and_places():
    boxes = np.array(list(erased_boxes(random_erasing(0.4), (100, 100))))
    assert abs(len(boxes) / 2000 - 0.4) < 0.04
    top, left, height, width = boxes.T
    area, ratio = height * width / 10_000, height / width
    assert 0.018 < area.min() < 0.03 and 0.31 < area.max() < 0.34
    assert abs(area.mean() - (0.02 + 1 / 3) / 2) < 0.01
    assert 0.27 < ratio.min() < 0.34 and 2.9 < ratio.max() < 3.7
    assert abs(np.log(ratio).mean()) < 0.08
    for start, long in ((top, height), (left, width)):
        assert start.min() == 0 and (start + long).max() == 100
        assert abs((start / (101 - long)).mean() - 0.5) < 0.04


def test_erasing_fills_with_the_mean_colour_and_leaves_the_rest():
    made = random_erasing(1.0, (0.25, 0.25), ratio=(1, 1))
    after = made.apply(NOISE[:40, :40], [0.5, 0.0, 0.999] + [0.5] * 8)
    assert (after[:20, 20:] == np.rint(NOISE[:40, :40].mean((0, 1)))).all()
    assert (after[20:] == NOISE[20:40, :40]).all() and (after[:, :20] == NOISE[:40, :20]).all()


def test_erasing_leaves_an_image_whole_where_nothing_fits_and_when_it_is_not_its_turn():
    square = random_erasing(1.0, (0.25, 0.25), ratio=(1, 1))
    thin = RANDOM.integers(0, 256, (2, 90, 3), np.uint8)
    assert (square.apply(thin, [0.5] * 11) == thin).all()
    assert (random_erasing(0.0).apply(NOISE, [0.0] * 11) == NOISE).all()


WHOLE = {"scale": (0.08, 1.0), "ratio": (3 / 4, 4 / 3)}


def old_choice(height, width, draws):
    """The published recipe, written down once more."""
    for share, shape in zip(draws[2::2], draws[3::2], strict=True):
        area = height * width * (0.08 + share * 0.92)
        ratio = (3 / 4) ** (1 - shape) * (4 / 3) ** shape
        tall, wide = round((area / ratio) ** 0.5), round((area * ratio) ** 0.5)
        if 0 < tall <= height and 0 < wide <= width:
            return (
                int(draws[0] * (height - tall + 1)),
                int(draws[1] * (width - wide + 1)),
                tall,
                wide,
            )
    tall, wide = (
        min(height, max(1, round(width * 4 / 3))),
        min(width, max(1, round(height * 4 / 3))),
    )
    return (height - tall) // 2, (width - wide) // 2, tall, wide


def test_without_a_box_a_crop_is_chosen_as_ever():
    rows = draws_of(BOX_COLUMNS)
    for row, (height, width) in zip(rows, RANDOM.integers(1, 600, (4000, 2)).tolist(), strict=True):
        expected = old_choice(height, width, row[:22])
        plain = TransformSpec(augment="resized-crop")
        assert choose_crop_and_flip(plain, (height, width), None, [1, *row[:22]]) == (
            expected,
            False,
        )
        assert choose_crop(height, width, None, row, **WHOLE) == expected


def test_the_numbers_of_a_crop_are_those_of_the_resized_crop_and_places_for_later_tries():
    assert BOX_COLUMNS[:22] == TRANSFORMS["resized-crop"].columns[1:]
    assert len(set(BOX_COLUMNS)) == len(BOX_COLUMNS) == 40


def shown(crop, box, height, width):
    """The share of the box in the crop, counted on a grid sixteen times as fine."""
    top, left, tall, wide = (16 * edge for edge in crop)
    grid = np.zeros((16 * height, 16 * width), bool)
    x0, y0, x1, y1 = box
    here = slice(round(y0 * len(grid)), round(y1 * len(grid)))
    grid[here, round(x0 * grid.shape[1]) : round(x1 * grid.shape[1])] = True
    return grid[top : top + tall, left : left + wide].sum() / grid.sum()


def test_a_crop_shows_a_tenth_of_the_box():
    box, height, width = (0.75, 0.75, 0.9375, 0.875), 48, 64
    seen = {True: [], False: []}
    for row in draws_of(BOX_COLUMNS, positions=POSITIONS[:1000]):
        crop = choose_crop(height, width, box, row, **WHOLE)
        seen[True].append(shown(crop, box, height, width))
        seen[False].append(shown(old_choice(height, width, row[:22]), box, height, width))
    with_box, without = np.array(seen[True]), np.array(seen[False])
    assert (without < 0.1).mean() > 0.3
    assert (with_box < 0.1).mean() < 0.03
    assert with_box[with_box < 0.5].min() < 0.2  # a tenth is enough: more is not asked for


def test_a_tenth_is_of_the_box_not_of_the_part():
    tiny = (0.5, 0.5, 0.53125, 0.53125)  # a thousandth of the image: no crop is a tenth full of it
    row = [0.5, 0.5] + [0.9, 0.5] * 10
    crop = choose_crop(64, 64, tiny, row, **WHOLE)
    assert crop == old_choice(64, 64, row) and shown(crop, tiny, 64, 64) == 1
    edge = [0.0, 0.0] + [0.0, 0.5] * 9 + [0.9, 0.5]  # nine small tries in the corner, one large
    assert choose_crop(64, 64, tiny, edge, **WHOLE)[2:] == (61, 61)


def test_where_no_try_shows_the_box_it_is_disregarded():
    corner = [0.0, 0.0] + [0.0, 0.5] * 10
    for box in [(0.9, 0.9, 1.0, 1.0), None]:
        assert choose_crop(100, 100, box, corner, **WHOLE) == old_choice(100, 100, corner)
    assert choose_crop(100, 100, (0.5, 0.5, 0.5, 0.9), corner, **WHOLE)[2:] == (28, 28)


def test_crops_follow_the_scale_and_ratio_they_are_given():
    rows = draws_of(BOX_COLUMNS, positions=POSITIONS[:1000])
    crops = [choose_crop(500, 500, None, row, scale=(0.05, 0.2), ratio=(0.5, 0.8)) for row in rows]
    _, _, tall, wide = np.array(crops).T
    area, ratio = tall * wide / 250_000, wide / tall
    assert 0.049 < area.min() < 0.055 and 0.195 < area.max() < 0.202
    assert 0.49 < ratio.min() < 0.51 and 0.79 < ratio.max() < 0.81
    assert abs(np.log(ratio).mean() - math.log(0.4) / 2) < 0.02
    never = [0.5, 0.5] + [0.999, 0.5] * 10
    assert choose_crop(30, 300, None, never, **{**WHOLE, "ratio": (0.5, 2)}) == (0, 120, 30, 60)
    assert choose_crop(300, 30, None, never, **{**WHOLE, "ratio": (0.5, 2)}) == (120, 0, 60, 30)
