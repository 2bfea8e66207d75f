"""Which units are left to their modules, and why."""

from dataclasses import replace

import torch
from torch import nn

from phalanx.catalog.models import MODELS
from phalanx.catalog.resnets import ResNetVariant
from phalanx.catalog.variant import Norm
from phalanx.fused.enable import describe_unfused_units, fuse_units
from phalanx.kernels import gpu
from phalanx.models.build import build_model
from phalanx.models.resnet import ResNet
from phalanx.models.units import UnitModel


def a_model():
    model = UnitModel()
    model.add_block("layer1.0", nn.Conv2d(3, 4, 3))
    return model.to(memory_format=torch.channels_last)


def test_a_unit_without_kernels_is_left_alone():
    model = a_model()
    assert fuse_units(model, torch.float16, interpreted=True) == {
        "layer1/0": "there are no kernels for it"
    }
    assert not model.fused


def test_the_reason_is_said():
    model = a_model()
    assert fuse_units(model, torch.float16) == {"layer1/0": "it is not on a GPU"}
    assert fuse_units(model, torch.float32) == {"layer1/0": "torch.float32 is not a 16-bit type"}
    plain = a_model().to(memory_format=torch.contiguous_format)
    assert fuse_units(plain, torch.float16, interpreted=True) == {
        "layer1/0": "its weights are not channels_last in memory"
    }
    handle = model.layer1[0].register_forward_hook(lambda *_: None)
    assert fuse_units(model, torch.float16, interpreted=True) == {
        "layer1/0": "something is hooked to its Conv2d"
    }
    handle.remove()
    model.layer1[0].forward = lambda x: x
    assert fuse_units(model, torch.float16, interpreted=True) == {
        "layer1/0": "the forward of its Conv2d was replaced"
    }


def test_a_gpu_is_judged_by_its_own_age(monkeypatch):
    ages = {"cuda:0": (7, 5), "cuda:1": (9, 0)}
    monkeypatch.setattr(gpu, "find_fused", lambda _: print)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device="cuda:0": ages[str(device)]
    )
    found = [gpu.find_gpu_problem(torch.device(name)) for name in ages]
    assert found == ["the GPU is older than they are made for", None]


def why_not(variant):
    model = ResNet(variant, num_classes=4).to(memory_format=torch.channels_last)
    return fuse_units(model, torch.float16, interpreted=True), model


def test_layers_that_kernels_do_not_know_are_named():
    plain = ResNetVariant(
        image_size=8, block="basic", depths=(1, 1), widths=(16, 32), stem="small", classes=4
    )
    reasons, _ = why_not(replace(plain, padding="same"))
    assert reasons["layer2/0"] == "its convolution is SameConv2d"
    assert "layer1/0" not in reasons
    reasons, _ = why_not(replace(plain, norm=Norm(type="none")))
    assert reasons["layer1/0"] == "its convolution has a bias or pads otherwise"
    _, model = why_not(plain)
    model.layer1[0].bn1 = nn.SyncBatchNorm(16)
    model.layer2[0].bn1 = nn.BatchNorm2d(32, momentum=None)
    model.layer2[0].to(memory_format=torch.channels_last)
    reasons = fuse_units(model, torch.float16, interpreted=True)
    assert reasons["layer1/0"] == "its norm is SyncBatchNorm"
    assert reasons["layer2/0"] == "its norm has no weights or no running statistics"
    assert set(model.fused) >= {"stem"} and not set(model.fused) & {"layer1/0", "layer2/0"}


def test_a_person_is_told_what_keeps_to_its_modules():
    model = build_model(MODELS["resnet8"], num_classes=10)
    assert isinstance(model, UnitModel)
    assert describe_unfused_units({}, model) == []
    assert describe_unfused_units({"stem": "it is odd"}, model) == [
        "kernels: torch's own for stem, because it is odd"
    ]
    assert describe_unfused_units({"head": "there are none"}, model) == []
    assert describe_unfused_units({"stem": "it is odd", "layer1/0": "so", "head": "so"}, model) == [
        "kernels: torch's own for stem and 1 other unit, because it is odd"
    ]
    everywhere = dict.fromkeys(model.units, "Triton is not installed")
    assert describe_unfused_units(everywhere, model) == [
        "kernels: torch's own for all units, because Triton is not installed"
    ]
