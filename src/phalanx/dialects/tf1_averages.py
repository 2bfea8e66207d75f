"""Averages of the TensorFlow 1 program: which of a run's checkpoints each of them takes."""

from fractions import Fraction
from math import ceil

from phalanx.dialects.table import Apply, Effect, OldValues
from phalanx.dialects.tf1_values import count_epochs


def build_average(strategy: str) -> Apply:
    """What --weight-avg-N or --weight-avg-exp becomes."""

    def apply(text: str, values: OldValues) -> Effect:
        numbers = [part for part in text.split(",") if part]
        if not numbers:
            return Effect()
        if not _find_rate(values):
            return Effect(why="there are no checkpoints to average", kind="nothing")
        if _count_last(values, count_epochs(values)) < 2:
            return Effect(why="one checkpoint is its own average", kind="nothing")
        options = [_find_average(strategy, number, values) for number in numbers]
        rivals = strategy == "mean" and values.is_given("weight-avg-exp")
        own = {} if rivals else options[0]
        rest = options if rivals else options[1:]
        more = tuple(
            ("average", "RUN", *(w for n, t in one.items() for w in (f"--{n}", t))) for one in rest
        )
        why = "after training" + "; one average a command" * bool(more)
        return Effect(flags=own, why=why, then=more)

    return apply


def _find_rate(values: OldValues) -> Fraction:
    """Checkpoints an epoch."""
    interval = values.whole("epochs-per-ckpt")
    return Fraction(1, interval) if interval else Fraction(values.whole("ckpts-per-epoch"))


def _count_last(values: OldValues, epochs: Fraction) -> int:
    """The checkpoints of the last epochs: those at every interval, and the one at the end."""
    interval, total = 1 / _find_rate(values), count_epochs(values)
    first = values.whole("ckpt-epochs-offset") or interval
    skipped = max(0, ceil((total - epochs - first) / interval))
    return max(0, ceil((total - first) / interval) - skipped) + 1


def _find_average(strategy: str, number: str, values: OldValues) -> dict[str, str]:
    if strategy == "exponential":
        return {
            "weight-avg-strategy": strategy,
            "weight-avg-exp-decay": number,
            "weight-avg-n": "-1",
        }
    # from N epochs before the end on, that one included
    count = _count_last(values, Fraction(number))
    return {"weight-avg-strategy": "mean", "weight-avg-n": str(count)}
