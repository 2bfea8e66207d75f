"""Models are what their tables say, with the names the world's weights use."""

import math
import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from phalanx.catalog.models import MODELS
from phalanx.catalog.resnets import ResNetVariant
from phalanx.catalog.variant import Variant
from phalanx.models.build import build_model, initialise_weights
from phalanx.models.units import UnitModel

PARAMETERS = {  # with the classes of the data each was published for: 1,000, or 10 for small images
    "resnet10": 5_418_792,  # TensorFlow's less its projection in stage 1, 64 * 64 + 2 * 64
    "resnet14": 10_064_936,
    "resnet18": 11_689_512,  # torchvision's
    "resnet26": 15_995_176,
    "resnet34": 21_797_672,  # torchvision's
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "resnet8": 75_290,
    "resnet14_small": 172_506,
    "resnet20": 269_722,
    "resnet32": 464_154,
    "resnet44": 658_586,
    "resnet56": 853_018,
    "resnet110": 1_727_962,
    "resnet11": 127_642,
    "resnet29": 313_114,
    "resnet38": 405_850,
    "resnet47": 498_586,
    "resnet56_bottleneck": 591_322,
    "resnet65": 684_058,
    # resnet18's, less its 7x7 stem of 9,408 and its head of 513,000, with 1,728 and 5,130 instead
    "resnet18_small": 11_173_962,
    # stem 1,856; 73,984 + 295,424; 295,424; 1,180,672 + 4,720,640; a head of 512 * 10, no bias
    "resnet9": 6_573_120,
    "resnext14_32x4d": 9_411_880,
    "resnext26_32x4d": 15_389_480,
    "resnext50_32x4d": 25_028_904,
    "resnext101_32x4d": 44_177_704,
    "resnext152_32x4d": 59_951_400,
    "resnext101_32x8d": 88_791_336,  # torchvision's
    # from 29's figure by a block more in each stage, 2cw + 9w²/32 + 4w + 2c with c = 64, 128, 256
    # channels outside and w = 2c inside: 21,632 + 85,248 + 338,432 = 445,312
    "resnext11_32x4d": 1_293_786 - 2 * 445_312,
    "resnext29_32x4d": 1_293_786,
    "resnext38_32x4d": 1_293_786 + 1 * 445_312,
    "resnext47_32x4d": 1_293_786 + 2 * 445_312,
    "resnext56_32x4d": 1_293_786 + 3 * 445_312,
    "resnext65_32x4d": 1_293_786 + 4 * 445_312,
    "resnext29_32x4d_wide": 4_775_754,
    "efficientnet_b0": 5_288_548,
    "efficientnet_b1": 7_794_184,
    "efficientnet_b2": 9_109_994,
    "efficientnet_b3": 12_233_232,
    "efficientnet_b4": 19_341_616,
    "efficientnet_b5": 30_389_784,
    "efficientnet_b6": 43_040_704,
    "efficientnet_b7": 66_347_960,
    "efficientnet_cifar": 1_077_932,
    # 24, 64 and 256 channels in: 50,944 + 738,304 + 1,180,672 in stages, a head of 256 * 10; with
    # its filter of 24 * 12 the published 1.97 M
    "airbench94": 1_972_480,
    "efficientnet_lite0": 4_652_008,  # timm's, as are the next two
    "efficientnet_lite1": 5_416_680,
    "efficientnet_lite2": 6_092_072,
}
PROJECTED_IN_STAGE_1 = {"resnet10": 5_423_016, "resnet18": 11_693_736, "resnet34": 21_801_896}
GROUPED = {  # EfficientNet with 16 channels a group and an expand ratio of 4; B6 cannot be built
    "efficientnet_cifar": 1_683_420,
    "efficientnet_b0": 5_913_796,
    "efficientnet_b1": 8_332_120,
    "efficientnet_b2": 9_504_122,
    "efficientnet_b3": 12_590_896,
    "efficientnet_b4": 19_328_168,
    "efficientnet_b5": 28_715_320,
    "efficientnet_b7": 59_210_264,
}
EFFICIENTNET_BLOCKS = {  # all of them, and those of the first stage, which do not widen
    **{"b0": (16, 1), "b1": (23, 2), "b2": (23, 2), "b3": (26, 2), "b4": (32, 2)},
    **{"b5": (39, 3), "b6": (45, 3), "b7": (55, 4), "cifar": (16, 1)},
    **{"lite0": (16, 1), "lite1": (21, 1), "lite2": (21, 1)},
}
NORM = r"(weight|bias|running_mean|running_var|num_batches_tracked)"
NAMES = {  # every name of a family's state dicts
    "ResNet": rf"conv1\.weight|bn1\.{NORM}|fc\.(weight|bias)|layer[1-4]\.\d+\.(conv[1-3]\.weight"
    rf"|bn[1-3]\.{NORM}|downsample\.(0\.weight|1\.{NORM}))",
    "ResNet-9": rf"conv1\.weight|bn1\.{NORM}|layer[1-3]\.[01]\.(conv[12]\.weight|bn[12]\.{NORM})"
    r"|fc\.weight",
    "airbench": rf"whitening\.weight|layer[1-3]\.0\.(conv[12]\.weight|bn[12]\.{NORM})|fc\.weight",
    "EfficientNet": rf"conv_(stem|head)\.weight|bn[12]\.{NORM}|classifier\.(weight|bias)"
    rf"|blocks\.[0-6]\.\d+\.(conv_(dw|pw|pwl)\.weight|bn[1-3]\.{NORM}"
    r"|se\.conv_(reduce|expand)\.(weight|bias))",
}
SMALL = ["resnet8", "resnet9", "resnet11", "resnext11_32x4d", "efficientnet_cifar", "airbench94"]


