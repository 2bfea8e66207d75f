"""A whole network with fused units, against its modules."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from phalanx.catalog.models import MODELS
from phalanx.fused.enable import fuse_units
from phalanx.kernels.choices import CHOICES
from phalanx.models.build import build_model, initialise_weights
from phalanx.models.resnet import Bottleneck

pytestmark = pytest.mark.usefixtures("untimed")
gpu_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def a_network(half, *, name="resnet50", seed=0):
    """A network whose gradients rounding does not make chaotic: each block adds little."""
    model = build_model(MODELS[name], num_classes=100)
    initialise_weights(model, seed, zero_residual=False)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.weight.data.copy_(module.weight.data.to(half).float())
        if isinstance(module, Bottleneck):
            nn.init.constant_(module.bn3.weight, 0.2)
    return model.cuda().to(memory_format=torch.channels_last).train()


def test_a_small_network_is_its_modules():
    torch.manual_seed(0)  # no ReLU lies so near zero that rounding flips it
    model = build_model(MODELS["resnet14"], num_classes=10)
    initialise_weights(model, 0, zero_residual=False)
    model = model.to(memory_format=torch.channels_last).train()
    x, labels = torch.randn(3, 3, 64, 64), torch.arange(3)
    plain = deepcopy(model).double()
    reasons = fuse_units(model, torch.float32, interpreted=True)
    assert not [unit for unit in reasons if unit.startswith("layer")], reasons
    F.cross_entropy(model(x), labels).backward()
    F.cross_entropy(plain(x.double()), labels).backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert error(one.grad.double(), other.grad) < 1e-4, name
    for (name, one), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert error(one.double(), other.double()) < 1e-5, name


def find_gradients(model, x, labels, half=None):
    scale = 1.0 if half is None else 1024.0
    with torch.autocast("cuda", half or torch.float16, enabled=half is not None):
        logits = model(x)
    loss = F.cross_entropy(logits if half is None else logits.float(), labels)
    (loss * scale).backward()
    return {name: weight.grad.double() / scale for name, weight in model.named_parameters()}


def error(found, wanted):
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))


@pytest.mark.gpu
@gpu_only
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_a_network_errs_no_more_than_torch(half, monkeypatch):
    torch.manual_seed(3)
    model = a_network(half)
    x = torch.randn(32, 3, 128, 128, device="cuda").to(half)
    x = x.contiguous(memory_format=torch.channels_last)
    labels = torch.arange(32, device="cuda")
    fused = deepcopy(model)
    reasons = fuse_units(fused, half)
    assert not [unit for unit in reasons if unit.startswith("layer")], reasons
    if half == torch.bfloat16:  # the first tiles, which are compiled in less time
        every = CHOICES.launch_fastest
        monkeypatch.setattr(CHOICES, "launch_fastest", lambda launches: every(launches[:1]))
    CHOICES.compile_all(lambda: find_gradients(deepcopy(fused), x, labels, half))
    exact = find_gradients(deepcopy(model).double(), x.double(), labels)
    plain, own = find_gradients(model, x, labels, half), find_gradients(fused, x, labels, half)
    whole = [torch.cat([t[name].flatten() for name in exact]) for t in (own, plain, exact)]
    own_error, plain_error = error(whole[0], whole[2]), error(whole[1], whole[2])
    ratios = sorted(
        (error(own[name], exact[name]) / max(error(plain[name], exact[name]), 1e-9), name)
        for name in exact
    )
    print(f"{half}: {own_error:.4f} of torch's {plain_error:.4f}; median ratio", end=" ")
    print(f"{ratios[len(ratios) // 2][0]:.3f}, most {ratios[-3:]}")
    assert own_error <= 1.1 * plain_error
    assert ratios[len(ratios) // 2][0] <= 1.1
