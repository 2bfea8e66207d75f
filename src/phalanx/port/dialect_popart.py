"""PopART: resnet_main.py, whose batch is that of all replicas."""

from fractions import Fraction
from math import prod

from phalanx.catalog.datasets import DATASETS
from phalanx.errors import ConfigError
from phalanx.port.hints import COMPILER_HINT
from phalanx.port.table import (
    Dialect,
    Effect,
    Fact,
    OldOption,
    OldValues,
    Outcome,
    Script,
    computed,
    elsewhere,
    flag_row,
    kept,
    nothing,
    number_row,
    renamed,
    whole_row,
)

_DATA_NAMES = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100", "IMAGENET": "imagenet"}
_BOTTLENECKS = ("50", "101", "152", "x50")
_SIZES = ("8", "14", "20", "32", "44", "56", "110", "18", "34", *_BOTTLENECKS)
_UNUSED = "the old program read it and made no use of it"


# --- batches and devices ---


def _count_pass(values: OldValues) -> int:
    """Images of one replica in a pass: the batch is that of all replicas."""
    batch, replicas = values.whole("batch-size", 1), values.whole("replication-factor", 1)
    if batch % replicas:
        raise ConfigError(
            f"--batch-size {batch}: is that of all replicas, and {replicas} of them cannot share "
            f"it; give a multiple, such as {max(1, round(batch / replicas)) * replicas}"
        )
    return batch // replicas


def _count_stages(values: OldValues) -> int:
    """Devices of a replica: those that there are more than replicas cut the model."""
    devices, replicas = values.whole("num-ipus", 1), values.whole("replication-factor", 1)
    if not values.is_given("num-ipus"):
        return 1
    if devices % replicas:
        raise ConfigError(
            f"--num-ipus {devices}: {replicas} replicas cannot share them; give a multiple, such "
            f"as {max(1, round(devices / replicas)) * replicas}"
        )
    return devices // replicas


def _say_batch(text: str, values: OldValues) -> Effect:
    images, replicas = _count_pass(values), values.whole("replication-factor", 1)
    why = f"{text} images over {replicas} replicas" if replicas > 1 else ""
    return Effect(flags={"batch-size": str(images)}, why=why, kind=None if why else "kept")


def _say_devices(text: str, values: OldValues) -> Effect:
    stages = _count_stages(values)
    if stages == 1:
        return Effect(why="a device for each replica, as far as there are devices")
    flags = {"shards": str(stages)}
    short = values.has("pipeline") and values.whole("gradient-accumulation-factor", 1) < stages
    if not short:
        return Effect(flags=flags, why="devices of a replica: stages of about the same cost")
    flags["pipeline-schedule"] = "Sequential"
    why = (
        f"{stages} stages need as many micro-batches in a step to overlap: they run one after the "
        f"other, unless --gradient-accumulation is {stages} or more"
    )
    return Effect(flags=flags, why=why)


def _say_pipeline(text: str, values: OldValues) -> Effect:
    if _count_stages(values) == 1:
        return Effect(why="there is one device a replica: nothing to cut", kind="nothing")
    return Effect(flags={"pipeline": "true"}, kind="kept")


# --- the model ---


def _name_network(text: str, values: OldValues) -> Effect:
    """The model by its name here; 14 is the network for small images where the data has such."""
    if text == "x50":
        return Effect(flags={"model": "resnext50_32x4d"})
    small = "_small" * (text == "14")
    return Effect(flags={"model": f"resnet{text}{small}"})


def _say_groups(text: str, values: OldValues) -> Effect:
    if values.text("norm-type").upper() != "GROUP":
        return Effect(why="only --norm-type GROUP uses it", kind="nothing")
    return Effect(flags={"norm-num-groups": text}, kind="renamed")


def _say_precision(text: str, values: OldValues) -> Effect:
    why = "computation and weights"
    return Effect(flags={"precision": f"{text}.{text}"}, why=why, kind="renamed")


def _say_rounding(*, asked: bool) -> Outcome:
    """What --prng and --no-prng become."""

    def apply(text: str, values: OldValues) -> Effect:
        on = asked and values.text("precision") == "16"
        why = "32-bit weights are not rounded by chance" if asked and not on else ""
        return Effect(flags={"enable-stochastic-rounding": str(on).lower()}, why=why)

    return computed(apply, "--enable-stochastic-rounding")


# --- rates and lengths ---


def _say_rate(text: str, values: OldValues) -> Effect:
    """The rate of a batch, in which accumulation does not count."""
    batch = values.whole("batch-size", 1)
    rate = 2 ** float(text) * batch
    why = f"2^{text} x {batch:,} images"
    if values.whole("gradient-accumulation-factor", 1) > 1:
        why += ", without the accumulation"
    return Effect(flags={"lr": f"{rate:.10g}", "base-learning-rate": ""}, why=why)


def _say_logs(text: str, values: OldValues) -> Effect:
    """Calls of the device between two log points as a rate."""
    steps = max(1, values.whole("steps-per-log", 1)) * max(1, values.whole("batches-per-step", 250))
    images = DATASETS[_DATA_NAMES[values.text("dataset").upper()]].train_images
    assert images is not None
    update = prod(values.whole(n, 1) for n in ("batch-size", "gradient-accumulation-factor"))
    rate = Fraction(images, update * steps)
    return Effect(flags={"logs-per-epoch": str(rate)}, why=f"a log point every {steps:,} steps")


