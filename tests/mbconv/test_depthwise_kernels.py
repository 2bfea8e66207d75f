"""The kernels of depthwise convolutions against their references."""

import os

import pytest
import torch
from torch import Tensor

from phalanx.kernels.choices import CHOICES
from phalanx.mbconv import depthwise
from phalanx.mbconv.norms import add_partials

pytestmark = pytest.mark.usefixtures("first_tiles")

CUDA = torch.cuda.is_available()
TYPES = [torch.float16, torch.bfloat16] if CUDA else [torch.float32, torch.float16]
needs_kernels = pytest.mark.skipif(
    not (CUDA or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="needs a CUDA device, or Triton and TRITON_INTERPRET=1",
)
SIZES = [(2, 24, 6, 10), (3, 40, 7, 5), (2, 16, 1, 3)]
LOOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(shape, device="cuda" if CUDA else "cpu").to(dtype)
    return values.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else values


def close(found: Tensor, wanted: Tensor, loose: float) -> None:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    assert found.stride() == wanted.stride()
    largest = float(wanted.double().abs().max()) + 1e-30 if wanted.numel() else 1
    assert torch.allclose(found.double(), wanted.double(), rtol=0, atol=loose * largest)


def make_case(size, kernel, stride, dtype, *, raw: bool):
    n, c, h, w = size
    x, weight = draw(*size, dtype=dtype), draw(c, 1, kernel, kernel, dtype=dtype)
    dy = draw(n, c, (h - 1) // stride + 1, (w - 1) // stride + 1, dtype=dtype)
    v = draw(4, c) * 0.3 + 1
    return dy, x, weight, v if raw else None, stride


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (5, 1), (5, 2)])
@pytest.mark.parametrize("raw", [True, False])
def test_a_convolution_equals_its_reference(size, kernel, stride, raw, dtype):
    _, *case = make_case(size, kernel, stride, dtype, raw=raw)
    found, wanted = depthwise.convolve(*case), depthwise.convolve.reference(*case)
    close(found[0], wanted[0], LOOSE[dtype])
    assert found[1].shape == wanted[1].shape
    close(found[1].sum(1), wanted[1].sum(1), LOOSE[dtype])


@needs_kernels
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (5, 1), (5, 2)])
def test_another_tile_gives_the_same(size, kernel, stride, monkeypatch):
    monkeypatch.setattr(
        CHOICES, "find_fastest", lambda key, implementations: list(implementations)[-1]
    )
    case = make_case(size, kernel, stride, TYPES[0], raw=True)
    found, wanted = depthwise.convolve(*case[1:]), depthwise.convolve.reference(*case[1:])
    close(found[0], wanted[0], LOOSE[TYPES[0]])
    close(found[1].sum(1), wanted[1].sum(1), LOOSE[TYPES[0]])
    found = depthwise.convolve_back(*case)
    wanted = depthwise.convolve_back.reference(*case)
    close(found[0], wanted[0], LOOSE[TYPES[0]])
    for one, other in zip(found[1:], wanted[1:], strict=True):
        dim = 1 if one.shape[0] == 2 else 0
        close(one.sum(dim), other.sum(dim), LOOSE[TYPES[0]])


@needs_kernels
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (5, 1), (5, 2)])
@pytest.mark.parametrize("raw", [True, False])
def test_gradients_of_a_convolution_equal_their_references(size, kernel, stride, raw):
    for dtype in TYPES[-2:]:
        case = make_case(size, kernel, stride, dtype, raw=raw)
        found = depthwise.convolve_back(*case)
        wanted = depthwise.convolve_back.reference(*case)
        close(found[0], wanted[0], LOOSE[dtype])
        assert [each.shape for each in found] == [each.shape for each in wanted]
        if raw:
            close(found[1].sum(1), wanted[1].sum(1), LOOSE[dtype])
        found, wanted = (add_partials(each[2], size[1]) for each in (found, wanted))
        close(found, wanted, LOOSE[torch.float32])


def test_operations_keep_the_rules_of_torch():
    case = make_case((2, 8, 5, 6), 3, 2, torch.float32, raw=True)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(depthwise.convolve, case[1:], test_utils=tests)
    torch.library.opcheck(depthwise.convolve_back, case, test_utils=tests)
