"""What a config's dataset contains, the resulting plan, and how its batches are made."""

import json
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx.catalog.datasets import CENTRE_CROP_FRACTION, DATASETS
from phalanx.catalog.variant import OwnVariant
from phalanx.config.read import Settings
from phalanx.config.schema import Config
from phalanx.disk import expand_home
from phalanx.errors import ConfigError
from phalanx.plan.machine_choice import choose_machine, resolve_replicas
from phalanx.plan.model import build_variant, choose_image_size
from phalanx.plan.pipeline import choose_starts, count_stages, is_sharded, list_starts, needs_splits
from phalanx.plan.plan import (
    DatasetCounts,
    Plan,
    count_global_batch,
    count_run_length,
    make_plan,
    scores_anything,
)
from phalanx.plan.preset_adaptation import adapt_averaging, adapt_schedule
from phalanx.plan.schedule import find_schedule_start
from phalanx.units import RunLength, format_plural, parse_pair

if TYPE_CHECKING:  # imported in functions: a plan without data does not need them
    from phalanx.data.formats.image_file import ReadLimits
    from phalanx.data.formats.sources import Split
    from phalanx.data.layouts.listing import LayoutOptions
    from phalanx.data.loading.reader import InputSpec
    from phalanx.data.transforms.transform import TransformSpec

RANDOM_DATASETS = ("generated", "synthetic")
CHOSEN_ORIGIN = "chosen"  # of values that are chosen when a run is created, and stored with it


@dataclass(frozen=True, kw_only=True)
class DatasetSummary:
    """What a dataset contains, found out without decoding an image."""

    counts: DatasetCounts
    classes: tuple[str, ...]
    fingerprints: dict[str, Any]  # by split
    snapshots: dict[str, str] = field(default_factory=dict)  # of files and their times, by split
    manifest: str | None = None  # id of the content, if `data verify` has checked it
    image_bytes: float | None = None  # mean size of a stored training image
    has_boxes: bool = True  # whether images have bounding boxes; assumed if files were not read
    source: str = "counted"  # or "published", if files were not read, or "made up"
    layout: str = ""  # how a folder was read
    ignored: dict[str, int] = field(default_factory=dict)  # files that are not read, by reason

    def collect_facts(self) -> dict[str, Any]:
        """What a run stores of its data, for a resume to compare."""
        classes = list(self.classes)
        return {"classes": classes, "data": self.fingerprints, "data_snapshots": self.snapshots}


def inspect_dataset(config: Config) -> DatasetSummary:
    """The summary of a config's dataset: images and classes are counted, files fingerprinted."""
    if config.data.data in RANDOM_DATASETS:
        return summarise_random_dataset(config)
    from phalanx.data.formats.detect import (
        count_ignored,
        describe_data_layout,
        describe_similar_classes,
        find_image_bytes,
        has_boxes,
    )
    from phalanx.data.formats.index import IndexedSource
    from phalanx.data.formats.sources import ValSplit, has_valid_split, open_source
    from phalanx.data.verify.manifest import find_manifest

    (data, folder), layout = locate_data(config), build_layout_options(config)
    wanted = config.data.val_split
    splits: tuple[Split, ...] = ("train", "valid")
    needs_valid = scores_anything(config) or wanted is not None
    if not needs_valid and not has_valid_split(data, folder, layout):
        splits = ("train",)  # all images are for training
    val_split = None if wanted is None else ValSplit(wanted, config.train.seed)
    sources = {
        split: open_source(data, folder, split, val_split=val_split, layout=layout)
        for split in splits
    }
    classes = sources["train"].classes
    fingerprints: dict[str, Any] = {split: sources[split].fingerprint() for split in splits}
    manifest = find_manifest(expand_home(folder), fingerprints) if folder else None
    if config.augment.use_bbox_info and isinstance(sources["train"], IndexedSource):
        fingerprints["train"] |= {"boxes_sha256": sources["train"].index.hash_boxes()}
    lines = []
    if folder:
        lines.append(describe_data_layout(data, expand_home(folder), layout))
        lines.append(describe_similar_classes(classes))
    if wanted is not None:
        images = format_plural(len(sources.get("valid", ())), "image")
        lines.append(f"{images} held out by --val-split {wanted}")
    return DatasetSummary(
        counts=DatasetCounts(
            train_images=len(sources["train"]),
            valid_images=len(sources.get("valid", ())),
            classes=len(classes),
        ),
        classes=classes,
        fingerprints=fingerprints,
        snapshots={
            split: source.index.snapshot_sha256
            for split, source in sources.items()
            if isinstance(source, IndexedSource)
        },
        image_bytes=find_image_bytes(sources["train"]),
        has_boxes=has_boxes(sources["train"]),
        manifest=manifest,
        layout="; ".join(filter(None, lines)),
        ignored=count_ignored(sources.values()),
    )


