"""The network a config asks for: each option in its place, and what cannot be built refused."""

from dataclasses import asdict
from pathlib import Path

import pytest

from phalanx.catalog.models import MODELS, OLD_NAMES
from phalanx.catalog.variant import Variant
from phalanx.config.read import fill_older_options, read_settings, read_stored_settings
from phalanx.errors import ConfigError
from phalanx.plan.machine_choice import MachineChoice
from phalanx.plan.model import build_variant, check_variant
from phalanx.plan.plan import DatasetCounts, make_plan

CPU = MachineChoice(device="cpu", precision="32.32", threads=1)
FACTS = DatasetCounts(train_images=8000, valid_images=1500, classes=10)


def asked(*, preset: str | None = None, **options: object) -> Variant:
    """The variant of a command line."""
    return build_variant(settings(preset, options).config)


def settings(preset: str | None, options: dict[str, object]):
    flags = {name.replace("_", "-"): str(value) for name, value in options.items()}
    return read_settings(preset, flags)


def plan_for(**options: object):
    return make_plan(settings(None, options).config, FACTS, CPU)


def refused(**options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        plan_for(**options)
    return str(caught.value)


# --- options ---


@pytest.mark.parametrize("name", MODELS)
def test_without_options_a_model_is_its_row(name):
    assert asked(preset="generated-resnet50", model=name) == MODELS[name]


CHANGES = {  # model, flags, and what becomes of the row
    "norm-type": ("resnet8", {"norm_type": "none"}, {"norm.type": "none"}),
    "norm-num-groups": ("resnet8", {"norm_num_groups": 4}, {"norm.groups": 4}),
    "batchnorm-momentum": ("resnet8", {"batchnorm_momentum": 0.3}, {"norm.momentum": 0.3}),
    "norm-eps": ("resnet8", {"norm_eps": 0.001}, {"norm.eps": 0.001}),
    "full-precision-norm": (
        "resnet8",
        {"full_precision_norm": True},
        {"norm.full_precision": True},
    ),
    "disable-stable-batchnorm": (
        "resnet8",
        {"disable_stable_batchnorm": True},
        {"norm.stable": False},
    ),
    "enable-fast-groupnorm": (
        "resnet8",
        {"enable_fast_groupnorm": True},
        {"norm.interleaved": True},
    ),
    "padding": ("resnet9", {"padding": "same"}, {"padding": "same"}),
    "drop-path": ("efficientnet_b0", {"drop_path": 0.4}, {"drop_path": 0.4}),
    "no drop-path": ("efficientnet_b0", {"drop_path": 0}, {"drop_path": 0.0}),
    "drop-connect": ("resnet18", {"drop_connect": 0.4}, {"drop_path": 0.4}),
    "dropout-rate": ("resnet18", {"dropout_rate": 0.1}, {"dropout": 0.1}),
    "no dropout": ("efficientnet_b0", {"dropout_rate": 0}, {"dropout": 0.0}),
    "stride-in": ("resnet50", {"stride_in": "1x1"}, {"stride_in": "1x1"}),
    "shortcut-type": ("resnet8", {"shortcut_type": "C"}, {"shortcut": "C"}),
    "stage1-projection": ("resnet18", {"stage1_projection": True}, {"project_first": True}),
    "efficientnet-group-dim": (
        "efficientnet_b0",
        {"efficientnet_group_dim": 16},
        {"group_dim": 16},
    ),
    "efficientnet-expand-ratio": (
        "efficientnet_b0",
        {"efficientnet_expand_ratio": 4},
        {"expand_ratio": 4},
    ),
}


@pytest.mark.parametrize("option", CHANGES)
def test_each_option_changes_its_part_of_the_row_and_nothing_else(option):
    model, flags, expected = CHANGES[option]
    row, inside = asdict(MODELS[model]), asdict(MODELS[model].norm)
    for place, value in expected.items():
        part, _, leaf = place.rpartition(".")
        (inside if part else row)[leaf] = value
    row["norm"] = inside
    found = asked(preset="generated-resnet50", model=model, **flags)
    assert asdict(found) == row
    assert found != MODELS[model] and type(found) is type(MODELS[model])


# --- one family's options with another's models ---

FAMILIES = [
    (
        "efficientnet_b0",
        {"zero_init_residual": True},
        "only ResNet models have it, and efficientnet_b0",
    ),
    ("efficientnet-b0", {"stride_in": "1x1"}, "only ResNet models have it, and efficientnet_b0"),
    ("efficientnet_b0", {"shortcut_type": "A"}, "only ResNet models have it, and efficientnet_b0"),
    ("resnet9", {"stage1_projection": True}, "only ResNet models have it, and resnet9"),
    ("resnet18", {"efficientnet_group_dim": 16}, "only EfficientNet models have it, and resnet18"),
    ("resnet9", {"efficientnet_expand_ratio": 4}, "only EfficientNet models have it, and resnet9"),
]


@pytest.mark.parametrize(("model", "flags", "said"), FAMILIES)
def test_a_flag_for_another_family_is_refused(model, flags, said):
    flag = next(iter(flags)).replace("_", "-")
    assert refused(model=model, **flags) == f"--{flag}: {said} is not one; leave it out"


def test_a_flag_that_says_nothing_new_is_no_mistake():
    assert asked(model="efficientnet_b0", stride_in="3x3") == MODELS["efficientnet_b0"]


@pytest.fixture
def presets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "presets"
    folder.mkdir()
    (folder / "lower.yaml").write_text("# x\nmodel: resnet50\nzero-init-residual: true\n")
    (folder / "upper.yaml").write_text("# x\nextends: lower\nmodel: efficientnet_b0\n")
    (folder / "deeper.yaml").write_text("# x\nextends: lower\nmodel: resnet101\n")
    (folder / "grouped.yaml").write_text(
        "# x\nmodel: efficientnet_b0\nefficientnet-group-dim: 16\n"
    )
    (folder / "mixed.yaml").write_text("# x\nmodel: efficientnet_b0\nstride-in: 1x1\n")


def test_what_a_preset_said_for_another_family_is_forgotten(presets):
    for given in ({"preset": "upper"}, {"preset": "lower", "model": "efficientnet_b0"}):
        assert asked(**given) == MODELS["efficientnet_b0"]
    old = settings("lower", {"model": "efficientnet-b0"})
    assert build_variant(old.config) == MODELS["efficientnet_b0"]
    assert old.origins["zero-init-residual"] == "default"
    assert not settings("upper", {"model": "resnet34"}).config.resnet.zero_init_residual


def test_what_a_preset_said_for_the_same_family_stays(presets):
    for same in (settings("deeper", {}), settings("lower", {"model": "resnet101"})):
        assert same.config.resnet.zero_init_residual
        assert build_variant(same.config) == MODELS["resnet101"]
    assert asked(preset="grouped", model="efficientnet-b1").group_dim == 16, "an old spelling"


def test_a_file_that_contradicts_itself_is_refused(presets):
    with pytest.raises(ConfigError, match=r"mixed.yaml:3: stride-in: only ResNet models have it"):
        settings("mixed", {})


# --- names ---


@pytest.mark.parametrize(
    ("old", "today"),
    [
        ("efficientnet-b0", "efficientnet_b0"),
        ("efficientnet-b7", "efficientnet_b7"),
        ("efficientnet-cifar", "efficientnet_cifar"),
        ("cifar_resnet8", "resnet8"),
        ("cifar_resnet56", "resnet56"),
        ("resnext50", "resnext50_32x4d"),
        ("resnext14", "resnext14_32x4d"),
        ("resnext101", "resnext101_32x4d"),  # as the presets of seeds 002 and 004 mean it
        ("ResNet50", "resnet50"),
        ("EfficientNet-B0", "efficientnet_b0"),
    ],
)
def test_old_spellings_are_understood(old, today):
    assert settings(None, {"model": old}).config.model.model == today


def test_no_old_spelling_hides_a_model_or_leads_nowhere():
    assert set(OLD_NAMES.values()) <= set(MODELS) and not set(OLD_NAMES) & set(MODELS)


@pytest.mark.parametrize(
    ("name", "near"),
    [("resnet51", "resnet50"), ("efficientnet_b8", "efficientnet_b7"), ("resnext51", "resnext50")],
)
def test_an_unknown_model_names_near_ones(name, near):
    said = refused(model=name)
    assert said.startswith(f"--model: no model is called {name!r}; did you mean ")
    assert repr(near) in said and "`phalanx models ls` lists all" in said


def test_a_name_like_no_other_points_to_the_list():
    said = refused(model="zzz")
    assert said.startswith("--model: no model is called 'zzz'; `phalanx models ls` lists all")


# --- what cannot be built ---


def test_norm_groups_that_do_not_divide_name_the_layer_and_the_counts_that_would():
    assert refused(model="resnet8", norm_type="group", norm_num_groups=5) == (
        "--norm-num-groups 5: bn1 has 16 channels, which it does not divide; "
        "1, 2, 4, 8 and 16 would work in every layer"
    )
    assert refused(model="efficientnet_b0", norm_type="group") == (
        "--norm-num-groups 32: blocks.0.0.bn2 has 16 channels, which it does not divide; "
        "1, 2, 4 and 8 would work in every layer"
    )
    for groups in (1, 2, 4, 8):
        plan_for(model="efficientnet_b0", norm_type="group", norm_num_groups=groups)
    plan_for(model="resnet50", norm_type="group")
    plan_for(model="resnet8", norm_num_groups=5)  # batch norm has no groups


def test_a_group_dim_that_does_not_divide_names_the_block_and_those_that_would():
    # B6's stem has 32 * 1.8 = 57.6 channels, rounded to 56
    assert refused(model="efficientnet_b6", efficientnet_group_dim=16) == (
        "--efficientnet-group-dim 16: blocks/0/0 has 56 channels, which it does not divide; "
        "1, 2, 4 and 8 would work in every block"
    )
    for dim in (1, 2, 4, 8):
        plan_for(model="efficientnet_b6", efficientnet_group_dim=dim)
    assert "blocks/0/0 has 32 channels" in refused(
        model="efficientnet_b0", efficientnet_group_dim=5
    )


@pytest.mark.parametrize("size", ["b0", "b1", "b2", "b3", "b4", "b5", "b7", "cifar"])
def test_the_published_grouped_efficientnets_are_allowed(size):
    # of B4's first stage a block has 24 channels: one group, as the published networks have it
    options = {"efficientnet_group_dim": 16, "efficientnet_expand_ratio": 4}
    plan_for(model=f"efficientnet_{size}", **options)


def test_a_group_larger_than_a_block_is_one_group():
    plan_for(model="efficientnet_cifar", efficientnet_group_dim=4096)


@pytest.mark.parametrize(
    ("model", "halvings", "least"),
    [("resnet50", 5, 17), ("efficientnet_b0", 5, 17), ("resnext14_32x4d", 5, 17)],
)
def test_an_image_too_small_for_the_strides_is_refused(model, halvings, least):
    assert refused(model=model, image_size=least - 1) == (
        f"--image-size {least - 1}: {model} halves the image {halvings} times, which leaves "
        f"nothing; it needs {least} pixels or more"
    )
    assert plan_for(model=model, image_size=least).image_size == least


def test_an_image_is_refused_for_the_variant_not_for_the_name():
    with pytest.raises(ConfigError, match="mine halves the image 2 times"):
        check_variant("mine", MODELS["resnet8"], 2)
    check_variant("mine", MODELS["resnet8"], 3)


def test_photographs_are_cut_to_the_models_own_size_and_small_sets_keep_theirs():
    sizes = {"efficientnet_b0": 224, "efficientnet_b4": 380, "resnet50": 224, "resnet8": 32}
    for model, size in sizes.items():
        assert plan_for(data="generated", model=model).image_size == size
        assert plan_for(data="generated", model=model, image_size=64).image_size == 64
        assert plan_for(model=model).image_size == 28


def test_what_every_model_has_its_own_of_is_forgotten_with_the_model(presets):
    own = Path("presets/own.yaml")
    own.write_text("# x\nmodel: resnet8\nshortcut-type: C\ndrop-path: 0.5\n")
    assert asked(preset="own").shortcut == asked(preset="own", model="resnet8").shortcut == "C"
    assert asked(preset="own", model="resnet20") == MODELS["resnet20"]
    assert asked(model="resnet20") == MODELS["resnet20"], "the demo's shortcuts are resnet8's"


# --- runs of before ---

OLDER = {"data": "embedded", "model": "resnet8", "image-size": None, "zero-init-residual": True}


def test_a_run_of_before_is_understood_as_it_was_meant():
    meant = {
        "shortcut-type": "B",
        "image-size": 28,
        "max-pixels": 178_000_000,
        "exif-orientation": False,
        "kernels": "torch",
        "crop-rule": 1,
        "gpu-decode": False,
        "listing-rule": 1,
    }
    assert fill_older_options(OLDER) == OLDER | meant
    assert fill_older_options({**OLDER, "image-size": 12})["image-size"] == 12
    assert fill_older_options({**OLDER, "data": "folder"})["image-size"] == 224
    again = read_stored_settings(OLDER, flags={}, where="run/config.yaml", name="old")
    variant = build_variant(again.config)
    assert (variant.shortcut, again.config.resnet.zero_init_residual) == ("B", True)
    assert make_plan(again.config, FACTS, CPU).image_size == 28


def test_a_run_of_today_is_left_as_it_is():
    today = settings("mnist-resnet8", {}).config.flat()
    assert fill_older_options(today) == today
    again = read_stored_settings(today, flags={}, where="run/config.yaml", name="new")
    assert build_variant(again.config) == MODELS["resnet8"]
