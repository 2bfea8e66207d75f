import numpy as np
import pytest

from phalanx.data.transforms.transform import (
    CROPS,
    TransformSpec,
    build_transform,
    choose_crop_and_flip,
)
from phalanx.plan.order import Order

PHOTOGRAPHS = TransformSpec(augment="resized-crop")
TRANSFORMS = {kind: build_transform(TransformSpec(augment=kind)) for kind in CROPS}

RANDOM = np.random.default_rng(0)
IMAGE = RANDOM.integers(1, 256, (28, 28, 3), np.uint8)
POSITIONS = np.arange(4000)


def train(name, image, draws, size):
    out = np.full((size, size, 3), 77, np.uint8)
    TRANSFORMS[name].apply_training([(image, draws, None)], out[None])
    return out


@pytest.mark.parametrize("name", TRANSFORMS)
def test_draws_follow_the_position_alone(name):
    transform = TRANSFORMS[name]
    rows = transform.draw(3, POSITIONS[:100])
    assert np.array_equal(transform.draw(3, POSITIONS[40:50]), rows[40:50])
    assert not transform.columns or not np.array_equal(transform.draw(4, POSITIONS[:100]), rows)
    assert all(len(row) == len(transform.columns) for row in rows)


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("shape", [(28, 28), (500, 375), (9, 60), (1, 1)])
def test_every_row_is_overwritten_whatever_the_image(name, shape):
    image = np.full((*shape, 3), 200, np.uint8)
    transform = TRANSFORMS[name]
    for draws in transform.draw(1, POSITIONS[:20]):
        assert set(np.unique(train(name, image, draws, 28))) <= {0, 200}
    out = np.full((28, 28, 3), 77, np.uint8)
    transform.apply_evaluation(image, out)
    assert (out == 200).all()


def test_pad_crop_in_the_middle_is_the_image():
    assert (train("pad-crop", IMAGE, [0.5, 0.5, 0.9], 28) == IMAGE).all()
    assert (train("pad-crop", IMAGE, [0.5, 0.5, 0.1], 28) == IMAGE[:, ::-1]).all()


def test_pad_crop_at_the_corners_moves_four_pixels_and_pads_with_black():
    first = train("pad-crop", IMAGE, [0.0, 0.999, 0.9], 28)
    assert (first[4:, :-4] == IMAGE[:-4, 4:]).all()
    assert (first[:4] == 0).all() and (first[:, -4:] == 0).all()


def test_a_pad_crop_of_two_pixels_takes_in_the_reflection():
    spec = TransformSpec(augment="pad-crop", shift=2, reflects=True)
    transform, out = build_transform(spec), np.empty((3, 28, 28, 3), np.uint8)
    corners = [[0.0, 0.999, 0.9], [0.999, 0.0, 0.1], [0.5, 0.5, 0.9]]
    transform.apply_training([(IMAGE, draws, None) for draws in corners], out)
    plain, mirrored = (
        np.pad(i, ((2, 2), (2, 2), (0, 0)), "reflect") for i in (IMAGE, IMAGE[:, ::-1])
    )
    assert (out[0] == plain[:28, 4:]).all()
    assert (out[1] == mirrored[4:, :28]).all()
    assert (out[2] == IMAGE).all()


@pytest.mark.parametrize("augment", ["pad-crop", "resized-crop"])
def test_alternating_flips_mirror_an_image_in_every_other_epoch(augment):
    transform = build_transform(TransformSpec(augment=augment, alternates=True))
    order = Order(images=1000, global_batch=10, seed=5)
    column = transform.columns.index(("flip", 0))
    flipped = np.empty((4, 1000), bool)
    for epoch in range(4):
        positions = np.arange(1000) + 1000 * epoch
        flipped[epoch, order.indices(positions)] = (
            transform.draw(5, positions, order)[:, column] < 0.5
        )
    assert (flipped[0] == flipped[2]).all() and (flipped[1] == flipped[3]).all()
    assert (flipped[0] != flipped[1]).all()
    assert 430 < flipped[0].sum() < 570
    others = np.delete(transform.draw(5, positions, order), column, 1)
    at_random = build_transform(TransformSpec(augment=augment)).draw(5, positions, order)
    assert (others == np.delete(at_random, column, 1)).all()


