"""What scoring is made of, each against plain torch."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from phalanx.inference import conv_implementations as convs
from phalanx.inference import conv_ops as ops
from phalanx.inference import unit_ops as parts

interpreted = convs.runs_kernels(torch.zeros(1))
needs_triton = pytest.mark.skipif(
    not interpreted and not torch.cuda.is_available(), reason="needs a GPU or Triton's interpreter"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.float16


def image(*shape, dtype=HALF):
    torch.manual_seed(sum(shape))
    x = torch.randn(*shape).to(dtype)
    return x.to(DEVICE, memory_format=torch.channels_last)


def weight_for(wide, channels, kernel):
    return image(wide, channels, kernel, kernel) / (channels * kernel**2) ** 0.5


def near(found, wanted, tolerance=4e-3):
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    difference = (found.float() - wanted.float()).abs().max() / wanted.float().abs().max()
    assert difference < tolerance, float(difference)


def biases(wide):
    bias = torch.randn(wide, device=DEVICE)
    return [bias, bias.to(HALF)]


def convolve_reference(x, weights, biases, add, gate, geometry, act):
    stride, padding, groups = geometry
    x = x if gate is None else x * gate[:, :, None, None]
    y = F.conv2d(x, weights[0], None, stride, padding, 1, groups)
    if act == convs.RAW:
        return y
    y = y.float() + biases[0][:, None, None]
    return convs.ACTIVATIONS[act](y if add is None else y + add.float()).to(x.dtype)


CASES = {
    "1x1": (64, 64, 1, 1, 1),
    "1x1 of few channels": (24, 40, 1, 1, 1),
    "strided 1x1": (32, 64, 1, 2, 1),
    "3x3": (64, 64, 3, 1, 1),
    "strided 3x3": (64, 32, 3, 2, 1),
    "groups of 4": (64, 64, 3, 1, 16),
    "groups of 32": (64, 64, 3, 2, 2),
}


@needs_triton
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_way_to_a_convolution_agrees_with_torch(case):
    channels, wide, kernel, stride, groups = case
    x = image(2, channels, 7, 9)
    weight = weight_for(wide, channels // groups, kernel)
    weights = [w for w in (weight, ops.expand_groups(weight, groups)) if w is not None]
    bias, geometry = biases(wide), convs.Geometry(stride, kernel // 2, groups)
    out = convolve_reference(x, weights, bias, None, None, geometry.pack(), convs.NONE)
    add, gate = torch.randn_like(out), torch.rand(2, channels, device=DEVICE).to(HALF)
    acts = (convs.RELU, convs.SILU, convs.RELU6, convs.RAW)
    for added, gated, act in [*product((None, add), (None,), acts), (add, gate, convs.NONE)]:
        if gated is not None and (kernel > 1 or groups > 1):
            continue
        args = (x, weights, bias, None if act == convs.RAW else added, gated)
        wanted = convolve_reference(*args, geometry.pack(), act)
        layer = convs.Convolution(*args, geometry, act)
        for name, run in layer.list_implementations(torch.full_like(out, float("nan"))).items():
            near(run(), wanted), name
        near(ops.convolve_and_activate(*args, geometry.pack(), act), wanted)


@needs_triton
@pytest.mark.parametrize("tile", range(len(convs.SMALL_TILES)))
def test_every_small_tile_agrees_and_leaves_the_counters_at_zero(tile, monkeypatch):
    only = convs.SMALL_TILES[tile]
    monkeypatch.setattr(convs.Convolution, "_choose_tile", lambda *_, **__: only)
    x, weight, bias = image(1, 128, 7, 7), weight_for(72, 128, 3), biases(72)
    args, geometry = (x, [weight], bias, None, None), convs.Geometry(1, 1, 1)
    wanted = convolve_reference(*args, geometry.pack(), convs.RELU)
    for _ in range(2):
        out = torch.full_like(wanted, float("nan"))
        near(
            convs.Convolution(*args, geometry, convs.RELU).list_implementations(out)[
                "implicit_gemm"
            ](),
            wanted,
        )
    assert not convs.find_split_counters(x.device).any()


@needs_triton
@pytest.mark.parametrize("channels", [64, 128])
def test_rows_keep_their_weights(channels, monkeypatch):
    monkeypatch.setattr(convs, "_SMALL", 0)
    x, weight = image(3, channels, 9, 9), weight_for(64, channels, 1)
    add = image(3, 64, 9, 9)
    args, geometry = (x, [weight], biases(64), add, None), convs.Geometry()
    wanted = convolve_reference(*args, geometry.pack(), convs.RELU)
    layer = convs.Convolution(*args, geometry, convs.RELU)
    found = layer.list_implementations(torch.full_like(add, float("nan")))
    near(found["rows"](), wanted)
    for name in {"tma", "cublas", "cudnn"} & {*found}:
        near(found[name](), wanted)


@needs_triton
def test_a_row_of_blocks_lies_in_one_piece():
    x, weight = image(2, 16, 9, 11), weight_for(24, 16, 4)
    args, geometry = (x, [weight], biases(24), None, None), convs.Geometry()
    wanted = convolve_reference(*args, geometry.pack(), convs.RELU)
    layer = convs.Convolution(*args, geometry, convs.RELU)
    near(
        layer.list_implementations(torch.full_like(wanted, float("nan")))["implicit_gemm"](), wanted
    )


@needs_triton
@pytest.mark.parametrize("shape", [(3, 40, 7, 7), (2, 64, 5, 3)])
def test_average(shape):
    x = image(*shape)
    near(parts.average_pixels(x), x.float().mean((2, 3)).to(HALF))


def test_a_sum_is_split_only_where_every_tile_has_a_counter():
    weight = torch.empty(8, 512, 3, 3, device="meta")
    layer = convs.Convolution(weight, [weight], [], None, None, convs.Geometry(1, 1, 1), convs.RELU)
    few, many = (layer._choose_tile(49, wide, large=False) for wide in (512, 1 << 20))
    assert (few["SPLITS"], many["SPLITS"]) == (8, 1)


@needs_triton
@pytest.mark.parametrize(("size", "kernel"), [*product([(8, 12), (9, 7)], [3, 7])])
def test_a_stem_after_space_to_depth_is_the_strided_convolution(size, kernel):
    x, weight = image(2, 3, *size, dtype=torch.float32), weight_for(16, 3, kernel).float()
    blocks_weight, padding = parts.rearrange_stem_weight(weight.to(HALF))
    blocks = parts.empty_space_to_depth(x, padding, HALF)
    parts.space_to_depth(x, blocks, padding)
    assert torch.equal(blocks, parts.space_to_depth_reference(x, padding, HALF))
    wanted = F.conv2d(x.to(HALF).double(), weight.to(HALF).double(), None, 2, kernel // 2)
    near(F.conv2d(blocks.double(), blocks_weight.double()), wanted, 1e-6)


@needs_triton
def test_a_stem_whose_blocks_no_32_bit_offset_reaches_is_left_to_torch(monkeypatch):
    launched, padding = [], (2, 1)
    x = image(2, 3, 8, 12, dtype=torch.float32)
    blocks = parts.empty_space_to_depth(x, padding, HALF)  # more elements than x
    monkeypatch.setattr(convs, "_LARGEST", blocks.numel())
    monkeypatch.setattr(parts, "launch_kernel", lambda kernel, *_, **__: launched.append(kernel))
    parts.space_to_depth(x, blocks, padding)
    assert not launched and x.numel() < blocks.numel()
    assert torch.equal(blocks, parts.space_to_depth_reference(x, padding, HALF))


@needs_triton
@pytest.mark.parametrize("size", [(8, 12), (9, 7)])
def test_activation_and_pool(size):
    x, bias = image(2, 24, *size), torch.randn(24, device=DEVICE)
    for act in (convs.RELU, convs.NONE):
        near(parts.activate_and_pool(x, bias, act), parts.pool_reference(x, bias, act))
