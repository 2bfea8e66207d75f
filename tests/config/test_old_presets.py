"""The configurations of the applications before Phalanx: every key, and the plan it comes to.

Entries are in old_configs.yaml, the applications' rules in old_rules.py. Numbers of plans are those
of the applications' own documents and tests, where they give any.
"""

from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import pytest
from old_rules import IMAGES, NOTHING, Keys, expect, read_old_configs

from phalanx.assemble.dataset_summary import adapt_settings
from phalanx.assemble.scoring_target import plan_target, read_target, use_random_target_data
from phalanx.config.presets import iterate_old_presets
from phalanx.config.read import Settings, read_settings
from phalanx.config.schema import Config
from phalanx.errors import CheckpointError, ConfigError
from phalanx.plan.machine_choice import MachineChoice
from phalanx.plan.pipeline import count_stages, needs_splits
from phalanx.plan.plan import DatasetCounts, Plan, make_plan

pytestmark = pytest.mark.usefixtures("empty_folder")

ENTRIES = read_old_configs()
DEFAULTS = Config().flat()
IMAGENET = DatasetCounts(train_images=1_281_167, valid_images=50_000, classes=1000)
ON_A_GPU = MachineChoice(device="cuda", precision="16.16", threads=1)
NO_SPLITS = "tf1/mk2_efficientnet_b4_16ipus_base"  # it could not be trained there, either
TRAINED = [name for name in ENTRIES if name != NO_SPLITS]


def plan_whole(name: str) -> Plan:
    """The plan with the counts of the whole dataset, on a GPU that need not be here."""
    settings = read_settings(name)
    images = IMAGES[settings.config.data.data]
    counts = DatasetCounts(train_images=images, valid_images=50_000, classes=1000)
    config = adapt_settings(settings, counts).config
    chosen = replace(ON_A_GPU, precision=config.machine.precision)
    return make_plan(config, counts, chosen)


def test_every_entry_is_a_preset_and_no_other():
    assert {preset.full_name for preset in iterate_old_presets()} == set(ENTRIES)
    by_application = [name.split("/")[0] for name in ENTRIES]
    assert [by_application.count(one) for one in ("tf1", "tf2", "pl")] == [22, 18, 10]


def unset(value: Any) -> Any:
    """A value as it is compared: `none` names no split, and one micro-batch is the default."""
    return None if value in ("none", 1, "") else value


@pytest.mark.parametrize("name", ENTRIES)
def test_a_preset_has_every_value_of_its_entry(name):
    wanted = expect(name, ENTRIES[name])
    assert set(wanted) <= set(DEFAULTS), "options of ours"
    given = {option: value for option, value in wanted.items() if value is not None}
    found = read_settings(name).config.flat()
    full = {**DEFAULTS, "epochs": None, **given}
    for option, value in full.items():
        if option in ("pipeline-splits", "gradient-accumulation"):
            assert unset(found[option]) == unset(value), option
        elif isinstance(value, float):
            assert found[option] == pytest.approx(value, rel=1e-6, abs=1e-15), option
        else:
            assert found[option] == value, option


def test_a_key_without_a_counterpart_is_one_of_those_with_a_reason():
    keys = {key for entry in ENTRIES.values() for key in entry}
    assert set(NOTHING) <= keys, "none is excused that no entry has"
    assert all(NOTHING.values())
    with pytest.raises(AssertionError, match=r"nobody asked for .'new_key'"):
        expect("pl/resnet50", {**ENTRIES["pl/resnet50"], "new_key": 1})
    assert Keys({"a": 1}).left == {"a"}


