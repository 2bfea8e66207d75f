"""Which rank runs which replicas: arithmetic, whatever devices are there."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from phalanx.errors import ConfigError
from phalanx.units import format_plural

_MOST_LISTED = 10


@dataclass(frozen=True)
class Layout:
    """The replicas of a run over its ranks, one device each.

    Replicas that share BatchNorm statistics (`bn_span` of them, 0 to k-1, k to 2k-1, ...) run side
    by side in one pass. Where there are more ranks than such groups, each group is split over
    several ranks, which exchange their statistics. What a rank runs in one pass is a turn. Turns
    go round the ranks: rank w of W runs turns w, W + w, 2W + w, ..., one after the other. So after
    round n the turns 0 to nW - 1 are done, in the order of their replicas.
    """

    replicas: int = 1
    ranks: int = 1
    bn_span: int = 1

    @cached_property
    def turn_size(self) -> int:
        """How many replicas run side by side."""
        return self.bn_span // max(1, self.ranks * self.bn_span // self.replicas)

    @property
    def turns(self) -> int:
        """How many passes over different replicas a step has."""
        return self.replicas // self.turn_size

    @property
    def folded(self) -> bool:
        """Whether some rank stands in for several devices."""
        return self.turns > self.ranks or self.turn_size > 1

    @property
    def rounds(self) -> int:
        """How many turns the busiest rank runs, one after the other."""
        return -(-self.turns // self.ranks)

    def turns_of(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """The replicas of each turn that a rank runs, in order."""
        return tuple(
            tuple(range(number * self.turn_size, (number + 1) * self.turn_size))
            for number in range(rank, self.turns, self.ranks)
        )

    def replicas_of(self, rank: int) -> tuple[int, ...]:
        """All replicas that a rank runs, in order."""
        return tuple(replica for turn in self.turns_of(rank) for replica in turn)

    @property
    def span_groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that exchange BatchNorm statistics with each other; none where none must."""
        apart = self.bn_span // self.turn_size
        if apart == 1:
            return ()
        return tuple(tuple(range(first, first + apart)) for first in range(0, self.ranks, apart))

    def partners_of(self, rank: int) -> tuple[int, ...]:
        """The other ranks that a rank exchanges BatchNorm statistics with."""
        apart = self.bn_span // self.turn_size
        first = rank // apart * apart
        return tuple(other for other in range(first, first + apart) if other != rank)


def lay_out(replicas: int, *, devices: int, bn_span: int = 1) -> Layout:
    """The replicas on as many of the devices as they can use."""
    if replicas % bn_span:
        raise ConfigError(f"--bn-span {bn_span}: {_explain_span(bn_span, replicas)}")
    groups = replicas // bn_span
    if devices <= groups:
        return Layout(replicas, max(devices, 1), bn_span)
    # each group gets as many ranks as share it evenly
    split = max(n for n in range(1, bn_span + 1) if bn_span % n == 0 and n * groups <= devices)
    return Layout(replicas, groups * split, bn_span)


def _explain_span(bn_span: int, replicas: int) -> str:
    """Why so many replicas cannot share statistics, and which numbers could."""
    if bn_span > replicas:
        there = "is only 1 replica" if replicas == 1 else f"are only {replicas} replicas"
        ways = f"--replicas {bn_span}, or a multiple of that, or --bn-span {replicas}"
        return f"there {there}; give {ways}"
    fits = [span for span in range(1, replicas + 1) if replicas % span == 0]
    if len(fits) > _MOST_LISTED:
        fits = [max(n for n in fits if n < bn_span), min(n for n in fits if n > bn_span)]
    return f"does not divide {replicas} replicas; use {_join(fits, 'or')}"


def _join(numbers: Iterable[int], word: str) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} {word} {last}" if most else last


def count_accumulation(
    global_batch: int, *, micro_batch: int, replicas: int, kept: bool = False
) -> int:
    """Micro-batches of each replica in a step of that many images.

    kept: nobody asked for that many, they are what one replica had before --replicas auto.
    """
    least = micro_batch * replicas
    if global_batch % least == 0:
        return global_batch // least
    nearest = [n * least for n in (global_batch // least, global_batch // least + 1) if n]
    ways = [f"--global-batch-size {_join(nearest, 'or')}"]
    shared, left = divmod(global_batch, replicas)
    if not left:
        smaller = next(n for n in range(min(micro_batch, shared), 0, -1) if shared % n == 0)
        # without its own option, the global batch would follow the smaller micro-batch
        ways.insert(0, f"--batch-size {smaller}" + f" --global-batch-size {global_batch}" * kept)
    what = f"--global-batch-size {global_batch}: is"
    if kept:
        what = f"--replicas auto: the global batch of {global_batch}, which it keeps, is"
    raise ConfigError(
        f"{what} not a multiple of {least} = micro-batch {micro_batch} x replicas {replicas}; "
        f"use {' or '.join(ways)}"
    )


def describe_devices(device: str, ranks: int) -> str:
    """What so many ranks compute on; a CPU is one device, whatever runs on it.

    >>> describe_devices("cpu", 2)
    '2 processes on cpu'
    """
    if ranks == 1:
        return device
    return f"{ranks} processes on {device}" if device == "cpu" else f"{ranks} x {device}"


def describe_layout(layout: Layout) -> str:
    """Where the replicas run, in one line; empty where there is only one."""
    replicas, each = f"{layout.replicas:,}", format_plural(layout.ranks, "device")
    if layout.replicas == 1:
        return ""
    if not layout.folded:
        return f"{replicas} replicas, one on each of {each}"
    way = " one after the other"
    if layout.turn_size > 1:
        way = (
            f" {layout.turn_size} at a time, side by side" if layout.rounds > 1 else " side by side"
        )
    counts = sorted({len(layout.replicas_of(rank)) for rank in (0, layout.ranks - 1)})
    if layout.ranks == 1:
        return f"{replicas} replicas folded onto {each}: they run{way}"
    return f"{replicas} replicas folded onto {each}: {_join(counts, 'or')} on each,{way}"
