"""The arithmetic of the PyTorch program: names of networks, rates, lengths, averages."""

from fractions import Fraction
from pathlib import PurePath

from phalanx.catalog.models import MODELS
from phalanx.dialects.table import TARGET, Apply, Effect, OldValues
from phalanx.errors import ConfigError

NETWORKS = {  # old names of the networks: those here
    **{f"resnet{size}": f"resnet{size}" for size in (18, 34, 50, 101, 152)},
    "resnext50": "resnext50_32x4d",
    "resnext101": "resnext101_32x8d",
    **{f"efficientnet-b{size}": f"efficientnet_b{size}" for size in range(8)},
}
OTHER_NETWORKS = ("mobilenet", "mobilenet-v3-small", "mobilenet-v3-large")
RANDOM_DATASETS = ("generated", "synthetic")
ADAPTIVE = ("adamw", "rmsprop", "rmsprop_tf")  # optimizers that divide by a mean square
RMSPROP = ("rmsprop", "rmsprop_tf")
_HALF_SIZES = {224: 160, 380: 252}  # what half-resolution training took for them
_FILES = (".pt", ".pth")


def _find_network(values: OldValues) -> str:
    """The model by its name here."""
    name = values.text("model").lower()
    if name not in NETWORKS:
        raise ConfigError(
            f"--model {name}: there is no MobileNet here; choose another network, such as "
            "efficientnet-b0 for its size"
        )
    return NETWORKS[name]


def port_network(text: str, values: OldValues) -> Effect:
    """--model under its name here."""
    network = _find_network(values)
    return Effect(flags={"model": network}, kind="kept" if network == text else None)


def is_efficientnet(values: OldValues) -> bool:
    """Whether the network is an EfficientNet."""
    return _find_network(values).startswith("efficientnet")


def find_image_size(values: OldValues) -> int:
    """Height and width that the model saw: all images were scaled to the network's own."""
    size = MODELS[_find_network(values)].image_size
    return _HALF_SIZES.get(size, size) if values.has("half-res-training") else size


def port_half_size(text: str, values: OldValues) -> Effect:
    """Training with smaller images."""
    size = find_image_size(values)
    return Effect(flags={"image-size": str(size)}, why=f"training at {size} pixels")


# --- data ---


def port_data(text: str, values: OldValues) -> Effect:
    """The dataset; noise is as large as what the network takes."""
    if text not in RANDOM_DATASETS:
        return Effect(flags={"data": text}, kind="kept")
    steps = values.whole("iterations", 100) * values.whole("device-iterations", 1)
    flags = {"data": text, "data-dir": "", "image-size": str(find_image_size(values))}
    flags["iterations"] = str(steps)
    where = "on the device" if text == "synthetic" else "on the host"
    return Effect(flags=flags, why=f"noise made {where}, {steps:,} steps an epoch", kind="kept")


def port_folder(text: str, values: OldValues) -> Effect:
    """Where ImageNet is, in any form of it."""
    data = values.text("data")
    if data in RANDOM_DATASETS:
        return Effect(why="noise needs no files", kind="nothing")
    if data != "imagenet":
        why = f"--data {data} does not read it; --data imagenet does"
        return Effect(why=why, warnings=(f"--imagenet-data-path: {why}",), kind="nothing")
    why = "its format is detected from its contents: files in folders, TFRecord or WebDataset"
    return Effect(flags={"data-dir": text}, why=why)


def port_iterations(text: str, values: OldValues) -> Effect:
    """The length of an epoch of noise."""
    if values.text("data") not in RANDOM_DATASETS:
        return Effect(why="only generated and synthetic data use it", kind="nothing")
    count = values.whole("device-iterations", 1)
    why = f"{text} x {count} device iterations" * (count > 1)
    steps = int(text) * count
    return Effect(flags={"iterations": str(steps)}, why=why, kind=None if count > 1 else "kept")


