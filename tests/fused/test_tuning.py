"""Kernels are tuned by a training pass that leaves no trace."""

import copy
import os

import pytest
import torch

from phalanx.catalog.models import MODELS
from phalanx.errors import DiskError
from phalanx.fused.enable import fuse_units
from phalanx.fused.tuning import describe_temporary_cache, set_compiler_cache, tune_kernels
from phalanx.models.build import build_model
from phalanx.models.units import UnitModel

pytestmark = pytest.mark.usefixtures("untimed")


def test_a_model_is_as_it_was_after_tuning():
    model = build_model(MODELS["resnet8"], num_classes=10).to(memory_format=torch.channels_last)
    assert isinstance(model, UnitModel)
    fuse_units(model, torch.bfloat16, interpreted=True)
    assert "layer1/0" in model.fused
    model.train()
    model.get_submodule("layer3.0.bn1").eval()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    tune_kernels(model, images.to(memory_format=torch.channels_last), half=torch.bfloat16)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    modes = {path for path, module in model.named_modules() if not module.training}
    assert modes == {"layer3.0.bn1"}


def test_compilers_keep_what_they_make_where_they_are_told(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/theirs")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert set_compiler_cache(None) == tmp_path / "phalanx" / "kernels"
    assert os.environ["TRITON_CACHE_DIR"] == "/theirs", "the user's own setting stays"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path))
    assert set_compiler_cache(tmp_path / "mine") == tmp_path / "mine"
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "mine" / "triton")


def test_a_home_that_cannot_be_written_to_ends_no_run(tmp_path, monkeypatch):
    for variable in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(variable, "")  # so that what is set below ends with the test
        monkeypatch.delenv(variable)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    own = set_compiler_cache(None)
    assert own == tmp_path / "home/.cache/phalanx/kernels"
    assert not describe_temporary_cache(own)
    monkeypatch.setenv("HOME", "/dev/null")
    for variable in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(variable)
    found = set_compiler_cache(None)
    assert found == tmp_path / f"phalanx-{os.getuid()}" / "kernels"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(found / "inductor")
    (note,) = describe_temporary_cache(found)
    assert note.startswith("/dev/null/.cache/phalanx cannot be written to: compiled kernels are")
    assert "--model-cache-path" in note


def test_a_named_cache_that_cannot_be_written_to_is_a_mistake(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        DiskError, match=r"--model-cache-path .*file/x: cannot be written to \(Not a"
    ):
        set_compiler_cache(tmp_path / "file" / "x")
