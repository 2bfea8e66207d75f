"""A validation split for data that has none: exact, the same share of each class, stable.

Within a class, images are ranked by a hash of their names and the first few are taken. So a split
depends only on the names, not on the seed or the format, and adding images moves few others.
"""

import hashlib
from collections.abc import Callable
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import ConfigError
from phalanx.units import parse_val_split

_Integers = NDArray[np.int64]


def choose_valid_images(
    labels: _Integers, name: Callable[[int], str], *, wanted: str, classes: tuple[str, ...]
) -> _Integers:
    """The numbers of the images to validate on, ascending; none with a label out of range.

    wanted: "10%", "0.1" or "40".
    """
    counts = np.bincount(labels[(labels >= 0) & (labels < len(classes))], minlength=len(classes))
    quotas = _count_by_class(counts, _count_images(wanted, counts))
    chosen = []
    for label in np.flatnonzero(quotas):
        numbers = np.flatnonzero(labels == label)
        ranks = [_rank(name(int(number))) for number in numbers]
        order = sorted(range(len(ranks)), key=ranks.__getitem__)
        chosen.append(numbers[order[: quotas[label]]])
    return np.sort(np.concatenate(chosen)) if chosen else np.empty(0, np.int64)


def _rank(name: str) -> bytes:
    return hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8).digest()


def _count_images(wanted: str, counts: _Integers) -> int:
    """How many images to hold out; ConfigError if a class would have none left to train on."""
    share, images = parse_val_split(wanted), int(counts.sum())
    total = share if isinstance(share, int) else int(share * images + Fraction(1, 2))
    most = int(np.maximum(counts - 1, 0).sum())
    if total > most:
        raise ConfigError(
            f"--val-split {wanted}: asks for {total:,} of {images:,} images, but at most "
            f"{most:,} can be held out: each class keeps one to train on"
        )
    if total < 1:
        raise ConfigError(
            f"--val-split {wanted}: is less than one of {images:,} images; give a larger share"
        )
    return total


def _count_by_class(counts: _Integers, total: int) -> _Integers:
    """How many images of each class to hold out: shares rounded so that the sum is exact.

    Each class gives at least one if the total allows it, and never its last.
    """
    most = np.maximum(counts - 1, 0)
    least = np.minimum(most, 1) * int(total >= np.count_nonzero(most))
    images = int(counts.sum())
    exact = [Fraction(total * int(count), images) for count in counts]
    taken = np.clip(np.array([int(share) for share in exact], np.int64), least, most)
    while (missing := total - int(taken.sum())) != 0:
        step = 1 if missing > 0 else -1
        room = np.flatnonzero(taken < most if missing > 0 else taken > least)
        nearest = sorted(room, key=lambda label: step * (int(taken[label]) - exact[label]))
        taken[nearest[: abs(missing)]] += step
    return taken


def choose_by_first_rule(files: list[str], *, share: float, seed: int) -> set[str]:
    """The images of one class that older runs validate on: at random, from name and seed.

    At least one, and never all.
    """
    ranks = {}
    for file in files:
        key = f"{seed}\0{file}".encode(errors="surrogateescape")
        digest = hashlib.blake2b(key, digest_size=8).digest()
        ranks[file] = int.from_bytes(digest, "big") / 2**64
    chosen = {file for file, rank in ranks.items() if rank < share}
    if len(files) > 1:
        chosen.add(min(files, key=ranks.__getitem__))
        chosen.discard(max(files, key=ranks.__getitem__))
    return chosen
