"""The published recipes: every number of their plans, worked out by hand.

Sources, by section of the facts about the five applications: the entries are in 3.1 and 3.2 (TF1),
3.3 (TF2), 3.4 to 3.7 (PL) and 1.4 (PopART); formulae of rates in 1.1 (PL), 1.2 (TF2), 1.3 (TF1)
and 1.4; rates that were checked there in 8; scores in 9.
"""

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import NamedTuple

import pytest

from phalanx.cli.main import main
from phalanx.config.presets import builtin_preset_folder
from phalanx.config.read import read_settings
from phalanx.config.schema import Config
from phalanx.errors import ConfigError
from phalanx.plan.machine_choice import MachineChoice
from phalanx.plan.pipeline import count_stages
from phalanx.plan.plan import DatasetCounts, Plan, make_plan

pytestmark = pytest.mark.usefixtures("empty_folder")

APPLICATIONS = ("pl", "tf1", "tf2", "pa")
IMAGENET = DatasetCounts(train_images=1_281_167, valid_images=50_000, classes=1000)
CIFAR10 = DatasetCounts(train_images=50_000, valid_images=10_000, classes=10)
ON_THE_CPU = MachineChoice(device="cpu", precision="32.32", threads=1)
DATA = {"cifar10": CIFAR10, "imagenet": IMAGENET}
PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"


class Expected(NamedTuple):
    """What a recipe comes to."""

    there: tuple[int, ...]  # micro-batch, accumulation and replicas of the original
    epochs: int
    steps: int
    peak: float
    warmup: int
    rates: dict[int, float]  # by step


