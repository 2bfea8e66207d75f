"""The options of TensorFlow 2's train.py and its named configurations."""

from dataclasses import replace

from phalanx.dialects import tf2_params as params
from phalanx.dialects import tf2_values as tf2
from phalanx.dialects.hints import BUCKETS, COMPILER_HINT, size_workspace
from phalanx.dialects.numbers import COUNT_OR_ALL, COUNT_OR_NONE, NOT_NEGATIVE
from phalanx.dialects.table import (
    Effect,
    OldOption,
    OldValues,
    Outcome,
    computed,
    count_row,
    elsewhere,
    kept,
    lost,
    nothing,
    number_row,
    renamed,
    whole_row,
)

_SCHEDULES = {"const": "constant", "stepped": "step"}
_PLACES = {"host": "generated", "cpu": "generated", "ipu": "synthetic"}
_NO_DECAY = "norms and biases, which it decayed too, are left out"
_FIRST_RANK = "all ranks have the same weights: one copy is kept"


def bool_row(name: str, outcome: Outcome, default: str | None = None) -> OldOption:
    """A row of a switch: a bare flag, or one with true or false."""
    return OldOption(name, outcome, takes="bool", default=default)


def _unless(text: str, outcome: Outcome, other: Outcome) -> Outcome:
    """An outcome, and another one for the value that asks for nothing new."""

    def apply(value: str, values: OldValues) -> Effect:
        chosen = other if value == text else outcome
        return replace(chosen.apply(value, values), kind=chosen.kind)

    return Outcome(outcome.kind, apply, outcome.summary)


def _port_noise(text: str, values: OldValues) -> Effect:
    """Noise in the place of images, an epoch as long as with them."""
    kind = _PLACES[text.lower()]
    flags = {
        "data": kind,
        "data-dir": "",
        "iterations": str(tf2.count_updates(values)),
        "image-size": str(tf2.find_image_size(values)),
    }
    where = "on the host" if kind == "generated" else "on the device"
    return Effect(flags=flags, why=f"noise made {where}; an epoch is as long as the dataset's")


def _port_folder(text: str, values: OldValues) -> Effect:
    if tf2.is_made_up(values):
        return Effect(why="noise needs no files", kind="nothing")
    return Effect(flags={"data-dir": text}, kind="renamed")


def _port_data(text: str, values: OldValues) -> Effect:
    if tf2.is_made_up(values):
        return Effect(why="noise takes the place of its images", kind="computed")
    return Effect(flags={"data": text.lower()}, kind="renamed")


def _port_validation(text: str, values: OldValues) -> Effect:
    """All checkpoints after training, or none."""
    folder = values.text("checkpoint-input-dir")
    elsewhere_scored = folder and folder != values.text("checkpoint-output-dir")
    if text != "true" or (elsewhere_scored and values.text("training") == "true"):
        why = "those of --checkpoint-input-dir are scored instead" if text == "true" else ""
        return Effect(flags={"validation-mode": "none"}, why=why, kind="renamed")
    if values.text("ckpts-per-epoch") == "0":
        epochs = values.text("num-epochs")
        flags = {"validation-mode": "during", "validation-frequency": epochs}
        return Effect(flags=flags, why="without checkpoints, once: when training ends")
    why = "all checkpoints, after training"
    return Effect(flags={"validation-mode": "after"}, why=why, kind="renamed")


def _port_input_folder(text: str, values: OldValues) -> Effect:
    """Checkpoints that are scored after training."""
    if values.text("validation") != "true":
        return Effect(why="nothing is scored with --validation False", kind="nothing")
    if text == values.text("checkpoint-output-dir"):
        return Effect(why="the run's own: they are scored after training", kind="elsewhere")
    why = "scored after training, in the place of the run's own checkpoints"
    return Effect(why=why, then=(("validate", text, "--all"),))


def _port_rounding(text: str, values: OldValues) -> Effect:
    """Stochastic rounding, which 32-bit weights have no use for."""
    halves = values.text("precision") == "16.16"
    on = halves and text.upper() != "OFF"
    why = "" if halves else "weights are 32 bits wide, which are not rounded by chance"
    if text.upper() == "RI" and on:
        why = "every replica rounds alike: they share the draws"
    return Effect(flags={"enable-stochastic-rounding": str(on).lower()}, why=why)


