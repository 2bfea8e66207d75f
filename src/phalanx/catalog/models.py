"""The models Phalanx knows by name: depths, widths and strides, from which they are built.

A unit is the smallest part a model is cut into: the stem, one residual block, the head.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ResNetVariant:
    """One size of the ResNet family."""

    block: str  # "basic": 3x3, 3x3; "bottleneck": 1x1, 3x3, 1x1
    depths: tuple[int, ...]  # blocks per stage
    widths: tuple[int, ...]  # channels inside the blocks of each stage
    stem: str  # "large": 7x7 stride 2 and max-pool; "small": 3x3
    image_size: int  # what the published figures were measured at

    @property
    def stem_width(self) -> int:
        """Channels the stem hands to the first stage."""
        return self.widths[0]

    @property
    def expansion(self) -> int:
        """Channels that leave a block, per channel inside it."""
        return {"basic": 1, "bottleneck": 4}[self.block]

    @property
    def features(self) -> int:
        """Channels the classifier sees."""
        return self.widths[-1] * self.expansion


@dataclass(frozen=True)
class Block:
    """One residual block: its place, channels and stride."""

    stage: int  # from 1, as in layer1
    index: int  # from 0
    channels_in: int
    width: int
    channels_out: int
    stride: int

    @property
    def unit(self) -> str:
        """The name splits and reports use."""
        return f"layer{self.stage}/{self.index}"


def blocks_of(variant: ResNetVariant) -> Iterator[Block]:
    """The residual blocks in order; every stage but the first halves the image."""
    channels = variant.stem_width
    for stage, (depth, width) in enumerate(
        zip(variant.depths, variant.widths, strict=True), start=1
    ):
        for index in range(depth):
            stride = 2 if stage > 1 and index == 0 else 1
            out = width * variant.expansion
            yield Block(stage, index, channels, width, out, stride)
            channels = out


def small_resnet(blocks: int) -> ResNetVariant:
    """The paper's CIFAR network of 6n+2 layers."""
    return ResNetVariant(
        block="basic", depths=(blocks,) * 3, widths=(16, 32, 64), stem="small", image_size=32
    )


def large_resnet(block: str, *depths: int) -> ResNetVariant:
    """The paper's ImageNet network of four stages."""
    return ResNetVariant(
        block=block, depths=depths, widths=(64, 128, 256, 512), stem="large", image_size=224
    )


RESNETS: dict[str, ResNetVariant] = {
    "resnet8": small_resnet(1),
    "resnet20": small_resnet(3),
    "resnet18": large_resnet("basic", 2, 2, 2, 2),
    "resnet50": large_resnet("bottleneck", 3, 4, 6, 3),
}

MODELS: dict[str, ResNetVariant] = {**RESNETS}
