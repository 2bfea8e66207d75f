"""The predicted memory is what a real step takes."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

from phalanx.catalog.models import MODELS
from phalanx.catalog.variant import Norm, Variant
from phalanx.errors import ConfigError
from phalanx.fused.enable import fuse_units
from phalanx.models.build import build_model
from phalanx.models.cost import count_units
from phalanx.models.recompute import enable_recomputation
from phalanx.models.step_memory import BytesPerWeight, LiveBytes, Memory, PassSpec, predict_memory
from phalanx.models.units import UnitModel, draw_dropout_noise

BARE = BytesPerWeight(weight=0, optimizer=0)
RECOMPUTED: dict[str, Sequence[str] | None] = {
    "all kept": None,
    "units stored": (),
    "convolutions stored": (".*conv.*",),
}
RESNET8 = MODELS["resnet8"]
BATCH = 4


def predicted(
    variant: Variant,
    image_size: int,
    per_weight: BytesPerWeight = BARE,
    stored: Sequence[str] | None = None,
) -> Memory:
    kept = None if stored is None else tuple(stored)
    one_pass = PassSpec(num_classes=10, batch=BATCH, image_size=image_size, stored=kept)
    return predict_memory(variant, one_pass, per_weight=per_weight)


def real_model(variant: Variant, stored: Sequence[str] | None) -> nn.Module:
    model = build_model(variant, num_classes=10).train().to(memory_format=torch.channels_last)
    if stored is not None:
        enable_recomputation(model, stored, variant=variant)
    return model


def real_step(model: nn.Module, image_size: int) -> None:
    """One pass on the CPU, with what it drops."""
    images = torch.rand(BATCH, 3, image_size, image_size)
    noise = draw_dropout_noise(
        model.noise_sizes, seed=0, first=0, images=BATCH, device=images.device
    )
    logits = model(images.to(memory_format=torch.channels_last), noise)
    F.cross_entropy(logits, torch.arange(BATCH)).backward()


def peak_of_tensors(model: nn.Module, image_size: int) -> int:
    """The most bytes that tensors of a real step have at once, weights apart."""
    with LiveBytes() as live:
        for tensor in (*model.parameters(), *model.buffers()):
            live.ignore(tensor)
        real_step(model, image_size)
    return live.peak


def peak_of_allocator(model: nn.Module, image_size: int) -> int:
    """The most bytes that torch's allocator gave out in a real step."""
    watched = {"profile_memory": True, "acc_events": True}  # without the last, torch 2.11 warns
    with profile(activities=[ProfilerActivity.CPU], **watched) as profiled:
        real_step(model, image_size)
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("stored", RECOMPUTED)
@pytest.mark.parametrize(
    ("name", "image_size"),
    [("resnet8", 32), ("resnet18", 64), ("resnet50", 64), ("efficientnet_b0", 64)],
)
def test_the_peak_is_that_of_a_real_steps_tensors(name, image_size, stored):
    variant, patterns = MODELS[name], RECOMPUTED[stored]
    real = peak_of_tensors(real_model(variant, patterns), image_size)
    found = predicted(variant, image_size, stored=patterns)
    buffers = found.weights
    assert found.peak - buffers == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize("stored", RECOMPUTED)
def test_the_peak_is_that_of_the_allocator(stored):
    variant, patterns = MODELS["resnet18"], RECOMPUTED[stored]
    found = predicted(variant, 64, BytesPerWeight(optimizer=0), stored=patterns)
    model = real_model(variant, patterns)
    real = peak_of_allocator(model, 64) + found.weights
    assert found.weights == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert found.peak == pytest.approx(real, rel=0.1)


def test_recomputation_keeps_less_and_peaks_lower():
    kept, units, convolutions = (
        predicted(MODELS["efficientnet_b0"], 64, replace(BARE, gradient=0), stored=stored)
        for stored in RECOMPUTED.values()
    )
    assert units.activations < convolutions.activations / 3 < kept.activations / 9 * 1.5
    assert max(units.peak, convolutions.peak) < kept.peak / 2


