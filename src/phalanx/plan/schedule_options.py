"""What may be said about the course of the learning rate, and what becomes of it."""

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import ceil, floor

from phalanx.errors import ConfigError
from phalanx.plan.schedule import FALLING, WARMUPS, Schedule
from phalanx.units import Duration

_NO_TIME = Duration(Fraction(0), "ep")


@dataclass(frozen=True)
class RunLength:
    """How long a run is."""

    total: int
    steps_per_epoch: Fraction

    def exact(self, duration: Duration) -> Fraction:
        """A duration in steps, not rounded."""
        whole = {
            "ep": self.steps_per_epoch,
            "st": Fraction(1),
            "%": Fraction(self.total, 100),
        }[duration.unit]
        return duration.amount * whole


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """What a user says about the course of the learning rate, as the options spell it."""

    shape: str = "cosine"
    warmup: Duration = _NO_TIME
    warmup_mode: str = "ramp"
    staircase: bool = False
    freq: Fraction = Fraction(0)
    decay: tuple[float, ...] = (0.1,)  # one factor, or the share of the peak in every stretch
    milestones: tuple[Duration, ...] = ()  # the rate falls with the step that begins there
    drop_after: tuple[Fraction, ...] = ()  # shares of the run; it falls with the step after
    period: Duration | None = None
    length: Duration | None = None
    power: float = 2.0
    end_ratio: float = 0.0


def make_schedule(asked: ScheduleOptions, peak: float, clock: RunLength) -> Schedule:
    """The schedule of a run; what cannot be done is refused."""
    problems = schedule_problems(asked, clock)
    if problems:
        raise ConfigError("\n".join(problems))
    drops = _drop_steps(asked, clock) if asked.shape == "step" else ()
    return Schedule(
        shape=asked.shape,
        peak=peak,
        total=clock.total,
        steps_per_epoch=clock.steps_per_epoch,
        warmup=ceil(clock.exact(asked.warmup)),
        warmup_mode=asked.warmup_mode,
        staircase=asked.staircase,
        freq=asked.freq,
        milestones=drops,
        phases=_share_phases(asked.decay, len(drops)),
        decay=asked.decay[0],
        period=_decay_period(asked, clock),
        length=ceil(clock.exact(asked.length)) if asked.length else 0,
        power=asked.power,
        end_ratio=asked.end_ratio if asked.shape in FALLING else 0.0,
    )


def _drop_steps(asked: ScheduleOptions, clock: RunLength) -> tuple[Fraction, ...]:
    """The steps from which on the rate is lower."""
    if asked.drop_after:
        return tuple(Fraction(floor(share * clock.total) + 1) for share in asked.drop_after)
    return tuple(clock.exact(milestone) for milestone in asked.milestones)


def _share_phases(decay: tuple[float, ...], drops: int) -> tuple[float, ...]:
    """The share of the peak before, between and after the drops.

    >>> share_phases((0.5,), 2), share_phases((1, 0.1, 0.01), 2)
    ((1.0, 0.5, 0.25), (1, 0.1, 0.01))
    """
    return decay if len(decay) > 1 else tuple(decay[0] ** n for n in range(drops + 1))


def _decay_period(asked: ScheduleOptions, clock: RunLength) -> Fraction:
    """Steps in which an exponential falls by its factor: as asked, else from refresh to refresh."""
    if asked.period:
        return clock.exact(asked.period)
    return clock.steps_per_epoch / (asked.freq or 1)


# --- what cannot be done, and what may not be meant ---


def schedule_problems(asked: ScheduleOptions, clock: RunLength) -> list[str]:
    """Why the run cannot have this schedule, each with the way out; nothing if it can."""
    return [line for check in _CHECKS for line in check(asked, clock)]


def _check_warmup(asked: ScheduleOptions, clock: RunLength) -> list[str]:
    """What is wrong with the length of the warm-up."""
    warmup, total = ceil(clock.exact(asked.warmup)), clock.total
    if warmup > total:
        return [
            f"--warmup-epoch: {asked.warmup} is {warmup} steps, longer than the run of {total}; "
            f"shorten it or give it as a share, such as 10%"
        ]
    waits = WARMUPS[asked.warmup_mode].shifts
    if waits and warmup == total and asked.shape in FALLING and not asked.length:
        return [
            f"--warmup-mode {asked.warmup_mode}: the warm-up takes all {total} steps and leaves "
            f"none to the {asked.shape}; shorten --warmup-epoch, or choose ramp or mask"
        ]
    return []


def _check_drops(asked: ScheduleOptions, clock: RunLength) -> list[str]:
    """What is wrong with where a step schedule falls."""
    if asked.shape != "step":
        return []
    if asked.milestones and asked.drop_after:
        return ["--lr-epoch-decay and --lr-drop-after both say where the rate falls; give one"]
    if not asked.milestones and not asked.drop_after:
        return [
            "--lr-schedule step: nothing says where the rate falls; add --lr-epoch-decay, "
            "such as 30,60,90 or 50%,75%, or choose constant"
        ]
    return _check_shares(asked) or _check_order(asked, clock)


