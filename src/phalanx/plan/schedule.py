"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import cos, pi

from phalanx.config.train_options import ScheduleConfig

_Position = int | Fraction  # in steps; a fraction where a period begins between two of them


@dataclass(frozen=True)
class _Warmup:
    """One way to begin gently."""

    ahead: int  # 0: the first step runs at nothing; 1: it already has its share
    shifts: bool  # whether the schedule waits for the warm-up to end


WARMUPS: dict[str, _Warmup] = {
    "ramp": _Warmup(ahead=0, shifts=False),
    "ramp-shift": _Warmup(ahead=0, shifts=True),
    "mask": _Warmup(ahead=1, shifts=False),
    "shift": _Warmup(ahead=1, shifts=True),
}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate of a whole run."""

    shape: str  # a row of SHAPES
    peak: float
    total: int
    steps_per_epoch: Fraction = Fraction(1)
    warmup: int = 0
    warmup_mode: str = "ramp"  # a row of WARMUPS
    staircase: bool = False  # the rate of an epoch's first step stays for all of it
    freq: Fraction = Fraction(0)  # times an epoch that the shape is looked at; 0: every step
    milestones: tuple[Fraction, ...] = ()  # of a step schedule, in steps
    phases: tuple[float, ...] = (1.0,)  # of a step schedule: shares of the peak between milestones
    decay: float = 1.0  # of an exponential schedule: the factor of one period
    period: Fraction = Fraction(1)  # of an exponential schedule, in steps
    length: int = 0  # steps a cosine or polynomial falls for; 0: what the run has for it
    power: float = 2.0  # of a polynomial schedule
    end_ratio: float = 0.0  # of a cosine or polynomial: where it ends, as a share of the peak

    def lr(self, step: int) -> float:
        """Learning rate of the step that follows `step` finished ones.

        Past the end the rate stays where the schedule ended.

        >>> drops = Schedule(
        ...     shape="step", peak=1.0, total=6, milestones=(Fraction(4),), phases=(1.0, 0.5),
        ...     warmup=2,
        ... )
        >>> [drops.lr(step) for step in range(6)]
        [0.0, 0.5, 1.0, 1.0, 0.5, 0.5]
        """
        at: _Position = min(step, self.total)
        if self.staircase:
            at = _floor_to_period(at, self.steps_per_epoch)
        mode = WARMUPS[self.warmup_mode]
        rate = self._falling(max(0, at - self.warmup) if mode.shifts else at)
        if at >= self.warmup:
            return rate
        return rate * (at + mode.ahead) / (self.warmup + mode.ahead)

    def _falling(self, at: _Position) -> float:
        if self.freq:
            at = _floor_to_period(at, self._refresh)
        end = self.peak * self.end_ratio
        return (self.peak - end) * SHAPES[self.shape](self, at) + end

    def done(self, at: _Position) -> float:
        """The share of a cosine's or polynomial's fall that lies behind."""
        return min(1.0, float(at / self._fall))

    @cached_property
    def _refresh(self) -> Fraction:
        return self.steps_per_epoch / self.freq

    @cached_property
    def _fall(self) -> int:
        waits = self.warmup if WARMUPS[self.warmup_mode].shifts else 0
        return self.length or self.total - waits


def _floor_to_period(at: _Position, period: Fraction) -> Fraction:
    """Where the period that holds `at` began.

    Rounding down, a rate that is refreshed now and then is never ahead of its schedule: drops
    come at their epoch, and the last period of a cosine still learns.
    """
    return at // period * period


SHAPES: dict[str, Callable[[Schedule, _Position], float]] = {  # shares of the peak
    "step": lambda s, at: s.phases[bisect_right(s.milestones, at)],
    "cosine": lambda s, at: 0.5 * (1 + cos(pi * s.done(at))),
    "exponential": lambda s, at: s.decay ** float(at / s.period),
    "polynomial": lambda s, at: (1 - s.done(at)) ** s.power,
    "constant": lambda s, at: 1.0,
}
FALLING = ("cosine", "polynomial")  # those that end at a chosen step


def peak_rate(config: ScheduleConfig, *, global_batch: int, accumulation: int = 1) -> float:
    """The highest learning rate: as given, or scaled with the batch.

    >>> peak_rate(ScheduleConfig(base_learning_rate=-11), global_batch=1024)
    0.5
    """
    batch = global_batch // accumulation if config.lr_batch == "pass" else global_batch
    if config.base_learning_rate is not None:
        return float(2.0**config.base_learning_rate * batch)
    if config.lr_per_image is not None:
        return config.lr_per_image * batch
    return config.lr
