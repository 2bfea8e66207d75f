"""Combinations of sound options that cannot run together, each told with the way out."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from phalanx.catalog.datasets import DATASETS
from phalanx.catalog.models import MODELS, OLD_NAMES
from phalanx.catalog.variant import OwnVariant
from phalanx.config.schema import OPTIONS, Config
from phalanx.config.text import Given
from phalanx.units import parse_rate

_Layer = Mapping[str, Given]


def has_option(family: str, name: str) -> bool:
    """Whether models of a family have an option; a plugin's own network has none of a network."""
    option = OPTIONS[name]
    if family == OwnVariant.family and option.section == "model":
        return name in ("model", "init-weights", "reset-head")
    return option.family in ("", family)


def family_of(model: Any) -> str:
    """The family of a model, in any spelling; empty where there is no such model."""
    found = MODELS.get(OLD_NAMES.get(model, model))
    return found.family if found else ""


def _where(name: str, merged: _Layer) -> str:
    """Where an option was said, or what it is called."""
    return merged[name].where if name in merged else f"--{name}"


def _of_another_family(config: Config, merged: _Layer) -> Iterator[str]:
    """Options that the model does not have."""
    for name, given in merged.items():
        unknown = not has_option(family_of(config.model.model), name)
        if unknown and given.value != OPTIONS[name].default:
            yield (
                f"{given.where}: only {OPTIONS[name].family or 'built-in'} models have it, "
                f"{config.model.model} is none; leave it away"
            )


def _head_without_weights(config: Config, merged: _Layer) -> Iterator[str]:
    """A head that cannot be reset."""
    if config.model.reset_head and config.model.init_weights is None:
        yield (
            f"{_where('reset-head', merged)}: there is no head to reset; "
            "name the weights to begin with: --init-weights FILE"
        )


def _folder_for_nothing(config: Config, merged: _Layer) -> Iterator[str]:
    """A folder for data that reads none."""
    if not DATASETS[config.data.data].needs_folder and config.data.data_dir is not None:
        folders = ", ".join(name for name, facts in DATASETS.items() if facts.needs_folder)
        yield (
            f"{_where('data-dir', merged)}: {config.data.data} reads no folder; "
            f"say what lies there with --data ({folders})"
        )


def _floats_as_bytes(config: Config, merged: _Layer) -> Iterator[str]:
    """Images that were normalised are floats."""
    if config.data.eight_bit_io and config.data.normalization_location == "host":
        yield (
            f"{_where('eight-bit-io', merged)}: images normalised on the host are floats and "
            "cannot travel as bytes; use --normalization-location device, or --eight-bit-io false"
        )


def _boxes_that_contradict(config: Config, merged: _Layer) -> Iterator[str]:
    """Cutmix in two ways at once, or with its ends exchanged."""
    low, high = config.augment.cutmix_lambda_low, config.augment.cutmix_lambda_high
    if low > 0 and high == 0:
        yield (
            f"{_where('cutmix-lambda-low', merged)}: says the least share alone; give the most, "
            "too: --cutmix-lambda-high 1"
        )
    elif low > high:
        yield (
            f"{_where('cutmix-lambda-low', merged)}: {low:g} is above --cutmix-lambda-high "
            f"{high:g}; exchange them"
        )
    if high > 0 and config.augment.cutmix_lambda < 1:
        yield (
            f"{_where('cutmix-lambda', merged)}: --cutmix-lambda-high draws the boxes another way; "
            "give one of the two"
        )


def _too_few_to_mix(config: Config, merged: _Layer) -> Iterator[str]:
    """Micro-batches in which an image would be its own partner."""
    augment, images = config.augment, config.data.batch_size
    boxes, blends = augment.cuts, augment.mixup_alpha > 0
    away = {(True, True): 3, (False, True): 2, (True, False): 1}.get((blends, boxes), 0)
    least = away * config.data.repeated_augmentation + 1
    if images < least:
        what = " and ".join(name for name, on in (("mixup", blends), ("cutmix", boxes)) if on)
        take, want = ("take", "want") if blends and boxes else ("takes", "wants")
        yield (
            f"{_where('batch-size', merged)}: {what} {take} partners from the same micro-batch and "
            f"{want} {least} images or more, got {images}"
        )


def _work_for_the_host(config: Config, merged: _Layer) -> Iterator[str]:
    """What cannot be done where images are decoded on the GPU."""
    if not config.data.gpu_decode:
        return
    told = _where("gpu-decode", merged)
    for name in ("color-jitter", "auto-augment", "random-erasing"):
        value = getattr(config.augment, name.replace("-", "_"))
        if value not in (0, "none"):
            yield f"{told}: --{name} is done on the host; leave one of the two away"
    if config.data.normalization_location == "host":
        yield f"{told}: normalises on the device; leave --normalization-location host away"
    if config.machine.device.startswith(("cpu", "mps")):
        yield f"{told}: wants a CUDA device, not --device {config.machine.device}; leave it away"
    if DATASETS[config.data.data].augment != "resized-crop":
        yield f"{told}: {config.data.data} holds no JPEG photographs; leave it away"


def _photographs_on_the_device(config: Config, merged: _Layer) -> Iterator[str]:
    """A set that is too large to lie on the device."""
    if config.data.keep_on_device and not DATASETS[config.data.data].in_memory:
        yield (
            f"{_where('keep-on-device', merged)}: {config.data.data} is not a set of small images "
            "in one array; leave the option away"
        )


def _nothing_to_score(config: Config, merged: _Layer) -> Iterator[str]:
    """Scoring afterwards what nobody kept."""
    after = config.train.validation and config.train.validation_mode == "after"
    if after and parse_rate(config.run.ckpts_per_epoch) == 0:
        yield (
            f"{_where('validation-mode', merged)}: after training there is no checkpoint to score "
            "with --ckpts-per-epoch 0; give 1, or --validation-mode during"
        )


def _roots_of_nothing(config: Config, merged: _Layer) -> Iterator[str]:
    """A first update that divides nothing by nothing."""
    said = config.optim
    if said.optimizer == "rmsprop_tf" and said.rmsprop_start == 0 and said.optimizer_eps == 0:
        yield (
            f"{_where('rmsprop-start', merged)}: 0 with --optimizer-eps 0 divides by nothing at "
            "the first step; give --optimizer-eps 1e-3"
        )


def _nothing_to_do(config: Config, merged: _Layer) -> Iterator[str]:
    """A run that neither trains nor scores."""
    train = config.train
    if not train.training and (not train.validation or train.validation_mode == "none"):
        yield (
            f"{_where('training', merged)}: without training and without validation nothing is "
            "left to do; leave one of them away"
        )


_RULES: tuple[Callable[[Config, _Layer], Iterator[str]], ...] = (
    _of_another_family,
    _head_without_weights,
    _folder_for_nothing,
    _floats_as_bytes,
    _boxes_that_contradict,
    _too_few_to_mix,
    _work_for_the_host,
    _photographs_on_the_device,
    _nothing_to_score,
    _roots_of_nothing,
    _nothing_to_do,
)


def impossible(config: Config, merged: _Layer) -> list[str]:
    """Everything that cannot run together."""
    return [problem for rule in _RULES for problem in rule(config, merged)]
