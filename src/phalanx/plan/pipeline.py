"""The stages of a model: where each starts, and the order of its passes."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from phalanx.catalog.splits import Split, find_split
from phalanx.catalog.variant import OwnVariant
from phalanx.config.schema import Config
from phalanx.errors import ConfigError
from phalanx.plan.model import build_variant
from phalanx.units import format_plural

_GROUP = 2  # micro-batches of a group per stage
_BACKWARD, _RECOMPUTED = 2, 3  # cost of a backward pass in forward passes


class Pass(NamedTuple):
    """A forward or backward pass of a stage for one micro-batch."""

    kind: Literal["forward", "backward"]
    number: int  # of the micro-batch


class TimedPass(NamedTuple):
    """A pass with its start and end times."""

    stage: int
    what: Pass
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A model split into stages."""

    starts: tuple[str, ...]  # the first units of all stages but the first
    schedule: str

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.starts) + 1

    def split_units(self, units: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """The units of each stage, from all units in order."""
        missing = [start for start in self.starts if start not in units]
        if missing:
            raise ConfigError(
                f"--pipeline-splits: no unit is called {missing[0]!r}; there are "
                f"{', '.join(units[:8])}{', ...' * (len(units) > 8)}"
            )
        check_order([Split(start, start, "") for start in self.starts], units)
        bounds = [0, *map(units.index, self.starts), len(units)]
        return tuple(tuple(units[first:end]) for first, end in pairwise(bounds))

    def order(self, stage: int, *, passes: int) -> list[Pass]:
        """The passes of a stage for so many micro-batches, in order."""
        return order_passes(self.schedule, stage=stage, stages=self.stages, passes=passes)


# --- stages from the options ---


def is_sharded(config: Config) -> bool:
    """Whether splits are chosen automatically, and stages run one after the other."""
    options = config.pipeline
    return (options.shards or 1) > 1 and not options.pipeline and not _list_splits(config)


def _list_splits(config: Config) -> list[str]:
    """The names of splits in the options."""
    return _split_words(config.pipeline.pipeline_splits)


def _split_words(text: str | None) -> list[str]:
    """Comma-separated names, with or without brackets; empty for `none`."""
    if (text or "").lower() == "none":
        return []
    return [word.strip() for word in (text or "").strip(" []").split(",") if word.strip()]


def count_stages(config: Config) -> int:
    """The number of stages, which is the number of devices of one replica."""
    return config.pipeline.shards or len(_list_splits(config)) + 1


def needs_splits(config: Config) -> bool:
    """Whether stages are requested, but not where they start."""
    options = config.pipeline
    return not _list_splits(config) and (options.pipeline or (options.shards or 1) > 1)


def plan_pipeline(config: Config, *, accumulation: int | None) -> Pipeline | None:
    """The stages of a run; None if its model is not split. ConfigError if impossible.

    accumulation: micro-batches of a replica in a step; None if there is no training.
    """
    options, names = config.pipeline, _list_splits(config)
    if not names:
        return None
    variant, model = build_variant(config), config.model.model
    splits = [Split(name, name, "") for name in names]  # only the network itself knows its units
    if not isinstance(variant, OwnVariant):
        try:
            splits = [find_split(variant, name, model=model) for name in names]
        except ConfigError as error:  # a preset names them, and the user names another model
            raise ConfigError(f"{error}; --pipeline-splits none leaves the model whole") from None
        check_order(splits, variant.units)
    stages, shards = len(names) + 1, options.shards or len(names) + 1
    if shards not in (1, stages):
        raise ConfigError(
            f"--shards {shards}: needs {format_plural(shards - 1, 'split')}, and "
            f"--pipeline-splits names {len(names)}; give --shards {stages}, or 1 to run all stages "
            "on one device, or --pipeline-splits none for stages of about the same cost"
        )
    is_short = accumulation is not None and accumulation < shards
    if is_short and options.pipeline_schedule != "Sequential":
        raise ConfigError(
            f"--gradient-accumulation {accumulation}: a pipeline of {shards} stages needs at least "
            f"{shards} micro-batches per step; use --gradient-accumulation {shards}, "
            "--pipeline-schedule Sequential, or --pipeline-splits none for one stage"
        )
    starts = tuple(split.unit for split in splits)
    return Pipeline(starts=starts, schedule=options.pipeline_schedule)


def check_order(splits: Sequence[Split], units: Sequence[str]) -> None:
    """Raise ConfigError unless splits are in order, with at least one unit per stage."""
    for before, split in pairwise([Split("the model", units[0], ""), *splits]):
        if split.name == before.name:
            raise ConfigError(f"--pipeline-splits {split.name}: is given twice; leave one out")
        if units.index(split.unit) <= units.index(before.unit):
            raise ConfigError(
                f"--pipeline-splits {split.name}: starts at {split.unit}, and {before.name} at "
                f"{before.unit}; list them in forward order, at least one unit apart"
            )


def describe_shifted_splits(config: Config) -> tuple[str, ...]:
    """A line for each split whose name points inside a unit."""
    variant, model = build_variant(config), config.model.model
    if isinstance(variant, OwnVariant):
        return ()
    splits = [find_split(variant, name, model=model) for name in _list_splits(config)]
    return tuple(f"--pipeline-splits: {split.shifted}" for split in splits if split.shifted)


def list_starts(config: Config, units: Sequence[str]) -> list[int]:
    """The indices of the units that may start a stage; ConfigError if there are too few."""
    stages = config.pipeline.shards
    if stages is None or stages == 1:
        many = (
            "the number of stages is not given"
            if stages is None
            else "--shards 1 is a single stage"
        )
        raise ConfigError(
            f"--pipeline: {many}; give --shards N, or name where they start with --pipeline-splits"
        )
    allowed = [0, *(place for place in range(1, len(units)) if _may_start(config, units[place]))]
    if stages > len(allowed):
        most, model = len(allowed), config.model.model
        has = f"{model} has only {format_plural(most, 'unit')}, and a stage has at least one"
        if most < len(units):
            room = format_plural(most, "stage")
            has = f"the sharding filters leave room for only {room} of {model}"
        way_out = f"give --shards {most} or less" if most > 1 else "leave it out"
        raise ConfigError(f"--shards {stages}: {has}; {way_out}")
    return allowed


def choose_starts(config: Config, costs: Mapping[str, float]) -> tuple[str, ...]:
    """The first units of stages such that the most expensive stage costs as little as possible.

    costs: of every unit, in order.
    """
    units = [*costs]
    allowed, stages = list_starts(config, units), count_stages(config)
    ends = [*allowed[1:], len(units)]
    sums = [sum([*costs.values()][:end]) for end in ends]
    # best[n]: the lowest cost of the most expensive stage up to the n-th end, and the cuts
    best: list[tuple[float, tuple[int, ...]]] = [(total, ()) for total in sums]
    for stage in range(1, stages):
        best = [
            min(
                (max(best[before][0], sums[last] - sums[before]), (*best[before][1], before))
                for before in range(stage - 1, last)
            )
            if last >= stage
            else (float("inf"), ())
            for last in range(len(ends))
        ]
    return tuple(units[ends[before]] for before in best[-1][1])


def _may_start(config: Config, unit: str) -> bool:
    """Whether the sharding filters let a stage start with a unit; --pipeline ignores them."""
    if config.pipeline.pipeline:
        return True
    include = _split_words(config.pipeline.sharding_include_filter) or [""]
    exclude = _split_words(config.pipeline.sharding_exclude_filter)
    return any(word in unit for word in include) and not any(word in unit for word in exclude)


# --- the order of passes ---


def order_passes(schedule: str, *, stage: int, stages: int, passes: int) -> list[Pass]:
    """The passes of a stage in a step, in order; backward passes in the order of micro-batches.

    Interleaved: each stage first runs as many forward passes as there are stages from it on, then
    alternates backward and forward passes. Otherwise groups of micro-batches go forward, then back.

    >>> [f"{p.kind[0]}{p.number}" for p in order_passes("Interleaved", stage=0, stages=2, passes=3)]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    if schedule == "Interleaved":
        ahead = min(stages - stage, passes)
        order = [Pass("forward", number) for number in range(ahead)]
        for number in range(passes):
            order.append(Pass("backward", number))
            if number + ahead < passes:
                order.append(Pass("forward", number + ahead))
        return order
    size = 1 if schedule == "Sequential" else _GROUP * stages
    order = []
    for first in range(0, passes, size):
        group = range(first, min(first + size, passes))
        order += [Pass("forward", number) for number in group]
        order += [Pass("backward", number) for number in group]
    return order


def count_in_flight(order: Sequence[Pass]) -> int:
    """The largest number of micro-batches between their forward and backward passes."""
    held = most = 0
    for one in order:
        held += 1 if one.kind == "forward" else -1
        most = max(most, held)
    return most


def time_backward(forward: Sequence[float], *, recomputed: bool) -> list[float]:
    """The assumed times of backward passes, from the forward passes of the same stages."""
    return [(_RECOMPUTED if recomputed else _BACKWARD) * one for one in forward]


def time_passes(
    orders: Sequence[Sequence[Pass]],
    *,
    forward: Sequence[float],
    backward: Sequence[float],
    transfers: Sequence[float] = (),
) -> list[TimedPass]:
    """When each stage runs its passes, given their costs.

    transfers: the time to send a pass's result between stages 0 and 1, 1 and 2, ..., in each
    direction; 0 by default. A stage computes meanwhile, but sends one tensor at a time each way.
    """
    costs = {"forward": forward, "backward": backward}
    arrivals: dict[tuple[int, Pass], float] = {}
    clocks, waiting = [0.0] * len(orders), [deque(order) for order in orders]
    last: dict[tuple[int, str], float] = {}  # when a stage's previous result has arrived
    timed: list[TimedPass] = []
    while any(waiting):
        for stage, own in enumerate(waiting):
            while (
                own and (ready := _find_arrival(own[0], stage, arrivals, len(orders))) is not None
            ):
                one = own.popleft()
                start = max(clocks[stage], ready)
                end = start + costs[one.kind][stage]
                timed.append(TimedPass(stage, one, start, end))
                border = stage if one.kind == "forward" else stage - 1
                way = transfers[border] if 0 <= border < len(transfers) else 0.0
                clocks[stage] = max(end, last.get((stage, one.kind), 0.0))
                last[stage, one.kind] = arrivals[stage, one] = clocks[stage] + way
    return sorted(timed, key=lambda one: (one.start, one.stage))


def _find_arrival(
    one: Pass, stage: int, done: Mapping[tuple[int, Pass], float], stages: int
) -> float | None:
    """When the input of a pass from another stage arrives; None if it is not known yet."""
    source = stage - 1 if one.kind == "forward" else stage + 1
    return done.get((source, one)) if 0 <= source < stages else 0.0


def measure_bubble(timed: Sequence[TimedPass]) -> float:
    """The share of the stages' time in which they wait for each other."""
    end, stages = max(one.end for one in timed), 1 + max(one.stage for one in timed)
    return 1 - sum(one.end - one.start for one in timed) / (end * stages)
