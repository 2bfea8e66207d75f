"""Mixup and cutmix: images of a micro-batch mixed with one another on the device, labels alike.

Mixup blends each image with its neighbour, by a share of its own. Cutmix pastes one box of the
image two places before into all images of the micro-batch. Both together have four labels an image.
Chance is a function of the images' places in the training stream.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from phalanx.plan.draws import draw_beta, draw_uniform

_MIXUP_PARTNER, _CUTMIX_PARTNER = 1, 2  # how far the partner stands from an image
_VERSION_1_SPREAD = 4.0  # TensorFlow 1's first form: the share kept is 1 + ln(u) / 4


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """How images are mixed; what is not named is off."""

    mixup_alpha: float = 0.0  # of the Beta distribution each image's share comes from
    cutmix_low: float = 0.0  # share of the image that a pasted box leaves, uniform up to...
    cutmix_high: float = 0.0  # ...this; 0 for no boxes
    cutmix_lambda: float = 1.0  # instead: TensorFlow 1's way to draw that share; 1 for no boxes
    cutmix_skip: float = 0.0  # share of micro-batches without a box
    repeats: int = 1  # times an image comes in a row: partners stand so much further apart

    @property
    def cutmix(self) -> bool:
        """Whether boxes are pasted."""
        return self.cutmix_high > 0 or self.cutmix_lambda < 1


class WeightedLabels(NamedTuple):
    """Labels that count with a weight an image, or with 1."""

    labels: Tensor  # [N]
    weights: Tensor | None = None  # [N]


Targets = tuple[WeightedLabels, ...]
"""What the model's answers to a micro-batch are held against; the first are the images' own."""


class Mix(NamedTuple):
    """What chance decides for a micro-batch: how its images are mixed, and its labels alike."""

    own: Tensor | None  # [N], what each image keeps of itself in mixup
    box: "_Box | None"  # of cutmix
    repeats: int  # times an image comes in a row: partners stand so much further apart


class _Box(NamedTuple):
    """The pixels that a partner gives to an image, and what is left of the image itself."""

    rows: slice
    columns: slice
    left: float  # share of the area


def draw_mix(batch: "_Images", *, first: int, seed: int, mixing: Mixing) -> Mix:
    """How the images at places `first` and following of the stream are mixed."""
    own = box = None
    if mixing.mixup_alpha:
        shares = draw_shares(mixing.mixup_alpha, seed=seed, first=first, images=len(batch.labels))
        device, dtype = batch.labels.device, batch.images.dtype
        own = torch.from_numpy(shares).to(device, dtype, non_blocking=True)
    if mixing.cutmix:
        kept = draw_kept(mixing, seed=seed, first=first)
        height, width = batch.images.shape[2:]
        box = place_box(kept, height=height, width=width, seed=seed, first=first)
    return Mix(own, box, mixing.repeats)


class _Images(Protocol):
    """A micro-batch; of one whose images are elsewhere, their shape and type are known."""

    @property
    def images(self) -> Tensor: ...

    @property
    def labels(self) -> Tensor: ...


def mix_images(images: Tensor, mix: Mix) -> Tensor:
    """The images as the model sees them."""
    if mix.own is not None:
        images = mix_up(images, mix.own, _MIXUP_PARTNER * mix.repeats)
    if mix.box is not None:
        images = paste_box(images, mix.box, _CUTMIX_PARTNER * mix.repeats)
    return images


def mix_labels(labels: Tensor, mix: Mix) -> Targets:
    """What the model's answers are held against."""
    targets: Targets = (WeightedLabels(labels),)
    if mix.own is not None:
        others = _rolled(labels, _MIXUP_PARTNER * mix.repeats)
        targets = (WeightedLabels(labels, mix.own), WeightedLabels(others, 1 - mix.own))
    if mix.box is not None:
        targets = share_targets(targets, mix.box.left, _CUTMIX_PARTNER * mix.repeats)
    return targets


def draw_shares(alpha: float, *, seed: int, first: int, images: int) -> np.ndarray:
    """What each image keeps of itself in mixup: a half or more."""
    drawn = draw_beta(alpha, seed, "mixup", np.arange(first, first + images))
    return np.maximum(drawn, 1 - drawn).astype(np.float32)


def mix_up(images: Tensor, own: Tensor, away: int = _MIXUP_PARTNER) -> Tensor:
    """Each image blended with the one before it, or so many places before."""
    return _rolled(images, away).lerp_(images, own.view(-1, 1, 1, 1))


def _rolled(values: Tensor, places: int) -> Tensor:
    """Rows moved on, the last ones to the front; unlike torch.roll it keeps the memory layout."""
    return torch.cat([values[-places:], values[:-places]])


def draw_kept(mixing: Mixing, *, seed: int, first: int) -> float:
    """The share of the area that a box is to leave of the images; 1 for no box."""
    skip, draw = (float(draw_uniform(seed, "cutmix", [first], lane)[0]) for lane in (0, 1))
    if mixing.cutmix_high > 0:
        kept = mixing.cutmix_low + draw * (mixing.cutmix_high - mixing.cutmix_low)
        return 1.0 if skip < mixing.cutmix_skip else kept
    lowest = math.exp(-_VERSION_1_SPREAD)
    kept = 1 + math.log(lowest + draw * (1 - lowest)) / _VERSION_1_SPREAD
    none = min(max(1.55 * mixing.cutmix_lambda - 0.96, 0.0), 1.0)
    return 1.0 if skip < max(none, mixing.cutmix_skip) else kept


def place_box(kept: float, *, height: int, width: int, seed: int, first: int) -> _Box | None:
    """Where the box goes that leaves this share of the area; None where it has no pixel."""
    side = math.sqrt(1 - kept)
    tall, wide = round(side * height), round(side * width)
    if not tall * wide:
        return None
    down, right = (float(draw_uniform(seed, "cutmix-place", [first], lane)[0]) for lane in (0, 1))
    top, left = int(down * (height - tall + 1)), int(right * (width - wide + 1))
    area = 1 - tall * wide / (height * width)
    return _Box(slice(top, top + tall), slice(left, left + wide), area)


def paste_box(images: Tensor, box: _Box, away: int = _CUTMIX_PARTNER) -> Tensor:
    """The images with a box of their partners in them."""
    pasted = images.clone()
    inside = (slice(None), slice(None), box.rows, box.columns)
    pasted[inside] = _rolled(images[inside], away)
    return pasted


def share_targets(targets: Targets, area: float, away: int = _CUTMIX_PARTNER) -> Targets:
    """The targets of images and of the partners whose box they show, by area."""
    whole = torch.ones_like(targets[0].labels, dtype=torch.float32)
    weighed = [(labels, whole if own is None else own) for labels, own in targets]
    kept = [WeightedLabels(labels, area * own) for labels, own in weighed]
    pasted = [
        WeightedLabels(_rolled(labels, away), (1 - area) * _rolled(own, away))
        for labels, own in weighed
    ]
    return (*kept, *pasted)
