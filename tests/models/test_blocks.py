"""Blocks, shortcuts, paddings and first weights, each against its figure written out."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.catalog.efficientnets import InvertedBlock
from phalanx.catalog.models import MODELS
from phalanx.catalog.resnets import Block
from phalanx.catalog.variant import Norm, Variant
from phalanx.models.build import build_model, initialise_weights
from phalanx.models.efficientnet import DepthwiseSeparableConv, InvertedResidual
from phalanx.models.layers import SameConv2d, SameMaxPool
from phalanx.models.resnet import BasicBlock, Bottleneck, build_shortcut
from phalanx.models.units import UnitModel


def bare(variant: Variant) -> UnitModel:
    """A model for ten classes without values."""
    with torch.device("meta"):
        return build_model(variant, num_classes=10)


def shaken(module: nn.Module) -> nn.Module:
    """In eval mode, with no norm left that does nothing."""
    random = torch.Generator().manual_seed(3)
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            for values in (norm.weight.data, norm.bias.data, norm.running_mean):
                values.normal_(generator=random)
            norm.running_var.uniform_(0.5, 2, generator=random)
    return module.eval()


def normed(norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    mean, variance, weight, bias = (
        values[:, None, None]
        for values in (norm.running_mean, norm.running_var, norm.weight, norm.bias)
    )
    return (x - mean) / (variance + 1e-5).sqrt() * weight + bias


def squeezed_and_excited(se: nn.Module, x: Tensor) -> Tensor:
    mean = x.mean((2, 3), keepdim=True)
    inner = F.silu(F.conv2d(mean, se.conv_reduce.weight, se.conv_reduce.bias))
    return x * torch.sigmoid(F.conv2d(inner, se.conv_expand.weight, se.conv_expand.bias))


def projected(block: nn.Module, x: Tensor) -> Tensor:
    conv, norm = block.downsample
    return normed(norm, F.conv2d(x, conv.weight, stride=2))


def test_a_basic_block_is_its_figure():
    block = shaken(BasicBlock(Block(2, 0, 4, 6, 6, 2), MODELS["resnet18"]))
    x = torch.randn(2, 4, 7, 8)
    inner = normed(block.bn1, F.conv2d(x, block.conv1.weight, stride=2, padding=1)).relu()
    inner = normed(block.bn2, F.conv2d(inner, block.conv2.weight, padding=1))
    torch.testing.assert_close(block(x), (inner + projected(block, x)).relu())


@pytest.mark.parametrize(("stride_in", "strides"), [("3x3", (1, 2)), ("1x1", (2, 1))])
def test_a_bottleneck_is_its_figure(stride_in, strides):
    variant = replace(MODELS["resnext50_32x4d"], groups=2, stride_in=stride_in)
    block = shaken(Bottleneck(Block(2, 0, 4, 6, 8, 2), variant))
    x = torch.randn(2, 4, 7, 8)
    early, late = strides
    inner = normed(block.bn1, F.conv2d(x, block.conv1.weight, stride=early)).relu()
    inner = F.conv2d(inner, block.conv2.weight, stride=late, padding=1, groups=2)
    inner = normed(block.bn2, inner).relu()
    inner = normed(block.bn3, F.conv2d(inner, block.conv3.weight))
    torch.testing.assert_close(block(x), (inner + projected(block, x)).relu())


ACTIVATIONS = {"efficientnet_b0": F.silu, "efficientnet_lite0": F.relu6}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_depthwise_separable_convolution_is_its_figure(name):
    act, squeezed = ACTIVATIONS[name], 2 * (name == "efficientnet_b0")
    place = InvertedBlock(0, 1, 6, 6, 6, kernel=3, stride=1, groups=3, squeeze_width=squeezed)
    block = shaken(DepthwiseSeparableConv(place, MODELS[name]))
    x = 20 * torch.randn(2, 6, 7, 8)  # beyond the 6 of ReLU6
    inner = act(normed(block.bn1, F.conv2d(x, block.conv_dw.weight, padding=1, groups=3)))
    inner = squeezed_and_excited(block.se, inner) if squeezed else inner
    expected = x + normed(block.bn2, F.conv2d(inner, block.conv_pw.weight))
    torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("stride", [1, 2])
def test_an_inverted_residual_is_its_figure(name, stride):
    act, squeezed = ACTIVATIONS[name], 2 * (name == "efficientnet_b0")
    place = InvertedBlock(
        1, 1, 4, 12, 4, kernel=5, stride=stride, groups=12, squeeze_width=squeezed
    )
    block = shaken(InvertedResidual(place, MODELS[name]))
    x = 20 * torch.randn(2, 4, 7, 8)  # beyond the 6 of ReLU6
    inner = act(normed(block.bn1, F.conv2d(x, block.conv_pw.weight)))
    inner = F.conv2d(inner, block.conv_dw.weight, stride=stride, padding=2, groups=12)
    inner = act(normed(block.bn2, inner))
    inner = squeezed_and_excited(block.se, inner) if squeezed else inner
    inner = normed(block.bn3, F.conv2d(inner, block.conv_pwl.weight))
    torch.testing.assert_close(block(x), x + inner if stride == 1 else inner)


def test_an_efficientnet_block_adds_its_input_only_where_shapes_agree():
    place = InvertedBlock(1, 0, 4, 8, 6, kernel=3, stride=1, groups=8, squeeze_width=1)
    assert not place.skips and not replace(place, channels_out=4, stride=2).skips
    assert replace(place, channels_out=4).skips
    assert InvertedResidual(place, MODELS["efficientnet_b0"])(torch.randn(2, 4, 5, 5)).shape[1] == 6


# --- shortcuts ---


def test_shortcut_a_is_every_second_pixel_and_zeros_for_new_channels():
    variant = MODELS["resnet8"]
    shortcut = build_shortcut(Block(2, 0, 2, 5, 5, 2), variant)
    x = torch.arange(2 * 2 * 5 * 4.0).view(2, 2, 5, 4)
    expected = np.zeros((2, 5, 3, 2), np.float32)
    for row in range(3):
        for column in range(2):
            expected[:, :2, row, column] = x[:, :, 2 * row, 2 * column]
    np.testing.assert_array_equal(shortcut(x).numpy(), expected)
    assert not list(shortcut.parameters())


@pytest.mark.parametrize(
    ("name", "shortcut", "projections"),
    [
        ("resnet20", "A", []),
        ("resnet20", "B", ["layer2.0", "layer3.0"]),
        ("resnet20", "C", [f"layer{s}.{i}" for s in (1, 2, 3) for i in (0, 1, 2)]),
        ("resnet26", "A", []),
        ("resnet26", "B", ["layer1.0", "layer2.0", "layer3.0", "layer4.0"]),
        ("resnet26", "C", [f"layer{s}.{i}" for s in (1, 2, 3, 4) for i in (0, 1)]),
    ],
)
def test_each_shortcut_type_projects_where_it_should(name, shortcut, projections):
    model = bare(replace(MODELS[name], shortcut=shortcut))
    found = [n for n in model.state_dict() if n.endswith("downsample.0.weight")]
    assert found == [f"{place}.downsample.0.weight" for place in projections]
    edge = MODELS[name].image_size
    assert model(torch.empty(1, 3, edge, edge, device="meta")).shape == (1, 10)


@pytest.mark.parametrize(("shortcut", "more"), [("A", ["layer1.0"]), ("B", ["layer1.0"])])
def test_tensorflows_projection_is_one_more_in_stage_1_and_nowhere_else(shortcut, more):
    plain = replace(MODELS["resnet20"], shortcut=shortcut)
    more_of = replace(plain, project_first=True)
    changed = [
        f"layer{block.stage}.{block.index}"
        for block in plain.blocks
        if more_of.projects(block) != plain.projects(block)
    ]
    assert changed == more


# --- first weights ---


def test_first_weights_depend_on_seed_and_name_alone():
    a, b, c = (build_model(MODELS["resnet8"], num_classes=10) for _ in range(3))
    torch.manual_seed(1)
    initialise_weights(a, 5, zero_residual=False)
    torch.manual_seed(2)
    initialise_weights(b, 5, zero_residual=False)
    initialise_weights(c, 6, zero_residual=False)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.conv1.weight, c.conv1.weight)
    block = a.get_submodule("layer1.0")
    assert not torch.equal(block.conv1.weight, block.conv2.weight), "as large, but another name"
    spread = a.get_submodule("layer3.0.conv2").weight.std().item()
    assert spread == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.02)
    deeper = build_model(MODELS["resnet14_small"], num_classes=10)
    initialise_weights(deeper, 5, zero_residual=False)
    shared, other = dict(a.named_parameters()), dict(deeper.named_parameters())
    assert all(torch.equal(weight, other[name]) for name, weight in shared.items())


def test_a_grouped_convolution_starts_by_the_outputs_a_weight_reaches():
    model = build_model(MODELS["resnext11_32x4d"], num_classes=10)
    initialise_weights(model, 0, zero_residual=False)
    spread = model.get_submodule("layer3.0.conv2").weight.std().item()
    assert spread == pytest.approx((2 / (512 * 9 / 32)) ** 0.5, rel=0.02)
    bound = 1 / math.sqrt(256)
    assert bound * 0.98 < model.fc.weight.abs().max() <= bound
    assert 0 < model.fc.bias.abs().max() <= bound


def test_the_head_of_an_efficientnet_starts_by_its_classes():
    model = build_model(MODELS["efficientnet_b0"], num_classes=25)
    initialise_weights(model, 0, zero_residual=False)
    assert 0.98 / 5 < model.classifier.weight.abs().max() <= 1 / 5
    assert not model.classifier.bias.any()


@pytest.mark.parametrize("name", ["resnet8", "resnet11"])
@pytest.mark.parametrize("norm", [Norm(), Norm(type="group", groups=4), Norm(type="none")])
def test_zero_init_starts_blocks_as_their_shortcut(name, norm):
    variant = replace(MODELS[name], norm=norm, depths=(2, 1, 1), shortcut="B")
    model = build_model(variant, num_classes=10)
    initialise_weights(model, 0, zero_residual=True)
    block = model.get_submodule("layer1.1")
    x = torch.rand(2, block.conv1.in_channels, 8, 8)
    assert torch.equal(block(x), x)
    initialise_weights(model, 0, zero_residual=False)
    assert norm.type != "none" or not torch.equal(block(x), x), "the draw must undo the zeros"


# --- padding as TensorFlow's ---


def windows(x: np.ndarray, size: int, *, fill: float) -> np.ndarray:
    """[N, C, rows, columns, size, size]: what each place of a strided SAME window sees.

    By TensorFlow's documentation: the padding is size - stride where the stride divides the
    edge, else size - edge % stride; the smaller half goes first.
    """
    before, after = [], []
    for edge in x.shape[2:]:
        padding = max(size - (edge % 2 or 2), 0)
        before.append(padding // 2)
        after.append(padding - padding // 2)
    wide = np.pad(x, ((0, 0), (0, 0), *zip(before, after, strict=True)), constant_values=fill)
    seen = np.lib.stride_tricks.sliding_window_view(wide, (size, size), axis=(2, 3))
    return seen[:, :, ::2, ::2]


@pytest.mark.parametrize("edges", [(8, 8), (7, 7), (7, 8), (9, 6), (1, 2)])
@pytest.mark.parametrize("size", [1, 3, 5, 7])
def test_a_same_convolution_sees_what_tensorflows_does(edges, size):
    conv = SameConv2d(3, 4, size, stride=2, bias=False)
    x = torch.randn(2, 3, *edges)
    seen = windows(x.numpy(), size, fill=0)
    expected = np.einsum("ncrskl,ockl->nors", seen, conv.weight.detach().numpy())
    assert expected.shape[2:] == tuple(math.ceil(edge / 2) for edge in edges)
    np.testing.assert_allclose(conv(x).detach().numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("edges", [(8, 8), (7, 7), (7, 8)])
def test_a_same_pool_sees_what_tensorflows_does(edges):
    x = -torch.rand(2, 3, *edges) - 1  # below zero: padding with zeros would win
    expected = windows(x.numpy(), 3, fill=-np.inf).max((4, 5))
    np.testing.assert_array_equal(SameMaxPool()(x).numpy(), expected)


@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0"])
def test_the_padding_of_strided_layers_is_the_variants(name):
    model, symmetric = bare(replace(MODELS[name], padding="same")), bare(MODELS[name])
    kinds = {True: SameConv2d, False: nn.Conv2d}
    for conv in model.modules():
        if isinstance(conv, nn.Conv2d):
            assert type(conv) is kinds[conv.stride == (2, 2)]
    assert any(isinstance(m, SameMaxPool) for m in model.modules()) == (name == "resnet18")
    assert not any(isinstance(m, SameConv2d | SameMaxPool) for m in symmetric.modules())
    assert list(model.state_dict()) == list(symmetric.state_dict())
