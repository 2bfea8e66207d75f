"""The torch side of a plan: device, threads, model and optimizer."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from phalanx.assemble.instructions import avoid_missing_instructions
from phalanx.catalog.variant import OwnVariant
from phalanx.config.schema import Config
from phalanx.engine.dynamic_loss_scale import DynamicLossScale
from phalanx.engine.loss import smoothing_over_all
from phalanx.engine.mixing import Mixing
from phalanx.engine.state import TrainState
from phalanx.engine.step import StepRule
from phalanx.engine.weight_average import Averages
from phalanx.errors import CheckpointError, ConfigError
from phalanx.models.build import build_model, initialise
from phalanx.models.recompute import store_only
from phalanx.models.weights import fill, layout_in, read_weights
from phalanx.optim.half_weights import HalfWeights
from phalanx.optim.offload import Offload
from phalanx.optim.rules import OptimSettings, build_optimizer
from phalanx.plan.model import build_variant
from phalanx.plan.plan import Plan
from phalanx.units import parse_betas


def prepare_torch(plan: Plan) -> torch.device:
    """Set torch up as the plan says, and give the device the run uses."""
    avoid_missing_instructions()
    torch.set_num_threads(plan.threads)
    DETERMINISM[plan.determinism]()
    for name in (
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
    ):
        setattr(torch.backends.cuda.matmul, name, plan.half_partials)
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


def _be_fast() -> None:
    """Let torch measure which kernels are fastest."""
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = False, True


def _be_seeded() -> None:
    """Draw the same numbers; sums may be added up in another order now and then."""
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = False, False


def _be_strict() -> None:
    """Give the same bits every time, on the same hardware."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


DETERMINISM: dict[str, Callable[[], None]] = {
    "off": _be_fast,
    "seeded": _be_seeded,
    "strict": _be_strict,
}


def first_device(devices: str) -> str:
    """The device one replica uses: cuda:1,3 begins with cuda:1."""
    return devices.partition(",")[0]


def build_network(config: Config, plan: Plan, device: torch.device) -> nn.Module:
    """The model with its first weights, in the memory layout convolutions are fastest in.

    A plugin's network draws its own, from torch's generator, which is seeded for it.
    """
    variant = build_variant(config)
    torch.manual_seed(config.train.seed)
    model = build_model(variant, num_classes=plan.num_classes)
    if not isinstance(variant, OwnVariant):
        initialise(model, config.train.seed, zero_residual=config.resnet.zero_init_residual)
    if plan.precision == "16.16":
        _halve(model, getattr(torch, plan.half_type))
    if plan.recompute_patterns is not None:
        store_only(model, plan.recompute_patterns, variant=variant)
    return model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]


def _halve(model: nn.Module, kind: torch.dtype) -> None:
    """Give convolutions and linear layers 16-bit weights; the few numbers of norms stay in 32."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.to(kind)


def begin_with_weights(model: nn.Module, config: Config) -> None:
    """Replace a fresh model's weights by those of --init-weights, if any are named."""
    if config.model.init_weights is None:
        return
    path, variant = Path(config.model.init_weights), build_variant(config)
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
        raise CheckpointError(f"{error}; {_advise(model, tensors, variant.head)}") from error


def _advise(model: nn.Module, tensors: Mapping[str, Tensor], head: str) -> str:
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
    optimizer = build_optimizer(model, _optim_settings(config))
    half = HalfWeights(
        model,
        optimizer,
        seed=config.train.seed,
        stochastic=config.machine.enable_stochastic_rounding,
        saturate=not config.machine.fp_exceptions,
    )
    decay = config.optim.ema_decay
    return TrainState(
        model,
        optimizer,
        scaler=DynamicLossScale(plan.loss_scale.at(0)) if plan.loss_scale.automatic else None,
        half=half if plan.precision == "16.16" else None,
        offload=Offload(optimizer) if offloads(config, device.type) else None,
        averages=Averages(model, decay=decay) if decay else None,
    )


def offloads(config: Config, device_type: str) -> bool:
    """Whether optimizer state has another home than the device; a CPU's memory is the host's."""
    return config.machine.offload_optimizer and device_type == "cuda"


def _optim_settings(config: Config) -> OptimSettings:
    """What the update rule must know."""
    said = config.optim
    return OptimSettings(
        name=said.optimizer,
        momentum=said.momentum,
        weight_decay=said.weight_decay,
        l2=said.l2_regularization,
        betas=parse_betas(said.adam_betas),
        eps=said.optimizer_eps,
        rmsprop_decay=said.rmsprop_decay,
        rmsprop_start=said.rmsprop_start,
        trust_coefficient=said.trust_coefficient,
        trust_decay=said.trust_decay,
    )


def _half_of(config: Config, plan: Plan) -> torch.dtype | None:
    """The 16-bit type that passes compute in; None where they compute in 32 bits."""
    kind: torch.dtype = getattr(torch, plan.half_type)
    return kind if plan.precision.startswith("16") else None


def step_rule(config: Config, plan: Plan, device: torch.device) -> StepRule:
    """What a step does besides the update rule."""
    combined = config.optim.optimizer == "sgd_combined"
    return StepRule(
        label_smoothing=smoothing_over_all(
            config.loss.label_smoothing,
            over=config.loss.smoothing_over,
            classes=plan.num_classes,
        ),
        device_type=device.type,
        half=_half_of(config, plan),
        seed=config.train.seed,
        flip=config.augment.flip_averaging,
        mixing=_mixing_of(config),
        loss=config.loss.loss,
        clip_norm=config.optim.clip_grad_norm,
        clip_value=config.optim.clip_grad_value,
        velocity_ratio=config.optim.loss_velocity_scaling_ratio if combined else None,
        metrics=not config.train.disable_metrics,
    )


def _mixing_of(config: Config) -> Mixing:
    """How images are mixed."""
    said = config.augment
    return Mixing(
        mixup_alpha=said.mixup_alpha,
        cutmix_low=said.cutmix_lambda_low,
        cutmix_high=said.cutmix_lambda_high,
        cutmix_lambda=said.cutmix_lambda,
        cutmix_skip=said.cutmix_disable_prob,
        repeats=config.data.repeated_augmentation,
    )
