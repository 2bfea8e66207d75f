"""How fast ranks train together: the time of the slowest over the images of all."""

from dataclasses import replace

import pytest
import torch

from phalanx.assemble.dataset_summary import plan_run
from phalanx.config.read import read_settings
from phalanx.engine.consensus import Consensus
from phalanx.engine.state import Throughput, TrainState
from phalanx.engine.train import LoopDependencies, MetricsBuffer, fit

UNTIMED = 10  # steps, until caches are full


def test_the_slowest_rank_counts_and_images_count_once():
    fast = Throughput(images=600, busy_s=2.0, wait_s=0.1)
    slow = Throughput(images=600, busy_s=3.0, wait_s=0.6)
    for ranks in ([fast, slow], [slow, fast]):
        found = Throughput.combine(ranks)
        assert found.images_per_second == 200.0  # 600 images of both together, in 3 s
        assert found.data_wait == pytest.approx(0.2)


def test_before_anything_was_measured_there_is_no_rate():
    found = Throughput.combine([Throughput(), Throughput()])
    assert (found.images_per_second, found.data_wait) == (None, None)


class SlowPeer:
    """The view of a rank whose only peer takes three times as long, and waits for its data."""

    def __init__(self) -> None:
        self.mine: list[Throughput] = []

    def any(self, value: bool) -> bool:
        return value

    def gather(self, value: Throughput) -> list[Throughput]:
        self.mine.append(replace(value))
        return [value, Throughput(value.images, 3 * value.busy_s, 2 * value.busy_s)]


class Log:
    """An observer that keeps what was logged."""

    def __init__(self) -> None:
        self.intervals: list[Throughput] = []

    def on_step(self, step: int) -> None: ...

    def on_metrics(self, first: int, rows: object) -> None: ...

    def on_log(self, state: TrainState, interval: Throughput) -> None:
        self.intervals.append(interval)


def test_a_log_line_has_the_rate_of_the_slowest_rank():
    flags = {"steps": "24", "device": "cpu", "validation": "false", "logs-per-epoch": "10"}
    plan, _ = plan_run(read_settings("demo", flags))
    model = torch.nn.Linear(1, 1)
    state = TrainState(model, optimizer=None)  # nothing is updated
    peer, log = SlowPeer(), Log()

    def train_step(passes: object, lr: float) -> torch.Tensor:
        state.step += 1
        return torch.tensor([1.0, 1.0, 0.5])

    deps = LoopDependencies(
        batches_from=lambda step: iter([()] * plan.total_steps),
        train_step=train_step,
        evaluate=lambda state: None,
        save=lambda state: None,
        stop_requested=lambda: False,
        describe_images=str,
        diagnose=str,
        observer=log,
        consensus=Consensus(peer),
    )
    fit(state, plan, deps=deps, metrics=MetricsBuffer(torch.device("cpu"), 1))
    assert len(log.intervals) == plan.log.count() > 1
    assert sum(one.images for one in log.intervals) == (24 - UNTIMED) * plan.global_batch
    for mine, told in zip(peer.mine, log.intervals, strict=True):
        assert (told.images, told.busy_s) == (mine.images, 3 * mine.busy_s)
        assert told.data_wait is None or told.data_wait == pytest.approx(2 / 3)
