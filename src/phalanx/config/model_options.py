"""Options of the network."""

from typing import ClassVar, Literal

from phalanx.config.fields import ModelName, PathText, Section, option


class ModelConfig(Section):
    """Model: which network, and how it differs from its published form."""

    model: ModelName = option(
        "resnet8",
        "Which model, such as resnet50 or efficientnet_b0; `phalanx models ls` lists them all.",
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
        1e-5,
        "Epsilon of norms, added to the variance; TensorFlow's EfficientNet uses 1e-3.",
        low=1e-12,
        high=1,
    )
    full_precision_norm: bool = option(False, "Compute norms in 32 bits, whatever the precision.")
    disable_stable_batchnorm: bool = option(
        False, "Compute batch norm's variance in one pass: one read less, but less accurate."
    )
    enable_fast_groupnorm: bool = option(
        False, "Group channels g, g+G, g+2G...; weights of the other layout are refused."
    )
    padding: Literal["symmetric", "same"] = option(
        "symmetric", "symmetric, or same: as TensorFlow pads strided convolutions."
    )
    drop_path: float | None = option(
        None,
        "Stochastic depth: rate of skipping blocks, rising to this in the last block.",
        low=0,
        high=0.999,
        aliases=("drop-connect",),
        auto="the model's own",
    )
    dropout_rate: float | None = option(
        None, "Dropout rate before the classifier.", low=0, high=0.999, auto="the model's own"
    )
    init_weights: PathText | None = option(
        None, "Weights to start from: .safetensors or .pth, with timm's or torchvision's names."
    )
    reset_head: bool = option(
        False, "With --init-weights: start with a new classifier, for other classes."
    )


class ResNetConfig(Section):
    """ResNet and ResNeXt only: how blocks are joined."""

    family: ClassVar[str] = "ResNet"
    zero_init_residual: bool = option(
        False, "Start each residual block as its bare shortcut: last norm's weight at zero."
    )
    stride_in: Literal["3x3", "1x1"] = option(
        "3x3",
        "Which convolution of a bottleneck has the stride: the 3x3 (v1.5) or the first 1x1 (v1).",
    )
    shortcut_type: Literal["A", "B", "C"] | None = option(
        None,
        "A: slice and pad with zeros; B: project where shapes differ; C: project always.",
        auto="A for 6n+2 layers, else B",
    )
    stage1_projection: bool = option(
        False, "Also project in the first block of stage 1, where the shapes already match."
    )


class EfficientNetConfig(Section):
    """EfficientNet only: the shape of its blocks."""

    family: ClassVar[str] = "EfficientNet"
    efficientnet_group_dim: int = option(
        1, "Channels per group of the middle convolution; 1 is depthwise.", low=1, high=4096
    )
    efficientnet_expand_ratio: int = option(
        6, "Channels inside a block, per input channel.", low=1, high=64
    )
