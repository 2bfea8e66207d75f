"""airbench's network: filters taken from images, blocks that start as identities."""

import pytest
import torch
from torch import nn

from phalanx.catalog.models import MODELS
from phalanx.models.airbench import has_whitening, set_whitening_filters
from phalanx.models.build import build_model, initialise_weights


@pytest.fixture
def model():
    made = build_model(MODELS["airbench94"], num_classes=10)
    initialise_weights(made, 0, zero_residual=False)
    return made.eval()


@pytest.fixture
def images():
    """Smooth images, whose pixels go together as those of photographs do."""
    noise = torch.randn(64, 3, 24, 24, generator=torch.Generator().manual_seed(3))
    return nn.functional.avg_pool2d(noise, 3, stride=1) + noise[:, :1, 1:-1, 1:-1]


def test_whitened_patches_are_uncorrelated_and_of_unit_variance(model, images):
    set_whitening_filters(model, images)
    out = model.whitening(images)
    values = out[:, :12].double().permute(0, 2, 3, 1).reshape(-1, 12)
    found = values.T @ values / len(values)
    torch.testing.assert_close(found, torch.eye(12).double(), atol=0.05, rtol=0)
    assert torch.equal(out[:, 12:], -out[:, :12])


def test_the_first_filter_sees_what_varies_most(model, images):
    set_whitening_filters(model, images)
    lengths = model.whitening.weight[:12].flatten(1).norm(dim=1)
    assert torch.equal(lengths, lengths.sort().values)


def test_a_direction_that_does_not_vary_is_not_blown_up(model):
    grey = torch.randn(8, 1, 12, 12).expand(8, 3, 12, 12)
    set_whitening_filters(model, grey)
    assert model.whitening.weight.flatten(1).norm(dim=1).max() < 5e-4**-0.5 * 1.01


def test_filters_are_the_same_whatever_the_memory_layout(model, images):
    set_whitening_filters(model, images)
    before = model.whitening.weight.clone()
    set_whitening_filters(model, images.contiguous(memory_format=torch.channels_last))
    assert torch.equal(model.whitening.weight, before)


def test_training_leaves_the_filters(model):
    assert "whitening.weight" in model.state_dict()
    assert "whitening.weight" not in dict(model.named_parameters())


def test_convolutions_start_as_identities(model):
    x = torch.randn(2, 24, 8, 8)
    block = model.layer1[0]
    torch.testing.assert_close(block.conv1(x)[:, :24], x)
    y = torch.randn(2, 64, 4, 4)
    torch.testing.assert_close(block.conv2(y), y)
    assert block.conv1.weight[24:].std() > 0.01  # the others are drawn


def test_only_this_family_takes_its_first_layer_from_images(model):
    assert has_whitening(model)
    assert not has_whitening(build_model(MODELS["resnet9"], num_classes=10))
