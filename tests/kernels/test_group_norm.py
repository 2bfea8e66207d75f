"""Group norm in passes, against torch's own in float64.

With TRITON_INTERPRET=1 and Triton installed the tests on the CPU run the fused kernels.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from phalanx.kernels.batch_norm import NONE, RELU, SILU, apply_norm, apply_norm_back
from phalanx.kernels.group_norm import (
    group_norm_vectors,
    list_groups,
    reduce_group_norm,
    reduce_group_norm_gated,
)
from phalanx.models.norms import InterleavedGroupNorm

pytestmark = pytest.mark.usefixtures("first_tiles")


gpu_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, gpu_only])]
SHAPES = {
    "even": (2, 64, 6, 6, 16),
    "ragged": (3, 42, 5, 7, 6),
    "one group": (2, 8, 4, 4, 1),
    "wide": (2, 192, 3, 3, 32),
}  # the last number is that of the groups
PLAIN = {NONE: nn.Identity(), RELU: nn.ReLU(), SILU: nn.SiLU()}


def an_image(*shape, seed=0, mean=0.0, dtype=torch.float32, device="cpu"):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2 + mean
    return values.to(device, dtype).contiguous(memory_format=torch.channels_last)


def a_norm(channels, groups, device, *, interleaved=False):
    norm = (InterleavedGroupNorm if interleaved else nn.GroupNorm)(groups, channels, eps=1e-3)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.uniform_(norm.bias, -1, 1)
    return norm.to(device)


def in_float64(norm, x, activation, dy, residual=None, factor=None):
    """Output and gradients of x, weight, bias and residual."""
    weights = [weight.detach().double().requires_grad_() for weight in norm.parameters()]
    inputs = [x.double().requires_grad_(), *weights]
    value = torch.func.functional_call(
        norm, dict(zip(("weight", "bias"), weights, strict=True)), inputs[0]
    )
    if factor is not None:
        value = value * factor.double().view(-1, 1, 1, 1)
    if residual is not None:
        inputs.append(residual.double().requires_grad_())
        value = value + inputs[-1]
    y = PLAIN[activation](value)
    return y.detach(), torch.autograd.grad(y, inputs, dy.double())


def is_close(found, wanted, limit=2e-6):
    error = (found.double() - wanted).norm() / wanted.norm()
    assert error < limit, f"relative error {error:.2e}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interleaved", [False, True], ids=["side by side", "interleaved"])
@pytest.mark.parametrize("activation", PLAIN, ids=["none", "relu", "silu"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_norm_with_its_activation_equals_torch(shape, activation, interleaved, device):
    *shape, number = shape
    x, dy = (an_image(*shape, seed=s, mean=s, device=device) for s in (1, 0))
    norm = a_norm(shape[1], number, device, interleaved=interleaved)
    wanted, (dx, dweight, dbias) = in_float64(norm, x, activation, dy)
    groups = list_groups(number, shape[1], interleaved=interleaved)
    v = group_norm_vectors(x, [norm.weight.detach(), norm.bias.detach()], groups, norm.eps)
    is_close(apply_norm(x, v, activation), wanted)
    u = reduce_group_norm(dy, x, v, groups, activation)
    is_close(u[0].sum(0), dweight)
    is_close(u[1].sum(0), dbias)
    is_close(apply_norm_back(dy, x, v, u, activation), dx)


@pytest.mark.parametrize("device", DEVICES)
def test_a_residual_with_two_gradients_and_a_factor_equals_torch(device):
    shape, groups = (3, 64, 5, 6), list_groups(8, 64, interleaved=False)
    x, residual, dy, second = (an_image(*shape, seed=s, device=device) for s in range(4))
    factor = torch.tensor([1.5, 0.0, 0.7], device=device)
    norm = a_norm(64, 8, device)
    both = dy.double() + second.double()
    wanted, (dx, dweight, dbias, dresidual) = in_float64(norm, x, RELU, both, residual, factor)
    v = group_norm_vectors(x, [norm.weight.detach(), norm.bias.detach()], groups, norm.eps)
    y = apply_norm(x, v, RELU, residual, factor)
    is_close(y, wanted)
    passed, u = reduce_group_norm_gated(dy, x, v, groups, y, second, factor)
    is_close(passed, dresidual)
    is_close(u[0].sum(0), dweight)
    is_close(u[1].sum(0), dbias)
    is_close(apply_norm_back(passed, x, v, u, NONE, factor), dx)


@pytest.mark.parametrize("device", DEVICES)
def test_a_mean_far_from_zero_costs_no_digits(device):
    x, dy = an_image(2, 64, 6, 6, mean=3000.0, device=device), an_image(2, 64, 6, 6, device=device)
    norm, groups = a_norm(64, 16, device), list_groups(16, 64, interleaved=False)
    wanted, _ = in_float64(norm, x, NONE, dy)
    v = group_norm_vectors(x, [norm.weight.detach(), norm.bias.detach()], groups, norm.eps)
    is_close(apply_norm(x, v, NONE), wanted, 1e-3)  # x itself has so few digits there


def test_the_operations_are_known_to_fake_tensors():
    x, v, groups = an_image(2, 16, 4, 4), torch.ones(4, 2, 16), list_groups(4, 16, interleaved=True)
    torch.library.opcheck(group_norm_vectors, (x, [torch.ones(16), torch.ones(16)], groups, 1e-5))
    torch.library.opcheck(reduce_group_norm, (x, x, v, groups, RELU))
    torch.library.opcheck(reduce_group_norm_gated, (x, x, v, groups, x, x))


def error_of(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.gpu
@gpu_only
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(32, 64, 28, 28), (8, 512, 7, 7)])
def test_the_errors_are_no_larger_than_those_of_torch(shape, half):
    ours, torchs, groups = [], [], list_groups(32, shape[1], interleaved=False)
    for seed in range(5):
        x = an_image(*shape, seed=seed, mean=1.0, dtype=half, device="cuda")
        dy = an_image(*shape, seed=seed + 50, dtype=half, device="cuda")
        norm = a_norm(shape[1], 32, "cuda")
        wanted, gradients = in_float64(norm, x, RELU, dy)
        inputs = [x.clone().requires_grad_(), *norm.parameters()]
        with torch.autocast("cuda", half):
            y = F.relu(norm(inputs[0])).to(half)
        plain = [y.detach(), *torch.autograd.grad(y, inputs, dy)]
        v = group_norm_vectors(x, [norm.weight.detach(), norm.bias.detach()], groups, norm.eps)
        u = reduce_group_norm(dy, x, v, groups, RELU)
        found = [apply_norm(x, v, RELU), apply_norm_back(dy, x, v, u, RELU), *u[:2].sum(1)]
        for mine, theirs, right in zip(found, plain, [wanted, *gradients], strict=True):
            ours.append(error_of(mine, right))
            torchs.append(error_of(theirs, right))
    for place in range(4):
        mine, theirs = sum(ours[place::4]), sum(torchs[place::4])
        # sums in float32 are compared with what 16 bits can hold at all
        limit = max(1.1 * theirs, 5 * torch.finfo(half).eps / 100)
        assert mine <= limit, f"tensor {place}: {mine / 5:.2e} against {theirs / 5:.2e}"
