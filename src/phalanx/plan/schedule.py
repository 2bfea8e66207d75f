"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

from collections.abc import Callable
from math import cos, pi

SHAPES: dict[str, Callable[[float], float]] = {  # of the share of the run that is done
    "cosine": lambda done: 0.5 * (1 + cos(pi * done)),
    "constant": lambda done: 1.0,
}


def lr_at(step: int, *, shape: str, peak: float, warmup: int, total: int) -> float:
    """Learning rate of the step that follows `step` finished ones.

    Warm-up multiplies the running, unshifted schedule by step / warmup, so the very first
    step runs at 0. Past the end the rate stays where the schedule ended.

    >>> [round(lr_at(s, shape="cosine", peak=1.0, warmup=2, total=4), 3) for s in range(6)]
    [0.0, 0.427, 0.5, 0.146, 0.0, 0.0]
    """
    rate = peak * SHAPES[shape](min(1.0, step / total))
    return rate * step / warmup if step < warmup else rate
