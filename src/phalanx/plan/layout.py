"""Which rank runs which replicas: arithmetic, whatever devices are there."""

from dataclasses import dataclass
from functools import cached_property

from phalanx.errors import ConfigError
from phalanx.units import format_plural


@dataclass(frozen=True)
class Layout:
    """The replicas of a run over its ranks, one device each.

    Replicas that share BatchNorm statistics (`bn_span` of them, 0 to k-1, k to 2k-1, ...) run side
    by side in one pass. Where there are more ranks than such groups, each group is split over
    several ranks, which exchange their statistics. What a rank runs in one pass is a unit. Units
    go round the ranks: rank w of W runs units w, W + w, 2W + w, ..., one after the other. So after
    round n the units 0 to nW - 1 are done, in the order of their replicas.
    """

    replicas: int = 1
    ranks: int = 1
    bn_span: int = 1

    @cached_property
    def unit(self) -> int:
        """How many replicas run side by side."""
        return self.bn_span // max(1, self.ranks * self.bn_span // self.replicas)

    @property
    def units(self) -> int:
        """How many passes over different replicas a step has."""
        return self.replicas // self.unit

    @property
    def folded(self) -> bool:
        """Whether some rank stands in for several devices."""
        return self.units > self.ranks or self.unit > 1

    @property
    def rounds(self) -> int:
        """How many units the busiest rank runs, one after the other."""
        return -(-self.units // self.ranks)

    def units_of(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """The replicas of each unit that a rank runs, in order."""
        return tuple(
            tuple(range(number * self.unit, (number + 1) * self.unit))
            for number in range(rank, self.units, self.ranks)
        )

    def replicas_of(self, rank: int) -> tuple[int, ...]:
        """All replicas that a rank runs, in order."""
        return tuple(replica for unit in self.units_of(rank) for replica in unit)

    @property
    def span_groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that exchange BatchNorm statistics with each other; none where none must."""
        apart = self.bn_span // self.unit
        if apart == 1:
            return ()
        return tuple(tuple(range(first, first + apart)) for first in range(0, self.ranks, apart))


def lay_out(replicas: int, *, devices: int, bn_span: int = 1) -> Layout:
    """The replicas on as many of the devices as they can use."""
    if replicas % bn_span:
        fits = [span for span in range(1, replicas + 1) if replicas % span == 0]
        raise ConfigError(
            f"--bn-span {bn_span}: does not divide {format_plural(replicas, 'replica')}; use "
            f"{_join_or(fits)}"
        )
    groups = replicas // bn_span
    if devices <= groups:
        return Layout(replicas, max(devices, 1), bn_span)
    # each group gets as many ranks as share it evenly
    split = max(n for n in range(1, bn_span + 1) if bn_span % n == 0 and n * groups <= devices)
    return Layout(replicas, groups * split, bn_span)


def _join_or(numbers: list[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last


def count_accumulation(global_batch: int, *, micro_batch: int, replicas: int) -> int:
    """Micro-batches of each replica in a step of that many images."""
    least = micro_batch * replicas
    if global_batch % least == 0:
        return global_batch // least
    below, above = global_batch // least * least, -(-global_batch // least) * least
    nearest = f"{below} or {above}" if below else f"{above}"
    raise ConfigError(
        f"--global-batch-size {global_batch}: is no multiple of {least} = micro-batch "
        f"{micro_batch} x replicas {replicas}; the nearest {'are' if below else 'is'} {nearest}"
    )
