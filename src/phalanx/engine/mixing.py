"""Mixup and cutmix: images of a micro-batch, and their labels, mixed on the device.

Mixup blends each image with the one before it, by a ratio drawn per image. Cutmix pastes into each
image a box of the image two before it; the box is the same for the whole micro-batch. With both, an
image has four labels. The draws depend on the images' positions in the training stream.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.plan.draws import draw_beta, draw_uniform

_MIXUP_PARTNER, _CUTMIX_PARTNER = 1, 2  # how many images before an image its partner is
_VERSION_1_SPREAD = 4.0  # TensorFlow 1's first form: the share kept is 1 + ln(u) / 4


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """How images are mixed; by default not at all."""

    mixup_alpha: float = 0.0  # of the Beta distribution that each image's ratio is drawn from
    cutmix_low: float = 0.0  # share of the area that a pasted box leaves: uniform between this...
    cutmix_high: float = 0.0  # ...and this; 0: no boxes
    cutmix_lambda: float = 1.0  # instead: TensorFlow 1's way to draw that share; 1: no boxes
    cutmix_skip: float = 0.0  # share of micro-batches without a box
    repeats: int = 1  # copies of each image in a row: partners are that many times further away

    @property
    def cutmix(self) -> bool:
        """Whether boxes are pasted."""
        return self.cutmix_high > 0 or self.cutmix_lambda < 1


class WeightedLabels(NamedTuple):
    """Labels with a weight per image; without weights, each counts as 1."""

    labels: Tensor  # [N]
    weights: Tensor | None = None  # [N]


Targets = tuple[WeightedLabels, ...]
"""The weighted labels of a micro-batch; the first are those of the images themselves."""


class Mix(NamedTuple):
    """The random draws for a micro-batch: how its images and labels are mixed."""

    own_weights: Tensor | None  # [N], the weight of each image itself in mixup
    box: "_Box | None"  # of cutmix
    repeats: int  # copies of each image in a row: partners are that many times further away


class _Box(NamedTuple):
    """The pixels that are pasted from a partner, and how much of the image they leave."""

    rows: slice
    columns: slice
    kept_share: float  # of the area of the image


def draw_mix(images: Tensor, labels: Tensor, *, first: int, seed: int, mixing: Mixing) -> Mix:
    """How the images at positions `first` onwards of the training stream are mixed.

    In a stage that gets no images they are a meta tensor of the same shape.
    """
    own = box = None
    if mixing.mixup_alpha:
        shares = draw_mixup_weights(mixing.mixup_alpha, seed=seed, first=first, images=len(labels))
        own = torch.from_numpy(shares).to(labels.device, images.dtype, non_blocking=True)
    if mixing.cutmix:
        kept = draw_kept_share(mixing, seed=seed, first=first)
        height, width = images.shape[2:]
        box = place_box(kept, height=height, width=width, seed=seed, first=first)
    return Mix(own, box, mixing.repeats)


def mix_images(images: Tensor, mix: Mix) -> Tensor:
    """The images as the model sees them."""
    if mix.own_weights is not None:
        images = mix_up(images, mix.own_weights, _MIXUP_PARTNER * mix.repeats)
    if mix.box is not None:
        images = paste_box(images, mix.box, _CUTMIX_PARTNER * mix.repeats)
    return images


def mix_labels(labels: Tensor, mix: Mix) -> Targets:
    """The weighted labels of mixed images."""
    targets: Targets = (WeightedLabels(labels),)
    if mix.own_weights is not None:
        others = _roll(labels, _MIXUP_PARTNER * mix.repeats)
        targets = (
            WeightedLabels(labels, mix.own_weights),
            WeightedLabels(others, 1 - mix.own_weights),
        )
    if mix.box is not None:
        targets = weight_targets_by_area(targets, mix.box.kept_share, _CUTMIX_PARTNER * mix.repeats)
    return targets


def mix_pixels(
    pixels: NDArray[np.uint8], *, first: int, seed: int, mixing: Mixing
) -> NDArray[np.uint8]:
    """The pixels [N, H, W, 3] of a micro-batch, mixed as a step mixes them once normalised."""
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float()
    labels = torch.zeros(len(pixels), dtype=torch.int64)
    mix = draw_mix(images, labels, first=first, seed=seed, mixing=mixing)
    mixed: NDArray[np.uint8] = mix_images(images, mix).permute(0, 2, 3, 1).round().byte().numpy()
    return mixed


def draw_mixup_weights(alpha: float, *, seed: int, first: int, images: int) -> np.ndarray:
    """The weight of each image itself in mixup: at least one half."""
    drawn = draw_beta(alpha, seed, "mixup", np.arange(first, first + images))
    return np.maximum(drawn, 1 - drawn).astype(np.float32)


def mix_up(images: Tensor, own: Tensor, away: int = _MIXUP_PARTNER) -> Tensor:
    """Each image blended with the one `away` places before it."""
    return _roll(images, away).lerp_(images, own.view(-1, 1, 1, 1))


def _roll(values: Tensor, places: int) -> Tensor:
    """Rows rolled forwards, the last ones to the front; unlike torch.roll, keeps the layout."""
    return torch.cat([values[-places:], values[:-places]])


def draw_kept_share(mixing: Mixing, *, seed: int, first: int) -> float:
    """The share of the area that a box should leave of the images; 1: no box."""
    skip, draw = (float(draw_uniform(seed, "cutmix", [first], lane)[0]) for lane in (0, 1))
    if mixing.cutmix_high > 0:
        kept = mixing.cutmix_low + draw * (mixing.cutmix_high - mixing.cutmix_low)
        return 1.0 if skip < mixing.cutmix_skip else kept
    lowest = math.exp(-_VERSION_1_SPREAD)
    kept = 1 + math.log(lowest + draw * (1 - lowest)) / _VERSION_1_SPREAD
    none = min(max(1.55 * mixing.cutmix_lambda - 0.96, 0.0), 1.0)
    return 1.0 if skip < max(none, mixing.cutmix_skip) else kept


def place_box(kept: float, *, height: int, width: int, seed: int, first: int) -> _Box | None:
    """A randomly placed box that leaves this share of the area; None if it has no pixels."""
    side = math.sqrt(1 - kept)
    tall, wide = round(side * height), round(side * width)
    if not tall * wide:
        return None
    down, right = (float(draw_uniform(seed, "cutmix-place", [first], lane)[0]) for lane in (0, 1))
    top, left = int(down * (height - tall + 1)), int(right * (width - wide + 1))
    area = 1 - tall * wide / (height * width)
    return _Box(slice(top, top + tall), slice(left, left + wide), area)


def paste_box(images: Tensor, box: _Box, away: int = _CUTMIX_PARTNER) -> Tensor:
    """The images with the box pasted in from their partners."""
    pasted = images.clone()
    inside = (slice(None), slice(None), box.rows, box.columns)
    pasted[inside] = _roll(images[inside], away)
    return pasted


def weight_targets_by_area(targets: Targets, area: float, away: int = _CUTMIX_PARTNER) -> Targets:
    """The targets of the images and of the partners in their boxes, weighted by area."""
    whole = torch.ones_like(targets[0].labels, dtype=torch.float32)
    weighed = [(labels, whole if own is None else own) for labels, own in targets]
    kept = [WeightedLabels(labels, area * own) for labels, own in weighed]
    pasted = [
        WeightedLabels(_roll(labels, away), (1 - area) * _roll(own, away))
        for labels, own in weighed
    ]
    return (*kept, *pasted)