LAYOUTS = {  # stages, a device each, and replicas
    "tf1/mk2_resnet8_test": (1, 1),
    "tf1/mk2_resnet50_base": (1, 1),
    "tf1/mk2_resnet50_gn_16ipus": (1, 16),
    "tf1/mk2_resnet50_gn_64ipus": (1, 64),
    "tf1/mk2_resnet50_bn_16ipus": (4, 4),
    "tf1/mk2_resnet50_bn_64ipus": (4, 16),
    "tf1/mk2_resnet50_bn_128ipus": (4, 32),
    "tf1/mk2_resnet50_mlperf_pod16": (1, 16),
    "tf1/mk2_resnet50_mlperf_pod16_bs20": (1, 16),
    "tf1/mk2_resnet50_mlperf_pod4_bs20": (1, 4),
    "tf1/mk2_resnet50_mlperf_pod64_bs20": (1, 64),
    "tf1/mk2_resnext101_16ipus": (2, 8),
    "tf1/mk2_efficientnet_b4_16ipus_base": (4, 4),
    "tf1/mk2_efficientnet_b4_g1_16ipus": (4, 4),
    "tf1/mk2_efficientnet_b4_g16_16ipus": (4, 4),
    "tf1/mk2_efficientnet_b4_g1_64ipus": (4, 16),
    "tf1/mk2_efficientnet_b4_g16_64ipus": (4, 16),
    "tf1/mk2_efficientnet_b4_g16_64ipus_LARS": (4, 16),
    "tf1/mk1_resnet50_16ipus": (4, 4),
    "tf1/resnet8_test": (1, 1),
    "tf1/resnet50_mlperf_pod16_bs20": (1, 16),
    "tf1/resnet50_mlperf_pod16_lars": (1, 16),
    "tf2/imagenet_config": (1, 1),
    "tf2/cifar10_config": (1, 1),
    "tf2/resnet8_test": (1, 1),
    "tf2/resnet8_test_lars": (1, 1),
    "tf2/resnet8_16ipus_bn": (1, 16),
    "tf2/resnet50_16ipus_16k_bn_pipeline": (4, 4),
    "tf2/resnet50_16ipus_8k_bn_pipeline": (4, 4),
    "tf2/resnet56_16ipus_8k_bn_pipeline": (4, 4),
    "tf2/resnet50_16ipus_8k_gn_pipeline": (4, 4),
    "tf2/resnet50_mlperf_bs16": (1, 16),
    "tf2/resnet50_mlperf_pod16_bs20": (1, 16),
    "tf2/resnet50_mlperf_pod4_bs20": (1, 4),
    "tf2/resnet50_mlperf_pod16_lars": (1, 16),
    **{f"tf2/resnet50_infer_{kind}": (1, 1) for kind in ("base", "bs1", "bs16", "bs32", "test")},
    "pl/resnet50": (1, 1),
    "pl/resnet50-16ipu-mk2-recompute": (1, 16),
    "pl/resnet50_mk2_pipelined": (4, 4),
    "pl/resnet50_mk2_pipelined_pod64": (4, 16),
    "pl/efficientnet-b0-g16-gn-16ipu-mk2": (2, 8),
    "pl/resnet50-16ipu-mk1": (4, 4),
    "pl/resnet50-16ipu-mk2": (1, 16),
    "pl/efficientnet-b0": (1, 1),
    "pl/efficientnet-b0-16ipu-mk1": (4, 4),
    "pl/efficientnet-b0-16ipu-mk2": (4, 4),
}


ON_ONE_DEVICE = {  # stages of these only say what is kept
    "tf1/mk2_resnet50_mlperf_pod16": 4,
    "tf1/mk2_resnet50_mlperf_pod16_bs20": 7,
    "tf1/mk2_resnet50_mlperf_pod4_bs20": 7,
    "tf1/mk2_resnet50_mlperf_pod64_bs20": 7,
    "tf1/resnet50_mlperf_pod16_bs20": 7,
    "tf1/resnet50_mlperf_pod16_lars": 7,
    "tf2/resnet50_mlperf_bs16": 4,
    "tf2/resnet50_mlperf_pod16_bs20": 7,
    "tf2/resnet50_mlperf_pod4_bs20": 7,
    "tf2/resnet50_mlperf_pod16_lars": 7,
}


@pytest.mark.parametrize("name", ENTRIES)
def test_a_preset_has_the_stages_and_replicas_of_its_table(name):
    config = read_settings(name).config
    assert (count_stages(config), config.machine.replicas) == LAYOUTS[name]
    if name == NO_SPLITS:
        assert needs_splits(config)
        return
    plan = plan_whole(name)
    stages = len(plan.pipeline.starts) + 1 if plan.pipeline else 1
    assert (stages, plan.replicas) == (ON_ONE_DEVICE.get(name, LAYOUTS[name][0]), LAYOUTS[name][1])
    recomputes = stages > 1 or "recompute" in name or name.startswith("tf1/mk2_resnet50_")
    assert (plan.recompute_patterns is not None) == recomputes
    assert config.pipeline.pipeline_schedule == (
        "Sequential" if name in ON_ONE_DEVICE else "Grouped"
    )


