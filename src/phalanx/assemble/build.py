"""The torch side of a plan: device, threads, model and optimizer."""

import torch

from phalanx.config.schema import Config
from phalanx.engine.state import TrainState
from phalanx.engine.step import StepRule
from phalanx.errors import ConfigError
from phalanx.models.build import build_model, initialise
from phalanx.models.units import UnitModel
from phalanx.optim.sgd import build_sgd
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


def build_network(config: Config, plan: Plan, device: torch.device) -> UnitModel:
    """The model with its first weights, in the memory layout convolutions are fastest in."""
    model = build_model(config.model.model, num_classes=plan.num_classes)
    initialise(model, config.train.seed, zero_residual=config.model.zero_init_residual)
    return model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]


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
    )
