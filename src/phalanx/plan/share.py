"""The part of a step's images that one replica takes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """Which micro-batches are one replica's; by default all of them.

    The micro-batches of a step are slices 0, 1, 2, ... of its global batch, in order. Replica r of
    R takes slices r, R + r, 2R + r, ...: its micro-batch number a is slice a * R + r. So the first
    micro-batches of all replicas together are the first R slices, and a step holds the same images
    in the same order for any number of replicas.
    """

    replica: int = 0
    replicas: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.replica < self.replicas:
            raise ValueError(f"replica {self.replica} is not one of {self.replicas}, from 0 on")

    def slices(self, count: int) -> range:
        """Its slices, of the `count` of a step; ValueError unless all replicas get as many."""
        if count % self.replicas:
            raise ValueError(f"{count} micro-batches do not divide among {self.replicas} replicas")
        return self.batches(count)

    def batches(self, count: int) -> range:
        """The batches it scores, of the `count` of a split: one more or less is no matter there."""
        return range(self.replica, count, self.replicas)


WHOLE = Share()
