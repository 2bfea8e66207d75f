"""Find a learning rate: real steps whose learning rate grows until the loss explodes."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any

import numpy as np

from phalanx.assemble.dataset_summary import plan_run
from phalanx.assemble.session import Session
from phalanx.config.read import Settings

_FIRST_LOSSES = 5  # their mean is the initial loss
_MOMENTUM = 0.8  # of the running mean that detects an explosion
_FAR = 1.5  # times the initial loss is an explosion, whatever came before
_LOST = 0.9  # so is losing that share of the improvement
_FALL = 0.05  # a decrease by a smaller share of the initial loss does not count
_NOISE = 4.0  # nor does a change by fewer standard deviations of a step's loss
_SMOOTHING = 25  # a point is smoothed over this fraction (1/25) of the sweep to each side


@dataclass(frozen=True, kw_only=True)
class LrSweep:
    """The losses of steps with an increasing learning rate, and the suggested rate."""

    rates: tuple[float, ...]
    losses: tuple[float, ...]  # of each step, before its update
    smooth: tuple[float, ...]  # the same, smoothed
    exploded: bool  # at the last rate; else the sweep was completed
    steepest: float | None  # where the loss fell fastest; None if it did not clearly fall
    tenth: float | None  # a tenth of the rate at which it exploded
    noise: float  # standard deviation of a step's loss

    @property
    def suggested_lr(self) -> float | None:
        """The smaller of the two rates; None if the loss did not clearly fall."""
        if self.steepest is None:
            return None
        return min(self.steepest, self.tenth or self.steepest)

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON; a loss that is not finite is null."""
        losses = [loss if isfinite(loss) else None for loss in self.losses]
        return {**asdict(self), "losses": losses, "suggested": self.suggested_lr}


class ExplosionDetector:
    """Detects that the loss has exploded: it is not finite, far off, or all improvement is lost.

    Changes within the noise of the losses so far count neither as far off nor as improvement.
    """

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._mean = self._first = self._lowest = 0.0

    def is_explosion(self, loss: float) -> bool:
        """Whether this loss, given all before it, is an explosion."""
        if not isfinite(loss):
            return True
        self._losses.append(loss)
        if len(self._losses) <= _FIRST_LOSSES:
            self._mean = self._lowest = self._first = float(np.mean(self._losses))
            return False
        self._mean = _MOMENTUM * self._mean + (1 - _MOMENTUM) * loss
        self._lowest = min(self._lowest, self._mean)
        learnt, risen = self._first - self._lowest, self._mean - self._first
        chance = _NOISE * _measure_noise(self._losses)
        is_lost = self._mean > self._lowest + _LOST * learnt
        has_learnt = learnt > max(_FALL * self._first, chance)
        return (has_learnt and is_lost) or risen > max((_FAR - 1) * self._first, chance)


def sweep_learning_rates(
    settings: Settings, *, low: float, high: float, steps: int, done: Callable[[int], None]
) -> LrSweep:
    """Train the run's first steps with rates that grow geometrically from low to high."""
    plan, _ = plan_run(settings)
    losses: list[float] = []
    rates, detector = np.geomspace(low, high, steps).tolist(), ExplosionDetector()
    with Session(settings.config, replace(plan, total_steps=steps)) as session:
        for rate, passes in zip(rates, session.feed.batches_from(0), strict=True):
            # waits for the device: the next step may be one too many
            losses.append(float(session.train_step(passes, rate)[0]))
            done(len(losses))
            if detector.is_explosion(losses[-1]):
                return analyse_sweep(rates[: len(losses)], losses, exploded=True, steps=steps)
    return analyse_sweep(rates, losses, exploded=False, steps=steps)


def analyse_sweep(
    rates: Sequence[float], losses: Sequence[float], *, exploded: bool, steps: int
) -> LrSweep:
    """What the losses suggest; `steps`: the length of the whole sweep."""
    finite = [loss for loss in losses if isfinite(loss)]  # only the last may not be
    smooth = smooth_losses(finite, reach=max(1, steps // _SMOOTHING))
    return LrSweep(
        rates=tuple(rates),
        losses=tuple(losses),
        smooth=tuple(smooth),
        exploded=exploded,
        steepest=_steepest_fall(rates, smooth) if _has_fallen(finite, smooth) else None,
        tenth=rates[-1] / 10 if exploded else None,
        noise=_measure_noise(finite),
    )


def smooth_losses(values: Sequence[float], *, reach: int) -> list[float]:
    """Each value averaged with neighbours on both sides, near ones most: falls do not shift."""
    weights = np.hanning(2 * reach + 3)[1:-1]
    if not values:
        return []
    sums, shares = (np.convolve(row, weights) for row in (values, np.ones(len(values))))
    return [float(mean) for mean in (sums / shares)[reach : reach + len(values)]]


def _has_fallen(losses: Sequence[float], smooth: Sequence[float]) -> bool:
    """Whether the loss fell by more than noise explains."""
    if len(losses) <= _FIRST_LOSSES:
        return False
    first = float(np.mean(losses[:_FIRST_LOSSES]))
    return first - min(smooth) > max(_FALL * first, _NOISE * _measure_noise(losses))


def _measure_noise(losses: Sequence[float]) -> float:
    """The standard deviation of a loss around its trend."""
    if len(losses) < 2:
        return 0.0
    # the median distance of two normal draws is 0.954 deviations; it is robust to outliers
    return float(np.median(np.abs(np.diff(losses)))) / 0.954


def _steepest_fall(rates: Sequence[float], smooth: Sequence[float]) -> float | None:
    """The rate at which the loss fell fastest on its way down; None if it only rose."""
    lowest = int(np.argmin(smooth))
    if lowest < 2:
        return None
    return rates[int(np.argmin(np.gradient(smooth[: lowest + 1])))]