def _port_splits(text: str, values: OldValues) -> Effect:
    """Where stages begin; the toy's layers are not those of the network that stands in."""
    if tf2.is_toy(values):
        stages = str(len([part for part in text.split(",") if part]) + 1)
        why = "as many stages of ResNet-8, of about the same cost"
        return Effect(flags={"pipeline": "true", "shards": stages}, why=why, kind="computed")
    return Effect(flags={"pipeline-splits": text}, kind="kept")


def _port_mapping(text: str, values: OldValues) -> Effect:
    """Which device has which stage."""
    devices = [part for part in text.split(",") if part]
    stages = len(values.many("pipeline-splits")) + 1
    if len(set(devices)) == 1 and stages > 1:
        return Effect(flags={"shards": "1"}, why="all stages one after the other on one device")
    if len(set(devices)) == len(devices):
        return Effect(why="every stage has a device of its own, as far as there are devices")
    why = "stages that are next to each other share devices where there are fewer of these"
    return Effect(why=why, kind="elsewhere")


def _port_workspace(text: str, values: OldValues) -> Effect:
    return size_workspace([float(part) / 100 for part in text.split(",") if part])


def _port_unstable(text: str, values: OldValues) -> Effect:
    """How batch norm computes the variance."""
    if not params.has_batch_norm(values):
        return Effect(why="group norm is always computed the stable way", kind="elsewhere")
    unstable = str(text != "true").lower()
    why = "the variance in one pass" if text != "true" else "the variance in two passes"
    return Effect(flags={"disable-stable-batchnorm": unstable}, why=why)


def _port_pipeline_schedule(text: str, values: OldValues) -> Effect:
    if not values.many("pipeline-splits"):
        return Effect(why="only a pipeline uses it", kind="nothing")
    return Effect(flags={"pipeline-schedule": text}, kind="kept")


