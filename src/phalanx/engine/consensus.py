"""Decisions that all processes of a run must take alike."""


class Consensus:
    """One process's answers made everybody's. A run of one process agrees with itself.

    A stop, a divergence, an interrupted score and a failed save end or branch the loop. Where
    several ranks train together they must branch at the same step, or the others wait for ever in
    the next collective operation; ranks override these two methods with reductions.
    """

    def any(self, mine: bool) -> bool:
        """Whether any process says yes."""
        return mine

    def raise_any(self, mine: Exception | None) -> None:
        """Raise this process's failure, or another one's."""
        if mine is not None:
            raise mine
