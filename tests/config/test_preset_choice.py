"""Which preset a model gets on a dataset, and in which spellings names and lists are understood."""

import pytest

from phalanx.catalog.datasets import DATASETS
from phalanx.catalog.models import MODELS
from phalanx.config.read import read_settings
from phalanx.errors import ConfigError
from phalanx.plan.machine_choice import MachineChoice
from phalanx.plan.plan import DatasetCounts, make_plan

pytestmark = pytest.mark.usefixtures("empty_folder")

COUNTS = DatasetCounts(train_images=1_281_167, valid_images=50_000, classes=1000)
ON_THE_CPU = MachineChoice(device="cpu", precision="32.32", threads=1)
PHOTOGRAPHS = ("folder", "tfrecord", "tar", "parquet", "packed")
# one of each family and of each kind within it
FAMILIES = ("resnet50", "resnet18", "resnext50_32x4d", "efficientnet_b0", "efficientnet_lite2",
            "resnet8", "resnet9", "airbench94", "efficientnet_cifar")  # fmt: skip
DEFAULTS = {
    "embedded": "demo",
    "mnist": "mnist-resnet8",
    "fashion-mnist": "fashion-mnist-resnet20",
    "cifar10": "cifar10-resnet20",
    "cifar100": "cifar100-resnet20",
    "generated": "generated-resnet50",
    "synthetic": "synthetic-resnet50",
    **dict.fromkeys(PHOTOGRAPHS, "folder-resnet18"),
    "imagenet": "imagenet-resnet50",
}
OTHERS = {
    ("cifar10", "resnet9"): "cifar10-fast",
    ("cifar10", "airbench94"): "cifar10-94",
    ("imagenet", "resnext50_32x4d"): "imagenet-resnext101",
    ("imagenet", "efficientnet_b0"): "imagenet-efficientnet-b0",
    ("imagenet", "efficientnet_lite2"): "imagenet-efficientnet-b0",
    # made for small images
    ("imagenet", "resnet8"): "folder-resnet18",
    ("imagenet", "resnet9"): "folder-resnet18",
    ("imagenet", "airbench94"): "folder-resnet18",
    ("imagenet", "efficientnet_cifar"): "folder-resnet18",
}


@pytest.mark.parametrize("data", DATASETS)
def test_a_family_gets_its_own_preset_of_a_dataset(data):
    for model in FAMILIES:
        settings = read_settings(None, {"data": data, "model": model})
        assert settings.name == OTHERS.get((data, model), DEFAULTS[data])
        assert (settings.config.data.data, settings.config.model.model) == (data, model)


@pytest.mark.parametrize("data", ["imagenet", "cifar10", "folder"])
def test_every_model_is_planned_on_every_dataset(data):
    for model in MODELS:
        config = read_settings(None, {"data": data, "model": model}).config
        plan = make_plan(config, COUNTS, ON_THE_CPU)
        own = MODELS[config.model.model].image_size
        assert plan.image_size == (own if DATASETS[data].any_size else DATASETS[data].image_size)


SIZES = {0: 224, 1: 240, 2: 260, 3: 300, 4: 380, 5: 456, 6: 528, 7: 600}


@pytest.mark.parametrize(("number", "size"), SIZES.items())
def test_efficientnets_have_their_sizes_and_presets(number, size):
    settings = read_settings(None, {"data": "imagenet", "model": f"efficientnet-b{number}"})
    assert settings.name.startswith("imagenet-efficientnet-b")
    assert make_plan(settings.config, COUNTS, ON_THE_CPU).image_size == size
    assert settings.config.train.epochs == 350


def test_resnext101_is_the_one_of_the_presets():
    settings = read_settings(None, {"data": "imagenet", "model": "resnext101"})
    assert (settings.name, settings.config.model.model) == (
        "imagenet-resnext101",
        "resnext101_32x4d",
    )


@pytest.mark.parametrize(
    ("data", "model"),
    [("cifar10", "resnet14_small"), ("embedded", "resnet14_small"), ("imagenet", "resnet14")],
)
def test_resnet14_is_the_small_one_where_images_are(data, model):
    settings = read_settings(None, {"data": data, "model": "ResNet14"})
    assert settings.config.model.model == model
    small = f"--model ResNet14 is {model} here: {data} has small images"
    assert settings.notes == (() if data == "imagenet" else (small,))


def test_a_model_that_does_not_exist_is_refused_with_the_rest():
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*no model is called 'resnet51'"):
        read_settings(None, {"data": "imagenet", "model": "resnet51", "lr": "x"})


# --- weights to finetune ---


def test_a_preset_may_require_an_option(tmp_path):
    assert read_settings("finetune-resnet50").missing == (
        "finetune-resnet50: finetunes weights, and none are named; give --init-weights FILE, or "
        "choose a preset that starts from random weights"
    )
    assert read_settings("finetune-resnet50", {"init-weights": "w.pth"}).missing == ""
    (tmp_path / "mine.yaml").write_text("extends: finetune-resnet50\nlr: 0.1\n")
    assert read_settings("mine.yaml").missing.startswith("mine: finetunes weights")
    (tmp_path / "mine.yaml").write_text("requires: val-split\n")
    assert read_settings("mine.yaml").missing == "mine: needs --val-split"
    (tmp_path / "mine.yaml").write_text("requires: val-spilt\n")
    with pytest.raises(
        ConfigError, match=r"requires: no option is called 'val-spilt'; .*val-split"
    ):
        read_settings("mine.yaml")


# --- spellings ---


@pytest.mark.parametrize(
    ("option", "given", "meant"),
    [
        ("optimizer", "RMSProp", "rmsprop"),
        ("optimizer", "RMSProp_TF", "rmsprop_tf"),
        ("lr-schedule", "Cosine", "cosine"),
        ("norm-type", "GROUP", "group"),
        ("shortcut-type", "b", "B"),
        ("data", "CIFAR10", "cifar10"),
        ("model", "ResNet20", "resnet20"),
        ("device", "CPU", "cpu"),
        ("half-type", "BFloat16", "bfloat16"),
    ],
)
def test_choices_are_understood_in_any_case(option, given, meant, tmp_path):
    assert read_settings("demo", {option: given}).config.flat()[option] == meant
    (tmp_path / "mine.yaml").write_text(f"{option}: {given}\n")
    assert read_settings("mine.yaml").config.flat()[option] == meant


@pytest.mark.parametrize(
    ("option", "given", "meant"),
    [
        ("lr-epoch-decay", "2 5 7", "2,5,7"),
        ("lr-epoch-decay", "30 % 60 %", "30%,60%"),
        ("lr-epoch-decay", "30 ep", "30 ep"),
        ("lr-epoch-decay", "2, 5", "2, 5"),
        ("adam-betas", "0.8 0.9", "0.8,0.9"),
        ("recompute-checkpoints", "conv1 layer1", "conv1,layer1"),
    ],
)
def test_a_list_takes_spaces_and_one_with_commas_stays_as_it_is(option, given, meant, tmp_path):
    assert read_settings("demo", {option: given}).config.flat()[option] == meant
    (tmp_path / "mine.yaml").write_text(f"{option}: {given}\n")
    assert read_settings("mine.yaml").config.flat()[option] == meant
