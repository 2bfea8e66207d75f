"""Bottleneck blocks by products that know their norms, against the plain modules in float64.

With TRITON_INTERPRET=1 and Triton installed the tests on the CPU run the fused kernels.
"""

import os
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn

import phalanx.fused.bottleneck as fused_bottleneck
from phalanx.catalog.models import MODELS
from phalanx.catalog.resnets import Block
from phalanx.fused.bottleneck import build_folded_bottleneck
from phalanx.fused.module_checks import UnitNotFused
from phalanx.kernels.choices import CHOICES
from phalanx.models.resnet import Bottleneck

pytestmark = pytest.mark.usefixtures("untimed")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
gpu_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
RESNET = MODELS["resnet50"]
LAYOUTS = {
    "plain": Block(1, 1, 256, 64, 256, 1),
    "projected": Block(1, 0, 64, 64, 256, 1),
    "strided": Block(2, 0, 128, 64, 256, 2),
    "wide shortcut": Block(2, 0, 128, 64, 256, 2),  # as if its Gram matrix were too wide
    "grouped": Block(1, 1, 256, 128, 256, 1),
}


def a_block(layout, *, seed=0, variant=RESNET, rate=0.0):
    if layout == "grouped":
        variant = replace(variant, groups=32)
    block = Bottleneck(LAYOUTS.get(layout, layout), variant, rate=rate)
    random = torch.Generator().manual_seed(seed)
    for module in block.modules():
        if isinstance(module, nn.Conv2d):
            fan = module.weight[0].numel()
            module.weight.data.normal_(0, (2 / fan) ** 0.5, generator=random)
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data.normal_(1, 0.2, generator=random)
            module.bias.data.normal_(0, 0.2, generator=random)
            module.running_mean.normal_(generator=random)
    return block.to(memory_format=torch.channels_last).train()


def an_image(*shape, seed=1):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.contiguous(memory_format=torch.channels_last)


def run_plain(blocks, x, dy, dtype=torch.float64):
    """Output, the input's gradient, those of the weights and the statistics."""
    model = nn.Sequential(*(deepcopy(block) for block in blocks)).to(dtype)
    x = x.to(dtype).requires_grad_()
    return collect(model, x, model(x), dy)


def run_fused(blocks, x, dy, half=torch.float32):
    model = nn.Sequential(*(deepcopy(block) for block in blocks))
    x = y = x.clone(memory_format=torch.channels_last).requires_grad_()
    for block in model:
        y = build_folded_bottleneck([block], half)(y, None)
    return collect(model, x, y, dy)


def by_kernels(function):
    return lambda x: function(x, None)


def collect(model, x, y, dy):
    (y.to(dy.dtype) * dy).sum().backward()
    weights = {f"{name}'s gradient": weight.grad for name, weight in model.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **weights, **dict(model.named_buffers())}


def a_gradient(blocks, x, seed=2):
    block = blocks[-1]
    strides = [b.conv2.stride[0] for b in blocks]
    size = -(-x.shape[2] // max(strides))
    return an_image(len(x), block.conv3.out_channels, size, size, seed=seed)


def error(found, wanted):
    return float((found.double() - wanted).norm() / wanted.double().norm().clamp_min(1e-30))


def check(found, wanted, limit=2e-5):
    assert set(found) == set(wanted)
    for name, value in found.items():
        assert value.shape == wanted[name].shape, name
        assert error(value, wanted[name]) < limit, name


@pytest.fixture
def masked(monkeypatch):
    """How often a block masked its gradient by itself."""
    calls = []
    plain = fused_bottleneck.mask_gradient

    def counted(dy, bits):
        calls.append(dy.shape)
        return plain(dy, bits)

    monkeypatch.setattr(fused_bottleneck, "mask_gradient", counted)
    return calls


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_is_its_modules(layout, monkeypatch):
    if layout == "wide shortcut":
        monkeypatch.setattr(fused_bottleneck, "_WIDEST_GRAM", 64)
    block, x = a_block(layout), an_image(2, LAYOUTS[layout].channels_in, 5, 5)
    dy = a_gradient([block], x)
    check(run_fused([block], x, dy), run_plain([block], x, dy))


def test_both_ways_of_the_first_convolution_are_the_same(monkeypatch):
    block, x = a_block("plain"), an_image(2, 256, 4, 4)
    dy = a_gradient([block], x)
    monkeypatch.setattr(
        CHOICES, "find_fastest", lambda _, implementations: list(implementations)[-1]
    )
    check(run_fused([block], x, dy), run_plain([block], x, dy))


def test_blocks_in_a_row_pass_their_gradients_masked(masked):
    blocks = [a_block("projected"), a_block("plain", seed=3), a_block("plain", seed=4)]
    blocks.append(a_block(Block(2, 0, 256, 64, 256, 2), seed=5))
    x = an_image(2, 64, 5, 5)
    dy = a_gradient(blocks, x)
    check(run_fused(blocks, x, dy), run_plain(blocks, x, dy))
    assert len(masked) == 1, "only the last block has none above it"


def test_an_output_that_others_use_is_masked_again(masked):
    blocks, x = [a_block("projected"), a_block("plain", seed=3)], an_image(2, 64, 4, 4)
    plain, own = nn.Sequential(*deepcopy(blocks)).double(), nn.Sequential(*deepcopy(blocks))
    first, second = (build_folded_bottleneck([block], torch.float32) for block in own)
    results = []
    for model, one, two in ((plain, *plain), (own, by_kernels(first), by_kernels(second))):
        start = x.to(next(model.parameters()).dtype, copy=True).requires_grad_()
        middle = one(start)
        (two(middle).sum() + (middle * middle).sum()).backward()
        results.append({"dx": start.grad, **{n: p.grad for n, p in model.named_parameters()}})
    check(results[1], results[0], limit=1e-4)
    assert len(masked) == 2


def test_a_gate_that_is_lost_does_no_harm(masked):
    blocks, x = [a_block("projected"), a_block("plain", seed=3)], an_image(2, 64, 4, 4)
    model = nn.Sequential(*(deepcopy(block) for block in blocks))
    own = x.clone(memory_format=torch.channels_last).requires_grad_()
    first, second = (build_folded_bottleneck([block], torch.float32) for block in model)
    between = first(own, None) * 1.0
    dy = a_gradient(blocks, x)
    check(collect(model, own, second(between, None), dy), run_plain(blocks, x, dy))
    assert len(masked) == 2


def test_gradients_of_two_passes_add_up():
    block = a_block("strided")
    own, plain = deepcopy(block), deepcopy(block).double()
    function = build_folded_bottleneck([own], torch.float32)
    for seed in (5, 6):
        x = an_image(2, 128, 5, 5, seed=seed)
        dy = a_gradient([block], x, seed=seed + 2)
        function(x.requires_grad_(), None).backward(dy)
        plain(x.detach().double()).backward(dy.double())
    for (name, found), wanted in zip(own.named_parameters(), plain.parameters(), strict=True):
        assert error(found.grad, wanted.grad) < 2e-5, name
        assert found.grad.is_contiguous(memory_format=torch.channels_last) or found.ndim == 1
    assert own.bn1.num_batches_tracked == own.bn3.num_batches_tracked == 2


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (a_block("plain", rate=0.1), "it drops paths"),
        (a_block(Block(1, 1, 128, 32, 128, 1)), "its channels are no multiples of 64"),
        (a_block("strided", variant=replace(RESNET, stride_in="1x1")), "its first convolution"),
        (a_block("strided", variant=replace(RESNET, shortcut="A")), "its shortcut has no weights"),
        (a_block("strided", variant=replace(RESNET, padding="same")), "SameConv2d"),
    ],
)
def test_other_blocks_are_left_alone(block, reason):
    with pytest.raises(UnitNotFused, match=reason):
        build_folded_bottleneck([block], torch.float16)


