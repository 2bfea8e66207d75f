"""Fused units of EfficientNet against the plain modules: outputs, gradients, running statistics."""

import copy
import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from phalanx.catalog.efficientnets import InvertedBlock
from phalanx.catalog.models import MODELS
from phalanx.fused import mbconv_block
from phalanx.fused.enable import fuse_units
from phalanx.fused.mbconv_block import build_mbconv_block
from phalanx.models.build import build_model
from phalanx.models.efficientnet import DepthwiseSeparableConv, InvertedResidual

pytestmark = pytest.mark.usefixtures("first_tiles")

VARIANT = MODELS["efficientnet_b0"]
BLOCKS = {  # kernel, stride, channels in, width, channels out
    "widens, skips": (3, 1, 16, 96, 16),
    "widens, stride 2": (3, 2, 16, 72, 24),
    "5x5, skips": (5, 1, 24, 144, 24),
    "5x5, stride 2": (5, 2, 8, 48, 16),
    "does not widen": (3, 1, 32, 32, 16),
    "does not widen, skips": (3, 1, 24, 24, 24),
}


def make_block(name: str) -> nn.Module:
    kernel, stride, inside, width, out = BLOCKS[name]
    stage = 1 if name.startswith(("widens", "5x5")) else 0
    spec = InvertedBlock(stage, 0, inside, width, out, kernel, stride, width, 6)
    kind = InvertedResidual if stage else DepthwiseSeparableConv
    block = kind(spec, VARIANT, rate=0.3)
    for parameter in block.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
    return block.to(memory_format=torch.channels_last)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


def run(unit, module: nn.Module, x: Tensor, noise: Tensor | None) -> dict[str, Tensor]:
    """Output, gradients by name, and buffers after a pass in both directions."""
    x = x.clone().requires_grad_()
    y = unit(x, noise)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    y.backward(dy.to(y.device, y.dtype))
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"y": y.detach(), "x": x.grad} | gradients | dict(module.named_buffers())


def check(found: dict[str, Tensor], wanted: dict[str, Tensor], loose: float = 2e-5) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        own = found[name]
        assert own is not None and own.dtype == value.dtype and own.shape == value.shape, name
        largest = float(value.double().abs().max()) + 1e-12
        assert float((own.double() - value.double()).abs().max()) <= loose * largest, name


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("size", [(3, 6, 8), (2, 7, 9)], ids=str)
def test_a_block_is_its_modules(name, size):
    torch.manual_seed(0)
    plain = make_block(name)
    fused = copy.deepcopy(plain)
    n, h, w = size
    x, noise = draw(n, BLOCKS[name][2], h, w), torch.tensor([[0.1], [0.9], [0.4]])[:n]
    found = run(build_mbconv_block([fused], torch.float32), fused, x, noise)
    check(found, run(plain, plain, x, noise))
    for parameter in fused.parameters():
        assert parameter.grad.stride() == parameter.stride()
    assert found["y"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", ["widens, stride 2", "5x5, skips"])
def test_every_implementation_gives_the_same_result(name, monkeypatch):
    torch.manual_seed(0)
    taken = []

    def run_fastest(part, conv, x, implementations):
        last = list(implementations)[-1]
        taken.append(f"{part} {last}")
        return implementations[last]()

    monkeypatch.setattr(mbconv_block, "_run_fastest", run_fastest)
    plain = make_block(name)
    fused, x = copy.deepcopy(plain), draw(3, BLOCKS[name][2], 6, 7)
    found = run(build_mbconv_block([fused], torch.float32), fused, x, None)
    check(found, run(plain, plain, x, None))
    back = "own" if name.startswith("widens") else "cudnn"
    skips = name.endswith("skips")
    products = ["expand apart", "convolve own", f"convolve back {back}"]
    assert taken == [*products, f"expand back {skips} apart"]


def test_a_convolution_that_is_not_depthwise_is_left_to_cudnn():
    torch.manual_seed(0)
    spec = InvertedBlock(1, 0, 16, 64, 16, 3, 1, 16, 6)
    plain = InvertedResidual(spec, VARIANT).to(memory_format=torch.channels_last)
    fused, x = copy.deepcopy(plain), draw(3, 16, 6, 7)
    found = run(build_mbconv_block([fused], torch.float32), fused, x, None)
    check(found, run(plain, plain, x, None))


def test_a_block_without_noise_drops_nothing():
    torch.manual_seed(0)
    plain = make_block("widens, skips")
    fused, x = copy.deepcopy(plain), draw(3, 16, 6, 6)
    found = run(build_mbconv_block([fused], torch.float32), fused, x, None)
    check(found, run(plain, plain, x, None))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_a_block_in_16_bits_gives_float32_gradients(half):
    if half == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("Triton's interpreter has no products of bfloat16")
    torch.manual_seed(0)
    plain = make_block("widens, skips")
    fused, x = copy.deepcopy(plain), draw(4, 16, 8, 8)
    noise = torch.rand(4, 1)
    with torch.autocast("cpu", dtype=half):
        found = run(build_mbconv_block([fused], half), fused, x, noise)
    assert found["y"].dtype == half and found["x"].dtype == torch.float32
    found["y"] = found["y"].float()
    check(found, run(plain, plain, x, noise), 0.01 if half == torch.float16 else 0.08)


def small_model() -> nn.Module:
    variant = replace(VARIANT, width=0.25, depth=0.2)
    model = build_model(variant, num_classes=10)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("unit", ["stem", "head"])
def test_stem_and_head_are_their_modules(unit):
    torch.manual_seed(0)
    plain = small_model()
    fused = copy.deepcopy(plain)
    assert fuse_units(fused, torch.float32, interpreted=True) == {}
    x = draw(3, 3, 15, 14) if unit == "stem" else draw(3, fused.conv_head.in_channels, 3, 2)
    noise = {"drop": torch.rand(3, fused.noise_sizes["drop"])}
    results = []
    for model in (fused, plain):
        result = run(lambda image, _, own=model: own.run_unit(unit, image, noise), model, x, None)
        results.append({name: value for name, value in result.items() if value is not None})
    check(*results)
    assert unit == "head" or fused.conv_stem.weight.grad.stride() == fused.conv_stem.weight.stride()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"lite": True}, "it has ReLU6 for SiLU"),
        ({"padding": "same"}, "its convolution is SameConv2d"),
        ({"norm": replace(VARIANT.norm, type="group", groups=4)}, "its norm is GroupNorm"),
    ],
)
def test_other_variants_stay_plain_and_say_why(change, reason):
    with torch.device("meta"):
        model = build_model(replace(VARIANT, **change), num_classes=10)
    model.to(memory_format=torch.channels_last)
    reasons = fuse_units(model, torch.float32, interpreted=True)
    assert reasons["blocks/1/0"] == reason
    assert ("blocks/0/0" in reasons) == ("padding" not in change)  # stride 1 pads as it always does


