"""A validation split that is exact, a like share of each class, and stable."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.layouts.val_split import choose_valid_images
from phalanx.errors import ConfigError


def choose(counts, wanted, *, extra=0):
    """The names that are chosen of so many images of each class."""
    sizes = [size + extra for size in counts]
    labels = np.repeat(np.arange(len(sizes)), sizes)
    names = [f"{label}/{number}.jpg" for label, size in enumerate(sizes) for number in range(size)]
    classes = tuple(map(str, range(len(counts))))
    chosen = choose_valid_images(labels, names.__getitem__, wanted=wanted, classes=classes)
    assert (np.diff(chosen) > 0).all()
    return {names[number] for number in chosen}, np.bincount(labels[chosen], minlength=len(counts))


@pytest.mark.parametrize(
    ("wanted", "total"), [("10", 10), ("10%", 432), ("0.1", 432), (".5", 2159), ("1", 1)]
)
def test_the_total_is_exact(wanted, total):
    counts = [799, 1052, 784, 733, 949]
    _, taken = choose(counts, wanted)
    assert taken.sum() == total
    shares = np.array(counts) * total / sum(counts)
    assert np.abs(taken - shares).max() <= 1


@given(st.lists(st.integers(1, 40), min_size=2, max_size=12), st.integers(1, 60))
def test_no_class_gives_its_last_image_and_each_gives_one_where_there_are_enough(counts, total):
    most = sum(counts) - len(counts)
    if total > most:
        with pytest.raises(ConfigError, match=f"at most {most:,} can be held out"):
            choose(counts, str(total))
        return
    _, taken = choose(counts, str(total))
    assert taken.sum() == total and (taken < counts).all()
    larger = np.array(counts) > 1
    if total >= larger.sum():
        assert (taken[larger] >= 1).all()


def test_images_that_are_added_move_few():
    before, _ = choose([100, 200], "10%")
    after, _ = choose([100, 200], "10%", extra=10)
    assert len(before - after) <= 3
    grown, _ = choose([100, 200], "20%")
    assert before < grown


def test_images_of_no_class_stay_in_training():
    labels = np.array([0, 0, 0, 1, 1, 1, -1, 7])
    chosen = choose_valid_images(labels, str, wanted="2", classes=("a", "b"))
    assert sorted(labels[chosen]) == [0, 1]
