"""How fast images arrive: each stage alone, all together, and how many the model could train."""

from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from phalanx.assemble.dataset_summary import plan_run
from phalanx.assemble.feed import LoadedFeed
from phalanx.assemble.session import Session
from phalanx.assemble.summarise import can_decode_on_gpu
from phalanx.bench.synthetic_steps import build_synthetic_step, synchronise
from phalanx.config.read import Settings
from phalanx.data.loading.stage_rates import (
    StageRate,
    describe_bottleneck,
    measure_rate,
    time_stages,
)
from phalanx.errors import ConfigError
from phalanx.plan.machine import count_cores
from phalanx.plan.plan import Plan
from phalanx.units import format_plural

_WARM_UP_BATCHES = 4


@dataclass(frozen=True, kw_only=True)
class LoadingRates:
    """The measured rates, and the conclusion."""

    stages: list[StageRate]  # each alone, on one core
    one_worker: float  # images/s on the device, normalised, with one process
    workers: int  # 0 if the device makes the images itself
    all_workers: float  # with all of them
    model: str
    needed: float  # images/s the model trains on this device
    device: str
    gpu_could_decode: bool  # it could decode a share of the images, but does not

    @property
    def scaling(self) -> float | None:
        """The rate of each of several workers, divided by that of one alone."""
        return self.all_workers / (self.one_worker * self.workers) if self.workers else None

    def verdict(self) -> str:
        """Whether the model waits for data or the data for the model, and what would help."""
        return describe_bottleneck(
            self.all_workers,
            self.needed,
            model=self.model,
            stages=self.stages,
            gpu_could_decode=self.gpu_could_decode,
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        values = asdict(self)
        values["eaten"] = values.pop("needed")
        return {**values, "scaling": self.scaling, "verdict": self.verdict()}


def measure_loading_rates(settings: Settings, *, seconds: float) -> LoadingRates:
    """Time the stages and the whole; the model on synthetic images of the same size."""
    plan, dataset = plan_run(settings)
    config = settings.config
    if config.data.data == "synthetic":
        raise ConfigError(
            "--data synthetic: its images are made on the device, so there is no input to time"
        )
    if plan.total_steps <= _WARM_UP_BATCHES:
        raise ConfigError(
            f"a run of {format_plural(plan.total_steps, 'step')} would end before anything can be "
            "measured; give --steps 1000"
        )
    with Session(config, plan, classes=dataset.classes) as session:
        assert isinstance(session.feed, LoadedFeed)
        device, loader = session.device, session.feed.loader
        alone = loader.on_device and not loader.workers
        workers = 0 if alone else config.data.workers or count_cores()
        batch = np.zeros((plan.micro_batch, plan.image_size, plan.image_size, 3), np.uint8)
        gathered = np.empty_like(batch)

        def collate() -> int:
            gathered[:] = batch
            return len(batch)

        def copy() -> int:
            session.normaliser(batch)
            synchronise(device)
            return len(batch)

        stages = [
            *time_stages(loader.reader("train"), seconds / 4),
            StageRate(
                "collate", measure_rate(collate, seconds / 4), "images assembled into a batch"
            ),
            StageRate("copy", measure_rate(copy, seconds / 4), f"bytes to {device}, normalised"),
        ]
        one, every = (
            _time_batches(session, replace(plan, workers=count), seconds) for count in (1, workers)
        )
        step = build_synthetic_step(config, plan)
        step()  # allocates the optimizer's state
        return LoadingRates(
            stages=stages,
            one_worker=one,
            workers=workers,
            all_workers=every,
            model=config.model.model,
            needed=measure_rate(step, seconds),
            device=str(device),
            gpu_could_decode=can_decode_on_gpu(loader, config, device),
        )


def _time_batches(session: Session, plan: Plan, seconds: float) -> float:
    """Images/s that arrive on the device, without the first batches."""
    whole = replace(plan, accumulation=1, micro_batch=plan.global_batch // plan.replicas)
    with session.open_feed(whole) as feed:
        steps = feed.batches_from(0)
        for _ in range(_WARM_UP_BATCHES):
            next(steps, None)
        synchronise(session.device)
        begin, done = perf_counter(), 0
        for _ in steps:
            done += plan.global_batch
            if perf_counter() - begin > seconds:
                break
        synchronise(session.device)
        return done / (perf_counter() - begin)
