"""Batch norm in passes, against torch's own in float64.

With TRITON_INTERPRET=1 and Triton installed the tests on the CPU run the fused kernels.
"""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from phalanx.kernels.batch_norm import (
    GELU,
    NONE,
    RELU,
    RELU6,
    SILU,
    apply_norm,
    apply_norm_back,
    finish_back,
    finish_vectors,
    norm_vectors,
    pack_signs,
    reduce_norm,
    reduce_norm_gated,
    unpack_signs,
)
from phalanx.kernels.choices import CHOICES
from phalanx.kernels.image_layout import to_rows

pytestmark = pytest.mark.usefixtures("first_tiles")


gpu_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, gpu_only])]
SHAPES = {
    "even": (2, 64, 6, 6),
    "ragged": (3, 40, 5, 7),
    "wide": (2, 200, 3, 3),
    "thin": (2, 3, 9, 9),
}
PLAIN = {
    NONE: nn.Identity(),
    RELU: nn.ReLU(),
    SILU: nn.SiLU(),
    RELU6: nn.ReLU6(),
    GELU: nn.GELU(),
}


def an_image(*shape, seed=0, mean=0.0, dtype=torch.float32, device="cpu"):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2 + mean
    values = values.to(device, dtype)
    return values.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else values


def a_norm(channels, device="cpu"):
    norm = nn.BatchNorm2d(channels, eps=1e-3, momentum=0.2)
    with torch.no_grad():
        norm.weight.copy_(an_image(1, channels, seed=7)[0] * 0.2 + 1)
        norm.bias.copy_(an_image(1, channels, seed=8)[0])
        norm.running_mean.copy_(an_image(1, channels, seed=9)[0])
    return norm.to(device)


def vectors(x, norm):
    running = [norm.running_mean, norm.running_var, norm.num_batches_tracked]
    affine = [norm.weight.detach(), norm.bias.detach()]
    return norm_vectors(x, affine, running, norm.eps, norm.momentum)


def in_float64(x, norm, activation, dy, residual=None, factor=None):
    """Output and gradients (of x, weight, bias, residual) by torch in float64, and the norm."""
    plain = nn.BatchNorm2d(x.shape[1], eps=norm.eps, momentum=norm.momentum)
    plain.load_state_dict(norm.state_dict())
    plain = plain.to(x.device).double()
    inputs = [x.double().requires_grad_(), *plain.parameters()]
    value = plain(inputs[0])
    if factor is not None:
        value = value * factor.double().view(-1, 1, 1, 1)
    if residual is not None:
        inputs.append(residual.double().requires_grad_())
        value = value + inputs[-1]
    y = PLAIN[activation](value)
    return y.detach(), torch.autograd.grad(y, inputs, dy.double()), plain


