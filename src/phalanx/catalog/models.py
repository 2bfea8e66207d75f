"""The models that Phalanx knows by name, their older names, and how large each one is.

The sizes are in sizes.json, so that they are known without torch. `make docs` recounts them.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from phalanx.catalog.airbench import AIRBENCHES, AirbenchVariant
from phalanx.catalog.efficientnets import EFFICIENTNETS, EfficientNetVariant
from phalanx.catalog.resnets import RESNETS, RESNEXTS, FastResNetVariant, ResNetVariant
from phalanx.catalog.variant import OwnVariant, Variant

SIZES_FILE = resources.files("phalanx") / "catalog" / "sizes.json"

MODELS: dict[str, Variant] = {**RESNETS, **RESNEXTS, **EFFICIENTNETS, **AIRBENCHES}

OLD_NAMES: dict[str, str] = {  # as the applications before Phalanx spelt --model
    **{f"cifar_resnet{size}": f"resnet{size}" for size in (8, 20, 32, 44, 56)},
    **{f"resnext{size}": f"resnext{size}_32x4d" for size in (14, 26, 50, 101, 152)},
    **{f"efficientnet-b{size}": f"efficientnet_b{size}" for size in range(8)},
    "efficientnet-cifar": "efficientnet_cifar",
}

SMALL_NETWORKS = {"resnet14": "resnet14_small"}  # what an ambiguous name means on small images


def find_old_names(name: str) -> list[str]:
    """The older names of a model."""
    return [old for old, today in OLD_NAMES.items() if today == name]


@dataclass(frozen=True)
class ModelSize:
    """Parameters and cost of a model, for its own image size and classes."""

    parameters: int
    macs: int  # multiply-adds of one image


@cache
def read_model_sizes() -> dict[str, ModelSize]:
    """The sizes of all models that come with Phalanx."""
    text = SIZES_FILE.read_text(encoding="utf-8")
    return {name: ModelSize(**row) for name, row in json.loads(text).items()}


def describe_variant(variant: Variant) -> str:
    """What a model is, in a few words.

    >>> describe_variant(MODELS["resnext29_32x4d"]), describe_variant(MODELS["efficientnet_b4"])
    ('small bottleneck 3-3-3 32x4', 'width 1.4, depth 1.8')
    """
    match variant:
        case ResNetVariant():
            depths = "-".join(map(str, variant.depths))
            groups = f" {variant.groups}x{variant.group_width}" if variant.groups > 1 else ""
            return f"{'small ' * (variant.stem == 'small')}{variant.block} {depths}{groups}"
        case FastResNetVariant():
            return f"small, {len(variant.residual)} wide stages"
        case AirbenchVariant():
            return f"small, widths {'-'.join(map(str, variant.widths))}"
        case EfficientNetVariant():
            kinds = ", lite" * variant.lite + ", small" * variant.small
            return f"width {variant.width}, depth {variant.depth}{kinds}"
        case OwnVariant():
            return f"made by {variant.build}"
    return variant.family
