"""The arithmetic of the TensorFlow 2 program: its data, batches, lengths and events."""

from fractions import Fraction

from phalanx.catalog.datasets import DATASETS
from phalanx.dialects.table import Effect, OldValues
from phalanx.errors import ConfigError
from phalanx.plan.events import find_nearest_divisor
from phalanx.units import parse_exact

NETWORKS = {  # our name of each model
    **{f"resnet{size}": f"resnet{size}" for size in (18, 34, 50)},
    **{f"cifar_resnet{size}": f"resnet{size}" for size in (8, 20, 32, 44, 56)},
    "toy_model": "resnet8",
    "toy_model_bn": "resnet8",
}
DATA_NAMES = ("imagenet", "cifar10", "cifar100", "mnist")
_TOYS = ("toy_model", "toy_model_bn")
_MOST_READS = 65_536  # steps between two reads, at most
_USUAL_READS = 512


# --- the model and its data ---


def find_model(values: OldValues) -> str:
    """The old name of the model."""
    return values.text("model-name")


def is_toy(values: OldValues) -> bool:
    """Whether the model is one of the two that only tested the program."""
    return find_model(values) in _TOYS


def find_data(values: OldValues) -> str:
    """imagenet, cifar10, cifar100 or mnist."""
    return values.text("dataset").lower()


def has_small_network(values: OldValues) -> bool:
    """Whether the network is one for small images."""
    return find_model(values) not in ("resnet18", "resnet34", "resnet50")


def is_made_up(values: OldValues) -> bool:
    """Whether noise takes the place of images."""
    return values.has("synthetic-data")


def find_image_size(values: OldValues) -> int:
    """Height and width of the images of the dataset."""
    return {"imagenet": 224, "mnist": 28}.get(find_data(values), 32)


def port_network(text: str, values: OldValues) -> Effect:
    """The model by its name here."""
    if is_toy(values):
        why = f"{text} was a test of two convolutions; ResNet-8, the smallest network, stands in"
        is_meant = "model-name" in values.given
        return Effect(flags={"model": "resnet8"}, why=why, warnings=(why,) if is_meant else ())
    name = NETWORKS[text.lower()]
    return Effect(flags={"model": name}, kind="kept" if name == text else "renamed")


# --- batches ---


def _count_replicas(values: OldValues) -> int:
    """All copies of the model; poprun's number counts where there is one."""
    return values.launch.replicas or values.whole("num-replicas", 1)


def port_replicas(text: str, values: OldValues) -> Effect:
    """How many copies there are."""
    total = str(_count_replicas(values))
    if values.launch.replicas and not values.is_given("num-replicas"):
        return Effect()
    if values.launch.replicas:
        why = "poprun's --num-replicas counts, as it did there"
        return Effect(flags={"replicas": total}, why=why, kind="computed")
    return Effect(flags={"replicas": total}, why="with fewer devices they fold", kind="renamed")


def count_accumulation(values: OldValues) -> int:
    """Micro-batches of a step: as given, or what comes nearest to the global batch."""
    for source in (values.given, values.config):
        if "gradient-accumulation-count" in source:
            return max(1, int(float(source["gradient-accumulation-count"])))
        if "global-batch-size" in source:
            pass_images = values.whole("micro-batch-size", 1) * _count_replicas(values)
            return max(1, round(Fraction(int(float(source["global-batch-size"])), pass_images)))
    return 1


def count_batch(values: OldValues) -> int:
    """The images of one update of the weights."""
    return (
        values.whole("micro-batch-size", 1) * count_accumulation(values) * _count_replicas(values)
    )


def port_accumulation(text: str, values: OldValues) -> Effect:
    """Micro-batches of a step."""
    flags = {"gradient-accumulation": str(count_accumulation(values))}
    return Effect(flags=flags, kind="renamed")


def port_global_batch(text: str, values: OldValues) -> Effect:
    """The global batch as the accumulation that makes it."""
    if "gradient-accumulation-count" in values.given:
        return Effect(why="--gradient-accumulation-count counts", kind="nothing")
    batch, count = count_batch(values), count_accumulation(values)
    parts = (
        f"micro-batch {values.whole('micro-batch-size', 1)} x {_count_replicas(values)} replicas"
    )
    warning = f"{text} is not a multiple of {parts}; rounded to {batch}, as it was there"
    return Effect(
        flags={"gradient-accumulation": str(count)},
        why=f"{batch:,} images over {parts}",
        warnings=(warning,) if batch != int(float(text)) else (),
    )


