"""Options that have no effect in a run: reported, because nothing else would show it."""

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.catalog.datasets import DATASETS
from phalanx.config.schema import OPTIONS, Config

_SIXTEEN_BITS = ("16.32", "16.16")
_RMSPROPS = ("rmsprop", "rmsprop_tf")
_ADAMS = ("adamw", "lamb")


@dataclass(frozen=True)
class _Requirement:
    """An option that has an effect with some values of another one, or with all but some."""

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
    _Requirement("momentum", "optimizer", excluded=_ADAMS),
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
)


def unused_option_warnings(
    config: Config, *, device: str, precision: str, workers: int
) -> Iterator[str]:
    """One line for each option that was given another value than its own and changes nothing."""
    values = config.flat() | {"precision": precision}
    given = {name for name, value in values.items() if value != OPTIONS[name].default}
    for need in REQUIREMENTS:
        value = _spell(values[need.other])
        if need.name in given and not need.is_met(value):
            yield f"--{need.name} has no effect {_describe_unmet(need, value)}"
    if "lr-batch" in given and values["lr-per-image"] is values["base-learning-rate"] is None:
        yield "--lr-batch has no effect with --lr, which is the rate of the whole batch"
    if config.machine.enable_stochastic_rounding and precision != "16.16":
        yield (
            f"--enable-stochastic-rounding has no effect with --precision {precision}: "
            "weights are 32 bits wide"
        )
    if config.machine.offload_optimizer and not device.startswith("cuda"):
        yield f"--offload-optimizer has no effect on {device}: its memory is the host's own"
    if config.augment.cutmix_disable_prob > 0 and not config.augment.has_cutmix:
        yield (
            "--cutmix-disable-prob has no effect without cutmix; give --cutmix-lambda-high 1, or "
            "leave it out"
        )
    reason = _describe_image_maker(config, device) or "without workers" * (workers == 0)
    for name in ("workers", "dataloader-rebatch-size") if reason else ():
        if name in given and values[name]:
            yield f"--{name} {values[name]} has no effect {reason}"


def _describe_unmet(need: _Requirement, value: str) -> str:
    """Why an option has no effect, in words, with what would give it one."""
    if value in ("false", "0"):
        return f"without --{need.other}"
    only = f", only with {' and '.join(need.values)}" if need.values else ""
    return f"with --{need.other} {value}{only}"


def _spell(value: object) -> str:
    """A value as a flag spells it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _describe_image_maker(config: Config, device: str) -> str:
    """What makes the images in the place of worker processes, in words; empty where they do."""
    data = config.data
    options = {
        "--gpu-decode": data.gpu_decode,
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
    """Whether the images of a set could be made on a GPU that has room for all of it."""
    data, augment, dataset = config.data, config.augment, DATASETS[config.data.data]
    resized = data.image_size not in (None, dataset.image_size) or data.progressive_resolution
    on_host = (
        augment.color_jitter > 0
        or augment.auto_augment != "none"
        or augment.random_erasing > 0
        or data.normalization_location == "host"
    )
    return dataset.in_memory and not resized and not on_host
