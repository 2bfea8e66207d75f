"""What inverted blocks are scored by, each against plain torch: products, depthwise, gates.

With TRITON_INTERPRET=1 and Triton installed the tests on the CPU run the kernels.
"""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from phalanx.inference import conv_implementations as convs
from phalanx.inference import depthwise_ops as ops

TILES = [*convs.LARGE_TILES, *convs.SMALL_TILES]
HALVES = [torch.float16, torch.bfloat16]
interpreted = pytest.mark.skipif(
    not convs.runs_kernels(torch.zeros(1)), reason="needs Triton's interpreter"
)
gpu_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = [
    pytest.param("cpu", marks=interpreted),
    pytest.param("cuda", marks=[pytest.mark.gpu, gpu_only]),
]
PRODUCTS = [  # Triton's interpreter multiplies bfloat16 as whole numbers
    pytest.param("cpu", torch.float16, marks=interpreted),
    *(pytest.param("cuda", half, marks=[pytest.mark.gpu, gpu_only]) for half in HALVES),
]


def image(*shape, half=torch.float16, device="cpu"):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    return x.to(device, half, memory_format=torch.channels_last)


def near(found, wanted, tolerance=1.0):
    """Whether the error is about that of rounding."""
    assert found.shape == wanted.shape and found.isfinite().all()
    error = (found.double() - wanted.double()).norm() / wanted.double().norm()
    half = found.dtype if found.dtype in HALVES else torch.float16
    assert error < tolerance * torch.finfo(half).eps, float(error)


