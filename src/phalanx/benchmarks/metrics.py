"""Metrics from the output of a command: values are found, some left out, the rest reduced."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from phalanx.benchmarks.schema import MetricRule
from phalanx.units import format_plural

_DEFAULT_RULES = (  # of commands that print a BenchResult
    MetricRule("throughput", key="images_per_second"),
    MetricRule("latency_p50", key="latency_ms.p50"),
    MetricRule("latency_p95", key="latency_ms.p95"),
    MetricRule("latency_p99", key="latency_ms.p99"),
)
_REDUCE: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": fmean,
    "final": lambda values: values[-1],
    "min": min,
    "value": lambda values: values[0],
}


class MetricMissing(Exception):
    """A metric that is not in the output; the message says which and why."""


def read_facts(output: str) -> list[dict[str, Any]]:
    """The JSON objects that a command printed, one after the other."""
    decoder, place, found = json.JSONDecoder(), 0, list[dict[str, Any]]()
    while (place := output.find("{", place)) >= 0:
        try:
            facts, place = decoder.raw_decode(output, place)
        except json.JSONDecodeError:
            return found
        found.append(facts)
    return found


def extract_metrics(
    rules: Sequence[MetricRule], output: str, facts: Mapping[str, Any] | None, *, processes: int
) -> dict[str, float]:
    """The metrics by name.

    processes: how many mpirun started. A value found in text is for one of them; a JSON object is
    printed by one for all.
    """
    found: dict[str, float] = {}
    for rule in rules:
        found[rule.name] = _reduce(rule, _find_values(rule, output, facts))
        if rule.regexp and rule.name == "throughput":
            found[rule.name] *= processes
    if not rules:
        found = {rule.name: v for rule in _DEFAULT_RULES for v in _look_up(rule.key, facts or {})}
    return found


def _find_values(rule: MetricRule, output: str, facts: Mapping[str, Any] | None) -> list[float]:
    """All values of a metric, in the order they were printed."""
    if rule.key:
        if facts is None:
            raise MetricMissing(f"{rule.name}: the command printed no JSON object")
        return _look_up(rule.key, facts)
    texts = [match.replace(",", "") for match in re.findall(rule.regexp, output)]
    try:
        return [float(text) for text in texts]
    except ValueError as error:
        raise MetricMissing(f"{rule.name}: {error}") from None


def _look_up(key: str, facts: Mapping[str, Any]) -> list[float]:
    """The number or numbers at a path such as latency_ms.p50; empty if there are none."""
    value: Any = facts
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    values = value if isinstance(value, list) else [value]
    return [float(v) for v in values if isinstance(v, int | float)]


def _reduce(rule: MetricRule, values: list[float]) -> float:
    """One number from a metric's values.

    A mean leaves out the worst values, not the first: the slowest, or the longest latencies.
    """
    if not values:
        raise MetricMissing(f"{rule.name}: the output has no value of it")
    if not all(map(math.isfinite, values)):
        raise MetricMissing(f"{rule.name}: a value is not finite")
    if len(values) <= rule.skip:
        raise MetricMissing(
            f"{rule.name}: found {format_plural(len(values), 'value')}, and skip: {rule.skip} "
            "leaves none; lower it, or measure more"
        )
    if rule.reduction_type == "mean":
        values = sorted(values, reverse=rule.name.startswith("latency"))[rule.skip :]
    return _REDUCE[rule.reduction_type](values)
