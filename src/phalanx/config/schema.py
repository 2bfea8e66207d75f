"""Every option of Phalanx: its default, its limits and its line of help, each in one place.

A flag, a YAML key and an attribute are the same word: `--batch-size`, `batch-size:`,
`config.data.batch_size`. Sections only group options in code, help and docs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic.fields import FieldInfo

from phalanx.catalog.datasets import DATASETS
from phalanx.config.fields import (
    DatasetName,
    DeviceText,
    DurationText,
    ModelName,
    PairText,
    RateText,
    Section,
    ShareText,
    option,
)


class DataConfig(Section):
    """Data: what is read, and in which portions."""

    data: DatasetName = option("embedded", "Which dataset: " + ", ".join(DATASETS) + ".")
    data_dir: str | None = option(
        None,
        "Folder that holds the dataset; the environment's DATA_DIR stands in for it.",
        resumable=True,
        also=("imagenet-data-path",),
    )
    no_fetch: bool = option(
        False, "Refuse to download a published set that is not in --data-dir.", resumable=True
    )
    image_size: int | None = option(
        None,
        "Height and width the model sees.",
        low=8,
        high=2048,
        auto="the model's own for photographs, else the dataset's",
    )
    batch_size: int = option(
        64, "Micro-batch: images in one forward pass of one replica.", low=1, high=65536
    )
    valid_batch_size: int | None = option(
        None,
        "Images in one forward pass when scoring; no score depends on it.",
        low=1,
        high=65536,
        resumable=True,
        auto="the larger of batch-size and 250",
    )
    epoch_tail: Literal["carry", "drop"] = option(
        "carry", "carry: a step may take images of two epochs; drop: what fills no step is left."
    )
    iterations: int = option(
        100, "Length of one epoch of generated and synthetic data, in steps.", low=1
    )
    workers: int | None = option(
        None,
        "Processes that decode and augment; batches are the same for any number.",
        low=0,
        high=256,
        resumable=True,
        auto="one per core, none for sets held in memory",
    )
    crop_scale: PairText = option(
        "0.08,1", "Least and most share of the image's area that a random crop takes."
    )
    crop_ratio: PairText = option(
        "3/4,4/3", "Narrowest and widest shape of a random crop, width over height."
    )
    use_bbox_info: bool = option(
        False, "Random crops show a tenth of the object's box or more, where the data has boxes."
    )
    color_jitter: float = option(
        0.0, "Strength of random changes of brightness, contrast and colour.", low=0, high=1
    )
    auto_augment: Literal["none", "rand-augment", "trivial-augment"] = option(
        "none", "Random changes by a published policy: rand-augment or trivial-augment."
    )
    random_erasing: float = option(
        0.0, "Share of training images that lose a random part.", low=0, high=1
    )
    eval_crop: float = option(
        0.875, "Share of the short side that is scored, of photographs.", low=0.1, high=1
    )
    normalization: Literal["mean-std", "mean", "per-image"] = option(
        "mean-std", "mean-std or mean: of the dataset; per-image: each image's own."
    )
    flip_averaging: bool = option(
        False, "Score each image and its mirror image, and take the mean of the answers."
    )
    val_split: ShareText | None = option(
        None, "Share of a folder's images to validate on, where it has no split of its own."
    )
    max_bad: ShareText | None = option(
        None,
        "Undecodable training images to put up with, such as 10 or 1%.",
        resumable=True,
        auto="10 images or 1 %, whichever is more",
    )


class ModelConfig(Section):
    """Model: which network, and how it differs from its published form."""

    model: ModelName = option(
        "resnet8", "Which model, such as resnet50 or efficientnet_b0; `phalanx models ls` has all."
    )
    norm_type: Literal["batch", "group", "none"] = option(
        "batch", "What normalises activations: batch, group or none."
    )
    norm_num_groups: int = option(
        32, "Groups of group norm; must divide every layer's channels.", low=1, high=4096
    )
    batchnorm_momentum: float = option(
        0.1, "Share of each new batch in batch norm's running statistics.", low=0, high=1
    )
    norm_eps: float = option(
        1e-5, "Added to the variance; TensorFlow's EfficientNet has 1e-3.", low=1e-12, high=1
    )
    full_precision_norm: bool = option(False, "Compute norms in 32 bits, whatever the precision.")
    disable_stable_batchnorm: bool = option(
        False, "Take batch norm's variance from one pass: one read less, fewer sound digits."
    )
    enable_fast_groupnorm: bool = option(
        False, "Group channels g, g+G, g+2G...; weights of the other layout are refused."
    )
    padding: Literal["symmetric", "same"] = option(
        "symmetric", "symmetric, or same: as TensorFlow pads strided convolutions."
    )
    drop_path: float | None = option(
        None,
        "Rate of skipping whole blocks while training: growing towards this at the end.",
        low=0,
        high=0.999,
        also=("drop-connect",),
        auto="the model's own",
    )
    dropout_rate: float | None = option(
        None,
        "Rate of dropout before the classifier.",
        low=0,
        high=0.999,
        auto="the model's own",
    )
    init_weights: str | None = option(
        None, "Weights to begin with: .safetensors or .pth, with timm's or torchvision's names."
    )
    reset_head: bool = option(
        False, "With --init-weights: begin with a new classifier, for other classes."
    )


class ResNetConfig(Section):
    """ResNet and ResNeXt only: how blocks are joined."""

    family: ClassVar[str] = "ResNet"
    zero_init_residual: bool = option(
        False,
        "Start each residual block as its bare shortcut: last norm's weight at zero.",
    )
    stride_in: Literal["3x3", "1x1"] = option(
        "3x3",
        "Where a bottleneck strides: its 3x3 (v1.5) or its first 1x1 (v1).",
    )
    shortcut_type: Literal["A", "B", "C"] | None = option(
        None,
        "A: slice and pad with zeros; B: project where shapes differ; C: project always.",
        auto="A for 6n+2 layers, else B",
    )
    stage1_projection: bool = option(
        False, "Project in the first block of stage 1 too, where shapes agree."
    )


class EfficientNetConfig(Section):
    """EfficientNet only: what its blocks are like."""

    family: ClassVar[str] = "EfficientNet"
    efficientnet_group_dim: int = option(
        1,
        "Channels a group of the middle convolution has; 1 is depthwise.",
        low=1,
        high=4096,
    )
    efficientnet_expand_ratio: int = option(
        6,
        "Channels inside a block, per channel that comes in.",
        low=1,
        high=64,
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


class Config(Section):
    """All options, complete and frozen. Derived numbers live in the Plan, never here."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    resnet: ResNetConfig = ResNetConfig()
    efficientnet: EfficientNetConfig = EfficientNetConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    run: RunConfig = RunConfig()
    machine: MachineConfig = MachineConfig()

    def flat(self) -> dict[str, Any]:
        """Every option's value under its flag's name."""
        return {
            name: value
            for section in self.model_dump(by_alias=True).values()
            for name, value in section.items()
        }


