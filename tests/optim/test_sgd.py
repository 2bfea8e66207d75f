"""The update rule against a float64 reference, and what decays."""

import numpy as np
import pytest
import torch
from torch import nn

from phalanx.optim.decay import split_by_decay
from phalanx.optim.sgd import build_sgd, named_state, restore_state, update


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=True)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 2)


def test_norms_and_biases_do_not_decay():
    model = Toy()
    decayed, spared = split_by_decay(model)
    assert [id(w) for w in decayed] == [id(model.conv.weight), id(model.fc.weight)]
    assert len(spared) == 4


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fifty_steps_match_a_float64_reference(momentum):
    torch.manual_seed(0)
    model = Toy().to(memory_format=torch.channels_last)
    optimizer = build_sgd(model, momentum=momentum, weight_decay=0.02)
    decays = {id(w) for w in split_by_decay(model)[0]}
    reference = {n: w.detach().double().numpy().copy() for n, w in model.named_parameters()}
    velocity = {n: np.zeros_like(w) for n, w in reference.items()}
    random = np.random.default_rng(1)
    for step in range(50):
        lr = 0.1 * (1 - step / 60)
        for name, weight in model.named_parameters():
            gradient = random.normal(size=weight.shape)
            weight.grad = torch.tensor(gradient, dtype=torch.float32).to(
                memory_format=torch.channels_last if weight.dim() == 4 else torch.contiguous_format
            )
            velocity[name] = momentum * velocity[name] + gradient
            decay = 0.02 if id(weight) in decays else 0.0
            reference[name] -= lr * (velocity[name] + decay * reference[name])
            # w - lr*(v + decay*w) and (1 - lr*decay)*w - lr*v are the same number
        update(optimizer, lr)
    for name, weight in model.named_parameters():
        assert np.allclose(weight.detach().numpy(), reference[name], rtol=1e-5, atol=1e-6), name
        assert weight.grad is None


def test_state_travels_by_name_and_keeps_the_memory_layout():
    model = Toy().to(memory_format=torch.channels_last)
    optimizer = build_sgd(model, momentum=0.9, weight_decay=0.0)
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)
    update(optimizer, 0.1)
    saved = {name: t.clone().contiguous() for name, t in named_state(model, optimizer).items()}
    assert set(saved) == {f"{n}:momentum_buffer" for n, _ in model.named_parameters()}
    other = build_sgd(model, momentum=0.9, weight_decay=0.0)
    restore_state(model, other, saved)
    for weight in model.parameters():
        restored = other.state[weight]["momentum_buffer"]
        assert restored.stride() == weight.stride()
        assert torch.equal(restored, optimizer.state[weight]["momentum_buffer"])
