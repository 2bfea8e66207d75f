"""The kernels of the first products against their references."""

import os

import pytest
import torch
from torch import Tensor

from phalanx.mbconv import expand

pytestmark = pytest.mark.usefixtures("first_tiles")

CUDA = torch.cuda.is_available()
needs_kernels = pytest.mark.skipif(
    not (CUDA or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="needs a CUDA device, or Triton and TRITON_INTERPRET=1",
)
LOOSE = {torch.float32: 2e-3 if CUDA else 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# Triton's interpreter has no products of bfloat16
TYPES = [torch.float16, torch.bfloat16] if CUDA else [torch.float32, torch.float16]
CASES = [
    (False, 8, 8),
    (False, 16, 96),
    (False, 24, 40),
    (False, 40, 240),
    (True, 27, 32),
    (True, 27, 40),
]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(shape, device="cuda" if CUDA else "cpu").to(dtype)
    return values.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else values


def close(found: Tensor, wanted: Tensor, loose: float) -> None:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    largest = float(wanted.double().abs().max()) + 1e-30 if wanted.numel() else 1
    assert torch.allclose(found.double(), wanted.double(), rtol=0, atol=loose * largest)


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("stem", "k", "e"), CASES)
def test_a_product_equals_its_reference_with_gradients(stem, k, e, dtype):
    x = draw(3, 3 if stem else k, 9, 14, dtype=dtype)
    weight = draw(e, k, dtype=dtype) * k**-0.5
    found, wanted = expand.expand(x, weight, stem), expand.expand.reference(x, weight, stem)
    close(found[0], wanted[0], LOOSE[dtype])
    assert found[1].shape == wanted[1].shape
    close(found[1].sum(1), wanted[1].sum(1), LOOSE[dtype])
    ds, u = draw(*found[0].shape, dtype=dtype), draw(5, e)
    for add in (None,) if stem else (None, draw(*x.shape, dtype=dtype)):
        arguments = ds, x, weight, u, add, stem
        found, wanted = expand.expand_back(*arguments), expand.expand_back.reference(*arguments)
        for one, other in zip(found, wanted, strict=True):
            close(one, other, LOOSE[dtype])


def test_operations_keep_the_rules_of_torch():
    tests = ("test_schema", "test_faketensor")
    for stem, k, e in CASES[1::2]:
        x, weight, u = draw(2, 3 if stem else k, 4, 6), draw(e, k), draw(5, e)
        torch.library.opcheck(expand.expand, (x, weight, stem), test_utils=tests)
        ds = expand.expand(x, weight, stem)[0]
        arguments = ds, x, weight, u, None, stem
        torch.library.opcheck(expand.expand_back, arguments, test_utils=tests)
