"""The fused update gives the bits of its reference, wherever tensors lie."""

import os
from importlib.util import find_spec
from math import inf, nan

import pytest
import torch

from phalanx.kernels import update
from phalanx.kernels.update import (
    FORMULAS,
    RESULTS,
    UPDATED,
    MultiTensorUpdate,
    UpdateColumns,
    UpdateRows,
    UpdateTensors,
)

SIZES = [(2048,), (3, 5, 3, 3), (1,), (5000,), (7,)]  # of blocks: one, a part, three
GROUPS = [0, 1, 0, 1, 0]
INTERPRETED = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
    ),
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
CASES = {
    "plain": {},
    "without momentum": {"momentum": False},
    "clipped": {"clip_norm": 1.0, "clip_value": 0.5, "share": 0.8},
    "short enough": {"clip_norm": 1e6},
    "bfloat16": {"half": torch.bfloat16},
    "scale grows": {"finite_steps": 2.0},
    "overflow": {"finite_steps": 0.0, "bad": inf},
    "overflow at a fixed scale": {"bad": nan},
    "misaligned": {"offset": 1},
}


def build(formula, device, *, finite_steps=None, half=torch.float16, bad=None, offset=0, **values):
    """All that a step of five weights needs; the last has no gradient, the third no copy."""
    draw = torch.Generator().manual_seed(0)

    def make(size):
        count = torch.Size(size).numel()
        memory = torch.empty(count + offset, device=device)[offset:]
        return memory.copy_(torch.randn(count, generator=draw)).view(size)

    given = {"clip_norm": 0.0, "clip_value": inf, "share": 0.3, **values}
    settings = [64.0, 17, given["share"], given["clip_norm"], given["clip_value"], 8.0]
    settings += [3, 2.0**-24, 2.0**24, *(0.1, 0.03, 0.99, 0.9, 0.95, 1e-3)]
    settings += [0.2, 0, 1, 0.8, 0.97, 1e-2]
    gradients = [make(size) * 64 for size in SIZES[:-1]]
    if bad is not None:
        gradients[1][0, 0, 0, 0] = bad
    weights = [make(size) for size in SIZES]
    state = [[make(size).abs() for size in SIZES] for _ in range(2)]
    halves = [torch.zeros_like(weight, dtype=half) for weight in weights]
    number = torch.float64 if formula == "sgd_combined" else torch.float32
    columns = UpdateColumns(
        weights,
        [*gradients, None],
        *state,
        [make(size) for size in SIZES],
        [*halves[:2], None, *halves[3:]],
        [torch.tensor(3.0, dtype=number, device=device) for _ in SIZES],
    )
    tensors = UpdateTensors(
        formula,
        given.get("momentum", True),
        torch.tensor(settings, dtype=torch.float64, device=device),
        torch.zeros(RESULTS, device=device),
    )
    if finite_steps is not None:
        numbers = [64.0, finite_steps, 1, 4, *(9, 64), *(7, 32), *(8, 48)]
        tensors.loss_scale = torch.tensor(numbers, dtype=torch.float64, device=device)
        tensors.multiplier = torch.tensor(64.0, device=device)
    counters = [(torch.tensor(5, device=device), torch.tensor(0, device=device))]
    return tensors, columns, counters


def all_tensors(tensors, columns, counters):
    found = [tensor for column in columns for tensor in column]
    found += [tensors.results, tensors.loss_scale, tensors.multiplier, counters[0][1]]
    return [tensor for tensor in found if tensor is not None]


def update_with(built, way):
    tensors, columns, counters = built
    updater = MultiTensorUpdate(tensors)
    if way == "fused":
        assert updater._fused is not None
    else:
        updater._fused = None
    updater.set_rows(UpdateRows(columns, GROUPS, counters))
    updater.run()
    return all_tensors(tensors, columns, counters)


def assert_same_bits(ones, others):
    for one, other in zip(ones, others, strict=True):
        assert torch.equal(one.nan_to_num(nan=123.0), other.nan_to_num(nan=123.0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("formula", FORMULAS)
def test_fused_kernels_give_the_bits_of_the_reference(formula, case, device):
    if formula == "nesterov" and case == "without momentum":
        pytest.skip("there is no such formula")
    if case == "bfloat16" and device == "cpu":
        pytest.skip("Triton's interpreter cuts off bits where a GPU rounds to bfloat16")
    before = all_tensors(*build(formula, device, **CASES[case]))
    plain = update_with(build(formula, device, **CASES[case]), "plain")
    assert_same_bits(update_with(build(formula, device, **CASES[case]), "fused"), plain)
    weight_factor = [torch.equal(one, other) for one, other in zip(before, plain, strict=True)]
    assert any(weight_factor) and not all(weight_factor)


@pytest.mark.parametrize("device", DEVICES)
def test_an_overflow_leaves_everything_but_the_scale(device):
    built = build("adam", device, **CASES["overflow"])
    before = [tensor.clone() for tensor in all_tensors(*built)]
    after = update_with(built, "fused")
    changed = [
        tensor for old, tensor in zip(before, after, strict=True) if not torch.equal(old, tensor)
    ]
    assert [id(tensor) for tensor in changed] == [
        id(tensor) for tensor in (built[0].results, built[0].loss_scale, built[0].multiplier)
    ]
    assert built[0].results[update.NORM] == 0 and built[0].results[UPDATED] == 0
    numbers = [32.0, 0, 2, 5, *(9, 64), *(17, 32), *(8, 48)]
    assert built[0].loss_scale.tolist() == numbers and built[0].multiplier == 32


@pytest.mark.parametrize("way", ["plain", pytest.param("fused", marks=DEVICES[0].marks)])
def test_tensors_that_move_and_gradients_in_another_order_are_seen(way):
    tensors, columns, counters = build("sgd", "cpu")
    updater = MultiTensorUpdate(tensors)
    if way == "plain":
        updater._fused = None
    weight, order = columns.weights[1], torch.channels_last
    for step in range(3):
        gradient = torch.full_like(weight, 64.0).copy_(
            torch.arange(float(weight.numel())).view(weight.shape)
        )
        gradient = gradient.contiguous(memory_format=order) if step else gradient
        new = weight.clone()
        given = columns._replace(
            weights=[columns.weights[0], new, *columns.weights[2:]],
            gradients=[columns.gradients[0], gradient, *columns.gradients[2:]],
            first=[columns.first[0], torch.zeros_like(new), *columns.first[2:]],
        )
        if step == 2:  # the same place again, with other numbers
            gradient.mul_(2)
        stays = updater.set_rows(UpdateRows(given, GROUPS, counters))
        assert stays == (way == "fused" and step == 0), "a copy must be made again"
        updater.run()
        moved = (weight - new) / 0.2 * 64
        assert torch.allclose(moved, gradient, atol=1e-3), step


def test_a_list_overwrites_a_tensor():
    target = torch.zeros(3, dtype=torch.float64)
    update.overwrite(target[1:], [1, 0.1])
    assert target.tolist() == [0.0, 1.0, 0.1]
