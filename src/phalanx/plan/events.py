"""When to log, evaluate and save: pure functions of the step."""

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import ceil, isqrt

from phalanx.errors import ConfigError
from phalanx.units import format_plural


@dataclass(frozen=True)
class Every:
    """An event that occurs `rate` times per epoch, and at the last step unless the rate is 0."""

    rate: Fraction
    steps_per_epoch: Fraction
    total_steps: int
    first: Fraction = Fraction(0)  # epoch of the first event; 0: one interval after the start

    def is_due(self, step: int) -> bool:
        """Whether the event is due after that many steps.

        >>> every = Every(Fraction(2), Fraction(5), 12)
        >>> [step for step in range(13) if every.is_due(step)]
        [3, 5, 8, 10, 12]
        """
        if not self.rate or step < 1:
            return False
        if step == self.total_steps:
            return True
        return self._count_to(step) > self._count_to(step - 1)

    @cached_property
    def _per_step(self) -> tuple[int, int, int]:
        # integers: this is computed after every step, and fractions are slow
        numerator, denominator = (self.rate / self.steps_per_epoch).as_integer_ratio()
        offset, parts = (self.first * self.rate).as_integer_ratio()
        return numerator * parts, offset * denominator, denominator * parts

    def _count_to(self, step: int) -> int:
        # events up to a step; with first = 0 the start is one, too: only differences are used
        numerator, offset, denominator = self._per_step
        return max(0, (step * numerator - offset) // denominator + 1)

    def count(self, *, after: int = 0) -> int:
        """How often the event occurs after that many steps of the run."""
        if not self.rate:
            return 0
        total = self._count_to(self.total_steps)
        steps_before = max(after, ceil(self.first * self.steps_per_epoch) - 1)
        points = max(0, min(total - self._count_to(after), self.total_steps - steps_before))
        at_last_step = total > self._count_to(self.total_steps - 1)
        return points if at_last_step else points + 1


# --- which rates are possible ---


@dataclass(frozen=True)
class EventKind:
    """An option that gives how often per epoch something is done."""

    flag: str
    verb: str
    never: str  # the warning for a rate of 0
    fills_run: bool  # whether the run must be a whole number of intervals


LOGS = EventKind(
    "--logs-per-epoch",
    "log",
    never="the whole run passes without a log point; 1 gives one every epoch",
    fills_run=True,
)
CKPTS = EventKind("--ckpts-per-epoch", "save", never="", fills_run=False)


def adjust_event_rate(
    every: Every, kind: EventKind, *, epochs: Fraction | None, even: bool
) -> tuple[Every, list[str]]:
    """The event with a rate that is possible in the run, and warnings.

    epochs: the length of the run, if it was given in epochs. even: events must divide the epoch,
    or the run, into equal numbers of steps; the rate is adjusted if necessary.
    """
    if not every.rate:
        return every, [f"{kind.flag} 0: {kind.never}"] if kind.never else []
    span = epochs if every.rate < 1 else Fraction(1)
    if span is None or span.denominator != 1:
        return every, []
    if (span * every.rate).denominator != 1 and every.rate < 1:
        if kind.fills_run:
            raise ConfigError(_describe_uneven(every.rate, kind, int(span)))
        return every, []
    steps, count = every.steps_per_epoch * span, every.rate * span
    if not even or steps.denominator != 1:
        return every, []
    possible = find_nearest_divisor(int(steps), count)
    if possible == count:
        return every, []
    period = "an epoch" if span == 1 else f"in {span} epochs"
    subject = f"{steps} steps {period} do" if steps > 1 else f"1 step {period} does"
    often = "once" if possible == 1 else f"{possible} times"
    warning = (
        f"{kind.flag} {every.rate}: {subject} not divide into {count} equal parts; the run will "
        f"{kind.verb} {often} {period}"
    )
    return replace(every, rate=possible / span), [warning]


def describe_carried_tail(every: Every, kind: EventKind) -> list[str]:
    """A warning if a rate does not divide epochs of fractional length evenly."""
    if not every.rate or (every.steps_per_epoch / every.rate).denominator == 1:
        return []
    return [
        f"{kind.flag} {every.rate}: an epoch has "
        f"{format_plural(float(every.steps_per_epoch), 'step')}, so the run does not {kind.verb} "
        "at equal intervals; --epoch-tail drop gives epochs of whole steps and rounds the rate to "
        "one that divides them"
    ]


def find_nearest_divisor(whole: int, target: Fraction) -> int:
    """The divisor of `whole` nearest to `target`; of two at the same distance the smaller.

    >>> find_nearest_divisor(781, Fraction(10)), find_nearest_divisor(781, Fraction(41))
    (11, 11)
    """
    small = [number for number in range(1, isqrt(whole) + 1) if whole % number == 0]
    divisors = {*small, *(whole // number for number in small)}
    return min(divisors, key=lambda divisor: (abs(divisor - target), divisor))


def _describe_uneven(rate: Fraction, kind: EventKind, epochs: int) -> str:
    """A message that an interval does not divide the run, with intervals and lengths that fit."""
    fitting = Fraction(find_nearest_divisor(epochs, epochs * rate), epochs)
    shorter = epochs - epochs % rate.denominator
    lengths = " or ".join(str(n) for n in (shorter, shorter + rate.denominator) if n)
    return (
        f"{kind.flag} {rate}: cannot {kind.verb} {float(1 / rate):g} epochs at a time "
        f"over {format_plural(epochs, 'epoch')}; {fitting} would work, or {lengths} epochs"
    )
