"""Builds a model from a row of the catalog, and draws its initial weights."""

import math
from collections.abc import Callable
from hashlib import sha256
from importlib import import_module

import torch
from torch import nn

from phalanx.catalog.airbench import AirbenchVariant
from phalanx.catalog.efficientnets import EfficientNetVariant
from phalanx.catalog.resnets import FastResNetVariant, ResNetVariant
from phalanx.catalog.variant import OwnVariant, Variant
from phalanx.errors import ConfigError
from phalanx.models.airbench import Airbench
from phalanx.models.efficientnet import EfficientNet
from phalanx.models.resnet import BasicBlock, Bottleneck, FastResNet, ResNet


def _build_plugin_model(variant: OwnVariant, *, num_classes: int) -> nn.Module:
    """The network that a plugin's function returns."""
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
    AirbenchVariant: Airbench,
    OwnVariant: _build_plugin_model,
}


def build_model(variant: Variant, *, num_classes: int) -> nn.Module:
    """A model of the catalog on the default device; its weights are not yet initialised."""
    build = next(build for kind, build in _FAMILIES.items() if isinstance(variant, kind))
    return build(variant, num_classes=num_classes)


@torch.no_grad()
def initialise_weights(model: nn.Module, seed: int, *, zero_residual: bool) -> None:
    """Draw the initial weights.

    Each tensor has its own generator, keyed by the seed and its name: neither the order of
    construction nor other layers affect it.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            _init_conv(module, seed, name)
        elif isinstance(module, nn.Linear):
            _init_linear(module, seed, name, by_outputs=isinstance(model, EfficientNet))
    if isinstance(model, Airbench):
        model.init_as_identity()
    for module in model.modules() if zero_residual else ():
        if isinstance(module, BasicBlock | Bottleneck):
            module.zero_init_last()


def _init_conv(conv: nn.Conv2d, seed: int, name: str) -> None:
    """Kaiming-normal weights by fan-out, and zero bias."""
    fan_out = conv.out_channels * math.prod(conv.kernel_size) // conv.groups
    drawn = torch.empty(conv.weight.shape)
    drawn.normal_(0, math.sqrt(2 / fan_out), generator=_generator(seed, f"{name}.weight"))
    conv.weight.copy_(drawn)
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)


def _init_linear(linear: nn.Linear, seed: int, name: str, *, by_outputs: bool) -> None:
    """Uniform within 1 / sqrt(inputs); by_outputs: within 1 / sqrt(outputs), with zero bias."""
    bound = 1 / math.sqrt(linear.out_features if by_outputs else linear.in_features)
    bounds = {"weight": bound, "bias": 0.0 if by_outputs else bound}
    for key, weight in linear.named_parameters():
        drawn = torch.empty(weight.shape)
        drawn.uniform_(-bounds[key], bounds[key], generator=_generator(seed, f"{name}.{key}"))
        weight.copy_(drawn)


def _generator(seed: int, name: str) -> torch.Generator:
    """The generator of one tensor, on the CPU so that every device starts the same."""
    key = sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(key[:8], "big") >> 1)
