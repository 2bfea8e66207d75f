"""Options of the machine: devices, precision and kernels."""

from typing import Literal

from phalanx.config.fields import DeviceText, PathText, Section, option


class MachineConfig(Section):
    """Machine: where it runs."""

    device: DeviceText = option(
        "auto", "auto, cpu, cuda, cuda:0,2 (those two) or mps.", resumable=True
    )
    validation_device: DeviceText | None = option(
        None,
        "Device that scores while another one trains, such as cpu or cuda:1.",
        resumable=True,
        auto="the device that trains",
    )
    precision: Literal["auto", "32.32", "16.32", "16.16"] = option(
        "auto",
        "Bits of computation and of weights: 32.32, 16.32, or 16.16 (updates, too).",
        auto="32.32 on a CPU, 16.32 on a GPU",
    )
    half_type: Literal["bfloat16", "float16"] = option(
        "bfloat16", "16-bit type: bfloat16 or float16."
    )
    enable_stochastic_rounding: bool = option(
        False, "Round 16-bit weights and optimizer state up or down at random, without bias."
    )
    half_partials: bool = option(
        False, "Let the GPU accumulate partial products in 16 bits.", aliases=("half-partial",)
    )
    enable_recompute: bool = option(
        False,
        "Keep few activations and recompute the others in the backward pass.",
        resumable=True,
    )
    recompute_checkpoints: str | None = option(
        None,
        "Regular expressions, separated by commas, of the modules whose outputs are kept.",
        resumable=True,
        auto="every block",
    )
    offload_optimizer: bool = option(
        False,
        "Keep optimizer state in host memory, and on the GPU only during the update.",
        resumable=True,
    )
    determinism: Literal["off", "seeded", "strict"] = option(
        "seeded",
        "off: whatever is fastest; seeded: same random numbers; strict: same bits every time.",
    )
    fp_exceptions: bool = option(
        False,
        "Stop at the first step that gives inf or nan, and name the module.",
        resumable=True,
        aliases=("enable-fp-exceptions",),
    )
    graph: bool | None = option(
        None,
        "Replay the passes of a step as CUDA graphs, each launched by a single call.",
        resumable=True,
        auto="on a GPU, if possible",
    )
    kernels: Literal["auto", "torch"] = option(
        "auto", "auto: our own kernels where a network has them; torch: only those of torch."
    )
    compile: bool = option(
        False,
        "Compile the network with torch.compile: for networks that have no kernels of our own.",
    )
    model_cache_path: PathText | None = option(
        None,
        "Folder for compiled kernels and the choice among them, kept from run to run.",
        resumable=True,
        auto="in the user's cache folder, else a temporary one",
    )
    replicas: int | None = option(
        1,
        "Copies of the model that share a step; auto: one per device, with the same global batch.",
        low=1,
        high=65536,
    )
    devices: int | None = option(
        None,
        "How many devices to use, with a process each; on a CPU, how many processes.",
        low=1,
        high=65536,
        resumable=True,
        auto="those that --device names, as many as --replicas needs",
    )
    no_fold: bool = option(
        False,
        "Refuse to run several replicas on one device.",
        resumable=True,
    )
    bn_span: int = option(
        1,
        "How many replicas share the statistics of batch norm.",
        low=1,
        high=65536,
        aliases=("dbn-replica-group-size",),
    )
    bucket_mib: float = option(
        25.0,
        "Size in MiB of the pieces in which ranks exchange gradients.",
        low=0.01,
        high=1024,
        resumable=True,
    )
    rank_timeout: float = option(
        600.0,
        "Seconds to wait for a rank that does not start or makes no progress.",
        low=1,
        high=86400,
        resumable=True,
    )
    threads: int | None = option(
        None,
        "Torch threads per process; another number changes sums in their last digit.",
        low=1,
        high=1024,
        auto="OMP_NUM_THREADS where it is a number, else one per core",
    )
    engine: Literal["native", "lightning"] = option(
        "native",
        "native: our own loop; lightning: PyTorch Lightning's Trainer drives it, with the same "
        "bits.",
        resumable=True,
    )
    profile: Literal["off", "summary", "trace", "full"] = option(
        "off",
        "summary: tables of a step by unit and kernel; trace: for Perfetto too; full: with stacks.",
        resumable=True,
    )
