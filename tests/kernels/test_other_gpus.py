"""The kernels are compiled for GPUs that this machine does not have, and fit into their memory.

Needs Triton and no GPU (`make kernels`). A compiler's word stands in for a launch: as Triton does,
it is refused where the kernel needs more shared memory than the GPU has. Results mean nothing.
"""

import os
import pkgutil
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch

import phalanx
from phalanx.catalog.models import MODELS
from phalanx.engine.dynamic_loss_scale import DynamicLossScale
from phalanx.engine.fused_update import DeviceLossScale, FusedUpdate
from phalanx.fused.enable import fuse_units
from phalanx.fused.mbconv_block import build_mbconv_block
from phalanx.inference.folded_model import FoldedModel
from phalanx.inference.gpu_layers import choose_gpu_layers
from phalanx.kernels import gpu
from phalanx.kernels.choices import CHOICES
from phalanx.models.build import build_model
from phalanx.models.efficientnet import InvertedResidual
from phalanx.models.units import find_noise_sizes
from phalanx.optim.build import build_optimizer
from small_steps import RULES, give_gradients, settings_of, toy

triton = pytest.importorskip("triton", reason="needs Triton: `make kernels` installs it")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="kernels are interpreted here"),
]


GPUS = {  # compute capability, multiprocessors, KiB of shared memory for one program
    "A100": (80, 108, 163),
    "L4, RTX 30 and 40": (89, 58, 99),
    "H100, H200": (90, 132, 227),
    "B200": (100, 148, 227),
    "RTX 50": (120, 170, 99),
}


class Compiler:
    """Stands in for Triton's driver and for every launch of a kernel."""

    def __init__(self, capability: int, shared_bytes: int):
        self.target = import_module("triton.backends.compiler").GPUTarget("cuda", capability, 32)
        self.capability, self.shared_bytes = capability, shared_bytes
        self.compiled = set()
        self._compile = triton.runtime.jit.JITFunction.run

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.capability  # a number of its own: compiled kernels are kept for each device

    def get_current_stream(self, device):
        return 0

    def run(self, kernel, *args, grid, warmup, **options):
        """In the place of `JITFunction.run`: compiles, and refuses what the GPU has no room for."""
        found = self._compile(kernel, *args, grid=grid, warmup=True, **options)
        needed = found.metadata.shared
        self.compiled.add((kernel.__name__, found.hash))
        if needed > self.shared_bytes and not warmup:
            error = import_module("triton.runtime.errors").OutOfResources
            raise error(needed, self.shared_bytes, "shared memory")
        return found


@pytest.fixture(params=GPUS)
def compiler(request, monkeypatch, tmp_path_factory):
    for module in pkgutil.walk_packages(phalanx.__path__, "phalanx."):
        if module.name.endswith("_fused"):
            import_module(module.name)
    capability, multiprocessors, shared_kib = GPUS[request.param]
    found = Compiler(capability, shared_kib * 2**10)
    here = gpu.Gpu(multiprocessors, found.shared_bytes, has_tma=capability >= 90)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # tensors on the CPU are as good as any
    monkeypatch.setattr(gpu, "_INTERPRETER", here)
    monkeypatch.setattr("phalanx.products.product_fused._is_interpreted", lambda: False)
    monkeypatch.setattr(CHOICES, "measures", False)

    def run(kernel, *args, **options):
        return found.run(kernel, *args, **options)

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", run)
    active = triton.runtime.driver._active
    triton.runtime.driver.set_active(found)
    yield found
    triton.runtime.driver._active = active


def a_model(name):
    model = build_model(MODELS[name], num_classes=1000)
    return model.to(memory_format=torch.channels_last)


def images(count, size):
    return torch.zeros(count, 3, size, size).to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("name", "half"),
    [
        ("resnet50", torch.float16),
        ("resnext50_32x4d", torch.bfloat16),
        ("resnet18", torch.bfloat16),
        ("airbench94", torch.float16),
        ("efficientnet_b0", torch.bfloat16),
    ],
)
def test_every_unit_trains(compiler, name, half):
    model = a_model(name)
    assert not fuse_units(model, half, interpreted=True).keys() - {"head"}
    noise = {path: torch.ones(16, size) for path, size in find_noise_sizes(model).items()}
    with torch.autocast("cpu", dtype=half):
        logits = model(images(16, 64), noise) if noise else model(images(16, 64))
    logits.float().sum().backward()
    assert len(compiler.compiled) > 5
    assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)


BLOCKS = {  # of EfficientNets
    "widest": (MODELS["efficientnet_b7"], -1),
    "narrowest": (replace(MODELS["efficientnet_cifar"], expand_ratio=1), 1),
}


@pytest.mark.parametrize(("variant", "place"), BLOCKS.values(), ids=BLOCKS)
def test_blocks_of_any_width_train(compiler, variant, place):
    spec = variant.blocks[place]
    block = InvertedResidual(spec, variant).to(memory_format=torch.channels_last)
    x = torch.zeros(16, spec.channels_in, 4, 4).to(memory_format=torch.channels_last)
    build_mbconv_block([block], torch.float16)(x.requires_grad_(), None).sum().backward()
    assert len(compiler.compiled) > 10


@pytest.mark.parametrize("count", [1, 256])
@pytest.mark.parametrize("name", ["resnet50", "resnext50_32x4d", "efficientnet_b0"])
def test_every_unit_scores(compiler, name, count):
    model = a_model(name).eval()
    folded = FoldedModel(model, choose_gpu_layers(torch.float16))
    folded.refresh()
    with torch.no_grad():
        assert folded(images(count, 64)).shape == (count, 1000)
    assert not folded.unfolded_units and len(compiler.compiled) > 10


def test_what_makes_batches_and_updates_weights(compiler):
    kernels = [import_module(f"phalanx.kernels.{name}_fused") for name in ("shift", "crop_resize")]
    images, crops = torch.zeros(2, 12, 12, 3, dtype=torch.uint8), torch.zeros(4, 2).int()
    kernels[0].shift_fused(images, crops, reflects=True)
    kernels[1].crop_and_resize_fused([*images.permute(0, 3, 1, 2)], np.ones((2, 5), "f4"), 8)
    rounding = import_module("phalanx.kernels.rounding_fused")
    for half in (torch.float16, torch.bfloat16):
        pair = [torch.zeros(9)], [torch.zeros(9, dtype=half)]
        rounding.round_fused(*pair, pair[1], keys=[1], saturate=True, stochastic=True)
    for rule in RULES[:-2]:  # all that are fused
        model, scaler = toy(), DeviceLossScale(DynamicLossScale(8.0), torch.device("cpu"))
        give_gradients(model, 0)
        optimizer = build_optimizer(model, settings_of(rule))
        FusedUpdate(optimizer, scaler=scaler).apply(1, 0.1, 1.0)
    update = {"sum_squares", "finish_gradient_norm", "_update"}
    found = {name for name, _ in compiler.compiled}
    assert found == {"_shift", "_crop_and_resize", "_round", *update}