# TF1 counts floor(images x epochs / batch) steps and floor(steps x warm-up / epochs) of warm-up.
# In PL and TF2 the tail of an epoch was left out: floor(images / batch) steps an epoch. The rates
# of PL are those of its tests, at whole epochs.
PL_RESNET50 = {
    **{0: 0.0, 78: 0.399901, 195: 0.998459, 390: 1.987688, 780: 1.951057},
    **{3900: 1.0, 5850: 0.292893, 7020: 0.048943},
}
RECIPES = {
    "tf1-resnet50-gn": Expected(
        (8, 8, 16), 65, 81_324, 0.5, 6255, {1251: 0.0999416, 6255: 0.4927371, 40_662: 0.25}
    ),
    "tf1-resnet50-bn": Expected(
        (16, 256, 4), 100, 7819, 2.0, 390, {78: 0.3999018, 390: 1.987748, 6000: 0.2553962}
    ),
    "tf1-resnet50-mlperf-1920": Expected(
        (20, 6, 16), 44, 29_360, 3.824, 3336, {1668: 1.912, 14_680: 1.216876, 29_360: 1e-4}
    ),
    "tf1-resnet50-mlperf-2304": Expected(
        (16, 9, 16), 44, 24_466, 4.588, 2780, {1390: 2.294, 13_623: 1.147075, 24_466: 1e-4}
    ),
    "tf1-resnet50-mlperf-2560": Expected(
        (20, 2, 64), 45, 22_520, 5.098, 2502, {1251: 2.549, 12_511: 1.274575, 22_520: 1e-4}
    ),
    "tf1-resnet50-lars": Expected(
        (22, 10, 16), 38, 13_830, 10.72, 727, {100: 1.474553, 7000: 2.912766, 13_830: 1e-4}
    ),
    "tf1-resnext101": Expected(
        (6, 16, 8), 120, 200_182, 0.375, 8340, {1668: 0.07498715, 8340: 0.3733963, 100_091: 0.1875}
    ),
    "tf1-efficientnet-b4-g1": Expected(
        (3, 64, 4),
        350,
        583_865,
        0.046875,
        8340,
        {1000: 0.005620504, 8340: 0.04410469, 400_000: 0.002229024},
    ),
    "tf1-efficientnet-b4-g16": Expected(
        (5, 40, 4),
        350,
        560_510,
        0.048828125,
        8007,
        {1000: 0.00609818, 8007: 0.04594238, 400_000: 0.002055561},
    ),
    "tf1-efficientnet-b4-lars-gn": Expected(
        (3, 256, 8),
        350,
        72_983,
        8.485281,
        14_596,
        {7298: 4.242641, 43_789: 2.121457, 72_983: 8.48528e-5},
    ),
    "tf1-efficientnet-b4-lars-bn": Expected(
        (6, 64, 16), 350, 72_983, 6.0, 14_596, {7298: 3.0, 43_789: 1.500096, 72_983: 6e-5}
    ),
    "tf1-resnet8": Expected(
        (32, 1, 1), 10, 15_625, 0.5, 7812, {3906: 0.25, 7812: 0.5, 11_719: 0.005}
    ),
    "tf2-resnet50-8k-bn": Expected(
        (16, 128, 4), 100, 15_600, 1.0, 780, {0: 1 / 781, 312: 0.4003728, 7800: 0.5}
    ),
    "tf2-resnet50-8k-gn": Expected(
        (16, 128, 4), 100, 15_600, 1.0, 780, {0: 1 / 781, 312: 0.4003728, 7800: 0.5}
    ),
    "tf2-resnet50-16k-bn": Expected(
        (16, 256, 4), 100, 7800, 2.0, 390, {0: 2 / 391, 780: 1.986361, 3900: 1.082579}
    ),
    "tf2-resnet50-mlperf-1920": Expected(
        (20, 6, 16),
        40,
        26_680,
        3.8233333,
        3335,
        {0: 0.001146083, 1334: 1.530021, 26_013: 0.06292441},
    ),
    "tf2-resnet50-mlperf-2304": Expected(
        (16, 9, 16),
        44,
        24_464,
        4.588,
        2780,
        {0: 0.001649766, 1112: 1.83619, 21_684: 0.07550929},
    ),
    "tf2-resnet50-lars": Expected(
        (18, 12, 16), 38, 14_060, 10.525092, 740, {0: 0.0142039, 370: 5.269648, 7400: 2.631347}
    ),
    "tf2-resnet8-sgd": Expected((8, 1, 1), 1, 6250, 8e-4, 0, {0: 8e-4, 3000: 8e-4, 6249: 8e-4}),
    "tf2-resnet8-lars": Expected(
        (8, 1, 1), 50, 312_500, 1e-3, 0, {0: 1e-3, 9999: 1e-3, 312_499: 1e-3}
    ),
    "tf2-resnet8-2000": Expected(
        (25, 5, 16), 70, 1750, 0.244140625, 125, {0: 0.001937624, 125: 0.2441406, 800: 0.1541391}
    ),
    "pl-resnet50-bn": Expected((18, 57, 16), 100, 7800, 2.0, 390, PL_RESNET50),
    "pl-resnet50-pipelined": Expected((16, 256, 4), 100, 7800, 2.0, 390, PL_RESNET50),
    "pl-resnet50-gn": Expected(
        (8, 8, 16),
        100,
        125_100,
        0.3125,
        20_016,
        {10_008: 0.1537956, 20_016: 0.2931729, 62_550: 0.15625},
    ),
    "pl-efficientnet-b0-768": Expected(
        (12, 8, 8),
        350,
        583_800,
        0.046851,
        8340,
        {
            1668: 0.0093702,
            8340: 0.0440821,
            16_680: 0.0414769,
            166_800: 0.0130356,
            583_800: 5.1634e-4,
        },
    ),
    "pl-efficientnet-b0-800": Expected(
        (20, 5, 8), 350, 560_350, 0.0485, 8005, {0: 0.0, 16_010: 0.0429367, 160_100: 0.01349441}
    ),
    "pl-efficientnet-b4-g16": Expected(
        (4, 64, 8), 350, 218_750, 0.097, 3125, {0: 0.0, 6250: 0.0858735, 62_500: 0.02698882}
    ),
    "pl-efficientnet-b4-g1": Expected(
        (4, 48, 4), 350, 583_800, 0.046851, 8340, {0: 0.0, 16_680: 0.0414769, 166_800: 0.0130356}
    ),
    "pa-resnet20": Expected(
        (32, 1, 1), 30, 46_875, 0.5, 0, {0: 0.5, 23_437: 0.5, 23_438: 0.05, 35_157: 0.005}
    ),
}


