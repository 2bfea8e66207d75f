"""What ranks send each other in a step: arithmetic, in bytes."""

from dataclasses import dataclass

from phalanx.plan.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Bytes that each rank receives in a step; it sends as many."""

    gradients: int
    statistics: int  # of batch norms whose replicas are on several ranks
    activations: int = 0  # and their gradients, between stages: of the rank that has most of them

    @property
    def total(self) -> int:
        """All of them; the few numbers of the metrics are not counted."""
        return self.gradients + self.statistics + self.activations


def count_exchange(
    plan: Plan, *, gradients: int, statistics: int, activations: int = 0
) -> Exchange:
    """The exchange of a step, from the bytes of one stage's gradients, statistics and activations.

    A ring adds up gradients in 2 (P-1)/P of their bytes, once a step. Under `--determinism strict`
    every rank gets those of all others in each round, to add them in the order of replicas. Means
    and variances are gathered in each pass by the ranks that share them, and their gradients, too.
    activations: what a rank gets in one pass, activations of the stage before it and gradients of
    the stage behind it.
    """
    layout = plan.layout
    others, passes = layout.pipelines - 1, plan.accumulation * layout.rounds
    moved = 2 * others * gradients // layout.pipelines
    if plan.determinism == "strict":
        moved = layout.rounds * others * gradients
    return Exchange(
        gradients=moved,
        statistics=2 * passes * (layout.span_pipelines - 1) * statistics,
        activations=passes * activations,
    )