_DATA_TABLE = (
    OldOption("dataset", Outcome("renamed", _port_data, "--data"), choices=tf2.DATA_NAMES,
              default="cifar10"),
    OldOption("dataset-path", Outcome("renamed", _port_folder, "--data-dir")),
    OldOption("synthetic-data", computed(_port_noise, "--data generated or synthetic"),
              choices=tuple(_PLACES)),
    bool_row("eight-bit-transfer", renamed("eight-bit-io")),
    bool_row("accelerator-side-preprocess",
             renamed("normalization-location", {"true": "device", "false": "host"})),
    bool_row("fused-preprocessing", elsewhere("the device always normalises in one kernel")),
    bool_row("shuffle", _unless("true", lost("images are always shuffled, in the same order for "
                                             "the same seed"),
                                elsewhere("the order is computed from the seed"))),
    whole_row("pipeline-num-parallel",
              elsewhere("a worker process for each core decodes; --workers sets another number")),
    whole_row("prefetch-depth", elsewhere("the next batches are copied while the device works")),
)  # fmt: skip
_MODEL_TABLE = (
    OldOption("model-name", Outcome("renamed", tf2.port_network, "--model"),
              choices=tuple(tf2.NETWORKS), default="toy_model"),
    OldOption("norm-layer", computed(params.port_norm, "--norm-type and its options"),
              default="{name: custom_batch_norm, momentum: 0.97}"),
    bool_row("stable-norm", computed(_port_unstable, "--disable-stable-batchnorm, if it is off"),
             default="false"),
    count_row("dbn-replica-group-size", renamed("bn-span"), default="1"),
)  # fmt: skip
_TRAINING_TABLE = (
    OldOption("config", elsewhere("the preset that the command begins with")),
    OldOption("config-path", elsewhere("`phalanx port --configs FILE` turns it into presets")),
    whole_row("seed", kept()),
    bool_row("deterministic",
             _unless("false",
                     renamed("determinism", {"true": "strict"},
                             why="the same bits every time; images stay shuffled, by the seed"),
                     nothing("--determinism seeded is the default"))),
    bool_row("training", kept(), default="true"),
    count_row("micro-batch-size", renamed("batch-size"), default="1"),
    count_row("gradient-accumulation-count",
              Outcome("renamed", tf2.port_accumulation, "--gradient-accumulation"), default="1"),
    count_row("global-batch-size", computed(tf2.port_global_batch, "--gradient-accumulation")),
    count_row("num-replicas", Outcome("renamed", tf2.port_replicas, "--replicas"), default="1"),
    count_row("num-epochs", Outcome("renamed", tf2.port_epochs, "--epochs"), default="1"),
    whole_row("weight-updates-per-epoch", computed(tf2.port_updates, "--steps, or --iterations"),
              number=COUNT_OR_ALL),
    OldOption("optimizer", computed(params.port_optimizer, "--optimizer"),
              choices=("sgd", "lars", "rmsprop"), default="sgd"),
    OldOption("optimizer-params", computed(params.port_optimizer_params, "an option for each"),
              default="{momentum: 0}"),
    number_row("loss-scaling",
               Outcome("kept", params.port_loss_scaling, "0, which was none, is 1 here"),
               default="0", number=NOT_NEGATIVE),
    bool_row("auto-loss-scaling", kept("with any optimizer and schedule")),
    number_row("weight-decay", kept(_NO_DECAY), default="0"),
    number_row("l2-regularization", kept(_NO_DECAY), default="0"),
    OldOption("lr-schedule", renamed("lr-schedule", _SCHEDULES),
              choices=("const", "cosine", "stepped", "polynomial"), default="const"),
    OldOption("lr-schedule-params", computed(params.port_schedule, "an option for each"),
              default="{initial_learning_rate: 1e-4}"),
    OldOption("lr-warmup-params", computed(params.port_warmup, "--warmup-epoch, --warmup-mode"),
              default="{}"),
    bool_row("lr-staircase", kept(), default="false"),
    number_row("label-smoothing", kept("over all classes")),
)  # fmt: skip
_EVENT_TABLE = (
    OldOption("logs-per-epoch",
              Outcome("kept", tf2.port_logs, "with --device-iterations, where it is many steps"),
              default="1"),
    OldOption("ckpts-per-epoch", Outcome("kept", tf2.port_checkpoints), default="1"),
    number_row("first-ckpt-epoch", kept(), number=NOT_NEGATIVE),
    OldOption("checkpoint-input-dir", computed(_port_input_folder, "`phalanx validate DIR --all`")),
    OldOption("checkpoint-output-dir", renamed("run-dir", why="checkpoints/ in it has them")),
    bool_row("ckpt-all-instances", nothing(_FIRST_RANK)),
    bool_row("clean-dir", nothing("a run keeps its checkpoints; --keep says how many")),
    bool_row("validation", Outcome("renamed", _port_validation, "--validation-mode"),
             default="true"),
    count_row("validation-micro-batch-size", renamed("valid-batch-size")),
    count_row("validation-num-replicas", elsewhere("all devices there are share the images")),
    bool_row("pipeline-validation-model", kept()),
    bool_row("mlperf-logging", nothing("a run's records have the same figures")),
    bool_row("wandb", kept()),
    OldOption("wandb-run-name", kept()),
    OldOption("wandb-tags", kept(), takes="many"),
    bool_row("sweep", elsewhere("`phalanx sweep FILE` searches by itself")),
    number_row("target-accuracy", elsewhere("a goal of `phalanx sweep`")),
)  # fmt: skip
_MACHINE_TABLE = (
    OldOption("precision", kept(), choices=("16.16", "16.32", "32.32"), default="16.16"),
    OldOption("stochastic-rounding", computed(_port_rounding, "--enable-stochastic-rounding"),
              choices=("ON", "OFF", "RI"), default="ON"),
    bool_row("half-partials", kept(), default="false"),
    bool_row("recomputation", renamed("enable-recompute"), default="false"),
    OldOption("pipeline-splits", Outcome("kept", _port_splits), takes="many"),
    OldOption("pipeline-schedule", computed(_port_pipeline_schedule, "--pipeline-schedule"),
              choices=("Grouped", "Interleaved", "Sequential"), default="Grouped"),
    OldOption("device-mapping", computed(_port_mapping, "--shards 1 where all are the same"),
              takes="many", number=COUNT_OR_NONE),
    OldOption("available-memory-proportion",
              computed(_port_workspace, "cuDNN's and cuBLAS's workspace, as environment variables"),
              takes="many", number=NOT_NEGATIVE),
    BUCKETS,
    bool_row("optimizer-state-offloading", renamed("offload-optimizer")),
    bool_row("fp-exceptions", kept()),
    bool_row("nanoo", elsewhere("what overflows 16 bits becomes infinite, which "
                                "--auto-loss-scaling and --fp-exceptions find")),
    bool_row("accelerator-side-reduction", elsewhere("metrics are added up on the devices")),
    bool_row("compile-only", elsewhere("`phalanx plan` checks everything without running it")),
    bool_row("on-demand", nothing("devices are not attached and released")),
    OldOption("internal-exchange-optimization-target", COMPILER_HINT),
    whole_row("max-reduce-many-buffer-size", COMPILER_HINT),
    bool_row("conv-dithering", COMPILER_HINT),
    bool_row("gather-conv-output", COMPILER_HINT),
    whole_row("min-remote-tensor-size", COMPILER_HINT),
    OldOption("scheduling-algorithm", COMPILER_HINT),
)  # fmt: skip
TRAIN_TABLE = (*_DATA_TABLE, *_MODEL_TABLE, *_TRAINING_TABLE, *_EVENT_TABLE, *_MACHINE_TABLE)