class Update(NamedTuple):
    """How weights are changed, as the entries say it."""

    optimizer: str
    momentum: float
    l2: float  # PL's and TF1's weight decay is added to the gradient, too
    smoothing: float
    over: str  # TF1 spreads over the wrong classes, the others over all
    scale: float
    precision: str


UPDATES = {
    "tf1-resnet50-gn": Update("momentum", 0.9, 1e-4, 0.1, "others", 128, "16.16"),
    "tf1-resnet50-bn": Update("momentum", 0.9, 1e-4, 0.1, "others", 128, "16.32"),
    "tf1-resnet50-mlperf-1920": Update("momentum", 0.9, 2.5e-5, 0.1, "others", 128, "16.16"),
    "tf1-resnet50-mlperf-2304": Update("momentum", 0.9, 2.5e-5, 0.1, "others", 128, "16.16"),
    "tf1-resnet50-mlperf-2560": Update("momentum", 0.9, 2.5e-5, 0.1, "others", 128, "16.16"),
    "tf1-resnet50-lars": Update("lars", 0.9, 5e-5, 0.1, "others", 128, "16.16"),
    "tf1-resnext101": Update("momentum", 0.9, 1e-4, 0.1, "others", 128, "16.16"),
    "tf1-efficientnet-b4-g1": Update("rmsprop_tf", 0.9, 1e-5, 0.1, "others", 128, "16.32"),
    "tf1-efficientnet-b4-g16": Update("rmsprop_tf", 0.9, 1e-5, 0.1, "others", 128, "16.32"),
    "tf1-efficientnet-b4-lars-gn": Update("lars", 0.885, 0, 0.1, "others", 128, "16.16"),
    "tf1-efficientnet-b4-lars-bn": Update("lars", 0.885, 0, 0.1, "others", 128, "16.16"),
    "tf1-resnet8": Update("sgd", 0, 1e-6, 0, "all", 128, "16.16"),
    "tf2-resnet50-8k-bn": Update("momentum", 0.9, 1e-4, 0, "all", 128, "16.16"),
    "tf2-resnet50-8k-gn": Update("momentum", 0.9, 1e-4, 0, "all", 128, "16.16"),
    "tf2-resnet50-16k-bn": Update("momentum", 0.9, 1e-4, 0, "all", 128, "16.32"),
    "tf2-resnet50-mlperf-1920": Update("momentum", 0.9, 2.5e-5, 0.1, "all", 128, "16.16"),
    "tf2-resnet50-mlperf-2304": Update("momentum", 0.9, 2.5e-5, 0.1, "all", 128, "16.16"),
    "tf2-resnet50-lars": Update("lars", 0.9, 5e-5, 0.1, "all", 128, "16.16"),
    "tf2-resnet8-sgd": Update("sgd", 0, 0, 0, "all", 1, "16.16"),
    "tf2-resnet8-lars": Update("lars", 0.9, 1e-5, 0, "all", 1, "32.32"),
    "tf2-resnet8-2000": Update("sgd", 0, 1e-4, 0, "all", 1, "16.16"),
    "pl-resnet50-bn": Update("sgd_combined", 0.9, 1e-4, 0.1, "all", 128, "16.16"),
    "pl-resnet50-pipelined": Update("sgd_combined", 0.9, 1e-4, 0.1, "all", 128, "16.32"),
    "pl-resnet50-gn": Update("sgd_combined", 0.85, 1e-4, 0.1, "all", 512, "16.16"),
    "pl-efficientnet-b0-768": Update("rmsprop_tf", 0.9, 1e-5, 0.1, "all", 128, "16.32"),
    "pl-efficientnet-b0-800": Update("rmsprop_tf", 0.9, 1e-5, 0.1, "all", 128, "16.16"),
    "pl-efficientnet-b4-g16": Update("rmsprop_tf", 0.9, 1e-5, 0.1, "all", 128, "16.16"),
    "pl-efficientnet-b4-g1": Update("rmsprop_tf", 0.9, 1e-5, 0.1, "all", 128, "16.16"),
    "pa-resnet20": Update("sgd", 0, 0, 0, "all", 1, "16.16"),
}