def test_the_entry_without_splits_says_what_it_needs():
    with pytest.raises(ConfigError, match="pipeline of 4 stages needs at least 4 micro-batches"):
        flags = {"pipeline-splits": "block2b,block4b,block6c"}
        make_plan(read_settings(NO_SPLITS, flags).config, IMAGENET, ON_A_GPU)
    flags["gradient-accumulation"] = "64"
    plan = make_plan(read_settings(NO_SPLITS, flags).config, IMAGENET, ON_A_GPU)
    assert plan.global_batch == 4 * 64 * 4


class Oracle(NamedTuple):
    """What a configuration comes to."""

    batch: tuple[int, ...]  # micro-batch, accumulation, replicas
    per_epoch: int  # whole updates
    total: int
    peak: float
    warmup: int
    rates: dict[int, float]


PL_RESNET50 = {
    **{0: 0.0, 78: 0.399901, 195: 0.998459, 390: 1.987688, 780: 1.951057},
    **{3900: 1.0, 5850: 0.292893, 7020: 0.048943},
}
BN_TF1 = {78: 0.3999018, 390: 1.987748, 6000: 0.2553962}
ORACLES = {
    "mk2_resnet50_gn_16ipus": Oracle(
        (8, 8, 16), 1251, 81_324, 0.5, 6255, {1251: 0.0999416, 6255: 0.4927371, 40_662: 0.25}
    ),
    "mk2_resnet50_bn_16ipus": Oracle((16, 256, 4), 78, 7819, 2.0, 390, BN_TF1),
    "mk2_resnet50_bn_64ipus": Oracle((16, 64, 16), 78, 7819, 2.0, 390, BN_TF1),
    "mk2_resnet50_bn_128ipus": Oracle((16, 32, 32), 78, 7819, 2.0, 390, BN_TF1),
    "mk2_resnext101_16ipus": Oracle((6, 16, 8), 1668, 200_182, 0.375, 8340, {100_091: 0.1875}),
    "mk2_efficientnet_b4_g1_16ipus": Oracle(
        (3, 64, 4), 1668, 583_865, 0.046875, 8340, {8340: 0.04410469}
    ),
    "mk2_efficientnet_b4_g16_16ipus": Oracle(
        (5, 40, 4), 1601, 560_510, 0.048828125, 8007, {8007: 0.04594238}
    ),
    "mk2_resnet50_mlperf_pod16_bs20": Oracle(
        (20, 6, 16), 667, 29_360, 3.824, 3336, {1668: 1.912, 14_680: 1.216876, 29_360: 1e-4}
    ),
    "mk2_resnet8_test": Oracle((32, 1, 1), 1562, 15_625, 0.5, 7812, {7812: 0.5, 15_624: 0.005}),
    "resnet50_16ipus_8k_bn_pipeline": Oracle((16, 128, 4), 156, 15_600, 1.0, 780, {7800: 0.5}),
    "resnet50_16ipus_16k_bn_pipeline": Oracle((16, 256, 4), 78, 7800, 2.0, 390, {0: 2 / 391}),
    "resnet50_mlperf_bs16": Oracle((16, 9, 16), 556, 24_464, 4.588, 2780, {1112: 1.83619}),
    "tf2/resnet50_mlperf_pod16_bs20": Oracle(
        (20, 6, 16), 667, 26_680, 3.8233333, 3335, {1334: 1.530021}
    ),
    "tf2/resnet50_mlperf_pod16_lars": Oracle(
        (18, 12, 16), 370, 14_060, 10.525092, 740, {370: 5.269648}
    ),
    "resnet50_mk2_pipelined": Oracle((16, 256, 4), 78, 7800, 2.0, 390, PL_RESNET50),
    "resnet50_mk2_pipelined_pod64": Oracle((16, 64, 16), 78, 7800, 2.0, 390, PL_RESNET50),
    "efficientnet-b0-g16-gn-16ipu-mk2": Oracle(
        (12, 8, 8),
        1668,
        583_800,
        0.046851,
        8340,
        {
            **{1668: 0.0093702, 8340: 0.0440821, 16_680: 0.0414769, 166_800: 0.0130356},
            583_800: 5.1634e-4,
        },
    ),
    # 0.1 x 0.98, warm-up of five of its 350 epochs of 156 updates
    "efficientnet-b0-16ipu-mk2": Oracle(
        (16, 128, 4), 156, 54_600, 0.098, 780, {0: 0.0, 390: 0.049 * 0.98}
    ),
}


