"""The arithmetic of the TensorFlow 1 program: names, batches, rates, lengths, norms."""

from fractions import Fraction
from math import log2

from phalanx.catalog.datasets import DATASETS
from phalanx.catalog.models import MODELS
from phalanx.dialects.table import Apply, Effect, OldValues
from phalanx.errors import ConfigError, suggest
from phalanx.units import format_plural

DATA_NAMES = {"imagenet": "imagenet", "cifar-10": "cifar10", "cifar-100": "cifar100"}


def find_model(values: OldValues) -> str:
    """resnet, resnext or efficientnet."""
    return values.text("model").lower()


def find_data(values: OldValues) -> str:
    """The old name of the dataset: as given, or told from the folder's name, as it was there."""
    given = values.text("dataset").lower()
    if given:
        return given
    path = (values.text("data-dir") or values.environment.get("DATA_DIR", "")).lower()
    if "imagenet" not in path and "cifar" in path:
        return "cifar-100" if "cifar100" in path or "cifar-100" in path else "cifar-10"
    return "imagenet"


def is_imagenet(values: OldValues) -> bool:
    """Whether the images are photographs."""
    return find_data(values) == "imagenet"


def _find_size(values: OldValues) -> str:
    """The size of the model as the old program understood it: b4, 4 and B4 are the same."""
    text = values.text("model-size")
    if find_model(values) != "efficientnet":
        return text
    return f"B{text}" if text.isdecimal() else text.upper()


def choose_size(values: OldValues) -> str:
    """The size where none is given."""
    sizes = {"resnet": ("18", "20"), "resnext": ("14", "11"), "efficientnet": ("B0", "CIFAR")}
    large, small = sizes[find_model(values)]
    return large if is_imagenet(values) else small


def find_network(values: OldValues) -> str:
    """The model by its name here."""
    model, size = find_model(values), _find_size(values)
    if model == "efficientnet":
        return f"efficientnet_{size.lower()}"
    wide = "_wide" * values.has("widenet")
    name = f"{model}{size}" + f"_32x4d{wide}" * (model == "resnext")
    small = [f"{name}_bottleneck", f"{name}_small"] if not is_imagenet(values) else []
    name = next((other for other in small if other in MODELS), name)
    if name not in MODELS:
        sizes = [n for n in MODELS if n.startswith(model)]
        raise ConfigError(f"--model-size {size}: no {model} has that size; {suggest(name, sizes)}")
    return name


def port_network(text: str, values: OldValues) -> Effect:
    """--model and --model-size are one name here."""
    return Effect(flags={"model": find_network(values)}, why="a model's name has its size in it")


def _count_replicas(values: OldValues) -> int:
    """All copies of the model: poprun's, or those of every host."""
    launch = values.launch
    if launch.name == "poprun":
        return launch.replicas or 1
    return launch.replicas or values.whole("replicas", 1) * max(1, len(launch.hosts))


def port_replicas(text: str, values: OldValues) -> Effect:
    """How many copies there are."""
    total = _count_replicas(values)
    flags = {"replicas": str(total)}
    if values.launch.name == "poprun":
        return Effect(flags=flags, why="poprun's --num-replicas counts, as it did there")
    if values.launch.hosts:
        why = f"{text} on each of {len(values.launch.hosts)} hosts"
        return Effect(flags=flags, launch={"num-replicas": str(total)}, why=why)
    return Effect(flags=flags, kind="kept", why="with fewer devices they fold")


def _count_batch(values: OldValues) -> int:
    """The images of one update of the weights."""
    batch, count = values.whole("batch-size", 1), values.whole("gradient-accumulation-count", 1)
    return batch * count * _count_replicas(values)


def _count_images(values: OldValues) -> int:
    """The training images: those that are here, or as many as the dataset is published with."""
    images = values.images or DATASETS[DATA_NAMES.get(find_data(values), "imagenet")].train_images
    assert images is not None
    return images