def locate_data(config: Config) -> tuple[str, str | None]:
    """The format of the data and its folder, at or below --data-dir."""
    data, folder = config.data.data, config.data.data_dir
    if folder is None:
        return data, None
    from phalanx.data.formats.detect import locate_dataset

    data, place = locate_dataset(data, expand_home(folder), build_layout_options(config))
    return data, str(place)


def build_layout_options(config: Config) -> "LayoutOptions":
    """How a folder of images is to be read."""
    from phalanx.data.layouts.listing import LayoutOptions

    data = config.data
    return LayoutOptions(
        rule=data.listing_rule,
        valid_split=data.valid_split,
        class_from=data.class_from,
        labels=data.labels,
    )


def summarise_random_dataset(config: Config) -> DatasetSummary:
    """The summary of data without files, whose length comes from --iterations."""
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
    """The catalog's facts about a dataset; None if its files must be read."""
    dataset = DATASETS[config.data.data]
    train, valid, classes = dataset.train_images, dataset.valid_images, dataset.num_classes
    own_split = config.data.val_split is not None  # its sizes depend on the files of each class
    if train is None or valid is None or classes is None or own_split:
        return None
    return DatasetSummary(
        counts=DatasetCounts(train_images=train, valid_images=valid, classes=classes),
        classes=dataset.classes or (),
        fingerprints={},
        image_bytes=dataset.image_bytes,
        source="published",
    )


def summarise_dataset(config: Config, *, without_data: bool) -> DatasetSummary:
    """The summary of the dataset; without_data: the catalog's facts if no folder is named."""
    missing = DATASETS[config.data.data].needs_folder and config.data.data_dir is None
    known = summarise_published(config) if without_data and missing else None
    return known or inspect_dataset(config)


class PlannedRun(NamedTuple):
    """A run that does not exist yet: options adapted to the data, the plan, and the data."""

    settings: Settings
    plan: Plan
    dataset: DatasetSummary


def plan_run(settings: Settings, *, without_data: bool = False) -> tuple[Plan, DatasetSummary]:
    """The plan and the data of a run that does not exist yet.

    without_data: if no folder is named, the catalog's facts about the dataset are used.
    """
    return plan_new_run(settings, without_data=without_data)[1:]


def plan_new_run(
    settings: Settings, *, without_data: bool = False, without_torch: bool = False
) -> PlannedRun:
    """The same, with the settings that a new run stores: a preset's values adapted to the run.

    without_torch: pipeline splits that are not given stay open, because choosing them needs torch.
    """
    settings = resolve_replicas(settings)
    config = settings.config
    dataset = summarise_dataset(config, without_data=without_data)
    adapted = adapt_settings(settings, dataset.counts)
    is_cropped = DATASETS[config.data.data].augment == "resized-crop"  # else the plan says it
    if config.augment.use_bbox_info and is_cropped and not dataset.has_boxes:
        note = "--use-bbox-info has no effect: no image of this data has a box"
        adapted = replace(adapted, notes=(*adapted.notes, note))
    if needs_splits(config):
        plan_settings(adapted, dataset.counts)  # refuses what is wrong without importing torch
        adapted = adapted if without_torch else choose_pipeline_splits(adapted, dataset.counts)
    return PlannedRun(adapted, plan_settings(adapted, dataset.counts), dataset)


def choose_pipeline_splits(settings: Settings, counts: DatasetCounts) -> Settings:
    """The settings with the first unit of each stage chosen, if the options do not give them.

    Without --pipeline the stages run one after the other.
    """
    config = settings.config
    if not needs_splits(config):
        return settings
    variant = build_variant(config)
    if not isinstance(variant, OwnVariant):
        list_starts(config, variant.units)

    from phalanx.models.stage_cost import estimate_costs

    image_size = choose_image_size(config)
    costs = estimate_costs(variant, num_classes=counts.classes, image_size=image_size)
    starts = ",".join(choose_starts(config, costs))
    stages = format_plural(count_stages(config), "stage")
    notes = [f"--pipeline-splits {starts}: chosen so that {stages} cost about the same"]
    changes = {"pipeline-splits": starts}
    if is_sharded(config):
        changes["pipeline-schedule"] = "Sequential"
        if "pipeline-schedule" in settings.user_options:
            notes.append(
                f"--pipeline-schedule {config.pipeline.pipeline_schedule} has no effect with "
                "--shards alone, whose stages take turns; --pipeline lets them work at once"
            )
    return settings.replace_options(changes, origin=CHOSEN_ORIGIN, notes=notes)