def test_pad_crop_shifts_and_flips_evenly():
    down, right, flip = np.array(TRANSFORMS["pad-crop"].draw(1, POSITIONS)).T
    for draw in (down, right):
        counts = np.bincount((draw * 9).astype(int))
        assert len(counts) == 9 and np.abs(counts - 4000 / 9).max() < 100
    assert abs((flip < 0.5).mean() - 0.5) < 0.03
    assert abs(np.corrcoef(down, right)[0, 1]) < 0.06


def test_pad_crop_brings_other_sizes_to_size_first():
    image = np.full((70, 40, 3), 9, np.uint8)
    assert (train("pad-crop", image, [0.5, 0.5, 0.9], 32) == 9).all()


def test_random_crops_have_the_promised_areas_and_shapes():
    rows = TRANSFORMS["resized-crop"].draw(5, POSITIONS)
    crops = np.array([choose_crop_and_flip(PHOTOGRAPHS, (400, 400), None, row)[0] for row in rows])
    top, left, height, width = crops.T
    assert (top >= 0).all() and (top + height <= 400).all() and (left + width <= 400).all()
    area, ratio = height * width / 160_000, width / height
    assert area.min() > 0.075 and area.max() > 0.9 and 0.4 < area.mean() < 0.55
    assert ratio.min() > 0.73 and ratio.max() < 1.36
    assert abs(np.log(ratio).mean()) < 0.02
    assert np.corrcoef(top / (401 - height), left / (401 - width))[0, 1] < 0.06


def test_when_no_crop_fits_the_middle_is_taken():
    never = [1, 0.99, 0.99] + [0.999, 0.5] * 10  # nearly all of the area, square: not in 30 x 300
    assert choose_crop_and_flip(PHOTOGRAPHS, (30, 300), None, never) == ((0, 130, 30, 40), False)
    assert choose_crop_and_flip(PHOTOGRAPHS, (300, 30), None, never) == ((130, 0, 40, 30), False)


def test_a_random_crop_is_cut_from_where_it_was_drawn():
    image = np.zeros((100, 100, 3), np.uint8)
    image[:50, :50] = 200
    corner = [0.9, 0.0, 0.0] + [0.1, 0.5] * 10  # a sixth of the area, from the upper left
    assert (train("resized-crop", image, corner, 24) == 200).all()
    opposite = [0.9, 0.999, 0.999] + [0.1, 0.5] * 10
    assert (train("resized-crop", image, opposite, 24) == 0).all()


def test_a_random_crop_is_mirrored_by_its_flip():
    image = RANDOM.integers(0, 256, (50, 60, 3), np.uint8)
    rest = [0.3, 0.6] + [0.4, 0.5] * 10
    plain, flipped = (train("resized-crop", image, [flip, *rest], 24) for flip in (0.9, 0.1))
    assert (plain[:, ::-1] == flipped).all() and (plain != flipped).any()


@pytest.mark.parametrize("name", ["pad-crop", "none"])
def test_scoring_small_images_leaves_them_alone(name):
    out = np.empty_like(IMAGE)
    TRANSFORMS[name].apply_evaluation(IMAGE, out)
    assert (out == IMAGE).all()


def test_scoring_large_images_takes_the_middle_seven_eighths():
    image = np.zeros((512, 1024, 3), np.uint8)
    image[:, 256:768] = 200  # the middle square
    image[:24], image[-24:] = 50, 50  # 12 rows each once the short side is 256
    out = np.empty((224, 224, 3), np.uint8)
    TRANSFORMS["resized-crop"].apply_evaluation(image, out)
    assert (out == 200).all()
    out = np.empty((240, 240, 3), np.uint8)  # of a short side of 274: 17 rows are cut each side
    TRANSFORMS["resized-crop"].apply_evaluation(image, out)
    assert (out == 200).all()
