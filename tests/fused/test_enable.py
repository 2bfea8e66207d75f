"""Which units are left to their modules, and why."""

import torch
from torch import nn

from phalanx.fused.enable import fuse_units
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
