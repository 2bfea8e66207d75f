"""What the data of a config holds, the plan that follows, and how its batches are made."""

import json
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from phalanx.catalog.datasets import DATASETS
from phalanx.config.read import Settings
from phalanx.config.schema import Config
from phalanx.data.formats.image_file import ReadLimits
from phalanx.data.formats.sources import Split, ValSplit, open_source
from phalanx.data.loading.reader import InputSpec
from phalanx.data.transforms.transform import CENTRE_SHARE, TransformSpec
from phalanx.data.verify.manifest import find_manifest
from phalanx.plan.order import Order
from phalanx.plan.plan import DatasetCounts, Plan, choose_machine, count_global_batch, make_plan
from phalanx.units import parse_pair, parse_share

MADE_UP = ("generated", "synthetic")
_SHARE_STEPS = 10_000  # a share is understood to a hundredth of a percent


@dataclass(frozen=True, kw_only=True)
class DatasetSummary:
    """What a dataset holds, found out without decoding an image."""

    counts: DatasetCounts
    classes: tuple[str, ...]
    fingerprints: dict[str, Any]  # by split
    manifest: str | None = None  # id of the content, where `data verify` has looked at it
    source: str = "counted"  # or "published", where nobody looked at the files, or "made up"


def inspect_dataset(config: Config) -> DatasetSummary:
    """Count images and classes and take fingerprints."""
    if config.data.data in MADE_UP:
        return summarise_made_up(config)
    splits: tuple[Split, ...] = ("train", "valid")
    folder, val_split = config.data.data_dir, _parse_val_split(config)
    sources = {
        split: open_source(config.data.data, folder, split, val_split=val_split) for split in splits
    }
    classes = sources["train"].classes
    fingerprints: dict[str, Any] = {split: sources[split].fingerprint() for split in splits}
    return DatasetSummary(
        counts=DatasetCounts(
            train_images=len(sources["train"]),
            valid_images=len(sources["valid"]),
            classes=len(classes),
        ),
        classes=classes,
        fingerprints=fingerprints,
        manifest=find_manifest(Path(folder).expanduser(), fingerprints) if folder else None,
    )


def _parse_val_split(config: Config) -> ValSplit | None:
    """How the data is split, if the config says so."""
    if config.data.val_split is None:
        return None
    share = parse_share(config.data.val_split, _SHARE_STEPS) / _SHARE_STEPS
    return ValSplit(share, config.train.seed)


def summarise_made_up(config: Config) -> DatasetSummary:
    """Data without files: its length comes from --iterations."""
    classes = DATASETS[config.data.data].classes
    assert classes is not None
    step = count_global_batch(config)
    train = step * config.data.iterations
    return DatasetSummary(
        counts=DatasetCounts(
            train_images=train, valid_images=max(step, train // 10), classes=len(classes)
        ),
        classes=classes,
        fingerprints={"train": {"images": train}, "valid": {}},
        source="made up",
    )


def summarise_published(config: Config) -> DatasetSummary | None:
    """What the catalog knows of a dataset that is not here; None where only files can tell."""
    dataset = DATASETS[config.data.data]
    train, valid, classes = dataset.train_images, dataset.valid_images, dataset.num_classes
    own_split = config.data.val_split is not None  # its sizes follow from the files of each class
    if train is None or valid is None or classes is None or own_split:
        return None
    return DatasetSummary(
        counts=DatasetCounts(train_images=train, valid_images=valid, classes=classes),
        classes=dataset.classes or (),
        fingerprints={},
        source="published",
    )


def plan_run(settings: Settings, *, without_data: bool = False) -> tuple[Plan, DatasetSummary]:
    """Every derived number of a run that does not exist yet.

    without_data: a folder that is not named is made up for by what the catalog knows.
    """
    config = settings.config
    missing = DATASETS[config.data.data].needs_folder and config.data.data_dir is None
    known = summarise_published(config) if without_data and missing else None
    dataset = known or inspect_dataset(config)
    plan = make_plan(config, dataset.counts, choose_machine(config), places=settings.places)
    return plan, dataset


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """How pixels become the model's input; travels with the weights."""

    image_size: int
    augment: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    eval_crop: float = CENTRE_SHARE
    normalization: str = "mean-std"
    exif_orientation: bool = False  # as checkpoints of before have it, which do not say

    @property
    def fingerprint(self) -> str:
        """Changes when the same image would look otherwise to the model."""
        values = asdict(self)
        if not self.exif_orientation:  # as it was before there was a choice
            del values["exif_orientation"]
        return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    @property
    def transform(self) -> TransformSpec:
        """What happens to images that are scored."""
        return TransformSpec(augment=self.augment, eval_crop=self.eval_crop)


def build_preprocessing(config: Config, plan: Plan) -> Preprocessing:
    """The preprocessing a new run trains with."""
    dataset = DATASETS[config.data.data]
    return Preprocessing(
        image_size=plan.image_size,
        augment=dataset.augment,
        mean=dataset.mean,
        std=dataset.std,
        eval_crop=config.augment.eval_crop,
        normalization=choose_normalization(config),
        exif_orientation=config.data.exif_orientation,
    )


def choose_normalization(config: Config) -> str:
    """How pixels are normalised, wherever that happens."""
    return "none" if config.data.normalization_location == "none" else config.augment.normalization


def build_read_limits(config: Config) -> ReadLimits:
    """How large an image of this run may be."""
    return ReadLimits(max_file_mib=config.data.max_file_mib, max_pixels=config.data.max_pixels)


def build_input_spec(config: Config, plan: Plan) -> InputSpec:
    """How this run's batches are made."""
    options, val_split = config.augment, _parse_val_split(config)
    return InputSpec(
        data=config.data.data,
        plugin=config.run.plugin,
        data_dir=config.data.data_dir,
        image_size=plan.image_size,
        transform=TransformSpec(
            augment=DATASETS[config.data.data].augment,
            scale=parse_pair(options.crop_scale),
            ratio=parse_pair(options.crop_ratio),
            boxes=options.use_bbox_info,
            color_jitter=options.color_jitter,
            auto_augment=options.auto_augment,
            random_erasing=options.random_erasing,
            eval_crop=options.eval_crop,
        ),
        seed=config.train.seed,
        order=Order(
            images=plan.train_images,
            global_batch=plan.global_batch,
            seed=config.train.seed,
            drop_tail=config.data.epoch_tail == "drop",
            repeats=config.data.repeated_augmentation,
        ),
        generated_images=plan.train_images,
        generated_valid_images=plan.valid_images,
        val_split=None if val_split is None else val_split.share,
        growth=plan.growth,
        limits=build_read_limits(config),
        upright=config.data.exif_orientation,
    )