@pytest.mark.parametrize("half", [False, True])
def test_activations_are_those_that_are_counted_unit_by_unit(half):
    variant = MODELS["resnet50"]
    sizes = {"num_classes": 10, "batch": BATCH, "image_size": 64, "half": half}
    counted = sum(unit.activation_bytes for unit in count_units(variant, **sizes))
    copies = 2 * predicted(variant, 64, BytesPerWeight(optimizer=1)).optimizer if half else 0
    found = predict_memory(variant, PassSpec(**sizes), per_weight=BARE)
    assert found.activations == pytest.approx(counted + copies, rel=0.02)


def test_the_bytes_of_weights_are_told_apart():
    weights = 75_290  # of a ResNet-8 for ten classes
    found = predicted(RESNET8, 32, BytesPerWeight(weight=2, gradient=4, optimizer=8))
    assert (found.gradients, found.optimizer) == (4 * weights, 8 * weights)
    buffers = found.weights - 2 * weights
    assert buffers == 2 * 4 * sum(RESNET8.norm_channels().values()) + 8 * 7
    parts = found.weights + found.gradients + found.optimizer + found.activations + found.working
    assert parts == found.peak


def test_what_drop_path_keeps_is_counted():
    plain, dropping = (
        predicted(replace(RESNET8, drop_path=rate), 32).activations for rate in (0.0, 0.3)
    )
    # of two blocks, for the first is never dropped: the noise, and the factors it becomes
    assert dropping - plain == 2 * 2 * BATCH * 4


def test_gradients_of_earlier_passes_are_there_from_the_start():
    once, again = (predicted(RESNET8, 32, replace(BARE, accumulates=a)) for a in (False, True))
    assert once.peak < again.peak <= once.peak + once.gradients
    assert once.activations == again.activations


def test_an_update_with_large_temporaries_sets_the_peak():
    small = replace(BARE, optimizer=8)
    found = predicted(RESNET8, 32, replace(small, update=1000))
    assert found.peak == found.weights + found.gradients * (1 + 2 + 250)
    assert predicted(RESNET8, 32, small).peak < found.peak


def test_full_norms_and_half_are_told_apart():
    def peak(norm: Norm, *, half: bool) -> int:
        variant = replace(RESNET8, norm=norm)
        one_pass = PassSpec(num_classes=10, batch=BATCH, image_size=32, half=half)
        return predict_memory(variant, one_pass, per_weight=BARE).peak

    plain, full = Norm(), Norm(full_precision=True)
    assert peak(plain, half=True) < peak(full, half=True) < peak(plain, half=False)
    assert peak(full, half=False) == peak(plain, half=False)


def test_a_batch_that_cannot_be_trained_on_is_told():
    with pytest.raises(ConfigError, match=r"^a batch of 1 x 3 x 32 x 32 cannot be trained on: "):
        one_pass = PassSpec(num_classes=10, batch=1, image_size=32)
        predict_memory(MODELS["resnet50"], one_pass, per_weight=BytesPerWeight())


def test_live_bytes_are_those_of_storages():
    with LiveBytes(100) as live:
        first = torch.zeros(1000)
        assert live.bytes == 4100
        view = first[10:].view(-1)
        first.add_(1)
        assert live.bytes == 4100, "views and what is overwritten take nothing"
        del first
        assert live.bytes == 4100, "the view holds it"
        second = view.double()
        del view
        assert (live.bytes, live.peak) == (100 + second.nbytes, 4100 + second.nbytes)


# the peak of a step of each that was measured on an H200 (docs/bench/2026-11-gpu.md), in GB
MEASURED_FUSED = {
    "resnet50": (256, 224, 8.34),
    "resnext101_32x4d": (256, 224, 17.51),
    "efficientnet_b0": (256, 224, 5.91),
    "efficientnet_b4": (64, 380, 11.05),
}


@pytest.mark.parametrize("name", MEASURED_FUSED)
def test_units_with_kernels_of_their_own_are_counted_by_what_these_keep(name):
    batch, size, measured = MEASURED_FUSED[name]

    def fuse(model: UnitModel) -> None:
        assert not fuse_units(model, torch.bfloat16, interpreted=True), "a unit is left out"

    one_pass = PassSpec(num_classes=1000, batch=batch, image_size=size, half=True, fuse=fuse)
    found = predict_memory(MODELS[name], one_pass, per_weight=BytesPerWeight())
    assert found.peak == pytest.approx(measured * 1e9, rel=0.1)
