"""Options of the input that a run has no use for: told, because nothing else would show it."""

from collections.abc import Iterator

from phalanx.catalog.datasets import DATASETS
from phalanx.config.schema import OPTIONS, Config

_FOR_WORKERS = ("workers", "dataloader-rebatch-size")


def warn_of_input(config: Config, *, device: str, workers: int) -> Iterator[str]:
    """What is said about the input and changes nothing."""
    if config.augment.cutmix_disable_prob > 0 and not config.augment.cuts:
        yield (
            "--cutmix-disable-prob has no effect without cutmix; give --cutmix-lambda-high 1, or "
            "leave it away"
        )
    why = _why_no_workers(config, device) or "without workers" * (workers == 0)
    said = config.flat()
    for name in _FOR_WORKERS if why else ():
        if said[name] and said[name] != OPTIONS[name].default:
            yield f"--{name} {said[name]} has no effect {why}"


def _why_no_workers(config: Config, device: str) -> str:
    """What makes the images in the place of worker processes, in words; empty where they do."""
    data = config.data
    if data.gpu_decode:
        return "with --gpu-decode: the device makes the images itself"
    if data.data == "synthetic":
        return "with --data synthetic: the device makes the images itself"
    if data.keep_on_device:
        return "with --keep-on-device: the device makes the images itself"
    if data.keep_on_device is None and device.startswith("cuda") and can_reside(config):
        return (
            f"where {data.data} fits the memory of {device}, which then makes the images itself; "
            "--keep-on-device false uses workers"
        )
    return ""


def can_reside(config: Config) -> bool:
    """Whether the images of a set could be made on a GPU that has room for all of it."""
    data, augment, dataset = config.data, config.augment, DATASETS[config.data.data]
    resized = data.image_size not in (None, dataset.image_size) or data.progressive_resolution
    hosted = (
        augment.color_jitter > 0
        or augment.auto_augment != "none"
        or augment.random_erasing > 0
        or data.normalization_location == "host"
    )
    return dataset.in_memory and not resized and not hosted