def is_close(found, wanted, limit=2e-6):
    error = (found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30)
    assert error < limit, f"relative error {error:.2e}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", PLAIN, ids=["none", "relu", "silu", "relu6", "gelu"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_norm_with_its_activation_equals_torch(shape, activation, device):
    x, dy = (an_image(*shape, seed=s, mean=s, device=device) for s in (1, 0))
    norm = a_norm(shape[1], device)
    wanted, (dx, dweight, dbias), plain = in_float64(x, norm, activation, dy)
    v = vectors(x, norm)
    is_close(apply_norm(x, v, activation), wanted)
    u = reduce_norm(dy, x, v, activation)
    is_close(u[0], dweight)
    is_close(u[1], dbias)
    is_close(apply_norm_back(dy, x, v, u, activation), dx)
    is_close(norm.running_mean, plain.running_mean)
    is_close(norm.running_var, plain.running_var)
    assert norm.num_batches_tracked == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gate", ["output", "signs"])
@pytest.mark.parametrize("shape", [(2, 64, 6, 6), (3, 128, 3, 5)])
def test_a_residual_with_two_gradients_and_a_factor_equals_torch(shape, gate, device):
    x, residual, dy, second = (an_image(*shape, seed=s, device=device) for s in range(4))
    factor = torch.tensor([1.5, 0.0, 0.7], device=device)[: shape[0]]
    norm = a_norm(shape[1], device)
    both = dy.double() + second.double()
    wanted, (dx, dweight, dbias, dresidual), _ = in_float64(x, norm, RELU, both, residual, factor)
    v = vectors(x, norm)
    y = apply_norm(x, v, RELU, residual, factor)
    is_close(y, wanted)
    passed, u = reduce_norm_gated(dy, x, v, pack_signs(y) if gate == "signs" else y, second, factor)
    is_close(passed, dresidual)
    is_close(u[0], dweight)
    is_close(u[1], dbias)
    is_close(apply_norm_back(passed, x, v, u, NONE, factor), dx)


@pytest.mark.parametrize("device", DEVICES)
def test_a_residual_may_be_normalised_and_may_come_last(device):
    x, other = (an_image(3, 72, 5, 5, seed=s, device=device) for s in (1, 2))
    factor = torch.tensor([1.5, 0.0, 0.7], device=device)
    norm = a_norm(72, device)
    v, other_v = vectors(x, norm), vectors(other, norm)
    normal, added = apply_norm(x, v, NONE), apply_norm(other, other_v, NONE)
    is_close(apply_norm(x, v, RELU, other, None, other_v), (normal + added).relu())
    by = factor.view(-1, 1, 1, 1)
    is_close(apply_norm(x, v, RELU, other, factor, None, True), other + by * normal.relu())


@pytest.mark.parametrize("device", DEVICES)
def test_vectors_from_partial_sums_of_others_equal_those_of_the_tensor(device):
    x, dy = (an_image(4, 72, 5, 5, seed=s, device=device) for s in (1, 2))
    norm, other = a_norm(72, device), a_norm(72, device)
    v = vectors(x, norm)
    rows, gradients = to_rows(x), to_rows(dy)
    sums = torch.stack([rows, rows * rows]).view(2, 20, 5, 72).sum(2)
    affine = [other.weight.detach(), other.bias.detach()]
    running = [other.running_mean, other.running_var, other.num_batches_tracked]
    is_close(finish_vectors(sums, affine, running, 100, other.eps, other.momentum), v)
    is_close(other.running_var, norm.running_var)
    sums = torch.stack([gradients, gradients * rows]).view(2, 20, 5, 72).sum(2)
    is_close(finish_back(sums, v, 100), reduce_norm(dy, x, v, NONE), 1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_mean_far_from_zero_costs_no_digits(device):
    x, dy = an_image(4, 64, 6, 6, mean=3000.0, device=device), an_image(4, 64, 6, 6, device=device)
    norm = a_norm(64, device)
    wanted, (_, dweight, _), plain = in_float64(x, norm, NONE, dy)
    v = vectors(x, norm)
    is_close(norm.running_var, plain.running_var, 1e-5)
    is_close(apply_norm(x, v, NONE), wanted, 1e-3)  # x itself has so few digits there
    is_close(reduce_norm(dy, x, v, NONE)[0], dweight, 1e-3)


def test_signs_are_packed_and_found_again():
    x = an_image(2, 128, 3, 3)
    assert pack_signs(x).shape == (18, 16)
    assert torch.equal(unpack_signs(pack_signs(x), x), x > 0)


def test_the_operations_are_known_to_fake_tensors():
    x, v = an_image(2, 16, 4, 4), torch.ones(4, 16)
    torch.library.opcheck(apply_norm, (x, v, RELU, x, torch.ones(2)))
    torch.library.opcheck(reduce_norm, (x, x, v, SILU))
    torch.library.opcheck(reduce_norm_gated, (x, x, v, x, x))
    torch.library.opcheck(apply_norm_back, (x, x, v, torch.ones(5, 16), RELU))
    torch.library.opcheck(finish_back, (torch.ones(2, 3, 16), v, 5))
    running = [torch.zeros(16), torch.ones(16), torch.tensor(0)]
    affine = [torch.ones(16), torch.zeros(16)]
    torch.library.opcheck(norm_vectors, (x, affine, running, 1e-5, 0.1))
    torch.library.opcheck(finish_vectors, (torch.ones(2, 3, 16), affine, running, 5, 1e-5, 0.1))


def error_of(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.gpu
@gpu_only
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(32, 64, 28, 28), (16, 40, 14, 14), (8, 512, 7, 7)])
def test_the_errors_are_no_larger_than_those_of_torch(shape, half):
    ours, torchs = [], []
    for seed in range(5):
        x = an_image(*shape, seed=seed, mean=1.0, dtype=half, device="cuda")
        dy = an_image(*shape, seed=seed + 50, dtype=half, device="cuda")
        residual = an_image(*shape, seed=seed + 90, dtype=half, device="cuda")
        norm = a_norm(shape[1], "cuda")
        wanted, gradients, _ = in_float64(x, norm, RELU, dy, residual)
        inputs = [x.clone().requires_grad_(), *norm.parameters(), residual.clone().requires_grad_()]
        y = F.relu(norm(inputs[0]) + inputs[-1])
        plain = [y.detach(), *torch.autograd.grad(y, inputs, dy)]
        v = vectors(x, norm)
        y = apply_norm(x, v, RELU, residual)
        passed, u = reduce_norm_gated(dy, x, v, y)
        found = [y, apply_norm_back(passed, x, v, u, NONE), u[0], u[1], passed]
        for mine, theirs, right in zip(found, plain, [wanted, *gradients], strict=True):
            ours.append(error_of(mine, right))
            torchs.append(error_of(theirs, right))
    for place in range(5):
        mine, theirs = sum(ours[place::5]), sum(torchs[place::5])
        # sums in float32 are compared with what 16 bits can hold at all
        limit = max(1.1 * theirs, 5 * torch.finfo(half).eps / 100)
        assert mine <= limit, f"tensor {place}: {mine / 5:.2e} against {theirs / 5:.2e}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("channels", [24, 128])
def test_every_tile_gives_the_same(channels, device, monkeypatch):
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("without Triton's interpreter there are no tiles on the CPU")
    x, dy = (an_image(3, channels, 7, 5, seed=s, device=device) for s in (1, 2))
    norm, found = a_norm(channels, device), []
    for place in range(4):
        choose = lambda _key, launches, place=place: list(launches)[place % len(launches)]  # noqa: E731
        monkeypatch.setattr(CHOICES, "find_fastest", choose)
        v = vectors(x, norm)
        y = apply_norm(x, v, RELU, dy)
        passed, u = reduce_norm_gated(dy, x, v, y)
        found.append([v, y, passed, u, apply_norm_back(passed, x, v, u, NONE)])
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            is_close(other, one)
