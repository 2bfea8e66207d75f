"""The kernels of norms and squeeze-excite against their references, and those against autograd."""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels import batch_norm
from phalanx.mbconv import norms, squeeze_excite

pytestmark = pytest.mark.usefixtures("first_tiles")

CUDA = torch.cuda.is_available()
TYPES = [torch.float16, torch.bfloat16] if CUDA else [torch.float32, torch.float16, torch.bfloat16]
needs_kernels = pytest.mark.skipif(
    not (CUDA or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="needs a CUDA device, or Triton and TRITON_INTERPRET=1",
)
EPS = 1e-5


@pytest.fixture(params=[(3, 24, 5, 4), (2, 136, 12, 13)], ids=str)
def shape(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return request.param


def image(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(shape, device="cuda" if CUDA else "cpu").to(dtype)
    return values.contiguous(memory_format=torch.channels_last)


def rows(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda" if CUDA else "cpu")


def make_vectors(x: Tensor) -> tuple[Tensor, Tensor]:
    """Forward and backward vectors of a norm."""
    v, u = rows(4, x.shape[1]), rows(5, x.shape[1])
    v[2:] = v[2:] * 0.3 + 1
    return v, u


def close(found, wanted, dtype: torch.dtype = torch.float32) -> None:
    """Each result is one rounding off at most; TF32 on a GPU costs more."""
    found = found if isinstance(found, tuple) else (found,)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert one.stride() == other.stride()
        loose = {torch.float32: 2e-3 if CUDA else 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
        largest = float(other.double().abs().max()) + 1e-30
        assert float((one.double() - other.double()).abs().max()) <= loose[dtype] * largest


def list_norm_calls(x: Tensor):
    """Every operation on images with arguments that take each of its branches."""
    n, c = x.shape[:2]
    dy, add = image(*x.shape, dtype=x.dtype), image(*x.shape, dtype=x.dtype)
    v, u = make_vectors(x)
    noise, gate, dmean = rows(n, 1).sigmoid(), rows(n, c).sigmoid(), rows(n, c)
    noise[0] = 0.01
    yield norms.norm_silu, (x, v, None)
    yield norms.norm_silu, (x, v, gate)
    yield norms.norm_add, (x, v, None, None, 0.0)
    yield norms.norm_add, (x, v, add, noise, 0.3)
    yield norms.norm_add_back, (dy, x, u, None, 0.0)
    yield norms.norm_add_back, (dy, x, u, noise, 0.3)
    yield norms.norm_gate_back, (x, v, u, dmean, dy, gate)
    yield norms.norm_gate_back, (x, v, u, dmean, None, None)


def list_sum_calls(x: Tensor):
    """Operations that give partial sums, which are compared when added up."""
    dy, (v, _), noise = image(*x.shape, dtype=x.dtype), make_vectors(x), rows(len(x), 1).sigmoid()
    noise[0] = 0.01
    yield norms.sum_channels, (x,)
    yield norms.sum_gradients, (dy, x, noise, 0.3)
    yield norms.sum_gradients, (dy, x, None, 0.0)
    yield squeeze_excite.sum_images, (x, v)
    yield squeeze_excite.sum_slopes, (x, v)
    yield squeeze_excite.sum_images_back, (x, v, dy)


def list_vector_calls(n: int, c: int, r: int, parts: int):
    """Operations on tables and partial sums."""
    v, _ = make_vectors(image(1, c, 1, 1))
    sums, back = rows(1, parts, n, c), rows(5, parts, n, c)
    w1, b1, w2, b2 = rows(r, c), rows(r), rows(c, r), rows(c)
    mean, hidden, gate = squeeze_excite.excite.reference(sums, [w1, b1, w2, b2], 20)
    dhidden, dmean = squeeze_excite.excite_back.reference(back, [w1, w2], hidden, gate, 20)
    yield norms.add_partials, (rows(40, 9, c), c)
    yield squeeze_excite.excite, (sums, [w1, b1, w2, b2], 20)
    yield squeeze_excite.excite_back, (back, [w1, w2], hidden, gate, 20)
    excited = [mean, hidden, gate, dhidden]
    yield squeeze_excite.finish_excite_back, (back, excited, dmean, v, 200)
    yield squeeze_excite.finish_mean_back, (back[:2], dmean, v, 200)


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_passes_over_images_equal_their_references(shape, dtype):
    for operation, arguments in list_norm_calls(image(*shape, dtype=dtype)):
        close(operation(*arguments), operation.reference(*arguments), dtype)


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_sums_equal_their_references(shape, dtype):
    for operation, arguments in list_sum_calls(image(*shape, dtype=dtype)):
        found, wanted = operation(*arguments), operation.reference(*arguments)
        assert found.shape == wanted.shape
        close(found.sum(1), wanted.sum(1))


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_gradient_of_silu_with_its_sums_equals_its_reference(shape, dtype):
    x, dy = image(*shape, dtype=dtype), image(*shape, dtype=dtype)
    arguments = dy, x, make_vectors(x)[0]
    found, wanted = norms.silu_back(*arguments), norms.silu_back.reference(*arguments)
    close(found[0], wanted[0], dtype)
    close(found[1].sum(1), wanted[1].sum(1), dtype)


@needs_kernels
@pytest.mark.parametrize("sizes", [(3, 24, 6, 1), (40, 72, 20, 4)], ids=str)
def test_vectors_and_small_products_equal_their_references(sizes):
    for operation, arguments in list_vector_calls(*sizes):
        close(operation(*arguments), operation.reference(*arguments))


def make_norm(c: int) -> torch.nn.BatchNorm2d:
    norm = torch.nn.BatchNorm2d(c, eps=EPS, device="cuda" if CUDA else "cpu")
    torch.nn.init.normal_(norm.weight, 1, 0.2)
    torch.nn.init.normal_(norm.bias, 0, 0.2)
    return norm


def finish(norm: torch.nn.BatchNorm2d, x: Tensor) -> Tensor:
    running = [norm.running_mean, norm.running_var, norm.num_batches_tracked]
    affine = [norm.weight.detach(), norm.bias.detach()]
    count = x.numel() // x.shape[1]
    return batch_norm.finish_vectors(norms.sum_channels(x), affine, running, count, EPS, 0.1)


def test_a_norm_with_silu_is_that_of_torch_with_gradients_and_running_statistics(shape):
    x, dy, own = image(*shape), image(*shape), make_norm(shape[1])
    plain = make_norm(shape[1])
    plain.load_state_dict(own.state_dict())
    leaf = x.clone().requires_grad_()
    wanted = F.silu(plain(leaf))
    wanted.backward(dy)
    v = finish(own, x)
    close(norms.norm_silu(x, v, None), wanted.detach())
    for name, buffer in plain.named_buffers():
        close(own.get_buffer(name), buffer)
    ds, sums = norms.silu_back(dy, x, v)
    u = batch_norm.finish_back(sums, v, x.numel() // x.shape[1])
    close((u[0], u[1]), (plain.weight.grad, plain.bias.grad))
    close(norms.norm_add_back(ds, x, u, None, 0.0), leaf.grad)


def test_squeeze_excite_is_that_of_autograd(shape):
    x, dy, norm = image(*shape), image(*shape), make_norm(shape[1])
    n, c, h, w = shape
    weights = [rows(6, c) * 0.3, rows(6), rows(c, 6) * 0.3, rows(c)]
    leaves = [each.clone().requires_grad_() for each in (x, *weights)]
    act = F.silu(norm(leaves[0]))
    hidden = F.silu(F.linear(act.mean((2, 3)), leaves[1], leaves[2]))
    wanted = act * F.linear(hidden, leaves[3], leaves[4]).sigmoid()[:, :, None, None]
    wanted.backward(dy)
    v = finish(norm, x)
    excited = squeeze_excite.excite(squeeze_excite.sum_images(x, v), weights, h * w)
    close(norms.norm_silu(x, v, excited[2]), wanted.detach())
    back = squeeze_excite.sum_images_back(x, v, dy)
    dhidden, dmean = squeeze_excite.excite_back(back, weights[::2], *excited[1:], h * w)
    found = squeeze_excite.finish_excite_back(back, [*excited, dhidden], dmean, v, n * h * w)
    u, *gradients = found
    close((u[0], u[1]), (norm.weight.grad, norm.bias.grad))
    close(tuple(gradients), tuple(leaf.grad for leaf in leaves[1:]))
    close(norms.norm_gate_back(x, v, u, dmean, dy, excited[2]), leaves[0].grad)


def test_operations_keep_the_rules_of_torch():
    x = image(2, 16, 3, 3)
    calls = [*list_norm_calls(x), *list_sum_calls(x), *list_vector_calls(2, 16, 4, 1)]
    calls.append((norms.silu_back, (x, x, make_vectors(x)[0])))
    for operation, arguments in calls:
        torch.library.opcheck(operation, arguments, test_utils=("test_schema", "test_faketensor"))
