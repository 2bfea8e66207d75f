"""The Plan: every number derived from a Config, before anything runs."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from phalanx.catalog.datasets import DATASETS
from phalanx.config.schema import Config
from phalanx.errors import ConfigError
from phalanx.plan.averaging import refuse_too_many
from phalanx.plan.events import CKPTS, LOGS, Every, settle
from phalanx.plan.idle_options import warn_of_idle_options
from phalanx.plan.image_size import Growth, check_sizes, choose_image_size, plan_growth
from phalanx.plan.input_options import warn_of_input
from phalanx.plan.loss_scale import LossScale, make_loss_scale
from phalanx.plan.machine import count_cores, count_threads, resolve_device, warn_of_offload
from phalanx.plan.precision import refuse_precision, warn_of_precision
from phalanx.plan.problems import Problems
from phalanx.plan.recompute import plan_recomputation
from phalanx.plan.schedule import Schedule, peak_rate
from phalanx.plan.schedule_options import (
    RunLength,
    ScheduleOptions,
    make_schedule,
    schedule_warnings,
)
from phalanx.units import (
    parse_duration,
    parse_durations,
    parse_numbers,
    parse_rate,
    parse_share,
)

LEAST_MAX_BAD = 10
_LEAST_VALID_BATCH = 250


@dataclass(frozen=True, kw_only=True)
class DatasetCounts:
    """What only the data itself can say."""

    train_images: int
    valid_images: int
    classes: int


@dataclass(frozen=True, kw_only=True)
class MachineChoice:
    """What is fixed when a run starts, stored in it, and reused by every resume."""

    device: str
    precision: str
    threads: int  # one and two threads give different bits


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All batch arithmetic of one run, and where it runs."""

    device: str
    precision: str
    threads: int
    determinism: str
    half_type: str
    half_partials: bool
    workers: int
    image_size: int
    growth: Growth
    stored: tuple[str, ...] | None  # modules whose outputs are kept; None: all are
    num_classes: int
    train_images: int
    valid_images: int
    micro_batch: int
    accumulation: int
    replicas: int
    global_batch: int
    steps_per_epoch: Fraction
    total_steps: int
    valid_batch: int
    max_bad: int
    log: Every
    evaluate: Every
    save: Every
    scores_after: bool  # every checkpoint is scored when training is over
    schedule: Schedule
    loss_scale: LossScale
    warnings: tuple[str, ...] = ()  # what is done that may not be meant

    @property
    def epochs(self) -> float:
        """Epochs of images the whole run takes."""
        return float(self.total_steps / self.steps_per_epoch)

    @property
    def evaluations(self) -> int:
        """How often the model is scored, while it trains or after."""
        return (self.save if self.scores_after else self.evaluate).count()

    def epoch_at(self, step: int) -> float:
        """How far the data has been walked after that many steps."""
        return float(step / self.steps_per_epoch)

    def lr(self, step: int) -> float:
        """Learning rate of the step that follows `step` finished ones."""
        return self.schedule.lr(step)

    def facts(self) -> dict[str, Any]:
        """The plan as plain numbers, for JSON and tables."""
        events = {"log": self.log, "evaluate": self.evaluate, "save": self.save}
        parts = (*events, "schedule", "loss_scale", "warnings", "growth", "stored")
        plain = {name: value for name, value in asdict(self).items() if name not in parts}
        plain["steps_per_epoch"] = float(self.steps_per_epoch)
        plain["epochs"] = self.epochs
        plain["growth"] = ",".join(f"{size}:{end}st" for end, size in self.growth)
        plain["train_images_seen"] = self.total_steps * self.global_batch
        plain["lr_shape"], plain["lr_peak"] = self.schedule.shape, self.schedule.peak
        plain["warmup_steps"] = self.schedule.warmup
        plain |= {f"{name}_points": event.count() for name, event in events.items()}
        plain["evaluate_points"] = self.evaluations
        plain["loss_scale"] = self.loss_scale.at(0)
        plain["loss_scale_automatic"] = self.loss_scale.automatic
        return plain

    def at(self, step: int) -> dict[str, float]:
        """Learning rate and loss scale of the step that follows `step` finished ones.

        An automatic scale is the first one: nobody knows what becomes of it.
        """
        scale = self.loss_scale
        return {
            "step": step,
            "lr": self.lr(step),
            "loss_scale": scale.at(step),
            "automatic": scale.automatic,
        }


