"""One process's share of a step's images."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """Which micro-batches belong to some replicas; by default all of them.

    The micro-batches of a step are slices 0, 1, 2, ... of its global batch, in order. Replica r of
    R takes slices r, R + r, 2R + r, ...: its micro-batch number a is slice a * R + r. So the first
    micro-batches of all replicas together are the first R slices, and a step holds the same images
    in the same order for any number of replicas.
    """

    own: tuple[int, ...] = (0,)
    replicas: int = 1

    def __post_init__(self) -> None:
        for replica in self.own:
            if not 0 <= replica < self.replicas:
                raise ValueError(f"replica {replica} is not one of {self.replicas}, from 0 on")

    def slices(self, count: int) -> list[int]:
        """Its slices among the `count` of a step; ValueError unless replicas get equal numbers."""
        if count % self.replicas:
            raise ValueError(f"{count} micro-batches do not divide among {self.replicas} replicas")
        return [first + r for first in range(0, count, self.replicas) for r in self.own]

    def batches(self, count: int) -> list[int]:
        """The batches it scores among the `count` of a split; shares may differ by one."""
        return [number for number in range(count) if number % self.replicas in self.own]


WHOLE = Share()
