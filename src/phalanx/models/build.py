"""From a name to a model with its first weights."""

import math
from hashlib import sha256

import torch
from torch import Tensor, nn

from phalanx.catalog.models import MODELS
from phalanx.errors import ConfigError, suggest
from phalanx.models.resnet import BasicBlock, Bottleneck, ResNet
from phalanx.models.units import UnitModel


def build_model(name: str, *, num_classes: int) -> UnitModel:
    """A model of the catalog, on the current default device, its weights not yet drawn."""
    if name not in MODELS:
        raise ConfigError(f"--model: no model is called {name!r}; {suggest(name, MODELS)}")
    return ResNet(MODELS[name], num_classes=num_classes)


def initialise(model: nn.Module, seed: int, *, zero_residual: bool) -> None:
    """Draw the first weights.

    Each tensor's stream is keyed by the seed and its own name: neither the order of
    construction nor a layer more or less elsewhere changes it.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * math.prod(module.kernel_size) // module.groups
            draw_normal(module.weight, math.sqrt(2 / fan_out), seed, f"{name}.weight")
        elif isinstance(module, nn.Linear):
            bound = 1 / math.sqrt(module.in_features)
            draw_uniform(module.weight, bound, seed, f"{name}.weight")
            draw_uniform(module.bias, bound, seed, f"{name}.bias")
        elif zero_residual and isinstance(module, BasicBlock | Bottleneck):
            nn.init.zeros_(module.last_norm.weight)


@torch.no_grad()
def draw_normal(weight: Tensor, std: float, seed: int, name: str) -> None:
    """Fill with normal values of that spread."""
    drawn = torch.empty(weight.shape).normal_(0, std, generator=stream(seed, name))
    weight.copy_(drawn)


@torch.no_grad()
def draw_uniform(weight: Tensor, bound: float, seed: int, name: str) -> None:
    """Fill with values between -bound and bound."""
    drawn = torch.empty(weight.shape).uniform_(-bound, bound, generator=stream(seed, name))
    weight.copy_(drawn)


def stream(seed: int, name: str) -> torch.Generator:
    """A generator of its own for one tensor, on the CPU so that every device starts alike."""
    key = sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(key[:8], "big") >> 1)
