"""Options of training: the update, the length, what is written, and where it runs."""

from typing import Literal

from phalanx.config.fields import (
    DeviceText,
    DurationText,
    RateText,
    Section,
    option,
)


class OptimConfig(Section):
    """Optimizer: how weights are updated."""

    optimizer: Literal["sgd"] = option("sgd", "Update rule: sgd, with --momentum.")
    lr: float = option(0.1, "Peak learning rate, for the whole global batch.", low=0)
    momentum: float = option(0.9, "Momentum of sgd.", low=0, high=1)
    weight_decay: float = option(
        1e-4, "Decoupled decay of convolution and linear weights; norms and biases get none.", low=0
    )
    lr_schedule: Literal["cosine", "constant"] = option(
        "cosine", "Shape of the learning rate over the run: cosine or constant."
    )
    warmup_epoch: DurationText = option(
        "0ep", "Length of the linear warm-up: 5ep, 500st or 10%; a bare number counts epochs."
    )
    label_smoothing: float = option(
        0.0, "Share of the target spread evenly over all classes.", low=0, high=0.999
    )


class TrainConfig(Section):
    """Training: how long, how large a step, what is written when."""

    epochs: float | None = option(
        None, "Length of the run in epochs.", low=0.0001, also=("epoch",), auto="10 without --steps"
    )
    steps: int | None = option(None, "Length of the run in optimizer steps, instead.", low=1)
    gradient_accumulation: int = option(
        1, "Micro-batches per replica and optimizer step.", low=1, high=65536
    )
    seed: int = option(0, "Where all randomness starts.", low=0, high=2**63 - 1)
    logs_per_epoch: RateText = option(
        "5", "Log points per epoch: 5, 1/2 for every second epoch, 0 for none.", resumable=True
    )


class RunConfig(Section):
    """Run: the folder and what is kept in it."""

    run_dir: str | None = option(
        None, "Folder of the run.", also=("checkpoint-path",), auto="runs/NAME-TIME"
    )
    ckpts_per_epoch: RateText = option(
        "1",
        "Checkpoints per epoch: 2, 1/2 for every second epoch, 0 for none but at a stop.",
        resumable=True,
    )
    keep: int = option(
        2, "Newest checkpoints to keep; the best one stays besides.", low=1, resumable=True
    )
    plugin: str | None = option(
        None, "Modules that add models and datasets of your own, with commas.", resumable=True
    )


class MachineConfig(Section):
    """Machine: where it runs."""

    device: DeviceText = option(
        "auto", "auto, cpu, cuda, cuda:0,2 (those two) or mps.", resumable=True
    )
    precision: Literal["auto", "32.32", "16.32"] = option(
        "auto",
        "Bits of computation and of weights: 32.32, or 16.32 (bfloat16 compute).",
        auto="32.32 on a CPU, 16.32 on a GPU",
    )
    replicas: int = option(1, "Copies of the model that share a step.", low=1, high=65536)
