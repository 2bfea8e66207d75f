"""The planned loss scale: fixed, or doubled in stages of the run."""

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import ceil, floor, frexp, log2

from phalanx.config.schema import Config
from phalanx.errors import ConfigError

AUTOMATIC_START = 2.0**16  # of an adaptive scale, as in torch's GradScaler
_NOT_GIVEN = 1.0  # the default of --loss-scaling


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """A loss scale that doubles from `initial` to `final` in equal stages.

    A stage is a whole number of epochs, and the last one takes the rest; if there are fewer
    epochs than stages, all stages have the same length.
    """

    initial: float
    final: float
    epochs: Fraction  # of the whole run
    steps_per_epoch: Fraction
    automatic: bool = False  # it starts as planned, and then adapts

    def at(self, step: int) -> float:
        """The loss scale of the step after `step` finished ones.

        >>> scale = LossScale(
        ...     initial=16, final=64, epochs=Fraction(7), steps_per_epoch=Fraction(1)
        ... )
        >>> [scale.at(step) for step in range(8)]
        [16.0, 16.0, 32.0, 32.0, 64.0, 64.0, 64.0, 64.0]
        """
        return self.initial * 2.0 ** min(step // self._stage, self._doublings)

    def changes(self, steps: int) -> tuple[tuple[int, float], ...]:
        """The scales in the first `steps` steps, each with its first step.

        >>> scale = LossScale(
        ...     initial=16, final=64, epochs=Fraction(7), steps_per_epoch=Fraction(5, 2)
        ... )
        >>> scale.changes(10)
        ((0, 16.0), (5, 32.0))
        """
        begins = [ceil(stage * self._stage) for stage in range(self._doublings + 1)]
        return tuple((begin, self.at(begin)) for begin in begins if begin < steps)

    @cached_property
    def _doublings(self) -> int:
        return _count_doublings(self.initial, self.final)

    @cached_property
    def _stage(self) -> Fraction:
        stages = self._doublings + 1
        whole = self.epochs // stages
        return (whole or self.epochs / stages) * self.steps_per_epoch


def make_loss_scale(
    config: Config, *, precision: str, epochs: Fraction, steps_per_epoch: Fraction
) -> LossScale:
    """The loss scale of a run, fixed if no initial one is given; ConfigError if impossible.

    An automatic one starts with --loss-scaling if that was given, and then adapts.
    """
    initial, final = config.loss.initial_loss_scaling, config.loss.loss_scaling
    automatic = config.loss.auto_loss_scaling
    problems = []
    if automatic and precision == "32.32":
        problems.append(
            "--auto-loss-scaling: 32-bit gradients need no loss scale of their own; use "
            "--precision 16.32 or 16.16, or leave it out"
        )
    if automatic and initial is not None:
        problems.append(
            "--auto-loss-scaling and --initial-loss-scaling both move the loss scale; give one"
        )
    if not automatic:
        problems += list_doubling_problems(initial, final)
    if problems:
        raise ConfigError("\n".join(problems))
    if automatic:
        initial = final = AUTOMATIC_START if final == _NOT_GIVEN else final
    return LossScale(
        initial=final if initial is None else initial,
        final=final,
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        automatic=automatic,
    )


def list_doubling_problems(initial: float | None, final: float) -> list[str]:
    """Why doubling does not lead from one loss scale to the other, and what to do."""
    if initial is None or initial == final:
        return []
    if initial > final:
        return [
            f"--initial-loss-scaling: {initial:g} is more than --loss-scaling {final:g}, and it "
            f"only grows; swap them, or leave the initial one out"
        ]
    if frexp(final / initial)[0] != 0.5:  # not a power of two
        below = initial * 2.0 ** _count_doublings(initial, final)
        return [
            f"--loss-scaling: doubling from {initial:g} gives {below:g} and {2 * below:g}, never "
            f"{final:g}; give one of them, or another --initial-loss-scaling"
        ]
    return []


def list_loss_scale_warnings(config: Config, *, precision: str) -> list[str]:
    """A warning about 16-bit gradients without a loss scale."""
    scaled = config.loss.auto_loss_scaling or config.loss.loss_scaling > 1
    if config.machine.half_type == "float16" and precision != "32.32" and not scaled:
        return [
            "--half-type float16: small gradients vanish without a loss scale; "
            "--auto-loss-scaling or --loss-scaling 128 keeps them"
        ]
    return []


def _count_doublings(initial: float, final: float) -> int:
    """How often `initial` can be doubled without passing `final`.

    >>> _count_doublings(16, 128), _count_doublings(16, 100), _count_doublings(8, 8)
    (3, 2, 0)
    """
    return floor(log2(final / initial))
