"""Convolutions in groups that are joined, against torch's."""

import pytest
import torch

from phalanx.kernels.choices import CHOICES
from phalanx.products.grouped import ConvShape, convolve_groups, convolve_groups_back

pytestmark = pytest.mark.usefixtures("untimed")
ROW = [1, 8, 16]  # groups of 4 channels that are joined


def tensors(groups=32, each=4, stride=1):
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(2, groups * each, 6, 6, generator=draws)
    weight = torch.randn(groups * each, each, 3, 3, generator=draws)
    last = torch.channels_last
    x, weight = x.contiguous(memory_format=last), weight.contiguous(memory_format=last)
    return x, weight, ConvShape((stride, stride), (1, 1), (1, 1), groups)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("place", range(3), ids=[f"{number} joined" for number in ROW])
def test_joined_groups_give_what_groups_give(place, stride, monkeypatch):
    seen = []

    def run_fastest(key, implementations):
        seen.append(list(implementations))
        return list(implementations.values())[place]()

    monkeypatch.setattr(CHOICES, "run_fastest", run_fastest)
    x, weight, shape = tensors(stride=stride)
    found = convolve_groups(x, weight, shape)
    plain = torch.nn.functional.conv2d(
        x.requires_grad_(), weight.requires_grad_(), None, stride, 1, 1, shape.groups
    )
    assert torch.allclose(found, plain, rtol=1e-4, atol=1e-4)
    dy = torch.randn_like(plain)
    wanted = torch.autograd.grad(plain, [x, weight], dy)
    with torch.no_grad():
        gradients = convolve_groups_back(dy, x, weight, shape, needs_input_grad=True)
    for own, other in zip(gradients, wanted, strict=True):
        assert own.shape == other.shape
        assert torch.allclose(own, other, rtol=1e-4, atol=1e-4)
    assert seen == [[f"{number} joined" for number in ROW]] * 3


def test_an_input_that_wants_no_gradient_gets_none():
    x, weight, shape = tensors()
    dx, dw = convolve_groups_back(torch.ones_like(x), x, weight, shape, needs_input_grad=False)
    assert dx is None and dw.shape == weight.shape
