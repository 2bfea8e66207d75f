"""Options of training: the update, the length, what is written, and where it runs."""

from typing import Literal, get_args

from phalanx.config.fields import (
    BetasText,
    DeviceText,
    DurationsText,
    DurationText,
    NumbersText,
    PathText,
    RateText,
    Section,
    option,
)

_Optimizer = Literal[
    "sgd", "momentum", "nesterov", "sgd_combined", "adamw", "rmsprop", "rmsprop_tf", "lars", "lamb"
]
_LrSchedule = Literal["step", "cosine", "exponential", "polynomial", "constant"]


class OptimConfig(Section):
    """Optimizer: how weights are updated."""

    optimizer: _Optimizer = option("sgd", f"Update rule: {', '.join(get_args(_Optimizer))}.")
    momentum: float = option(0.9, "Momentum of every rule but adamw and lamb.", low=0, high=1)
    weight_decay: float = option(
        1e-4, "Decoupled decay of convolution and linear weights; norms and biases get none.", low=0
    )
    l2_regularization: float = option(
        0.0,
        "Decay added to the gradient, which the rule remembers; norms and biases get none.",
        low=0,
    )
    optimizer_eps: float = option(1e-8, "Added where a rule divides.", low=0, high=1)
    adam_betas: BetasText = option(
        "0.9,0.999", "Shares of mean and square that adamw and lamb keep."
    )
    rmsprop_decay: float = option(
        0.99, "Share of the mean square that rmsprop and rmsprop_tf keep.", low=0, high=1
    )
    rmsprop_start: float = option(
        1.0, "First mean square of rmsprop_tf: 1 as in TensorFlow 1, 0 as in Keras.", low=0
    )
    trust_coefficient: float = option(
        0.001,
        "Share of a weight's length that a step of lars takes.",
        low=1e-9,
        aliases=("lars-eeta",),
    )
    trust_decay: float = option(
        0.0, "Decay inside the steps of lars and lamb.", low=0, aliases=("lars-weight-decay",)
    )
    loss_velocity_scaling_ratio: float = option(
        1.0, "sgd_combined: loss scale over the scale its velocity is kept at.", low=1e-9
    )
    clip_grad_norm: float = option(
        0.0, "Shorten the gradient of all weights together to this length; 0: never.", low=0
    )
    clip_grad_value: float = option(
        0.0, "Cut every number of the gradient to this size; 0: never.", low=0
    )
    ema_decay: float = option(
        0.0,
        "Share that a running average of the weights keeps a step; 0: none is made.",
        low=0,
        high=0.999999,
    )


class ScheduleConfig(Section):
    """Learning rate: how high, and its course over the run."""

    lr: float = option(
        0.1,
        "Peak learning rate, for the whole global batch.",
        low=0,
        aliases=("abs-learning-rate",),
    )
    lr_per_image: float | None = option(
        None, "Peak rate for each image of the batch, instead.", low=0
    )
    base_learning_rate: float | None = option(
        None,
        "Peak rate as 2 to this power for each image of the batch, instead.",
        low=-60,
        high=60,
        aliases=("base-learning-rate-exponent",),
    )
    lr_batch: Literal["global", "pass"] = option(
        "global", "Batch the two above multiply: global, or pass: without accumulation (PopART)."
    )
    lr_schedule: _LrSchedule = option(
        "cosine", f"Shape of the learning rate over the run: {', '.join(get_args(_LrSchedule))}."
    )
    warmup_epoch: DurationText = option(
        "0ep",
        "Length of the linear warm-up: 5ep, 500st or 10%; a bare number counts epochs.",
        aliases=("warmup-epochs",),
    )
    warmup_mode: Literal["ramp", "mask", "shift", "ramp-shift"] = option(
        "ramp",
        "ramp: multiply the running schedule by t/W. mask, shift: as seed 001; shift lets the "
        "schedule begin after it.",
    )
    lr_decay: NumbersText = option(
        "0.1",
        "Factor of a step or exponential schedule, or with commas the share of the peak in each "
        "stretch.",
        aliases=("learning-rate-decay", "lr-decay-rate"),
    )
    lr_epoch_decay: DurationsText | None = option(
        None, "Where a step schedule falls: 30,60,90 or 50%,75%."
    )
    lr_drop_after: NumbersText | None = option(
        None,
        "Shares of the run after which it falls, instead: 0.5,0.75.",
        aliases=("learning-rate-schedule",),
    )
    lr_decay_period: DurationText | None = option(
        None,
        "Time in which an exponential falls by --lr-decay.",
        auto="from refresh to refresh, else an epoch",
    )
    lr_decay_length: DurationText | None = option(
        None,
        "Time in which a cosine or polynomial falls.",
        auto="the run, less a warm-up that shifts",
    )
    lr_power: float = option(
        2.0, "Power of a polynomial.", low=0.01, high=100, aliases=("poly-lr-decay-power",)
    )
    lr_end_ratio: float = option(
        0.0,
        "Where a cosine or polynomial ends, as a share of the peak.",
        low=0,
        high=1,
        aliases=("poly-lr-end-ratio",),
    )
    lr_staircase: bool = option(False, "Keep the rate of an epoch's first step for all of it.")
    lr_schedule_start: DurationText = option(
        "0ep",
        "Where in the run the schedule begins, warm-up included; --fork-schedule restart sets it.",
    )
    lr_scheduler_freq: RateText = option(
        "0", "Times an epoch the rate is refreshed; 0: every step."
    )


