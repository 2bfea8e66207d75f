"""Models are what their tables say, with the names the world's weights use."""

import pytest
import torch

from phalanx.catalog.models import MODELS, blocks_of
from phalanx.errors import ConfigError
from phalanx.models.build import build_model, initialise
from phalanx.models.resnet import BasicBlock, Bottleneck

PARAMETERS = {  # at 10 classes for small images, 1,000 for large; torchvision's for the large ones
    "resnet8": (10, 78_042),
    "resnet20": (10, 272_474),
    "resnet18": (1000, 11_689_512),
    "resnet50": (1000, 25_557_032),
}


def test_the_table_of_counts_covers_the_catalog():
    assert set(PARAMETERS) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_parameter_counts(name):
    classes, expected = PARAMETERS[name]
    with torch.device("meta"):
        model = build_model(name, num_classes=classes)
    assert sum(weight.numel() for weight in model.parameters()) == expected


@pytest.mark.parametrize("name", MODELS)
def test_units_cover_every_parameter_once_and_in_order(name):
    with torch.device("meta"):
        model = build_model(name, num_classes=7)
    assert list(model.units) == ["stem", *(b.unit for b in blocks_of(MODELS[name])), "head"]
    walked = [
        f"{path}.{weight}"
        for paths in model.units.values()
        for path in paths
        for weight, _ in model.get_submodule(path).named_parameters()
    ]
    assert walked == [weight for weight, _ in model.named_parameters()]


@pytest.mark.parametrize("name", MODELS)
def test_one_logit_per_class(name):
    model = build_model(name, num_classes=7).eval()
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 7)


def test_names_are_those_of_timm_and_torchvision():
    with torch.device("meta"):
        names = set(build_model("resnet50", num_classes=1000).state_dict())
    assert len(names) == 320
    for expected in (
        "conv1.weight",
        "bn1.running_var",
        "layer1.0.downsample.0.weight",
        "layer1.0.downsample.1.num_batches_tracked",
        "layer4.2.conv3.weight",
        "fc.bias",
    ):
        assert expected in names


def test_the_stride_sits_on_the_3x3():
    model = build_model("resnet50", num_classes=2)
    block = model.get_submodule("layer3.0")
    assert isinstance(block, Bottleneck)
    assert (block.conv1.stride, block.conv2.stride) == ((1, 1), (2, 2))


def test_a_block_is_its_figure():
    block = BasicBlock(4, 4, 4, stride=1).eval()
    x = torch.randn(1, 4, 6, 6)
    inner = torch.relu(block.bn1(block.conv1(x)))
    expected = torch.relu(block.bn2(block.conv2(inner)) + x)
    assert torch.equal(block(x), expected)


def test_first_weights_depend_on_seed_and_name_alone():
    a, b, c = (build_model("resnet8", num_classes=10) for _ in range(3))
    torch.manual_seed(1)
    initialise(a, 5, zero_residual=False)
    torch.manual_seed(2)
    initialise(b, 5, zero_residual=False)
    initialise(c, 6, zero_residual=False)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.conv1.weight, c.conv1.weight)
    spread = a.get_submodule("layer3.0.conv2").weight.std().item()
    assert spread == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.02)


def test_zero_init_starts_blocks_as_their_shortcut():
    model = build_model("resnet8", num_classes=10).eval()
    initialise(model, 0, zero_residual=True)
    block = model.get_submodule("layer1.0")
    x = torch.rand(1, 16, 8, 8)
    assert torch.equal(block(x), x)


def test_an_unknown_model_names_the_near_one():
    with pytest.raises(ConfigError, match="did you mean 'resnet50'"):
        build_model("resnet51", num_classes=10)