# --- lengths ---


def _count_images(values: OldValues) -> int:
    """The training images: those that are here, or as many as the dataset is published with."""
    images = values.images or DATASETS[find_data(values)].train_images
    assert images is not None
    return images


def count_updates(values: OldValues) -> int:
    """Updates of the weights in an epoch, rounded down, as an epoch's rest was left out."""
    asked = values.whole("weight-updates-per-epoch", -1)
    return asked if asked > 0 else max(1, _count_images(values) // count_batch(values))


def count_all_updates(values: OldValues) -> int:
    """Updates of the whole run."""
    return count_updates(values) * values.whole("num-epochs", 1)


def _has_own_epoch(values: OldValues) -> bool:
    """Whether an epoch is as long as somebody says."""
    return values.whole("weight-updates-per-epoch", -1) > 0


def port_length(values: OldValues, epochs: Fraction) -> str:
    """Epochs as a length of ours; steps where epochs there are no epochs here."""
    steps = int(epochs * count_updates(values))
    whole = (epochs * count_updates(values)).denominator == 1
    return f"{float(epochs):g}ep" if whole and not _has_own_epoch(values) else f"{steps}st"


def port_epochs(text: str, values: OldValues) -> Effect:
    """The length of the run."""
    if _has_own_epoch(values) and not is_made_up(values):
        steps = count_all_updates(values)
        why = f"{text} epochs of {count_updates(values):,} updates"
        return Effect(flags={"steps": str(steps), "epochs": ""}, why=why, kind="computed")
    return Effect(flags={"epochs": text, "steps": ""}, kind="renamed")


def port_updates(text: str, values: OldValues) -> Effect:
    """The length of an epoch."""
    if not _has_own_epoch(values):
        return Effect(why="an epoch is as long as the dataset", kind="elsewhere")
    if is_made_up(values):
        return Effect(flags={"iterations": text}, why="the length of an epoch of noise")
    return Effect(
        why="counted in --steps, and log points and checkpoints by the images they are apart",
        kind="computed",
    )


def _find_rate(name: str, text: str) -> Fraction:
    try:
        rate = parse_exact(text)
    except (ValueError, ZeroDivisionError):
        raise ConfigError(
            f"--{name}: expected times per epoch, such as 2 or 1/2, got {text!r}"
        ) from None
    if rate < 0:
        raise ConfigError(f"--{name} {text}: cannot be negative; 0 is never")
    return rate


def _scale_rate(rate: Fraction, values: OldValues) -> Fraction:
    """Times per epoch of ours, where the old program counts other epochs."""
    if not _has_own_epoch(values) or is_made_up(values):
        return rate
    return rate * (_count_images(values) // count_batch(values)) / count_updates(values)


def port_logs(text: str, values: OldValues) -> Effect:
    """Log points, between which nothing is read from the device, as there."""
    rate = _find_rate("logs-per-epoch", text)
    flags = {"logs-per-epoch": str(_scale_rate(rate, values))}
    steps = _count_steps_apart(rate, values)
    if values.is_given("logs-per-epoch") and steps > _USUAL_READS:
        flags["device-iterations"] = str(min(steps, _MOST_READS))
        why = f"{steps:,} steps before the device is read, as many as it took in one go"
    else:
        why = ""
    return Effect(flags=flags, why=why, kind="kept", warnings=_list_log_warnings(rate, values))


def _count_steps_apart(rate: Fraction, values: OldValues) -> int:
    """Steps between two log points; without any, all of them."""
    if rate == 0:
        return count_all_updates(values)
    if rate >= 1:
        return count_updates(values) // find_nearest_divisor(count_updates(values), rate)
    return int(count_updates(values) / rate)


def _list_log_warnings(rate: Fraction, values: OldValues) -> tuple[str, ...]:
    """That the old program refused a frequency as well, in its own words."""
    epochs = values.whole("num-epochs", 1)
    if not 0 < rate < 1 or (epochs * rate).denominator == 1:
        return ()
    refused = f"It is not possible to log {float(1 / rate)} epochs a time for {epochs} epochs"
    return (f'the old program refused it, too: "{refused}"',)


def port_checkpoints(text: str, values: OldValues) -> Effect:
    """How often checkpoints are written."""
    rate = _scale_rate(_find_rate("ckpts-per-epoch", text), values)
    return Effect(flags={"ckpts-per-epoch": str(rate)}, kind="kept")
