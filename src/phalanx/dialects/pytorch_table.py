"""The options of the PyTorch program, train.py and train_lightning.py, and what becomes of each."""

from collections.abc import Callable

from phalanx.dialects import pytorch_values as pt
from phalanx.dialects.hints import COMPILER_HINT, WORKSPACE
from phalanx.dialects.numbers import COUNT_OR_ALL, COUNT_OR_NONE, NOT_NEGATIVE, POSITIVE, SHARE
from phalanx.dialects.table import (
    Effect,
    OldOption,
    OldValues,
    Outcome,
    computed,
    count_row,
    elsewhere,
    flag_row,
    kept,
    lost,
    nothing,
    number_row,
    only_with,
    renamed,
    whole_row,
)

_OFF = "false"
_FROZEN = "no layer is frozen here, and there is no second phase at full size"
_OPTIMIZERS = ("sgd", "sgd_combined", *pt.ADAPTIVE)
_EFFICIENTNETS = tuple(name for name in pt.NETWORKS if name.startswith("efficientnet"))
_WITH_MOMENTUM = tuple(name for name in _OPTIMIZERS if name != "adamw")
_SHARDS = "the images that are read are those of --data-dir: all of them"


def _used_with(option: str, used: tuple[str, ...], named: str = "") -> Outcome:
    """A kept option that counts only with some values of another one."""
    return only_with(option, used, kept(), f"only {named or ', '.join(used)} uses it")


def _only(option: str, used: tuple[str, ...], default: str) -> Callable[[OldValues], str]:
    """A default that counts only with some values of another option."""
    return lambda values: default if values.text(option) in used else ""


def _port_histogram(text: str, values: OldValues) -> Effect:
    return Effect(why="weights are not drawn as histograms; a run's records have their norms")


def _port_memory_cache(text: str, values: OldValues) -> Effect:
    on = float(text) > 0
    why = "all files are kept in memory, or none" if on else "nothing is kept in memory"
    return Effect(flags={"dataset-cache": str(on).lower()}, why=why)


def _port_share(text: str, values: OldValues) -> Effect:
    if float(text) == 100:
        return Effect(why="all images, as it is by default")
    return Effect(why=_SHARDS, warnings=(f"--webdataset-percentage-to-use {text}: {_SHARDS}",))


