"""The bytes that ranks exchange in a step, and the time this takes on a network: arithmetic.

The model of the network, its constants and a comparison with measurements: docs/scale.md.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from phalanx.errors import ConfigError
from phalanx.plan.layout import Layout
from phalanx.plan.pipeline import time_backward, time_passes
from phalanx.plan.plan import Plan

# measured separately from the steps that they predict, see docs/scale.md
_LINK_SHARE = 0.95  # share of a link's bandwidth in a ring: a bare all-reduce over gloo and TCP
_GLOO_PAIR_SHARE = 0.62  # the same for a gather, if two ranks share one connection
_REDUCE_GBIT, _GATHER_GBIT = 7.4, 2.0  # Gbit/s of gradients that gloo and a core copy and add
_BACKWARD_SHARE = 0.55  # share of a pass and its update; 0.52 to 0.60 on a GPU and a CPU
_MIB = 2**20
_BITS = 8e-9  # Gbit per byte


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The bytes that each rank receives in a step; it sends as many."""

    gradients: int
    statistics: int  # of batch norms that are shared by replicas on several ranks
    activations: int = 0  # and their gradients, between stages, of the busiest rank

    @property
    def total(self) -> int:
        """The sum; the few bytes of the metrics are not counted."""
        return self.gradients + self.statistics + self.activations


def count_exchange(
    plan: Plan, *, gradients: int, statistics: int, activations: int = 0
) -> Exchange:
    """The exchange of a step, from the bytes of one stage's gradients, statistics and activations.

    A ring all-reduce of gradients moves 2 (P-1)/P of their bytes, once per step. Under strict
    determinism every rank gets those of all others in each round, to add them in replica order.
    Means and variances are gathered in each pass by the ranks that share them, and their gradients,
    too. activations: what a rank gets in one pass, activations of the previous stage and gradients
    of the next one.
    """
    layout = plan.layout
    others, passes = layout.pipelines - 1, plan.accumulation * layout.rounds
    received = 2 * others * gradients // layout.pipelines
    if plan.determinism == "strict":
        received = layout.rounds * others * gradients
    return Exchange(
        gradients=received,
        statistics=2 * passes * (layout.span_pipelines - 1) * statistics,
        activations=passes * activations,
    )


@dataclass(frozen=True, kw_only=True)
class Network:
    """Hosts with one full-duplex link each."""

    gbit: float  # Gbit/s, in each direction
    hosts: int

    def time(self, size: float, share: float = _LINK_SHARE) -> float:
        """Seconds that `size` bytes take on a link with a share of its bandwidth."""
        return size * _BITS / (self.gbit * share)


