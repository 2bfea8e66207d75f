"""Options of the input that do nothing are told, and only those."""

import pytest
import torch

from phalanx.assemble.dataset_summary import build_input_spec
from phalanx.assemble.feed import stays_unasked
from phalanx.config.read import read_settings
from phalanx.data.loading.resident import find_resident_problem
from phalanx.plan.input_options import can_reside
from phalanx.plan.plan import DatasetCounts, MachineChoice, make_plan

FACTS = DatasetCounts(train_images=50_000, valid_images=10_000, classes=10)
CPU = MachineChoice(device="cpu", precision="32.32", threads=1)
GPU = MachineChoice(device="cuda", precision="32.32", threads=1)


def notes(preset, chosen=CPU, **options):
    flags = {name.replace("_", "-"): str(value) for name, value in options.items()}
    return list(make_plan(read_settings(preset, flags).config, FACTS, chosen).warnings)


def test_a_share_without_boxes_says_nothing_where_there_are_boxes():
    assert notes("demo", cutmix_disable_prob=0.3) == [
        "--cutmix-disable-prob has no effect without cutmix; give --cutmix-lambda-high 1, or "
        "leave it away"
    ]
    assert notes("demo", cutmix_disable_prob=0.3, cutmix_lambda_high=1) == []
    assert notes("demo", cutmix_disable_prob=0.3, cutmix_lambda=0.85) == []
    assert len(notes("demo", cutmix_disable_prob=0.3, mixup_alpha=0.2)) == 1


ASKED = {"workers": 3, "dataloader_rebatch_size": 32}


@pytest.mark.parametrize(
    ("preset", "options", "why"),
    [
        ("folder-resnet18", {"gpu_decode": True}, "with --gpu-decode: the device makes the images"),
        ("cifar10-fast", {"keep_on_device": True}, "with --keep-on-device: the device makes the"),
        ("synthetic-resnet50", {}, "with --data synthetic: the device makes the images itself"),
        ("cifar10-fast", {}, "where cifar10 fits the memory of cuda, which then makes the images"),
    ],
)
def test_workers_where_the_device_makes_the_images_are_told(preset, options, why):
    told = notes(preset, GPU, **options, **ASKED)
    assert [note.split(" has ")[0] for note in told] == [
        "--workers 3",
        "--dataloader-rebatch-size 32",
    ]
    assert all(f"has no effect {why}" in note for note in told)
    assert notes(preset, GPU, **options) == [], "nobody asked for workers"
    assert notes(preset, GPU, **options, workers=0) == [], "none were asked for, and none come"


HOSTED = [
    {"color_jitter": 0.4},
    {"auto_augment": "rand-augment"},
    {"random_erasing": 0.5},
    {"normalization_location": "host"},
    {"image_size": 48},
    {"progressive_resolution": "16:50%"},
]


@pytest.mark.parametrize("options", [{"keep_on_device": False}, *HOSTED], ids=str)
def test_workers_that_are_used_are_not_told(options):
    assert notes("cifar10-fast", GPU, **options, **ASKED) == []


def test_workers_of_a_small_set_are_used_on_the_cpu():
    assert notes("cifar10-fast", CPU, **ASKED) == []
    assert notes("folder-resnet18", GPU, **ASKED) == []


def test_portions_for_workers_are_told_where_there_are_none():
    said = "--dataloader-rebatch-size 32 has no effect without workers"
    assert notes("demo", dataloader_rebatch_size=32) == [said]
    assert notes("folder-resnet18", dataloader_rebatch_size=32, workers=0) == [said]
    assert notes("folder-resnet18", dataloader_rebatch_size=16, workers=0) == []


@pytest.mark.parametrize(
    "options", [{}, {"image_size": 28}, {"mixup_alpha": 0.2}, *HOSTED], ids=str
)
def test_the_plan_and_the_feed_agree_on_which_sets_may_lie_on_a_gpu(options):
    flags = {name.replace("_", "-"): str(value) for name, value in options.items()}
    config = read_settings("demo", flags).config
    recipe = build_input_spec(config, make_plan(config, FACTS, GPU))
    why_not = find_resident_problem(recipe, recipe.open("valid"))
    assert can_reside(config) == (stays_unasked(torch.device("cuda"), config) and not why_not)