def _check_shares(asked: ScheduleOptions) -> list[str]:
    """What is wrong with drops that are given as shares of the run."""
    return [
        f"--lr-drop-after: {float(share):g} is no share of the run; give numbers between 0 and 1, "
        f"such as 0.5,0.75, or epochs with --lr-epoch-decay"
        for share in asked.drop_after
        if not 0 < share < 1
    ]


def _check_order(asked: ScheduleOptions, clock: RunLength) -> list[str]:
    """What is wrong with the order of the drops."""
    flag, words = _spell_drops(asked)
    named = list(zip(_drop_steps(asked, clock), words, strict=True))
    if named[0][0] == 0:
        return [f"{flag}: {words[0]} is the very start; lower --lr instead"]
    for (earlier, first), (later, second) in pairwise(named):
        if later <= earlier:
            ordered = ",".join(dict(sorted(named)).values())
            return [f"{flag}: {second} follows {first} but is not later; write {ordered}"]
    return []


def _check_decay(asked: ScheduleOptions, clock: RunLength) -> list[str]:
    """What is wrong with the factor of a step or exponential schedule."""
    if asked.shape not in ("step", "exponential"):
        return []
    if min(asked.decay) <= 0:
        return [f"--lr-decay: {min(asked.decay):g} would end all learning; choose a number above 0"]
    given, drops = len(asked.decay), len(asked.drop_after or asked.milestones)
    if asked.shape == "exponential" and given > 1:
        return [f"--lr-decay: an exponential has one factor, got {given}; give one, such as 0.97"]
    if given > 1 and given != drops + 1:
        return [
            f"--lr-decay: {given} numbers for {drops} drops; give one factor, or {drops + 1} "
            f"shares of the peak, one for each stretch"
        ]
    return []


def _check_lengths(asked: ScheduleOptions, clock: RunLength) -> list[str]:
    """What is wrong with the lengths of a fall and of a period."""
    lengths = {"--lr-decay-length": asked.length, "--lr-decay-period": asked.period}
    return [
        f"{flag}: {length} is no time to fall in; make it longer or leave it away"
        for flag, length in lengths.items()
        if length is not None and not length.amount
    ]


def _check_stairs(asked: ScheduleOptions, clock: RunLength) -> list[str]:
    """What is wrong with how often the rate may change."""
    if not asked.staircase:
        return []
    problems = []
    if asked.freq:
        problems.append(
            "--lr-staircase and --lr-scheduler-freq both say how often the rate changes; give one"
        )
    if _starts_at_nothing(asked) and clock.total <= clock.steps_per_epoch:
        problems.append(
            "--lr-staircase: the only epoch would keep the rate of its first step, which the "
            "warm-up makes 0; leave one of them away, or train longer"
        )
    return problems


_CHECKS = (_check_warmup, _check_drops, _check_decay, _check_lengths, _check_stairs)


def schedule_warnings(asked: ScheduleOptions, clock: RunLength) -> list[str]:
    """What the run does with its schedule that may not be meant."""
    lines = _warn_of_idle_options(asked) + _warn_of_late_drops(asked, clock)
    if asked.staircase and _starts_at_nothing(asked):
        lines.append(
            "--lr-staircase: the first epoch runs at rate 0, that of its first step; "
            "--warmup-mode mask or shift begins above it"
        )
    if asked.freq and asked.freq * clock.total < clock.steps_per_epoch:
        lines.append(
            f"--lr-scheduler-freq {asked.freq}: the run ends before the rate is refreshed once"
        )
    return lines


def _warn_of_idle_options(asked: ScheduleOptions) -> list[str]:
    """One line for each option that the chosen shape does not look at."""
    idle = {
        "--lr-epoch-decay": (asked.milestones, ("step",)),
        "--lr-drop-after": (asked.drop_after, ("step",)),
        "--lr-decay-period": (asked.period, ("exponential",)),
        "--lr-decay-length": (asked.length, FALLING),
    }
    return [
        f"{flag} has no effect with --lr-schedule {asked.shape}, only with {' and '.join(users)}"
        for flag, (value, users) in idle.items()
        if value and asked.shape not in users
    ]


def _warn_of_late_drops(asked: ScheduleOptions, clock: RunLength) -> list[str]:
    """One line for each drop that no step of the run reaches."""
    if asked.shape != "step":
        return []
    flag, words = _spell_drops(asked)
    return [
        f"{flag}: {word} is step {ceil(drop)}, and the run ends at {clock.total}; "
        f"the rate does not fall there"
        for drop, word in zip(_drop_steps(asked, clock), words, strict=True)
        if drop > clock.total - 1
    ]


def _spell_drops(asked: ScheduleOptions) -> tuple[str, list[str]]:
    """The option that says where the rate falls, and its values as text."""
    if asked.drop_after:
        return "--lr-drop-after", [f"{float(share):g}" for share in asked.drop_after]
    return "--lr-epoch-decay", [str(milestone) for milestone in asked.milestones]


def _starts_at_nothing(asked: ScheduleOptions) -> bool:
    """Whether the first step has a rate of 0."""
    return asked.warmup.amount > 0 and WARMUPS[asked.warmup_mode].ahead == 0
