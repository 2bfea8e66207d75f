"""Decisions that all processes of a run must take alike."""

from typing import Protocol, TypeVar

from phalanx.errors import FailedElsewhere

_Value = TypeVar("_Value")


class _Ranks(Protocol):
    """Other processes; see phalanx.parallel.ranks."""

    def gather(self, value: _Value) -> list[_Value]: ...

    def any(self, mine: bool) -> bool: ...


class Consensus:
    """One process's answers made everybody's. A run of one process agrees with itself.

    A stop, a divergence, an interrupted score and a failed save end or branch the loop. Where
    several ranks train together they must branch at the same step, or the others wait for ever in
    the next collective operation. So every rank must ask the same questions in the same order.
    """

    def __init__(self, ranks: _Ranks | None = None) -> None:
        self._ranks = ranks

    def any(self, mine: bool) -> bool:
        """Whether any process says yes."""
        return mine if self._ranks is None else self._ranks.any(mine)

    def gather(self, mine: _Value) -> list[_Value]:
        """Everybody's value, in the order of ranks."""
        return [mine] if self._ranks is None else self._ranks.gather(mine)

    def raise_any(self, mine: Exception | None) -> None:
        """Raise this process's failure, or FailedElsewhere; nothing is asked after that."""
        if self.any(mine is not None):
            self._ranks = None
            raise mine or FailedElsewhere
