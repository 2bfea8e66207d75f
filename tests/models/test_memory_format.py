"""Gradients stay channels_last: one in another order makes the next layer much slower on a CPU."""

import pytest
import torch
from torch import nn

from phalanx.catalog.models import MODELS
from phalanx.models.build import build_model

_LAYERS = (nn.BatchNorm2d, nn.ReLU, nn.SiLU)


@pytest.mark.parametrize(
    ("name", "size"),
    [("resnet8", 16), ("resnet18", 64), ("resnet9", 16), ("efficientnet_b0", 64)],
)
def test_every_gradient_is_channels_last(name, size):
    model = build_model(MODELS[name], num_classes=10).train()
    model = model.to(memory_format=torch.channels_last)
    others = []

    def note_gradient(layer, _, output):
        def check(gradient):
            if not gradient.is_contiguous(memory_format=torch.channels_last):
                others.append(f"{layer}: {tuple(gradient.shape)}, strides {gradient.stride()}")

        output.register_hook(check)

    for layer in model.modules():
        if isinstance(layer, _LAYERS):
            layer.register_forward_hook(note_gradient)
            layer.inplace = False  # a hook belongs to the output before it is overwritten
    images = torch.rand(3, 3, size, size).to(memory_format=torch.channels_last)
    model(images).square().sum().backward()
    assert others == []