@pytest.mark.parametrize("why", ["too large", "frozen norm"])
def test_what_kernels_cannot_do_the_modules_do(why, monkeypatch, masked):
    block, x = a_block("plain"), an_image(2, 256, 4, 4)
    if why == "too large":
        monkeypatch.setattr(fused_bottleneck, "_MOST_ELEMENTS", 32 * 256)
    else:
        block.bn2.eval()
    own = deepcopy(block)
    assert torch.equal(build_folded_bottleneck([own], torch.float32)(x, None), block(x))


# --- on the GPU ---

DRAWS = 8  # which ReLUs rounding flips is a matter of luck
GPU_LAYOUTS = {
    "plain": Block(1, 1, 256, 64, 256, 1),
    "projected": Block(1, 0, 64, 64, 256, 1),
    "strided": Block(2, 0, 256, 128, 512, 2),
    "wide shortcut": Block(4, 0, 1024, 512, 2048, 2),
}


def halve(model, half):
    """Weights of convolutions that 16 bits hold exactly, so that all sides have the same."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.weight.data.copy_(module.weight.data.to(half).float())
    return model


def draw(layout, half, seed):
    block = halve(a_block(layout, seed=seed), half).cuda()
    x = an_image(8, layout.channels_in, 24, 24, seed=10 + seed).relu().to(half).cuda()
    return block, x, a_gradient([block], x, seed=20 + seed).to(half).cuda()


@pytest.fixture(scope="module")
def compiled():
    """The first tile of every kernel, compiled several at a time: all tiles take minutes."""

    def run():
        for half in (torch.float16, torch.bfloat16):
            for layout in GPU_LAYOUTS.values():
                block, x, dy = draw(layout, half, 0)
                run_fused([block], x, dy, half)

    every = CHOICES.launch_fastest
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CHOICES, "launch_fastest", lambda launches: every(launches[:1]))
        CHOICES.compile_all(run)
        yield


def draw_errors(layout, half, seed):
    """The errors of kernels and of plain torch against float64, by name."""
    block, x, dy = draw(layout, half, seed)
    exact, own = run_plain([block], x, dy), run_fused([block], x, dy, half)
    model = nn.Sequential(deepcopy(block))
    plain_x = x.detach().clone(memory_format=torch.channels_last).requires_grad_()
    with torch.autocast("cuda", half):
        y = model(plain_x)
    plain = collect(model, plain_x, y, dy)
    return {
        name: (error(own[name], exact[name]), error(plain[name], exact[name])) for name in exact
    }


@pytest.mark.gpu
@gpu_only
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", GPU_LAYOUTS)
def test_a_block_errs_no_more_than_torch(layout, half, compiled):
    draws = [draw_errors(GPU_LAYOUTS[layout], half, seed) for seed in range(DRAWS)]
    ratios = {}
    for name in draws[0]:
        own, plain = (sum(draw[name][i] ** 2 for draw in draws) ** 0.5 for i in range(2))
        ratios[name] = own / max(plain, 1e-5 * DRAWS**0.5)
    print({name: round(ratio, 3) for name, ratio in ratios.items()})
    assert max(ratios.values()) <= 1.1, max(ratios, key=lambda name: ratios[name])
