"""From a row of the tables to a model with its first weights."""

import math
from collections.abc import Callable
from hashlib import sha256
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.catalog.efficientnets import EfficientNetVariant
from phalanx.catalog.resnets import FastResNetVariant, ResNetVariant
from phalanx.catalog.variant import OwnVariant, Variant
from phalanx.errors import ConfigError
from phalanx.models.efficientnet import EfficientNet
from phalanx.models.fast_resnet import FastResNet
from phalanx.models.resnet import ResidualBlock, ResNet


def _build_own(variant: OwnVariant, *, num_classes: int) -> nn.Module:
    """The network a plugin's function makes."""
    module, _, function = variant.build.partition(":")
    try:
        build = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--plugin: {variant.build} cannot be called: {error}") from error
    model = build(num_classes)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"--plugin: {variant.build} gave a {type(model).__name__}, not a module")
    return model


_FAMILIES: dict[type[Variant], Callable[..., nn.Module]] = {
    ResNetVariant: ResNet,
    FastResNetVariant: FastResNet,
    EfficientNetVariant: EfficientNet,
    OwnVariant: _build_own,
}


def build_model(variant: Variant, *, num_classes: int) -> nn.Module:
    """A model of the catalog, on the current default device, its weights not yet drawn."""
    build = next(build for kind, build in _FAMILIES.items() if isinstance(variant, kind))
    return build(variant, num_classes=num_classes)


def initialise(model: nn.Module, seed: int, *, zero_residual: bool) -> None:
    """Draw the first weights.

    Each tensor's stream is keyed by the seed and its own name: neither the order of
    construction nor a layer more or less elsewhere changes it.
    """
    for name, module in model.named_modules():
        for kind, draw in _DRAWN.items():
            if isinstance(module, kind):
                draw(module, seed, name)
    for module in model.modules() if zero_residual else ():
        if isinstance(module, ResidualBlock):
            _silence(module)


def _draw_conv(conv: nn.Conv2d, seed: int, name: str) -> None:
    """Normal values that keep the size of gradients, by the outputs each weight reaches."""
    fan_out = conv.out_channels * math.prod(conv.kernel_size) // conv.groups
    _draw_normal(conv.weight, math.sqrt(2 / fan_out), seed, f"{name}.weight")
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)


def _draw_linear(linear: nn.Linear, seed: int, name: str) -> None:
    """Uniform values within 1 / sqrt(inputs)."""
    bound = 1 / math.sqrt(linear.in_features)
    _draw_uniform(linear.weight, bound, seed, f"{name}.weight")
    if linear.bias is not None:
        _draw_uniform(linear.bias, bound, seed, f"{name}.bias")


_DRAWN: dict[type[nn.Module], Callable[[Any, int, str], None]] = {
    nn.Conv2d: _draw_conv,
    nn.Linear: _draw_linear,
}


def _silence(block: ResidualBlock) -> None:
    """Start a block as its bare shortcut: its last norm gives zeros, or its last convolution."""
    conv, norm = block.last
    last = conv if isinstance(norm, nn.Identity) else norm
    nn.init.zeros_(last.get_parameter("weight"))


@torch.no_grad()
def _draw_normal(weight: Tensor, std: float, seed: int, name: str) -> None:
    """Fill with normal values of that spread."""
    drawn = torch.empty(weight.shape).normal_(0, std, generator=_stream(seed, name))
    weight.copy_(drawn)


@torch.no_grad()
def _draw_uniform(weight: Tensor, bound: float, seed: int, name: str) -> None:
    """Fill with values between -bound and bound."""
    drawn = torch.empty(weight.shape).uniform_(-bound, bound, generator=_stream(seed, name))
    weight.copy_(drawn)


def _stream(seed: int, name: str) -> torch.Generator:
    """A generator of its own for one tensor, on the CPU so that every device starts alike."""
    key = sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(key[:8], "big") >> 1)
