"""The step's seam for many devices: whoever runs a part of the passes, the gradients add up."""

import pytest
import torch
from torch import nn

from phalanx.engine.state import TrainState
from phalanx.engine.step import (
    MicroBatch,
    StepOptions,
    build_forward_backward,
    build_pass,
    train_step,
)
from phalanx.optim.build import OptimSettings, build_optimizer
from small_states import take_step

OPTIONS = StepOptions(label_smoothing=0.1, device_type="cpu", half=None)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).double()


def small_passes(count=4, size=2) -> list[MicroBatch]:
    images = torch.randn(count * size, 3, 2, 2, generator=torch.Generator().manual_seed(1)).double()
    labels = torch.arange(count * size) % 3
    parts = zip(images.split(size), labels.split(size), strict=True)
    return [MicroBatch(x, y, number * size) for number, (x, y) in enumerate(parts)]


def gradients(model: nn.Module, passes: list[MicroBatch], *, global_batch: int):
    metrics = build_forward_backward(
        build_pass(model, OPTIONS, global_batch=global_batch), global_batch=global_batch
    )(passes, 1.0)
    return [weight.grad for weight in model.parameters()], metrics


@pytest.mark.parametrize("replicas", [2, 4])
def test_shares_of_a_step_add_up_to_the_whole(replicas):
    passes = small_passes()
    whole, metrics = gradients(small_model(), passes, global_batch=8)
    shares = [
        gradients(small_model(), passes[replica::replicas], global_batch=8)
        for replica in range(replicas)
    ]
    for place, gradient in enumerate(whole):
        torch.testing.assert_close(sum(share[0][place] for share in shares), gradient)
    torch.testing.assert_close(sum(share[1] for share in shares), metrics)


def test_the_passes_of_a_step_are_whatever_it_is_given():
    """A stand-in for folded, DDP or pipelined passes: the step uses the gradients they leave."""
    plain, other = small_model(), small_model()
    passes, given = small_passes(), []
    take_step(
        TrainState(plain, build_optimizer(plain, OptimSettings())), passes, label_smoothing=0.1
    )
    inner = build_forward_backward(build_pass(other, OPTIONS, global_batch=8), global_batch=8)

    def reversed_passes(batches, loss_scale):
        given.append((len(batches), loss_scale))
        return inner(list(reversed(batches)), loss_scale)

    state = TrainState(other, build_optimizer(other, OptimSettings()))
    train_step(
        state, passes, 1.0, options=OPTIONS, forward_backward=reversed_passes, loss_scale=4.0
    )
    assert given == [(4, 4.0)]
    torch.testing.assert_close(list(other.parameters()), list(plain.parameters()))