def port_device_iterations(text: str, values: OldValues) -> Effect:
    """Steps between two reads of the host."""
    why = "steps between two reads of metrics"
    if int(text) > 1 and values.text("data") not in RANDOM_DATASETS:
        why += "; the images of an epoch that do not fill so many are not left out"
    return Effect(flags={"device-iterations": text}, why=why, kind="kept")


def port_location(text: str, values: OldValues) -> Effect:
    """Where images are normalised; bytes only on the device."""
    if text == "host" and values.has("eight-bit-io"):
        why = "bytes are normalised on the device, as the old program did after a warning"
        return Effect(flags={"normalization-location": "device"}, why=why, kind="computed")
    name = "device" if text == "ipu" else text
    return Effect(flags={"normalization-location": name}, kind=None if text == "ipu" else "kept")


def port_eight_bits(text: str, values: OldValues) -> Effect:
    """Images as bytes."""
    on = text == "true"
    moved = on and values.text("normalization-location") in ("", "host")
    flags = {"eight-bit-io": text} | ({"normalization-location": "device"} if moved else {})
    why = "bytes are normalised on the device, as the old program did after a warning" * moved
    return Effect(flags=flags, why=why, kind="kept")


# --- rates, lengths and layout ---


def _count_replicas(values: OldValues) -> int:
    """All copies of the model: a launcher's count, or the command's."""
    return values.launch.replicas or values.whole("replicas", 1)


def port_replicas(text: str, values: OldValues) -> Effect:
    """How many copies there are."""
    flags = {"replicas": str(_count_replicas(values))}
    if values.launch.name == "poprun":
        return Effect(flags=flags, why="poprun's --num-replicas counts, as it did there")
    return Effect(flags=flags, kind="kept", why="with fewer devices they fold")


def port_rate(text: str, values: OldValues) -> Effect:
    """The first rate; an exponential schedule began with its first decay."""
    flags = {"lr": text, "base-learning-rate": "", "lr-per-image": ""}
    if values.text("lr-schedule") != "exponential":
        return Effect(flags=flags, kind="kept")
    decay = values.number("lr-decay")
    flags["lr"] = f"{float(text) * decay:.10g}"
    return Effect(flags=flags, why=f"{text} x {decay:g}: the first period was already decayed")


def port_warmup(text: str, values: OldValues) -> Effect:
    """The warm-up in epochs."""
    return Effect(flags={"warmup-epoch": f"{float(text):g}ep"}, kind="kept")


def port_schedule(text: str, values: OldValues) -> Effect:
    """The shape of the rate; steps without an epoch to fall at never fall."""
    if text == "step" and not values.many("lr-epoch-decay"):
        why = "no --lr-epoch-decay says where the steps are: the rate never falls"
        flags = {"lr-schedule": "constant", "lr-epoch-decay": "", "lr-drop-after": ""}
        return Effect(flags=flags, why=why, kind="computed")
    if text == "exponential" and not values.number("lr-scheduler-freq"):
        flags = {"lr-schedule": text, "lr-decay-period": "1st"}
        why = "with --lr-scheduler-freq 0 it falls at every step"
        return Effect(flags=flags, why=why, kind="kept")
    return Effect(flags={"lr-schedule": text}, kind="kept")


def port_decay(text: str, values: OldValues) -> Effect:
    """The factor of a schedule."""
    schedule = values.text("lr-schedule")
    if schedule == "cosine" or (schedule == "step" and not values.many("lr-epoch-decay")):
        why = "only a step schedule with --lr-epoch-decay and an exponential one use it"
        return Effect(why=why, kind="nothing")
    return Effect(flags={"lr-decay": text}, kind="kept")


def port_milestones(text: str, values: OldValues) -> Effect:
    """The epochs at which a step schedule falls."""
    if values.text("lr-schedule") != "step":
        return Effect(why="only --lr-schedule step uses it", kind="nothing")
    return Effect(flags={"lr-epoch-decay": text, "lr-drop-after": ""}, kind="kept")


