"""A small model with every kind of weight, and updates with gradients drawn from numbers."""

import numpy as np
import pytest
import torch
from torch import nn

from phalanx.optim.build import OptimSettings, build_optimizer
from phalanx.optim.update import set_velocity_scale, update_weights

RULES = (
    "sgd", "momentum", "nesterov", "sgd_combined", "adamw", "rmsprop", "rmsprop_tf", "lars", "lamb",
)  # fmt: skip
CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)
DEVICES = ["cpu", CUDA]


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=True)
        self.norm = nn.BatchNorm2d(4)
        self.group = nn.GroupNorm(2, 4)
        self.fc = nn.Linear(4, 2)


def toy(device="cpu"):
    torch.manual_seed(0)
    return Toy().to(device, memory_format=torch.channels_last)


def settings_of(rule, **changes):
    """Settings whose every number leaves its mark on the result."""
    chosen = {
        "momentum": 0.9,
        "weight_decay": 0.02,
        "l2": 0.03,
        "betas": (0.8, 0.95),
        "eps": 1e-3,
        "rmsprop_decay": 0.95,
        "rmsprop_start": 1.0,
        "trust_coefficient": 0.02,
        "trust_decay": 0.04,
        "velocity_scale": 128.0,
    }
    return OptimSettings(name=rule, **{**chosen, **changes})


def rate_at(step):
    return 0.1 * (1 - step / 60)


def scale_at(step):
    """A velocity scale that grows, and is no power of two at last."""
    return (128.0, 256.0, 1000.0 / 3)[step // 20]


def gradient_at(step, name, shape):
    seed = [step, *name.encode()]
    return np.random.default_rng(seed).normal(size=tuple(shape)).astype(np.float32)


def give_gradients(model, step):
    for name, weight in model.named_parameters():
        drawn = torch.from_numpy(gradient_at(step, name, weight.shape)).to(weight.device)
        weight.grad = torch.empty_like(weight).copy_(drawn)


def go(model, optimizer, steps):
    """Updates number steps[0], steps[1], ... with their gradients and rates."""
    for step in steps:
        give_gradients(model, step)
        set_velocity_scale(optimizer, scale_at(step))
        update_weights(optimizer, rate_at(step))


def trained(rule, steps, device="cpu", **changes):
    model = toy(device)
    optimizer = build_optimizer(model, settings_of(rule, **changes))
    go(model, optimizer, range(steps))
    return model, optimizer
