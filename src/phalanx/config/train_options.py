"""Options of training: the update, the length, and what is written."""

from typing import Literal, get_args

from phalanx.config.fields import (
    BetasText,
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
    momentum: float = option(
        0.9, "Momentum of every optimizer except adamw and lamb.", low=0, high=1
    )
    weight_decay: float = option(
        1e-4, "Decoupled decay of convolution and linear weights; not for norms and biases.", low=0
    )
    l2_regularization: float = option(
        0.0,
        "L2 decay added to the gradient before the optimizer sees it; not for norms and biases.",
        low=0,
    )
    optimizer_eps: float = option(
        1e-8, "Epsilon added to the optimizer's denominators.", low=0, high=1
    )
    adam_betas: BetasText = option("0.9,0.999", "Beta 1 and beta 2 of adamw and lamb.")
    rmsprop_decay: float = option(
        0.99, "Decay of the mean square of rmsprop and rmsprop_tf.", low=0, high=1
    )
    rmsprop_start: float = option(
        1.0, "Initial mean square of rmsprop_tf: 1 as in TensorFlow 1, 0 as in Keras.", low=0
    )
    trust_coefficient: float = option(
        0.001,
        "Trust coefficient of lars: length of a step relative to the weight's norm.",
        low=1e-9,
        aliases=("lars-eeta",),
    )
    trust_decay: float = option(
        0.0, "Decay inside the steps of lars and lamb.", low=0, aliases=("lars-weight-decay",)
    )
    loss_velocity_scaling_ratio: float = option(
        1.0, "sgd_combined: loss scale divided by the scale of its velocity.", low=1e-9
    )
    norm_bias_lr_scale: float = option(
        1.0,
        "Learning rate of norms' biases, as a multiple of that of all other weights.",
        low=0,
        high=1024,
    )
    clip_grad_norm: float = option(0.0, "Clip the global gradient norm to this; 0: never.", low=0)
    clip_grad_value: float = option(
        0.0, "Clip every gradient value to this magnitude; 0: never.", low=0
    )
    ema_decay: float = option(
        0.0,
        "Decay per step of an exponential moving average of the weights; 0: no average.",
        low=0,
        high=0.999999,
    )


class ScheduleConfig(Section):
    """Learning rate: its peak, and its schedule over the run."""

    lr: float = option(
        0.1,
        "Peak learning rate, for the whole global batch.",
        low=0,
        aliases=("abs-learning-rate",),
    )
    lr_per_image: float | None = option(
        None, "Peak rate per image of the batch, instead of --lr.", low=0
    )
    base_learning_rate: float | None = option(
        None,
        "Peak rate per image of the batch as a power of 2, instead of --lr: -14 means 2^-14.",
        low=-60,
        high=60,
        aliases=("base-learning-rate-exponent",),
    )
    lr_batch: Literal["global", "pass"] = option(
        "global",
        "Batch by which --lr-per-image and --base-learning-rate are multiplied: global, or pass, "
        "which leaves accumulation out, as PopART did.",
    )
    lr_schedule: _LrSchedule = option(
        "cosine", f"Shape of the learning rate over the run: {', '.join(get_args(_LrSchedule))}."
    )
    warmup_epoch: DurationText = option(
        "0ep",
        "Length of the linear warm-up: 5ep, 500st or 10%; a plain number means epochs.",
        aliases=("warmup-epochs",),
    )
    warmup_mode: Literal["ramp", "mask", "shift", "ramp-shift"] = option(
        "ramp",
        "ramp: multiply the running schedule by t/W. mask, shift: as in recipes of TensorFlow 2; "
        "shift starts the schedule after the warm-up.",
    )
    lr_decay: NumbersText = option(
        "0.1",
        "Factor of a step or exponential schedule, or, separated by commas, the share of the peak "
        "in each interval.",
        aliases=("learning-rate-decay", "lr-decay-rate"),
    )
    lr_epoch_decay: DurationsText | None = option(
        None, "When a step schedule drops the rate: 30,60,90 (epochs) or 50%,75%."
    )
    lr_drop_after: NumbersText | None = option(
        None,
        "Shares of the run after which a step schedule drops the rate, instead of "
        "--lr-epoch-decay: 0.5,0.75.",
        aliases=("learning-rate-schedule",),
    )
    lr_decay_period: DurationText | None = option(
        None,
        "Time in which an exponential schedule falls by --lr-decay.",
        auto="the time between updates (--lr-scheduler-freq), else an epoch",
    )
    lr_decay_length: DurationText | None = option(
        None,
        "Time in which a cosine or polynomial schedule falls.",
        auto="the run, minus a warm-up that shifts it",
    )
    lr_power: float = option(
        2.0, "Power of a polynomial schedule.", low=0.01, high=100, aliases=("poly-lr-decay-power",)
    )
    lr_end_ratio: float = option(
        0.0,
        "Final rate of a cosine or polynomial schedule, as a share of the peak.",
        low=0,
        high=1,
        aliases=("poly-lr-end-ratio",),
    )
    lr_staircase: bool = option(False, "Change the rate only at the start of an epoch.")
    lr_schedule_start: DurationText = option(
        "0ep",
        "Where in the run the schedule begins, warm-up included; --fork-schedule restart sets it.",
    )
    lr_scheduler_freq: RateText = option(
        "0", "How many times per epoch the rate is updated; 0: every step."
    )


class LossConfig(Section):
    """Loss: what is minimised, and how it is scaled."""

    loss: Literal["cross-entropy", "bce"] = option(
        "cross-entropy", "cross-entropy, or bce: an independent yes or no for every class."
    )
    label_smoothing: float = option(
        0.0, "Share of the target spread evenly over the classes.", low=0, high=0.999
    )
    smoothing_over: Literal["all", "others"] = option(
        "all", "Classes that label smoothing is spread over: all, or only the others."
    )
    loss_scaling: float = option(
        1.0,
        "Loss scale; with --initial-loss-scaling, the final one.",
        low=2.0**-24,
        high=2.0**24,
    )
    initial_loss_scaling: float | None = option(
        None,
        "Initial loss scale, doubled at equal intervals up to --loss-scaling.",
        low=2.0**-24,
        high=2.0**24,
        auto="--loss-scaling throughout",
    )
    auto_loss_scaling: bool = option(
        False,
        "Halve the loss scale and skip the step when gradients overflow; double it now and then.",
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
    steps: int | None = option(
        None, "Length of the run in optimizer steps, instead of --epochs.", low=1
    )
    gradient_accumulation: int | None = option(
        None,
        "Micro-batches per replica and optimizer step.",
        low=1,
        high=65536,
        auto="1, or what --global-batch-size needs",
    )
    global_batch_size: int | None = option(
        None,
        "Images of one optimizer step over all replicas, instead of --gradient-accumulation.",
        low=1,
        auto="micro-batch x accumulation x replicas",
    )
    seed: int = option(0, "Seed of all random numbers.", low=0, high=2**63 - 1)
    logs_per_epoch: RateText = option(
        "5", "Log points per epoch: 5, 1/2 for every second epoch, 0 for none.", resumable=True
    )

    validation_mode: Literal["none", "during", "after"] = option(
        "during",
        "When checkpoints are scored: during training, all of them after it, or none, for which "
        "a folder needs no validation images.",
    )
    validation_frequency: RateText = option(
        "1", "Epochs between validations while training: 4, 1/2 for two per epoch, 0 for none."
    )
    validation: bool = option(True, "--validation false is --validation-mode none.")
    training: bool = option(
        True, "--training false trains nothing and scores what would be trained."
    )
    device_iterations: int = option(
        512,
        "Most steps between two reads of metrics from the device.",
        low=1,
        high=65536,
        resumable=True,
    )
    disable_metrics: bool = option(
        False,
        "Record only the loss of training steps, not their gradient norm and top-1.",
        resumable=True,
    )


class RunConfig(Section):
    """Run: the folder and what is kept in it."""

    run_dir: PathText | None = option(
        None, "Folder for the run.", aliases=("checkpoint-path",), auto="runs/NAME-TIME"
    )
    ckpts_per_epoch: RateText = option(
        "1",
        "Checkpoints per epoch: 2, 1/2 for every second epoch, 0 only when the run stops.",
        resumable=True,
    )
    first_ckpt_epoch: float = option(
        0.0,
        "Epoch of the first checkpoint; 0: one interval after the start.",
        low=0,
        resumable=True,
    )
    keep: int = option(
        2,
        "How many of the newest checkpoints to keep, in addition to the best one.",
        low=1,
        resumable=True,
    )
    weight_avg_strategy: Literal["none", "mean", "exponential"] = option(
        "none",
        "Average the last checkpoints after training; exponential: newer ones count more.",
        resumable=True,
    )
    weight_avg_exp_decay: float = option(
        0.99,
        "Decay per checkpoint of an exponential average, starting at the oldest.",
        low=0,
        high=1,
        resumable=True,
    )
    weight_avg_n: int | None = option(
        None,
        "How many of the last checkpoints to average, which are kept despite --keep; -1 for all.",
        low=-1,
        auto="5, or as many as there are",
        aliases=("weight-avg-N",),
        resumable=True,
    )
    plugin: str | None = option(
        None,
        "Python modules, separated by commas, that add your own models and datasets; their "
        "code is run.",
        resumable=True,
    )
