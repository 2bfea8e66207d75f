"""The torch side of a plan: device, threads, model and optimizer."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from phalanx.catalog.variant import OwnVariant
from phalanx.config.schema import Config
from phalanx.engine.mixing import Mixing
from phalanx.engine.state import TrainState
from phalanx.engine.step import StepRule
from phalanx.errors import CheckpointError, ConfigError
from phalanx.models.build import build_model, initialise
from phalanx.models.weights import fill, layout_in, read_weights
from phalanx.optim.sgd import build_sgd
from phalanx.plan.model import variant_of
from phalanx.plan.plan import Plan


def prepare_torch(plan: Plan) -> torch.device:
    """Set torch up as the plan says, and give the device the run uses."""
    torch.set_num_threads(plan.threads)
    device = torch.device(first_device(plan.device))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: torch finds no CUDA device here; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"--device {plan.device}: this machine has {torch.cuda.device_count()} CUDA devices, "
            "numbered from 0"
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("--device: torch finds no mps device here; use --device cpu")
    return device


def first_device(devices: str) -> str:
    """The device one replica uses: cuda:1,3 begins with cuda:1."""
    return devices.partition(",")[0]


def build_network(config: Config, plan: Plan, device: torch.device) -> nn.Module:
    """The model with its first weights, in the memory layout convolutions are fastest in.

    A plugin's network draws its own, from torch's generator, which is seeded for it.
    """
    variant = variant_of(config)
    torch.manual_seed(config.train.seed)
    model = build_model(variant, num_classes=plan.num_classes)
    if not isinstance(variant, OwnVariant):
        initialise(model, config.train.seed, zero_residual=config.resnet.zero_init_residual)
    return model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]


def begin_with_weights(model: nn.Module, config: Config) -> None:
    """Replace a fresh model's weights by those of --init-weights, if any are named."""
    if config.model.init_weights is None:
        return
    path, variant = Path(config.model.init_weights), variant_of(config)
    tensors = read_weights(path)
    if layout_in(path) != variant.norm.layout:
        raise CheckpointError(
            f"{path}: its group norms are {layout_in(path)}, this model's {variant.norm.layout}; "
            "give or leave away --enable-fast-groupnorm as the weights were trained"
        )
    spared = variant.head if config.model.reset_head else ""
    try:
        fill(model, tensors, where=str(path), spared=spared)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {advise(model, tensors, variant.head)}") from error


def advise(model: nn.Module, tensors: Mapping[str, Tensor], head: str) -> str:
    """The way out when weights do not fit: the head alone may be wrong, or the network is."""
    weight = f"{head}.weight"
    has, wants = (w[weight].shape[:1] if weight in w else () for w in (tensors, model.state_dict()))
    if has and wants and has != wants:
        return (
            f"it knows {has[0]} classes, the data has {wants[0]}: "
            "--reset-head begins with a new classifier"
        )
    return (
        "is this another network? --model and its options, such as --norm-type and "
        "--shortcut-type, must be those of the weights"
    )


def build_state(config: Config, plan: Plan, device: torch.device) -> TrainState:
    """A state at step 0."""
    model = build_network(config, plan, device)
    optimizer = build_sgd(
        model, momentum=config.optim.momentum, weight_decay=config.optim.weight_decay
    )
    return TrainState(model, optimizer)


def step_rule(config: Config, plan: Plan, device: torch.device) -> StepRule:
    """What a step does besides the update rule."""
    return StepRule(
        label_smoothing=config.optim.label_smoothing,
        device_type=device.type,
        half=plan.precision == "16.32",
        seed=config.train.seed,
        flip=config.augment.flip_averaging,
        mixing=Mixing(
            mixup_alpha=config.augment.mixup_alpha,
            cutmix_low=config.augment.cutmix_lambda_low,
            cutmix_high=config.augment.cutmix_lambda_high,
            cutmix_lambda=config.augment.cutmix_lambda,
            cutmix_skip=config.augment.cutmix_disable_prob,
        ),
    )
