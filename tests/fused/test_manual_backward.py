"""Whole networks forward and backward by kernels, against their modules.

With TRITON_INTERPRET=1 and Triton installed the tests on the CPU run the fused kernels.
"""

import copy
import os
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import nn

from phalanx.catalog.airbench import AirbenchVariant
from phalanx.catalog.resnets import FastResNetVariant, ResNetVariant
from phalanx.catalog.variant import Norm
from phalanx.fused.enable import fuse_units
from phalanx.fused.half_copies import cast_before_passes
from phalanx.kernels.choices import CHOICES
from phalanx.models.build import build_model

pytestmark = pytest.mark.usefixtures("untimed")
BASIC = ResNetVariant(
    image_size=8, block="basic", depths=(1, 2), widths=(8, 24), stem="small", drop_path=0.4
)
SHORTCUT_A = ResNetVariant(
    image_size=9, block="basic", depths=(1, 1), widths=(8, 16), stem="small", shortcut="A"
)
BOTTLENECK = ResNetVariant(
    image_size=22, block="bottleneck", depths=(2, 1), widths=(16, 24), stem="large"
)
RESNEXT = ResNetVariant(
    image_size=20,
    block="bottleneck",
    depths=(1,),
    widths=(8,),
    stem="large",
    groups=4,
    group_width=4,
)
FAST = FastResNetVariant(image_size=18, widths=(8, 16, 24), residual=(True, False), drop_path=0.8)
GROUPS, INTERLEAVED = Norm(type="group", groups=4), Norm(type="group", groups=4, interleaved=True)
AIRBENCH = AirbenchVariant(image_size=12, widths=(8, 24))
NETWORKS = {
    "basic": BASIC, "shortcut A": SHORTCUT_A, "bottleneck": BOTTLENECK, "resnext": RESNEXT,
    "fast": FAST,
    "airbench": AIRBENCH,
    "basic, groups": replace(BASIC, norm=GROUPS),
    "bottleneck, interleaved groups": replace(BOTTLENECK, norm=INTERLEAVED),
    "resnext, groups": replace(RESNEXT, norm=GROUPS),
    "airbench, groups": replace(AIRBENCH, norm=GROUPS),
    "fast, groups": replace(FAST, norm=GROUPS),
}  # fmt: skip


def a_network(variant):
    torch.manual_seed(5)
    model = build_model(variant, num_classes=4).to(memory_format=torch.channels_last).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.GroupNorm):
            nn.init.uniform_(module.weight, 0.3, 1.2)
            nn.init.uniform_(module.bias, -0.3, 0.3)
    return model


def a_batch(size, images=4):
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(images, 3, size, size, generator=draws)
    return x.contiguous(memory_format=torch.channels_last)


def noise_for(model, images=4):
    draws = torch.Generator().manual_seed(2)
    sizes = {path: (images, size) for path, size in model.noise_sizes.items()}
    return {path: torch.rand(size, generator=draws) for path, size in sizes.items()}


def train_once(model, x, dtype):
    """Logits, gradients and buffers after one pass both ways."""
    noise = {path: drawn.to(dtype) for path, drawn in noise_for(model, len(x)).items()}
    logits = model(x.to(dtype), noise)
    wanted = torch.linspace(-1, 1, logits.numel(), device=x.device).view_as(logits)
    (logits.to(dtype) * wanted).sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    return {"logits": logits.detach()} | gradients | dict(model.named_buffers())


