"""Decisions that must be the same in all processes of a run."""

from typing import Protocol, TypeVar

from phalanx.errors import FailedElsewhere

_Value = TypeVar("_Value")


class _Ranks(Protocol):
    """Other processes; see phalanx.parallel.ranks."""

    def gather(self, value: _Value) -> list[_Value]: ...

    def any(self, value: bool) -> bool: ...


class Consensus:
    """Turns the answers of single processes into a common one; trivial for one process.

    A stop, a divergence, an interrupted score and a failed save end or branch the loop. Ranks
    that train together must branch at the same step, or some wait forever in the next
    collective operation. So every rank must make the same calls in the same order.
    """

    def __init__(self, ranks: _Ranks | None = None) -> None:
        self._ranks = ranks

    def any(self, value: bool) -> bool:
        """Whether `value` is true in any process."""
        return value if self._ranks is None else self._ranks.any(value)

    def gather(self, value: _Value) -> list[_Value]:
        """The values of all processes, in the order of ranks."""
        return [value] if self._ranks is None else self._ranks.gather(value)

    def raise_any(self, failure: Exception | None) -> None:
        """Raise if any process failed: this one's failure, else FailedElsewhere. The last call."""
        if self.any(failure is not None):
            self._ranks = None
            raise failure or FailedElsewhere