def choose_machine(config: Config) -> MachineChoice:
    """Decide what the config leaves to the machine."""
    device = resolve_device(config.machine.device)
    precision = config.machine.precision
    if precision == "auto":
        precision = "16.32" if device.startswith("cuda") else "32.32"
    threads = config.machine.threads or count_threads()
    return MachineChoice(device=device, precision=precision, threads=threads)


def make_plan(
    config: Config,
    data: DatasetCounts,
    chosen: MachineChoice,
    *,
    places: Mapping[str, str] | None = None,
) -> Plan:
    """Derive every number of the run; refuse what cannot be done, all of it together.

    places: where each option was said, to name instead of its flag.
    """
    problems = Problems(places or {})
    with problems:  # all else hangs on these
        global_batch = count_global_batch(config)
        steps_per_epoch = _count_steps_per_epoch(config, data.train_images, global_batch)
        total = _count_steps(config, steps_per_epoch)
    problems.refuse()
    clock, image_size = RunLength(total, steps_per_epoch), choose_image_size(config)
    parts = _plan_parts(config, chosen, clock, problems=problems, image_size=image_size)
    return Plan(
        **asdict(chosen),
        determinism=config.machine.determinism,
        half_type=config.machine.half_type,
        half_partials=config.machine.half_partials,
        workers=_choose_workers(config),
        image_size=image_size,
        growth=parts.growth,
        stored=parts.stored,
        num_classes=data.classes,
        train_images=data.train_images,
        valid_images=data.valid_images,
        micro_batch=config.data.batch_size,
        accumulation=config.train.gradient_accumulation,
        replicas=config.machine.replicas,
        global_batch=global_batch,
        steps_per_epoch=steps_per_epoch,
        total_steps=total,
        valid_batch=config.data.valid_batch_size or max(config.data.batch_size, _LEAST_VALID_BATCH),
        max_bad=_count_max_bad(config, data.train_images),
        log=parts.events.log,
        evaluate=parts.events.evaluate,
        save=parts.events.save,
        scores_after=config.train.validation and config.train.validation_mode == "after",
        schedule=parts.schedule,
        loss_scale=parts.loss_scale,
        warnings=(
            *schedule_warnings(_asked_schedule(config), clock),
            *parts.events.warnings,
            *warn_of_precision(config, chosen.precision),
            *warn_of_idle_options(config, precision=chosen.precision),
            *warn_of_offload(chosen.device, asked=config.machine.offload_optimizer),
            *warn_of_input(config, device=chosen.device, workers=_choose_workers(config)),
        ),
    )


class _PlanPieces(NamedTuple):
    """What of a plan may be refused, each for itself."""

    growth: Growth
    stored: tuple[str, ...] | None
    events: "_Events"
    schedule: Schedule
    loss_scale: LossScale


def _plan_parts(
    config: Config, chosen: MachineChoice, clock: RunLength, *, problems: Problems, image_size: int
) -> _PlanPieces:
    """The parts that know nothing of each other; whatever any of them refuses is told."""
    per_epoch, total = clock.steps_per_epoch, clock.total
    growth: Growth = ()
    with problems:
        growth = plan_growth(config, image_size, clock)
    with problems:
        check_sizes(config, image_size, growth)
    with problems:
        schedule = make_schedule(_asked_schedule(config), _choose_peak(config), clock)
    with problems:
        refuse_precision(config, chosen.precision)
    with problems:
        loss_scale = make_loss_scale(
            config.loss.initial_loss_scaling,
            config.loss.loss_scaling,
            epochs=_asked_epochs(config) or total / per_epoch,
            steps_per_epoch=per_epoch,
            automatic=config.loss.auto_loss_scaling,
        )
    with problems:
        events = _plan_events(config, per_epoch, total)
        refuse_too_many(config, saves=events.save.count())
    with problems:
        stored = plan_recomputation(config)
    problems.refuse()
    return _PlanPieces(growth, stored, events, schedule, loss_scale)


class _Events(NamedTuple):
    """When something is done, and what to warn of."""

    log: Every
    evaluate: Every
    save: Every
    warnings: tuple[str, ...]


