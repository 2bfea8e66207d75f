"""PyTorch's names: timm's and torchvision's, which are ours, and those of efficientnet_pytorch."""

from phalanx.port_weights.model_layers import COUNTER
from phalanx.port_weights.naming import NORM_TENSORS, Naming

_TENSORS = {
    "conv": {"weight": "weight", "bias": "bias"},
    "norm": {tensor: tensor for tensor in NORM_TENSORS if tensor != COUNTER} | {COUNTER: COUNTER},
    "dense": {"weight": "weight", "bias": "bias"},
}
_RESNET_PARTS = ("stem", "block", "projection")
_MBCONV_PARTS = ("stem", "expand", "depthwise", "reduce", "widen", "project", "top")
_ROLES = {"ResNet": _RESNET_PARTS, "EfficientNet": _MBCONV_PARTS}

_TIMM = tuple(
    Naming(
        title=f"timm's and torchvision's names of {family}",
        program="pytorch",
        family=family,
        separator=".",
        layers={(kind, part): "{path}" for kind in ("conv", "norm") for part in parts}
        | {("dense", "head"): "{path}"},
        tensors=_TENSORS,
    )
    for family, parts in _ROLES.items()
)
_BLOCK = "_blocks.{number}."
_LUKEMELAS = Naming(
    title="efficientnet_pytorch's names",
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