# --- the entries of its configs.yml, without folders of data: those were of other machines ---

_CIFAR8 = (
    "--model-name cifar_resnet8 --dataset cifar10 --micro-batch-size 8 --eight-bit-transfer False "
    "--gradient-accumulation-count 1 --num-replicas 1"
)
_RESNET50 = "--dataset imagenet --model-name resnet50 --half-partials True"
_DEVICE_INPUT = "--eight-bit-transfer True --accelerator-side-preprocess True"
_PIPELINE = (
    f"{_RESNET50} --recomputation True --logs-per-epoch 1 {_DEVICE_INPUT} --num-epochs 100 "
    "--validation True --micro-batch-size 16 --num-replicas 4 --optimizer-params '{momentum: 0.9}' "
    "--pipeline-schedule Grouped --loss-scaling 128 --l2-regularization 0.0001 "
    "--stochastic-rounding ON --lr-schedule cosine --lr-staircase True"
)
_SPLITS_4 = "--pipeline-splits conv2_block2_out conv3_block1_out conv4_block2_out"
_8K = (
    f"{_PIPELINE} --global-batch-size 8192 --precision 16.16 --stable-norm True "
    "--optimizer-state-offloading False --lr-schedule-params '{initial_learning_rate: "
    "0.0001220703125, epochs_to_total_decay: 100}' "
    "--lr-warmup-params '{warmup_mode: mask, warmup_epochs: 5}'"
)
_POLYNOMIAL = (
    "--lr-schedule polynomial --norm-layer '{name: custom_batch_norm, momentum: 0.9}' "
    "--label-smoothing 0.1 --precision 16.16 --optimizer-state-offloading False "
    f"{_DEVICE_INPUT} --internal-exchange-optimization-target memory "
    "--min-remote-tensor-size 128 --fused-preprocessing True"
)
_TO_TARGET = (
    "--optimizer sgd --optimizer-params '{momentum: 0.9}' --l2-regularization 2.5e-05 "
    "--lr-schedule-params '{initial_learning_rate: 0.001991319444444, epochs_to_total_decay: 39, "
    "end_learning_rate_ratio: 2.18e-05, power: 2}' "
    "--lr-warmup-params '{warmup_mode: shift, warmup_epochs: 5}'"
)
_MLPERF = (
    f"{_RESNET50} {_POLYNOMIAL} --loss-scaling 128 --pipeline-schedule Sequential "
    "--recomputation True --max-cross-replica-buffer-size 52428800 --dbn-replica-group-size 2 "
    "--ckpts-per-epoch 1/4"
)
_SPLITS_7 = (
    "--pipeline-splits conv2_block1_out conv2_block3_out conv3_block1_out conv3_block3_out "
    "conv4_block1_out conv4_block4_out --device-mapping 0 0 0 0 0 0 0 "
    "--available-memory-proportion 15"
)
_BS20 = (
    f"{_MLPERF} {_TO_TARGET} {_SPLITS_7} --micro-batch-size 20 --num-epochs 40 "
    "--gather-conv-output True --validation-micro-batch-size 115"
)
_INFER = (
    f"{_RESNET50} {_POLYNOMIAL} {_TO_TARGET} --num-epochs 1 --recomputation False "
    "--available-memory-proportion 20 --gather-conv-output False"
)
CONFIGS = {
    "imagenet_config": "--dataset imagenet",
    "cifar10_config": "--dataset cifar10",
    "resnet8_test": f"{_CIFAR8} --num-epochs 1 --validation False",
    "resnet8_test_lars": (
        f"{_CIFAR8} --num-epochs 50 --validation True --precision 32.32 "
        "--accelerator-side-preprocess False --l2-regularization 1e-5 --optimizer lars "
        "--optimizer-params '{eeta: 0.001, momentum: 0.9, epsilon: 0, weight_decay: 2.5e-06}' "
        "--lr-schedule const --lr-schedule-params '{initial_learning_rate: 0.000125}'"
    ),
    "resnet8_16ipus_bn": (
        "--dataset cifar10 --num-epochs 70 --validation True --num-replicas 16 --logs-per-epoch 1 "
        "--precision 16.16 --half-partials True --model cifar_resnet8 --micro-batch-size 25 "
        "--global-batch-size 2000 --norm-layer '{name: batch_norm}' --lr-schedule cosine "
        "--lr-warmup-params '{warmup_mode: shift, warmup_epochs: 5}' "
        "--lr-schedule-params '{initial_learning_rate: 0.0001220703125, "
        "epochs_to_total_decay: 65}' --stochastic-rounding ON --l2-regularization 0.0001 "
        f"{_DEVICE_INPUT}"
    ),
    "resnet50_16ipus_16k_bn_pipeline": (
        f"{_PIPELINE} {_SPLITS_4} --global-batch-size 16384 --precision 16.32 "
        "--available-memory-proportion 15 --lr-warmup-params '{warmup_mode: shift, "
        "warmup_epochs: 5}' --lr-schedule-params '{initial_learning_rate: 0.0001220703125, "
        "epochs_to_total_decay: 95}'"
    ),
    "resnet50_16ipus_8k_bn_pipeline": f"{_8K} {_SPLITS_4} --available-memory-proportion 15",
    "resnet56_16ipus_8k_bn_pipeline": (
        f"{_8K} --model cifar_resnet56 --pipeline-splits conv2_block4_post_addition_relu "
        "conv2_block7_post_addition_relu conv3_block4_post_addition_relu "
        "--available-memory-proportion 13.5 --pipeline-validation-model True"
    ),
    "resnet50_16ipus_8k_gn_pipeline": (
        f"{_8K} {_SPLITS_4} --available-memory-proportion 15 "
        "--norm-layer '{name: group_norm, num_groups: 32}'"
    ),
    "resnet50_mlperf_bs16": (
        f"{_MLPERF} {_TO_TARGET} --micro-batch-size 16 --global-batch-size 2304 "
        "--num-replicas 16 --num-epochs 44 --pipeline-splits conv2_block1_out conv2_block3_out "
        "conv3_block4_out --device-mapping 0 0 0 0 --available-memory-proportion 20 "
        "--gather-conv-output False --validation-micro-batch-size 108"
    ),
    "resnet50_mlperf_pod16_bs20": f"{_BS20} --global-batch-size 1920 --num-replicas 16",
    "resnet50_mlperf_pod4_bs20": f"{_BS20} --global-batch-size 480 --num-replicas 4",
    "resnet50_mlperf_pod16_lars": (
        f"{_MLPERF} {_SPLITS_7} --micro-batch-size 18 --global-batch-size 3520 --num-replicas 16 "
        "--optimizer lars --optimizer-params '{momentum: 0.9, weight_decay: 5e-05, eeta: 0.001, "
        "epsilon: 0}' --num-epochs 38 --l2-regularization 5e-05 --lr-schedule-params "
        "'{initial_learning_rate: 0.003045455, epochs_to_total_decay: 36, "
        "end_learning_rate_ratio: 9.32836e-06, power: 2}' --lr-warmup-params '{warmup_mode: "
        "shift, warmup_epochs: 2}' --gather-conv-output False --validation-micro-batch-size 108 "
        "--first-ckpt-epoch 2 --max-reduce-many-buffer-size 216"
    ),
    "resnet50_infer_base": f"{_INFER} --micro-batch-size 1 --global-batch-size 1",
    "resnet50_infer_bs1": f"{_INFER} --micro-batch-size 1 --global-batch-size 1",
    "resnet50_infer_bs16": f"{_INFER} --micro-batch-size 16 --global-batch-size 16",
    "resnet50_infer_bs32": f"{_INFER} --micro-batch-size 32 --global-batch-size 32",
    "resnet50_infer_test": f"{_INFER} --micro-batch-size 1 --global-batch-size 1",
}
