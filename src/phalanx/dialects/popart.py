"""PopART: resnet_main.py.

Its --batch-size is the batch of all replicas together, and its rate is 2^n x that batch, whatever
is accumulated.
"""

from fractions import Fraction

from phalanx.catalog.datasets import DATASETS
from phalanx.catalog.models import MODELS
from phalanx.dialects.hints import COMPILER_HINT
from phalanx.dialects.numbers import COUNT_OR_NONE, EXPONENT, POSITIVE
from phalanx.dialects.table import (
    Dialect,
    Effect,
    Fact,
    OldOption,
    OldValues,
    OutcomeKind,
    Script,
    computed,
    count_row,
    elsewhere,
    flag_row,
    kept,
    nothing,
    number_row,
    renamed,
    whole_row,
)
from phalanx.errors import ConfigError, suggest

_DATA = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100", "IMAGENET": "imagenet"}
_NETWORKS = {  # sizes: names here
    **{str(size): f"resnet{size}" for size in (8, 20, 32, 44, 56, 110)},
    "14": "resnet14_small",
    **{str(size): f"resnet{size}" for size in (18, 34, 50, 101, 152)},
    "x50": "resnext50_32x4d",
}
_UNUSED = "the old program read it and never used it"
_OFF = "false"


def _find_network(values: OldValues) -> str:
    size = values.text("size").lower()
    if size not in _NETWORKS:
        raise ConfigError(f"--size {size}: no network has that size; {suggest(size, _NETWORKS)}")
    return _NETWORKS[size]


def _port_network(text: str, values: OldValues) -> Effect:
    return Effect(flags={"model": _find_network(values)})


def _find_data(values: OldValues) -> str:
    return _DATA[values.text("dataset").upper()]


def _port_data(text: str, values: OldValues) -> Effect:
    why = "as the README says; the code had no CIFAR-100" * (text.upper() == "CIFAR-100")
    return Effect(flags={"data": _find_data(values)}, why=why)


def _port_folder(text: str, values: OldValues) -> Effect:
    photographs = _find_data(values) == "imagenet"
    why = "with train/ and val/ in it" if photographs else "fetched into it if it is not there"
    return Effect(flags={"data-dir": text}, why=why, kind="kept")


# --- batches and stages ---


def _count_replicas(values: OldValues) -> int:
    return max(1, values.whole("replication-factor", 1))