_MODEL_TABLE = (
    OldOption(
        "model", computed(pt.port_network, "--model, with the network's name here"),
        choices=(*pt.NETWORKS, *pt.OTHER_NETWORKS), default="resnet18",
    ),
    OldOption("norm-type", kept(), choices=("batch", "group", "none"), default="batch"),
    count_row("norm-num-groups", _used_with("norm-type", ("group",), "--norm-type group"),
              default=_only("norm-type", ("group",), "32")),
    number_row("batchnorm-momentum", _used_with("norm-type", ("batch",), "--norm-type batch"),
               default=_only("norm-type", ("batch",), "0.1"), number=SHARE),
    number_row("norm-eps", kept(), default="1e-5"),
    flag_row("full-precision-norm", kept(), default=_OFF),
    flag_row("enable-fast-groupnorm",
             _used_with("norm-type", ("group",), "--norm-type group"), default=_OFF),
    flag_row("disable-stable-batchnorm",
             _used_with("norm-type", ("batch",), "--norm-type batch"), default=_OFF),
    count_row("efficientnet-expand-ratio", _used_with("model", _EFFICIENTNETS, "an EfficientNet"),
              default=_only("model", _EFFICIENTNETS, "6")),
    count_row("efficientnet-group-dim", _used_with("model", _EFFICIENTNETS, "an EfficientNet"),
              default=_only("model", _EFFICIENTNETS, "1")),
)  # fmt: skip
_TRAINING_TABLE = (
    OldOption("config", elsewhere("the preset that the command begins with")),
    whole_row("seed", kept()),
    count_row("batch-size", kept("the micro-batch"), "micro-batch-size", default="1"),
    count_row("gradient-accumulation", kept(), default="1"),
    number_row("epoch", renamed("epochs"), default="10", number=POSITIVE),
    OldOption("optimizer", kept(), choices=_OPTIMIZERS, default="sgd"),
    number_row("momentum", _used_with("optimizer", _WITH_MOMENTUM),
               default=_only("optimizer", _WITH_MOMENTUM, "0")),
    number_row("optimizer-eps", _used_with("optimizer", pt.ADAPTIVE),
               default=_only("optimizer", pt.ADAPTIVE, "1e-8")),
    number_row("rmsprop-decay", _used_with("optimizer", pt.RMSPROP),
               default=_only("optimizer", pt.RMSPROP, "0.99")),
    number_row("loss-velocity-scaling-ratio", _used_with("optimizer", ("sgd_combined",)),
               default=_only("optimizer", ("sgd_combined",), "1")),
    number_row("weight-decay",
               computed(pt.port_weight_decay, "--l2-regularization; of adamw, --weight-decay"),
               default="1e-4"),
    number_row("loss-scaling", kept(), default="1"),
    number_row("initial-loss-scaling", kept("doubled at equal intervals up to --loss-scaling")),
    flag_row("auto-loss-scaling", kept(), default=_OFF),
    number_row("label-smoothing", kept(), default="0"),
    number_row("lr", computed(pt.port_rate, "--lr; decayed once with an exponential schedule"),
               default="0.01"),
    OldOption("lr-schedule", computed(pt.port_schedule, "--lr-schedule; constant without epochs to "
                                      "fall at"),
              choices=("step", "cosine", "exponential"), default="step"),
    number_row("lr-decay", computed(pt.port_decay, "--lr-decay"), default="0.5"),
    OldOption("lr-epoch-decay", computed(pt.port_milestones, "--lr-epoch-decay"), takes="many",
              number=COUNT_OR_NONE),
    number_row("warmup-epoch", computed(pt.port_warmup, "--warmup-epoch, in epochs"),
               default="0", number=NOT_NEGATIVE),
    number_row("lr-scheduler-freq", kept(), default="0"),
    OldOption("validation-mode", kept(), choices=("none", "during", "after"), default="after"),
    count_row("validation-frequency",
              _used_with("validation-mode", ("during",), "--validation-mode during"),
              default=_only("validation-mode", ("during",), "4")),
    flag_row("disable-metrics", kept()),
    OldOption("weight-avg-strategy",
              computed(pt.build_average("weight-avg-strategy"), "--weight-avg-strategy"),
              choices=("none", "mean", "exponential"), default="none"),
    number_row("weight-avg-exp-decay",
               computed(pt.build_average("weight-avg-exp-decay"), "--weight-avg-exp-decay"),
               default="0.99", number=SHARE),
    whole_row("weight-avg-N", computed(pt.build_average("weight-avg-n"), "--weight-avg-n"),
              default="-1", number=COUNT_OR_ALL),
)  # fmt: skip
_DATA_TABLE = (
    OldOption("data", computed(pt.port_data, "--data"),
              choices=("cifar10", "imagenet", *pt.RANDOM_DATASETS), default="cifar10"),
    OldOption("imagenet-data-path", computed(pt.port_folder, "--data-dir")),
    count_row("iterations", computed(pt.port_iterations, "--iterations, times device iterations")),
    flag_row("use-bbox-info", kept(), default=_OFF),
    flag_row("eight-bit-io", computed(pt.port_eight_bits, "--eight-bit-io")),
    OldOption("normalization-location", computed(pt.port_location, "--normalization-location"),
              choices=("host", "ipu", "none")),
    count_row("dataloader-rebatch-size", kept("images that a worker prepares at a time")),
    whole_row("dataloader-worker", renamed("workers"), number=COUNT_OR_NONE),
    number_row("webdataset-percentage-to-use", computed(_port_share, "all images are read")),
    number_row("webdataset-memory-cache-ratio", computed(_port_memory_cache, "--dataset-cache")),
    number_row("mixup-alpha", kept(), default="0"),
    number_row("cutmix-lambda-low", kept(), default="0"),
    number_row("cutmix-lambda-high", kept(), default="0"),
    number_row("cutmix-disable-prob", kept(), default="0"),
    flag_row("input-image-padding", nothing("a fourth channel of zeros only pleases the IPU")),
    whole_row("image-quality", nothing("only its makers of datasets compressed images again")),
)  # fmt: skip
_MACHINE_TABLE = (
    OldOption("pipeline-splits", computed(pt.port_splits, "--pipeline-splits, and it recomputes"),
              takes="many"),
    count_row("replicas", computed(pt.port_replicas, "--replicas"), default="1"),
    count_row("device-iterations", computed(pt.port_device_iterations, "--device-iterations")),
    OldOption("precision", kept(), choices=("16.16", "16.32", "32.32"), default="16.16"),
    flag_row("half-partial", renamed("half-partials"), default=_OFF),
    WORKSPACE,
    flag_row("enable-recompute", computed(pt.port_recompute, "--enable-recompute; always on in a "
                                          "pipeline"), default=_OFF),
    OldOption("recompute-mode", computed(pt.port_recompute_mode, "--enable-recompute"),
              choices=("none", "auto", "manual")),
    OldOption("recompute-checkpoints", kept("what is kept of them"), takes="many"),
    flag_row("offload-optimizer", kept(), default=_OFF),
    flag_row("enable-optimizer-rts", nothing("optimizer state is not cut up over the replicas; "
                                             "--offload-optimizer saves its memory")),
    flag_row("enable-stochastic-rounding",
             computed(pt.port_rounding, "--enable-stochastic-rounding; only of 16-bit weights"),
             default=_OFF),
    flag_row("enable-fp-exceptions", renamed("fp-exceptions"), default=_OFF),
    flag_row("profile", renamed("profile", {"true": "trace"}, why="into the folder of the run")),
    OldOption("model-cache-path", kept("for compiled kernels")),
    flag_row("compile-only", elsewhere("`phalanx plan` checks everything without running it")),
    OldOption("offline-target-ipu-version", nothing("nothing is compiled for absent devices")),
    OldOption("exchange-memory-target", COMPILER_HINT, choices=("cycles", "balanced", "memory")),
    whole_row("num-io-tiles", nothing("there are no tiles to reserve for transfers")),
)  # fmt: skip
_LOG_TABLE = (
    OldOption("checkpoint-path", renamed("run-dir", why="the folder of the run"),
              aliases=("checkpoint-output-dir",)),
    OldOption("checkpoint-input-dir", renamed("init-weights", why="weights to begin with; "
                                              "`phalanx port weights` converts them")),
    count_row("checkpoint-save-freq", computed(pt.port_save_interval, "--ckpts-per-epoch, as 1/N")),
    whole_row("logs-per-epoch", kept(), default="1", number=COUNT_OR_NONE),
    flag_row("wandb", kept()),
    flag_row("wandb-weight-histogram",
             computed(_port_histogram, "weights are not drawn as histograms")),
)  # fmt: skip
_LATER_TABLE = (  # of a second phase that later versions had
    flag_row("half-res-training", computed(pt.port_half_size, "--image-size")),
    number_row("fine-tune-epoch", lost(_FROZEN)),
    number_row("fine-tune-lr", nothing(_FROZEN)),
    whole_row("fine-tune-micro-batch-size", nothing(_FROZEN)),
    whole_row("fine-tune-gradient-accumulation", nothing(_FROZEN)),
    OldOption("fine-tune-first-trainable-layer", nothing(_FROZEN)),
)
TRAIN_TABLE = (
    *_MODEL_TABLE,
    *_TRAINING_TABLE,
    *_DATA_TABLE,
    *_MACHINE_TABLE,
    *_LOG_TABLE,
    *_LATER_TABLE,
)
