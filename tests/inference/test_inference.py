"""Folded models against their own modules."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn

from phalanx.catalog.models import MODELS
from phalanx.catalog.variant import Norm
from phalanx.inference import folded_model
from phalanx.inference.cpu_layers import CPU_LAYERS, has_onednn
from phalanx.inference.folded_model import FoldedModel, fold_model
from phalanx.inference.gpu_layers import choose_gpu_layers
from phalanx.models.build import build_model, initialise_weights
from phalanx.models.layers import GlobalAvgPool
from phalanx.models.units import UnitModel

onednn_only = pytest.mark.skipif(not has_onednn(), reason="needs oneDNN")
gpu_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GPU_LAYERS = choose_gpu_layers(torch.float32)  # by their references in plain torch
SMALL = {
    "resnet18": 40,
    "resnext14_32x4d": 40,
    "resnet14": 33,
    "resnet9": 32,
    "resnet8": 32,
    "efficientnet_b0": 48,
    "efficientnet_lite0": 33,
}


@torch.no_grad()
def make(name, *, size=None, device="cpu", **changes):
    """A model whose norms all do something, and have the statistics of images of a size."""
    model = build_model(replace(MODELS[name], **changes), num_classes=10)
    initialise_weights(model, 0, zero_residual=False)
    shake(model, 3)
    model.to(device, memory_format=torch.channels_last)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
    model.train()(images(8, size or SMALL[name], seed=9).to(device))
    return model.eval()


def shake(model, seed):
    random = torch.Generator().manual_seed(seed)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.weight.data.copy_(torch.rand(len(norm.weight), generator=random) + 0.5)
            norm.bias.data.copy_(torch.randn(len(norm.bias), generator=random) / 2)


def images(count, size, seed=0):
    x = torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))
    return x.contiguous(memory_format=torch.channels_last)


def difference(found, wanted):
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def assert_as_exact(folded, model, size):
    """Logits differ from those in 64 bits about as much as the modules' do.

    Networks with random weights amplify the rounding of some images a hundred times, and which ones
    depends on the processor: the error of the median image does not.
    """
    x = images(16, size)
    found, plain = folded(x), model(x)
    exact = model.double()(x.double())
    errors = ((logits - exact).norm(dim=1) / exact.norm(dim=1) for logits in (found, plain))
    error, usual = (float(per_image.median()) for per_image in errors)
    assert error < 2 * usual
    assert difference(folded(-x), exact) > 0.01  # the measure sees a difference


@torch.no_grad()
@pytest.mark.parametrize("name", SMALL)
def test_folding_changes_nothing_but_rounding(name, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = make(name)
    folded = FoldedModel(model, GPU_LAYERS)
    assert not folded.unfolded_units
    assert_as_exact(folded, model, SMALL[name])


@torch.no_grad()
@onednn_only
@pytest.mark.parametrize("padding", ["same", "symmetric"])
@pytest.mark.parametrize("name", SMALL)
def test_on_a_cpu_folding_rounds_about_as_the_modules_do(name, padding):
    model = make(name, padding=padding)
    folded = fold_model(model, None)
    assert folded is not None and not folded.unfolded_units
    assert_as_exact(folded, model, SMALL[name])


@torch.no_grad()
@onednn_only
@pytest.mark.parametrize("size", [16, 4], ids=["pixels", "one pixel"])
@pytest.mark.parametrize("act", [nn.ReLU, nn.ReLU6, nn.SiLU])
def test_on_a_cpu_any_activation_may_follow_a_residual(act, size):
    model, x = make("resnet8"), images(3, size)
    for block in model.modules():
        if hasattr(block, "act2"):
            block.act2 = act()
    folded = fold_model(model, None)
    assert folded is not None and not folded.unfolded_units
    assert difference(folded(x), model(x)) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("padding", ["same", "symmetric"])
@pytest.mark.parametrize("name", ["resnet14", "efficientnet_b0"])
def test_paddings(name, padding, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = make(name, padding=padding)
    assert_as_exact(FoldedModel(model, GPU_LAYERS), model, 45)


@pytest.mark.parametrize("layers", [GPU_LAYERS, pytest.param(CPU_LAYERS, marks=onednn_only)])
def test_weights_are_those_of_the_last_refresh(layers, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model, x = make("resnet8"), images(1, 16)
    folded = FoldedModel(model, layers)
    before = folded(x)
    shake(model, 4)
    with torch.no_grad():
        model.fc.weight.mul_(2)
        assert torch.equal(folded(x), before)
        folded.refresh()
        assert difference(folded(x), model(x)) < 1e-5


def test_what_folding_does_not_know_runs_by_its_modules(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model, x = make("resnet14", norm=Norm(type="group")), images(1, 33)
    folded = FoldedModel(model, choose_gpu_layers(torch.bfloat16))
    assert set(folded.unfolded_units) == {unit for unit in model.units if unit != "head"}
    assert folded.unfolded_units["stem"] == "a GroupNorm"
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert difference(folded(x), model(x)) < 0.02
    model = make("resnet8")
    model.fc.register_forward_hook(lambda *_: None)
    assert FoldedModel(model, choose_gpu_layers(torch.bfloat16)).unfolded_units == {"head": "hooks"}


class Doubled(UnitModel):
    """A plugin's model that does more than run its units."""

    def run_unit(self, unit, x, noise=None):
        return 2 * super().run_unit(unit, x, noise)


