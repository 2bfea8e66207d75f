from zlib import crc32

import numpy as np
import pytest

from phalanx.plan.draws import draw_below, draw_bits, draw_uniform

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MANY = np.arange(20_000)


def mix_one(word):
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & MASK
    return word ^ (word >> 31)


def draw_one(seed, name, position, lane):
    """The same draw in Python's unbounded integers, one at a time."""
    key = 0
    for part in (seed, crc32(name.encode()), lane):
        key = mix_one((key + GOLDEN + (part & MASK)) & MASK)
    return mix_one(mix_one((position * GOLDEN + key) & MASK) ^ key)


def test_draws_keep_their_values_for_ever():
    bits = draw_bits(0, "flip", np.arange(3))
    assert bits.tolist() == [0x3DA8F0D63C9F56D6, 0xF22CB3A47F7D12CD, 0x8820FC3FC46AF036]
    assert float(draw_uniform(7, "crop", 5, lane=2)) == 0.8396082413503761
    assert draw_below(10, 7, "crop", np.arange(6)).tolist() == [7, 5, 6, 3, 3, 6]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1])
def test_the_vectorised_draw_is_the_plain_one(seed):
    positions = np.array([0, 1, 2, 12345, 2**40, 2**62])
    expected = [draw_one(seed, "crop", int(p), 3) for p in positions]
    assert draw_bits(seed, "crop", positions, lane=3).tolist() == expected


def test_a_draw_does_not_depend_on_what_else_is_drawn():
    whole = draw_bits(5, "flip", MANY[:1000])
    picked = np.array([999, 0, 17, 17])
    assert (draw_bits(5, "flip", picked) == whole[picked]).all()
    assert int(draw_bits(5, "flip", 17)) == int(whole[17])
    assert draw_bits(5, "flip", MANY[:6].reshape(2, 3)).shape == (2, 3)


@pytest.mark.parametrize("shift", [0, 20, 56])
def test_bits_are_uniform(shift):
    values = (draw_bits(3, "flip", MANY) >> np.uint64(shift)) & np.uint64(255)
    counts = np.bincount(values.astype(np.int64), minlength=256)
    expected = len(MANY) / 256
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert 255 - 5 * np.sqrt(510) < chi_square < 255 + 5 * np.sqrt(510)


@pytest.mark.parametrize(
    "other",
    [
        draw_uniform(3, "flip", MANY + 1),
        draw_uniform(4, "flip", MANY),
        draw_uniform(3, "flap", MANY),
        draw_uniform(3, "flip", MANY, lane=1),
    ],
    ids=["next position", "next seed", "other name", "next lane"],
)
def test_neighbouring_streams_are_unrelated(other):
    correlation = np.corrcoef(draw_uniform(3, "flip", MANY), other)[0, 1]
    assert abs(correlation) < 5 / np.sqrt(len(MANY))


def test_uniform_stays_below_one_and_fills_the_range():
    draws = draw_uniform(1, "crop", MANY)
    assert draws.min() >= 0 and draws.max() < 1
    assert draws.min() < 1e-3 and draws.max() > 1 - 1e-3


@pytest.mark.parametrize("bound", [1, 2, 9, 1000, 2**32])
def test_below_reaches_all_of_its_range_and_no_more(bound):
    draws = draw_below(bound, 1, "crop", MANY)
    assert draws.min() >= 0 and draws.max() < bound
    assert len(np.unique(draws)) == bound or bound > len(MANY)
    assert abs(draws.mean() - (bound - 1) / 2) <= bound * 5 / np.sqrt(12 * len(MANY))


@pytest.mark.parametrize("bound", [0, -3, 2**32 + 1])
def test_an_impossible_bound_is_refused(bound):
    with pytest.raises(ValueError, match="bound"):
        draw_below(bound, 1, "crop", MANY)
