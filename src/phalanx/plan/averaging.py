"""Which checkpoints are averaged, and how much each counts: pure arithmetic."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.config.schema import Config
from phalanx.errors import ConfigError, suggest
from phalanx.plan.events import Every
from phalanx.units import format_plural

_STRATEGIES = ("mean", "exponential")
_DEFAULT_COUNT = 5  # checkpoints to average
_ALL = -1  # the value that means all checkpoints


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """How the last checkpoints of a run are averaged."""

    strategy: str = "mean"
    decay: float = 0.99  # of the exponential strategy
    count: int | None = None  # how many of the last; None: the default number, or fewer
    norm_steps: int = 0  # training steps to re-estimate batch-norm statistics; 0: average them

    def __post_init__(self) -> None:
        if self.strategy not in _STRATEGIES:
            raise ConfigError(
                f"--weight-avg-strategy {self.strategy}: {suggest(self.strategy, _STRATEGIES)}"
            )
        if not 0 <= self.decay < 1:
            raise ConfigError(
                f"--weight-avg-exp-decay {self.decay:g}: expected a number from 0 to below 1"
            )
        if self.count is not None and self.count < 1 and self.count != _ALL:
            raise ConfigError(
                f"--weight-avg-n {self.count}: expected 1 or more checkpoints, or {_ALL} for all"
            )
        if self.norm_steps < 0:
            raise ConfigError(f"--reestimate-norms {self.norm_steps}: expected 0 or more steps")

    def count_among(self, available: int, *, where: Path) -> int:
        """How many of the available checkpoints to average; ConfigError if there are too few."""
        fewest = 2 if self.count is None or self.count == _ALL else self.count
        if available < fewest:
            option = f"--weight-avg-n {self.count}: " if self.count == fewest else ""
            fewer = f"give --weight-avg-n {available}, or " if available > 1 else ""
            raise ConfigError(
                f"{option}{where} holds {format_plural(available, 'checkpoint')} to average, "
                f"{fewest} are needed; {fewer}train with --keep {fewest} and a --ckpts-per-epoch "
                "that saves as many"
            )
        if self.count == _ALL:
            return available
        return min(_DEFAULT_COUNT, available) if self.count is None else self.count


def count_consecutive(steps: Sequence[int], save: Every) -> int:
    """How many of the last checkpoints are consecutive: no checkpoint between them is missing.

    >>> from fractions import Fraction
    >>> every_second = Every(Fraction(3), Fraction(6), 18)
    >>> count_consecutive([4, 14, 15, 16, 18], every_second)
    4
    """
    for place in range(len(steps) - 1, 0, -1):
        if any(save.is_due(step) for step in range(steps[place - 1] + 1, steps[place])):
            return len(steps) - place
    return len(steps)


def build_averaging(config: Config) -> Averaging | None:
    """How a run averages its last checkpoints at its end; None if it does not."""
    run = config.run
    if run.weight_avg_strategy == "none":
        return None
    return Averaging(
        strategy=run.weight_avg_strategy,
        decay=run.weight_avg_exp_decay,
        count=run.weight_avg_n,
    )


def count_kept_checkpoints(config: Config) -> int:
    """How many of its newest checkpoints a run keeps: at least those that it averages."""
    averaging = build_averaging(config)
    if averaging is None:
        return config.run.keep
    averaged = _DEFAULT_COUNT if averaging.count is None else averaging.count
    return sys.maxsize if averaged == _ALL else max(config.run.keep, averaged)


def check_averaging(config: Config, *, saves: int) -> None:
    """Raise ConfigError if a run would average more checkpoints than it saves."""
    averaging = build_averaging(config)
    least = 0 if averaging is None else max(averaging.count or 0, 2)
    if saves < least:
        fewer = f"--weight-avg-n {saves}, or " if saves > 1 else ""
        raise ConfigError(
            f"--weight-avg-strategy {config.run.weight_avg_strategy}: {least} checkpoints are "
            f"needed and the run makes {saves}; give {fewer}a larger --ckpts-per-epoch"
        )


def ema_decay_at(decay: float, step: int) -> float:
    """The decay of a moving average after that many steps: small at first, then `decay`.

    min(decay, (1 + step) / (10 + step)), so that the random initial weights are soon forgotten.
    It depends only on the step, so a resume needs no other state.
    """
    return min(decay, (1 + step) / (10 + step))