def count_epochs(values: OldValues) -> Fraction:
    """The length of the run in epochs."""
    if values.is_given("iterations"):
        return Fraction(values.whole("iterations") * _count_batch(values), _count_images(values))
    share = Fraction(values.text("dataset-percentage-to-use") or "100") / 100
    return Fraction(values.text("epochs")) * share


def _count_updates(values: OldValues) -> int:
    """The updates of the whole run, rounded down."""
    if values.is_given("iterations"):
        return values.whole("iterations")
    return int(_count_images(values) * count_epochs(values) // _count_batch(values))


def _find_peak(values: OldValues) -> float:
    """The rate before any decay: 2^n x the batch, or as it is given."""
    if values.is_given("abs-learning-rate"):
        return values.number("abs-learning-rate")
    return float(2 ** values.number("base-learning-rate") * _count_batch(values))


def _count_warmup(values: OldValues) -> int:
    """The updates of the warm-up, rounded down as they were; it may be longer than the run."""
    schedule = values.text("lr-schedule").lower()
    if values.is_given("iterations") and schedule in ("stepped", "cosine"):
        return 0
    epochs = Fraction(values.text("warmup-epochs") or "0")
    whole = count_epochs(values)
    return int(_count_updates(values) * epochs // whole) if whole else 0


def port_warmup(text: str, values: OldValues) -> Effect:
    """The warm-up in steps, because it was rounded down to them."""
    steps, total = _count_warmup(values), _count_updates(values)
    if steps == 0 and values.is_given("iterations") and float(text or 0) > 0:
        why = "with --iterations the old program did not warm up"
        return Effect(flags={"warmup-epoch": "0ep"}, why=why)
    if steps >= total > 1:
        why = f"its {steps:,} steps outlast the run: all steps are warm-up, up to a lower rate"
        return Effect(flags={"warmup-epoch": f"{total - 1}st"}, why=why)
    return Effect(flags={"warmup-epoch": f"{steps}st"}, why="rounded down to steps, as it was")


def port_rate(text: str, values: OldValues) -> Effect:
    """The peak rate; where the warm-up outlasts the run, the rate that is reached."""
    batch, peak = _count_batch(values), _find_peak(values)
    formula = f"2^{text} x {batch:,} images = {peak:g}"
    warmup, total = _count_warmup(values), _count_updates(values)
    if warmup >= total > 1:
        reached = peak * (total - 1) / warmup
        why = f"{formula}, of which the run reaches {total - 1:,} / {warmup:,}"
        return Effect(flags={"lr": f"{reached:.10g}", "base-learning-rate": ""}, why=why)
    return Effect(flags={"base-learning-rate": text, "lr": ""}, why=formula, kind="kept")


def port_absolute_rate(text: str, values: OldValues) -> Effect:
    """A rate that is given as it is."""
    warmup, total, peak = _count_warmup(values), _count_updates(values), _find_peak(values)
    if warmup >= total > 1:
        why = f"the warm-up outlasts the run, which reaches {total - 1:,} / {warmup:,} of it"
        peak *= (total - 1) / warmup
    else:
        why = f"2^{log2(peak / _count_batch(values)):.4g} x {_count_batch(values):,} images"
    flags = {"lr": f"{peak:.10g}", "base-learning-rate": ""}
    return Effect(flags=flags, why=why, kind="renamed")


def port_final_rate(text: str, values: OldValues) -> Effect:
    """The last rate of a polynomial as a share of the first."""
    ratio = float(text) / _find_peak(values)
    return Effect(flags={"lr-end-ratio": f"{ratio:.7g}"}, why=f"{text} of {_find_peak(values):g}")


def port_drops(text: str, values: OldValues) -> Effect:
    """How often an exponential schedule falls."""
    if values.text("lr-schedule").lower() != "exponential":
        return Effect(why="only an exponential schedule uses it", kind="nothing")
    epochs = count_epochs(values)
    rate = Fraction(text) / epochs
    why = f"{text} in {format_plural(float(epochs), 'epoch')}"
    return Effect(flags={"lr-scheduler-freq": str(rate)}, why=why)


def port_epochs(text: str, values: OldValues) -> Effect:
    """The length of the run."""
    epochs = count_epochs(values)
    if str(epochs) == text or epochs == Fraction(text):
        return Effect(flags={"epochs": text, "steps": ""}, kind="kept")
    share = values.text("dataset-percentage-to-use")
    why = f"as many steps as {share}% of the images give"
    return Effect(flags={"epochs": f"{float(epochs):g}", "steps": ""}, why=why)


def port_iterations(text: str, values: OldValues) -> Effect:
    """A length in updates of the weights."""
    return Effect(flags={"steps": text, "epochs": ""}, why="updates of the weights")


def port_percentage(text: str, values: OldValues) -> Effect:
    """A part of the dataset."""
    why = "no part of the images is left out; --epochs is shortened to as many steps"
    return Effect(why=why, warnings=(f"--dataset-percentage-to-use {text}: {why}",))


def port_log_interval(text: str, values: OldValues) -> Effect:
    """Steps between two log points as a rate."""
    if not values.is_given("iterations"):
        return Effect(why="only --iterations uses it; --logs-per-epoch counts", kind="nothing")
    rate = Fraction(_count_images(values), _count_batch(values) * int(text))
    return Effect(flags={"logs-per-epoch": str(rate)}, why=f"a log point every {text} steps")


def port_rmsprop_exponent(text: str, values: OldValues) -> Effect:
    """The decay of the mean square from the batch."""
    if not is_rmsprop(values):
        return Effect(why="only RMSprop uses it", kind="nothing")
    if values.is_given("rmsprop-decay"):
        return Effect(why="--rmsprop-decay counts, as it did there", kind="nothing")
    batch = _count_batch(values)
    decay = max(0.0, 1 - 2 ** float(text) * batch)
    return Effect(flags={"rmsprop-decay": f"{decay:.15g}"}, why=f"1 - 2^{text} x {batch:,} images")


def is_rmsprop(values: OldValues) -> bool:
    """Whether the optimizer is RMSprop."""
    return values.text("optimiser").lower() == "rmsprop"


def is_lars(values: OldValues) -> bool:
    """Whether the optimizer is LARS."""
    return values.text("optimiser").lower() == "lars"


def port_momentum(text: str, values: OldValues) -> Effect:
    """SGD had none."""
    if values.text("optimiser").lower() == "sgd":
        why = "the old SGD had no momentum"
        return Effect(flags={"momentum": "0"}, why=why, kind="computed")
    return Effect(flags={"momentum": text}, kind="kept")


def choose_exponent(values: OldValues) -> str:
    """The exponent of the base learning rate where no rate is given."""
    if values.is_given("abs-learning-rate"):
        return ""
    efficient = find_model(values) == "efficientnet"
    if not is_imagenet(values):
        return "-6"
    rule = values.text("optimiser").lower()
    exponents = {"sgd": "-7", "rmsprop": "-14"} if efficient else {"sgd": "-8"}
    return exponents.get(rule, "-10" if efficient else "-11")


def choose_decay(values: OldValues) -> str:
    """The weight decay where none is given; LARS had its own."""
    if is_lars(values):
        return "0"
    if not is_imagenet(values):
        return "1e-6"
    return "1e-5" if find_model(values) == "efficientnet" else "1e-4"


def port_decay(text: str, values: OldValues) -> Effect:
    """The weight decay, which is never that of norms and biases here."""
    why = "a term of the gradient"
    if not is_imagenet(values) and float(text):
        why += "; norms and biases, which it decayed too, are left out"
    return Effect(flags={"l2-regularization": text}, why=why, kind="renamed")


def choose_lars_decay(values: OldValues) -> str:
    """The decay inside the steps of LARS."""
    if not is_lars(values):
        return ""
    efficient = find_model(values) == "efficientnet"
    return "1e-6" if not is_imagenet(values) else ("1e-5" if efficient else "1e-4")


def choose_batch(values: OldValues) -> str:
    """The micro-batch where none is given."""
    batches = {"resnet": ("4", "32"), "resnext": ("1", "8"), "efficientnet": ("4", "8")}
    large, small = batches[find_model(values)]
    return large if is_imagenet(values) else small


def choose_epochs(values: OldValues) -> str:
    """The epochs where no length is given."""
    if values.is_given("iterations"):
        return ""
    efficient = find_model(values) == "efficientnet"
    return str((350 if efficient else 100) if is_imagenet(values) else (300 if efficient else 160))


def choose_smoothing(values: OldValues) -> str:
    """The label smoothing where none is given."""
    return "0.1" if find_model(values) == "efficientnet" and is_imagenet(values) else "0"


def find_norm(values: OldValues) -> str:
    """batch or group, as the old program decided between its two flags."""
    efficient = find_model(values) == "efficientnet"
    batch, group = values.has("batch-norm"), values.has("group-norm")
    if batch and group:
        return "batch" if efficient else "group"
    if batch or group:
        return "batch" if batch else "group"
    return "group" if efficient or is_imagenet(values) else "batch"


def port_norm(text: str, values: OldValues) -> Effect:
    """Which norm the model has."""
    both = values.has("batch-norm") and values.has("group-norm")
    why = f"both are given: the old program took {find_norm(values)}" * both
    return Effect(flags={"norm-type": find_norm(values)}, why=why)


def choose_groups(values: OldValues) -> str:
    """The groups of a group norm where none are given."""
    if find_norm(values) != "group":
        return ""
    if find_model(values) == "efficientnet":
        return "4"
    return "32" if is_imagenet(values) else "16"


def port_normalization(text: str, values: OldValues) -> Effect:
    """How pixels are normalised."""
    if not is_imagenet(values):
        return Effect(
            flags={"normalization": "per-image"}, why="small images by their own statistics"
        )
    if text == "true":
        return Effect(flags={"normalization": "mean-std"}, why="mean and deviation, over 255")
    return Effect(flags={"normalization": "mean"}, why="without --normalise-input, the mean alone")


def port_rounding(text: str, values: OldValues) -> Effect:
    """Stochastic rounding, which 32-bit weights have no use for."""
    halves = values.text("precision") == "16.16"
    on = halves and text != "true"
    why = "" if halves else "weights are 32 bits wide, which are not rounded by chance"
    return Effect(flags={"enable-stochastic-rounding": str(on).lower()}, why=why)


def build_noise(kind: str, *, scores: bool = False) -> Apply:
    """What --generated-data or --synthetic-data becomes."""

    def apply(text: str, values: OldValues) -> Effect:
        where = "on the host" if kind == "generated" else "on the device"
        if text != "true":
            return Effect()
        if scores:
            small = {} if is_imagenet(values) else {"image-size": "32"}
            flags = {f"{kind}-data": "true", **small}
            return Effect(flags=flags, why=f"noise made {where}", kind="kept")
        steps = max(1, _count_images(values) // _count_batch(values))
        flags = {"data": kind, "data-dir": "", "iterations": str(steps)}
        flags["image-size"] = values.text("image-size") or str(_find_image_size(values))
        return Effect(flags=flags, why=f"noise made {where}; an epoch is as long as the dataset's")

    return apply


def _find_image_size(values: OldValues) -> int:
    """Height and width that the model sees."""
    return MODELS[find_network(values)].image_size if is_imagenet(values) else 32


def port_data(text: str, values: OldValues) -> Effect:
    """The dataset."""
    if values.has("generated-data") or values.has("synthetic-data"):
        return Effect(why="noise takes the place of its images", kind="computed")
    name = DATA_NAMES.get(find_data(values), "imagenet")
    return Effect(flags={"data": name})


def port_folder(text: str, values: OldValues) -> Effect:
    """Where the data is."""
    if values.has("generated-data") or values.has("synthetic-data"):
        return Effect(why="noise needs no files", kind="nothing")
    if values.is_given("dataset"):
        return Effect(flags={"data-dir": text}, kind="kept")
    name = find_data(values)
    return Effect(
        flags={"data-dir": text, "data": DATA_NAMES.get(name, "imagenet")},
        why=f"its name says {name}" if name.partition("-")[0] in text.lower() else "",
        kind="kept",
    )
