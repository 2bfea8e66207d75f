"""Mixup and cutmix: images and labels, by the older programs' numbers and by hand."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from phalanx.engine.loss import binary_cross_entropy, cross_entropy, smoothing_over_all
from phalanx.engine.mixing import (
    Mixing,
    draw_kept_share,
    draw_mix,
    draw_mixup_weights,
    mix_images,
    mix_labels,
    mix_up,
    paste_box,
    place_box,
    weight_targets_by_area,
)
from phalanx.engine.mixing import WeightedLabels as Goal
from phalanx.plan.draws import draw_beta


class Mixed(NamedTuple):
    """A micro-batch as the model sees it."""

    images: torch.Tensor
    targets: tuple[Goal, ...]


def mix_batch(images, labels, *, first, seed, mixing):
    mix = draw_mix(images, labels, first=first, seed=seed, mixing=mixing)
    return Mixed(mix_images(images, mix), mix_labels(labels, mix))


def plain_images(*values, size=8):
    return torch.tensor(values, dtype=torch.float32)[:, None, None, None].expand(
        len(values), 3, size, size
    )


def test_mixup_blends_with_the_image_before():  # an older program's test: 1, 2, 3 at a half
    mixed = mix_up(plain_images(1.0, 2.0, 3.0), torch.full((3,), 0.5))
    assert mixed[:, 0, 0, 0].tolist() == [2.0, 1.5, 2.5]


def test_mixup_labels_are_those_of_the_image_before():
    labels = torch.tensor([1, 2, 3])
    mixing = Mixing(mixup_alpha=0.2)
    mixed = mix_batch(plain_images(1.0, 2.0, 3.0), labels, first=40, seed=3, mixing=mixing)
    own, other = mixed.targets
    assert own.labels.tolist() == [1, 2, 3] and other.labels.tolist() == [3, 1, 2]
    assert torch.equal(own.weights + other.weights, torch.ones(3))
    blended = own.weights * torch.tensor([1.0, 2, 3]) + other.weights * torch.tensor([3.0, 1, 2])
    assert torch.allclose(mixed.images[:, 1, 2, 3], blended)


def test_cutmix_pastes_a_quarter_of_the_image_two_places_on():  # an older program's test: 0.75
    box = place_box(0.75, height=8, width=8, seed=0, first=0)
    pasted, area = paste_box(plain_images(1.0, 2.0, 3.0), box), box.kept_share
    assert area == 0.75
    sums = pasted.sum((1, 2, 3)) / 3
    assert sums.tolist() == [48 * 1 + 16 * 2, 48 * 2 + 16 * 3, 48 * 3 + 16 * 1]
    labels = weight_targets_by_area((Goal(torch.tensor([1, 2, 3])),), area)
    assert labels[1].labels.tolist() == [2, 3, 1]
    assert labels[0].weights.tolist() == [0.75] * 3 and labels[1].weights.tolist() == [0.25] * 3


def test_the_box_lies_inside_anywhere_and_its_real_area_counts():
    corners, areas = set(), set()
    for first in range(300):
        box = place_box(0.7, height=9, width=9, seed=1, first=first)
        pasted = paste_box(plain_images(0.0, 1.0, 0.0, size=9), box)[0, 0].nonzero()
        corners.add(tuple(pasted[0].tolist()))
        areas.add(box.kept_share)
        assert len(pasted) == round((1 - box.kept_share) * 81)
    assert areas == {1 - 25 / 81}  # sides of 0.5477 x 9, rounded
    assert corners == {(top, left) for top in range(5) for left in range(5)}


def test_both_together_weigh_four_labels():
    labels = torch.arange(5)
    mixing = Mixing(mixup_alpha=0.4, cutmix_low=0.6, cutmix_high=0.6)
    images = F.one_hot(labels).float()[:, :, None, None].expand(5, 5, 10, 10)
    mixed = mix_batch(images, labels, first=15, seed=9, mixing=mixing)
    total = sum(target.weights for target in mixed.targets)
    assert len(mixed.targets) == 4 and torch.allclose(total, torch.ones(5))
    # each class's share of the pixels is its weight among the labels
    expected = sum(
        F.one_hot(target.labels, 5) * target.weights[:, None] for target in mixed.targets
    )
    assert torch.allclose(mixed.images.mean((2, 3)), expected, atol=1e-6)


def test_what_is_drawn_depends_on_the_places_alone():
    mixing = Mixing(mixup_alpha=0.2, cutmix_low=0.5, cutmix_high=1.0)
    images, labels = torch.rand(6, 3, 8, 8), torch.arange(6)

    def mixed(first, seed):
        return mix_batch(images, labels, first=first, seed=seed, mixing=mixing).images

    assert torch.equal(mixed(12, 1), mixed(12, 1))
    assert not torch.equal(mixed(12, 1), mixed(18, 1))
    assert not torch.equal(mixed(12, 1), mixed(12, 2))
    shares = draw_mixup_weights(0.2, seed=1, first=12, images=6)
    assert np.array_equal(shares[2:5], draw_mixup_weights(0.2, seed=1, first=14, images=3))


@pytest.mark.parametrize("alpha", [0.1, 0.2, 1.0, 4.0])
def test_shares_have_the_beta_distribution(alpha):
    drawn = draw_beta(alpha, 7, "test", np.arange(40_000))
    assert drawn.min() >= 0 and drawn.max() <= 1
    variance = 1 / (4 * (2 * alpha + 1))
    fourth = 3 / (16 * (2 * alpha + 1) * (2 * alpha + 3))  # central moments of Beta(a, a)
    error = np.sqrt(variance / 40_000)
    assert abs(drawn.mean() - 0.5) < 4 * error
    error = np.sqrt((fourth - variance**2) / 40_000)
    assert abs(((drawn - 0.5) ** 2).mean() - variance) < 4 * error


def test_mixup_keeps_a_half_or_more():
    shares = draw_mixup_weights(1.0, seed=0, first=0, images=1000)
    assert shares.min() >= 0.5 and shares.max() <= 1 and 0.72 < shares.mean() < 0.78


def test_boxes_leave_shares_between_the_ends_and_are_skipped_as_often_as_told():
    mixing = Mixing(cutmix_low=0.65, cutmix_high=0.9, cutmix_skip=0.35)
    kept = np.array([draw_kept_share(mixing, seed=4, first=first) for first in range(4000)])
    skipped = kept == 1
    assert abs(skipped.mean() - 0.35) < 4 * np.sqrt(0.35 * 0.65 / 4000)
    assert kept[~skipped].min() >= 0.65 and kept[~skipped].max() < 0.9
    assert abs(kept[~skipped].mean() - 0.775) < 0.01


def test_tensorflow_1_draws_boxes_by_its_own_formula():
    mixing = Mixing(cutmix_lambda=0.85)
    kept = np.array([draw_kept_share(mixing, seed=4, first=first) for first in range(8000)])
    none = 1.55 * 0.85 - 0.96
    assert abs((kept == 1).mean() - none) < 4 * np.sqrt(none * (1 - none) / 8000)
    drawn = kept[kept < 1]
    assert drawn.min() >= 0
    # u = exp(4 (kept - 1)) is uniform between exp(-4) and 1
    u = np.exp(4 * (drawn - 1))
    assert abs(u.mean() - (1 + np.exp(-4)) / 2) < 4 * u.std() / np.sqrt(len(u))


def test_the_loss_of_mixed_labels_is_the_weighted_sum():
    logits = torch.randn(3, 4, dtype=torch.float64)
    first, second = torch.tensor([0, 1, 2]), torch.tensor([3, 3, 0])
    weights = torch.tensor([0.9, 0.6, 0.5], dtype=torch.float64)
    found = cross_entropy(logits, [Goal(first, weights), Goal(second, 1 - weights)], 0.1)
    soft = F.one_hot(first, 4) * weights[:, None] + F.one_hot(second, 4) * (1 - weights[:, None])
    soft = soft * 0.9 + 0.1 / 4
    expected = -(soft * logits.log_softmax(1)).sum()
    assert torch.allclose(found, expected)


def test_mixing_keeps_the_memory_layout():
    images = torch.rand(4, 3, 8, 8).to(memory_format=torch.channels_last)
    mixing = Mixing(mixup_alpha=0.2, cutmix_low=0.5, cutmix_high=0.5)
    mixed = mix_batch(images, torch.arange(4), first=0, seed=0, mixing=mixing)
    assert mixed.images.is_contiguous(memory_format=torch.channels_last)


def test_binary_cross_entropy_asks_every_class_by_itself():
    logits = torch.randn(3, 4, dtype=torch.float64)
    first, second = torch.tensor([0, 1, 2]), torch.tensor([3, 1, 0])
    weights = torch.tensor([0.9, 0.6, 0.5], dtype=torch.float64)
    found = binary_cross_entropy(logits, [Goal(first, weights), Goal(second, 1 - weights)], 0.1)
    wanted = F.one_hot(first, 4) * weights[:, None] + F.one_hot(second, 4) * (1 - weights[:, None])
    wanted = wanted * 0.9 + 0.1 / 4
    yes, no = F.logsigmoid(logits), F.logsigmoid(-logits)
    assert torch.allclose(found, -(wanted * yes + (1 - wanted) * no).sum() / 4)
    plain = binary_cross_entropy(logits, [Goal(first)], 0.0)
    hard = F.one_hot(first, 4).double()
    assert torch.allclose(plain, -(hard * yes + (1 - hard) * no).sum() / 4)


def test_smoothing_over_the_wrong_classes_alone():
    logits, labels = torch.randn(5, 10, dtype=torch.float64), torch.arange(5)
    found = cross_entropy(
        logits, [Goal(labels)], smoothing_over_all(0.2, over="others", classes=10)
    )
    wanted = torch.full((5, 10), 0.2 / 9, dtype=torch.float64)
    wanted[torch.arange(5), labels] = 0.8
    assert torch.allclose(found, -(wanted * logits.log_softmax(1)).sum())
    assert smoothing_over_all(0.2, over="all", classes=10) == 0.2


def test_repeated_images_are_mixed_with_others():
    labels = torch.repeat_interleave(torch.arange(4), 3)
    images = labels.float()[:, None, None, None].expand(12, 3, 8, 8)
    mixing = Mixing(mixup_alpha=0.3, cutmix_low=0.5, cutmix_high=0.5, repeats=3)
    mixed = mix_batch(images, labels, first=0, seed=0, mixing=mixing)
    for first, second in ((0, 1), (0, 2), (2, 3)):
        assert (mixed.targets[first].labels != mixed.targets[second].labels).all()
