"""Batch norms folded into convolutions: the same network, without them."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn

from phalanx.catalog.models import MODELS
from phalanx.catalog.variant import Norm
from phalanx.export.fold import convert_weights, fold_norms
from phalanx.models.build import build_model, initialise_weights

SMALL = {  # one of each family, and each kind of padding and shortcut
    "basic": replace(MODELS["resnet8"], shortcut="A"),
    "bottleneck": MODELS["resnet14"],
    "same padding": replace(MODELS["resnet10"], padding="same"),
    "groups": MODELS["resnext14_32x4d"],
    "fast": MODELS["resnet9"],
    "inverted": MODELS["efficientnet_cifar"],
    "one pass": replace(MODELS["resnet8"], norm=Norm(stable=False)),
    "pooled": MODELS["airbench94"],
}


def build_worn(variant):
    """A model whose norms have statistics and weights as training leaves them."""
    torch.manual_seed(1)
    model = build_model(variant, num_classes=5).eval()
    initialise_weights(model, 3, zero_residual=False)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.running_mean, std=0.3)
            nn.init.uniform_(norm.running_var, 0.5, 2)
            nn.init.uniform_(norm.weight, -1, 1.5)
            nn.init.normal_(norm.bias, std=0.2)
    return model


def list_norms(model):
    return [path for path, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)]


@pytest.mark.parametrize("kind", SMALL)
@torch.no_grad()
def test_a_folded_model_gives_the_same_logits(kind):
    model = build_worn(SMALL[kind])
    images, norms, folded = torch.randn(2, 3, 33, 33), list_norms(model), deepcopy(model)
    gone = fold_norms(folded)
    left = [f"layer{stage}.0.bn1" for stage in (1, 2, 3)] if kind == "pooled" else []
    assert sorted([*gone, *left]) == sorted(norms) and list_norms(folded) == left
    expected = model(images)
    torch.testing.assert_close(folded(images), expected, rtol=1e-4, atol=1e-5)


class Doubled(nn.Module):
    """A block of somebody else's, whose norm sees twice what its convolution gives."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.bn1(2 * self.conv1(x))


@torch.no_grad()
def test_what_is_not_known_stays_as_it_is():
    shared = nn.Conv2d(3, 3, 1)
    watched = nn.Conv2d(3, 3, 1)
    watched.register_forward_hook(lambda *_: None)
    without = nn.BatchNorm2d(3, track_running_stats=False)
    model = nn.Sequential(
        nn.Sequential(shared, nn.BatchNorm2d(3)),
        nn.Sequential(shared, nn.BatchNorm2d(3)),
        nn.Sequential(watched, nn.BatchNorm2d(3)),
        nn.Sequential(nn.Conv2d(3, 3, 1), without),
        nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, affine=False)),
        Doubled(),
    ).eval()
    images = torch.randn(2, 3, 5, 5)
    expected = model(images)
    assert fold_norms(model) == ["4.1"]
    torch.testing.assert_close(model(images), expected)


@torch.no_grad()
def test_norms_that_are_left_compute_in_32_bits():
    model = build_model(replace(MODELS["resnet14"], norm=Norm(type="group")), num_classes=5).eval()
    wide = deepcopy(model)
    convert_weights(model, torch.float16)
    images = torch.randn(1, 3, 33, 33)
    found = model(images.half())
    assert found.dtype == torch.float16 and model.conv1.weight.dtype == torch.float16
    assert model.bn1.norm.weight.dtype == torch.float32
    torch.testing.assert_close(found.float(), wide(images), rtol=0.02, atol=0.01)
