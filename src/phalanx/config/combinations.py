"""Options that are valid by themselves but not together, reported with what to do."""

from collections.abc import Iterator, Mapping
from typing import Any

from phalanx.catalog.datasets import DATASETS
from phalanx.catalog.models import MODELS
from phalanx.catalog.variant import OwnVariant
from phalanx.config.fields import find_model_name
from phalanx.config.schema import OPTIONS, Config
from phalanx.config.text import OptionValue
from phalanx.errors import name_location
from phalanx.units import parse_rate


def family_has_option(family: str, name: str) -> bool:
    """Whether models of a family have an option; a plugin's network has few model options."""
    option = OPTIONS[name]
    if family == OwnVariant.family and option.section == "model":
        return name in ("model", "init-weights", "reset-head")
    return option.family in ("", family)


def find_family(model: Any) -> str:
    """The family of a model, in any spelling; empty if there is no such model."""
    try:
        return MODELS[find_model_name(str(model))].family
    except ValueError:
        return ""


def find_conflicts(config: Config, merged: Mapping[str, OptionValue]) -> list[str]:
    """All combinations that are not possible, each with where it was given."""
    model = config.model.model
    family = find_family(model)
    locations = {name: given.where for name, given in merged.items()}
    problems = [
        f"{given.where}: only {OPTIONS[name].family or 'built-in'} models have it, and {model} is "
        "not one; leave it out"
        for name, given in merged.items()
        if not family_has_option(family, name) and given.value != OPTIONS[name].default
    ]
    for check in (_check_data, _check_cutmix, _check_mixing, check_gpu_decode, _check_training):
        problems += [name_location(line, locations) for line in check(config)]
    return problems


def _check_data(config: Config) -> Iterator[str]:
    """Problems with the sources of data and weights, and the transfer of images."""
    data = config.data
    dataset = DATASETS[data.data]
    if config.model.reset_head and config.model.init_weights is None:
        yield (
            "--reset-head: there is no head to reset; name the weights to start from: "
            "--init-weights FILE"
        )
    if not dataset.needs_folder and data.data_dir is not None:
        folders = ", ".join(name for name, facts in DATASETS.items() if facts.needs_folder)
        yield (
            f"--data-dir: {data.data} does not read a folder; say what is there with --data "
            f"({folders})"
        )
    for name, value in (
        ("labels", data.labels),
        ("class-from", data.class_from),
        ("valid-split", data.valid_split),
    ):
        if value is not None and not dataset.needs_folder:
            yield f"--{name}: {data.data} does not read image folders; leave the option out"
    if data.labels is not None and data.class_from is not None:
        yield (
            "--labels: gives the class of each image, and so does --class-from; give one of the two"
        )
    if data.eight_bit_io and data.normalization_location == "host":
        yield (
            "--eight-bit-io: images normalised on the host are floats and cannot travel as bytes; "
            "use --normalization-location device, or --eight-bit-io false"
        )
    if data.keep_on_device and not dataset.in_memory:
        yield (
            f"--keep-on-device: {data.data} is not a set of small images in one array; leave the "
            "option out"
        )


def _check_cutmix(config: Config) -> Iterator[str]:
    """Problems with cutmix: two methods at once, or swapped limits."""
    low, high = config.augment.cutmix_lambda_low, config.augment.cutmix_lambda_high
    if low > 0 and high == 0:
        yield (
            "--cutmix-lambda-low: is the smallest share; also give the largest: "
            "--cutmix-lambda-high 1"
        )
    elif low > high:
        yield (f"--cutmix-lambda-low: {low:g} is above --cutmix-lambda-high {high:g}; swap them")
    if high > 0 and config.augment.cutmix_lambda < 1:
        yield (
            "--cutmix-lambda: --cutmix-lambda-high draws the boxes differently; give one of the two"
        )


def _check_mixing(config: Config) -> Iterator[str]:
    """Problems with micro-batches in which an image would be mixed with itself."""
    augment, images = config.augment, config.data.batch_size
    mixup, cutmix = augment.mixup_alpha > 0, augment.has_cutmix
    distance = mixup + 2 * cutmix  # to the farthest image that is mixed in (engine/mixing.py)
    if mixup and augment.cutmix_lambda < 1:  # in TensorFlow 1, that one may be the image itself
        distance = 2
    least = distance * config.data.repeated_augmentation + 1
    if images < least:
        subject = " and ".join(["mixup"] * mixup + ["cutmix"] * cutmix)
        take, need = ("take", "need") if mixup and cutmix else ("takes", "needs")
        yield (
            f"--batch-size: {subject} {take} partners from the same micro-batch and {need} "
            f"{least} images or more, got {images}"
        )


def check_gpu_decode(config: Config) -> Iterator[str]:
    """Problems with options that are not possible if the GPU decodes images."""
    if not config.data.gpu_decode:
        return
    for name in ("color-jitter", "auto-augment", "random-erasing"):
        if getattr(config.augment, name.replace("-", "_")) not in (0, "none"):
            yield f"--gpu-decode: --{name} is done on the host; leave one of the two out"
    data, device = config.data, config.machine.device
    if data.normalization_location == "host":
        yield "--gpu-decode: normalises on the device; leave --normalization-location host out"
    if device.startswith(("cpu", "mps")):
        yield f"--gpu-decode: needs a CUDA device, not --device {device}; leave it out"
    if DATASETS[data.data].augment != "resized-crop":
        yield f"--gpu-decode: {data.data} holds no JPEG photographs; leave it out"


def _check_training(config: Config) -> Iterator[str]:
    """Problems with runs that would do nothing, or whose first update would not be finite."""
    train, optim = config.train, config.optim
    after = train.validation and train.validation_mode == "after"
    if after and parse_rate(config.run.ckpts_per_epoch) == 0:
        yield (
            "--validation-mode: after training there is no checkpoint to score with "
            "--ckpts-per-epoch 0; give 1, or --validation-mode during"
        )
    if optim.optimizer == "rmsprop_tf" and optim.rmsprop_start == 0 and optim.optimizer_eps == 0:
        yield (
            "--rmsprop-start: 0 with --optimizer-eps 0 divides by zero at the first step; give "
            "--optimizer-eps 1e-3"
        )
    if config.pipeline.pipeline_validation_model and config.machine.validation_device is not None:
        yield (
            "--pipeline-validation-model: stages score where they train; leave it out, or leave "
            "out --validation-device"
        )
    if not train.training and (not train.validation or train.validation_mode == "none"):
        yield (
            "--training: without training and without validation nothing is left to do; leave one "
            "of them out"
        )
