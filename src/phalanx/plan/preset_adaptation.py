"""Adapts a preset's warm-up, milestones and averaging to a run that is shorter than intended."""

from collections.abc import Mapping
from fractions import Fraction
from math import floor
from typing import NamedTuple

from phalanx.config.schema import OPTIONS, Config
from phalanx.config.train_options import ScheduleConfig
from phalanx.plan.events import Every
from phalanx.units import (
    Duration,
    RunLength,
    format_plural,
    parse_duration,
    parse_durations,
    parse_rate,
)

_WARMUP, _MILESTONES = "warmup-epoch", "lr-epoch-decay"
_AVERAGING = ("weight-avg-strategy", "weight-avg-exp-decay", "weight-avg-n")
_FALLS = ("lr-decay-length", "lr-decay-period")
_USUAL_SHARE = Fraction(1, 10)  # of a run, for a warm-up whose share is not known


class _AdaptedSchedule(NamedTuple):
    """The changed options of a schedule, and notes about them."""

    changes: dict[str, str]  # by option
    notes: list[str]


def adapt_schedule(
    config: ScheduleConfig,
    inherited: Mapping[str, str],
    run: RunLength,
    preset_length: Duration | None,
) -> _AdaptedSchedule:
    """The lengths of an inherited schedule that do not fit the run, scaled to their shares.

    inherited: for each option that the user did not give, whose it is, such as "the preset's".
    preset_length: how long the preset trains. If warm-up and milestones fit, nothing changes.
    """
    given = {name: str(text) for name, text in _texts(config).items() if name in inherited and text}
    whole = None if preset_length is None else run.exact_steps(preset_length)
    changes: dict[str, str] = {}
    notes: list[str] = []

    def shorten(name: str, text: str, becomes: str) -> None:
        changes[name] = text
        length = format_plural(run.total_steps, "step")
        notes.append(
            f"{inherited[name]} --{name} {given[name]} does not fit a run of {length}; {becomes}"
        )

    if _WARMUP in given and _is_warmup_too_long(given[_WARMUP], run):
        share = _find_share(parse_duration(given[_WARMUP]), run, whole)
        steps = floor((share or _USUAL_SHARE) * run.total_steps)
        how = "its share of the run" if share else "a tenth of the run"
        becomes = f"it is shortened to {format_plural(steps, 'step')}, {how}"
        shorten(_WARMUP, f"{steps}st", becomes if steps else "there is no warm-up")
    if _MILESTONES in given and config.lr_schedule == "step":
        shares = _find_milestone_shares(given[_MILESTONES], run, whole)
        if shares:
            text = ",".join(f"{float(100 * share):.6g}%" for share in shares)
            shorten(_MILESTONES, text, f"it becomes {text}, the same shares of this run")
    if changes and whole:
        for name in (name for name in _FALLS if name in given):
            share = _find_share(parse_duration(given[name]), run, whole) or Fraction(1)
            changes[name] = f"{max(1, floor(share * run.total_steps))}st"
            notes.append(
                f"{inherited[name]} --{name} {given[name]} becomes {changes[name]}, its share of "
                "this run"
            )
    return _AdaptedSchedule(changes, notes)


def adapt_averaging(
    config: Config, inherited: Mapping[str, str], run: RunLength
) -> tuple[dict[str, object], list[str]]:
    """The options of inherited averaging to reset, with their defaults, and why.

    Empty unless the run saves too few checkpoints for it.
    """
    name, strategy = _AVERAGING[0], config.run.weight_avg_strategy
    if name not in inherited or strategy == "none":
        return {}, []
    first = Fraction(str(config.run.first_ckpt_epoch))
    saves = Every(
        parse_rate(config.run.ckpts_per_epoch), run.steps_per_epoch, run.total_steps, first
    )
    if saves.count() > 1:
        return {}, []
    made = format_plural(saves.count(), "checkpoint")
    note = f"{inherited[name]} --{name} {strategy} is left out: the run makes only {made}"
    return {option: OPTIONS[option].default for option in _AVERAGING}, [note]


def _texts(config: ScheduleConfig) -> dict[str, str | None]:
    """The lengths of a schedule as given in the options."""
    values = config.model_dump(by_alias=True)
    return {name: values[name] for name in (_WARMUP, _MILESTONES, *_FALLS)}


def _is_warmup_too_long(text: str, run: RunLength) -> bool:
    """Whether a warm-up leaves no step at the full learning rate."""
    return 0 < run.count_steps(parse_duration(text)) >= run.total_steps


def _find_share(length: Duration, run: RunLength, whole: Fraction | None) -> Fraction | None:
    """The share of a preset's run that a length takes; None if unknown or not below 1."""
    if length.unit == "%":
        return length.amount / 100 if length.amount < 100 else None
    share = run.exact_steps(length) / whole if whole else None
    return share if share is not None and share < 1 else None


def _find_milestone_shares(
    text: str, run: RunLength, whole: Fraction | None
) -> list[Fraction] | None:
    """The milestones as shares of the run; None if they fit, or if a share is not known."""
    milestones = parse_durations(text)
    if all(run.exact_steps(milestone) <= run.total_steps - 1 for milestone in milestones):
        return None
    shares = [_find_share(milestone, run, whole) for milestone in milestones]
    known = [share for share in shares if share is not None]
    return known if len(known) == len(shares) else None