@pytest.mark.parametrize("name", ORACLES)
def test_a_preset_comes_to_the_numbers_of_its_original(name):
    expected, plan = ORACLES[name], plan_whole(name)
    layout = plan.micro_batch, plan.accumulation, plan.replicas
    assert (layout, plan.global_batch) == (expected.batch, prod(expected.batch))
    assert int(plan.steps_per_epoch) == expected.per_epoch
    assert plan.total_steps == expected.total
    assert plan.schedule.peak == pytest.approx(expected.peak, rel=1e-6)
    assert plan.schedule.warmup == expected.warmup
    found = {step: plan.lr(step) for step in expected.rates}
    assert found == pytest.approx(expected.rates, rel=1e-4, abs=1e-12)


@pytest.mark.parametrize(("name", "kept"), [("g1", 0.953125), ("g16", 0.951171875)])
def test_the_mean_square_keeps_the_share_that_its_batch_gives(name, kept):
    config = read_settings(f"mk2_efficientnet_b4_{name}_16ipus").config
    assert config.optim.rmsprop_decay == kept


def test_a_rate_follows_a_batch_that_is_changed_as_it_did():
    def peak(name: str, **flags: str) -> float:
        texts = {option.replace("_", "-"): text for option, text in flags.items()}
        return make_plan(read_settings(name, texts).config, IMAGENET, ON_A_GPU).schedule.peak

    assert peak("mk2_resnet50_gn_16ipus", replicas="8") == 0.25
    assert peak("resnet50_16ipus_8k_bn_pipeline", gradient_accumulation="64") == 0.5
    assert peak("mk2_resnet50_mlperf_pod16", replicas="8") == 4.588, "was given as such"


@pytest.mark.parametrize("name", TRAINED)
def test_no_preset_has_an_option_that_changes_nothing(name):
    told = plan_whole(name).warnings
    assert not [note for note in told if "no effect" in note]


SHORTENED = [name for name in ENTRIES if "_infer_" in name]  # a warm-up of five epochs in one


@pytest.mark.parametrize("name", TRAINED)
def test_a_preset_fits_its_own_length_but_for_those_that_do_not_train(name):
    settings = read_settings(name)
    counts = DatasetCounts(
        train_images=IMAGES[settings.config.data.data], valid_images=1000, classes=10
    )
    assert (adapt_settings(settings, counts).notes != ()) == (name in SHORTENED)


# --- scoring and serving ---


@pytest.mark.parametrize(
    ("kind", "images"), [("base", 1), ("bs1", 1), ("bs16", 16), ("bs32", 32), ("test", 1)]
)
def test_a_preset_for_inference_is_scored_in_its_own_batches(kind, images):
    found = read_target(f"resnet50_infer_{kind}", {})
    assert isinstance(found, Settings)
    made_up = use_random_target_data(found, "synthetic")
    plan = plan_target(made_up)
    assert (plan.valid_batch, plan.num_classes, plan.layout.stages) == (images, 1000, 1)
    config = found.config
    assert (config.model.model, config.machine.precision, config.machine.half_type) == (
        "resnet50",
        "16.16",
        "float16",
    )
    more = read_target(f"tf2/resnet50_infer_{kind}", {"valid-batch-size": "8"})
    assert plan_target(use_random_target_data(more, "synthetic")).valid_batch == 8


def test_a_misspelt_target_is_answered_by_an_old_name():
    with pytest.raises(CheckpointError, match="did you mean 'resnet50_infer_bs16'"):
        read_target("resnet50_infer_b16", {})
