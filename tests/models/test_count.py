"""What a unit holds, costs and keeps is counted right, against hand, formula and a real run."""

import tomllib
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from torch import nn

from phalanx.catalog.models import MODELS, SIZES_FILE, describe_variant, read_model_sizes
from phalanx.catalog.variant import Norm, Variant
from phalanx.errors import ConfigError
from phalanx.models.build import build_model
from phalanx.models.cost import count_model, count_size, count_units, emulate_autocast
from phalanx.models.units import UnitModel
from phalanx.units import format_si

RESNET20_SHAPES = {
    "stem": (16, 32, 32),
    "layer1/0": (16, 32, 32),
    "layer1/1": (16, 32, 32),
    "layer1/2": (16, 32, 32),
    "layer2/0": (32, 16, 16),
    "layer2/1": (32, 16, 16),
    "layer2/2": (32, 16, 16),
    "layer3/0": (64, 8, 8),
    "layer3/1": (64, 8, 8),
    "layer3/2": (64, 8, 8),
    "head": (10,),
}


def build_on_meta(variant: Variant, classes: int) -> UnitModel:
    with torch.device("meta"):
        return build_model(variant, num_classes=classes)


def test_resnet50_is_what_its_papers_say():
    counts = {
        unit.name: unit
        for unit in count_units(MODELS["resnet50"], num_classes=1000, batch=2, image_size=224)
    }
    assert sum(unit.parameters for unit in counts.values()) == 25_557_032
    assert sum(unit.macs for unit in counts.values()) == 4_089_184_256
    stem, head = counts["stem"], counts["head"]
    assert stem.macs == 64 * 3 * 7 * 7 * 112 * 112
    assert stem.parameters == 64 * 3 * 7 * 7 + 2 * 64
    assert stem.shape == (64, 56, 56)
    assert head.macs == 2048 * 1000
    assert head.parameters == 2048 * 1000 + 1000
    assert head.shape == (1000,)


def test_shapes_of_resnet20():
    counts = count_units(MODELS["resnet20"], num_classes=10, batch=3, image_size=32)
    assert {unit.name: unit.shape for unit in counts} == RESNET20_SHAPES
    assert list(RESNET20_SHAPES) == [unit.name for unit in counts], "in the order of the data"


@pytest.mark.parametrize("name", ["resnet9", "resnext11_32x4d", "efficientnet_cifar"])
def test_the_units_add_up_to_the_whole(name):
    variant = MODELS[name]
    counts = count_units(variant, num_classes=7, batch=2, image_size=32)
    model = build_on_meta(variant, 7)
    macs = 0

    def add(module: nn.Module, _: object, out: torch.Tensor) -> None:
        nonlocal macs
        macs += out[0].numel() * module.weight[0].numel()  # a row of weights for each value

    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(add)
    logits = model(torch.empty(2, 3, 32, 32, device="meta"))
    assert [unit.name for unit in counts] == list(variant.units)
    assert sum(unit.parameters for unit in counts) == sum(p.numel() for p in model.parameters())
    assert sum(unit.macs for unit in counts) == macs > 1_000_000
    assert counts[-1].shape == tuple(logits.shape[1:])


# --- activations ---


def bytes_of_a_real_run(variant: Variant, *, batch: int, image_size: int) -> int:
    """What autograd keeps of a training pass on the CPU, by the addresses of real memory."""
    model = build_model(variant, num_classes=10).train()
    own = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda nothing: nothing):
        model(torch.rand(batch, 3, image_size, image_size))
    return sum(storage.nbytes() for storage in kept.values())


REAL_RUNS = {
    "shortcut A": ("resnet8", Norm()),
    "norms in 32 bits": ("resnet8", Norm(full_precision=True)),
    "one pass": ("resnet8", Norm(stable=False)),
    "group norm": ("resnet8", Norm(type="group", groups=4)),
    "interleaved": ("resnet8", Norm(type="group", groups=4, interleaved=True)),
    "no norm": ("resnet8", Norm(type="none")),
    "late sums": ("resnet9", Norm()),
    "groups, projections": ("resnext11_32x4d", Norm()),
    "squeeze and excite": ("efficientnet_cifar", Norm()),
}


@pytest.mark.parametrize("case", REAL_RUNS)
def test_activations_are_those_of_a_real_run(case):
    name, norm = REAL_RUNS[case]
    variant = replace(MODELS[name], norm=norm)
    counts = count_units(variant, num_classes=10, batch=2, image_size=16)
    expected = bytes_of_a_real_run(variant, batch=2, image_size=16)
    assert sum(unit.activation_bytes for unit in counts) == expected > 50_000


