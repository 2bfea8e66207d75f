"""Kernels are tuned by a training pass that leaves no trace."""

import copy
import os

import torch

from phalanx.catalog.models import MODELS
from phalanx.fused.enable import fuse_units
from phalanx.fused.tuning import tune, use_cache
from phalanx.models.build import build_model
from phalanx.models.units import UnitModel


def test_a_model_is_as_it_was_after_tuning():
    model = build_model(MODELS["resnet8"], num_classes=10).to(memory_format=torch.channels_last)
    assert isinstance(model, UnitModel)
    fuse_units(model, torch.bfloat16, interpreted=True)
    assert "layer1/0" in model.fused
    model.train()
    model.get_submodule("layer3.0.bn1").eval()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    tune(model, images.to(memory_format=torch.channels_last), half=torch.bfloat16)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    modes = {path for path, module in model.named_modules() if not module.training}
    assert modes == {"layer3.0.bn1"}


def test_compilers_keep_what_they_make_where_they_are_told(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/theirs")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert use_cache(None) == tmp_path / "phalanx" / "kernels"
    assert os.environ["TRITON_CACHE_DIR"] == "/theirs", "the user's own setting stays"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path))
    assert use_cache(tmp_path / "mine") == tmp_path / "mine"
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "mine" / "triton")
