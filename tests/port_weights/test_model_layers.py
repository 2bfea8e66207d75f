"""The layers that are known without torch are those of the models that torch builds."""

from dataclasses import replace

import pytest
import torch

from phalanx.catalog.models import MODELS
from phalanx.catalog.variant import Norm
from phalanx.models.build import build_model
from phalanx.port_weights.model_layers import has_layers, iterate_layers

OLD_FAMILIES = [name for name, variant in MODELS.items() if has_layers(variant)]
CHANGED = {
    "resnet18": {"project_first": True, "norm": Norm(type="group")},
    "resnet14_small": {"shortcut": "C"},
    "resnet26": {"norm": Norm(type="none")},
    "efficientnet_b0": {"group_dim": 16, "expand_ratio": 4, "norm": Norm(type="group", groups=4)},
    "efficientnet_lite0": {"norm": Norm(type="none")},
}


def shapes_of(variant, classes):
    return {
        f"{layer.path}.{tensor}": shape
        for layer in iterate_layers(variant, classes)
        for tensor, shape in layer.shapes.items()
    }


def built_shapes(variant, classes):
    with torch.device("meta"):
        model = build_model(variant, num_classes=classes)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def test_most_models_are_of_families_that_older_programs_had():
    assert len(OLD_FAMILIES) >= 40 and set(QUICK) <= set(OLD_FAMILIES)


QUICK = ("resnet8", "resnet10", "resnet11", "resnet14", "resnext11_32x4d", "efficientnet_cifar")
ALL = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in OLD_FAMILIES]


@pytest.mark.parametrize("name", ALL)
def test_the_layers_are_those_of_the_built_model(name):
    variant = MODELS[name]
    assert shapes_of(variant, 7) == built_shapes(variant, 7)


@pytest.mark.parametrize("name", CHANGED)
def test_so_they_are_with_options_laid_over_it(name):
    variant = replace(MODELS[name], **CHANGED[name])
    assert shapes_of(variant, 3) == built_shapes(variant, 3)