def plan_settings(settings: Settings, counts: DatasetCounts) -> Plan:
    """The plan of settings that were adapted to the data, with all warnings about them."""
    config, options = settings.config, settings.user_options
    machine = choose_machine(config)
    plan = make_plan(config, counts, machine, locations=settings.locations, user_options=options)
    missing = [f"train refuses this: {settings.missing}"] * bool(settings.missing)
    return replace(plan, warnings=(*missing, *settings.notes, *plan.warnings))


def adapt_settings(settings: Settings, counts: DatasetCounts) -> Settings:
    """The settings with a preset's values for a longer run shortened or left out."""
    config = settings.config
    try:
        run = count_run_length(config, counts)
        start = find_schedule_start(config.schedule, run)
    except ConfigError:
        return settings  # reported later, together with all other problems
    owners = {"preset": "the preset's", "run": "the run's"}
    inherited = {
        name: owners[owner]
        for name, origin in settings.origins.items()
        if (owner := origin.partition(" ")[0]) in owners
    }
    left = RunLength(run.total_steps - start, run.steps_per_epoch)
    lengths, notes = adapt_schedule(config.schedule, inherited, left, settings.preset_length)
    origins = {name: f"{settings.origins[name]}, shortened" for name in lengths}
    defaults, not_averaged = adapt_averaging(config, inherited, run)
    adapted = settings.replace_options(lengths, notes=notes)
    adapted = replace(adapted, origins=adapted.origins | origins)
    return adapted.replace_options(defaults, origin="default", notes=not_averaged)


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """How pixels become the model's input; stored with the weights."""

    image_size: int
    augment: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    eval_crop: float = CENTRE_CROP_FRACTION  # of older checkpoints, which do not have it
    normalization: str = "mean-std"
    exif_orientation: bool = False  # older checkpoints do not have it, and did not turn images

    @property
    def fingerprint(self) -> str:
        """A hash that changes if the model would see the same image differently."""
        values = asdict(self)
        if not self.exif_orientation:  # the same hash as before the option existed
            del values["exif_orientation"]
        return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    @property
    def transform(self) -> "TransformSpec":
        """The transform of images that are scored."""
        from phalanx.data.transforms.transform import TransformSpec

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
    """How pixels are normalised, on the host or on the device."""
    return "none" if config.data.normalization_location == "none" else config.augment.normalization


def build_read_limits(config: Config) -> "ReadLimits":
    """How large an image of this run may be."""
    from phalanx.data.formats.image_file import ReadLimits

    return ReadLimits(max_file_mib=config.data.max_file_mib, max_pixels=config.data.max_pixels)


def build_input_spec(config: Config, plan: Plan) -> "InputSpec":
    """How this run's batches are made."""
    from phalanx.data.loading.reader import InputSpec
    from phalanx.data.transforms.transform import TransformSpec
    from phalanx.plan.order import Order

    options, (data, data_dir) = config.augment, locate_data(config)
    return InputSpec(
        data=data,
        plugin=config.run.plugin,
        data_dir=data_dir,
        image_size=plan.image_size,
        transform=TransformSpec(
            augment=DATASETS[config.data.data].augment,
            scale=parse_pair(options.crop_scale),
            ratio=parse_pair(options.crop_ratio),
            shift=options.shift_pixels,
            reflects=options.shift_fill == "reflect",
            alternates=options.flips == "alternating",
            boxes=options.use_bbox_info,
            color_jitter=options.color_jitter,
            auto_augment=options.auto_augment,
            random_erasing=options.random_erasing,
            smooth_crops=options.crop_rule > 1,
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
        valid_images=plan.valid_images,
        layout=build_layout_options(config),
        val_split=config.data.val_split,
        growth=plan.growth,
        limits=build_read_limits(config),
        upright=config.data.exif_orientation,
    )
