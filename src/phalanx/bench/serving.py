"""The batching setting with which a server answers the most images within a latency goal.

Every setting is measured on a real server in its own process, with clients in others: each
connection sends its next request when it has the answer to the last. More connections fill larger
batches and make every request slower, so each setting is measured with more and more of them, and
its best point is the fastest that meets the goal.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.bench.result import BenchResult, collect_bench_environment
from phalanx.client.connection import parse_address
from phalanx.client.load_generator import LoadOptions
from phalanx.client.load_process import LoadJob, LoadTimes, measure_load
from phalanx.client.served_model import find_model, read_api_key
from phalanx.client.server_process import open_server
from phalanx.report.environment import collect_environment
from phalanx.report.scores import PERCENTILES, compute_percentiles
from phalanx.units import format_plural

_BLOCKS = 5
_WARMUP_SHARE = 0.25  # of the seconds of a point
_MOST_ROUNDS = 8  # of `seconds` each, until a point has enough requests
_GAIN = 1.03  # factor by which a rate must rise for a search to continue
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
_WAITS_MS = (1.0, 2.0, 5.0, 10.0)
_WORKERS = (2, 4, 8)
_MOST_CLIENT_LOAD = 0.9  # of a core; above it, the clients may be the bottleneck
_PATIENCE = 2  # settings in a row without a gain before a search ends
_READY_S, _TIMEOUT_S = 300.0, 60.0


@dataclass(frozen=True)
class BatchingSetting:
    """How a server batches images."""

    max_batch: int = 1
    max_wait_ms: float = 0.0
    workers: int = 1

    @property
    def words(self) -> list[str]:
        """The options of `phalanx serve`."""
        return [
            *("--max-batch", str(self.max_batch)),
            *("--max-wait-ms", f"{self.max_wait_ms:g}"),
            *("--workers", str(self.workers)),
        ]


@dataclass(frozen=True, kw_only=True)
class ServingJob:
    """What to measure, and for how long."""

    target: str  # a file or a run
    server_words: tuple[str, ...]  # more options of the server
    files: tuple[str, ...]  # images that are sent
    goal_ms: float
    percentile: str = "p99"
    protocol: str = "predict"
    batch_size: int = 1  # images per request
    seconds: float = 2.0  # of one point
    max_connections: int = 64
    processes: int = 1  # that send
    max_workers: int = 1
    command: str = ""


@dataclass(frozen=True)
class ServingPoint:
    """The measurement of one setting with a number of connections."""

    setting: BatchingSetting
    connections: int
    result: BenchResult
    failures: dict[str, int] = field(default_factory=dict)
    client_load: float = 0.0  # share of a core that the busiest client used

    @property
    def rate(self) -> float:
        """Images/s."""
        return self.result.images_per_second or 0.0

    def find_latency(self, percentile: str) -> float:
        """Milliseconds; infinite if too few requests were answered to know."""
        found = (self.result.latency_ms or {}).get(percentile)
        return float("inf") if found is None else found

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "max_batch": self.setting.max_batch,
            "max_wait_ms": self.setting.max_wait_ms,
            "workers": self.setting.workers,
            "connections": self.connections,
            "failures": self.failures,
            "client_load": self.client_load,
            **self.result.to_dict(),
        }


@dataclass
class ServingSearch:
    """All measured points, and the chosen setting."""

    job: ServingJob
    points: list[ServingPoint] = field(default_factory=list)
    confirmed: ServingPoint | None = None  # the chosen one, measured again

    def keeps_goal(self, point: ServingPoint) -> bool:
        """Whether a point meets the goal, without a failure."""
        return point.find_latency(self.job.percentile) <= self.job.goal_ms and not point.failures

    def find_best(self, setting: BatchingSetting | None = None) -> ServingPoint | None:
        """The fastest point that meets the goal: of one setting, or of all."""
        kept = [
            point
            for point in self.points
            if self.keeps_goal(point) and setting in (None, point.setting)
        ]
        return max(kept, key=lambda point: point.rate, default=None)

    def list_rows(self) -> list[ServingPoint]:
        """The best point of each setting; if none meets the goal, the one nearest to it."""
        rows = []
        for setting in dict.fromkeys(point.setting for point in self.points):
            own = [point for point in self.points if point.setting == setting]
            nearest = min(own, key=lambda point: point.find_latency(self.job.percentile))
            rows.append(self.find_best(setting) or nearest)
        return rows

    @property
    def problems(self) -> list[str]:
        """Why the choice is unreliable, a sentence each."""
        point = self.confirmed
        if point is None:
            return []
        found, wanted = list(point.result.problems), self.job.percentile
        found += [f"{count} images failed: {why}" for why, count in point.failures.items()]
        if point.client_load > _MOST_CLIENT_LOAD:
            found.append(
                f"the clients were busy {point.client_load:.0%} of the time, so the server may be "
                "faster than this; give fewer --max-connections, or use a machine with more cores"
            )
        latency = point.find_latency(wanted)
        if latency == float("inf"):
            n = (point.result.latency_ms or {}).get("n") or 0
            found.append(f"{n:g} requests are too few to know {wanted}; give more --seconds")
        elif latency > self.job.goal_ms:
            found.append(
                f"measured again, {wanted} was {latency:.1f} ms, over the goal of "
                f"{self.job.goal_ms:g} ms; measure on an idle machine, or with more --seconds"
            )
        return found


_Measure = Callable[[int, float], ServingPoint]


def search_settings(
    job: ServingJob, *, show: Callable[[str], None] = lambda text: None
) -> ServingSearch:
    """Measure settings one after the other, and the best of them once more.

    First larger and larger batches, then a wait for them to fill, then more copies of the model:
    each search starts from the best so far, and ends when there is no more gain.
    """
    search = ServingSearch(job)
    for candidates in (_list_batches, _list_waits, _list_workers):
        best = search.find_best()
        start = best.setting if best else BatchingSetting()
        in_vain = 0
        for setting in candidates(start, job):
            if best and setting.max_batch > 2 * best.connections * job.batch_size:
                break  # there are never so many images in flight
            before = best.rate if best else 0.0
            _measure_setting(search, setting, show)
            best = search.find_best()
            in_vain = 0 if best and best.rate > _GAIN * before else in_vain + 1
            if in_vain == _PATIENCE:
                break
    chosen = search.find_best()
    if chosen:
        with _open_load(job, chosen.setting) as measure:
            show(f"{_describe_setting(chosen.setting)}: measured again")
            search.confirmed = measure(chosen.connections, 2 * job.seconds)
    return search


def _list_batches(start: BatchingSetting, job: ServingJob) -> Iterator[BatchingSetting]:
    return (replace(start, max_batch=size) for size in _BATCHES if size >= job.batch_size)


def _list_waits(start: BatchingSetting, job: ServingJob) -> Iterator[BatchingSetting]:
    if start.max_batch == 1:
        return iter(())  # nothing to wait for
    return (replace(start, max_wait_ms=wait) for wait in _WAITS_MS if wait < job.goal_ms / 2)


def _list_workers(start: BatchingSetting, job: ServingJob) -> Iterator[BatchingSetting]:
    return (replace(start, workers=count) for count in _WORKERS if count <= job.max_workers)


def _measure_setting(
    search: ServingSearch, setting: BatchingSetting, show: Callable[[str], None]
) -> None:
    """Measure a setting with more and more connections, until it no longer meets the goal.

    It starts near the best so far; if that is already too many, it goes down instead.
    """
    job, known = search.job, search.find_best()
    connections, best, is_falling = max(1, known.connections // 2) if known else 1, 0.0, False
    with _open_load(job, setting) as measure:
        while 1 <= connections <= job.max_connections:
            show(f"{_describe_setting(setting)}: {format_plural(connections, 'connection')}")
            point = measure(connections, job.seconds)
            search.points.append(point)
            keeps = search.keeps_goal(point)
            if keeps and (is_falling or point.rate < _GAIN * best):
                return  # no gain from more
            if best and not keeps:
                return
            best, is_falling = point.rate if keeps else 0.0, not keeps
            connections = 2 * connections if keeps else connections // 2


def _describe_setting(setting: BatchingSetting) -> str:
    """A setting in a line."""
    return " ".join(setting.words)


@contextmanager
def _open_load(job: ServingJob, setting: BatchingSetting) -> "Iterator[_Measure]":
    """A context with a server; yields a function (connections, seconds) that measures it."""
    words = [*setting.words, *job.server_words]
    with open_server(job.target, words, ready_s=_READY_S) as server:
        address = parse_address(server.url, api_key=read_api_key(None))
        model = find_model(address, name=None, timeout_s=_TIMEOUT_S)

        def measure(connections: int, seconds: float) -> ServingPoint:
            options = LoadOptions(
                protocol=job.protocol,
                batch_size=job.batch_size,
                threads=connections,
                seconds=seconds * (1 + _WARMUP_SHARE),
                timeout_s=_TIMEOUT_S,
                retries=0,
            )
            load = LoadJob(url=address.url, model=model.name, files=job.files, options=options)
            times = measure_load(load, min(job.processes, connections))
            answered = sum(took > 0 for took in times.took_s)
            needed = PERCENTILES[job.percentile][1]
            if 0 < answered < needed and not times.failures:
                factor = min(_MOST_ROUNDS, 1.5 * needed / answered)
                longer = replace(options, seconds=factor * (options.seconds or seconds))
                times = measure_load(replace(load, options=longer), min(job.processes, connections))
            return _build_point(job, setting, connections, times)

        yield measure


def _build_point(
    job: ServingJob, setting: BatchingSetting, connections: int, times: LoadTimes
) -> ServingPoint:
    """The measurement from the requests between warm-up and end."""
    seconds = times.stopped_at - times.began_at
    begin = times.began_at + seconds * _WARMUP_SHARE / (1 + _WARMUP_SHARE)
    ended, took = np.array(times.ended_at), np.array(times.took_s)
    kept = (ended >= begin) & (ended <= times.stopped_at)
    took_ms = 1e3 * took[kept]
    measured_s = times.stopped_at - begin
    device = str(collect_environment()["processor"])
    result = BenchResult(
        kind="serve",
        name=job.target,
        command=job.command,
        rates=_cut_into_rates(
            ended[kept], np.array(times.images)[kept], together=setting.max_batch
        ),
        global_batch=setting.max_batch,
        micro_batch=job.batch_size,
        data="real",
        warmup_s=begin - times.began_at,
        measured_s=measured_s,
        latency_ms={**compute_percentiles(took_ms), "n": len(took_ms)},
        environment=collect_bench_environment(device),
    )
    return ServingPoint(setting, connections, result, dict(times.failures), times.busiest)


def _cut_into_rates(
    ended: NDArray[np.float64], images: NDArray[np.int64], *, together: int
) -> tuple[float, ...]:
    """Images/s of blocks of equal length.

    Up to `together` answers, those of a batch, arrive at once, and one block could have one batch
    more than another. So a batch's images are spread over the time since the batch before it.
    """
    order = np.argsort(ended)
    at, count = ended[order], np.cumsum(images[order])
    if len(at) < 2:
        return ()
    gaps = np.diff(at)
    # one gap in so many is between batches; the largest is not used, as it may be a pause
    longest = np.quantile(gaps, 1 - 0.5 / together)
    is_last = np.append(gaps >= longest / 2, True)
    at, count = at[is_last], count[is_last]
    if len(at) < 2:
        return ()
    edges = np.linspace(at[0], at[-1], _BLOCKS + 1)
    return tuple((np.diff(np.interp(edges, at, count)) / np.diff(edges)).tolist())
