"""Options that have no effect in a run are reported, and only those."""

import pytest
import torch

from phalanx.assemble.build import keeps_on_device_by_default
from phalanx.assemble.dataset_summary import build_input_spec
from phalanx.catalog.datasets import DATASETS
from phalanx.config.presets import builtin_preset_folder
from phalanx.config.read import read_settings
from phalanx.config.schema import OPTIONS
from phalanx.data.loading.resident import find_resident_problem
from phalanx.plan.machine_choice import MachineChoice, choose_machine
from phalanx.plan.plan import DatasetCounts, make_plan
from phalanx.plan.unused_options import REQUIREMENTS, can_keep_on_device

FACTS = DatasetCounts(train_images=50_000, valid_images=10_000, classes=10)
CPU = MachineChoice(device="cpu", precision="32.32", threads=1)
GPU = MachineChoice(device="cuda", precision="32.32", threads=1)
UNUSED = [
    ("lr-epoch-decay", "5", {"lr-schedule": "cosine"}, {"lr-schedule": "step"}),
    ("lr-drop-after", "0.5", {"lr-schedule": "constant"}, {"lr-schedule": "step"}),
    ("lr-decay-period", "2ep", {"lr-schedule": "polynomial"}, {"lr-schedule": "exponential"}),
    ("lr-decay-length", "2ep", {"lr-schedule": "exponential"}, {"lr-schedule": "cosine"}),
    ("momentum", "0.5", {"optimizer": "adamw"}, {"optimizer": "nesterov"}),
    ("momentum", "0.5", {"optimizer": "lamb"}, {"optimizer": "rmsprop_tf"}),
    ("trust-coefficient", "0.01", {"optimizer": "lamb"}, {"optimizer": "lars"}),
    ("trust-decay", "0.01", {}, {"optimizer": "lamb"}),
    ("rmsprop-decay", "0.9", {}, {"optimizer": "rmsprop"}),
    ("rmsprop-start", "0", {"optimizer": "rmsprop"}, {"optimizer": "rmsprop_tf"}),
    ("adam-betas", "0.8,0.9", {}, {"optimizer": "lamb"}),
    ("loss-velocity-scaling-ratio", "2", {}, {"optimizer": "sgd_combined"}),
    ("smoothing-over", "others", {}, {"label-smoothing": "0.1"}),
    ("lr-batch", "pass", {}, {"lr-per-image": "0.001"}),
    ("half-type", "float16", {"precision": "32.32"}, {"precision": "16.32", "loss-scaling": "2"}),
    ("full-precision-norm", "true", {"precision": "32.32"}, {"precision": "16.32"}),
    ("half-partials", "true", {"precision": "32.32"}, {"precision": "16.16"}),
    ("recompute-checkpoints", "conv", {}, {"enable-recompute": "true"}),
    ("lr-decay", "0.5", {"lr-schedule": "cosine"}, {"lr-schedule": "exponential"}),
    ("lr-power", "3", {}, {"lr-schedule": "polynomial"}),
    ("lr-end-ratio", "0.1", {"lr-schedule": "constant"}, {"lr-schedule": "cosine"}),
    ("lr-scheduler-freq", "2", {"lr-schedule": "constant"}, {}),
    ("warmup-mode", "mask", {"warmup-epoch": "0st"}, {}),
    ("optimizer-eps", "1e-3", {}, {"optimizer": "lars"}),
    ("norm-num-groups", "8", {}, {"norm-type": "group"}),
    ("enable-fast-groupnorm", "true", {}, {"norm-type": "group", "norm-num-groups": "8"}),
    ("batchnorm-momentum", "0.2", {"norm-type": "none"}, {}),
    ("disable-stable-batchnorm", "true", {"norm-type": "none"}, {}),
    ("bn-span", "2", {"norm-type": "none"}, {"replicas": "2"}),
    ("norm-eps", "1e-3", {"norm-type": "none"}, {}),
    ("norm-bias-lr-scale", "2", {"norm-type": "none"}, {}),
    ("zero-init-residual", "true", {"norm-type": "none"}, {}),
    ("normalization", "mean", {"normalization-location": "none"}, {}),
    ("run-dir", "runs/new", {"training": "false"}, {}),
    ("tensorboard", "true", {"training": "false"}, {}),
    ("wandb", "true", {"training": "false"}, {}),
    ("mlflow", "true", {"training": "false"}, {}),
    ("validation-mode", "after", {"validation": "false"}, {}),
    ("validation-frequency", "2", {"validation-mode": "none"}, {}),
    ("valid-batch-size", "100", {"validation-mode": "none"}, {}),
    ("keep", "3", {"ckpts-per-epoch": "0/1"}, {}),
    ("first-ckpt-epoch", "2", {"ckpts-per-epoch": "0"}, {}),
    ("weight-avg-n", "3", {}, {"weight-avg-strategy": "mean"}),
    ("weight-avg-exp-decay", "0.5", {}, {"weight-avg-strategy": "exponential"}),
    ("iterations", "50", {}, {"data": "generated"}),
    ("no-fetch", "true", {}, {"data": "cifar10"}),
    ("wandb-mode", "offline", {}, {"wandb": "true"}),
    ("wandb-project", "flowers", {}, {"wandb": "true"}),
    ("wandb-run-name", "first", {}, {"wandb": "true"}),
    ("wandb-tags", "small,fast", {}, {"wandb": "true"}),
    ("mlflow-uri", "file:runs", {}, {"mlflow": "true"}),
    ("mlflow-experiment", "flowers", {}, {"mlflow": "true"}),
]


