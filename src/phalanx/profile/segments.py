"""Nested time intervals, split so that each moment belongs to exactly one of them."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class Segment(NamedTuple):
    """A time interval and what happened in it; times in microseconds."""

    start: float
    end: float
    label: Any

    @property
    def duration_us(self) -> float:
        """Its length."""
        return self.end - self.start


def flatten_nested(intervals: Iterable[Segment]) -> list[Segment]:
    """The time of each interval without that of the intervals nested in it, in order of time.

    >>> outer, inner = Segment(0, 10, "step"), Segment(2, 5, "unit")
    >>> [tuple(part) for part in flatten_nested([inner, outer])]
    [(0, 2, 'step'), (2, 5, 'unit'), (5, 10, 'step')]
    """
    parts: list[Segment] = []
    open_ones: list[Segment] = []
    now = 0.0

    def go_to(time: float) -> None:
        """Assign the time until then to the innermost interval."""
        nonlocal now
        if open_ones and time > now:
            parts.append(Segment(now, time, open_ones[-1].label))
        now = max(now, time)

    def close_until(time: float) -> None:
        while open_ones and open_ones[-1].end <= time:
            go_to(open_ones[-1].end)
            open_ones.pop()

    for one in sorted(intervals, key=lambda one: (one.start, -one.end)):
        close_until(one.start)
        go_to(one.start)
        now = one.start
        # clocks are read one after the other: an inner interval may seem to end slightly later
        end = min(one.end, open_ones[-1].end) if open_ones else one.end
        open_ones.append(one._replace(end=end))
    close_until(float("inf"))
    return parts


def find_segment(parts: Sequence[Segment], time: float) -> Segment | None:
    """The segment that contains a moment; the segments are in order of time."""
    place = bisect_right(parts, time, key=lambda part: part.start) - 1
    return parts[place] if place >= 0 and time <= parts[place].end else None


def measure_union(intervals: Iterable[Segment]) -> float:
    """The total time covered by at least one interval.

    >>> measure_union([Segment(0, 4, ""), Segment(2, 6, ""), Segment(8, 9, "")])
    7.0
    """
    total, end = 0.0, float("-inf")
    for one in sorted(intervals):
        total += max(0.0, one.end - max(one.start, end))
        end = max(end, one.end)
    return total