class LossConfig(Section):
    """Loss: what is made small, and in which numbers."""

    loss: Literal["cross-entropy", "bce"] = option(
        "cross-entropy", "cross-entropy, or bce: a yes or no for every class by itself."
    )
    label_smoothing: float = option(
        0.0, "Share of the target spread evenly over the classes.", low=0, high=0.999
    )
    smoothing_over: Literal["all", "others"] = option(
        "all", "Which classes it is spread over: all, or only those that are wrong."
    )
    loss_scaling: float = option(
        1.0,
        "Factor of the loss in the backward pass; the last one with the next option.",
        low=2.0**-24,
        high=2.0**24,
    )
    initial_loss_scaling: float | None = option(
        None,
        "First factor of the loss, doubled in equal stages up to --loss-scaling.",
        low=2.0**-24,
        high=2.0**24,
        auto="--loss-scaling throughout",
    )
    auto_loss_scaling: bool = option(
        False,
        "Halve the factor when gradients overflow and skip that step; double it now and then.",
    )


class TrainConfig(Section):
    """Training: how long, how large a step, what is written when."""

    epochs: float | None = option(
        None,
        "Length of the run in epochs.",
        low=0.0001,
        aliases=("epoch",),
        auto="10 without --steps",
    )
    steps: int | None = option(None, "Length of the run in optimizer steps, instead.", low=1)
    gradient_accumulation: int = option(
        1, "Micro-batches per replica and optimizer step.", low=1, high=65536
    )
    seed: int = option(0, "Where all randomness starts.", low=0, high=2**63 - 1)
    logs_per_epoch: RateText = option(
        "5", "Log points per epoch: 5, 1/2 for every second epoch, 0 for none.", resumable=True
    )

    validation_mode: Literal["none", "during", "after"] = option(
        "during", "When checkpoints are scored: none, during training, or all of them after it."
    )
    validation_frequency: RateText = option(
        "1", "Epochs between validations while training: 4, 1/2 for two an epoch, 0 for none."
    )
    validation: bool = option(True, "--validation false is --validation-mode none.")
    training: bool = option(
        True, "--training false trains nothing and scores what would be trained."
    )
    device_iterations: int = option(
        512,
        "Most steps between two reads of the device by the host.",
        low=1,
        high=65536,
        resumable=True,
    )
    disable_metrics: bool = option(
        False,
        "Keep no gradient norm and no top-1 of training steps, only their loss.",
        resumable=True,
    )


class RunConfig(Section):
    """Run: the folder and what is kept in it."""

    run_dir: PathText | None = option(
        None, "Folder of the run.", aliases=("checkpoint-path",), auto="runs/NAME-TIME"
    )
    ckpts_per_epoch: RateText = option(
        "1",
        "Checkpoints per epoch: 2, 1/2 for every second epoch, 0 for none but at a stop.",
        resumable=True,
    )
    first_ckpt_epoch: float = option(
        0.0,
        "Epoch of the first checkpoint; 0: one interval after the start.",
        low=0,
        resumable=True,
    )
    keep: int = option(
        2, "Newest checkpoints to keep; the best one stays besides.", low=1, resumable=True
    )
    weight_avg_strategy: Literal["none", "mean", "exponential"] = option(
        "none",
        "Average the last checkpoints when training is over; exponential: newer ones count more.",
        resumable=True,
    )
    weight_avg_exp_decay: float = option(
        0.99,
        "What an exponential average keeps at each checkpoint, from the oldest on.",
        low=0,
        high=1,
        resumable=True,
    )
    weight_avg_n: int | None = option(
        None,
        "Checkpoints to average, the last ones; -1 for all. They are kept whatever --keep says.",
        low=-1,
        auto="5, or as many as there are",
        aliases=("weight-avg-N",),
        resumable=True,
    )
    plugin: str | None = option(
        None,
        "Modules that add models and datasets of your own, with commas; their code runs.",
        resumable=True,
    )


class MachineConfig(Section):
    """Machine: where it runs."""

    device: DeviceText = option(
        "auto", "auto, cpu, cuda, cuda:0,2 (those two) or mps.", resumable=True
    )
    precision: Literal["auto", "32.32", "16.32", "16.16"] = option(
        "auto",
        "Bits of computation and of weights: 32.32, 16.32, or 16.16 (updates, too).",
        auto="32.32 on a CPU, 16.32 on a GPU",
    )
    half_type: Literal["bfloat16", "float16"] = option(
        "bfloat16", "What 16 bits are: bfloat16 or float16."
    )
    enable_stochastic_rounding: bool = option(
        False, "Round 16-bit weights and optimizer state up or down by chance, right in the mean."
    )
    half_partials: bool = option(
        False, "Let the GPU add up partial products in 16 bits.", aliases=("half-partial",)
    )
    enable_recompute: bool = option(
        False,
        "Keep few activations and compute the others again in the backward pass.",
        resumable=True,
    )
    recompute_checkpoints: str | None = option(
        None,
        "Regular expressions of the modules whose outputs are kept, with commas.",
        resumable=True,
        auto="every block",
    )
    offload_optimizer: bool = option(
        False,
        "Keep optimizer state in host memory, and on the GPU only while weights are moved.",
        resumable=True,
    )
    determinism: Literal["off", "seeded", "strict"] = option(
        "seeded",
        "off: whatever is fastest; seeded: the same draws; strict: the same bits every time.",
    )
    fp_exceptions: bool = option(
        False,
        "Stop at the first step that gives inf or nan, by name of the module.",
        resumable=True,
        aliases=("enable-fp-exceptions",),
    )
    replicas: int = option(1, "Copies of the model that share a step.", low=1, high=65536)
    threads: int | None = option(
        None,
        "Torch threads of a process; sums over one and two threads differ in the last place.",
        low=1,
        high=1024,
        auto="OMP_NUM_THREADS where it is a number, else one per core",
    )
