"""Which rank runs which replicas and stages: arithmetic, independent of actual devices."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from phalanx.errors import ConfigError
from phalanx.units import format_plural

_MOST_LISTED = 10


@dataclass(frozen=True)
class Layout:
    """How the replicas of a run are distributed over its ranks, which have one device each.

    If a model is split into stages, `stages` consecutive ranks are a pipeline, which runs a
    replica together: rank p * stages + s is stage s of pipeline p. Otherwise each rank is a
    pipeline by itself.

    Replicas that share BatchNorm statistics (`bn_span` of them, 0 to k-1, k to 2k-1, ...) run
    together in one pass. If there are more pipelines than such groups, each group is split over
    several pipelines, which exchange their statistics. What a pipeline runs in one pass is a turn.
    Turns are assigned in round-robin order: pipeline p of P runs turns p, P + p, 2P + p, ..., one
    after the other. So after round n the turns 0 to nP - 1 are done, in the order of replicas.
    """

    replicas: int = 1
    ranks: int = 1
    bn_span: int = 1
    stages: int = 1  # that have their own ranks

    @property
    def pipelines(self) -> int:
        """The number of pipelines, which is how many turns run at the same time."""
        return self.ranks // self.stages

    def stage_of(self, rank: int) -> int:
        """The stage that a rank runs."""
        return rank % self.stages

    def pipeline_of(self, rank: int) -> int:
        """The pipeline that a rank belongs to."""
        return rank // self.stages

    def ranks_of(self, pipeline: int) -> tuple[int, ...]:
        """The ranks of a pipeline, by stage."""
        return tuple(range(pipeline * self.stages, (pipeline + 1) * self.stages))

    def peers_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that run the same stage as `rank`, including itself, by pipeline."""
        return tuple(range(self.stage_of(rank), self.ranks, self.stages))

    @cached_property
    def turn_size(self) -> int:
        """How many replicas run together in one pass."""
        return self.bn_span // self.span_pipelines

    @property
    def span_pipelines(self) -> int:
        """How many pipelines share the statistics of one group of replicas."""
        return max(1, self.pipelines * self.bn_span // self.replicas)

    @property
    def turns(self) -> int:
        """The number of turns, over all pipelines, in a step."""
        return self.replicas // self.turn_size

    @property
    def folded(self) -> bool:
        """Whether a rank runs several replicas; folded stages are known only to the plan."""
        return self.turns > self.pipelines or self.turn_size > 1

    @property
    def rounds(self) -> int:
        """The number of turns of the busiest pipeline, which run one after the other."""
        return -(-self.turns // self.pipelines)

    def turns_of(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """The replicas of each turn that a rank runs, in order."""
        return tuple(
            tuple(range(number * self.turn_size, (number + 1) * self.turn_size))
            for number in range(self.pipeline_of(rank), self.turns, self.pipelines)
        )

    def replicas_of(self, rank: int) -> tuple[int, ...]:
        """All replicas that a rank runs, in order."""
        return tuple(replica for turn in self.turns_of(rank) for replica in turn)

    @property
    def span_groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that exchange BatchNorm statistics; empty if none do."""
        groups = {(rank, *self.partners_of(rank)) for rank in range(self.ranks)}
        return tuple(sorted({tuple(sorted(group)) for group in groups if len(group) > 1}))

    def partners_of(self, rank: int) -> tuple[int, ...]:
        """The other ranks that a rank exchanges BatchNorm statistics with."""
        apart, peers = self.span_pipelines, self.peers_of(rank)
        first = self.pipeline_of(rank) // apart * apart
        return tuple(other for other in peers[first : first + apart] if other != rank)


def make_layout(replicas: int, *, devices: int, bn_span: int = 1, stages: int = 1) -> Layout:
    """The layout of replicas on as many of the devices as they can use.

    Stages get their own devices if there are enough for at least one replica.
    """
    if replicas % bn_span:
        raise ConfigError(f"--bn-span {bn_span}: {_explain_span(bn_span, replicas)}")
    if devices < stages:
        stages = 1
    pipelines, groups = max(1, devices // stages), replicas // bn_span
    if pipelines > groups:
        # each group gets as many pipelines as can divide it evenly
        shares = (n for n in range(1, bn_span + 1) if bn_span % n == 0 and n * groups <= pipelines)
        pipelines = groups * max(shares)
    return Layout(replicas, pipelines * stages, bn_span, stages)


def _explain_span(bn_span: int, replicas: int) -> str:
    """Why a span of this size is not possible, and which would be."""
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
    global_batch: int, *, micro_batch: int, replicas: int, keeps_global_batch: bool = False
) -> int:
    """The micro-batches of each replica in a step of that many images.

    keeps_global_batch: it was not given, but computed before --replicas auto changed the replicas.
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
        batch_flag = f" --global-batch-size {global_batch}" if keeps_global_batch else ""
        ways.insert(0, f"--batch-size {smaller}{batch_flag}")
    what = f"--global-batch-size {global_batch}: is"
    if keeps_global_batch:
        what = f"--replicas auto: the global batch of {global_batch}, which it keeps, is"
    raise ConfigError(
        f"{what} not a multiple of {least} = micro-batch {micro_batch} x replicas {replicas}; "
        f"use {' or '.join(ways)}"
    )


def describe_devices(device: str, ranks: int) -> str:
    """The devices of so many ranks, in words; a CPU is one device for all of them.

    >>> describe_devices("cpu", 2)
    '2 processes on cpu'
    """
    if ranks == 1:
        return device
    return f"{ranks} processes on {device}" if device == "cpu" else f"{ranks} x {device}"


def describe_layout(layout: Layout, *, stages: int = 1) -> str:
    """A line on where replicas and stages run; empty if there is one of each.

    stages: of the model. If the layout has fewer, they are folded.

    >>> describe_layout(Layout(2, 4, stages=2), stages=2)
    '2 replicas of 2 stages, one stage on each of 4 devices'
    """
    if layout.stages < stages:
        replicas = describe_layout(layout)
        fold = f"{stages} stages folded into one: activations between splits are recomputed"
        return f"{replicas}; {fold}" if replicas else fold
    what, each = f"{layout.replicas:,} replicas", format_plural(layout.ranks, "device")
    if stages > 1:
        what = f"{what} of {stages} stages" if layout.replicas > 1 else f"{stages} stages"
        if not layout.folded:
            return f"{what}, one stage on each of {each}"
    elif layout.replicas == 1:
        return ""
    if not layout.folded:
        return f"{what}, one on each of {each}"
    way = " one after the other"
    if layout.turn_size > 1:
        way = (
            f" {layout.turn_size} at a time, side by side" if layout.rounds > 1 else " side by side"
        )
    if layout.pipelines == 1:
        return f"{what} folded onto {each}: they run{way}"
    counts = sorted({len(layout.replicas_of(rank)) for rank in (0, layout.ranks - 1)})
    where = "each" if stages == 1 else f"every {stages}"
    return f"{what} folded onto {each}: {_join(counts, 'or')} on {where},{way}"