def port_weight_decay(text: str, values: OldValues) -> Effect:
    """AdamW's decay is its own; that of the others is a term of the gradient."""
    if values.text("optimizer") == "adamw":
        flags = {"weight-decay": text, "l2-regularization": "0"}
        return Effect(flags=flags, why="AdamW's own", kind="kept")
    flags = {"l2-regularization": text, "weight-decay": "0"}
    return Effect(flags=flags, why="a term of the gradient; not for norms and biases")


def port_rounding(text: str, values: OldValues) -> Effect:
    """Stochastic rounding, which 32-bit weights have no use for."""
    halves = values.text("precision") == "16.16"
    on = halves and text == "true"
    why = "" if halves else "weights are 32 bits wide, which are not rounded by chance"
    return Effect(flags={"enable-stochastic-rounding": str(on).lower()}, why=why, kind="kept")


def port_splits(text: str, values: OldValues) -> Effect:
    """Where stages begin; the README: a pipeline always recomputes."""
    flags = {"pipeline-splits": text, "enable-recompute": "true"}
    return Effect(flags=flags, kind="kept", why="a pipeline always recomputes activations")


def port_recompute(text: str, values: OldValues) -> Effect:
    """A pipeline recomputes whatever this says."""
    on = text == "true" or bool(values.many("pipeline-splits"))
    return Effect(flags={"enable-recompute": str(on).lower()}, kind="kept")


def port_recompute_mode(text: str, values: OldValues) -> Effect:
    """The later spelling of the same."""
    on = text != "none"
    why = "--recompute-checkpoints says what is kept" * (text == "manual")
    return Effect(flags={"enable-recompute": str(on).lower()}, why=why)


# --- checkpoints ---


def port_save_interval(text: str, values: OldValues) -> Effect:
    """Epochs between two checkpoints."""
    epochs = values.number("epoch")
    if int(text) > epochs:
        return Effect(flags={"ckpts-per-epoch": f"1/{int(epochs)}"}, why="one, at the end")
    rate = "1" if text == "1" else f"1/{text}"
    return Effect(flags={"ckpts-per-epoch": rate}, why=f"one in {text} epochs")


def build_average(name: str) -> Apply:
    """What an option of averaging becomes: nothing where there is nothing to average."""

    def apply(text: str, values: OldValues) -> Effect:
        strategy = values.text("weight-avg-strategy")
        if strategy == "none" and name != "weight-avg-strategy":
            return Effect(why="only --weight-avg-strategy mean or exponential uses it")
        if name == "weight-avg-exp-decay" and strategy != "exponential":
            return Effect(why="only --weight-avg-strategy exponential uses it", kind="nothing")
        count = Fraction(values.text("epoch")) / max(1, values.whole("checkpoint-save-freq", 1))
        if strategy != "none" and count < 2:
            flags = {"weight-avg-strategy": "none", "weight-avg-n": ""}
            return Effect(flags=flags, why="one checkpoint is its own average", kind="nothing")
        return Effect(flags={name: text}, why="after training" * (strategy != "none"), kind="kept")

    return apply


def port_resume(text: str, values: OldValues) -> Effect:
    """The run of a checkpoint goes on."""
    if not text.endswith(_FILES):
        return Effect(flags={"resume": text}, why="the run continues where it stopped")
    folder = str(PurePath(text).parent)
    why = f"the run in {folder} continues from its newest checkpoint"
    return Effect(flags={"resume": folder}, why=why, kind="computed")


def port_score(text: str, values: OldValues) -> Effect:
    """What is scored: a checkpoint, or all of a folder."""
    if text.endswith(_FILES):
        warning = f"{text}: `phalanx port weights {text}` turns an old checkpoint into weights"
        return Effect(flags={TARGET: text}, why="what is scored", warnings=(warning,))
    return Effect(flags={TARGET: text, "all": "true"}, why="all checkpoints of a run")
