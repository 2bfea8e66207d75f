"""From a Config and its Plan to torch objects: network, state, step options, input."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from phalanx.assemble.dataset_summary import Preprocessing
from phalanx.assemble.rank_context import RankContext
from phalanx.catalog.datasets import DATASETS
from phalanx.catalog.models import read_model_sizes
from phalanx.catalog.variant import OwnVariant
from phalanx.config.combinations import check_gpu_decode
from phalanx.config.schema import Config
from phalanx.data.loading.device import Normaliser
from phalanx.data.loading.gpu_decode import (
    GpuDecoder,
    find_gpu_decode_problem,
    has_decoding_engines,
    holds_large_jpegs,
)
from phalanx.data.loading.gpu_share import ImageCheck
from phalanx.data.loading.loader import BatchBackend
from phalanx.data.loading.opened_rows import OpenRows
from phalanx.data.loading.reader import InputSpec, Reader
from phalanx.data.loading.resident import ResidentBackend, find_resident_problem, fits_on_device
from phalanx.engine.dynamic_loss_scale import DynamicLossScale
from phalanx.engine.fused_update import DeviceLossScale, FusedUpdate, can_fuse_update
from phalanx.engine.loss import smoothing_over_all
from phalanx.engine.mixing import Mixing
from phalanx.engine.replica_statistics import ReplicaStatistics
from phalanx.engine.state import TrainState
from phalanx.engine.step import StepOptions
from phalanx.engine.weight_average import WeightAverage
from phalanx.errors import CheckpointError, ConfigError
from phalanx.fused.tuning import ChoiceStore, tune_kernels
from phalanx.kernels.choices import CHOICES
from phalanx.models.build import build_model, initialise_weights
from phalanx.models.recompute import enable_recomputation
from phalanx.models.units import ModelPart, UnitModel, to_unit_model
from phalanx.models.weights import (
    find_mismatches,
    load_tensors,
    read_exported_classes,
    read_norm_layout,
    read_weights,
)
from phalanx.optim.build import OptimSettings, build_optimizer
from phalanx.optim.half_weights import HalfWeights
from phalanx.optim.offload import OffloadedState
from phalanx.plan.model import build_variant
from phalanx.plan.plan import Plan
from phalanx.units import parse_betas

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # of norms; not parameters


def build_network(
    config: Config,
    plan: Plan,
    device: torch.device,
    *,
    stage: int | None = None,
    with_init_weights: bool = False,
) -> nn.Module:
    """The model with its initial weights, in the channels_last memory format.

    A plugin's network draws its weights from torch's generators: these are seeded for it and then
    restored, because a Python program that calls us may use them, too. stage: the only one to keep.
    with_init_weights: load the weights of --init-weights, if the option is given.
    """
    variant = build_variant(config)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(config.train.seed)
        if device.type == "cuda":
            torch.cuda.manual_seed(config.train.seed)
        model = build_model(variant, num_classes=plan.num_classes)
    if not isinstance(variant, OwnVariant):
        initialise_weights(model, config.train.seed, zero_residual=config.resnet.zero_init_residual)
    if plan.precision == "16.16":  # the few parameters of norms stay in 32 bits
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.to(getattr(torch, plan.half_type))
    if with_init_weights and config.model.init_weights is not None:
        _load_init_weights(model, Path(config.model.init_weights), config)
    if stage is not None:
        model = _build_stage(model, plan, stage)
    if plan.recompute_patterns is not None:
        enable_recomputation(model, plan.recompute_patterns, variant=variant)
    return model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]


def _build_stage(model: nn.Module, plan: Plan, stage: int) -> ModelPart:
    """One stage of a model; ConfigError for a plugin's model that is more than its units."""
    assert plan.pipeline is not None
    whole = to_unit_model(model)
    names, stages = [*whole.state_dict()], plan.pipeline.split_units([*whole.units])
    parts = [ModelPart(whole, units) for units in stages]
    found = {name for part in parts for name in part.state_dict()}
    outside = [name for name in names if name not in found]
    problem = f"{outside[0]} belongs to none of its units" if outside else ""
    if type(whole).forward is not UnitModel.forward:
        problem = "it has a forward of its own"
    bare = [units for units, part in zip(stages, parts, strict=True) if not [*part.parameters()]]
    if bare:
        problem = f"the stage of {bare[0][0]} has no weights"
    if problem:
        raise ConfigError(f"--pipeline-splits: the model cannot be cut: {problem}")
    return parts[stage]


def _load_init_weights(model: nn.Module, path: Path, config: Config) -> None:
    """Replace a fresh model's weights by those of --init-weights."""
    variant = build_variant(config)
    tensors = read_weights(path, model.state_dict())
    layout = read_norm_layout(path)
    if layout != variant.norm.layout:
        raise CheckpointError(
            f"{path}: its group norms are {layout}, this model's {variant.norm.layout}; give or "
            "leave out --enable-fast-groupnorm to match the weights"
        )
    spared = variant.head if config.model.reset_head else ""
    try:
        load_tensors(model, tensors, where=str(path), skip=spared)
    except CheckpointError as error:
        way_out = _explain_misfit(tensors, model.state_dict(), variant.head, config)
        raise CheckpointError(f"{error}\n  {way_out}") from error