class DoubledNorm(nn.BatchNorm2d):
    def forward(self, x):
        return 2 * super().forward(x)


class DoubledLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def make_small(conv, *, kind=UnitModel, norm=nn.BatchNorm2d, linear=nn.Linear):
    model = kind()
    model.conv, model.bn, model.act = conv, norm(8), nn.ReLU()
    model.pool, model.fc = GlobalAvgPool(), linear(8, 5)
    model.units = {"stem": ("conv", "bn", "act"), "head": ("pool", "fc")}
    return model.eval()


@onednn_only
@torch.no_grad()
def test_layers_of_plugins_score_as_they_compute():
    square = {"kernel_size": 3, "padding": 1}
    convs = {
        "square": (nn.Conv2d(3, 8, **square), []),
        "same": (nn.Conv2d(3, 8, 3, padding="same"), ["stem"]),
        "valid": (nn.Conv2d(3, 8, 3, padding="valid"), ["stem"]),
        "mode": (nn.Conv2d(3, 8, **square, padding_mode="reflect"), ["stem"]),
        "stride": (nn.Conv2d(3, 8, **square, stride=(1, 2)), ["stem"]),
        "padding": (nn.Conv2d(3, 8, 3, padding=(1, 0)), ["stem"]),
    }
    models = {name: (make_small(conv), left) for name, (conv, left) in convs.items()}
    models["norm"] = make_small(nn.Conv2d(3, 8, **square), norm=DoubledNorm), ["stem"]
    models["linear"] = make_small(nn.Conv2d(3, 8, **square), linear=DoubledLinear), ["head"]
    for name, (model, unfolded) in models.items():
        folded, x = fold_model(model, None), images(2, 16)
        assert list(folded.unfolded_units) == unfolded, name
        assert difference(folded(x), model(x)) < 1e-5, name
    assert fold_model(make_small(nn.Conv2d(3, 8, **square), kind=Doubled), None) is None
    model.register_forward_hook(lambda *_: None)
    assert fold_model(model, None) is None


@onednn_only
@torch.no_grad()
def test_a_linear_layer_may_get_several_vectors_per_image():
    model = UnitModel()
    model.flat, model.fc, model.pick = nn.Flatten(2), nn.Linear(256, 5), nn.AvgPool1d(5)
    model.units = {"head": ("flat", "fc", "pick")}
    folded, x = fold_model(model.eval(), None), images(2, 16)
    assert not folded.unfolded_units
    assert difference(folded(x), model(x)) < 1e-5


class Graph:
    """In place of a CUDA graph: every replay gives what was there at first."""

    def __init__(self):
        self.replays = 0

    def replay(self):
        self.replays += 1

    def pool(self):
        pass