def notes(**flags: str) -> tuple[str, ...]:
    config = read_settings("demo", flags).config
    return make_plan(config, FACTS, choose_machine(config)).warnings


@pytest.mark.parametrize(("name", "value", "unused", "used"), UNUSED)
def test_what_changes_nothing_is_told_and_what_counts_is_not(name, value, unused, used):
    (note,) = notes(**{name: value}, **unused)
    assert note.startswith(f"--{name} has no effect with")
    assert notes(**{name: value}, **used) == ()
    default = OPTIONS[name].default
    if default is not None:
        assert notes(**{name: str(default)}, **unused) == (), "its own value is not told"


def test_every_row_is_tried():
    assert {need.name for need in REQUIREMENTS} | {"lr-batch"} == {name for name, *_ in UNUSED}


def test_a_note_says_what_keeps_the_option_from_counting():
    assert notes(**{"trust-decay": "0.1"}) == (
        "--trust-decay has no effect with --optimizer sgd, only with lars and lamb",
    )
    assert notes(**{"smoothing-over": "others"}) == (
        "--smoothing-over has no effect without --label-smoothing",
    )
    assert notes(**{"lr-decay-length": "2ep", "lr-schedule": "step", "lr-epoch-decay": "5"}) == (
        "--lr-decay-length has no effect with --lr-schedule step, only with cosine and polynomial",
    )


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in builtin_preset_folder().glob("*.yaml"))
)
def test_no_preset_of_ours_has_an_option_that_changes_nothing(name):
    config = read_settings(name).config
    dataset = DATASETS[config.data.data]
    facts = DatasetCounts(
        train_images=dataset.train_images or 1_281_167, valid_images=50_000, classes=1000
    )
    told = make_plan(config, facts, choose_machine(config)).warnings
    assert not [note for note in told if "no effect" in note]
    bits = "16.32" if config.machine.precision == "auto" else config.machine.precision
    gpu = MachineChoice(device="cuda", precision=bits, threads=1)
    told = make_plan(config, facts, gpu).warnings
    assert not [note for note in told if "no effect" in note]


# --- what the user typed ---


def typed_notes(preset: str = "demo", chosen: MachineChoice = CPU, **flags: str) -> list[str]:
    """What is told of options that were typed."""
    settings = read_settings(preset, {name.replace("_", "-"): t for name, t in flags.items()})
    return list(
        make_plan(settings.config, FACTS, chosen, user_options=settings.user_options).warnings
    )


def test_the_five_options_of_a_run_that_does_without_them():
    flags = {"use_bbox_info": "true", "iterations": "100", "lr_decay": "0.5"}
    flags |= {"norm_num_groups": "8", "weight_avg_exp_decay": "0.5"}
    assert sorted(typed_notes(**flags)) == [
        "--iterations has no effect with --data embedded, only with generated and synthetic",
        "--lr-decay has no effect with --lr-schedule cosine, only with step and exponential",
        "--norm-num-groups has no effect with --norm-type batch, only with group",
        "--use-bbox-info has no effect with --data embedded, which has no photographs",
        "--weight-avg-exp-decay has no effect with --weight-avg-strategy none, only with "
        "exponential",
    ]


