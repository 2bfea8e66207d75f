"""Ratios from interleaved blocks: disturbances of the machine affect both sides alike."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

_RESAMPLES = 2000


@dataclass(frozen=True)
class PairedRatio:
    """How two rates compare: the median of paired ratios, with its interval."""

    ours: tuple[float, ...]  # images/s of each block
    theirs: tuple[float, ...]

    @property
    def pairs(self) -> list[float]:
        """Our rate over theirs, pair by pair."""
        return [a / b for a, b in zip(self.ours, self.theirs, strict=True)]

    @property
    def median(self) -> float:
        """The median of the paired ratios."""
        return median(self.pairs)

    @property
    def interval95(self) -> tuple[float, float]:
        """Bootstrap interval of the median, with a fixed seed."""
        draw, pairs = random.Random(0), self.pairs
        middles = sorted(median(draw.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES))
        return middles[int(0.025 * _RESAMPLES)], middles[int(0.975 * _RESAMPLES)]


def measure_pairs(
    ours: Callable[[], int], theirs: Callable[[], int], *, pairs: int, done: Callable[[int], None]
) -> PairedRatio:
    """Run blocks alternately, each returning the images it trained; the first side alternates."""
    rates: dict[int, list[float]] = {0: [], 1: []}
    for pair in range(pairs):
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            begin = perf_counter()
            images = (ours, theirs)[side]()
            rates[side].append(images / (perf_counter() - begin))
        done(pair + 1)
    return PairedRatio(tuple(rates[0]), tuple(rates[1]))
