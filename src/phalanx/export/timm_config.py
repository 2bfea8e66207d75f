"""config.json of a timm folder: which of timm's networks the weights are for, and its images."""

import json
from typing import Any

from phalanx.assemble.dataset_summary import Preprocessing
from phalanx.catalog.efficientnets import EfficientNetVariant
from phalanx.catalog.resnets import ResNetVariant
from phalanx.catalog.variant import Variant
from phalanx.errors import ConfigError
from phalanx.export.metadata import ModelMetadata

_RESNETS = {  # timm's, by block, depths, groups and their width
    ("basic", (2, 2, 2, 2), 1, None): "resnet18",
    ("basic", (3, 4, 6, 3), 1, None): "resnet34",
    ("bottleneck", (2, 2, 2, 2), 1, None): "resnet26",
    ("bottleneck", (3, 4, 6, 3), 1, None): "resnet50",
    ("bottleneck", (3, 4, 23, 3), 1, None): "resnet101",
    ("bottleneck", (3, 8, 36, 3), 1, None): "resnet152",
    ("bottleneck", (3, 4, 6, 3), 32, 4): "resnext50_32x4d",
    ("bottleneck", (3, 4, 23, 3), 32, 4): "resnext101_32x4d",
    ("bottleneck", (3, 4, 23, 3), 32, 8): "resnext101_32x8d",
}
# networks whose depths and groups can be changed
_NEAREST = {"basic": "resnet18", "bottleneck": "resnet50"}
_TIMM_EPS, _TIMM_GROUPS = 1e-5, 32
_EXPAND_RATIO = 6


def format_timm_config(variant: Variant, metadata: ModelMetadata) -> str:
    """The text of config.json; the network must be one of timm's."""
    assert isinstance(variant, ResNetVariant | EfficientNetVariant)
    if isinstance(variant, ResNetVariant):
        architecture, args = _name_resnet(variant)
    else:
        architecture, args = _name_efficientnet(variant, metadata.model)
    config = {
        "architecture": architecture,
        "num_classes": len(metadata.classes),
        "num_features": variant.features,
        "global_pool": "avg",
        "model_args": args,
        "label_names": list(metadata.classes),
        "pretrained_cfg": {
            **_describe_images(metadata.preprocessing),
            "custom_load": False,
            "fixed_input_size": False,
            "num_classes": len(metadata.classes),
            "first_conv": "conv1" if isinstance(variant, ResNetVariant) else "conv_stem",
            "classifier": variant.head,
        },
    }
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def refuse_unknown_to_timm(model: str, variant: Variant, normalization: str) -> None:
    """Raise ConfigError if timm lacks the network or its preprocessing."""
    problem = _find_problem(variant, normalization)
    if problem:
        raise ConfigError(f"--format timm: {model}: {problem}; use --format safetensors or onnx")


def _find_problem(variant: Variant, normalization: str) -> str:
    """Why timm lacks the network; empty if it has it."""
    norm = variant.norm
    problems = {
        "its norm is none": norm.type == "none",
        "its group norms are interleaved": norm.layout == "interleaved",
        "images are normalised one by one": normalization == "per-image",
    }
    match variant:
        case ResNetVariant():
            problems |= {
                "timm has no network with its stem for small images": variant.stem != "large",
                "timm strides in the 3x3 alone": variant.stride_in != "3x3",
                f"timm has no shortcuts of type {variant.shortcut}": variant.shortcut != "B",
                "timm has no such projection in stage 1": variant.project_first
                and variant.block == "basic",
                "timm pads its ResNets evenly": variant.padding != "symmetric",
                f"timm's norms have an epsilon of {_TIMM_EPS}": norm.eps != _TIMM_EPS,
                f"timm's group norms have {_TIMM_GROUPS} groups": norm.type == "group"
                and norm.groups != _TIMM_GROUPS,
            }
        case EfficientNetVariant():
            problems |= {
                "timm has no network with its stem for small images": variant.small,
                f"timm widens {_EXPAND_RATIO} times": variant.expand_ratio != _EXPAND_RATIO,
                "timm's EfficientNets have batch norms": norm.type != "batch",
                "timm's Lite networks have depthwise filters": variant.lite
                and variant.group_dim != 1,
            }
        case _:
            problems["timm has no such network"] = True
    return next((problem for problem, holds in problems.items() if holds), "")


def _name_resnet(variant: ResNetVariant) -> tuple[str, dict[str, Any]]:
    """timm's name of a ResNet, and the values that differ from that model's."""
    key = (variant.block, variant.depths, variant.groups, variant.group_width)
    args: dict[str, Any] = {"norm_layer": "groupnorm"} if variant.norm.type == "group" else {}
    if key in _RESNETS:
        return _RESNETS[key], args
    args["layers"] = list(variant.depths)
    if variant.groups > 1:
        args |= {"cardinality": variant.groups, "base_width": variant.group_width}
    return _NEAREST[variant.block], args


def _name_efficientnet(variant: EfficientNetVariant, model: str) -> tuple[str, dict[str, Any]]:
    """timm's name of an EfficientNet, which is ours too, and the values that differ from it."""
    args: dict[str, Any] = {}
    if variant.norm.eps != _TIMM_EPS:
        args["bn_eps"] = variant.norm.eps
    if variant.padding == "same":
        args["pad_type"] = "same"
    if variant.group_dim != 1:
        args["group_size"] = variant.group_dim
    return model, args


def _describe_images(how: Preprocessing) -> dict[str, Any]:
    """timm's preprocessing that is nearest to ours."""
    means_and_stds = {
        "mean": (how.mean, (1 / 255,) * 3),
        "none": ((0.0,) * 3, (1.0,) * 3),
    }
    mean, std = means_and_stds.get(how.normalization, (how.mean, how.std))
    crops = how.augment == "resized-crop"
    return {
        "input_size": [3, how.image_size, how.image_size],
        "interpolation": "bilinear",
        "crop_pct": how.eval_crop if crops else 1.0,
        "crop_mode": "center" if crops else "squash",
        "mean": list(mean),
        "std": list(std),
    }