@dataclass(frozen=True)
class Option:
    """What help, docs and the reader need to know of one option."""

    name: str  # as in --name
    section: str
    heading: str
    kind: Any  # the annotation
    default: Any
    help: str
    auto: str
    resumable: bool
    also: tuple[str, ...]
    family: str
    low: float | None
    high: float | None


def limit(field: FieldInfo, name: str) -> float | None:
    """A field's bound, which pydantic keeps among its metadata."""
    return next((getattr(m, name) for m in field.metadata if hasattr(m, name)), None)


def iterate_options() -> Iterator[Option]:
    """All options in the order of the schema."""
    for section, holder in Config.model_fields.items():
        kind = holder.annotation
        assert isinstance(kind, type) and issubclass(kind, Section)
        for name, field in kind.model_fields.items():
            extra = field.json_schema_extra
            assert isinstance(extra, dict)
            yield Option(
                name=name.replace("_", "-"),
                section=section,
                heading=(kind.__doc__ or "").rstrip("."),
                kind=field.annotation,
                default=field.default,
                help=field.description or "",
                auto=str(extra["auto"]),
                resumable=bool(extra["resumable"]),
                also=tuple(str(old) for old in extra["also"]),  # type: ignore[union-attr]
                family=kind.family,
                low=limit(field, "ge"),
                high=limit(field, "le"),
            )


OPTIONS: dict[str, Option] = {option.name: option for option in iterate_options()}
SPELLINGS: dict[str, str] = {
    spelling: o.name for o in OPTIONS.values() for spelling in (o.name, *o.also)
}