def describe_other_classes(config: Config, classes: Sequence[str]) -> list[str]:
    """A note if exported weights have classes of other names, or in another order."""
    if config.model.init_weights is None or config.model.reset_head:
        return []
    pairs = zip(read_exported_classes(Path(config.model.init_weights)), classes, strict=False)
    for known, here in pairs:
        if known != here:
            return [
                f"the classes are not those of the weights ({known!r} there, {here!r} here): each "
                "output stands for the class which now has its place; --reset-head starts with a "
                "new classifier"
            ]
    return []


def _explain_misfit(
    found: dict[str, Tensor], wanted: dict[str, Tensor], head: str, config: Config
) -> str:
    """What to do when weights do not fit: only the head may differ, or the whole network."""

    def without_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: t for name, t in tensors.items() if not name.startswith(f"{head}.")}

    last = f"{head}.weight"
    if not config.model.reset_head and not find_mismatches(
        without_head(wanted), without_head(found)
    ):
        has, wants = (t[last].shape[:1] if last in t else () for t in (found, wanted))
        way_out = "--reset-head starts with a new classifier"
        if has and wants and has != wants:
            misfit = f"it has {has[0]} classes, the data ({config.data.data}) has {wants[0]}"
            return f"{misfit}: --data names other data, {way_out}"
        return f"it has no {head} that fits: {way_out}"
    trained = [t.numel() for n, t in found.items() if not n.endswith(_STATISTICS)]
    alike = [name for name, size in read_model_sizes().items() if size.parameters == sum(trained)]
    if alike and config.model.model not in alike:
        return f"it has as many parameters as {' and '.join(alike)}: try --model {alike[0]}"
    return (
        "is it a different network? --model and its options, such as --norm-type and "
        "--shortcut-type, must be those of the weights"
    )


def prepare_kernels(model: nn.Module, plan: Plan, context: RankContext, store: ChoiceStore) -> None:
    """Compile and choose the kernels of training passes, for every image size of the run.

    With strict determinism nothing is measured, and the choice is always the same.
    """
    half = getattr(torch, plan.half_type)
    if not (isinstance(model, UnitModel) and model.fused):
        return
    CHOICES.measures = plan.determinism != "strict"
    store.load()
    device, rows = next(model.parameters()).device, plan.micro_batch * context.layout.turn_size
    for size in (plan.image_size, *(size for _, size in plan.growth)):
        images = torch.zeros(rows, 3, size, size, device=device, dtype=half)
        tune_kernels(model, images.to(memory_format=torch.channels_last), half=half)
    store.save(context.gather, writes=context.is_first_rank)


def build_optim_settings(config: Config) -> OptimSettings:
    """The settings of the optimizer that a config names."""
    options = config.optim
    return OptimSettings(
        name=options.optimizer,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
        l2=options.l2_regularization,
        betas=parse_betas(options.adam_betas),
        eps=options.optimizer_eps,
        rmsprop_decay=options.rmsprop_decay,
        rmsprop_start=options.rmsprop_start,
        trust_coefficient=options.trust_coefficient,
        trust_decay=options.trust_decay,
        norm_bias_lr_scale=options.norm_bias_lr_scale,
    )


def build_state(model: nn.Module, config: Config, plan: Plan, context: RankContext) -> TrainState:
    """The training state of a model at step 0."""
    device_type = next(model.parameters()).device.type
    options = config.optim
    optimizer = build_optimizer(model, build_optim_settings(config))
    state = TrainState(model, optimizer)
    if plan.loss_scale.automatic:
        state.scaler = DynamicLossScale(plan.loss_scale.at(0))
    if plan.precision == "16.16":
        state.half = HalfWeights(
            model,
            optimizer,
            seed=config.train.seed,
            stochastic=config.machine.enable_stochastic_rounding,
            saturate=not config.machine.fp_exceptions,
        )
    if is_offloaded(config, device_type):
        state.offload = OffloadedState(optimizer)
    if options.ema_decay:
        state.average = WeightAverage(model, decay=options.ema_decay)
    if plan.replicas > 1:
        state.replica_statistics = ReplicaStatistics(
            model, context.layout, rank=context.rank, average=state.average, gather=context.gather
        )
    if context.links is not None and context.layout.pipeline_of(context.rank) == 0:
        state.gather_to_first = context.links.gather_to_first
    if state.half is None and context.links is None and config.machine.kernels == "auto":
        _fuse_update(state, config)
    return state


def _fuse_update(state: TrainState, config: Config) -> None:
    """Use kernels for everything after a step's backward pass, if they support it."""
    if not can_fuse_update(state.model, state.optimizer):
        return
    scaler = state.scaler
    if isinstance(scaler, DynamicLossScale):
        state.scaler = scaler = DeviceLossScale(scaler, next(state.model.parameters()).device)
    state.fused_update = FusedUpdate(
        state.optimizer,
        clip_norm=config.optim.clip_grad_norm,
        clip_value=config.optim.clip_grad_value,
        velocity_ratio=config.optim.loss_velocity_scaling_ratio,
        scaler=scaler,
        average=state.average,
        replica_statistics=state.replica_statistics,
    )


