"""What is dropped depends on the seed, the module and the image's place, and on nothing else."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from phalanx.catalog.models import MODELS
from phalanx.catalog.variant import Norm, Variant
from phalanx.engine.state import TrainState
from phalanx.engine.step import MicroBatch, StepOptions, train_step
from phalanx.models.build import build_model, initialise
from phalanx.models.dropout_noise import draw_dropout_noise
from phalanx.models.layers import drop_path
from phalanx.models.units import UnitModel
from phalanx.optim.rules import OptimSettings, build_optimizer
from phalanx.plan import draws

CPU = torch.device("cpu")
WANTED = {"layer1.0": 1, "drop": 7, "layer3.2": 1}
PLAIN = OptimSettings(momentum=0.0)
RULE = StepOptions(label_smoothing=0.0, device_type="cpu", half=None, seed=9)


def drawn(wanted: dict[str, int], *, first: int = 0, images: int = 8, seed: int = 9):
    return draw_dropout_noise(wanted, seed=seed, first=first, images=images, device=CPU)


def built(variant: Variant, seed: int = 4) -> UnitModel:
    model = build_model(variant, num_classes=10).train()
    initialise(model, seed, zero_residual=False)
    return model


def chancy(name: str, **changes: object) -> UnitModel:
    """A model without norms, so that images do not see each other."""
    plain = {"norm": Norm(type="none"), "drop_path": 0.5, "dropout": 0.0}
    return built(replace(MODELS[name], **{**plain, **changes}))


# --- the draws ---


@pytest.mark.parametrize(("seed", "first"), [(0, 0), (9, 1), (2**63 - 1, 10**9 + 7)])
def test_chances_are_the_plans_own_draws(seed, first):
    found = drawn(WANTED, seed=seed, first=first, images=50)
    assert {name: tuple(c.shape) for name, c in found.items()} == {
        "layer1.0": (50, 1),
        "drop": (50, 7),
        "layer3.2": (50, 1),
    }
    for name, width in WANTED.items():
        places = np.arange(first * width, (first + 50) * width).reshape(50, width)
        bits = draws.draw_bits(seed, name, places) >> np.uint64(40)
        expected = bits.astype(np.float64) * 2.0**-24
        np.testing.assert_array_equal(found[name].double().numpy(), expected)


@pytest.mark.parametrize("cut", [1, 3, 7])
def test_chances_do_not_depend_on_how_a_step_is_cut(cut):
    whole = drawn(WANTED, first=40)
    parts = drawn(WANTED, first=40, images=cut), drawn(WANTED, first=40 + cut, images=8 - cut)
    for name in WANTED:
        assert torch.equal(torch.cat([part[name] for part in parts]), whole[name])


def test_chances_depend_on_seed_module_and_place():
    chances = drawn({"a": 1, "b": 1}, images=64)
    assert not torch.equal(chances["a"], chances["b"])
    assert not torch.equal(chances["a"], drawn({"a": 1}, images=64, seed=10)["a"])
    assert not torch.equal(chances["a"], drawn({"a": 1}, images=64, first=64)["a"])
    assert torch.equal(chances["a"], drawn({"a": 1, "z": 1, "y": 3}, images=64)["a"])


def test_chances_are_even_between_0_and_1():
    many = drawn({"drop": 100}, images=1000)["drop"].double()
    assert many.min() >= 0 and many.max() < 1
    assert many.mean().item() == pytest.approx(0.5, abs=4 * (1 / 12 / 1e5) ** 0.5)
    shares = torch.histc(many, 10, 0, 1) / many.numel()
    assert (shares - 0.1).abs().max() < 4 * (0.09 / 1e5) ** 0.5


# --- which modules want them, and at what rate ---


def test_nothing_wants_chances_where_nothing_is_dropped():
    assert build_model(MODELS["resnet8"], num_classes=10).chances == {}
    assert chancy("resnet9", drop_path=0.0).chances == {}
    assert chancy("efficientnet_cifar", drop_path=0.0).chances == {}


def test_efficientnets_rates_grow_evenly_over_all_blocks():
    with torch.device("meta"):
        model = build_model(MODELS["efficientnet_b0"], num_classes=1000)
    blocks = [path for (path,) in (p for u, p in model.units.items() if u.startswith("blocks/"))]
    rates = [model.get_submodule(path).rate for path in blocks]
    assert len(blocks) == 16
    assert rates == pytest.approx([0.2 * number / 16 for number in range(16)])
    # the second and later ones of each stage: the first changes the shape and cannot be skipped
    skipped = [f"blocks.{s}.{i}" for s, n in enumerate((1, 2, 2, 3, 3, 4, 1)) for i in range(1, n)]
    assert model.chances == {**dict.fromkeys(skipped, 1), "drop": 1280}
    assert model.drop.rate == 0.2


def test_a_resnet_drops_every_block_but_the_first():
    model = chancy("resnet20", drop_path=0.3, dropout=0.1)
    assert next(iter(model.chances)) == "layer1.1" and len(model.chances) == 8 + 1
    rates = [model.get_submodule(f"layer{s}.{i}").rate for s in (1, 2, 3) for i in (0, 1, 2)]
    assert rates == pytest.approx([0.3 * number / 9 for number in range(9)])
    assert model.chances["drop"] == 64


@pytest.mark.parametrize("name", ["resnet8", "resnet9", "efficientnet_cifar"])
def test_without_chances_a_model_in_training_is_the_same_twice_and_drops_nothing(name):
    model, still = chancy(name, dropout=0.5), chancy(name, drop_path=0.0)
    x = torch.randn(3, 3, 16, 16)
    assert torch.equal(model(x), model(x))
    assert torch.equal(model(x), still(x))


# --- what they do ---


@pytest.mark.parametrize(
    ("name", "path", "channels"),
    [
        ("resnet8", "layer2.0", 16),
        ("resnet11", "layer3.0", 128),
        ("resnet9", "layer3.1", 512),
        ("efficientnet_cifar", "blocks.0.1", 8),
        ("efficientnet_cifar", "blocks.3.1", 40),
    ],
)
def test_a_dropped_image_is_exactly_its_shortcut_and_the_others_are_scaled(name, path, channels):
    deeper = {"depth": 2.0} if "efficientnet" in name else {}  # a second block in the first stage
    block = chancy(name, **deeper).get_submodule(path)
    x = torch.randn(3, channels, 6, 6)
    chances = torch.tensor([[block.rate], [block.rate - 2**-20], [1 - 2**-24]])  # only one below
    y, undropped = block(x, chances), block(x)
    shortcut = block.downsample(x) if hasattr(block, "downsample") else x
    act = torch.relu if hasattr(block, "downsample") else torch.nn.Identity()
    assert torch.equal(y[1], act(shortcut[1]))
    kept = [0, 2]
    assert not torch.allclose(y[kept], undropped[kept])
    if not hasattr(block, "downsample"):  # no ReLU after the sum: the contribution can be read off
        expected = shortcut[kept] + (undropped - shortcut)[kept] / (1 - block.rate)
        torch.testing.assert_close(y[kept], expected, rtol=1e-4, atol=1e-5)


def test_dropout_zeroes_and_scales_by_each_values_own_chance():
    model = chancy("resnet8", drop_path=0.0, dropout=0.25)
    x = torch.randn(4, 64)
    chances = drawn(model.chances, images=4)["drop"]
    expected = torch.where(chances < 0.25, 0.0, x / 0.75)
    torch.testing.assert_close(model.drop(x, chances), expected)
    assert (expected == 0).any() and torch.equal(model.drop(x), x)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropping_keeps_the_mean(rate):
    images = 20_000
    chances = drawn({"layer1.0": 1}, images=images)["layer1.0"]
    dropped = drop_path(torch.full((images, 1, 1, 1), 3.0), rate, chances).double()
    error = 3 * (rate / (1 - rate) / images) ** 0.5
    assert dropped.mean().item() == pytest.approx(3, abs=4 * error)
    assert dropped.unique().tolist() == pytest.approx([0, 3 / (1 - rate)])


def test_chances_reach_the_modules_they_are_drawn_for():
    model = chancy("resnet8", dropout=0.5)
    x = torch.randn(3, 3, 16, 16)
    full = {path: torch.full((3, n), 1 - 2**-24) for path, n in model.chances.items()}
    base = model(x, full)
    assert not torch.allclose(base, model(x)), "what is kept is scaled"
    for path in model.chances:
        changed = model(x, {**full, path: torch.zeros_like(full[path])})
        assert not torch.allclose(base, changed), path


# --- through a step ---


def stepped(model: UnitModel, cuts: list[int], *, first: int = 40, seed: int = 9) -> list[Tensor]:
    """The weights after one step whose images lie in passes of those sizes."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(sum(cuts), 3, 12, 12, generator=generator)
    labels = torch.arange(sum(cuts)) % 10
    passes, begin = [], 0
    for size in cuts:
        part = slice(begin, begin + size)
        passes.append(MicroBatch(images[part], labels[part], first + begin))
        begin += size
    state = TrainState(model, build_optimizer(model, PLAIN))
    train_step(state, passes, 1.0, rule=replace(RULE, seed=seed))
    return [weight.detach().clone() for weight in model.parameters()]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("resnet8", {}),
        ("resnet8", {"norm": Norm(type="group", groups=4)}),
        ("efficientnet_cifar", {"norm": Norm(type="group", groups=4), "depth": 0.5}),
    ],
)
def test_two_passes_drop_what_one_of_twice_the_size_does(name, changes):
    def fresh() -> UnitModel:
        return chancy(name, dropout=0.4, **changes)

    whole = stepped(fresh(), [8])
    cut, uneven = stepped(fresh(), [4, 4]), stepped(fresh(), [1, 7])
    torch.testing.assert_close(cut, whole, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(uneven, whole, rtol=1e-3, atol=1e-5)
    for other in (stepped(fresh(), [8], first=48), stepped(fresh(), [8], seed=10)):
        assert any((a - b).abs().max() > 1e-3 for a, b in zip(whole, other, strict=True))
