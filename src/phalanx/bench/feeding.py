"""How fast images come: each stage alone, all together, and what the model would eat."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch

from phalanx.assemble.build import build_state, prepare_torch, step_rule
from phalanx.assemble.dataset_summary import plan_of, preprocessing_of, recipe_of
from phalanx.assemble.feed import SyntheticFeed, choose_backend, normaliser_of, open_feed
from phalanx.config.read import Settings
from phalanx.data.loading.reader import Reader
from phalanx.data.loading.stage_rates import Rate, describe_bottleneck, measure_rate, time_stages
from phalanx.engine.step import train_step
from phalanx.errors import ConfigError
from phalanx.plan.machine import count_cores

_WARM_UP_BATCHES = 4


@dataclass(frozen=True, kw_only=True)
class Feeding:
    """What was measured, and what it means."""

    stages: list[Rate]  # on one core, each alone
    one_worker: float  # images/s on the device, normalised, with one process
    workers: int  # 0 where the device makes the images itself
    all_workers: float  # with all of them
    model: str
    eaten: float  # images/s the model trains on this device
    device: str

    @property
    def scaling(self) -> float | None:
        """What each of several workers does of what one alone does."""
        return self.all_workers / (self.one_worker * self.workers) if self.workers else None

    def verdict(self) -> str:
        """Who waits for whom, and what would help."""
        return describe_bottleneck(
            self.all_workers, self.eaten, model=self.model, stages=self.stages
        )

    def facts(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {**asdict(self), "scaling": self.scaling, "verdict": self.verdict()}


def measure_feeding(settings: Settings, *, seconds: float) -> Feeding:
    """Time the stages and the whole; the model on made-up images of the same size."""
    plan, _ = plan_of(settings)
    config = settings.config
    if config.data.data == "synthetic":
        raise ConfigError("--data synthetic: it is made on the device, nothing is fed")
    if plan.total_steps <= _WARM_UP_BATCHES:
        raise ConfigError(
            f"{plan.total_steps} steps are over before anything is measured; give --steps 1000"
        )
    recipe, device = recipe_of(config, plan), prepare_torch(plan)
    normaliser = normaliser_of(preprocessing_of(config, plan), device, config)
    there = choose_backend(recipe, device, config) is not None
    workers = 0 if there else config.data.workers or count_cores()
    reader = Reader(recipe, "train", max_bad=plan.max_bad)
    batch = np.zeros((plan.micro_batch, plan.image_size, plan.image_size, 3), np.uint8)
    gathered = np.empty_like(batch)

    def loaded(count: int) -> float:
        wanted = replace(plan, workers=count, accumulation=1, micro_batch=plan.global_batch)
        with open_feed(recipe, wanted, normaliser, config) as feed:
            return _rate_of_walk(feed.batches_from(0), plan.global_batch, seconds, device)

    def collate() -> int:
        gathered[:] = batch
        return len(batch)

    def copy() -> int:
        normaliser(batch)
        synchronise(device)
        return len(batch)

    return Feeding(
        stages=[
            *time_stages(reader, seconds / 4),
            Rate("collate", measure_rate(collate, seconds / 4), "images put together to a batch"),
            Rate("copy", measure_rate(copy, seconds / 4), f"bytes to {device}, normalised"),
        ],
        one_worker=loaded(1),
        workers=workers,
        all_workers=loaded(workers),
        model=config.model.model,
        eaten=_appetite(settings, seconds),
        device=str(device),
    )


def _rate_of_walk(steps: Iterator[Any], images: int, seconds: float, device: torch.device) -> float:
    """Images a second that arrive on the device, the first batches aside."""
    for _ in range(_WARM_UP_BATCHES):
        next(steps, None)
    synchronise(device)
    begin, done = perf_counter(), 0
    for _ in steps:
        done += images
        if perf_counter() - begin > seconds:
            break
    synchronise(device)
    return done / (perf_counter() - begin)


def _appetite(settings: Settings, seconds: float) -> float:
    """Images a second that the model trains on images that are there."""
    plan, _ = plan_of(settings)
    device = prepare_torch(plan)
    state = build_state(settings.config, plan, device)
    rule = step_rule(settings.config, plan, device)
    passes = next(SyntheticFeed(plan, device, seed=0).batches_from(0))

    def step() -> int:
        train_step(state, passes, 0.0, rule=rule)
        synchronise(device)
        return plan.global_batch

    step()
    return measure_rate(step, seconds)


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
