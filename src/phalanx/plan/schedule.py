"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from math import ceil, cos, floor, pi

from phalanx.config.train_options import ScheduleConfig
from phalanx.errors import ConfigError
from phalanx.units import (
    Duration,
    RunLength,
    parse_duration,
    parse_durations,
    parse_numbers,
    parse_rate,
)

_MOST_SAMPLED = 2_000  # steps of a long warm-up, before all those around the best are compared
_NO_WARMUP = Duration(Fraction(0), "ep")
_Position = int | Fraction  # in steps; a fraction where a period begins between two of them


@dataclass(frozen=True)
class _Warmup:
    """One way to warm up."""

    offset: int  # steps added to the ramp: with 0, the first step has rate 0
    shifts: bool  # whether the schedule starts only after the warm-up


WARMUPS: dict[str, _Warmup] = {
    "ramp": _Warmup(offset=0, shifts=False),
    "ramp-shift": _Warmup(offset=0, shifts=True),
    "mask": _Warmup(offset=1, shifts=False),
    "shift": _Warmup(offset=1, shifts=True),
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
    freq: Fraction = Fraction(0)  # times per epoch that the rate follows the shape; 0: every step
    milestones: tuple[Fraction, ...] = ()  # of a step schedule, in steps
    phases: tuple[float, ...] = (1.0,)  # of a step schedule: shares of the peak between milestones
    decay: float = 1.0  # of an exponential schedule: the factor of one period
    period: Fraction = Fraction(1)  # of an exponential schedule, in steps
    length: int = 0  # steps for which a cosine or polynomial falls; 0: to the end of the run
    power: float = 2.0  # of a polynomial schedule
    end_ratio: float = 0.0  # of a cosine or polynomial: where it ends, as a share of the peak
    start: int = 0  # the step of the run that all steps here are counted from

    def lr(self, step: int) -> float:
        """Learning rate of the step that follows `step` finished ones.

        Before the start it is the first rate of the schedule, past the end the last one.

        >>> drops = Schedule(
        ...     shape="step", peak=1.0, total=6, milestones=(Fraction(4),), phases=(1.0, 0.5),
        ...     warmup=2,
        ... )
        >>> [drops.lr(step) for step in range(6)]
        [0.0, 0.5, 1.0, 1.0, 0.5, 0.5]
        """
        at: _Position = min(max(0, step - self.start), self.total)
        if self.staircase:
            at = _floor_to_period(at, self.steps_per_epoch)
        mode = WARMUPS[self.warmup_mode]
        rate = self._rate_without_warmup(max(0, at - self.warmup) if mode.shifts else at)
        if at >= self.warmup:
            return rate
        return rate * (at + mode.offset) / (self.warmup + mode.offset)

    def find_highest(self) -> float:
        """The highest rate of any step: in the warm-up or right after it, as all shapes fall."""
        rising = self.warmup + ceil(self.steps_per_epoch) * self.staircase  # or an epoch later
        first, last = self.start, self.start + min(rising, self.total - 1)
        stride = max(1, (last - first) // _MOST_SAMPLED)
        best = max(range(first, last + 1, stride), key=self.lr)
        near = range(max(first, best - stride), min(last, best + stride) + 1)
        return max(map(self.lr, (*near, last)))

    def _rate_without_warmup(self, at: _Position) -> float:
        if self.freq:
            at = _floor_to_period(at, self._update_period)
        end = self.peak * self.end_ratio
        return (self.peak - end) * SHAPES[self.shape](self, at) + end

    def decay_progress(self, at: _Position) -> float:
        """The share of its fall that a cosine or polynomial has completed."""
        return min(1.0, float(at / self._fall_steps))

    @cached_property
    def _update_period(self) -> Fraction:
        return self.steps_per_epoch / self.freq

    @cached_property
    def _fall_steps(self) -> int:
        delay = self.warmup if WARMUPS[self.warmup_mode].shifts else 0
        return self.length or self.total - delay


def _floor_to_period(at: _Position, period: Fraction) -> Fraction:
    """The start of the period that contains `at`.

    Rounding down keeps a rate that changes once per period from being ahead of its schedule: a
    drop comes at its epoch, and the last period of a cosine still has a rate above 0.
    """
    return at // period * period


SHAPES: dict[str, Callable[[Schedule, _Position], float]] = {  # shares of the peak
    "step": lambda s, at: s.phases[bisect_right(s.milestones, at)],
    "cosine": lambda s, at: 0.5 * (1 + cos(pi * s.decay_progress(at))),
    "exponential": lambda s, at: s.decay ** float(at / s.period),
    "polynomial": lambda s, at: (1 - s.decay_progress(at)) ** s.power,
    "constant": lambda s, at: 1.0,
}
_WITH_END = ("cosine", "polynomial")  # those that end at a chosen step


def find_peak_lr(config: ScheduleConfig, *, global_batch: int, accumulation: int = 1) -> float:
    """The highest learning rate: as given, or scaled with the batch.

    >>> find_peak_lr(ScheduleConfig(base_learning_rate=-11), global_batch=1024)
    0.5
    """
    batch = global_batch // accumulation if config.lr_batch == "pass" else global_batch
    if config.base_learning_rate is not None:
        return float(2.0**config.base_learning_rate * batch)
    if config.lr_per_image is not None:
        return config.lr_per_image * batch
    return config.lr


# --- from the options to the schedule ---


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """The options of the learning rate, parsed."""

    shape: str = "cosine"
    warmup: Duration = _NO_WARMUP
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


def read_schedule_options(config: ScheduleConfig) -> ScheduleOptions:
    """The options of the learning rate, their text parsed."""
    return ScheduleOptions(
        shape=config.lr_schedule,
        warmup=parse_duration(config.warmup_epoch),
        warmup_mode=config.warmup_mode,
        staircase=config.lr_staircase,
        freq=parse_rate(config.lr_scheduler_freq),
        decay=tuple(map(float, parse_numbers(config.lr_decay))),
        milestones=parse_durations(config.lr_epoch_decay) if config.lr_epoch_decay else (),
        drop_after=parse_numbers(config.lr_drop_after) if config.lr_drop_after else (),
        period=parse_duration(config.lr_decay_period) if config.lr_decay_period else None,
        length=parse_duration(config.lr_decay_length) if config.lr_decay_length else None,
        power=config.lr_power,
        end_ratio=config.lr_end_ratio,
    )


def find_schedule_start(config: ScheduleConfig, run: RunLength) -> int:
    """The step at which the schedule begins; ConfigError if it is not within the run."""
    start = run.count_steps(parse_duration(config.lr_schedule_start))
    if start >= run.total_steps:
        raise ConfigError(
            f"--lr-schedule-start: {config.lr_schedule_start} is step {start:,}, and the run ends "
            f"at {run.total_steps:,}; begin earlier, or train longer"
        )
    return start


def make_schedule(
    options: ScheduleOptions, peak: float, run: RunLength, *, start: int = 0
) -> Schedule:
    """The schedule of a run or of the rest of one; ConfigError lists what is impossible."""
    problems = list_schedule_problems(options, run)
    if problems:
        raise ConfigError("\n".join(problems))
    drops = [step for step, _ in _list_drops(options, run)]
    decay = options.decay
    refresh = run.steps_per_epoch / (options.freq or 1)
    return Schedule(
        shape=options.shape,
        peak=peak,
        total=run.total_steps,
        steps_per_epoch=run.steps_per_epoch,
        warmup=run.count_steps(options.warmup),
        warmup_mode=options.warmup_mode,
        staircase=options.staircase,
        freq=options.freq,
        milestones=tuple(drops),
        # shares of the peak before, between and after the drops: as given, or powers of one factor
        phases=decay if len(decay) > 1 else tuple(decay[0] ** n for n in range(len(drops) + 1)),
        decay=decay[0],
        period=run.exact_steps(options.period) if options.period else refresh,
        length=run.count_steps(options.length) if options.length else 0,
        power=options.power,
        end_ratio=options.end_ratio if options.shape in _WITH_END else 0.0,
        start=start,
    )


def _list_drops(options: ScheduleOptions, run: RunLength) -> list[tuple[Fraction, str]]:
    """The steps at which the rate of a step schedule drops, each with the text that gave it."""
    if options.shape != "step":
        return []
    if options.drop_after:
        total = run.total_steps
        return [(Fraction(floor(s * total) + 1), f"{float(s):g}") for s in options.drop_after]
    return [(run.exact_steps(milestone), str(milestone)) for milestone in options.milestones]


# --- impossible schedules, and unusual ones ---


def list_schedule_problems(options: ScheduleOptions, run: RunLength) -> list[str]:
    """Why the schedule is impossible in this run, each with what to do; empty if it is possible."""
    return [
        *_list_warmup_problems(options, run),
        *_list_drop_problems(options, run),
        *_list_decay_problems(options),
        *_list_length_problems(options),
        *_list_staircase_problems(options, run),
    ]


def _list_warmup_problems(options: ScheduleOptions, run: RunLength) -> list[str]:
    """What is wrong with the length of the warm-up."""
    warmup, total = run.count_steps(options.warmup), run.total_steps
    if warmup > total:
        return [
            f"--warmup-epoch: {options.warmup} is {warmup} steps, longer than the run of {total}; "
            f"shorten it or give it as a share, such as 10%"
        ]
    shifts = WARMUPS[options.warmup_mode].shifts
    if shifts and warmup == total and options.shape in _WITH_END and not options.length:
        return [
            f"--warmup-mode {options.warmup_mode}: the warm-up takes all {total} steps and leaves "
            f"none to the {options.shape}; shorten --warmup-epoch, or choose ramp or mask"
        ]
    return []


def _list_drop_problems(options: ScheduleOptions, run: RunLength) -> list[str]:
    """What is wrong with the drops of a step schedule."""
    if options.shape != "step":
        return []
    if options.milestones and options.drop_after:
        return ["--lr-epoch-decay and --lr-drop-after both say where the rate falls; give one"]
    if not options.milestones and not options.drop_after:
        return [
            "--lr-schedule step: nothing says where the rate falls; add --lr-epoch-decay, "
            "such as 30,60,90 or 50%,75%, or choose constant"
        ]
    outside = [
        f"--lr-drop-after: {float(share):g} is not a share of the run; give numbers between 0 and "
        f"1, such as 0.5,0.75, or epochs with --lr-epoch-decay"
        for share in options.drop_after
        if not 0 < share < 1
    ]
    return outside or _list_drop_order_problems(options, run)


def _list_drop_order_problems(options: ScheduleOptions, run: RunLength) -> list[str]:
    """What is wrong with the order of the drops."""
    flag, drops = _find_drop_flag(options), _list_unrounded_drops(options, run)
    if drops[0][0] == 0:
        return [f"{flag}: {drops[0][1]} is the start of the run; lower --lr instead"]
    for (earlier, first), (later, second) in pairwise(drops):
        if later <= earlier:
            ordered = ",".join(dict(sorted(drops)).values())
            return [f"{flag}: {second} follows {first} but is not later; write {ordered}"]
    return []


def _list_unrounded_drops(options: ScheduleOptions, run: RunLength) -> list[tuple[Fraction, str]]:
    """The drops, not rounded to steps: in a very short run two may round to the same one."""
    shares = [(share, f"{float(share):g}") for share in options.drop_after]
    return shares or _list_drops(options, run)


def refuse_joint_drops(options: ScheduleOptions, run: RunLength) -> None:
    """Raise ConfigError if two drops that the user has given would happen at the same step."""
    for (earlier, first), (later, second) in pairwise(_list_drops(options, run)):
        if later == earlier:
            raise ConfigError(
                f"{_find_drop_flag(options)}: {first} and {second} are both step {later} of a run "
                f"of {run.total_steps}; train longer, or write {second}"
            )


def _find_drop_flag(options: ScheduleOptions) -> str:
    """The option that gives the drops."""
    return "--lr-drop-after" if options.drop_after else "--lr-epoch-decay"


def _list_decay_problems(options: ScheduleOptions) -> list[str]:
    """What is wrong with the factor of a step or exponential schedule."""
    if options.shape not in ("step", "exponential"):
        return []
    least, given = min(options.decay), len(options.decay)
    if least <= 0:
        return [f"--lr-decay: {least:g} would end all learning; choose a number above 0"]
    if options.shape == "exponential" and given > 1:
        return [f"--lr-decay: an exponential has one factor, got {given}; give one, such as 0.97"]
    drops = len(options.drop_after or options.milestones)
    if given > 1 and given != drops + 1:
        return [
            f"--lr-decay: {given} numbers for {drops} drops; give one factor, or {drops + 1} "
            f"shares of the peak, one for each stretch"
        ]
    return []


def _list_length_problems(options: ScheduleOptions) -> list[str]:
    """What is wrong with --lr-decay-length and --lr-decay-period."""
    lengths = {"--lr-decay-length": options.length, "--lr-decay-period": options.period}
    return [
        f"{flag}: {length} is too short to fall in; make it longer or leave it out"
        for flag, length in lengths.items()
        if length is not None and not length.amount
    ]


def _list_staircase_problems(options: ScheduleOptions, run: RunLength) -> list[str]:
    """What is wrong with how often the rate may change."""
    if not options.staircase:
        return []
    problems = []
    if options.freq:
        problems.append(
            "--lr-staircase and --lr-scheduler-freq both say how often the rate changes; give one"
        )
    if _starts_at_zero(options) and run.total_steps <= run.steps_per_epoch:
        problems.append(
            "--lr-staircase: the only epoch would keep the rate of its first step, which the "
            "warm-up makes 0; leave one of them out, or train longer"
        )
    return problems


def _starts_at_zero(options: ScheduleOptions) -> bool:
    """Whether the first step has a rate of 0."""
    return options.warmup.amount > 0 and WARMUPS[options.warmup_mode].offset == 0


def list_schedule_warnings(options: ScheduleOptions, run: RunLength) -> list[str]:
    """Effects of the schedule that the user may not have intended."""
    warnings = [
        f"{_find_drop_flag(options)}: {text} is step {ceil(step)}, and the run ends at "
        f"{run.total_steps}; the rate does not fall there"
        for step, text in _list_drops(options, run)
        if step > run.total_steps - 1
    ]
    if options.staircase and _starts_at_zero(options):
        warnings.append(
            "--lr-staircase: the first epoch runs at rate 0, that of its first step; "
            "--warmup-mode mask or shift begins above it"
        )
    if options.freq and options.freq * run.total_steps < run.steps_per_epoch:
        warnings.append(
            f"--lr-scheduler-freq {options.freq}: the run ends before the rate is refreshed once"
        )
    return warnings
