"""1x1 convolutions with what surrounds them, against their definitions in float64.

With TRITON_INTERPRET=1 and Triton installed the tests on the CPU run the fused kernels.
"""

import os

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.kernels.batch_norm import pack_signs
from phalanx.kernels.choices import CHOICES
from phalanx.products import fold
from small_products import (
    Draws,
    as_tuple,
    other_cases,
    product_cases,
    to_double,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
gpu_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_kernels = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU or Triton's interpreter"
)
HALF_TYPES = (torch.float16, torch.bfloat16)
# 1.1 times what rounding the exact result costs, and for float32 what sums in another order do
ROUNDING = {torch.float32: 2e-5, torch.float16: 2.4e-4, torch.bfloat16: 1.9e-3}


def cases(kind, dtype=torch.float32, device="cpu"):
    return {case.name: case for case in kind(Draws(dtype, device))}


def check(case, dtype):
    """The operation's results against float64: one rounding to 16 bits, or float32's own."""
    found = as_tuple(case.operation(*case.operands))
    wanted = as_tuple(case.reference(*map(to_double, case.operands)))
    if case.operation is fold.gram_matrix_of_input:  # the Gram matrix of the input that is stored
        wanted = (wanted[0], *fold.gram_matrix_reference(found[0].double()))
    factor = 1.5 if case.operation is fold.fold_input else 1.0  # a factor is rounded as well
    for one, other in zip(found, wanted, strict=True):
        if one.dtype == torch.uint8:
            assert torch.equal(one, pack_signs(found[0])), case.name
            continue
        error = (one.double() - other).norm() / other.norm()
        assert error < factor * ROUNDING[one.dtype], case.name


@pytest.mark.parametrize("name", cases(product_cases))
def test_products_are_as_defined(name):
    check(cases(product_cases)[name], torch.float32)


@pytest.mark.parametrize("name", cases(other_cases))
def test_what_surrounds_products_is_as_defined(name):
    check(cases(other_cases)[name], torch.float32)


TOO_SMALL = ("sums of a narrow one", "odd strided skip")  # for TMA to pay


class EveryLaunch:
    """Takes one of the launches of every product after the other."""

    def __init__(self, monkeypatch, only="", key="gemm"):
        self.index, self.count, self.tried, self.only, self.key = 0, 1, 0, only, key
        monkeypatch.setattr(CHOICES, "find_fastest", self.find_fastest)

    def find_fastest(self, key, launches):
        if not key.startswith(self.key):
            return next(iter(launches))
        names = [name for name in launches if name.startswith(self.only)]
        self.count, self.tried = len(names), self.tried + len(names)
        return names[self.index] if names else next(iter(launches))

    def __iter__(self):
        while self.index < max(self.count, 1):
            yield
            self.index += 1


@needs_kernels
@pytest.mark.skipif(not INTERPRETED, reason="tiles are tried on the GPU by another test")
@pytest.mark.parametrize("kernel", ["gemm_rows BM=64 BN=64", "gemm_tma BM=128 BN=64"])
@pytest.mark.parametrize("name", cases(product_cases))
def test_every_kernel_gives_the_same_product(name, kernel, monkeypatch):
    launches = EveryLaunch(monkeypatch, kernel)
    check(cases(product_cases)[name], torch.float32)
    assert launches.tried or ("tma" in kernel and name in TOO_SMALL)


# every use in one type, and in the other those that differ most
TRIED = [(name, torch.float16) for name in cases(product_cases)]
TRIED += [(name, torch.bfloat16) for name in ("sums", "residual", "input, gated", "skip, gated")]


@pytest.fixture(scope="module")
def compiled():
    """Every kernel compiled, several at a time: one by one they take minutes."""

    def run():
        for dtype in HALF_TYPES:
            for kind in (product_cases, other_cases):
                for name, case in cases(kind, dtype, "cuda").items():
                    if (name, dtype) in TRIED or kind is not product_cases:
                        case.operation(*case.operands)

    CHOICES.compile_all(run)


@pytest.mark.gpu
@gpu_only
@pytest.mark.parametrize(("name", "dtype"), TRIED)
def test_every_tile_on_the_gpu(name, dtype, monkeypatch, compiled):
    case = cases(product_cases, dtype, "cuda")[name]
    for _ in EveryLaunch(monkeypatch):
        check(case, dtype)
        torch.cuda.synchronize()


@pytest.mark.gpu
@gpu_only
@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("name", cases(other_cases))
def test_what_surrounds_products_on_the_gpu(name, dtype, compiled):
    check(cases(other_cases, dtype, "cuda")[name], dtype)


def test_fake_tensors_have_the_shapes_of_real_ones():
    draws = Draws(torch.float32, "cpu")
    for case in (*product_cases(draws), *other_cases(draws)):
        found = as_tuple(case.operation(*case.operands))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            operands = [
                [mode.from_tensor(t) for t in value] if isinstance(value, list)
                else mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
                for value in case.operands
            ]  # fmt: skip
            fakes = as_tuple(case.operation(*operands))
        for one, other in zip(found, fakes, strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype, case.name
            assert one.stride() == other.stride(), case.name


@pytest.mark.parametrize(("mean", "limit"), [(0.0, 1e-5), (4.0, 1e-5), (16.0, 1e-4)])
def test_a_norm_is_known_from_the_gram_matrix(mean, limit):
    draws = Draws(torch.float32, "cpu")
    x, w = (draws.image(64) + mean).relu(), draws.matrix(128, 64, 64)
    norm = nn.BatchNorm2d(128, momentum=0.2).double()
    with torch.no_grad():
        norm.weight.copy_(draws.normal(128) + 1)
        norm.bias.copy_(draws.normal(128))
    own = [tensor.detach().float() for tensor in (norm.weight, norm.bias)]
    running = [norm.running_mean.float(), norm.running_var.float(), norm.num_batches_tracked + 0]
    x = x.contiguous(memory_format=torch.channels_last)
    count = x.numel() // 64
    gram, sums = fold.gram_matrix(x)
    t = fold.fold_covariance(gram, sums, w, count)
    v = fold.fold_statistics([sums, w, t], own, running, count, norm.eps, 0.2)
    c = nn.functional.conv2d(x.double(), w.double()[:, :, None, None])
    wanted = norm(c)
    scaled = c * v[2].double()[:, None, None] + v[3].double()[:, None, None]
    assert (scaled - wanted).norm() / wanted.norm() < limit
    assert torch.allclose(v[0].double(), c.mean((0, 2, 3)), atol=limit)
    for one, other in zip(running, (norm.running_mean, norm.running_var), strict=False):
        assert torch.allclose(one.double(), other, rtol=limit, atol=limit)
    assert running[2] == norm.num_batches_tracked == 1