@pytest.mark.parametrize("variant", NETWORKS.values(), ids=NETWORKS)
def test_a_network_of_fused_units_trains_as_its_modules_do(variant):
    plain = a_network(variant)
    fused, x = copy.deepcopy(plain), a_batch(variant.image_size)
    reasons = fuse_units(fused, torch.float32, interpreted=True)
    assert not reasons.keys() - {"head"}, reasons
    found = train_once(fused, x, torch.float32)
    wanted = train_once(plain.double(), x, torch.float64)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        error = (found[name].double() - value).norm() / value.double().norm().clamp_min(1e-12)
        assert error < 2e-5, f"{name}: {error:.1e}"
    for name, weight in fused.named_parameters():
        assert weight.grad.stride() == weight.stride(), name


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
@pytest.mark.parametrize("name", ["airbench", "resnext", "fast, groups"])
def test_offsets_of_64_bits_as_in_huge_batches_change_no_bit(name, monkeypatch):
    plain, run, launched = a_network(NETWORKS[name]), CHOICES.run, []

    def run_wide(kernel, *args, **flags):
        if "WIDE" in flags:
            launched.append(kernel.__name__)
            flags["WIDE"] = True
        return run(kernel, *args, **flags)

    results = []
    for wide in (False, True):
        if wide:
            monkeypatch.setattr(CHOICES, "run", run_wide)
        model = copy.deepcopy(plain)
        fuse_units(model, torch.float32, interpreted=True)
        results.append(train_once(model, a_batch(NETWORKS[name].image_size), torch.float32))
    assert all(torch.equal(one, results[1][name]) for name, one in results[0].items())
    assert {"_sum_statistics", "_apply", "_sum_gradients", "_apply_back"} <= set(launched)
    kernels = {"airbench": {"_whiten", "_pool", "_unpool_back"}, "resnext": {"_pool_back_quads"}}
    assert kernels.get(name, {"_pool_back"}) <= set(launched)


@pytest.mark.parametrize(("images", "wide"), [(1700, False), (1800, True)])
def test_a_huge_batch_is_whitened_with_offsets_of_64_bits(images, wide, monkeypatch):
    pytest.importorskip("triton", reason="needs Triton")
    whiten = import_module("phalanx.fused.stem_fused").whiten_fused
    flags = {}
    monkeypatch.setattr(CHOICES, "run", lambda *_, **given: flags.update(given))
    x = torch.empty(images, 3, 224, 224, device="meta")  # 24 channels of 223 x 223 each
    whiten(x, torch.empty(24, 3, 2, 2, device="meta"), torch.float16)
    assert flags["WIDE"] == wide


def test_norms_that_do_not_train_are_left_to_the_modules():
    plain = a_network(BASIC)
    fused, x = copy.deepcopy(plain), a_batch(8)
    fuse_units(fused, torch.float32, interpreted=True)
    for model in (plain, fused):
        model.layer1[0].bn2.eval()
        model.bn1.eval()
    for unit in ("stem", "layer1/0"):
        wanted, found = plain.run_unit(unit, x), fused.run_unit(unit, x)
        assert torch.equal(found, wanted), unit
        x = wanted


def test_a_stem_gives_the_gradient_of_an_image_that_wants_one():
    plain = a_network(BASIC)
    fused = copy.deepcopy(plain)
    fuse_units(fused, torch.float32, interpreted=True)
    gradients = []
    for model in (plain, fused):
        x = a_batch(8).requires_grad_()
        model(x).square().sum().backward()
        gradients.append(x.grad)
    assert torch.allclose(*gradients, rtol=1e-3, atol=1e-5)


def test_the_copies_in_16_bits_are_what_is_multiplied_with():
    model, x = a_network(BASIC), a_batch(8)
    fuse_units(model, torch.bfloat16, interpreted=True)
    cast_before_passes(model, torch.bfloat16)
    before = model.run_unit("stem", x)
    with torch.no_grad():
        model.conv1.weight.neg_()
    assert torch.equal(model.run_unit("stem", x), before)
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
    assert not torch.equal(model.run_unit("stem", x), before)
    assert before.dtype == torch.bfloat16


def test_a_block_below_gets_the_gradient_in_two_parts():
    model, x = a_network(BASIC), a_batch(8)
    fuse_units(model, torch.float32, interpreted=True)
    inner = model.run_unit("layer1/0", model.run_unit("stem", x))
    parts = []
    inner.register_hook(parts.append)
    inner.skip_carrier.register_hook(parts.append)
    model.run_unit("layer2/0", inner).sum().backward()
    through_convolutions, through_shortcut = parts
    assert through_convolutions.shape == through_shortcut.shape == inner.shape
    assert not torch.equal(through_convolutions, through_shortcut)