def _count_stages(values: OldValues) -> int:
    """Devices of a replica; a pipeline has at least two."""
    devices, replicas = max(1, values.whole("num-ipus", 1)), _count_replicas(values)
    if values.is_given("num-ipus") and devices % replicas:
        raise ConfigError(
            f"--num-ipus {devices}: cannot be shared by --replication-factor {replicas}; give a "
            f"multiple of {replicas}"
        )
    stages = max(1, devices // replicas)
    return max(2, stages) if values.has("pipeline") else stages


def _share_batch(values: OldValues) -> tuple[int, int]:
    """The images of a pass of one replica, and the passes of a step.

    A pipeline needs as many passes as stages: without accumulation, a batch goes through it in
    parts, of which the step is the same.
    """
    batch, replicas = values.whole("batch-size"), _count_replicas(values)
    if batch < 1 or batch % replicas:
        raise ConfigError(
            f"--batch-size {batch}: cannot be shared by --replication-factor {replicas}; give a "
            f"multiple of {replicas}"
        )
    own, count = batch // replicas, max(1, values.whole("gradient-accumulation-factor", 1))
    stages = _count_stages(values) if values.has("pipeline") else 1
    parts = next((n for n in range(1, own + 1) if own % n == 0 and n * count >= stages), 1)
    return own // parts, count * parts


def _port_batch(text: str, values: OldValues) -> Effect:
    """The micro-batch of a replica."""
    own, _ = _share_batch(values)
    replicas, parts = _count_replicas(values), _count_parts(values)
    flags = {"batch-size": str(own)}
    shared = f"{text} / {replicas} replicas" if replicas > 1 else ""
    cut = f"a batch passes the stages in {parts} parts" if parts > 1 else ""
    why = "; ".join(filter(None, [shared, cut]))
    warnings = []
    devices = values.whole("num-ipus", 1)
    if int(text) % max(1, devices):
        warnings.append(
            f"--batch-size {text}: the README wants a multiple of --num-ipus {devices}, the code "
            "one of --replication-factor, which is enough"
        )
    if parts > 1 and values.text("norm-type").upper() == "BATCH":
        warnings.append(f"--batch-size {text}: statistics of batch norm are those of {own} images")
    kind: OutcomeKind = "computed" if why else "kept"
    return Effect(flags=flags, why=why, warnings=tuple(warnings), kind=kind)


def _count_parts(values: OldValues) -> int:
    count = max(1, values.whole("gradient-accumulation-factor", 1))
    return _share_batch(values)[1] // count


def _port_accumulation(text: str, values: OldValues) -> Effect:
    _, count = _share_batch(values)
    parts = _count_parts(values)
    several = f", {text} times" * (int(text) > 1)
    why = f"the {parts} parts of a batch{several}" if parts > 1 else ""
    kind: OutcomeKind = "computed" if parts > 1 else "renamed"
    return Effect(flags={"gradient-accumulation": str(count)}, why=why, kind=kind)


def _port_devices(text: str, values: OldValues) -> Effect:
    stages = _count_stages(values)
    if stages == 1:
        why = "a device for each replica; with fewer of them they fold"
        return Effect(why=why, kind="elsewhere")
    why = f"stages of a replica: {text} devices for {_count_replicas(values)}"
    return Effect(flags={"shards": str(stages)}, why=why)


def _port_pipeline(text: str, values: OldValues) -> Effect:
    if text != "true":
        return Effect(flags={"pipeline": "false"}, kind="kept")
    stages = _count_stages(values)
    flags = {"pipeline": "true", "shards": str(stages)}
    guessed = values.whole("num-ipus", 1) < 2 * _count_replicas(values)
    warning = (
        f"--pipeline: a replica has one device, and a pipeline needs more; taken as {stages} "
        "stages; --num-ipus says how many"
    )
    why = f"{stages} stages of about the same cost"
    return Effect(flags=flags, why=why, warnings=(warning,) * guessed, kind="kept")


# --- rates and logs ---


def _port_rate(text: str, values: OldValues) -> Effect:
    batch = values.whole("batch-size")
    rate = 2.0 ** float(text) * batch
    why = f"2^{text} x {batch:,} images of a batch; what is accumulated does not count"
    flags = {"lr": f"{rate:.10g}", "base-learning-rate": "", "lr-per-image": ""}
    return Effect(flags=flags, why=why)


def _port_log_interval(text: str, values: OldValues) -> Effect:
    """Calls of the device between two log points as a rate."""
    images = values.images or DATASETS[_find_data(values)].train_images
    assert images is not None
    own, count = _share_batch(values)
    interval = max(1, int(text)) * max(1, values.whole("batches-per-step", 250))
    rate = Fraction(images, own * count * _count_replicas(values) * interval)
    return Effect(flags={"logs-per-epoch": str(rate)}, why=f"a log point every {interval:,} steps")


def _port_precision(text: str, values: OldValues) -> Effect:
    return Effect(flags={"precision": f"{text}.{text}"}, why="of passes and of weights")


def _port_rounding(text: str, values: OldValues) -> Effect:
    halves = values.text("precision") == "16"
    on = halves and not values.has("no-prng")
    why = "" if halves else "weights are 32 bits wide, which are not rounded by chance"
    return Effect(flags={"enable-stochastic-rounding": str(on).lower()}, why=why)


def _port_norm(text: str, values: OldValues) -> Effect:
    several = text.upper() == "BATCH" and _count_replicas(values) > 1
    why = "each replica has its own statistics" * several
    return Effect(flags={"norm-type": text.lower()}, why=why, kind="kept")


def _port_groups(text: str, values: OldValues) -> Effect:
    if values.text("norm-type").upper() != "GROUP":
        return Effect(why="only --norm-type GROUP uses it", kind="nothing")
    return Effect(flags={"norm-num-groups": text})


def _port_run(text: str, values: OldValues) -> Effect:
    """The folder of the run: that of logs, with size and name in it."""
    size, name = values.text("size"), values.text("log_dir_string")
    folder = f"{values.text('log-dir').rstrip('/')}/{size}/{name}"
    return Effect(flags={"run-dir": folder}, why="there with a time between, for several runs")


def _list_facts(values: OldValues) -> list[Fact]:
    """What the old program always did."""
    network = _find_network(values)
    facts = [
        Fact({"optimizer": "sgd", "momentum": "0"}, "plain SGD without momentum"),
        Fact({"weight-decay": "0"}, "decay was a term of the gradient"),
        Fact({"lr-schedule": "step"}, "the rate fell in steps"),
    ]
    if values.text("precision") == "16":
        facts.append(Fact({"half-type": "float16"}, "16 bits were float16"))
    if network in ("resnet50", "resnet101", "resnet152", "resnext50_32x4d"):
        facts.append(Fact({"stride-in": "1x1"}, "a bottleneck's first convolution had the stride"))
    if _find_data(values) == "imagenet" and MODELS[network].image_size < 224:
        facts.append(Fact({"image-size": "224"}, "ImageNet's size, whatever the network"))
    return facts


_TABLE = (
    OldOption("dataset", computed(_port_data, "--data"), choices=tuple(_DATA), default="CIFAR-10"),
    OldOption("data-dir", computed(_port_folder, "--data-dir")),
    whole_row("num-workers", renamed("workers"), number=COUNT_OR_NONE),
    count_row("batch-size", computed(_port_batch, "--batch-size, over --replication-factor"),
              default="32"),
    OldOption("size", computed(_port_network, "--model"), default="20"),
    OldOption("norm-type", computed(_port_norm, "--norm-type"),
              choices=("BATCH", "GROUP", "NONE"), default="GROUP"),
    count_row("norm-groups", computed(_port_groups, "--norm-num-groups"), default="16"),
    OldOption("shortcut-type", kept(), choices=("A", "B", "C"), default="B"),
    OldOption("precision", computed(_port_precision, "--precision, as 16.16 or 32.32"),
              choices=("16", "32"), default="16"),
    flag_row("prng", computed(_port_rounding, "--enable-stochastic-rounding"), default="true"),
    flag_row("no-prng", computed(_port_rounding, "--enable-stochastic-rounding false")),
    flag_row("fp-exceptions", kept(), default=_OFF),
    flag_row("half-partials", kept(), default=_OFF),
    number_row("base-learning-rate", computed(_port_rate, "--lr: 2^n x the batch"),
               default="-6", number=EXPONENT),
    OldOption("learning-rate-decay", renamed("lr-decay", why="shares of the first rate"),
              default="1,0.1,0.01"),
    OldOption("learning-rate-schedule", renamed("lr-drop-after", why="shares of the run"),
              default="0.5,0.75"),
    number_row("epochs", kept(), default="30", number=POSITIVE),
    flag_row("no-validation", renamed("validation", {"true": "false"})),
    whole_row("valid-per-epoch", nothing(_UNUSED)),
    flag_row("get-reports", nothing(f"{_UNUSED}; --profile writes reports")),
    count_row("steps-per-log", computed(_port_log_interval, "--logs-per-epoch")),
    number_row("weight-decay", renamed("l2-regularization", why="a term of the gradient"),
               default="0"),
    count_row("num-ipus", computed(_port_devices, "--shards: devices of a replica"), default="1"),
    count_row("replication-factor", renamed("replicas"), default="1"),
    count_row("gradient-accumulation-factor",
              computed(_port_accumulation, "--gradient-accumulation"), default="1"),
    flag_row("recompute", renamed("enable-recompute"), default=_OFF),
    flag_row("pipeline", computed(_port_pipeline, "--pipeline, with as many --shards as devices"),
             default=_OFF),
    count_row("batches-per-step", renamed("device-iterations", why="steps between two reads")),
    flag_row("simulation", elsewhere("a CPU takes the place of a simulated device",
                                     {"device": "cpu"})),
    OldOption("log-dir", computed(_port_run, "--run-dir"),
              default=lambda values: "logs" if values.is_given("log_dir_string") else ""),
    OldOption("log_dir_string", computed(_port_run, "--run-dir"),
              default=lambda values: "net" if values.is_given("log-dir") else ""),
    OldOption("ckpt", elsewhere("checkpoints are in the run's folder; `phalanx export` writes an "
                                "ONNX file of one")),
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
    main_script="resnet_main.py",
    conflicts=(
        "`--dataset` takes CIFAR-100, too, which the README fetches; the code had none.",
        "`--size` takes all sizes: 8 to 152 and x50; the code had five of them.",
        "`--data-dir` of ImageNet has train and val in it; the code looked for validation, which "
        "is found, too.",
        "`--batch-size` is a multiple of `--num-ipus`, or a warning says so; the code wanted one "
        "of `--replication-factor`.",
    ),
)