def is_offloaded(config: Config, device_type: str) -> bool:
    """Whether optimizer state is kept in host memory; on a CPU there is nothing to offload."""
    return config.machine.offload_optimizer and device_type == "cuda"


def build_step_options(config: Config, plan: Plan, device: torch.device) -> StepOptions:
    """The settings of a step that are not the optimizer's."""
    optim = config.optim
    half = getattr(torch, plan.half_type) if plan.precision.startswith("16") else None
    combined = optim.optimizer == "sgd_combined"
    return StepOptions(
        label_smoothing=smoothing_over_all(
            config.loss.label_smoothing,
            over=config.loss.smoothing_over,
            classes=plan.num_classes,
        ),
        device_type=device.type,
        half=half,
        seed=config.train.seed,
        flip=config.augment.flip_averaging,
        mixing=build_mixing(config),
        loss=config.loss.loss,
        clip_norm=optim.clip_grad_norm,
        clip_value=optim.clip_grad_value,
        velocity_ratio=optim.loss_velocity_scaling_ratio if combined else None,
        metrics=not config.train.disable_metrics,
    )


def build_mixing(config: Config) -> Mixing:
    """How the images of a step are mixed."""
    augment = config.augment
    return Mixing(
        mixup_alpha=augment.mixup_alpha,
        cutmix_low=augment.cutmix_lambda_low,
        cutmix_high=augment.cutmix_lambda_high,
        cutmix_lambda=augment.cutmix_lambda,
        cutmix_skip=augment.cutmix_disable_prob,
        repeats=config.data.repeated_augmentation,
    )


def build_normaliser(
    preprocessing: Preprocessing, device: torch.device, config: Config | None = None
) -> Normaliser:
    """What turns pixels into the model's input; the config says whether on host or device."""
    on_host = config is not None and config.data.normalization_location == "host"
    return Normaliser(
        preprocessing.mean,
        preprocessing.std,
        device=device,
        normalization=preprocessing.normalization,
        on_host=on_host,
        as_bytes=config is None or config.data.eight_bit_io is not False,
    )


def choose_decoder(
    spec: InputSpec,
    plan: Plan,
    device: torch.device,
    config: Config,
    context: RankContext,
    check: ImageCheck | None,
) -> tuple[InputSpec, list[str]]:
    """The spec with the GPU's share of the images, and what the user should know about it.

    check: what the run knows of its images; None if they are not checked.
    """
    asked = config.data.gpu_decode
    if asked is not None:
        return replace(spec, gpu_percent=round(100 * asked)), []
    if check is None:
        return spec, []
    checked = replace(spec, gpu_percent=100, checked_since=check.since)
    first = checked.first_checked_step
    hindered = config.machine.determinism == "strict" or device.type != "cuda"
    hindered |= any(check_gpu_decode(config.replace_options({"gpu-decode": True})))
    if hindered or first is None or first >= plan.total_steps:
        return spec, []
    large = holds_large_jpegs(spec.open("train"))  # else there is little to win
    problem = find_gpu_decode_problem(device) if large else ""
    found = context.gather((large and not problem and has_decoding_engines(device), problem))
    if all(helps for helps, _ in found):
        note = f"the cores decode every image once, up to step {first:,}; then the GPU does, if it "
        note += "has waited for them (--gpu-decode false: never)"
        return checked, [] if check.is_decided else [note]
    problem = next((problem for _, problem in found if problem), "")
    return spec, [f"the cores decode all images: {problem}"] if problem else []


def choose_backend(
    spec: InputSpec, device: torch.device, config: Config
) -> Callable[[Reader, OpenRows], BatchBackend | None] | None:
    """The backend that makes images on the device, if the config and the device allow one."""
    if spec.gpu_percent:
        problem = find_gpu_decode_problem(device)
        if problem:
            raise ConfigError(f"--gpu-decode: {problem}; leave the option out")

        def build(reader: Reader, open_rows: OpenRows) -> BatchBackend | None:
            takes_any = reader.gpu_share.percent > 0
            return GpuDecoder(reader, device, open_rows=open_rows) if takes_any else None

        return build
    asked = config.data.keep_on_device
    if asked is False or (asked is None and not keeps_on_device_by_default(device, config)):
        return None
    sources = [spec.open(split) for split in spec.splits]
    why_not = find_resident_problem(spec, sources[-1])
    if asked and why_not:
        raise ConfigError(f"--keep-on-device: {why_not}; leave the option out")
    if why_not or not (asked or fits_on_device(sources, device)):
        return None
    return lambda reader, open_rows: ResidentBackend(reader, device)


def keeps_on_device_by_default(device: torch.device, config: Config) -> bool:
    """Whether a dataset may be kept on the device although no option asks for it."""
    small = DATASETS[config.data.data].in_memory
    return small and device.type == "cuda" and config.data.normalization_location != "host"