@dataclass(frozen=True, kw_only=True)
class LinkUse:
    """What goes through a host's link in a step, by kind; for each kind, of the busiest host."""

    sizes: dict[str, int]  # bytes in each direction
    seconds: dict[str, float]
    tree_s: float | None  # for the gradients with a tree all-reduce; None if it cannot be used
    before_end_s: float  # for gradients that can be sent before the last backward pass ends
    host_s: float  # of a processor that copies and adds gradients, independent of the network

    @property
    def total_s(self) -> float:
        """All kinds, one after the other."""
        return sum(self.seconds.values())


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step that all ranks share."""

    compute_s: float
    host_s: float  # for copying and adding what was exchanged
    communication_s: float
    hidden_s: float  # the part of communication that overlaps with the last backward pass

    @property
    def total_s(self) -> float:
        """The time from one update to the next."""
        return self.compute_s + self.host_s + self.communication_s - self.hidden_s


def count_hosts(plan: Plan, hosts: int | None) -> int:
    """The number of hosts; by default one for each rank. ConfigError if it does not divide them."""
    ranks = plan.layout.ranks
    if hosts is not None and ranks % hosts:
        raise ConfigError(
            f"--hosts {hosts}: {ranks} devices cannot be shared evenly by {hosts} hosts; give a "
            f"number that divides {ranks}"
        )
    return hosts or ranks


def time_exchange(
    plan: Plan, exchanges: Sequence[Exchange], network: Network, *, bucket_mib: float
) -> LinkUse:
    """The time a network needs for what the ranks of each stage send in a step.

    Ranks are numbered host by host. Traffic within a host is not counted. DDP sends a bucket of
    gradients as soon as it is full, the last one when the last backward pass ends; the sums of
    stages, and sums in the order of replicas, come after that.
    """
    layout, is_strict = plan.layout, plan.determinism == "strict"
    members = layout.pipelines  # ranks that sum the same gradients
    largest = max(one.gradients for one in exchanges)
    sizes = _count_sent(layout, exchanges, layout.ranks // network.hosts)
    shares = dict.fromkeys(sizes, _LINK_SHARE)
    if is_strict and plan.device == "cpu" and members == 2:
        shares["gradients"] = _GLOO_PAIR_SHARE
    seconds = {kind: network.time(size, shares[kind]) for kind, size in sizes.items()}
    tree_s, before_end_s, host_s = None, 0.0, 0.0
    if members > 1 and plan.device == "cpu":
        host_s = largest * _BITS / (_GATHER_GBIT if is_strict else _REDUCE_GBIT)
    if members > 1 and not is_strict:
        tree_factor = members / (members - 1)  # over a ring: a tree moves all gradients twice
        buckets = max(1, ceil(largest * tree_factor / 2 / (bucket_mib * _MIB)))
        tree_s = network.time(sizes["gradients"] * tree_factor)
        before_end_s = (layout.stages == 1) * seconds["gradients"] * (1 - 1 / buckets)
    return LinkUse(
        sizes=sizes, seconds=seconds, tree_s=tree_s, before_end_s=before_end_s, host_s=host_s
    )


def _count_sent(layout: Layout, exchanges: Sequence[Exchange], per_host: int) -> dict[str, int]:
    """The bytes that the busiest host sends to other hosts, by kind."""
    rings = [layout.peers_of(stage) for stage in range(layout.stages)]
    sent: dict[str, Counter[int]] = {
        "gradients": Counter(),
        "statistics": Counter(),
        "activations": Counter(),
    }
    for kind, groups in (("gradients", rings), ("statistics", layout.span_groups)):
        for group in groups:
            size = getattr(exchanges[layout.stage_of(group[0])], kind)
            for one, other in pairwise([*group, group[0]]):
                sent[kind][one // per_host] += size * (one // per_host != other // per_host)
    between = 0  # bytes between two stages: what a stage does not exchange with the previous one
    for stage in range(layout.stages - 1):
        between = exchanges[stage].activations - between
        for rank in rings[stage]:
            hosts = {rank // per_host, (rank + 1) // per_host}
            sent["activations"].update(dict.fromkeys(hosts, between * (len(hosts) > 1)))
    return {kind: max(sizes.values(), default=0) for kind, sizes in sent.items()}


def time_stage_waits(
    plan: Plan,
    network: Network,
    *,
    shares: Sequence[float],
    received: Sequence[int],
    images_per_second: float,
) -> float:
    """Seconds by which a step is longer because stages wait for data from other hosts.

    shares: of the model's time, by stage; received: the bytes that each gets for a forward pass.
    images_per_second: of one device, with the plan's recomputation.
    """
    layout, pipeline = plan.layout, plan.pipeline
    if pipeline is None or layout.stages == 1:
        return 0.0
    per_host, stages = layout.ranks // network.hosts, range(layout.stages)
    pass_s = plan.micro_batch * layout.turn_size / images_per_second
    recomputed = plan.recompute_patterns is not None
    forwards_in_pass = 1 + sum(time_backward([1.0], recomputed=recomputed))
    forward = [share * pass_s / forwards_in_pass for share in shares]
    backward = time_backward(forward, recomputed=recomputed)
    transfers = []
    for stage in stages[1:]:
        pairs = ((rank - 1, rank) for rank in range(stage, layout.ranks, layout.stages))
        apart = any(one // per_host != other // per_host for one, other in pairs)
        transfers.append(network.time(received[stage]) if apart else 0.0)
    orders = [pipeline.order(stage, passes=plan.accumulation) for stage in stages]
    ends = [
        max(one.end for one in time_passes(orders, forward=forward, backward=backward, transfers=t))
        for t in ((), transfers)
    ]
    return layout.rounds * (ends[1] - ends[0])


def predict_step_time(
    plan: Plan,
    use: LinkUse,
    *,
    images_per_second: float,
    bubble: float = 0.0,
    stage_waits_s: float = 0.0,
) -> StepTime:
    """The time of a step, from the images/s of a single device.

    A pipeline divides the work among its stages, which idle for a share of the time (`bubble`).
    They send while they compute: only the time that they wait for data counts.
    """
    layout = plan.layout
    passes = plan.accumulation * layout.rounds
    images = plan.micro_batch * passes * layout.turn_size
    compute = images / images_per_second / layout.stages / (1 - bubble)
    return StepTime(
        compute_s=compute,
        host_s=use.host_s,
        communication_s=use.total_s - use.seconds.get("activations", 0.0) + stage_waits_s,
        hidden_s=min(use.before_end_s, _BACKWARD_SHARE * compute / passes),
    )
