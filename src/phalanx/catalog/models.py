"""The models Phalanx knows by name, and the names they had before."""

from phalanx.catalog.efficientnets import EFFICIENTNETS
from phalanx.catalog.resnets import RESNETS, RESNEXTS
from phalanx.catalog.variant import Variant

MODELS: dict[str, Variant] = {**RESNETS, **RESNEXTS, **EFFICIENTNETS}

OLD_NAMES: dict[str, str] = {  # as the applications before Phalanx spelt --model
    **{f"cifar_resnet{size}": f"resnet{size}" for size in (8, 20, 32, 44, 56)},
    **{f"resnext{size}": f"resnext{size}_32x4d" for size in (14, 26, 50, 152)},
    "resnext101": "resnext101_32x8d",  # torchvision's, which the name stood for
    **{f"efficientnet-b{size}": f"efficientnet_b{size}" for size in range(8)},
    "efficientnet-cifar": "efficientnet_cifar",
}