@pytest.fixture
def captured(monkeypatch):
    """Graphs that are none, for a machine without CUDA."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(folded_model, "_capturing_stream", lambda _: None)


def test_every_batch_of_a_size_is_scored_by_its_graph(captured):
    folded = FoldedModel(make("resnet8"), GPU_LAYERS)
    for count in (1, 1, 2, 1, 2):
        folded._replay(images(count, 16))
    assert [found.graph.replays for found in folded._graphs.values()] == [3, 2]


@pytest.mark.parametrize("name", ["resnet8", "resnet14"])
def test_a_graph_has_an_input_of_its_own(captured, name):
    folded, first = FoldedModel(make(name), GPU_LAYERS), images(1, 33, seed=1)
    kept = first.clone()
    folded._replay(first)
    folded._replay(images(1, 33, seed=2))
    assert torch.equal(first, kept)


def test_the_device_of_the_images_is_entered(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    second, entered = folded_model.use_device(torch.device("cuda", 1)), []
    assert isinstance(second, torch.cuda.device) and second.idx == 1
    with folded_model.use_device(torch.device("cpu")):
        pass
    monkeypatch.setattr(folded_model, "use_device", lambda d: entered.append(d) or nullcontext())
    FoldedModel(make("resnet8"), GPU_LAYERS)(images(1, 16))
    assert entered == [torch.device("cpu")]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@torch.no_grad()
def test_scores_on_another_device():
    pytest.importorskip("triton")
    found = []
    for device in ("cuda:0", "cuda:1"):
        model = make("resnet14", size=64, device=device)
        folded = fold_model(model, torch.float16)
        assert folded is not None and not folded.unfolded_units
        for seed in (0, 1):
            x = images(4, 64, seed=seed).to(device)
            assert difference(folded(x), model(x)) < 0.02
        found.append(folded(x).cpu())
    assert torch.equal(*found)


def test_a_cpu_folds_in_32_bits_only():
    model = make("resnet8")
    assert fold_model(model, torch.bfloat16) is None
    assert (fold_model(model, None) is not None) == has_onednn()
    assert fold_model(model.double(), None) is None


@onednn_only
@torch.no_grad()
@pytest.mark.parametrize("name", SMALL)
def test_on_a_cpu_logits_do_not_depend_on_the_batch(name):
    model = make(name)
    folded = fold_model(model, None)
    for size in (SMALL[name], SMALL[name] - 1):  # the weights are packed for one size
        x = images(5, size)
        together = folded(x)
        for some in ([3], [0, 1], [4, 2, 0, 1]):
            assert torch.equal(folded(x[some]), together[some])
        assert torch.equal(folded(x.contiguous()), together)


@pytest.mark.parametrize("name", ["resnet8", "efficientnet_b0"])
def test_large_batches_are_scored_in_parts(name, monkeypatch):
    folded, x = FoldedModel(make(name), GPU_LAYERS), images(5, 32)
    together = folded(x)
    monkeypatch.setattr(folded_model, "_count_images_at_once", lambda _: 2)
    parts = []
    usual = folded._run
    monkeypatch.setattr(folded, "_run", lambda part: parts.append(len(part)) or usual(part))
    assert difference(folded(x), together) < 1e-5
    assert parts == [2, 2, 1]


def test_a_gpu_scores_no_more_images_at_once_than_a_grid_has_rows():
    assert folded_model._count_images_at_once(torch.empty(99_999, 3, 32, 32, device="meta")) < 2**16


@pytest.mark.gpu
@gpu_only
@torch.no_grad()
@pytest.mark.parametrize("name", ["resnet8", "efficientnet_b0"])
def test_graphs_score_more_images_than_a_grid_has_rows(name):
    folded = fold_model(make(name, device="cuda"), torch.float16)
    x = images(7, 8).cuda().repeat(10_000, 1, 1, 1)
    found = folded(x).view(10_000, 7, 10)
    assert difference(found, folded(x[:7]).expand_as(found)) < 0.01


@onednn_only
@torch.no_grad()
def test_on_a_cpu_weights_are_folded_again_only_if_they_have_changed():
    model, x = make("resnet8"), images(1, 16)
    folded = fold_model(model, None)
    folded(x)
    layers = [layer for unit in folded._units.values() for layer in unit.layers]
    packed = [layer._convolve for layer in layers[:-1]]
    folded.refresh()
    assert [layer._convolve for layer in layers[:-1]] == packed
    for tensor in (model.layer1[0].conv1.weight, model.layer2[0].bn2.running_var):
        tensor.data.mul_(1.5)  # which torch does not count as a change
        folded.refresh()
        assert difference(folded(x), model(x)) < 1e-5


@pytest.mark.gpu
@gpu_only
@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "half"),
    [
        *product(["resnet50", "resnext50_32x4d", "resnet9"], [torch.float16, torch.bfloat16]),
        ("efficientnet_b0", torch.float16),
    ],
)
def test_graphs_agree_with_the_modules(name, half):
    pytest.importorskip("triton")
    size = MODELS[name].image_size
    model = make(name, size=size, device="cuda")
    folded = fold_model(model, half)
    assert folded is not None and not folded.unfolded_units
    for number, count in enumerate((5, 5, 5, 2, 5, 2, 2)):
        x = images(count, size, seed=number).cuda()
        exact = model.double()(x.double())
        model.float()
        with torch.inference_mode(), torch.autocast("cuda", half):
            plain = model(x)
            found = folded(x)
        assert found.shape == exact.shape and exact.isfinite().all()
        assert difference(found, exact) < 1.5 * difference(plain, exact) + 1e-3
        apart = exact.amax(1) - exact.gather(1, found.argmax(1, keepdim=True))[:, 0]
        # another class comes first only where the two are nearer than rounding
        assert (apart <= 2 * (found - exact).abs().amax(1)).all()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.bias.data.add_(0.001)
        if isinstance(module, nn.Linear):
            module.weight.data.mul_(1.5)
    folded.refresh()
    changed = folded(x)
    assert difference(changed, found) > 0.2
    with torch.autocast("cuda", half):
        plain = model(x)
    exact = model.double()(x.double())
    assert difference(changed, exact) < 1.5 * difference(plain, exact) + 1e-3