def _say_reads(text: str, values: OldValues) -> Effect:
    if not values.is_given("batches-per-step"):
        return Effect()
    logs = {} if values.is_given("steps-per-log") else _say_logs("1", values).flags
    flags = {"device-iterations": str(min(65_536, max(1, int(float(text))))), **logs}
    return Effect(flags=flags, why="steps between two reads, and between two log points")


def _say_folder(text: str, values: OldValues) -> Effect:
    """logs/TIME/SIZE/STRING was the folder of a run."""
    folder = (values.text("log-dir") or "logs").rstrip("/")
    name = values.text("log_dir_string") or "net"
    return Effect(flags={"run-dir": f"{folder}/{name}"}, why="the run's own folder in it")


def _list_facts(values: OldValues) -> list[Fact]:
    """What the old program always did."""
    facts = [Fact({"optimizer": "sgd", "momentum": "0"}, "plain SGD")]
    if values.text("precision") == "16":
        facts.append(Fact({"half-type": "float16"}, "16 bits were float16"))
    if values.text("size") in _BOTTLENECKS:
        facts.append(Fact({"stride-in": "1x1"}, "its bottlenecks had the stride in the first 1x1"))
    return facts


_NO_VALIDATION = {"true": "none"}
_TABLE = (
    OldOption("dataset", renamed("data", _DATA_NAMES), choices=tuple(_DATA_NAMES),
              default="CIFAR-10"),
    OldOption("data-dir", kept()),
    whole_row("num-workers", renamed("workers")),
    whole_row("batch-size", computed(_say_batch, "--batch-size, over the replicas"), default="32"),
    OldOption("size", computed(_name_network, "--model"), choices=_SIZES, default="20"),
    OldOption("norm-type", renamed("norm-type", {n: n.lower() for n in ("BATCH", "GROUP", "NONE")}),
              choices=("BATCH", "GROUP", "NONE"), default="GROUP"),
    whole_row("norm-groups", computed(_say_groups, "--norm-num-groups"), default="16"),
    OldOption("shortcut-type", kept(), choices=("A", "B", "C"), default="B"),
    OldOption("precision", computed(_say_precision, "--precision 16.16 or 32.32"),
              choices=("16", "32"), default="16"),
    flag_row("prng", _say_rounding(asked=True),
             default=lambda values: "" if values.is_given("no-prng") else "true"),
    flag_row("no-prng", _say_rounding(asked=False)),
    flag_row("fp-exceptions", kept()),
    flag_row("half-partials", kept()),
    number_row("base-learning-rate", computed(_say_rate, "--lr, 2^n x the batch of a pass"),
               default="-6"),
    OldOption("learning-rate-decay", renamed("lr-decay"), default="1,0.1,0.01"),
    OldOption("learning-rate-schedule", renamed("lr-drop-after"), default="0.5,0.75"),
    whole_row("epochs", kept(), default="30"),
    flag_row("no-validation", renamed("validation-mode", _NO_VALIDATION)),
    whole_row("valid-per-epoch", nothing(_UNUSED)),
    flag_row("get-reports", nothing(_UNUSED)),
    whole_row("steps-per-log", computed(_say_logs, "--logs-per-epoch")),
    number_row("weight-decay", kept("norms and biases are left out"), default="0"),
    whole_row("num-ipus", computed(_say_devices, "--shards, where there are more than replicas"),
              default="1"),
    whole_row("replication-factor", renamed("replicas"), default="1"),
    whole_row("gradient-accumulation-factor", renamed("gradient-accumulation"), default="1"),
    flag_row("recompute", renamed("enable-recompute")),
    flag_row("pipeline", computed(_say_pipeline, "--pipeline")),
    whole_row("batches-per-step", computed(_say_reads, "--device-iterations"), default="250"),
    flag_row("simulation", elsewhere("without a GPU a run takes the CPU by itself")),
    OldOption("log-dir", computed(_say_folder, "--run-dir")),
    OldOption("log_dir_string", computed(_say_folder, "--run-dir")),
    OldOption("ckpt", nothing("checkpoints lie in the folder of the run")),
    flag_row("syncless-collectives", COMPILER_HINT),
    whole_row("max-bytes-per-tile", COMPILER_HINT),
)  # fmt: skip

POPART = Dialect(
    name="popart",
    title="PopART",
    scripts={
        "resnet_main.py": Script(
            kind="train",
            options=_TABLE,
            facts=_list_facts,
            preset=lambda values: "pa-resnet20",
        )
    },
    folders=("popart/resnet",),
    conflicts=(
        "`--size` takes all sizes, not only 8, 18, 20, 50 and x50",
        "CIFAR-100 is a dataset",
        "`--batch-size` has to be a multiple of `--replication-factor`, not of `--num-ipus`",
        "ImageNet's validation images may lie in `val` or in `validation`",
    ),
    main_script="resnet_main.py",
)