def _plan_events(config: Config, steps_per_epoch: Fraction, total: int) -> _Events:
    """When to log, to evaluate and to save."""

    def every(rate: str, first: float = 0) -> Every:
        return Every(parse_rate(rate), steps_per_epoch, total, Fraction(str(first)))

    even, epochs = config.data.epoch_tail == "drop", _asked_epochs(config)
    logs, saves = config.train.logs_per_epoch, config.run.ckpts_per_epoch
    first = config.run.first_ckpt_epoch
    log, about_logs = settle(every(logs), LOGS, epochs=epochs, even=even)
    save, about_saves = settle(every(saves, first), CKPTS, epochs=epochs, even=even)
    return _Events(log, every(validations(config)), save, (*about_logs, *about_saves))


def validations(config: Config) -> str:
    """How often an epoch the model is scored while it trains."""
    during = config.train.validation and config.train.validation_mode == "during"
    apart = Fraction(config.train.validation_frequency)
    return str(1 / apart) if during and apart else "0"


def _asked_epochs(config: Config) -> Fraction | None:
    """The length of the run, where it is given in epochs."""
    return None if config.train.epochs is None else Fraction(str(config.train.epochs))


def _asked_schedule(config: Config) -> ScheduleOptions:
    """What the options say about the course of the learning rate."""
    said = config.schedule
    return ScheduleOptions(
        shape=said.lr_schedule,
        warmup=parse_duration(said.warmup_epoch),
        warmup_mode=said.warmup_mode,
        staircase=said.lr_staircase,
        freq=parse_rate(said.lr_scheduler_freq),
        decay=tuple(map(float, parse_numbers(said.lr_decay))),
        milestones=parse_durations(said.lr_epoch_decay) if said.lr_epoch_decay else (),
        drop_after=parse_numbers(said.lr_drop_after) if said.lr_drop_after else (),
        period=parse_duration(said.lr_decay_period) if said.lr_decay_period else None,
        length=parse_duration(said.lr_decay_length) if said.lr_decay_length else None,
        power=said.lr_power,
        end_ratio=said.lr_end_ratio,
    )


def _choose_peak(config: Config) -> float:
    """The highest learning rate, by whichever option says it."""
    said = config.schedule
    rates = {
        "base-learning-rate": said.base_learning_rate,
        "lr-per-image": said.lr_per_image,
        "lr": said.lr,
    }
    name, value = next((name, value) for name, value in rates.items() if value is not None)
    return peak_rate(
        name,
        value,
        global_batch=count_global_batch(config),
        accumulation=config.train.gradient_accumulation,
        batch=said.lr_batch,
    )


def count_global_batch(config: Config) -> int:
    """Images in one optimizer step, over all replicas."""
    return config.data.batch_size * config.train.gradient_accumulation * config.machine.replicas


def _count_steps_per_epoch(config: Config, images: int, global_batch: int) -> Fraction:
    """Steps in one epoch: exact, and whole when the tail is dropped."""
    if config.data.epoch_tail == "carry":
        return Fraction(images, global_batch)
    if images < global_batch:
        raise ConfigError(
            f"--epoch-tail drop: {images} images fill no global batch of {global_batch}; "
            f"make it {images} or less, or carry the tail"
        )
    return Fraction(images // global_batch)


def _count_steps(config: Config, steps_per_epoch: Fraction) -> int:
    """Length of the run in steps; an epoch's last images that fill no step are left over."""
    if config.train.steps is not None:
        return config.train.steps
    assert config.train.epochs is not None
    total = math.floor(Fraction(str(config.train.epochs)) * steps_per_epoch)
    if total < 1:
        raise ConfigError(
            f"--epochs: {config.train.epochs:g} epochs of {float(steps_per_epoch):g} steps "
            f"are not one step; train longer or lower --batch-size"
        )
    return total


def _choose_workers(config: Config) -> int:
    """Worker processes: as asked, else one a core where there is something to decode."""
    if config.data.workers is not None:
        return config.data.workers
    in_memory = DATASETS[config.data.data].in_memory or config.data.data == "synthetic"
    return 0 if in_memory else count_cores()


def _count_max_bad(config: Config, images: int) -> int:
    """Undecodable images to put up with."""
    if config.data.max_bad is not None:
        return parse_share(config.data.max_bad, images)
    return max(LEAST_MAX_BAD, images // 100)
