"""Recomputation changes what is kept and nothing else: gradients and statistics bit for bit."""

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.catalog.models import MODELS
from phalanx.catalog.variant import Norm, OwnVariant, Variant
from phalanx.errors import ConfigError
from phalanx.models.build import build_model, initialise_weights
from phalanx.models.recompute import RecordedTensor, enable_recomputation
from phalanx.models.step_memory import LiveBytes
from phalanx.models.units import draw_dropout_noise
from phalanx.plan.recompute import list_module_paths

OWN = OwnVariant(image_size=8, build="tests:net")
IMAGES = 2


@pytest.mark.parametrize("name", MODELS)
def test_the_written_paths_are_those_of_the_modules(name):
    with torch.device("meta"):
        model = build_model(MODELS[name], num_classes=10)
    found = tuple(path.replace(".", "/") for path, _ in model.named_modules() if path)
    assert list_module_paths(MODELS[name]) == found


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Without oneDNN: its 16-bit kernels do not run on every processor that claims them."""
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(True)


def trained(
    variant: Variant, patterns: Sequence[str] | None, *, half: bool = False
) -> dict[str, Tensor]:
    """Gradients and buffers after two passes in which something is dropped."""
    model = build_model(variant, num_classes=10)
    initialise_weights(model, 1, zero_residual=False)
    model = model.train().to(memory_format=torch.channels_last)
    if patterns is not None:
        enable_recomputation(model, patterns, variant=variant)
    for number in range(2):
        random = torch.Generator().manual_seed(number)
        images = torch.rand(IMAGES, 3, 32, 32, generator=random)
        noise = draw_dropout_noise(
            model.noise_sizes, seed=5, first=0, images=IMAGES, device=torch.device("cpu")
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            logits = model(images.to(memory_format=torch.channels_last), noise)
            # backward belongs outside; inside, autocast must not touch what is computed again
            F.cross_entropy(logits.float(), torch.arange(IMAGES)).backward()
    gradients = {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
    return {**gradients, **dict(model.named_buffers())}


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    assert all(value.abs().sum() > 0 for n, value in expected.items() if n.endswith("conv1"))
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


RESNET8 = MODELS["resnet8"]
CASES = {
    "units": (RESNET8, ()),
    "convolutions": (RESNET8, (".*conv.*",)),
    "norms, then overwritten": (RESNET8, ("norm",)),
    "nothing on the way": (RESNET8, ("fc",)),
    "the middle of a block": (RESNET8, ("layer2/0/bn1",)),
    "drop path, dropout": (replace(RESNET8, drop_path=0.5, dropout=0.5), ()),
    "one pass": (replace(RESNET8, norm=Norm(stable=False)), ()),
    "norms in 32 bits": (replace(RESNET8, norm=Norm(full_precision=True)), ("conv",)),
    "group norm": (replace(RESNET8, norm=Norm(type="group", groups=4)), ()),
    "interleaved": (replace(RESNET8, norm=Norm(type="group", groups=4, interleaved=True)), ()),
    "no norm, overwritten": (replace(RESNET8, norm=Norm(type="none")), ("conv",)),
    "padded as TensorFlow does": (replace(RESNET8, padding="same"), ("conv",)),
    "projections": (MODELS["resnext11_32x4d"], ("conv", "norm")),
    "late sums, pools": (MODELS["resnet9"], ("layer1/0/conv1",)),
    "squeeze and excite": (replace(MODELS["efficientnet_cifar"], drop_path=0.2), ()),
    "norms, then overwritten by SiLU": (MODELS["efficientnet_cifar"], ("norm",)),
    "inside squeeze and excite": (MODELS["efficientnet_cifar"], (".*conv.*",)),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_statistics_are_those_of_the_plain_model(case):
    variant, patterns = CASES[case]
    check_equal(trained(variant, patterns), trained(variant, None))


@pytest.mark.parametrize("case", ["units", "norms in 32 bits", "one pass", "group norm"])
def test_the_same_holds_in_16_bits(case):
    variant, patterns = CASES[case]
    with plain_kernels():
        check_equal(trained(variant, patterns, half=True), trained(variant, None, half=True))


class Calls(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


AGAIN = {  # by patterns: convolutions and batch norms of the backward pass
    ".*conv.*": (0, 7),
    "norm": (7, 0),
    "": (7, 3),  # a unit's last norm comes right before its stored output: nobody asks for it
    "fc": (7, 7),
}


@pytest.mark.parametrize("pattern", AGAIN)
def test_what_is_stored_is_not_computed_again_and_the_rest_is_once(pattern):
    model = build_model(RESNET8, num_classes=10).train()
    enable_recomputation(model, [pattern] if pattern else [], variant=RESNET8)
    loss = model(torch.rand(16, 3, 32, 32)).sum()
    with Calls() as calls:
        loss.backward()
    found = calls.count["aten::convolution"], calls.count["aten::native_batch_norm"]
    assert found == AGAIN[pattern]
    assert calls.count["aten::add_"] == 0, "a counter was moved again"


class Net(nn.Module):
    """Large enough that nothing but figures of channels is small."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self.second = nn.Conv2d(4, 2, 3, padding=1, bias=False)
        self.drop = nn.Dropout(0.5)
        self.end = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.drop(self.second(self.act(self.norm(self.conv(x))))))


def batch() -> Tensor:
    return torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(2))


ONE = 2 * 64 * 64 * 4  # bytes of a channel of the batch
FIGURES = 4 * 2 * 4  # batch norm's mean and spread of four channels
KEPT = {  # channels alive after the forward pass, by what is stored; 2 are the output
    None: 4 + 4 + 2 + 2,  # norm's input, ReLU's output, the mask of dropout, sigmoid's output
    "conv": 4 + 2 + 2,
    "norm": 4 + 2 + 2,  # ReLU writes into what is stored
    "end": 2 + 2,
    "second": 2 + 2 + 2,
}


