"""Each unit's error on a GPU, beside that of its modules under autocast."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from phalanx.catalog.models import MODELS
from phalanx.catalog.resnets import ResNetVariant
from phalanx.catalog.variant import Norm
from phalanx.fused.enable import fuse_units
from phalanx.models.build import build_model, initialise_weights

pytestmark = [
    pytest.mark.usefixtures("first_tiles"),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BASIC = ResNetVariant(image_size=32, block="basic", depths=(2, 1), widths=(64, 128), stem="large")
BOTTLENECK = replace(BASIC, block="bottleneck")
NETWORKS = {
    "basic": BASIC,
    "shortcut A": replace(BASIC, stem="small", shortcut="A"),
    "bottleneck": BOTTLENECK,
    "resnext": replace(BOTTLENECK, groups=32, group_width=4),
    "fast": replace(MODELS["resnet9"], widths=(64, 128, 256)),
    "airbench": MODELS["airbench94"],
    "basic, groups": replace(BASIC, norm=Norm(type="group", groups=32)),
    "fast, groups": replace(
        MODELS["resnet9"], widths=(64, 128, 256), norm=Norm(type="group", groups=16)
    ),
}
DRAWS = 12  # of few, which ReLUs rounding flips is a matter of luck


def a_network(variant, half):
    """With weights that 16 bits hold, so that rounding them is no error of either side."""
    model = build_model(variant, num_classes=10)
    initialise_weights(model, 3, zero_residual=False)
    torch.manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.weight.data = module.weight.data.to(half).float()
        if isinstance(module, nn.BatchNorm2d | nn.GroupNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    return model.to("cuda", memory_format=torch.channels_last).train()


@torch.no_grad()
def find_shapes(model, units):
    """The shape of the input of each of these units."""
    shapes, x = {}, torch.zeros(32, 3, 32, 32, device="cuda")
    for unit in model.units:
        shapes[unit], x = x.shape, model.run_unit(unit, x)
    return {unit: shape for unit, shape in shapes.items() if unit in units}


def run_unit(model, unit, x, dy, dtype):
    """Output and gradients of one unit; the output in 16 bits, though group norm gives 32."""
    model.zero_grad()
    x = x.detach().to(dtype).requires_grad_(unit != "stem")
    y = model.run_unit(unit, x)
    if y.requires_grad:  # the first layer of airbench has nothing to learn
        y.backward(dy.to(y.dtype))
    own = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach().to(dtype)} | ({"dx": x.grad} if x.requires_grad else {}) | own


def add_errors(total, found, wanted):
    for name, value in wanted.items():
        error = (found[name].double() - value).norm() / value.norm()
        total[name] = total.get(name, 0.0) + float(error) / DRAWS


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("variant", NETWORKS.values(), ids=NETWORKS)
def test_a_units_error_is_no_larger_than_that_of_its_modules(variant, half):
    plain = a_network(variant, half)
    exact, fused = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    assert not fuse_units(fused, half).keys() - {"head", "stem"}
    fused.fused.pop("head", None)
    too_large = {}
    for unit, shape in find_shapes(plain, fused.fused).items():
        ours, torchs = {}, {}
        for seed in range(DRAWS):
            draws = torch.Generator("cuda").manual_seed(seed)
            x = torch.randn(shape, generator=draws, device="cuda").to(half)
            x = x.contiguous(memory_format=torch.channels_last)
            x = x if unit == "stem" else x.relu()
            with torch.no_grad():
                out = exact.run_unit(unit, x.double())
            dy = torch.randn(out.shape, generator=draws, device="cuda").to(half)
            dy = dy.contiguous(memory_format=torch.channels_last)
            wanted = run_unit(exact, unit, x, dy, torch.float64)
            add_errors(ours, run_unit(fused, unit, x, dy, half), wanted)
            with torch.autocast("cuda", half):
                add_errors(torchs, run_unit(plain, unit, x, dy, half), wanted)
        rows = {name: (ours[name], torchs[name]) for name in ours}
        for name, (mine, theirs) in rows.items():
            print(f"{unit} {name}: {mine:.2e} {theirs:.2e} {mine / theirs:.3f}")
            if mine > 1.1 * theirs:
                too_large[f"{unit} {name}"] = f"{mine:.2e} against {theirs:.2e}"
    assert not too_large