def plan_whole(config: Config) -> Plan:
    """The plan with the counts of the whole dataset, which need not be here."""
    return make_plan(config, DATA[config.data.data], ON_THE_CPU)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_comes_to_the_numbers_of_its_original(name):
    expected = RECIPES[name]
    plan = plan_whole(read_settings(name).config)
    assert plan.global_batch == prod(expected.there)
    assert plan.total_steps == expected.steps
    assert plan.schedule.peak == pytest.approx(expected.peak, rel=1e-6)
    assert plan.schedule.warmup == expected.warmup
    found = {step: plan.lr(step) for step in expected.rates}
    # a fall of 583,865 steps in TF1, where 350 epochs are 583,865.2, is the furthest away
    assert found == pytest.approx(expected.rates, rel=1e-4, abs=1e-12)


THEIR_STEPS: dict[str, Callable[[int, int, int], int]] = {  # images, epochs, global batch
    "tf1": lambda images, epochs, batch: images * epochs // batch,
    "tf2": lambda images, epochs, batch: images // batch * epochs,
    "pl": lambda images, epochs, batch: images // batch * epochs,  # drop_last
    "pa": lambda images, epochs, batch: images * epochs // batch,  # not told
}
OTHER_STEPS = {"pl-efficientnet-b4-g16": 4 * (1_281_167 // (4 * 2048)) * 350}  # device_iterations=4


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_as_long_as_its_original_and_says_so_in_epochs(name):
    expected, config = RECIPES[name], read_settings(name).config
    assert (config.train.epochs, config.train.steps) == (expected.epochs, None)
    images, batch = DATA[config.data.data].train_images, prod(expected.there)
    theirs = THEIR_STEPS[name.split("-")[0]](images, expected.epochs, batch)
    assert plan_whole(config).total_steps == theirs
    if name in OTHER_STEPS:
        text = (builtin_preset_folder() / f"{name}.yaml").read_text(encoding="utf-8")
        assert OTHER_STEPS[name] == 624 * 350 and "625 steps, there 624" in text


@pytest.mark.parametrize("name", UPDATES)
def test_a_recipe_updates_weights_as_its_original(name):
    config = read_settings(name).config
    optim, loss = config.optim, config.loss
    assert optim.weight_decay == 0, "the originals decay inside the gradient"
    found = Update(
        optim.optimizer,
        optim.momentum,
        optim.l2_regularization,
        loss.label_smoothing,
        loss.smoothing_over,
        loss.loss_scaling,
        config.machine.precision,
    )
    assert found == UPDATES[name]


SPANS = {  # sections 3.1 to 3.3: BN_span, and in TF2 dbn-replica-group-size
    "tf1-resnet50-mlperf-1920": 2,
    "tf1-resnet50-mlperf-2304": 2,
    "tf1-resnet50-mlperf-2560": 2,
    "tf1-resnet50-lars": 2,
    "tf1-efficientnet-b4-lars-bn": 8,
    "tf2-resnet50-mlperf-1920": 2,
    "tf2-resnet50-mlperf-2304": 2,
    "tf2-resnet50-lars": 2,
}


SEVEN_STAGES = ("layer1/1", "layer2/0", "layer2/1", "layer2/3", "layer3/1", "layer3/4")
FOUR_STAGES = ("layer2/0", "layer3/0", "layer3/4")
STARTS = {  # pipeline_splits of the entries: the first unit of every stage but the first
    "tf1-resnet50-bn": FOUR_STAGES,
    "tf1-resnet50-mlperf-1920": SEVEN_STAGES,
    "tf1-resnet50-mlperf-2304": ("layer1/1", "layer2/0", "layer3/0"),
    "tf1-resnet50-mlperf-2560": SEVEN_STAGES,
    "tf1-resnet50-lars": SEVEN_STAGES,
    "tf1-resnext101": ("layer3/4",),
    "tf1-efficientnet-b4-g1": ("blocks/1/1", "blocks/3/1", "blocks/5/2"),
    "tf1-efficientnet-b4-g16": ("blocks/1/2", "blocks/3/2", "blocks/5/0"),
    "tf1-efficientnet-b4-lars-gn": ("blocks/3/0",),
    "tf1-efficientnet-b4-lars-bn": tuple(
        f"blocks/{stage}/{block}"
        for stage, blocks in enumerate([(0, 1, 2, 3), (0, 2), (0, 2), (0, 3), (0, 4)], start=1)
        for block in blocks
    ),
    "tf2-resnet50-8k-bn": ("layer1/2", "layer2/1", "layer3/2"),
    "tf2-resnet50-8k-gn": ("layer1/2", "layer2/1", "layer3/2"),
    "tf2-resnet50-16k-bn": ("layer1/2", "layer2/1", "layer3/2"),
    "tf2-resnet50-mlperf-1920": SEVEN_STAGES,
    "tf2-resnet50-mlperf-2304": ("layer1/1", "layer2/0", "layer3/0"),
    "tf2-resnet50-lars": SEVEN_STAGES,
    "pl-resnet50-pipelined": ("layer1/2", "layer2/3", "layer3/4"),
    "pl-efficientnet-b0-768": ("blocks/2/1",),
    "pl-efficientnet-b0-800": ("blocks/3/0",),
    "pl-efficientnet-b4-g16": ("blocks/3/1",),
    "pl-efficientnet-b4-g1": ("blocks/1/1", "blocks/3/0", "blocks/4/5"),
}
# shards=1 or device-mapping=[0, ...] with Sequential: stages only say what is kept
ON_ONE_DEVICE = [name for name in STARTS if name in SPANS]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_stages_of_its_original(name):
    config = read_settings(name).config
    plan = plan_whole(config)
    assert config.machine.enable_recompute == (name in STARTS)
    if name not in STARTS:
        assert plan.pipeline is None
        return
    assert plan.pipeline is not None and plan.pipeline.starts == STARTS[name]
    wanted = ("Sequential", 1) if name in ON_ONE_DEVICE else ("Grouped", len(STARTS[name]) + 1)
    assert (plan.pipeline.schedule, count_stages(config)) == wanted


@pytest.mark.parametrize("name", ["tf1-resnet50-bn", "tf1-resnet50-mlperf-1920"])
def test_a_flag_leaves_the_model_of_a_recipe_whole(name):
    plan = plan_whole(read_settings(name, {"pipeline-splits": "none"}).config)
    assert plan.pipeline is None
    assert plan.recompute_patterns == (), "its recomputation is another option"


@pytest.mark.parametrize(
    "flags", [{"model": "resnet18"}, {"gradient-accumulation": "1"}], ids=["model", "accumulation"]
)
def test_who_changes_what_the_stages_need_is_told_of_the_way_out(flags):
    with pytest.raises(ConfigError, match="--pipeline-splits none"):
        plan_whole(read_settings("tf1-resnet50-bn", flags).config)
    plan_whole(read_settings("tf1-resnet50-bn", {**flags, "pipeline-splits": "none"}).config)


@pytest.mark.parametrize("name", STARTS)
def test_nobody_is_told_where_the_stages_of_a_preset_begin(name):
    settings = read_settings(name)
    plan = make_plan(settings.config, IMAGENET, ON_THE_CPU, user_options=settings.user_options)
    assert not [line for line in plan.warnings if "pipeline-splits" in line]


@pytest.mark.parametrize("name", RECIPES)
def test_batch_norm_has_the_layout_of_its_original(name):
    config = read_settings(name).config
    plan = plan_whole(config)
    assert plan.layout.bn_span == SPANS.get(name, 1)
    found = plan.micro_batch, plan.accumulation, plan.replicas
    if config.model.norm_type == "batch":
        assert found == RECIPES[name].there
    else:
        assert plan.replicas == 1, "no number depends on it"


@pytest.mark.parametrize(
    ("name", "kept", "width", "mixup", "boxes"),
    [  # kept: the share of the mean square
        ("tf1-efficientnet-b4-g1", 0.953125, (1, 6), 0.2, (0.85, 0, 0, 0)),
        ("tf1-efficientnet-b4-g16", 0.951171875, (16, 4), 0.2, (0.85, 0, 0, 0)),
        ("pl-efficientnet-b0-768", 0.953125, (16, 4), 0, (1, 0, 0, 0)),
        ("pl-efficientnet-b0-800", 0.953125, (16, 4), 0.1, (1, 0, 0, 0)),
        ("pl-efficientnet-b4-g16", 0.953125, (16, 4), 0.2, (1, 0.65, 1, 0.35)),
        ("pl-efficientnet-b4-g1", 0.953125, (1, 6), 0.2, (1, 0.65, 1, 0.35)),
    ],
)
def test_an_efficientnet_is_built_and_mixes_images_as_its_original(name, kept, width, mixup, boxes):
    config = read_settings(name).config
    net, mixed = config.efficientnet, config.augment
    assert (config.optim.rmsprop_decay, config.optim.optimizer_eps) == (kept, 1e-3)
    assert (net.efficientnet_group_dim, net.efficientnet_expand_ratio) == width
    assert (config.model.norm_type, config.model.norm_num_groups) == ("group", 4)
    assert mixed.mixup_alpha == mixup
    low, high = mixed.cutmix_lambda_low, mixed.cutmix_lambda_high
    assert (mixed.cutmix_lambda, low, high, mixed.cutmix_disable_prob) == boxes


@pytest.mark.parametrize(
    ("name", "decay"),
    [
        ("tf1-resnet50-lars", 5e-5),
        ("tf1-efficientnet-b4-lars-gn", 2.5e-6),
        ("tf1-efficientnet-b4-lars-bn", 2.5e-6),
        ("tf2-resnet50-lars", 5e-5),
        ("tf2-resnet8-lars", 2.5e-6),
    ],
)
def test_lars_has_the_decay_and_the_share_of_its_original(name, decay):
    optim = read_settings(name).config.optim
    assert (optim.trust_decay, optim.trust_coefficient) == (decay, 0.001)


def test_the_loss_scale_doubles_every_25_epochs():
    plan = plan_whole(read_settings("pl-resnet50-gn").config)  # 100 // 4 stages
    at = [
        plan.loss_scale.at(int(epoch * float(plan.steps_per_epoch)))
        for epoch in (24.5, 26, 49, 51, 76)
    ]
    assert at == [64, 128, 128, 256, 512]


def test_every_preset_of_an_application_is_in_the_tables_and_on_the_page():
    stems = {path.stem for path in builtin_preset_folder().glob("*.yaml")}
    ours = {stem for stem in stems if stem.split("-")[0] in APPLICATIONS}
    rows = [line.split("`")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert ours == set(RECIPES) == set(UPDATES) == set(rows)
    assert len(rows) == len(ours) >= 12


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_where_it_comes_from_and_what_it_scored(name):
    text = (builtin_preset_folder() / f"{name}.yaml").read_text(encoding="utf-8")
    head = " ".join(line[2:] for line in text.splitlines() if line.startswith("#"))
    assert f"phalanx train {name} --data-dir DIR" in head
    assert "from: " in head and "layout there" in head
    assert "published: " in head or "score was published" in head


@pytest.mark.parametrize("name", RECIPES)
def test_the_plan_of_a_recipe_needs_no_data(name, capsys):
    expected = RECIPES[name]
    steps = ",".join(map(str, expected.rates))
    assert main(["plan", name, "--json", "--no-memory", "--device", "cpu", "--at", steps]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["counts"] == "published"
    assert (told["plan"]["total_steps"], told["plan"]["epochs"]) == (
        expected.steps,
        pytest.approx(expected.epochs, rel=1e-3),
    )
    rates = {point["step"]: point["lr"] for point in told["at"]}
    assert rates == pytest.approx(expected.rates, rel=1e-4, abs=1e-12)