def test_what_was_typed_is_told_even_with_its_own_value_unless_it_is_off():
    assert len(typed_notes(norm_num_groups="32")) == 1
    assert typed_notes(use_bbox_info="false", keep_on_device="null") == []


SIXTEEN = MachineChoice(device="cpu", precision="16.16", threads=1)
WITHOUT_USE = [
    ("crop-scale", "0.5,1", {}, "with --data embedded, which has no photographs"),
    ("crop-ratio", "1,1", {}, "with --data embedded, which has no photographs"),
    ("eval-crop", "0.9", {}, "with --data embedded, which has no photographs"),
    ("shift-pixels", "2", {"data": "generated"}, "with --data generated, which has no small "
     "images"),
    ("flips", "alternating", {"data": "generated"}, "with --data generated, which has no images "
     "that are mirrored"),
    ("max-bad", "3", {}, "with --data embedded, which has no files of images"),
    ("max-pixels", "300", {}, "with --data embedded, which has no files of images"),
    ("max-file-mib", "3", {}, "with --data embedded, which has no files of images"),
    ("dataset-cache", "true", {}, "with --data embedded, which has no files of images"),
    ("lr-staircase", "true", {"lr-schedule": "constant", "warmup-epoch": "0"}, "with --lr-schedule "
     "constant and no warm-up: the rate never changes"),
    ("zero-init-residual", "true", {"init-weights": "w"}, "with --init-weights, which say how every"
     " block starts"),
    ("color-jitter", "0.4", {"data": "synthetic"}, "with --data synthetic: the device makes the "
     "images itself"),
    ("stage1-projection", "true", {"model": "resnet29"}, "with --model resnet29: its first block "
     "projects in any case"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "others", "why"), WITHOUT_USE)
def test_what_the_data_or_the_network_has_no_use_for_is_told(name, value, others, why):
    assert typed_notes(**{name: value}, **others) == [f"--{name} has no effect {why}"]


def test_what_photographs_and_files_have_is_not_told():
    flags = {name: value for name, value, others, _ in WITHOUT_USE if not others}
    assert typed_notes("folder-resnet18", **flags) == []
    assert typed_notes(stage1_projection="true", zero_init_residual="1") == []


def test_half_partials_are_for_a_gpu():
    (note,) = typed_notes(chosen=SIXTEEN, half_partials="true")
    assert note == "--half-partials has no effect on cpu, only on a GPU"
    gpu = MachineChoice(device="cuda", precision="16.16", threads=1)
    assert typed_notes(chosen=gpu, half_partials="true") == []


def test_a_preset_is_not_told_what_the_data_has_no_use_for():
    assert typed_notes("pl-efficientnet-b0-800", SIXTEEN, data="generated", epochs="9") == []


# --- of the input ---


def input_notes(preset, chosen=CPU, **options):
    flags = {name.replace("_", "-"): str(value) for name, value in options.items()}
    return list(make_plan(read_settings(preset, flags).config, FACTS, chosen).warnings)


def test_a_share_without_boxes_says_nothing_where_there_are_boxes():
    assert input_notes("demo", cutmix_disable_prob=0.3) == [
        "--cutmix-disable-prob has no effect without cutmix; give --cutmix-lambda-high 1, or "
        "leave it out"
    ]
    assert input_notes("demo", cutmix_disable_prob=0.3, cutmix_lambda_high=1) == []
    assert input_notes("demo", cutmix_disable_prob=0.3, cutmix_lambda=0.85) == []
    assert len(input_notes("demo", cutmix_disable_prob=0.3, mixup_alpha=0.2)) == 1


FOR_WORKERS = {"workers": 3, "dataloader_rebatch_size": 32}


@pytest.mark.parametrize(
    ("preset", "options", "why"),
    [
        ("cifar10-fast", {"keep_on_device": True}, "with --keep-on-device: the device makes the"),
        ("synthetic-resnet50", {}, "with --data synthetic: the device makes the images itself"),
        ("cifar10-fast", {}, "where cifar10 fits the memory of cuda, which then makes the images"),
    ],
)
def test_workers_where_the_device_makes_the_images_are_told(preset, options, why):
    told = input_notes(preset, GPU, **options, **FOR_WORKERS)
    assert [note.split(" has ")[0] for note in told] == [
        "--workers 3",
        "--dataloader-rebatch-size 32",
    ]
    assert all(f"has no effect {why}" in note for note in told)
    assert input_notes(preset, GPU, **options) == [], "nobody asked for workers"
    assert input_notes(preset, GPU, **options, workers=0) == [], (
        "none were asked for, and none come"
    )