def test_a_norm_that_is_frozen_is_left_to_the_modules():
    torch.manual_seed(0)
    plain = make_block("widens, skips")
    plain.bn2.eval()
    fused, x = copy.deepcopy(plain), draw(3, 16, 6, 6)
    found = run(build_mbconv_block([fused], torch.float32), fused, x, None)
    check(found, run(plain, plain, x, None), 0.0)


def test_an_image_with_too_few_pixels_for_statistics_is_left_to_the_modules():
    block = make_block("does not widen")
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        build_mbconv_block([block], torch.float32)(draw(1, 32, 1, 1), None)


def relative_errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """The square of each error's norm over that of the exact value."""
    return {
        name: float((found[name].double() - value).norm() / value.norm()) ** 2
        for name, value in exact.items()
        if value.is_floating_point()
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_errors_against_float64_are_at_most_those_of_plain_modules(name, half):
    """Over several draws together: a single one is luck."""
    own, plain_errors = {}, {}
    for seed in range(4):
        torch.manual_seed(seed)
        plain = make_block(name).cuda()
        for conv in plain.modules():
            if isinstance(conv, nn.Conv2d):  # to round them would be the same error for both
                conv.weight.data = conv.weight.data.to(half).float()
        fused, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
        x = draw(16, BLOCKS[name][2], 27, 28).cuda().to(half)
        noise = torch.rand(16, 1, device="cuda")
        wanted = run(exact, exact, x.double(), noise)
        with torch.autocast("cuda", dtype=half):
            found = run(build_mbconv_block([fused], half), fused, x, noise)
            usual = run(plain, plain, x, noise)
        for errors, result in ((own, found), (plain_errors, usual)):
            for key, error in relative_errors(result, wanted).items():
                errors[key] = errors.get(key, 0.0) + error
    # errors below 1e-4, a fifth of float16's rounding, are luck on both sides
    ratios = {key: (own[key] / plain_errors[key]) ** 0.5 for key in own if own[key] > 1e-8}
    print(name, half, {key: round(ratio, 2) for key, ratio in ratios.items()})
    assert max(ratios.values()) <= 1.1, ratios
