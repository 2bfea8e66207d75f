"""The Plan: every number derived from a Config, before anything runs."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from phalanx.catalog.datasets import DATASETS
from phalanx.catalog.models import MODELS
from phalanx.config.schema import Config
from phalanx.errors import ConfigError
from phalanx.plan.events import Every
from phalanx.plan.machine import count_cores, resolve_device
from phalanx.plan.model import check_variant, variant_of
from phalanx.plan.schedule import lr_at
from phalanx.units import Duration, parse_duration, parse_rate, parse_resolutions, parse_share

LEAST_MAX_BAD = 10
LEAST_VALID_BATCH = 250


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What only the data itself can say."""

    train_images: int
    valid_images: int
    classes: int


@dataclass(frozen=True, kw_only=True)
class Chosen:
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
    workers: int
    image_size: int
    growth: tuple[tuple[int, int], ...]  # until which step training images have which size
    num_classes: int
    train_images: int
    valid_images: int
    micro_batch: int
    accumulation: int
    replicas: int
    global_batch: int
    steps_per_epoch: Fraction
    total_steps: int
    warmup_steps: int
    valid_batch: int
    max_bad: int
    log: Every
    evaluate: Every
    save: Every
    lr_shape: str
    lr_peak: float

    @property
    def epochs(self) -> float:
        """Epochs of images the whole run takes."""
        return float(self.total_steps / self.steps_per_epoch)

    def epoch_at(self, step: int) -> float:
        """How far the data has been walked after that many steps."""
        return float(step / self.steps_per_epoch)

    def lr(self, step: int) -> float:
        """Learning rate of the step that follows `step` finished ones."""
        return lr_at(
            step,
            shape=self.lr_shape,
            peak=self.lr_peak,
            warmup=self.warmup_steps,
            total=self.total_steps,
        )

    def facts(self) -> dict[str, Any]:
        """The plan as plain numbers, for JSON and tables."""
        events = {"log": self.log, "evaluate": self.evaluate, "save": self.save}
        plain = {name: value for name, value in asdict(self).items() if name not in events}
        plain["steps_per_epoch"] = float(self.steps_per_epoch)
        plain["epochs"] = self.epochs
        plain["growth"] = ",".join(f"{size}:{end}st" for end, size in self.growth)
        plain["train_images_seen"] = self.total_steps * self.global_batch
        plain |= {f"{name}_points": event.count() for name, event in events.items()}
        return plain


def choose(config: Config) -> Chosen:
    """Decide what the config leaves to the machine."""
    device = resolve_device(config.machine.device)
    precision = config.machine.precision
    if precision == "auto":
        precision = "16.32" if device.startswith("cuda") else "32.32"
    return Chosen(device=device, precision=precision, threads=count_cores())


def make_plan(config: Config, data: DataFacts, chosen: Chosen) -> Plan:
    """Derive every number of the run; refuse what cannot be done."""
    global_batch = count_global_batch(config)
    steps_per_epoch = count_steps_per_epoch(config, data.train_images, global_batch)
    total = count_steps(config, steps_per_epoch)

    def steps_of(length: Duration) -> int:
        return length.steps(steps_per_epoch=steps_per_epoch, total_steps=total)

    warmup = steps_of(parse_duration(config.optim.warmup_epoch))
    if warmup > total:
        raise ConfigError(
            f"--warmup-epoch: {config.optim.warmup_epoch} is {warmup} steps, "
            f"longer than the run of {total}; shorten it or give it as a share, such as 10%"
        )

    image_size = choose_image_size(config)
    check_variant(
        config.model.model, variant_of(config), image_size, micro_batch=config.data.batch_size
    )

    def every(rate: str) -> Every:
        return Every(parse_rate(rate), steps_per_epoch, total)

    return Plan(
        **asdict(chosen),
        workers=choose_workers(config),
        image_size=image_size,
        growth=plan_growth(config, image_size, steps_of),
        num_classes=data.classes,
        train_images=data.train_images,
        valid_images=data.valid_images,
        micro_batch=config.data.batch_size,
        accumulation=config.train.gradient_accumulation,
        replicas=config.machine.replicas,
        global_batch=global_batch,
        steps_per_epoch=steps_per_epoch,
        total_steps=total,
        warmup_steps=warmup,
        valid_batch=config.data.valid_batch_size or max(config.data.batch_size, LEAST_VALID_BATCH),
        max_bad=count_max_bad(config, data.train_images),
        log=every(config.train.logs_per_epoch),
        evaluate=every("1"),
        save=every(config.run.ckpts_per_epoch),
        lr_shape=config.optim.lr_schedule,
        lr_peak=config.optim.lr,
    )


def count_global_batch(config: Config) -> int:
    """Images in one optimizer step, over all replicas."""
    return config.data.batch_size * config.train.gradient_accumulation * config.machine.replicas


def count_steps_per_epoch(config: Config, images: int, global_batch: int) -> Fraction:
    """Steps in one epoch: exact, and whole when the tail is dropped."""
    if config.data.epoch_tail == "carry":
        return Fraction(images, global_batch)
    if images < global_batch:
        raise ConfigError(
            f"--epoch-tail drop: {images} images fill no global batch of {global_batch}; "
            f"make it {images} or less, or carry the tail"
        )
    return Fraction(images // global_batch)


def count_steps(config: Config, steps_per_epoch: Fraction) -> int:
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


def choose_image_size(config: Config) -> int:
    """As asked, else the model's own where images are cut to size anyway, else the dataset's."""
    dataset = DATASETS[config.data.data]
    own = MODELS[config.model.model].image_size if dataset.any_size else dataset.image_size
    return config.data.image_size or own


def plan_growth(
    config: Config, image_size: int, steps_of: Callable[[Duration], int]
) -> tuple[tuple[int, int], ...]:
    """Until which step training images have which smaller size; empty where they never do."""
    text = config.data.progressive_resolution
    if text is None:
        return ()
    growth = tuple((steps_of(end), size) for size, end in parse_resolutions(text))
    ends = [end for end, _ in growth]
    if ends != sorted(set(ends)) or ends[0] == 0:
        raise ConfigError(
            f"--progressive-resolution {text}: ends at steps {ends}; each must come after the one "
            "before it"
        )
    if any(size >= image_size for _, size in growth):
        raise ConfigError(
            f"--progressive-resolution {text}: wants sizes below --image-size {image_size}, "
            "which the run ends with"
        )
    return growth


def choose_workers(config: Config) -> int:
    """Worker processes: as asked, else one a core where there is something to decode."""
    if config.data.workers is not None:
        return config.data.workers
    in_memory = DATASETS[config.data.data].in_memory or config.data.data == "synthetic"
    return 0 if in_memory else count_cores()


def count_max_bad(config: Config, images: int) -> int:
    """Undecodable images to put up with."""
    if config.data.max_bad is not None:
        return parse_share(config.data.max_bad, images)
    return max(LEAST_MAX_BAD, images // 100)