ON_HOST = [
    {"color_jitter": 0.4},
    {"auto_augment": "rand-augment"},
    {"random_erasing": 0.5},
    {"normalization_location": "host"},
    {"image_size": 48},
    {"progressive_resolution": "16:50%"},
]


@pytest.mark.parametrize("options", [{"keep_on_device": False}, *ON_HOST], ids=str)
def test_workers_that_are_used_are_not_told(options):
    assert input_notes("cifar10-fast", GPU, **options, **FOR_WORKERS) == []


def test_workers_of_a_small_set_are_used_on_the_cpu():
    assert input_notes("cifar10-fast", CPU, **FOR_WORKERS) == []
    assert input_notes("folder-resnet18", GPU, **FOR_WORKERS) == []


def test_portions_for_workers_are_told_where_there_are_none():
    said = "--dataloader-rebatch-size 32 has no effect without workers"
    assert input_notes("demo", dataloader_rebatch_size=32) == [said]
    assert input_notes("folder-resnet18", dataloader_rebatch_size=32, workers=0) == [said]
    assert input_notes("folder-resnet18", dataloader_rebatch_size=16, workers=0) == []


@pytest.mark.parametrize(
    "options", [{}, {"image_size": 28}, {"mixup_alpha": 0.2}, *ON_HOST], ids=str
)
def test_the_plan_and_the_feed_agree_on_which_sets_may_lie_on_a_gpu(options):
    flags = {name.replace("_", "-"): str(value) for name, value in options.items()}
    config = read_settings("demo", flags).config
    recipe = build_input_spec(config, make_plan(config, FACTS, GPU))
    why_not = find_resident_problem(recipe, recipe.open("valid"))
    assert can_keep_on_device(config) == (
        keeps_on_device_by_default(torch.device("cuda"), config) and not why_not
    )


# --- stages ---


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            {"pipeline_schedule": "Interleaved"},
            "--pipeline-schedule has no effect without stages; --shards or --pipeline-splits "
            "would make them",
        ),
        (
            {"pipeline_validation_model": "true"},
            "--pipeline-validation-model has no effect without stages; --shards or "
            "--pipeline-splits would make them",
        ),
        (
            {"sharding_include_filter": "layer", "shards": "1"},
            "--sharding-include-filter has no effect without stages; --shards would make them",
        ),
        (
            {"sharding_exclude_filter": "head", "shards": "2", "pipeline": "true"},
            "--sharding-exclude-filter has no effect with --pipeline, only where --shards alone "
            "cuts a model",
        ),
        (
            {
                "sharding_exclude_filter": "head",
                "pipeline_splits": "layer2/0",
                "pipeline_schedule": "Sequential",
            },
            "--sharding-exclude-filter has no effect with --pipeline-splits, only where --shards "
            "alone cuts a model",
        ),
    ],
)
def test_options_for_stages_need_some(flags, told):
    assert typed_notes(**flags) == [told]


def test_stages_have_use_for_their_options():
    assert typed_notes(shards="2", sharding_include_filter="layer2") == []
    named = {"pipeline_splits": "layer2/0", "gradient_accumulation": "2"}
    assert typed_notes(**named, pipeline_validation_model="true") == []
    assert typed_notes(**named, pipeline_schedule="Interleaved", shards="1") == []


@pytest.mark.parametrize(
    ("replicas", "devices", "told"),
    [
        ("2", 9, "2 replicas of 4 stages use only 8; the next replica needs 4 of its own"),
        ("2", 12, "2 replicas of 4 stages use only 8; --replicas auto trains one on every 4"),
        ("1", 3, "1 replica of 4 stages uses only 1; stages have devices of their own from 4 on"),
    ],
)
def test_devices_that_stages_leave_over_are_told(replicas, devices, told):
    chosen = MachineChoice(device="cpu", precision="32.32", threads=1, devices=devices)
    flags = {"replicas": replicas, "devices": str(devices), "shards": "4"}
    assert typed_notes(chosen=chosen, **flags) == [f"--devices {devices}: {told}"]
