"""Our norms against torch's, or against torch's with the channels in another order."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from phalanx.catalog.models import MODELS
from phalanx.catalog.variant import Norm
from phalanx.models.build import build_model
from phalanx.models.norms import (
    FullBatchNorm,
    FullGroupNorm,
    FullInterleavedGroupNorm,
    FullOnePassBatchNorm,
    FullPrecision,
    InterleavedGroupNorm,
    OnePassBatchNorm,
    build_norm,
)

CHANNELS, GROUPS = 12, 3
FULL = {
    FullBatchNorm: Norm(),
    FullOnePassBatchNorm: Norm(stable=False),
    FullGroupNorm: Norm(type="group", groups=GROUPS),
    FullInterleavedGroupNorm: Norm(type="group", groups=GROUPS, interleaved=True),
}


def batch(*, mean: float = 2.0, spread: float = 3.0, edges: tuple[int, int] = (5, 7)) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(4, CHANNELS, *edges, generator=generator, dtype=torch.float64)
    return (x * spread + mean).float()


def shake(norm: nn.Module) -> nn.Module:
    """Give the norm weights that do something."""
    generator = torch.Generator().manual_seed(12)
    for weight in norm.parameters():
        weight.data.normal_(generator=generator)
    return norm


def pulled(norm: nn.Module, x: Tensor, pull: Tensor) -> tuple[Tensor, ...]:
    """The output, and the gradients of input, weight and bias when it is pulled that way."""
    x = x.clone().requires_grad_()
    y = norm(x)
    return y.detach(), *torch.autograd.grad((y * pull).sum(), (x, norm.weight, norm.bias))


# --- batch norm in one pass ---


@pytest.mark.parametrize("momentum", [0.1, 0.7])
def test_one_pass_batch_norm_is_torchs_with_its_running_statistics_and_gradients(momentum):
    ours = shake(OnePassBatchNorm(CHANNELS, eps=1e-3, momentum=momentum))
    torchs = nn.BatchNorm2d(CHANNELS, eps=1e-3, momentum=momentum)
    torchs.load_state_dict(ours.state_dict())
    pull = torch.randn(batch().shape)
    for x in (batch(), batch(mean=-1.0)):
        for a, b in zip(pulled(ours, x, pull), pulled(torchs, x, pull), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    for name, value in torchs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-5, atol=1e-5)
    assert ours.num_batches_tracked == 2


def test_one_pass_batch_norm_scores_with_the_running_statistics():
    ours = shake(OnePassBatchNorm(CHANNELS))
    ours(batch())
    kept = {name: value.clone() for name, value in ours.state_dict().items()}
    torchs = nn.BatchNorm2d(CHANNELS).eval()
    torchs.load_state_dict(kept)
    x = batch(mean=7.0)
    assert torch.equal(ours.eval()(x), torchs(x))
    assert all(torch.equal(ours.state_dict()[name], value) for name, value in kept.items())


def test_one_pass_loses_the_digits_that_two_keep():
    x = batch(mean=1e4, spread=1e-2)
    exact = x.double()
    mean, variance = exact.mean((0, 2, 3), keepdim=True), exact.var((0, 2, 3), correction=0)
    expected = ((exact - mean) / (variance[:, None, None] + 1e-5).sqrt()).float()
    ours, torchs = OnePassBatchNorm(CHANNELS)(x), nn.BatchNorm2d(CHANNELS)(x)
    assert (torchs - expected).abs().max() < 0.05
    assert (ours - expected).abs().max() > 0.5
    assert ours.isfinite().all()


# --- group norm over every G-th channel ---


def reordering(channels: int, groups: int) -> Tensor:
    """Where each channel of the contiguous layout lies in the interleaved one."""
    each = channels // groups
    return torch.tensor(
        [place * groups + group for group in range(groups) for place in range(each)]
    )


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("edges", [(5, 7), (1, 1)])
def test_interleaved_group_norm_is_torchs_with_the_channels_reordered(layout, edges):
    order = reordering(CHANNELS, GROUPS)
    ours, torchs = shake(InterleavedGroupNorm(GROUPS, CHANNELS)), nn.GroupNorm(GROUPS, CHANNELS)
    torchs.load_state_dict({name: value[order] for name, value in ours.state_dict().items()})
    x = batch(edges=edges).to(memory_format=layout)
    pull = torch.randn(x.shape)
    y, to_x, to_weight, to_bias = pulled(ours, x, pull)
    expected = pulled(torchs, x[:, order], pull[:, order])
    found = (y[:, order], to_x[:, order], to_weight[order], to_bias[order])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    back = torch.argsort(order)
    torch.testing.assert_close(y, torchs(x[:, order])[:, back], rtol=1e-4, atol=1e-4)
    assert y.is_contiguous(memory_format=layout)


def test_the_two_layouts_are_not_each_other():
    ours, torchs = shake(InterleavedGroupNorm(GROUPS, CHANNELS)), nn.GroupNorm(GROUPS, CHANNELS)
    torchs.load_state_dict(ours.state_dict())
    x = batch() * torch.arange(1.0, CHANNELS + 1)[:, None, None]
    assert (ours(x) - torchs(x)).abs().max() > 0.1


@pytest.mark.parametrize("groups", [1, CHANNELS])
def test_with_one_group_or_one_channel_a_group_there_is_only_one_layout(groups):
    x = batch()
    ours, torchs = InterleavedGroupNorm(groups, CHANNELS), nn.GroupNorm(groups, CHANNELS)
    torch.testing.assert_close(ours(x), torchs(x), rtol=1e-4, atol=1e-4)


# --- 32 bits whatever comes in ---


@pytest.mark.parametrize("kind", FULL)
@pytest.mark.parametrize("training", [True, False])
def test_a_full_precision_norm_gives_the_32_bit_result_rounded(kind, training):
    spec = FULL[kind]
    full = shake(build_norm(replace(spec, full_precision=True), CHANNELS)).train(training)
    plain = build_norm(spec, CHANNELS).train(training)
    plain.load_state_dict(full.state_dict())
    x = batch().bfloat16()
    expected = plain(x.float())
    with torch.autocast("cpu", torch.bfloat16):
        found = full(x)
        assert torch.is_autocast_enabled("cpu"), "only the norm leaves the half precision"
    assert type(full) is kind
    assert found.dtype == torch.bfloat16 and expected.dtype == torch.float32
    assert torch.equal(found, expected.bfloat16())
    for name, value in plain.state_dict().items():
        assert torch.equal(full.state_dict()[name], value), name


def test_what_lies_below_full_precision_sees_32_bits_and_no_autocast():
    seen = []

    class Witness(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((x.dtype, torch.is_autocast_enabled("cpu")))
            return x

    class Full(FullPrecision, Witness):
        pass

    with torch.autocast("cpu", torch.bfloat16):
        assert Full()(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert seen == [(torch.float32, False)]


@pytest.mark.parametrize("kind", [OnePassBatchNorm, InterleavedGroupNorm])
def test_our_own_norms_take_and_give_half_precision(kind):
    norm = kind(CHANNELS) if kind is OnePassBatchNorm else kind(GROUPS, CHANNELS)
    x = batch()
    torch.testing.assert_close(norm(x.bfloat16()).float(), norm(x), rtol=2e-2, atol=2e-2)
    assert norm(x.bfloat16()).dtype == torch.bfloat16


# --- the table ---

KINDS = {  # batch by (stable, full precision), group by (interleaved, full precision)
    "batch": {
        (True, False): nn.BatchNorm2d,
        (True, True): FullBatchNorm,
        (False, False): OnePassBatchNorm,
        (False, True): FullOnePassBatchNorm,
    },
    "group": {
        (False, False): nn.GroupNorm,
        (False, True): FullGroupNorm,
        (True, False): InterleavedGroupNorm,
        (True, True): FullInterleavedGroupNorm,
    },
}


@pytest.mark.parametrize(("stable", "interleaved", "full"), list(product([True, False], repeat=3)))
def test_every_combination_of_options_has_its_norm(stable, interleaved, full):
    asked = Norm(
        groups=GROUPS,
        momentum=0.3,
        eps=0.02,
        full_precision=full,
        stable=stable,
        interleaved=interleaved,
    )
    batch_norm = build_norm(asked, CHANNELS)
    assert type(batch_norm) is KINDS["batch"][stable, full]
    assert (batch_norm.num_features, batch_norm.momentum, batch_norm.eps) == (CHANNELS, 0.3, 0.02)
    group_norm = build_norm(replace(asked, type="group"), CHANNELS)
    assert type(group_norm) is KINDS["group"][interleaved, full]
    shape = (group_norm.num_groups, group_norm.num_channels, group_norm.eps)
    assert shape == (GROUPS, CHANNELS, 0.02)
    assert type(build_norm(replace(asked, type="none"), CHANNELS)) is nn.Identity


def test_a_layout_is_told_only_where_groups_are_interleaved():
    assert Norm(type="group", interleaved=True).layout == "interleaved"
    assert Norm(type="group").layout == "contiguous"
    assert Norm(interleaved=True).layout == "contiguous", "batch norm has no groups"


@pytest.mark.parametrize("name", ["resnet11", "resnet9", "efficientnet_cifar"])
def test_without_norms_the_convolutions_have_biases(name):
    with torch.device("meta"):
        plain = build_model(MODELS[name], num_classes=10)
        bare = build_model(replace(MODELS[name], norm=Norm(type="none")), num_classes=10)
    normed = [path for path, m in plain.named_modules() if isinstance(m, nn.BatchNorm2d)]
    assert normed and all(isinstance(bare.get_submodule(path), nn.Identity) for path in normed)
    weighing = {p for p, _ in plain.named_modules() if ".se.conv_" in p}  # always has biases
    for path, conv in bare.named_modules():
        if isinstance(conv, nn.Conv2d):
            assert conv.bias is not None
            assert (plain.get_submodule(path).bias is not None) == (path in weighing)
