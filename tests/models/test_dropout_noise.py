"""What is dropped depends on the seed, the module and the image's place, and on nothing else."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from phalanx.catalog.models import MODELS
from phalanx.catalog.variant import Norm, Variant
from phalanx.engine.state import TrainState
from phalanx.engine.step import MicroBatch
from phalanx.models.build import build_model, initialise_weights
from phalanx.models.layers import Dropout, drop_path
from phalanx.models.units import UnitModel, draw_dropout_noise, find_noise_sizes
from phalanx.optim.build import OptimSettings, build_optimizer
from phalanx.plan import draws
from small_states import take_step

CPU = torch.device("cpu")
WANTED = {"layer1.0": 1, "drop": 7, "layer3.2": 1}
PLAIN = OptimSettings(momentum=0.0)


def drawn(wanted: dict[str, int], *, first: int = 0, images: int = 8, seed: int = 9):
    return draw_dropout_noise(wanted, seed=seed, first=first, images=images, device=CPU)


def built(variant: Variant, seed: int = 4) -> UnitModel:
    model = build_model(variant, num_classes=10).train()
    initialise_weights(model, seed, zero_residual=False)
    return model


def dropping(name: str, **changes: object) -> UnitModel:
    """A model without norms, so that images do not see each other."""
    plain = {"norm": Norm(type="none"), "drop_path": 0.5, "dropout": 0.0}
    return built(replace(MODELS[name], **{**plain, **changes}))


# --- the draws ---


@pytest.mark.parametrize(("seed", "first"), [(0, 0), (9, 1), (2**63 - 1, 10**9 + 7)])
def test_noise_is_the_plans_own_draws(seed, first):
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
def test_noise_does_not_depend_on_how_a_step_is_cut(cut):
    whole = drawn(WANTED, first=40)
    parts = drawn(WANTED, first=40, images=cut), drawn(WANTED, first=40 + cut, images=8 - cut)
    for name in WANTED:
        assert torch.equal(torch.cat([part[name] for part in parts]), whole[name])


def test_noise_depends_on_seed_module_and_place():
    noise = drawn({"a": 1, "b": 1}, images=64)
    assert not torch.equal(noise["a"], noise["b"])
    assert not torch.equal(noise["a"], drawn({"a": 1}, images=64, seed=10)["a"])
    assert not torch.equal(noise["a"], drawn({"a": 1}, images=64, first=64)["a"])
    assert torch.equal(noise["a"], drawn({"a": 1, "z": 1, "y": 3}, images=64)["a"])


def test_noise_is_even_between_0_and_1():
    many = drawn({"drop": 100}, images=1000)["drop"].double()
    assert many.min() >= 0 and many.max() < 1
    assert many.mean().item() == pytest.approx(0.5, abs=4 * (1 / 12 / 1e5) ** 0.5)
    shares = torch.histc(many, 10, 0, 1) / many.numel()
    assert (shares - 0.1).abs().max() < 4 * (0.09 / 1e5) ** 0.5


# --- which modules want them, and at what rate ---


def test_nothing_wants_noise_where_nothing_is_dropped():
    assert build_model(MODELS["resnet8"], num_classes=10).noise_sizes == {}
    assert dropping("resnet9", drop_path=0.0).noise_sizes == {}
    assert dropping("efficientnet_cifar", drop_path=0.0).noise_sizes == {}


def test_efficientnets_rates_grow_evenly_over_all_blocks():
    with torch.device("meta"):
        model = build_model(MODELS["efficientnet_b0"], num_classes=1000)
    blocks = [path for (path,) in (p for u, p in model.units.items() if u.startswith("blocks/"))]
    rates = [model.get_submodule(path).rate for path in blocks]
    assert len(blocks) == 16
    assert rates == pytest.approx([0.2 * number / 16 for number in range(16)])
    # the second and later ones of each stage: the first changes the shape and cannot be skipped
    skipped = [f"blocks.{s}.{i}" for s, n in enumerate((1, 2, 2, 3, 3, 4, 1)) for i in range(1, n)]
    assert model.noise_sizes == {**dict.fromkeys(skipped, 1), "drop": 1280}
    assert model.drop.rate == 0.2


def test_a_resnet_drops_every_block_but_the_first():
    model = dropping("resnet20", drop_path=0.3, dropout=0.1)
    assert next(iter(model.noise_sizes)) == "layer1.1" and len(model.noise_sizes) == 8 + 1
    rates = [model.get_submodule(f"layer{s}.{i}").rate for s in (1, 2, 3) for i in (0, 1, 2)]
    assert rates == pytest.approx([0.3 * number / 9 for number in range(9)])
    assert model.noise_sizes["drop"] == 64


@pytest.mark.parametrize("name", ["resnet8", "resnet9", "efficientnet_cifar"])
def test_without_noise_a_model_in_training_is_the_same_twice_and_drops_nothing(name):
    model, still = dropping(name, dropout=0.5), dropping(name, drop_path=0.0)
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
    block = dropping(name, **deeper).get_submodule(path)
    x = torch.randn(3, channels, 6, 6)
    noise = torch.tensor([[block.rate], [block.rate - 2**-20], [1 - 2**-24]])  # only one below
    y, undropped = block(x, noise), block(x)
    shortcut = block.downsample(x) if hasattr(block, "downsample") else x
    act = torch.relu if hasattr(block, "downsample") else torch.nn.Identity()
    assert torch.equal(y[1], act(shortcut[1]))
    kept = [0, 2]
    assert not torch.allclose(y[kept], undropped[kept])
    if not hasattr(block, "downsample"):  # no ReLU after the sum: the contribution can be read off
        expected = shortcut[kept] + (undropped - shortcut)[kept] / (1 - block.rate)
        torch.testing.assert_close(y[kept], expected, rtol=1e-4, atol=1e-5)


def test_dropout_zeroes_and_scales_by_each_values_own_noise():
    model = dropping("resnet8", drop_path=0.0, dropout=0.25)
    x = torch.randn(4, 64)
    noise = drawn(model.noise_sizes, images=4)["drop"]
    expected = torch.where(noise < 0.25, 0.0, x / 0.75)
    torch.testing.assert_close(model.drop(x, noise), expected)
    assert (expected == 0).any() and torch.equal(model.drop(x), x)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropping_keeps_the_mean(rate):
    images = 20_000
    noise = drawn({"layer1.0": 1}, images=images)["layer1.0"]
    dropped = drop_path(torch.full((images, 1, 1, 1), 3.0), rate, noise).double()
    error = 3 * (rate / (1 - rate) / images) ** 0.5
    assert dropped.mean().item() == pytest.approx(3, abs=4 * error)
    assert dropped.unique().tolist() == pytest.approx([0, 3 / (1 - rate)])


def test_noise_reaches_the_modules_it_is_drawn_for():
    model = dropping("resnet8", dropout=0.5)
    x = torch.randn(3, 3, 16, 16)
    full = {path: torch.full((3, n), 1 - 2**-24) for path, n in model.noise_sizes.items()}
    base = model(x, full)
    assert not torch.allclose(base, model(x)), "what is kept is scaled"
    for path in model.noise_sizes:
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
    take_step(state, passes, seed=seed)
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
        return dropping(name, dropout=0.4, **changes)

    whole = stepped(fresh(), [8])
    cut, uneven = stepped(fresh(), [4, 4]), stepped(fresh(), [1, 7])
    torch.testing.assert_close(cut, whole, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(uneven, whole, rtol=1e-3, atol=1e-5)
    for other in (stepped(fresh(), [8], first=48), stepped(fresh(), [8], seed=10)):
        assert any((a - b).abs().max() > 1e-3 for a, b in zip(whole, other, strict=True))


# --- plugins that use the older name ---


class OlderPlugin(nn.Module):
    """A network that declares `chances` and takes them under that name."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * 12 * 12, 10)
        self.chances = {"fc": 2}
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, chances: dict[str, Tensor] | None = None) -> Tensor:
        if chances is not None:
            self.seen.append(chances["fc"])
        return self.fc(x.flatten(1))


class OlderUnits(UnitModel):
    """Units whose table of noise is filled, or set, under its older name."""

    def __init__(self, *, fill: bool) -> None:
        super().__init__()
        self.flat, self.drop = nn.Flatten(), Dropout(0.5)
        self.units["head"] = ("flat", "drop")
        if fill:
            self.chances["drop"] = 4
        else:
            self.chances = {"drop": 4}


def test_a_plugins_chances_are_drawn_and_passed_on():
    model = OlderPlugin()
    assert find_noise_sizes(model) == {"fc": 2}
    stepped(model, [3, 5])
    assert torch.equal(torch.cat(model.seen), drawn({"fc": 2}, first=40)["fc"])


@pytest.mark.parametrize("fill", [True, False])
def test_units_may_declare_their_noise_under_its_older_name(fill):
    model = OlderUnits(fill=fill)
    assert find_noise_sizes(model) == model.noise_sizes == model.chances == {"drop": 4}
    noise = torch.tensor([[0.4, 0.6, 0.1, 0.9]])
    assert model(torch.ones(1, 2, 2), {"drop": noise}).tolist() == [[0.0, 2.0, 0.0, 2.0]]