class Toy(UnitModel):
    """Two layers, a norm between them if asked for, and an end that keeps its output."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = norm
        self.act = nn.ReLU(inplace=True)
        self.flat = nn.Flatten()
        self.linear = nn.Linear(4 * 8 * 8, 5)
        self.end = nn.Tanh()
        self.units["first"] = ("conv", "norm", "act")
        self.units["second"] = ("flat", "linear")
        self.units["third"] = ("end",)


def toy_bytes(
    norm: type[nn.Module] = nn.Identity, *sizes: int, half: bool = False, full_norms: bool = False
) -> list[int]:
    with torch.device("meta"):
        model, images = Toy(norm(*sizes)), torch.empty(2, 3, 8, 8)
    if half:
        emulate_autocast(model, full_norms=full_norms)
    return [unit.activation_bytes for unit in count_model(model, images)]


IMAGES, MIDDLE, END = 2 * 3 * 8 * 8, 2 * 4 * 8 * 8, 2 * 5  # values of a batch of two


def test_activations_of_two_layers_by_hand():
    # the second layer keeps its input, which the first unit's ReLU has kept already
    assert toy_bytes() == [4 * (IMAGES + MIDDLE), 0, 4 * END]


def test_batch_norm_keeps_its_input_and_two_figures_a_channel():
    assert toy_bytes(nn.BatchNorm2d, 4) == [4 * (IMAGES + MIDDLE + MIDDLE + 2 * 4), 0, 4 * END]


def test_half_keeps_16_bits_but_for_the_figures_of_norms():
    assert toy_bytes(half=True) == [2 * (IMAGES + MIDDLE), 0, 2 * END]
    batch = toy_bytes(nn.BatchNorm2d, 4, half=True)
    assert batch == [2 * (IMAGES + MIDDLE + MIDDLE) + 4 * 2 * 4, 0, 2 * END]


def test_half_keeps_32_bits_where_norms_compute_in_them():
    full = toy_bytes(nn.BatchNorm2d, 4, half=True, full_norms=True)
    assert full == [2 * (IMAGES + MIDDLE) + 4 * (MIDDLE + 2 * 4), 0, 2 * END]
    # autocast leaves group norm's output in 32 bits, and the linear layer keeps a copy in 16
    group = toy_bytes(nn.GroupNorm, 2, 4, half=True)
    assert group == [2 * IMAGES + 4 * (MIDDLE + MIDDLE + 2 * 2 * 2), 2 * MIDDLE, 2 * END]


def test_half_reads_the_norms_of_the_variant():
    def total(norm: Norm, *, half: bool) -> int:
        variant = replace(MODELS["resnet8"], norm=norm)
        counts = count_units(variant, num_classes=10, batch=2, image_size=32, half=half)
        return sum(unit.activation_bytes for unit in counts)

    plain, full = total(Norm(), half=True), total(Norm(full_precision=True), half=True)
    assert plain < full < total(Norm(), half=False) == total(Norm(full_precision=True), half=False)


class Twice(UnitModel):
    """One layer that two units call."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.units["once"] = self.units["again"] = ("conv",)


def test_a_weight_of_two_units_counts_in_the_first():
    with torch.device("meta"):
        counts = count_model(Twice(), torch.empty(1, 3, 8, 8))
    assert [unit.parameters for unit in counts] == [3 * 3 + 3, 0]
    assert [unit.macs for unit in counts] == [3 * 3 * 8 * 8] * 2, "it is computed twice"


def test_a_batch_that_a_unit_cannot_take_is_told():
    with pytest.raises(ConfigError, match="layer4/0 cannot take a batch of 1 x 1024 x 2 x 2: "):
        count_units(MODELS["resnet50"], num_classes=10, batch=1, image_size=32)


# --- the sizes that are written down ---


def test_every_model_has_its_size_written_down():
    assert list(read_model_sizes()) == list(MODELS), "stale: run `make docs`"


@pytest.mark.parametrize("name", MODELS)
def test_the_written_size_is_the_counted_one(name):
    written = read_model_sizes()[name], len(MODELS[name].units)
    assert count_size(MODELS[name]) == written, "stale: run `make docs`"


def test_the_sizes_travel_with_the_package():
    project = Path(__file__).parents[2] / "pyproject.toml"
    carried = tomllib.loads(project.read_text())["tool"]["setuptools"]["package-data"]["phalanx"]
    assert any(fnmatch(f"catalog/{SIZES_FILE.name}", pattern) for pattern in carried)


def test_a_few_words_say_what_a_model_is():
    assert describe_variant(MODELS["resnet50"]) == "bottleneck 3-4-6-3"
    assert describe_variant(MODELS["resnext101_32x8d"]) == "bottleneck 3-4-23-3 32x8"
    assert describe_variant(MODELS["resnet20"]) == "small basic 3-3-3"
    assert describe_variant(MODELS["resnet9"]) == "small, 3 wide stages"
    assert describe_variant(MODELS["efficientnet_b4"]) == "width 1.4, depth 1.8"
    assert describe_variant(MODELS["efficientnet_lite0"]) == "width 1.0, depth 1.0, lite"


def test_large_numbers_have_three_digits():
    numbers = (0, 999, 1000, 75_290, 999_499, 999_500, 25_557_032, 4_089_184_256)
    shown = ["0", "999", "1.00 k", "75.3 k", "999 k", "1.00 M", "25.6 M", "4.09 G"]
    assert [format_si(number) for number in numbers] == shown
