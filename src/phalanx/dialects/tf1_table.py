"""The options of TensorFlow 1's train.py and validation.py, and what becomes of each."""

from phalanx.dialects import tf1_values as tf1
from phalanx.dialects.hints import (
    BUCKETS,
    COMPILER_HINT,
    DEVICE_CHOICE,
    PROFILE,
    PROFILE_LEVELS,
    WORKSPACE,
)
from phalanx.dialects.numbers import (
    COUNT_OR_NONE,
    EXPONENT,
    NOT_NEGATIVE,
    PERCENTAGE,
    POSITIVE,
    SHARE,
)
from phalanx.dialects.table import (
    Apply,
    Effect,
    OldOption,
    OldValues,
    Outcome,
    always,
    complement,
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
from phalanx.dialects.tf1_averages import build_average

_OFF = "false"
_SCHEDULES = {"stepped": "step", "polynomial_decay_lr": "polynomial"}
_OPTIMIZERS = {"SGD": "sgd", "momentum": "momentum", "RMSprop": "rmsprop_tf", "LARS": "lars"}
_FIRST_RANK = "the first rank writes the run's records; every rank keeps a log of its own"
_SEEDS = "replicas draw by the position of an image: one seed serves all of them"
_EXCHANGE = nothing("NCCL and gloo choose their own way")
_WIDE = "statistics of norms have 32 bits, and with --precision 16.32 all weights"
_ORDER = "the order of images is computed: no pipeline has to be chosen for it"
_ON_HOST = Effect(flags={"normalization-location": "host"})
_ON_DEVICE = Effect(flags={"normalization-location": "device"}, why="the README's spelling")
_WHOLE_IMAGES = Effect(
    flags={"crop-scale": "1,1", "crop-ratio": "1,1"},
    why="crops show the whole image; half of them stay mirrored",
)
_EIGHT_BITS = Effect(
    flags={"eight-bit-io": "true", "normalization-location": "device"},
    why="bytes are normalised on the device",
    kind="kept",
)


def _with_schedule(name: str, *schedules: str) -> Outcome:
    reason = f"only --lr-schedule {' and '.join(schedules)} uses it"
    return only_with("lr-schedule", schedules, renamed(name), reason)


def _for_model(name: str, model: str) -> Outcome:
    return only_with("model", (model,), renamed(name), f"only --model {model} has it")


def _port_group_dim(text: str, values: OldValues) -> Effect:
    """Channels per group: an option of EfficientNet, and part of a ResNeXt's name."""
    if tf1.find_model(values) == "efficientnet":
        return Effect(flags={"efficientnet-group-dim": text}, kind="renamed")
    return _port_fixed("4", "group-dim")(text, values)


def _port_fixed(value: str, name: str) -> Apply:
    """What only one value of can be had."""

    def apply(text: str, values: OldValues) -> Effect:
        if float(text) == float(value):
            return Effect(why=f"{value} is what the network has", kind="elsewhere")
        return Effect(
            why=f"the network here has {value}",
            warnings=(f"--{name} {text}: the network here has {value}, so it is another one",),
            kind="nothing",
        )

    return apply


def _port_cutmix(text: str, values: OldValues) -> Effect:
    """Version 2 has one fixed share."""
    if values.text("cutmix-version") == "2" and float(text) < 1:
        flags = {"cutmix-lambda-low": text, "cutmix-lambda-high": text, "cutmix-lambda": "1"}
        return Effect(flags=flags, why="version 2: the same share in every batch", kind="computed")
    return Effect(flags={"cutmix-lambda": text}, kind="kept")


def _port_reads(text: str, values: OldValues) -> Effect:
    most = 65_536
    steps = min(int(float(text)), most)
    why = "steps between two reads of metrics" + f", {most:,} at most" * (int(float(text)) > most)
    return Effect(flags={"device-iterations": str(steps)}, why=why, kind="renamed")


def _port_interval(text: str, values: OldValues) -> Effect:
    if text == "0":
        return Effect()
    return Effect(flags={"ckpts-per-epoch": f"1/{text}"}, why=f"one in {text} epochs")


def _port_folder_of_runs(text: str, values: OldValues) -> Effect:
    name = "-".join(filter(None, [tf1.find_model(values), values.text("name-suffix")]))
    return Effect(flags={"run-dir": f"{text.rstrip('/')}/{name}"}, why="the run's own folder in it")


def _port_suffix(text: str, values: OldValues) -> Effect:
    if values.is_given("log-dir") or values.is_given("logs-path"):
        return Effect(why="it ends the name of the run's folder")
    return Effect(
        flags={"run-dir": f"runs/{tf1.find_model(values)}-{text}"}, why="in its folder's name"
    )


def _port_distributed(text: str, values: OldValues) -> Effect:
    warnings = () if values.launch.hosts else ("--distributed: TF_CONFIG names no hosts here",)
    why = "gradients are exchanged between devices, not by the hosts"
    return Effect(why=why, warnings=warnings)


def _with_rmsprop(name: str) -> Outcome:
    return only_with("optimiser", ("rmsprop",), renamed(name), "only RMSprop uses it")


def _with_lars(name: str) -> Outcome:
    """An option that only LARS uses."""
    return only_with("optimiser", ("lars",), renamed(name), "only LARS uses it")


def _choose_eps(values: OldValues) -> str:
    return "0.001" if tf1.is_rmsprop(values) else ""


def _choose_rmsprop_decay(values: OldValues) -> str:
    exponent = values.is_given("rmsprop-base-decay-exp") or tf1.find_model(values) == "efficientnet"
    return "0.9" if tf1.is_rmsprop(values) and not exponent else ""


def _choose_rmsprop_exponent(values: OldValues) -> str:
    own = tf1.is_rmsprop(values) and tf1.find_model(values) == "efficientnet"
    return "-14" if own and not values.is_given("rmsprop-decay") else ""


_MODEL_TABLE = (
    OldOption(
        "model", computed(tf1.port_network, "--model, with the size in its name"),
        choices=("resnet", "resnext", "efficientnet"), default="resnet",
    ),
    OldOption("model-size", computed(tf1.port_network, "part of --model"), default=tf1.choose_size),
    flag_row("batch-norm", computed(tf1.port_norm, "--norm-type batch")),
    flag_row("group-norm", computed(tf1.port_norm, "--norm-type group")),
    count_row("groups", renamed("norm-num-groups"), default=tf1.choose_groups),
    number_row("BN-decay", complement("batchnorm-momentum"),
            default=lambda values: "0.97" if tf1.find_norm(values) == "batch" else "",
            number=SHARE),
    count_row("BN-span", renamed("bn-span"), default="1"),
    count_row("convolution-groups", computed(_port_fixed("32", "convolution-groups"), "always 32")),
    count_row("group-dim", computed(_port_group_dim, "--efficientnet-group-dim; ResNeXt's is 4")),
    flag_row("widenet", computed(tf1.port_network, "resnext29_32x4d_wide")),
    count_row("expand-ratio", _for_model("efficientnet-expand-ratio", "efficientnet")),
    number_row("dropout-rate", kept(), number=SHARE),
    number_row("block-survival-prob", complement("drop-path"), number=SHARE),
    number_row("norm-epsilon", renamed("norm-eps")),
    flag_row("no-se", lost("every block here has squeeze-and-excitation; so the network differs")),
    flag_row("use-relu", lost("activations here are swish; so the network differs")),
    count_row("depth-divisor", computed(_port_fixed("8", "depth-divisor"), "always 8")),
    whole_row("top-width", lost("the last layer has the published width; so the network differs")),
    number_row("width-coefficient", lost("sizes are B0 to B7 only; so the network differs")),
    number_row("depth-coefficient", lost("sizes are B0 to B7 only; so the network differs")),
    flag_row("proxy-norm", lost("there is no proxy norm; so the network differs")),
    number_row("proxy-epsilon", nothing("there is no proxy norm")),
    flag_row("no-proxy-recompute", nothing("there is no proxy norm")),
    flag_row("stable-norm", elsewhere("norms are computed the stable way by default")),
    flag_row("force-unstable-norm", renamed("disable-stable-batchnorm")),
)  # fmt: skip
_TRAINING_TABLE = (
    OldOption("config", elsewhere("the preset that the command begins with")),
    OldOption("config-path", elsewhere("`phalanx port --configs FILE` turns it into presets")),
    count_row("batch-size", kept("the micro-batch"), "micro-batch-size", default=tf1.choose_batch),
    count_row("gradient-accumulation-count", renamed("gradient-accumulation"), default="1"),
    number_row("base-learning-rate", computed(tf1.port_rate, "2^n x the global batch"),
            "base-learning-rate-exponent", default=tf1.choose_exponent, number=EXPONENT),
    number_row("abs-learning-rate", computed(tf1.port_absolute_rate, "--lr"), number=POSITIVE),
    number_row("epochs", computed(tf1.port_epochs, "--epochs"), "epoch",
               default=tf1.choose_epochs, number=POSITIVE),
    count_row("iterations", computed(tf1.port_iterations, "--steps")),
    number_row("weight-decay", Outcome("renamed", tf1.port_decay, "--l2-regularization"),
            default=tf1.choose_decay),
    number_row("loss-scaling", kept(), default="128"),
    number_row("label-smoothing", kept("spread over the other classes only"),
            default=tf1.choose_smoothing),
    OldOption(
        "optimiser", renamed("optimizer", _OPTIMIZERS), choices=tuple(_OPTIMIZERS), default="SGD"
    ),
    number_row("momentum", computed(tf1.port_momentum, "--momentum; 0 with SGD"), default="0.9"),
    number_row("rmsprop-decay", _with_rmsprop("rmsprop-decay"),
            default=_choose_rmsprop_decay),
    number_row("rmsprop-base-decay-exp", computed(tf1.port_rmsprop_exponent, "--rmsprop-decay"),
            default=_choose_rmsprop_exponent, number=EXPONENT),
    number_row("rmsprop-epsilon", _with_rmsprop("optimizer-eps"), default=_choose_eps),
    number_row("lars-epsilon", _with_lars("optimizer-eps"),
            default=lambda values: "0" if tf1.is_lars(values) else ""),
    number_row("lars-eeta", _with_lars("trust-coefficient"),
            default=lambda values: "0.001" if tf1.is_lars(values) else ""),
    number_row("lars-weight-decay", _with_lars("trust-decay"), default=tf1.choose_lars_decay),
    OldOption("lars-skip-list", elsewhere("norms and biases are never scaled or decayed"),
              takes="many"),
    whole_row("seed", kept()),
    OldOption("init-path", renamed("init-weights", why="`phalanx port weights` converts them")),
    OldOption("variable-filter", lost("no layer can be frozen: all of them train"),
              takes="many"),
    OldOption(
        "lr-schedule", renamed("lr-schedule", _SCHEDULES),
        choices=("stepped", "cosine", "exponential", "polynomial_decay_lr"), default="stepped",
    ),
    number_row("learning-rate-decay", _with_schedule("lr-decay", "stepped"), default="0.1"),
    OldOption(
        "learning-rate-schedule", _with_schedule("lr-drop-after", "stepped"),
        default=lambda values: "0.3,0.6,0.8,0.9" if tf1.is_imagenet(values) else "0.5,0.75",
    ),
    number_row("warmup-epochs", computed(tf1.port_warmup, "--warmup-epoch, in steps"),
               default="5", number=NOT_NEGATIVE),
    number_row("lr-decay-rate", _with_schedule("lr-decay", "exponential"), default="0.97"),
    number_row("lr-drops", computed(tf1.port_drops, "--lr-scheduler-freq"),
               default="146", number=POSITIVE),
    number_row("poly-lr-decay-power", _with_schedule("lr-power", "polynomial_decay_lr"),
            default="2"),
    number_row(
        "poly-lr-end-ratio", _with_schedule("lr-end-ratio", "polynomial_decay_lr"),
        default=lambda values: "" if values.is_given("abs-end-learning-rate") else "1e-5",
    ),
    number_row("abs-end-learning-rate",
            only_with("lr-schedule", ("polynomial_decay_lr",),
                      computed(tf1.port_final_rate, "--lr-end-ratio"),
                      "only --lr-schedule polynomial_decay_lr uses it"), number=NOT_NEGATIVE),
    OldOption("weight-avg-N", computed(build_average("mean"), "--weight-avg-n"),
              takes="many", number=COUNT_OR_NONE),
    OldOption("weight-avg-exp", computed(build_average("exponential"), "--weight-avg-exp-decay"),
              takes="many", number=SHARE),
    whole_row("ckpts-per-epoch", kept(), default="1", number=COUNT_OR_NONE),
    whole_row("epochs-per-ckpt", computed(_port_interval, "--ckpts-per-epoch, as 1/N"),
              number=COUNT_OR_NONE),
    whole_row("ckpt-epochs-offset", renamed("first-ckpt-epoch"), number=COUNT_OR_NONE),
    flag_row("no-validation", renamed("validation", {"true": "false"})),
    count_row("valid-batch-size", kept()),
)  # fmt: skip
_DATA_TABLE = (
    OldOption("dataset", computed(tf1.port_data, "--data"), choices=tuple(tf1.DATA_NAMES)),
    OldOption("data-dir", computed(tf1.port_folder, "--data-dir")),
    flag_row("generated-data", computed(tf1.build_noise("generated"), "--data generated")),
    flag_row("synthetic-data", computed(tf1.build_noise("synthetic"), "--data synthetic")),
    count_row("image-size", kept()),
    flag_row("normalise-input", computed(tf1.port_normalization, "--normalization"), default=_OFF),
    flag_row("hostside-norm", always(_ON_HOST, "--normalization-location host")),
    flag_row("no-hostside-norm", always(_ON_DEVICE, "--normalization-location device")),
    flag_row("eight-bit-io", always(_EIGHT_BITS, "--eight-bit-io")),
    number_row("mixup-alpha", kept(), default="0"),
    number_row("cutmix-lambda", computed(_port_cutmix, "--cutmix-lambda"), default="1"),
    OldOption("cutmix-version", elsewhere("1 is --cutmix-lambda, 2 its -low and -high"),
              choices=("1", "2")),
    flag_row("hostside-image-mixing", elsewhere("images are mixed on the device")),
    flag_row("train-with-valid-preprocessing", always(_WHOLE_IMAGES, "--crop-scale, --crop-ratio")),
    flag_row("standard-imagenet", nothing(_ORDER)),
    flag_row("no-dataset-cache", elsewhere("files are kept in memory only with --dataset-cache")),
    whole_row("pipeline-num-parallel",
           elsewhere("a worker process for each core decodes; --workers sets another number")),
    number_row("dataset-percentage-to-use", computed(tf1.port_percentage, "fewer --epochs"),
               number=PERCENTAGE),
    flag_row("fused-preprocessing", elsewhere("the device always normalises in one kernel")),
    flag_row("dataset-benchmark", elsewhere("`phalanx data bench` times the input alone")),
)  # fmt: skip
_MACHINE_TABLE = (
    count_row("shards", kept("stages of the model")),
    OldOption("sharding-exclude-filter", kept(), takes="many"),
    OldOption("sharding-include-filter", kept(), takes="many"),
    count_row("replicas", computed(tf1.port_replicas, "--replicas"), default="1"),
    flag_row("pipeline", kept(), default=_OFF),
    OldOption("pipeline-splits", kept(), takes="many", default="none"),
    OldOption(
        "pipeline-schedule", kept(), choices=("Grouped", "Interleaved", "Sequential"),
        default="Grouped",
    ),
    OldOption("precision", kept(), choices=("16.16", "16.32", "32.32"), default="16.16"),
    flag_row("enable-half-partials", renamed("half-partials"), default=_OFF),
    flag_row("no-stochastic-rounding", computed(tf1.port_rounding, "--enable-stochastic-rounding"),
          default=_OFF),
    count_row("batches-per-step", computed(_port_reads, "--device-iterations"),
              "device-iterations"),
    OldOption("select-ipus", DEVICE_CHOICE, takes="many"),
    flag_row("fp-exceptions", kept()),
    flag_row("enable-recomputation", renamed("enable-recompute"), "enable-recompute",
             "xla-recompute", default=_OFF),
    OldOption("gc-profile", PROFILE, takes="optional", bare="IPU_PROFILE",
              choices=tuple(PROFILE_LEVELS)),
    WORKSPACE,
    BUCKETS,
    flag_row("distributed", computed(_port_distributed, "phalanx launch")),
    flag_row("offload-fp32-weight-copy", elsewhere("--precision 16.32 has 32-bit weights")),
    flag_row("disable-variable-offloading", elsewhere("optimizer state stays on the device unless "
                                                   "--offload-optimizer is given")),
    flag_row("saturate-on-overflow", elsewhere("--auto-loss-scaling skips steps that overflow")),
    whole_row("prefetch-depth", elsewhere("the next batches are copied while the device works")),
    flag_row("compile-only", elsewhere("`phalanx plan` checks everything without running it")),
    flag_row("on-demand", nothing("devices are not attached and released")),
    whole_row("min-remote-tensor-size", COMPILER_HINT),
    whole_row("num-io-tiles", nothing("there are no tiles to reserve for transfers")),
    flag_row("gather-conv-output", COMPILER_HINT),
    OldOption("scheduling-algorithm", COMPILER_HINT),
    flag_row("enable-conv-dithering", COMPILER_HINT),
    OldOption("internal-exchange-optimisation-target", COMPILER_HINT),
    whole_row("syncs-per-epoch", nothing("all ranks compute the same weights, which is checked")),
    number_row("epochs-per-sync", nothing("all ranks compute the same weights, which is checked")),
)  # fmt: skip
_LOG_TABLE = (
    OldOption("log-dir", computed(_port_folder_of_runs, "--run-dir"), aliases=("logs-path",)),
    OldOption("name-suffix", computed(_port_suffix, "--run-dir")),
    whole_row("logs-per-epoch", kept(),
           default=lambda values: "" if values.is_given("iterations") else "16",
           number=COUNT_OR_NONE),
    count_row("log-freq", computed(tf1.port_log_interval, "--logs-per-epoch"),
           default=lambda values: "500" if values.is_given("iterations") else ""),
    flag_row("no-logs", nothing("a run's records are what it is resumed from")),
    OldOption("log-all-instances", nothing(_FIRST_RANK)),
    OldOption("ckpt-all-instances", nothing("all ranks have the same weights: one copy is kept")),
    flag_row("mlperf-logging", nothing("a run's records have the same figures")),
    flag_row("wandb", kept()),
    OldOption("wandb-project", kept(),
              default=lambda values: "tf-cnn" if values.has("wandb") else ""),
    flag_row("latency", elsewhere("`phalanx bench infer` measures latency")),
    flag_row("identical-replica-seeding", nothing(_SEEDS)),
    OldOption("executable-cache-path", renamed("model-cache-path")),
)  # fmt: skip
_LATER_TABLE = (  # of later releases
    flag_row("analyse-nans", renamed("fp-exceptions")),
    whole_row("max-reduce-many-buffer-size", COMPILER_HINT),
    flag_row("rts", elsewhere("optimizer state stays whole on each device")),
    flag_row("only-use-slic-vmac-16", COMPILER_HINT),
    OldOption("gcl-method", _EXCHANGE),
    whole_row("gcl-max-broadcast-size", _EXCHANGE),
    OldOption("gradient-mean-reduce-re", elsewhere("all gradients are means"), takes="many"),
    OldOption("force-weight-to-fp32", elsewhere(_WIDE), takes="many"),
    OldOption("poplar-sync-configuration", nothing("all ranks take every step together")),
)
TRAIN_TABLE = (
    *_MODEL_TABLE, *_TRAINING_TABLE, *_DATA_TABLE, *_MACHINE_TABLE, *_LOG_TABLE, *_LATER_TABLE,
)  # fmt: skip
