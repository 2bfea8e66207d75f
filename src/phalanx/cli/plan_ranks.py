"""`phalanx plan`: what each rank does in a step."""

from collections.abc import Iterable
from itertools import compress, zip_longest
from typing import TYPE_CHECKING, Any

from phalanx.plan.layout import describe_layout
from phalanx.units import align_columns

if TYPE_CHECKING:
    from phalanx.plan.plan import Plan

_MOST_RANKS = 8  # rows of the table of ranks; of more, the middle is left out
_MOST_UNITS = 6
_RANK_HEADER = ("rank", "stage", "replicas", "passes per step", "BatchNorm statistics")


def list_ranks(plan: "Plan") -> list[dict[str, Any]]:
    """What each rank does in a step, for JSON."""
    ranks = []
    for rank in range(plan.layout.ranks):
        turns = plan.layout.turns_of(rank)
        stage, passes = plan.layout.stage_of(rank), len(turns) * plan.accumulation
        ranks.append({"rank": rank, "stage": stage, "replicas": turns, "passes": passes})
    return ranks


def describe_ranks(plan: "Plan") -> list[tuple[str, str]]:
    """Where the replicas run: a line, and a table if there are several ranks."""
    layout = plan.layout
    lines = [line] if (line := describe_layout(layout, stages=plan.stages)) else []
    if layout.ranks > 1:
        numbers = [*range(layout.ranks)]
        if layout.ranks > _MOST_RANKS:
            numbers[_MOST_RANKS // 2 : -2] = []
        cells = [_RANK_HEADER, *(_describe_rank(plan, rank) for rank in numbers)]
        if layout.ranks > _MOST_RANKS:
            cells.insert(_MOST_RANKS // 2 + 1, ("...", *[""] * (len(_RANK_HEADER) - 1)))
        shown = (True, layout.stages > 1, True, True, layout.bn_span > 1)
        lines += align_columns(
            (tuple(compress(row, shown)) for row in cells), left=range(len(shown))
        )
    return [*zip_longest(["ranks"], lines, fillvalue="")] if lines else []


def _describe_rank(plan: "Plan", rank: int) -> tuple[str, ...]:
    """The cells of a rank."""
    turns, partners = plan.layout.turns_of(rank), plan.layout.partners_of(rank)
    texts = [f"{turn[0]}-{turn[-1]}" if len(turn) > 1 else f"{turn[0]}" for turn in turns]
    noun = "rank" if len(partners) == 1 else "ranks"
    shared = f"shared with {noun} {_shorten(map(str, partners))}"
    return (
        str(rank),
        str(plan.layout.stage_of(rank)),
        _shorten(texts),
        f"{len(turns) * plan.accumulation:,}",
        shared if partners else "shared within each pass",
    )


def _shorten(words: Iterable[str]) -> str:
    """The words with commas; of many, those in the middle are left out."""
    shown = [*words]
    if len(shown) > _MOST_UNITS:
        shown[_MOST_UNITS // 2 : -1] = ["..."]
    return ", ".join(shown)
