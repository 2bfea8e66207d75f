"""Finds options that have no effect in a run, which nothing else would show."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from phalanx.catalog.datasets import DATASETS, PUBLISHED, Dataset
from phalanx.catalog.resnets import ResNetVariant
from phalanx.config.schema import OPTIONS, Config
from phalanx.plan.layout import Layout
from phalanx.plan.machine import resolve_device
from phalanx.plan.machine_choice import MachineChoice
from phalanx.plan.model import build_variant
from phalanx.plan.pipeline import count_stages
from phalanx.units import format_plural, parse_duration, parse_rate

_SIXTEEN_BITS = ("16.32", "16.16")
_RMSPROPS = ("rmsprop", "rmsprop_tf")
_ADAMS = ("adamw", "lamb")
_FOR_PHOTOGRAPHS = ("crop-scale", "crop-ratio", "use-bbox-info", "eval-crop")
_FOR_SMALL_IMAGES = ("shift-pixels", "shift-fill")
_FOR_FILES = ("max-bad", "max-file-mib", "max-pixels", "dataset-cache")
_FILTERS = ("sharding-include-filter", "sharding-exclude-filter")
_AUGMENTATIONS = ("color-jitter", "auto-augment", "random-erasing")


@dataclass(frozen=True)
class _Requirement:
    """An option that has an effect only with, or only without, some values of another one."""

    name: str
    other: str
    values: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()

    def is_met(self, value: str) -> bool:
        """Whether the option has an effect while the other has that value."""
        return value in self.values if self.values else value not in self.excluded


REQUIREMENTS = (
    _Requirement("lr-epoch-decay", "lr-schedule", ("step",)),
    _Requirement("lr-drop-after", "lr-schedule", ("step",)),
    _Requirement("lr-decay-period", "lr-schedule", ("exponential",)),
    _Requirement("lr-decay-length", "lr-schedule", ("cosine", "polynomial")),
    _Requirement("lr-decay", "lr-schedule", ("step", "exponential")),
    _Requirement("lr-power", "lr-schedule", ("polynomial",)),
    _Requirement("lr-end-ratio", "lr-schedule", ("cosine", "polynomial")),
    _Requirement("lr-scheduler-freq", "lr-schedule", excluded=("constant",)),
    _Requirement("warmup-mode", "warmup-epoch", excluded=("0",)),
    _Requirement("momentum", "optimizer", excluded=_ADAMS),
    _Requirement("optimizer-eps", "optimizer", (*_RMSPROPS, *_ADAMS, "lars")),
    _Requirement("trust-coefficient", "optimizer", ("lars",)),
    _Requirement("trust-decay", "optimizer", ("lars", "lamb")),
    _Requirement("rmsprop-decay", "optimizer", _RMSPROPS),
    _Requirement("rmsprop-start", "optimizer", ("rmsprop_tf",)),
    _Requirement("adam-betas", "optimizer", _ADAMS),
    _Requirement("loss-velocity-scaling-ratio", "optimizer", ("sgd_combined",)),
    _Requirement("smoothing-over", "label-smoothing", excluded=("0",)),
    _Requirement("half-type", "precision", _SIXTEEN_BITS),
    _Requirement("full-precision-norm", "precision", _SIXTEEN_BITS),
    _Requirement("half-partials", "precision", _SIXTEEN_BITS),
    _Requirement("recompute-checkpoints", "enable-recompute", ("true",)),
    _Requirement("norm-num-groups", "norm-type", ("group",)),
    _Requirement("enable-fast-groupnorm", "norm-type", ("group",)),
    _Requirement("batchnorm-momentum", "norm-type", ("batch",)),
    _Requirement("disable-stable-batchnorm", "norm-type", ("batch",)),
    _Requirement("bn-span", "norm-type", ("batch",)),
    _Requirement("norm-eps", "norm-type", excluded=("none",)),
    _Requirement("norm-bias-lr-scale", "norm-type", excluded=("none",)),
    _Requirement("zero-init-residual", "norm-type", excluded=("none",)),
    _Requirement("normalization", "normalization-location", excluded=("none",)),
    _Requirement("run-dir", "training", ("true",)),
    _Requirement("tensorboard", "training", ("true",)),
    _Requirement("wandb", "training", ("true",)),
    _Requirement("mlflow", "training", ("true",)),
    _Requirement("validation-mode", "validation", ("true",)),
    _Requirement("validation-frequency", "validation-mode", ("during",)),
    _Requirement("valid-batch-size", "validation-mode", excluded=("none",)),
    _Requirement("keep", "ckpts-per-epoch", excluded=("0",)),
    _Requirement("first-ckpt-epoch", "ckpts-per-epoch", excluded=("0",)),
    _Requirement("weight-avg-n", "weight-avg-strategy", excluded=("none",)),
    _Requirement("weight-avg-exp-decay", "weight-avg-strategy", ("exponential",)),
    _Requirement("iterations", "data", ("generated", "synthetic")),
    _Requirement("no-fetch", "data", PUBLISHED),
    _Requirement("wandb-mode", "wandb", ("true",)),
    _Requirement("wandb-project", "wandb", ("true",)),
    _Requirement("wandb-run-name", "wandb", ("true",)),
    _Requirement("wandb-tags", "wandb", ("true",)),
    _Requirement("mlflow-uri", "mlflow", ("true",)),
    _Requirement("mlflow-experiment", "mlflow", ("true",)),
)


def list_unused_options(
    config: Config,
    user_options: Collection[str],
    *,
    machine: MachineChoice,
    layout: Layout,
    workers: int,
) -> Iterator[str]:
    """One line for each option that has no effect, although it was given or is not the default.

    Options that are off are not reported.
    """
    device, precision = machine.device, machine.precision
    values = config.flat() | {"precision": precision}
    requested = {name for name in user_options if values[name] not in (None, False)}
    given = {name for name, value in values.items() if value != OPTIONS[name].default} | requested
    effective = _spell_effective(config, values)
    for need in REQUIREMENTS:
        value = effective[need.other]
        if need.name in given and not need.is_met(value):
            requested.discard(need.name)  # one reason is enough
            yield f"--{need.name} has no effect {_describe_unmet(need, value)}"
    for name, reason in _list_without_use(config, effective, device=device):
        if name in requested:
            yield f"--{name} has no effect {reason}"
    yield from _list_special_cases(config, given, device=device, precision=precision)
    yield from _list_idle_stages(config, given, user_options)
    yield from _list_idle_devices(config, given, requested, machine=machine, layout=layout)
    reason = _describe_image_maker(config, device) or "without workers" * (workers == 0)
    for name in ("workers", "dataloader-rebatch-size") if reason else ():
        if name in given and values[name]:
            yield f"--{name} {values[name]} has no effect {reason}"


def _list_special_cases(
    config: Config, given: Collection[str], *, device: str, precision: str
) -> Iterator[str]:
    """Options whose effect depends on more than one other option, each with its reason."""
    if (
        "lr-batch" in given
        and config.schedule.lr_per_image is config.schedule.base_learning_rate is None
    ):
        yield "--lr-batch has no effect with --lr, which is the rate of the whole batch"
    if config.machine.enable_stochastic_rounding and precision != "16.16":
        yield (
            f"--enable-stochastic-rounding has no effect with --precision {precision}: "
            "weights are 32 bits wide"
        )
    if config.machine.offload_optimizer and not device.startswith("cuda"):
        yield f"--offload-optimizer has no effect on {device}: its memory is the host's own"
    if config.machine.graph and not device.startswith("cuda"):
        yield f"--graph has no effect on {device}: only CUDA devices have graphs"
    if config.augment.cutmix_disable_prob > 0 and not config.augment.has_cutmix:
        yield (
            "--cutmix-disable-prob has no effect without cutmix; give --cutmix-lambda-high 1, or "
            "leave it out"
        )


def _list_idle_stages(
    config: Config, given: Collection[str], user_options: Collection[str]
) -> Iterator[str]:
    """The options for stages that have no effect."""
    pipelined = config.pipeline.pipeline or "pipeline-splits" in user_options
    whole = count_stages(config) == 1 and config.pipeline.pipeline_splits is None
    for name in ("pipeline-schedule", "pipeline-validation-model", *_FILTERS) if whole else ():
        if name in given:
            asks = "--shards" if name in _FILTERS else "--shards or --pipeline-splits"
            yield f"--{name} has no effect without stages; {asks} would make them"
    for name in _FILTERS if pipelined and not whole else ():
        if name in given:
            why = "--pipeline" if config.pipeline.pipeline else "--pipeline-splits"
            yield f"--{name} has no effect with {why}, only where --shards alone cuts a model"


def _list_idle_devices(
    config: Config,
    given: Collection[str],
    user_options: Collection[str],
    *,
    machine: MachineChoice,
    layout: Layout,
) -> Iterator[str]:
    """The options for many devices that have no effect with the devices in use."""
    options = config.machine
    if layout.ranks == 1:
        # a preset for many ranks may be folded onto one: only the user's own options are reported
        reported = user_options if layout.replicas > 1 else given
        for name in ("bucket-mib", "rank-timeout"):
            if name in reported:
                yield f"--{name} has no effect with one rank, which has no others to talk to"
    if options.devices is not None and machine.launched:
        yield f"--devices {options.devices} has no effect: the launcher started the ranks"
    elif options.devices is not None and options.devices > layout.ranks:
        replicas, stages = format_plural(layout.replicas, "replica"), count_stages(config)
        replicas += f" of {stages} stages" * (stages > 1)
        span = f" with --bn-span {layout.bn_span}" * (layout.bn_span > 1)
        use = "uses" if layout.replicas == 1 else "use"
        yield (
            f"--devices {options.devices}: {replicas}{span} {use} only {layout.ranks}; "
            f"{_suggest_use(options.devices, layout, stages)}"
        )
    scoring = options.validation_device
    if scoring is not None and resolve_device(scoring) == machine.device:
        yield f"--validation-device {scoring} has no effect: that is the device that trains"


def _suggest_use(devices: int, layout: Layout, stages: int) -> str:
    """How to make use of idle devices."""
    if layout.stages < stages:
        return f"stages have devices of their own from {stages} on"
    if devices // stages <= layout.pipelines:
        return f"the next replica needs {stages} of its own"
    return f"--replicas auto trains one on {f'every {stages}' if stages > 1 else 'each'}"


def _spell_effective(config: Config, values: dict[str, object]) -> dict[str, str]:
    """Every option as written on the command line, with one spelling for all forms of "none"."""
    spelt = {name: _spell(value) for name, value in values.items()}
    if not config.train.validation:
        spelt["validation-mode"] = "none"
    if parse_duration(config.schedule.warmup_epoch).amount == 0:
        spelt["warmup-epoch"] = "0"
    if parse_rate(config.run.ckpts_per_epoch) == 0:
        spelt["ckpts-per-epoch"] = "0"
    return spelt


_DATA_NEEDS: tuple[tuple[tuple[str, ...], Callable[[Dataset], bool], str], ...] = (
    (_FOR_PHOTOGRAPHS, lambda data: data.augment == "resized-crop", "photographs"),
    (_FOR_SMALL_IMAGES, lambda data: data.augment == "pad-crop", "small images"),
    (("flips",), lambda data: data.augment != "none", "images that are mirrored"),
    (_FOR_FILES, lambda data: data.needs_folder and not data.in_memory, "files of images"),
)


def _list_without_use(
    config: Config, effective: dict[str, str], *, device: str
) -> Iterator[tuple[str, str]]:
    """Options that have no effect with this data, network or device, and why."""
    data, dataset = config.data.data, DATASETS[config.data.data]
    for names, has_use, need in _DATA_NEEDS:
        if not has_use(dataset):
            yield from ((name, f"with --data {data}, which has no {need}") for name in names)
    if data == "synthetic":
        reason = "with --data synthetic: the device makes the images itself"
        yield from ((name, reason) for name in _AUGMENTATIONS)
    if not device.startswith("cuda"):
        yield "half-partials", f"on {device}, only on a GPU"
    if effective["lr-schedule"] == "constant" and effective["warmup-epoch"] == "0":
        yield "lr-staircase", "with --lr-schedule constant and no warm-up: the rate never changes"
    if config.model.init_weights is not None:
        yield "zero-init-residual", "with --init-weights, which say how every block starts"
    variant = build_variant(config)
    if isinstance(variant, ResNetVariant):
        plain = replace(variant, project_first=False)
        if plain.projects(plain.blocks[0]):
            reason = f"with --model {config.model.model}: its first block projects in any case"
            yield "stage1-projection", reason


def _describe_unmet(need: _Requirement, value: str) -> str:
    """Why an option has no effect, and with what it would have one."""
    if value in ("false", "0") and not OPTIONS[need.other].default:
        return f"without --{need.other}"
    only = f", only with {' and '.join(need.values)}" if need.values else ""
    return f"with --{need.other} {value}{only}"


def _spell(value: object) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _describe_image_maker(config: Config, device: str) -> str:
    """What makes the images instead of worker processes, in words; empty if workers do."""
    data = config.data
    options = {
        "--data synthetic": data.data == "synthetic",
        "--keep-on-device": data.keep_on_device,
    }
    for option, is_set in options.items():
        if is_set:
            return f"with {option}: the device makes the images itself"
    if data.keep_on_device is None and device.startswith("cuda") and can_keep_on_device(config):
        return (
            f"where {data.data} fits the memory of {device}, which then makes the images itself; "
            "--keep-on-device false uses workers"
        )
    return ""


def can_keep_on_device(config: Config) -> bool:
    """Whether batches could be made on a GPU that has room for the whole dataset."""
    data, augment, dataset = config.data, config.augment, DATASETS[config.data.data]
    resized = data.image_size not in (None, dataset.image_size) or data.progressive_resolution
    on_host = (
        augment.color_jitter > 0
        or augment.auto_augment != "none"
        or augment.random_erasing > 0
        or data.normalization_location == "host"
    )
    return dataset.in_memory and not resized and not on_host
