"""The order of training images: which image is at which position of the stream, by arithmetic."""

from dataclasses import dataclass
from math import isqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phalanx.errors import ConfigError
from phalanx.plan.draws import GOLDEN, Words, draw_bits, splitmix64

_ROUNDS = 6  # four rounds make a Feistel network pseudorandom; two more for small datasets

_Positions = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Order:
    """Which image is at which position of the training stream; computed, not stored.

    The stream is epoch 0's permutation, then epoch 1's, and so on: position p is place
    p % images of epoch p // images.
    """

    images: int
    global_batch: int
    seed: int
    drop_tail: bool = False  # leave out the last images of an epoch that do not fill a batch
    repeats: int = 1  # copies of each image in a row; a pass over all then takes as many epochs

    def __post_init__(self) -> None:
        if self.images < 1 or self.global_batch < 1:
            raise ConfigError(
                f"an order needs at least one image and a batch of one, got {self.images} images "
                f"and a global batch of {self.global_batch}"
            )
        if self.drop_tail and self.global_batch > self.images:
            raise ConfigError(
                f"--epoch-tail drop leaves no step: a global batch of {self.global_batch} is more "
                f"than all {self.images} images; use a smaller batch or --epoch-tail carry"
            )

    def positions(self, step: int) -> _Positions:
        """The stream positions of one step, [global_batch]."""
        start = step * self.global_batch
        if self.drop_tail:
            epoch, place = divmod(step, self.images // self.global_batch)
            start = epoch * self.images + place * self.global_batch
        return np.arange(start, start + self.global_batch, dtype=np.int64)

    def find_next_pass(self, step: int) -> int:
        """The first pass over all images that begins at this step or after it."""
        return -(-int(self.positions(step)[0]) // (self.images * self.repeats))

    def find_end(self, number: int) -> int:
        """The first step after a pass, all of whose positions belong to later ones."""
        end = (number + 1) * self.images * self.repeats
        if self.drop_tail:
            return end // self.images * (self.images // self.global_batch)
        return -(-end // self.global_batch)

    def find_dropped(self, number: int) -> NDArray[np.int64]:
        """The images of which a pass leaves out at least one copy, because of `drop_tail`."""
        if not self.drop_tail:
            return np.empty(0, np.int64)
        epochs = number * self.repeats + np.arange(self.repeats)[:, None]
        places = np.arange(self.images - self.images % self.global_batch, self.images)
        return np.unique(self.indices((epochs * self.images + places).ravel()))

    def epochs(self, positions: ArrayLike) -> NDArray[np.int64]:
        """The number of the permutation, a pass over all images, that each position belongs to."""
        return np.asarray(positions, np.int64) // self.repeats // self.images

    def indices(self, positions: ArrayLike) -> NDArray[np.int64]:
        """The image at each position."""
        places = np.atleast_1d(np.asarray(positions, np.int64)) // self.repeats % self.images
        keys = draw_bits(self.seed, "order", np.atleast_1d(self.epochs(positions)))
        return _permute(places, keys, size=self.images).reshape(np.shape(positions))


def _permute(places: _Positions, keys: Words, *, size: int) -> NDArray[np.int64]:
    """The image of each place in 0..size-1 under the permutation given by its key.

    A Feistel network permutes 0..side**2-1 with side ceil(sqrt(size)), slightly more than needed;
    a value outside is mapped again until it is inside (cycle walking).
    """
    side = np.uint64(isqrt(size - 1) + 1)
    images = _feistel(places.astype(np.uint64), keys, side=side)
    outside = np.flatnonzero(images >= size)
    while outside.size:
        images[outside] = _feistel(images[outside], keys[outside], side=side)
        outside = outside[images[outside] >= size]
    return images.astype(np.int64)


def _feistel(values: Words, keys: Words, *, side: np.uint64) -> Words:
    left, right = np.divmod(values, side)
    for turn in range(_ROUNDS):
        noise = splitmix64(right * GOLDEN + (keys ^ np.uint64(turn)))
        left, right = right, (left + noise % side) % side
    return left * side + right
