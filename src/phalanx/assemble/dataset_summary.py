"""What a config meets: a look at the data, the plan that follows, and how batches are made."""

import json
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from phalanx.catalog.datasets import DATASETS
from phalanx.config.read import Settings
from phalanx.config.schema import Config
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
    """What a look at the data told, without reading an image."""

    facts: DatasetCounts
    classes: tuple[str, ...]
    fingerprints: dict[str, Any]  # by split
    manifest: str | None = None  # id of the content, where `data verify` has looked at it
    counts: str = "counted"  # or "published", where nobody looked at the files, or "made up"


def inspect_dataset(config: Config) -> DatasetSummary:
    """Count images and classes and take fingerprints."""
    if config.data.data in MADE_UP:
        return look_at_made_up(config)
    splits: tuple[Split, ...] = ("train", "valid")
    chosen = _val_split_of(config)
    sources = {
        split: open_source(config.data.data, config.data.data_dir, split, val_split=chosen)
        for split in splits
    }
    classes = sources["train"].classes
    facts = DatasetCounts(
        train_images=len(sources["train"]), valid_images=len(sources["valid"]), classes=len(classes)
    )
    fingerprints: dict[str, Any] = {s: sources[s].fingerprint() for s in splits}
    folder = config.data.data_dir
    manifest = find_manifest(Path(folder).expanduser(), fingerprints) if folder else None
    return DatasetSummary(
        facts=facts, classes=classes, fingerprints=fingerprints, manifest=manifest
    )


def _val_split_of(config: Config) -> ValSplit | None:
    """How the data is split, if the config says so."""
    if config.data.val_split is None:
        return None
    share = parse_share(config.data.val_split, _SHARE_STEPS) / _SHARE_STEPS
    return ValSplit(share, config.train.seed)


def look_at_made_up(config: Config) -> DatasetSummary:
    """Data without files: its length comes from --iterations."""
    classes = DATASETS[config.data.data].classes
    assert classes is not None
    step = count_global_batch(config)
    train = step * config.data.iterations
    facts = DatasetCounts(
        train_images=train, valid_images=max(step, train // 10), classes=len(classes)
    )
    return DatasetSummary(
        facts=facts,
        classes=classes,
        fingerprints={"train": {"images": train}, "valid": {}},
        counts="made up",
    )


def look_up_data(config: Config) -> DatasetSummary | None:
    """What the catalog knows of a dataset that is not here; None where only files can tell."""
    dataset = DATASETS[config.data.data]
    train, valid, classes = dataset.train_images, dataset.valid_images, dataset.num_classes
    own_split = config.data.val_split is not None  # its sizes follow from the files of each class
    if train is None or valid is None or classes is None or own_split:
        return None
    return DatasetSummary(
        facts=DatasetCounts(train_images=train, valid_images=valid, classes=classes),
        classes=dataset.classes or (),
        fingerprints={},
        counts="published",
    )


def plan_of(settings: Settings, *, without_data: bool = False) -> tuple[Plan, DatasetSummary]:
    """Every derived number of a run that does not exist yet.

    without_data: a folder that is not named is made up for by what the catalog knows.
    """
    config = settings.config
    missing = DATASETS[config.data.data].needs_folder and config.data.data_dir is None
    known = look_up_data(config) if without_data and missing else None
    view = known or inspect_dataset(config)
    return make_plan(config, view.facts, choose_machine(config), places=settings.places), view


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """How pixels become the model's input; travels with the weights."""

    image_size: int
    augment: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    eval_crop: float = CENTRE_SHARE
    normalization: str = "mean-std"

    @property
    def fingerprint(self) -> str:
        """Changes when the same image would look otherwise to the model."""
        return sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    @property
    def transform(self) -> TransformSpec:
        """What happens to images that are scored."""
        return TransformSpec(augment=self.augment, eval_crop=self.eval_crop)


def preprocessing_of(config: Config, plan: Plan) -> Preprocessing:
    """The preprocessing a new run trains with."""
    dataset = DATASETS[config.data.data]
    return Preprocessing(
        image_size=plan.image_size,
        augment=dataset.augment,
        mean=dataset.mean,
        std=dataset.std,
        eval_crop=config.augment.eval_crop,
        normalization=normalization_of(config),
    )


def normalization_of(config: Config) -> str:
    """How pixels are normalised, wherever that happens."""
    return "none" if config.data.normalization_location == "none" else config.augment.normalization


def recipe_of(config: Config, plan: Plan) -> InputSpec:
    """How this run's batches are made."""
    order = Order(
        images=plan.train_images,
        global_batch=plan.global_batch,
        seed=config.train.seed,
        drop_tail=config.data.epoch_tail == "drop",
        repeats=config.data.repeated_augmentation,
    )
    return InputSpec(
        data=config.data.data,
        plugin=config.run.plugin,
        data_dir=config.data.data_dir,
        image_size=plan.image_size,
        transform=_transform_spec(config),
        seed=config.train.seed,
        order=order,
        generated_images=plan.train_images,
        generated_valid_images=plan.valid_images,
        val_split=None if (chosen := _val_split_of(config)) is None else chosen.share,
        growth=plan.growth,
    )


def _transform_spec(config: Config) -> TransformSpec:
    """What happens to this run's images."""
    return TransformSpec(
        augment=DATASETS[config.data.data].augment,
        scale=parse_pair(config.augment.crop_scale),
        ratio=parse_pair(config.augment.crop_ratio),
        boxes=config.augment.use_bbox_info,
        color_jitter=config.augment.color_jitter,
        auto_augment=config.augment.auto_augment,
        random_erasing=config.augment.random_erasing,
        eval_crop=config.augment.eval_crop,
    )
