"""The Plan: every number derived from a Config, before anything runs."""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from phalanx.catalog.datasets import DATASETS
from phalanx.config.schema import Config
from phalanx.errors import ConfigError, ProblemCollector
from phalanx.plan.acceleration import Acceleration, plan_acceleration
from phalanx.plan.averaging import check_averaging
from phalanx.plan.events import CKPTS, LOGS, Every, adjust_event_rate, describe_carried_tail
from phalanx.plan.layout import Layout, count_accumulation
from phalanx.plan.loss_scale import LossScale, list_loss_scale_warnings, make_loss_scale
from phalanx.plan.machine_choice import (
    MachineChoice,
    count_local_ranks,
    list_layout_notes,
    plan_layout,
    refuse_missing_engine,
)
from phalanx.plan.model import Growth, check_image_sizes, choose_image_size, plan_resolutions
from phalanx.plan.pipeline import Pipeline, describe_shifted_splits, plan_pipeline
from phalanx.plan.recompute import add_stage_outputs, plan_recomputation
from phalanx.plan.schedule import (
    Schedule,
    find_peak_lr,
    find_schedule_start,
    list_schedule_warnings,
    make_schedule,
    read_schedule_options,
    refuse_joint_drops,
)
from phalanx.plan.unused_options import list_unused_options
from phalanx.plan.world import count_rank_cores
from phalanx.units import RunLength, format_plural, parse_rate, parse_share

LEAST_MAX_BAD = 10
_LEAST_VALID_BATCH = 250
_MOST_IMAGES = 2**62  # positions in the stream are 64-bit integers