@pytest.mark.parametrize("pattern", KEPT)
def test_the_bytes_that_stay_are_those_of_the_stored_outputs(pattern):
    images, net = batch(), Net()
    if pattern:
        enable_recomputation(net, [f"{pattern}$"], variant=OWN)
    with LiveBytes() as live:
        for tensor in (images, *net.parameters(), *net.buffers()):
            live.ignore(tensor)
        out = net(images)
        after = live.bytes
    assert out.requires_grad
    assert after - FIGURES == KEPT[pattern] * ONE


def test_a_networks_own_dropout_is_not_drawn_again():
    def gradients(patterns: Sequence[str] | None) -> list[Tensor]:
        torch.manual_seed(3)
        net = Net()
        if patterns is not None:
            enable_recomputation(net, patterns, variant=OWN)
        net(batch()).sum().backward()
        return [weight.grad for weight in net.parameters()]

    expected = gradients(None)
    for patterns in ([], ["conv"], ["act|end"]):
        for found, wanted in zip(gradients(patterns), expected, strict=True):
            assert torch.equal(found, wanted) and wanted.abs().sum() > 0


class Odd(nn.Module):
    """Draws random numbers, and multiplies in 32 bits whatever the pass does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(64) + 0.01)
        self.last = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.rand_like(x) * (x + self.weight)
        with torch.autocast("cpu", enabled=False):
            x = x @ self.weight
        return self.last(x.sin())


def test_random_numbers_and_32_bits_in_a_network_stay_as_they_were():
    def gradient(patterns: Sequence[str] | None) -> Tensor:
        torch.manual_seed(3)
        net = Odd()
        if patterns is not None:
            enable_recomputation(net, patterns, variant=OWN)
        with plain_kernels(), torch.autocast("cpu", torch.bfloat16):
            net(batch()).sum().backward()
        return net.weight.grad

    assert torch.equal(gradient(["last"]), gradient(None))


class Overwrites(nn.Module):
    """Writes into its input after that was used, and into a part of what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 3, 64, 64), 1.5))
        self.middle, self.last = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        first = x * 1.0
        early = first.exp() * self.weight
        x.mul_(2)
        early = self.middle(early * x)
        before = (early + 1).sin()
        early.narrow(1, 0, 1).mul_(3)
        return self.last((early * early).sin() + before)


@pytest.mark.parametrize("pattern", ["last", "middle"])
def test_overwritten_tensors_do_not_reach_the_recomputation(pattern):
    def gradient(patterns: Sequence[str] | None) -> Tensor:
        net = Overwrites()
        if patterns is not None:
            enable_recomputation(net, patterns, variant=OWN)
        net(batch()).sum().backward()
        return net.weight.grad

    assert torch.equal(gradient([pattern]), gradient(None))


def test_a_plugins_pattern_that_matches_nothing_is_refused():
    with pytest.raises(ConfigError, match="no module of the network matches 'covn'; it has conv"):
        enable_recomputation(Net(), ["covn"], variant=OWN)


def test_a_plugins_parts_are_stored_without_patterns():
    assert enable_recomputation(Net(), [], variant=OWN) == (
        "conv",
        "norm",
        "act",
        "second",
        "drop",
        "end",
    )


# --- around it ---


def test_scoring_runs_without_a_recorder(monkeypatch):
    def refuse(*_args):
        raise TypeError("recorded")

    recorder = "phalanx.models.recompute._ForwardRecorder"
    monkeypatch.setattr(f"{recorder}.__torch_dispatch__", refuse)
    model = build_model(RESNET8, num_classes=10)
    enable_recomputation(model, [], variant=RESNET8)
    images = torch.rand(2, 3, 32, 32)
    model.eval()(images)
    with torch.no_grad():
        model.train()(images)
    with pytest.raises(TypeError, match="recorded"):
        model(images)


def test_a_pass_that_fails_ends_its_recorder():
    model = build_model(RESNET8, num_classes=10).train()
    enable_recomputation(model, [], variant=RESNET8)
    with pytest.raises(RuntimeError):
        model(torch.rand(2, 5, 32, 32))
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    kept = torch.rand(3, requires_grad=True).exp().grad_fn
    assert isinstance(kept._saved_result, Tensor), "a hook of the failed pass is still there"


def test_names_of_weights_stay():
    model = build_model(RESNET8, num_classes=10)
    before = list(model.state_dict())
    enable_recomputation(model, [], variant=RESNET8)
    assert list(model.state_dict()) == before


def test_a_copy_of_a_model_recomputes_by_itself():
    model = build_model(RESNET8, num_classes=10).train()
    enable_recomputation(model, [], variant=RESNET8)
    other_model = copy.deepcopy(model)
    images = torch.rand(2, 3, 32, 32)
    for each in (model, other_model):
        each(images).sum().backward()
    for weight, other in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(weight.grad, other.grad) and weight.grad is not other.grad


def test_a_pass_leaves_nothing_behind_without_the_garbage_collector(monkeypatch):
    values: list[weakref.ref[RecordedTensor]] = []

    class Watched(RecordedTensor):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            values.append(weakref.ref(self))

    monkeypatch.setattr("phalanx.models.recompute.RecordedTensor", Watched)
    model = build_model(RESNET8, num_classes=10).train()
    enable_recomputation(model, [".*conv.*"], variant=RESNET8)
    gc.disable()
    try:
        loss = model(torch.rand(4, 3, 32, 32)).sum()
        assert any(value() is not None for value in values)
        loss.backward()
        assert len(values) > 50
        assert [value for value in values if value() is not None] == []
    finally:
        gc.enable()
