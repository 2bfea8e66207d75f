import math

import pytest

from phalanx.report.scores import paired_test, sign_test, wilson_interval


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    [
        # (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n), worked by hand
        (50, 100, 0.40383, 0.59617),
        (0, 10, 0.0, 0.27754),
        (10, 10, 0.72246, 1.0),
        (1_278, 1_500, 0.83313, 0.86907),
    ],
)
def test_wilson_values(hits, n, low, high):
    assert wilson_interval(hits, n) == pytest.approx((low, high), abs=1e-5)


def test_no_image_leaves_everything_open():
    assert wilson_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("only_a", "only_b", "p"),
    [
        (5, 5, 1.0),
        (0, 0, 1.0),
        (1, 7, 2 * (1 + 8) / 256),
        (0, 6, 2 / 64),
        (10, 2, 2 * (1 + 12 + 66) / 4096),
    ],
)
def test_mcnemar_values_counted_by_hand(only_a, only_b, p):
    assert sign_test(only_a, only_b) == p
    assert sign_test(only_b, only_a) == p


def test_mcnemar_on_many_images_agrees_with_the_normal_law():
    # 2,100 against 1,900 of 4,000: z = (200 - 1) / sqrt(4000), with the correction for steps
    z = 199 / math.sqrt(4_000)
    assert sign_test(2_100, 1_900) == pytest.approx(math.erfc(z / math.sqrt(2)), rel=0.01)


def outcomes(both, only_a, only_b, neither):
    a = [True] * both + [True] * only_a + [False] * (only_b + neither)
    b = [True] * both + [False] * only_a + [True] * only_b + [False] * neither
    return a, b


def test_a_paired_test_tells_counts_difference_and_winner():
    result = paired_test(*outcomes(80, 10, 1, 9))
    assert (result["n"], result["n10"], result["n01"]) == (100, 10, 1)
    assert result["difference"] == pytest.approx(0.09)
    assert (result["top1_a"], result["top1_b"]) == (0.9, 0.81)
    assert result["p"] == pytest.approx(2 * (1 + 11) / 2048)
    assert result["verdict"] == "A is better"
    # Bonett and Price: 11/102 - 2/102 ± 1.96 sqrt((13/102 - (9/102)²) / 102)
    assert result["interval95"] == pytest.approx([0.02110, 0.15537], abs=1e-5)
    assert paired_test(*outcomes(80, 1, 10, 9))["verdict"] == "B is better"


def test_an_even_split_shows_no_difference():
    result = paired_test(*outcomes(900, 20, 22, 58))
    assert result["verdict"] == "no difference that 1,000 images can show"
    assert result["interval95"][0] < 0 < result["interval95"][1]


def test_rows_of_other_lengths_are_our_own_mistake():
    with pytest.raises(ValueError, match="equally long"):
        paired_test([True], [True, False])