class Filter:
    """A depthwise convolution."""

    def __init__(self, x, kernel, stride):
        channels, (half, device) = x.shape[1], (x.dtype, x.device)
        weight = image(channels, 1, kernel, kernel, half=half, device=device) / kernel
        bias = torch.randn(channels, generator=torch.Generator().manual_seed(1)).to(device)
        whole = weight[:, 0].permute(1, 2, 0).contiguous()
        self.args = (x, [weight, whole], bias, [stride, kernel // 2], convs.SILU)

    def compute_exactly(self):
        x, (weight, _), bias, (stride, padding), _ = self.args
        y = F.conv2d(x.double(), weight.double(), bias.double(), stride, padding, 1, x.shape[1])
        return F.silu(y), F.silu(y).sum((2, 3))

    def check(self):
        wanted, totals = self.compute_exactly()
        y, sums = ops.convolve_depthwise(*self.args)
        assert y.dtype == self.args[0].dtype and sums.dtype == torch.float32
        near(y, wanted)
        near(sums.sum(1), totals, 0.1)
        again, sums_again = ops.convolve_depthwise(*self.args)
        assert torch.equal(y, again) and torch.equal(sums, sums_again)
        return sums.shape[1]


def note_launches(monkeypatch, module):
    """The names of kernels that a module launches, with their flags."""
    found = []

    def note(kernel, grid, args, tile, **flags):
        found.append((kernel.rsplit(".", 1)[1], tile, flags))
        convs.launch_kernel(kernel, grid, args, tile, **flags)

    monkeypatch.setattr(module, "launch_kernel", note)
    return found


SIZES = [(1, 8, 1, 1), (1, 24, 5, 3), (2, 40, 7, 11)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("loop", [0, 1])
@pytest.mark.parametrize(("kernel", "stride"), [*product([3, 5], [1, 2])])
def test_depthwise_agrees_with_torch(kernel, stride, loop, half, device, monkeypatch):
    monkeypatch.setattr(ops, "_FEW_PROGRAMS", 0 if loop else 1 << 30)
    monkeypatch.setattr(ops, "_FEW_SEEN_ROWS", 0)
    found = note_launches(monkeypatch, ops)
    for size in SIZES:
        Filter(image(*size, half=half, device=device), kernel, stride).check()
    assert {flags["LOOP"] for _, _, flags in found} == {loop}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("programs", "parts"), [(1, 1), (8, 2), (1 << 20, 3)])
def test_a_depthwise_program_takes_several_blocks(programs, parts, device, monkeypatch):
    monkeypatch.setattr(ops, "_MANY_PROGRAMS", programs)
    layer = Filter(image(2, 72, 9, 11, device=device), 3, 1)
    assert layer.check() == parts  # three blocks of an image's strips, three of channels


@pytest.mark.parametrize("device", DEVICES)
def test_columns_one_by_one_or_all_at_once_give_the_same_bits(device, monkeypatch):
    layer = Filter(image(2, 40, 9, 11, device=device), 5, 2)
    flat = ops.convolve_depthwise(*layer.args)
    monkeypatch.setattr(ops, "_FEW_PROGRAMS", 0)
    for mine, theirs in zip(ops.convolve_depthwise(*layer.args), flat, strict=True):
        assert torch.equal(mine, theirs)


def a_gate(channels, squeezed, half, device):
    generator = torch.Generator().manual_seed(channels)
    shapes = (squeezed, channels), (squeezed,), (channels, squeezed), (channels,)
    w1, b1, w2, b2 = (torch.randn(s, generator=generator).to(device) for s in shapes)
    return [(w1 / channels**0.5).to(half), b1, (w2 / squeezed**0.5).to(half), b2]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    ("images", "parts", "channels", "squeezed"),
    [
        *((1, 1, 8, 2), (3, 1, 40, 10), (2, 5, 600, 25), (2, 20, 72, 4), (1, 70, 264, 128)),
        *((1, 600, 24, 6), (2, 3, 1152, 48), (1, 2, 2688, 112), (1, 2, 4104, 5)),
    ],
)
def test_gates_of_any_number_of_sums_and_channels(
    images, parts, channels, squeezed, half, device, monkeypatch
):
    found = note_launches(monkeypatch, ops)
    generator = torch.Generator().manual_seed(parts)
    sums = torch.randn(images, parts, channels, generator=generator).to(device) * 50
    weights = a_gate(channels, squeezed, half, device)
    gate = ops.squeeze_and_excite(sums, weights, 50 * parts, half)
    wide = [weight.double() for weight in weights]
    hidden = F.silu(F.linear(sums.double().sum(1) / (50 * parts), *wide[:2]))
    near(gate, F.linear(hidden, *wide[2:]).sigmoid())
    assert torch.equal(gate, ops.squeeze_and_excite(sums, weights, 50 * parts, half))
    assert len(found) == (4 if parts == 1 else 6)


class Gated:
    """A 1x1 convolution of gated images with a residual."""

    def __init__(self, images, channels, wide, size, half, device):
        self.x = image(images, channels, *size, half=half, device=device)
        weight = image(wide, channels, 1, 1, half=half, device=device) / channels**0.5
        self.weight = weight.contiguous(memory_format=torch.channels_last)
        self.add = image(images, wide, *size, half=half, device=device)
        generator = torch.Generator().manual_seed(2)
        self.bias = torch.randn(wide, generator=generator).to(device)
        self.gate = torch.rand(images, channels, generator=generator).to(device, half)

    def compute_exactly(self):
        x = self.x.double() * self.gate.double()[:, :, None, None]
        return F.conv2d(x, self.weight.double(), self.bias.double()) + self.add.double()

    def make(self):
        biases = [self.bias, self.bias.to(self.x.dtype)]
        rest = (self.add, self.gate, convs.Geometry(), convs.NONE)
        return convs.Convolution(self.x, [self.weight], biases, *rest)

    def run(self):
        out = torch.full_like(self.add, float("nan"))
        return self.make().list_implementations(out)["implicit_gemm"]()


@pytest.mark.parametrize(("device", "half"), PRODUCTS)
@pytest.mark.parametrize("tile", range(len(convs.GATED_TILES)))
def test_every_gated_tile_agrees(tile, half, device, monkeypatch):
    only = convs.GATED_TILES[tile]
    monkeypatch.setattr(convs.Convolution, "_choose_tile", lambda *_, **__: only)
    cases = [(1, 256, 24, (7, 7)), (3, 264, 72, (9, 11)), (2, 320, 8, (1, 3))]
    for images, channels, wide, size in cases:
        layer = Gated(images, channels, wide, size, half, device)
        found = layer.run()
        near(found, layer.compute_exactly())
        assert torch.equal(found, layer.run())
    assert not convs.find_split_counters(layer.x.device).any()


@pytest.mark.parametrize(
    ("images", "channels", "wide", "edge", "tile"),
    [
        *((1, 144, 24, 56, 0), (1, 192, 32, 95, 1), (256, 96, 24, 56, 2), (32, 672, 112, 14, 3)),
        *((256, 672, 112, 14, 4), (256, 1152, 320, 7, 3), (1, 1152, 320, 7, 5)),
        *((8, 240, 80, 14, 0), (1, 672, 112, 24, 0), (1, 24, 24, 190, 1)),
    ],
)
def test_the_tile_of_a_gated_product_follows_from_its_shape(images, channels, wide, edge, tile):
    x = torch.empty(images, channels, edge, edge, device="meta")
    weight = torch.empty(wide, channels, 1, 1, device="meta")
    layer = convs.Convolution(x, [weight], [], None, x[:, :, 0, 0], convs.Geometry(), convs.NONE)
    assert layer._choose_tile(images * edge**2, wide, large=False) == convs.GATED_TILES[tile]


@pytest.mark.parametrize(("device", "half"), PRODUCTS)
@pytest.mark.parametrize("tile", range(len(TILES)))
def test_every_tile_of_a_product_agrees(tile, half, device, monkeypatch):
    monkeypatch.setattr(convs.Convolution, "_choose_tile", lambda *_, **__: TILES[tile])
    for images, channels, wide, size in [(1, 24, 144, (9, 15)), (2, 80, 40, (7, 7))]:
        x = image(images, channels, *size, half=half, device=device)
        weight = image(wide, channels, 1, 1, half=half, device=device) / channels**0.5
        weight = weight.contiguous(memory_format=torch.channels_last)
        bias = torch.randn(wide, generator=torch.Generator().manual_seed(3)).to(device)
        out = torch.full((images, *size, wide), float("nan"), dtype=half, device=device)
        layer = convs.Convolution(
            x, [weight], [bias, bias.to(half)], None, None, convs.Geometry(), convs.SILU
        )
        found = layer.list_implementations(out.permute(0, 3, 1, 2))["implicit_gemm"]()
        near(found, F.silu(F.conv2d(x.double(), weight.double(), bias.double())))


@pytest.mark.filterwarnings("ignore:overflow")  # which numpy says in Triton's interpreter
@pytest.mark.parametrize(("device", "half"), PRODUCTS)
def test_silu_far_from_zero(device, half):
    far = [-6e4, -200.0, -88.0, -20.0, 0.0, 20.0, 200.0, 6e4]
    bias = torch.tensor(far, device=device)
    x, weight = (
        image(1, 8, 3, 3, half=half, device=device),
        torch.zeros(8, 8, 1, 1).to(device, half),
    )
    rest = ([bias, bias.to(half)], None, None, convs.Geometry(), convs.SILU)
    out = torch.full_like(x, float("nan"))
    found = convs.Convolution(x, [weight], *rest).list_implementations(out)["implicit_gemm"]()
    wanted = F.silu(bias.double()).to(half)[None, :, None, None].expand_as(found)
    torch.testing.assert_close(found, wanted, rtol=torch.finfo(half).eps, atol=1e-7)


@pytest.mark.parametrize(
    ("images", "channels", "wide", "edge", "tile"),
    [
        *((1, 24, 144, 56, (64, 32, 64)), (1, 192, 1152, 7, (32, 32, 64))),
        *((8, 24, 144, 56, (128, 64, 32)), (32, 40, 240, 28, (128, 64, 64))),
        *((256, 16, 96, 112, (128, 64, 32)), (256, 80, 480, 14, (128, 64, 32))),
        *((256, 112, 672, 14, (128, 64, 64)), (256, 192, 1152, 7, (128, 128, 64))),
        *((256, 32, 16, 112, (128, 32, 32)), (2, 64, 256, 56, (128, 64, 64))),
    ],
)
def test_the_tile_of_a_product_follows_from_its_shape(images, channels, wide, edge, tile):
    x = torch.empty(images, channels, edge, edge, device="meta")
    weight = torch.empty(wide, channels, 1, 1, device="meta")
    layer = convs.Convolution(x, [weight], [], None, None, convs.Geometry(), convs.SILU)
    large = layer._is_large(torch.empty(images, wide, edge, edge, device="meta"))
    found = layer._choose_tile(images * edge**2, wide, large=large)
    assert tuple(found[name] for name in ("BM", "BN", "BK")) == tile


LAYERS = {  # of EfficientNet-B0 and B4: images, channels, squeezed, kernel, stride, edge
    "B0 first": (4, 32, 8, 3, 1, 112),
    "B0 strided": (8, 96, 4, 3, 2, 112),
    "B0 5x5": (32, 240, 10, 5, 1, 28),
    "B0 last": (8, 1152, 48, 5, 1, 7),
    "B4 strided": (1, 192, 8, 5, 2, 95),
    "B4 last": (5, 2688, 112, 3, 1, 12),
}


@pytest.mark.gpu
@gpu_only
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_errors_are_no_larger_than_those_of_torch(layer, half):
    images, channels, squeezed, kernel, stride, edge = layer
    filters = Filter(image(images, channels, edge, edge, half=half, device="cuda"), kernel, stride)
    wanted, totals = filters.compute_exactly()
    y, sums = ops.convolve_depthwise(*filters.args)
    x, (weight, _), bias, (_, padding), _ = filters.args
    plain = F.conv2d(x, weight, bias.to(half), stride, padding, 1, channels)
    check_error("filter", y, F.silu(plain), wanted)
    weights, pixels = a_gate(channels, squeezed, half, "cuda"), y.shape[2] * y.shape[3]
    gate = ops.squeeze_and_excite(sums, weights, pixels, half)
    w1, b1, w2, b2 = weights
    mean = y.mean((2, 3))
    hidden = F.silu(F.linear(mean, w1, b1.to(half)))
    plain = F.linear(hidden, w2, b2.to(half)).sigmoid()
    hidden = F.silu(F.linear(totals / pixels, w1.double(), b1.double()))
    check_error("gate", gate, plain, F.linear(hidden, w2.double(), b2.double()).sigmoid())
    gated = Gated(images, channels, max(16, channels // 6 // 8 * 8), y.shape[2:], half, "cuda")
    plain = F.conv2d(gated.x * gated.gate[:, :, None, None], gated.weight, gated.bias.to(half))
    check_error("project", gated.run(), plain + gated.add, gated.compute_exactly())


def check_error(name, mine, theirs, exact):
    errors = [float((y.double() - exact).norm() / exact.norm()) for y in (mine, theirs)]
    assert errors[0] <= 1.1 * errors[1], f"{name}: {errors[0]:.2e} against {errors[1]:.2e}"