@dataclass(frozen=True, kw_only=True)
class DatasetCounts:
    """The sizes that depend on the data."""

    train_images: int
    valid_images: int
    classes: int


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
    recompute_patterns: tuple[str, ...] | None  # modules whose outputs are stored; None: all
    num_classes: int
    train_images: int
    valid_images: int
    micro_batch: int
    accumulation: int
    layout: Layout
    pipeline: Pipeline | None  # if the model is split into stages
    acceleration: Acceleration
    global_batch: int
    steps_per_epoch: Fraction
    total_steps: int
    valid_batch: int
    max_bad: int
    log: Every
    evaluate: Every
    save: Every
    scores_after: bool  # whether every checkpoint is scored after training
    schedule: Schedule
    loss_scale: LossScale
    warnings: tuple[str, ...] = ()  # what the user may not have intended

    @property
    def replicas(self) -> int:
        """The number of copies of the model that share a step."""
        return self.layout.replicas

    @property
    def stages(self) -> int:
        """The number of stages of the model, whether or not they have their own devices."""
        return self.pipeline.stages if self.pipeline else 1

    @property
    def epochs(self) -> float:
        """The length of the run in epochs."""
        return float(self.total_steps / self.steps_per_epoch)

    @property
    def evaluations(self) -> int:
        """How often the model is scored, during or after training."""
        return (self.save if self.scores_after else self.evaluate).count()

    def epoch_at(self, step: int) -> float:
        """The epoch, with its fraction, after that many steps."""
        return float(step / self.steps_per_epoch)

    def lr(self, step: int) -> float:
        """The learning rate of the step after `step` finished ones."""
        return self.schedule.lr(step)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain numbers, for JSON and tables."""
        events = {"log": self.log, "evaluate": self.evaluate, "save": self.save}
        left_out = (*events, "schedule", "loss_scale", "warnings", "growth", "recompute_patterns")
        left_out += ("layout", "pipeline", "acceleration")
        plain = {name: value for name, value in asdict(self).items() if name not in left_out}
        plain |= asdict(self.layout)
        plain["stages"] = self.stages
        plain["splits"] = ",".join(self.pipeline.starts) if self.pipeline else ""
        plain["steps_per_epoch"] = float(self.steps_per_epoch)
        plain["epochs"] = self.epochs
        plain |= {"graph": self.acceleration.graph, "own_kernels": self.acceleration.own_kernels}
        plain["growth"] = ",".join(f"{size}:{end}st" for end, size in self.growth)
        plain["train_images_seen"] = self.total_steps * self.global_batch
        plain["lr_shape"], plain["lr_peak"] = self.schedule.shape, self.schedule.peak
        plain["lr_highest"] = self.schedule.find_highest()
        plain["warmup_steps"] = self.schedule.warmup
        plain |= {f"{name}_points": event.count() for name, event in events.items()}
        plain["evaluate_points"] = self.evaluations
        plain["loss_scale"] = self.loss_scale.at(0)
        plain["loss_scale_automatic"] = self.loss_scale.automatic
        return plain


def make_plan(
    config: Config,
    data: DatasetCounts,
    machine: MachineChoice,
    *,
    locations: Mapping[str, str] | None = None,
    user_options: Collection[str] = (),
) -> Plan:
    """Derive every number of the run; ConfigError lists everything that is impossible.

    locations: where each option was given, to name instead of its flag. user_options: those that
    the user gave for this run.
    """
    problems = ProblemCollector(locations or {})
    with problems.collect():  # everything else depends on it
        run = count_run_length(config, data)
    problems.refuse()
    pieces = _plan_pieces(config, machine, run, problems=problems, user_options=user_options)
    return Plan(
        device=machine.device,
        precision=machine.precision,
        threads=machine.threads,
        **pieces._asdict(),
        determinism=config.machine.determinism,
        half_type=config.machine.half_type,
        half_partials=config.machine.half_partials,
        image_size=choose_image_size(config),
        num_classes=data.classes,
        train_images=data.train_images,
        valid_images=data.valid_images,
        micro_batch=config.data.batch_size,
        accumulation=_count_accumulation(config),
        global_batch=count_global_batch(config),
        steps_per_epoch=run.steps_per_epoch,
        total_steps=run.total_steps,
        valid_batch=config.data.valid_batch_size or max(config.data.batch_size, _LEAST_VALID_BATCH),
        max_bad=_count_max_bad(config, data.train_images),
        evaluate=Every(find_validation_rate(config), run.steps_per_epoch, run.total_steps),
        scores_after=config.train.validation and config.train.validation_mode == "after",
    )


class _PlanPieces(NamedTuple):
    """The parts of a plan that can fail independently, and the warnings."""

    layout: Layout
    pipeline: Pipeline | None
    acceleration: Acceleration
    workers: int
    growth: Growth
    recompute_patterns: tuple[str, ...] | None
    log: Every
    save: Every
    schedule: Schedule
    loss_scale: LossScale
    warnings: tuple[str, ...]


def _plan_pieces(
    config: Config,
    machine: MachineChoice,
    run: RunLength,
    *,
    problems: ProblemCollector,
    user_options: Collection[str],
) -> _PlanPieces:
    """The independent parts of a plan; the problems of all of them are reported together."""
    epochs = None if config.train.epochs is None else Fraction(str(config.train.epochs))
    growth = _plan_growth(config, run, problems)
    with problems.collect():
        schedule, schedule_notes = _plan_schedule(config, run, user_options=user_options)
    with problems.collect():
        loss_scale = make_loss_scale(
            config,
            precision=machine.precision,
            epochs=epochs or run.total_steps / run.steps_per_epoch,
            steps_per_epoch=run.steps_per_epoch,
        )
    with problems.collect():
        log, save, event_notes = _plan_events(config, run, epochs, user_options=user_options)
    with problems.collect():
        refuse_missing_engine(config, machine)
    with problems.collect():
        layout = plan_layout(config, machine)
    with problems.collect():
        accumulation = None if machine.scoring else _count_accumulation(config)
        pipeline = plan_pipeline(config, accumulation=accumulation)
        shifts = describe_shifted_splits(config) if "pipeline-splits" in user_options else ()
    with problems.collect():
        patterns = plan_recomputation(config)
    problems.refuse()
    if pipeline is not None:
        patterns = add_stage_outputs(pipeline, config, patterns, folded=layout.stages == 1)
    workers = count_workers(config, count_local_ranks(layout))
    acceleration = plan_acceleration(config, machine, layout, recomputes=patterns is not None)
    warnings = (
        *shifts,
        *schedule_notes,
        *event_notes,
        *list_loss_scale_warnings(config, precision=machine.precision),
        *acceleration.notes,
        *list_layout_notes(config, layout, machine),
        *list_unused_options(config, user_options, machine=machine, layout=layout, workers=workers),
    )
    return _PlanPieces(
        layout=layout,
        pipeline=pipeline,
        acceleration=acceleration,
        workers=workers,
        growth=growth,
        recompute_patterns=patterns,
        log=log,
        save=save,
        schedule=schedule,
        loss_scale=loss_scale,
        warnings=warnings,
    )


def _plan_growth(config: Config, run: RunLength, problems: ProblemCollector) -> Growth:
    """The sizes of training images before the last, checked with it against the network."""
    image_size = choose_image_size(config)
    growth: Growth = ()
    with problems.collect():
        growth = plan_resolutions(config, image_size, run)
    with problems.collect():
        check_image_sizes(config, image_size, growth)
    return growth


def _plan_events(
    config: Config, run: RunLength, epochs: Fraction | None, *, user_options: Collection[str]
) -> tuple[Every, Every, list[str]]:
    """When a run logs and saves, and warnings about it."""
    per_epoch, total = run.steps_per_epoch, run.total_steps
    logs = Every(parse_rate(config.train.logs_per_epoch), per_epoch, total)
    first = Fraction(str(config.run.first_ckpt_epoch))
    saves = Every(parse_rate(config.run.ckpts_per_epoch), per_epoch, total, first)
    even = config.data.epoch_tail == "drop"
    log, log_warnings = adjust_event_rate(logs, LOGS, epochs=epochs, even=even)
    save, save_warnings = adjust_event_rate(saves, CKPTS, epochs=epochs, even=even)
    if not even and "logs-per-epoch" in user_options:
        log_warnings = log_warnings or describe_carried_tail(log, LOGS)
    if not even and "ckpts-per-epoch" in user_options:
        save_warnings = save_warnings or describe_carried_tail(save, CKPTS)
    check_averaging(config, saves=save.count())
    return log, save, [*log_warnings, *save_warnings]


def _plan_schedule(
    config: Config, run: RunLength, *, user_options: Collection[str]
) -> tuple[Schedule, list[str]]:
    """The learning-rate schedule of the run, and warnings about it."""
    peak = find_peak_lr(
        config.schedule,
        global_batch=count_global_batch(config),
        accumulation=_count_accumulation(config),
    )
    options = read_schedule_options(config.schedule)
    start = find_schedule_start(config.schedule, run)
    scheduled = RunLength(run.total_steps - start, run.steps_per_epoch)
    if "lr-drop-after" in user_options:
        refuse_joint_drops(options, scheduled)
    schedule = make_schedule(options, peak, scheduled, start=start)
    return schedule, list_schedule_warnings(options, scheduled)


def scores_anything(config: Config) -> bool:
    """Whether a run scores the model, during training or after it."""
    return config.train.validation and config.train.validation_mode != "none"


def find_validation_rate(config: Config) -> Fraction:
    """How often per epoch the model is scored during training."""
    during = config.train.validation and config.train.validation_mode == "during"
    apart = Fraction(config.train.validation_frequency)
    return 1 / apart if during and apart else Fraction(0)


def count_run_length(config: Config, data: DatasetCounts) -> RunLength:
    """The length of a run and of an epoch in steps."""
    global_batch = count_global_batch(config)
    steps_per_epoch = _count_steps_per_epoch(config, data.train_images, global_batch)
    total = _count_steps(config, steps_per_epoch)
    if total * global_batch > _MOST_IMAGES:
        flag = "--epochs" if config.train.steps is None else "--steps"
        raise ConfigError(
            f"{flag}: {total} steps of {global_batch:,} images are more than can "
            "be counted; train for less"
        )
    return RunLength(total, steps_per_epoch)


def count_global_batch(config: Config) -> int:
    """Images in one optimizer step, over all replicas."""
    assert config.machine.replicas is not None  # set by `resolve_replicas`
    return config.data.batch_size * _count_accumulation(config) * config.machine.replicas


def _count_accumulation(config: Config) -> int:
    """Micro-batches of each replica in a step."""
    if config.train.global_batch_size is None:
        return config.train.gradient_accumulation or 1
    assert config.machine.replicas is not None
    return count_accumulation(
        config.train.global_batch_size,
        micro_batch=config.data.batch_size,
        replicas=config.machine.replicas,
    )


def _count_steps_per_epoch(config: Config, images: int, global_batch: int) -> Fraction:
    """Steps in one epoch: exact, and whole when the tail is dropped."""
    if config.data.epoch_tail == "carry":
        return Fraction(images, global_batch)
    if images < global_batch:
        raise ConfigError(
            f"--epoch-tail drop: {images} images do not fill a global batch of {global_batch}; "
            f"make it {images} or less, or use --epoch-tail carry"
        )
    return Fraction(images // global_batch)


def _count_steps(config: Config, steps_per_epoch: Fraction) -> int:
    """The length of the run in whole steps; a last partial step is dropped."""
    if config.train.steps is not None:
        return config.train.steps
    assert config.train.epochs is not None
    total = math.floor(Fraction(str(config.train.epochs)) * steps_per_epoch)
    if total < 1:
        epochs, steps = config.train.epochs, format_plural(float(steps_per_epoch), "step")
        them = f"{format_plural(epochs, 'epoch')} of {steps} {'is' if epochs == 1 else 'are'}"
        raise ConfigError(
            f"--epochs: {them} less than one step; train longer or lower --batch-size"
        )
    return total


def count_workers(config: Config, ranks: int) -> int:
    """Worker processes of each rank: as the option says, else by cores; 0 for data in memory."""
    if config.data.workers is not None:
        return config.data.workers
    in_memory = DATASETS[config.data.data].in_memory or config.data.data == "synthetic"
    return 0 if in_memory else count_rank_cores(ranks)


def _count_max_bad(config: Config, images: int) -> int:
    """The number of undecodable images to tolerate."""
    if config.data.max_bad is not None:
        return parse_share(config.data.max_bad, images)
    return max(LEAST_MAX_BAD, images // 100)
