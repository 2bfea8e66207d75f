"""The search for a batching setting: which points are measured, and which is chosen."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from phalanx.bench import serving
from phalanx.bench.result import BenchResult
from phalanx.bench.serving import BatchingSetting, ServingJob, ServingPoint, search_settings


class SimulatedServer:
    """A server by the book: a batch of n images takes 4 ms + n ms, whatever waits comes along."""

    def __init__(self, *, noise: float = 0.0, failures: dict[str, int] | None = None):
        self.opened, self.measured, self.noise = [], [], noise
        self.failures = failures or {}

    @contextmanager
    def __call__(self, job, setting):
        self.opened.append(setting)
        yield lambda connections, seconds: self.measure(setting, connections, seconds)

    def measure(self, setting, connections, seconds):
        self.measured.append((setting, connections, seconds))
        batch = min(setting.max_batch, connections)
        took_ms = setting.max_wait_ms * (batch < setting.max_batch) + 4 + batch
        latency = took_ms * -(-connections // batch)
        rate = 1e3 * batch / took_ms
        rates = tuple(rate * (1 + self.noise * at) for at in (-1, 0, 1))
        result = BenchResult(
            kind="serve", name="m", command="", rates=rates, global_batch=batch, micro_batch=1,
            data="real", warmup_s=0.5, measured_s=2.0,
            latency_ms={"p50": latency, "p95": latency, "p99": latency, "n": 400},
        )  # fmt: skip
        return ServingPoint(setting, connections, result, self.failures)


def search(monkeypatch, server, **options):
    monkeypatch.setattr(serving, "_open_load", server)
    job = ServingJob(**{"target": "m", "server_words": (), "files": ("a",), **options})
    return search_settings(job)


def test_the_largest_batch_within_the_goal_is_chosen_and_measured_again(monkeypatch):
    server = SimulatedServer()
    found = search(monkeypatch, server, goal_ms=21.0)
    best = found.find_best()
    # 16 images in 20 ms; 32 connections would need two batches, or one of 36 ms
    assert (best.setting.max_batch, best.connections) == (16, 16)
    assert best.rate == pytest.approx(800)
    assert found.confirmed.setting == best.setting and found.problems == []
    assert server.measured[-1] == (best.setting, 16, 4.0), "twice as long"


def test_more_connections_are_tried_until_the_goal_is_lost(monkeypatch):
    server = SimulatedServer()
    found = search(monkeypatch, server, goal_ms=21.0)
    first = [point for point in found.points if point.setting == BatchingSetting()]
    assert [point.connections for point in first] == [1, 2], "two are no faster than one"
    for point in found.points:
        assert found.keeps_goal(point) == (point.find_latency("p99") <= 21)
    assert max(setting.max_batch for setting in server.opened) == 32, "64 are never under way"
    rows = found.list_rows()
    assert [row.setting for row in rows] == list(dict.fromkeys(server.opened[:-1]))
    assert rows[0].rate == pytest.approx(200)


def test_waits_and_workers_are_tried_from_the_best_batch_on(monkeypatch):
    server = SimulatedServer()
    search(monkeypatch, server, goal_ms=21.0, max_workers=4)
    tried = list(dict.fromkeys(server.opened))
    assert BatchingSetting(16, 1.0, 1) in tried and BatchingSetting(16, 0.0, 2) in tried
    assert max(setting.workers for setting in tried) == 4
    assert all(setting.max_wait_ms < 10.5 for setting in tried)


def test_a_goal_that_nothing_keeps_leaves_no_choice(monkeypatch):
    found = search(monkeypatch, SimulatedServer(), goal_ms=4.0)
    assert found.find_best() is None and found.confirmed is None
    assert {point.connections for point in found.points} == {1}


def test_failures_disqualify(monkeypatch):
    found = search(monkeypatch, SimulatedServer(failures={"HTTP 429": 3}), goal_ms=100.0)
    assert found.find_best() is None


def test_a_choice_that_does_not_hold_is_not_to_be_believed(monkeypatch):
    found = search(monkeypatch, SimulatedServer(noise=0.2), goal_ms=21.0)
    assert [text for text in found.problems if "spread over 40%" in text]
    found = search(monkeypatch, SimulatedServer(), goal_ms=21.0)
    server = SimulatedServer(failures={"HTTP 503: stopping": 2})
    found.confirmed = replace(server.measure(BatchingSetting(1), 8, 2.0), client_load=0.97)
    assert found.problems == [
        "2 images failed: HTTP 503: stopping",
        "the clients were busy 97% of the time, so the server may be faster than this; give fewer "
        "--max-connections, or use a machine with more cores",
        "measured again, p99 was 40.0 ms, over the goal of 21 ms; measure on an idle machine, or "
        "with more --seconds",
    ]


def test_rates_of_blocks_do_not_depend_on_where_batches_end():
    # a batch of 8 every 100 ms, whose answers come within a millisecond
    ended = np.array([0.1 * batch + 0.0001 * row for batch in range(53) for row in range(8)])
    rates = serving._cut_into_rates(ended, np.ones(len(ended), np.int64), together=8)
    assert len(rates) == 5 and rates == pytest.approx([80.0] * 5, rel=0.01)
    paused = np.where(ended > 2.6, ended + 1, ended)  # for a second
    rates = serving._cut_into_rates(paused, np.ones(len(ended), np.int64), together=8)
    assert min(rates) < 30 and max(rates) == pytest.approx(80, rel=0.02)
    slower = np.where(ended > 2.6, 2.6 + 2 * (ended - 2.6), ended)
    rates = serving._cut_into_rates(slower, np.ones(len(ended), np.int64), together=8)
    assert rates[0] == pytest.approx(80, rel=0.02) and rates[-1] == pytest.approx(40, rel=0.02)
    assert serving._cut_into_rates(np.array([]), np.array([], np.int64), together=1) == ()
