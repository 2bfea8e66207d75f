"""Is it time to log, to evaluate, to save: pure functions of the step."""

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property


@dataclass(frozen=True)
class Every:
    """An event that comes `rate` times an epoch, and at the last step unless the rate is 0."""

    rate: Fraction
    steps_per_epoch: Fraction
    total_steps: int

    def due(self, step: int) -> bool:
        """Whether the event comes right after that many steps are done.

        >>> every = Every(Fraction(2), Fraction(5), 12)
        >>> [step for step in range(13) if every.due(step)]
        [3, 5, 8, 10, 12]
        """
        if not self.rate or step < 1:
            return False
        if step == self.total_steps:
            return True
        return self._passed(step) > self._passed(step - 1)

    @cached_property
    def _per_step(self) -> tuple[int, int]:
        # whole numbers: this is asked after every step, and fractions are slow
        return (self.rate / self.steps_per_epoch).as_integer_ratio()

    def _passed(self, step: int) -> int:
        numerator, denominator = self._per_step
        return step * numerator // denominator

    def count(self) -> int:
        """How often it comes over the whole run."""
        if not self.rate:
            return 0
        points = min(self._passed(self.total_steps), self.total_steps)
        on_last = self._passed(self.total_steps) > self._passed(self.total_steps - 1)
        return points if on_last else points + 1
