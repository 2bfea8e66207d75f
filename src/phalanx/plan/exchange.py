"""What ranks send each other in a step: arithmetic, in bytes."""

from dataclasses import dataclass

from phalanx.plan.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Bytes that each rank receives in a step; it sends as many."""

    gradients: int
    statistics: int  # of batch norms whose replicas are on several ranks

    @property
    def total(self) -> int:
        """All of them; the few numbers of the metrics are not counted."""
        return self.gradients + self.statistics


def count_exchange(plan: Plan, *, gradients: int, statistics: int) -> Exchange:
    """The exchange of a step, from the bytes of one model's gradients and statistics.

    A ring adds up gradients in 2 (W-1)/W of their bytes, once a step. Under `--determinism strict`
    every rank gets those of all others in each round, to add them in the order of replicas. Means
    and variances are gathered in each pass by the ranks that share them, and their gradients, too.
    """
    layout = plan.layout
    others = layout.ranks - 1
    moved = 2 * others * gradients // layout.ranks
    if plan.determinism == "strict":
        moved = layout.rounds * others * gradients
    apart = layout.bn_span // layout.turn_size
    return Exchange(gradients=moved, statistics=2 * plan.accumulation * (apart - 1) * statistics)
