"""PyTorch's names: timm's and torchvision's, which are ours, and those of efficientnet_pytorch."""

from phalanx.port_weights.naming import NORM_TENSORS, Naming

_TENSORS = {
    "conv": {"weight": "weight", "bias": "bias"},
    "norm": {tensor: tensor for tensor in NORM_TENSORS},
    "dense": {"weight": "weight", "bias": "bias"},
}
_CONVS = {
    "ResNet": ("stem", "block", "projection"),
    "EfficientNet": ("stem", "expand", "depthwise", "reduce", "widen", "project", "top"),
}
_NORMS = {
    "ResNet": ("stem", "block", "projection"),
    "EfficientNet": ("stem", "expand", "depthwise", "project", "top"),
}
_TIMM = tuple(
    Naming(
        title="PyTorch weights, timm's and torchvision's names",
        program="pytorch",
        family=family,
        separator=".",
        layers={
            **{("conv", part): "{path}" for part in convs},
            **{("norm", part): "{path}" for part in _NORMS[family]},
            ("dense", "head"): "{path}",
        },
        tensors=_TENSORS,
    )
    for family, convs in _CONVS.items()
)
_BLOCK = "_blocks.{number}."
_LUKEMELAS = Naming(
    title="PyTorch weights, efficientnet_pytorch's names",
    program="efficientnet_pytorch",
    family="EfficientNet",
    separator=".",
    layers={
        ("conv", "stem"): "_conv_stem",
        ("norm", "stem"): "_bn0",
        ("conv", "expand"): _BLOCK + "_expand_conv",
        ("norm", "expand"): _BLOCK + "_bn0",
        ("conv", "depthwise"): _BLOCK + "_depthwise_conv",
        ("norm", "depthwise"): _BLOCK + "_bn1",
        ("conv", "reduce"): _BLOCK + "_se_reduce",
        ("conv", "widen"): _BLOCK + "_se_expand",
        ("conv", "project"): _BLOCK + "_project_conv",
        ("norm", "project"): _BLOCK + "_bn2",
        ("conv", "top"): "_conv_head",
        ("norm", "top"): "_bn1",
        ("dense", "head"): "_fc",
    },
    tensors=_TENSORS,
)

PYTORCH_NAMINGS = (*_TIMM, _LUKEMELAS)
