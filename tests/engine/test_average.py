"""Averaged weights: against 64-bit references, kept in checkpoints, put in and taken out."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from phalanx.catalog.models import MODELS
from phalanx.catalog.variant import Norm
from phalanx.engine.state import hash_weights
from phalanx.engine.weight_average import WeightAverage, average_weights, reestimate_norms
from phalanx.errors import CheckpointError
from phalanx.models.build import build_model, initialise_weights
from small_gpu import not_waiting

DECAY = 0.95  # reached at step 170, so that both sides of the warm-up are seen


def small_model(norm: Norm | None = None) -> nn.Module:
    variant = MODELS["resnet8"] if norm is None else replace(MODELS["resnet8"], norm=norm)
    model = build_model(variant, num_classes=10)
    initialise_weights(model, 0, zero_residual=False)
    return model.to(memory_format=torch.channels_last)


@torch.no_grad()
def wander(model: nn.Module, step: int) -> None:
    """A step of something: weights move a little, running statistics see a batch."""
    generator = torch.Generator().manual_seed(step)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.add_(noise.to(weight.dtype), alpha=0.1)
    images = torch.randn(4, 3, 12, 12, generator=generator)
    model.train()
    model(images.to(next(model.parameters()).dtype))


def wide(model: nn.Module) -> dict[str, np.ndarray]:
    return {n: t.detach().double().numpy().copy() for n, t in model.state_dict().items()}


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def followed(model: nn.Module, *, steps: range) -> tuple[WeightAverage, dict[str, np.ndarray]]:
    """Live averages over some steps, and what they should be, in 64 bits."""
    averages, expected = WeightAverage(model, decay=DECAY), wide(model)
    for step in steps:
        wander(model, step)
        averages.update(step)
        decay = min(DECAY, (1 + step) / (10 + step))
        for name, now in wide(model).items():
            expected[name] = decay * expected[name] + (1 - decay) * now
    return averages, expected


# --- live ---


@pytest.mark.parametrize("steps", [range(1, 51), range(160, 210)])
def test_live_averages_follow_the_formula_running_statistics_too(steps):
    model = small_model()
    averages, expected = followed(model, steps=steps)
    state = averages.tensors()
    assert state.keys() == model.state_dict().keys()
    for name, tensor in state.items():
        if name.endswith("num_batches_tracked"):
            assert tensor.dtype == torch.int64
            assert tensor == 50
        else:
            np.testing.assert_allclose(tensor.numpy(), expected[name], rtol=1e-5, atol=1e-6)
            assert not torch.equal(tensor, model.state_dict()[name])


def test_averages_of_16_bit_weights_have_32_bits():
    model = small_model().to(torch.bfloat16)
    averages, expected = followed(model, steps=range(160, 210))
    for name, tensor in averages.tensors().items():
        if tensor.is_floating_point():
            assert tensor.dtype == torch.float32
            # bfloat16 has 8 bits: an average kept in it would be off by 1e-2
            np.testing.assert_allclose(tensor.numpy(), expected[name], rtol=1e-4, atol=1e-5)


def test_averages_go_through_a_checkpoint_and_on_bit_for_bit():
    model = small_model()
    averages, _ = followed(model, steps=range(1, 4))
    stored = {name: tensor.contiguous() for name, tensor in averages.tensors().items()}
    again = WeightAverage(model, decay=DECAY)
    again.load(load(save(stored)), where="x")
    for step in range(4, 8):
        wander(model, step)
        averages.update(step)
        again.update(step)
    assert hash_weights(averages.tensors()) == hash_weights(again.tensors())
    for name, tensor in again.tensors().items():
        assert tensor.stride() == model.state_dict()[name].stride()  # one fused walk over both


def test_averages_of_another_network_are_refused():
    averages = WeightAverage(small_model(), decay=DECAY)
    other = {**averages.tensors(), "conv1.weight": torch.zeros(1)}
    with pytest.raises(
        CheckpointError, match=r"^x: not the averages of this model: other shapes: conv1.weight is "
    ):
        averages.load(other, where="x")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_averaged_weights_are_put_in_and_taken_out_bit_for_bit(dtype):
    model = small_model().to(dtype)
    averages, _ = followed(model, steps=range(1, 4))
    own, kept = hash_weights(model.state_dict()), hash_weights(averages.tensors())
    places = [tensor.data_ptr() for tensor in model.state_dict().values()]
    with averages.applied():
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, averages.tensors()[name].to(tensor.dtype))
        assert hash_weights(model.state_dict()) != own
        wander(model, 99)  # even training in there leaves nothing behind
    assert hash_weights(model.state_dict()) == own
    assert hash_weights(averages.tensors()) == kept
    assert [tensor.data_ptr() for tensor in model.state_dict().values()] == places


def test_an_error_while_averaged_weights_are_in_takes_them_out():
    model = small_model()
    averages, _ = followed(model, steps=range(1, 3))
    own = hash_weights(model.state_dict())
    with pytest.raises(KeyError), averages.applied():
        raise KeyError
    assert hash_weights(model.state_dict()) == own


def test_a_tensor_that_was_replaced_is_seen():
    model = small_model()
    averages = WeightAverage(model, decay=DECAY)
    averages.update(1)
    norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    norm.running_mean = torch.full_like(norm.running_mean, 11.0)
    averages.update(1)
    name = next(n for n in averages.tensors() if n.endswith("running_mean"))
    assert averages.tensors()[name] == pytest.approx(9.0)  # (1 - 2/11) of 11


def test_averages_can_begin_anew():
    model = small_model()
    averages, _ = followed(model, steps=range(1, 3))
    averages.reset()
    assert hash_weights(averages.tensors()) == hash_weights(model.state_dict())


def test_a_network_without_whole_numbers_is_averaged():
    model = small_model(Norm(type="group", groups=4))
    averages = WeightAverage(model, decay=DECAY)
    wander(model, 1)
    averages.update(1)
    assert all(tensor.is_floating_point() for tensor in averages.tensors().values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_update_never_waits_for_the_device():
    model = small_model().cuda()
    averages = WeightAverage(model, decay=DECAY)
    with not_waiting():
        averages.update(1)


# --- over checkpoints ---


def states(count: int) -> list[dict[str, Tensor]]:
    model, found = small_model(), []
    for step in range(count):
        wander(model, step)
        found.append(copied(model))
    return found


def in_formula(given: list[dict[str, Tensor]], name: str, *, strategy: str) -> np.ndarray:
    columns = [state[name].double().numpy() for state in given]
    if strategy == "mean":
        return np.mean(columns, axis=0)
    average = columns[0]
    for weights in columns[1:]:
        average = 0.9 * average + (1 - 0.9) * weights
    return average


@pytest.mark.parametrize("strategy", ["mean", "exponential"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_checkpoints_are_averaged_in_64_bits_running_statistics_too(strategy, dtype):
    given = [
        {n: t.to(dtype) if t.is_floating_point() else t for n, t in state.items()}
        for state in states(4)
    ]
    before = hash_weights(given[0])
    found = average_weights(iter(given), strategy=strategy, decay=0.9)
    for name, tensor in found.items():
        assert tensor.dtype == given[0][name].dtype
        if name.endswith("num_batches_tracked"):
            assert tensor == 4
        else:
            expected = torch.from_numpy(in_formula(given, name, strategy=strategy))
            ulp = torch.finfo(dtype).eps
            torch.testing.assert_close(tensor.double(), expected, rtol=4 * ulp, atol=ulp)
    assert hash_weights(given[0]) == before


def test_the_mean_of_equals_is_themselves():
    (state,) = states(1)
    assert hash_weights(average_weights([state] * 3)) == hash_weights(state)


def test_checkpoints_of_different_networks_have_no_average():
    first, second = states(2)
    del second["conv1.weight"]
    with pytest.raises(
        CheckpointError, match="checkpoint 2 is of another network: not in the file: conv1"
    ):
        average_weights([first, second])


# --- statistics anew ---


@pytest.mark.parametrize("norm", [Norm(), Norm(stable=False)])
def test_batch_norms_get_the_mean_statistics_of_the_batches(norm):
    model = small_model(norm)
    wander(model, 1)
    weights = {name: weight.clone() for name, weight in model.named_parameters()}
    batches = [torch.randn(8, 3, 12, 12) + shift for shift in (0.0, 1.0, 2.0)]
    first = next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    momentum, seen = first.momentum, []
    hook = first.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].double()))
    names = reestimate_norms(model, batches)
    hook.remove()
    means = torch.stack([x.mean((0, 2, 3)) for x in seen]).mean(0)
    variances = torch.stack([x.var((0, 2, 3)) for x in seen]).mean(0)
    torch.testing.assert_close(first.running_mean.double(), means, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(first.running_var.double(), variances, rtol=1e-4, atol=1e-5)
    assert first.momentum == momentum
    assert not model.training and not first.training
    assert set(names) == {name for name, _ in model.named_buffers()}
    for name, weight in model.named_parameters():
        assert torch.equal(weight, weights[name])


def test_a_network_without_batch_norm_takes_no_batch():
    batches = iter([torch.zeros(1)])
    assert reestimate_norms(small_model(Norm(type="group", groups=4)), batches) == ()
    assert next(batches) is not None