def bare(variant: Variant, classes: int) -> UnitModel:
    with torch.device("meta"):
        return build_model(variant, num_classes=classes)


@cache
def shape_of(name: str) -> UnitModel:
    """A model of the table without values."""
    return bare(MODELS[name], MODELS[name].classes)


def count(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


# --- the tables ---


def test_the_table_of_counts_covers_the_catalog():
    assert set(PARAMETERS) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_parameter_counts(name):
    assert count(shape_of(name)) == PARAMETERS[name]


@pytest.mark.parametrize("name", PROJECTED_IN_STAGE_1)
def test_parameter_counts_with_tensorflows_projection_in_stage_1(name):
    model = bare(replace(MODELS[name], project_first=True), 1000)
    assert count(model) == PROJECTED_IN_STAGE_1[name]


@pytest.mark.parametrize("name", GROUPED)
def test_parameter_counts_of_grouped_efficientnets(name):
    variant = replace(MODELS[name], group_dim=16, expand_ratio=4)
    assert count(bare(variant, variant.classes)) == GROUPED[name]


@pytest.mark.parametrize("name", MODELS)
def test_names_follow_the_rules_of_timm(name):
    for weight in shape_of(name).state_dict():
        assert re.fullmatch(NAMES[MODELS[name].family], weight), weight


@pytest.mark.parametrize("name", [n for n, v in MODELS.items() if isinstance(v, ResNetVariant)])
def test_a_resnet_has_as_many_convolutions_as_its_name_says(name):
    variant = MODELS[name]
    layers = int(re.search(r"\d+", name)[0])
    stages = len(variant.depths)
    projections = {"A": 0, "B": stages - 1 if variant.block == "basic" else stages}
    convolutions = layers - 1 + projections[variant.shortcut]
    # each with a norm of five tensors; the classifier has two
    assert len(shape_of(name).state_dict()) == 6 * convolutions + 2


@pytest.mark.parametrize("size", EFFICIENTNET_BLOCKS)
def test_an_efficientnet_has_as_many_tensors_as_its_blocks_need(size):
    blocks, first = EFFICIENTNET_BLOCKS[size]
    weighing = 0 if "lite" in size else 4  # squeeze-and-excite: two convolutions with biases
    ends = 6 + 6 + 2
    expected = ends + first * (12 + weighing) + (blocks - first) * (18 + weighing)
    assert len(shape_of(f"efficientnet_{size}").state_dict()) == expected


def test_known_names_are_there():
    resnet, efficient = (set(shape_of(n).state_dict()) for n in ("resnet50", "efficientnet_b0"))
    assert (len(resnet), len(efficient)) == (320, 360)
    assert resnet >= {
        "conv1.weight",
        "bn1.running_var",
        "layer1.0.downsample.0.weight",
        "layer1.0.downsample.1.num_batches_tracked",
        "layer4.2.conv3.weight",
        "fc.bias",
    }
    assert efficient >= {
        "conv_stem.weight",
        "blocks.0.0.conv_dw.weight",
        "blocks.0.0.conv_pw.weight",
        "blocks.1.0.se.conv_reduce.bias",
        "blocks.6.0.conv_pwl.weight",
        "blocks.6.0.bn3.running_mean",
        "bn2.weight",
        "classifier.bias",
    }


@pytest.mark.parametrize("name", MODELS)
def test_units_cover_every_parameter_once_and_in_order(name):
    model = shape_of(name)
    assert tuple(model.units) == MODELS[name].units
    walked = [
        f"{path}.{weight}"
        for paths in model.units.values()
        for path in paths
        for weight, _ in model.get_submodule(path).named_parameters()
    ]
    assert walked == [weight for weight, _ in model.named_parameters()]


@pytest.mark.parametrize("name", MODELS)
def test_the_table_knows_every_norm(name):
    model = shape_of(name)
    norms = {p: m.num_features for p, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    projected = {path: norms.pop(path) for path in list(norms) if "downsample" in path}
    assert norms == MODELS[name].norm_channels()
    for path, channels in projected.items():  # as many as the block's last norm: known through it
        block = path.removesuffix(".downsample.1")
        assert channels == [norms[p] for p in norms if p.startswith(f"{block}.")][-1]


@pytest.mark.parametrize("name", MODELS)
def test_the_image_is_halved_as_often_as_the_table_says(name):
    model, variant = shape_of(name), MODELS[name]
    x = torch.empty(2, 3, variant.image_size, variant.image_size, device="meta")
    *body, head = model.units
    for unit in body:
        x = model.run_unit(unit, x)
    edge = math.ceil(variant.image_size / 2**variant.halvings)
    if variant.family == "airbench":  # its filter takes a pixel, its pools round down
        edge = (variant.image_size - 1) // 2**variant.halvings
    assert x.shape[2:] == (edge, edge)
    assert model.run_unit(head, x).shape == (2, variant.classes)


def least_strided_edge(name: str, edge: int) -> int:
    """The smallest image that a layer of stride 2 is given."""
    model, seen = bare(MODELS[name], 2), []
    for layer in model.modules():
        if getattr(layer, "stride", 1) in (2, (2, 2)):
            layer.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[-1]))
    model(torch.empty(2, 3, edge, edge, device="meta"))
    return min(seen)


@pytest.mark.parametrize(
    "name", ["resnet8", "resnet10", "resnet18_small", "efficientnet_cifar", "efficientnet_b0"]
)
def test_in_the_smallest_image_every_stride_has_something_to_choose_from(name):
    least = MODELS[name].smallest_image
    assert least_strided_edge(name, least) == 2
    assert least_strided_edge(name, least - 1) == 1


@pytest.mark.parametrize("name", SMALL)
def test_one_logit_per_class(name):
    model = build_model(MODELS[name], num_classes=7).eval()
    initialise_weights(model, 0, zero_residual=False)
    logits = model(torch.randn(2, 3, 20, 24))
    assert logits.shape == (2, 7) and logits.isfinite().all()
