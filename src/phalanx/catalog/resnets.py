"""ResNet and ResNeXt: depths, widths and strides, from which the networks are built.

Sources: He et al. 2015 (sizes, shortcut types A, B and C), Xie et al. 2016 (ResNeXt), and for
the fast ResNet-9 D. Page's entry to the DAWNBench competition of 2018.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from phalanx.catalog.variant import Variant


@dataclass(frozen=True)
class Block:
    """One residual block: its position, channels and stride."""

    stage: int  # from 1, as in layer1
    index: int  # from 0
    channels_in: int
    width: int
    channels_out: int
    stride: int

    @property
    def unit(self) -> str:
        """The name that splits and reports use."""
        return f"layer{self.stage}/{self.index}"


@dataclass(frozen=True, kw_only=True)
class ResNetVariant(Variant):
    """One size of ResNet or ResNeXt."""

    family: ClassVar[str] = "ResNet"
    block: str  # "basic": 3x3, 3x3; "bottleneck": 1x1, 3x3, 1x1
    depths: tuple[int, ...]  # blocks per stage
    widths: tuple[int, ...]  # channels inside the blocks of each stage, before groups widen them
    stem: str  # "large": 7x7 stride 2 and max-pool; "small": 3x3
    groups: int = 1  # of the 3x3 in a bottleneck: ResNeXt's cardinality
    group_width: int | None = None  # channels per group in the first stage
    shortcut: str = "B"  # A: slice and pad with zeros; B: project where shapes differ; C: always
    project_first: bool = False  # a projection in stage 1's first block even if shapes agree
    stride_in: str = "3x3"  # of a bottleneck: "3x3" (v1.5) or "1x1" (v1, as in the paper)

    @property
    def stem_width(self) -> int:
        """Output channels of the stem."""
        return self.widths[0]

    @property
    def expansion(self) -> int:
        """Output channels of a block, per channel of its stage's width."""
        return {"basic": 1, "bottleneck": 4}[self.block]

    @property
    def features(self) -> int:
        """Input channels of the classifier."""
        return self.widths[-1] * self.expansion

    @property
    def blocks(self) -> list[Block]:
        """The residual blocks in order; every stage but the first halves the image."""
        found = []
        channels = self.stem_width
        per_group = self.group_width or self.widths[0]
        for stage, (depth, width) in enumerate(zip(self.depths, self.widths, strict=True), start=1):
            inner = width * per_group * self.groups // self.widths[0]
            out = width * self.expansion
            for index in range(depth):
                stride = 2 if stage > 1 and index == 0 else 1
                found.append(Block(stage, index, channels, inner, out, stride))
                channels = out
        return found

    @property
    def units(self) -> tuple[str, ...]:
        """Stem, every residual block, head."""
        return ("stem", *(block.unit for block in self.blocks), "head")

    @property
    def halvings(self) -> int:
        """Twice in a large stem, then once at every stage but the first."""
        return len(self.depths) - 1 + (2 if self.stem == "large" else 0)

    def norm_channels(self) -> dict[str, int]:
        """Every norm layer's path and channels."""
        found = {"bn1": self.stem_width}
        for block in self.blocks:
            path = f"layer{block.stage}.{block.index}"
            inner = {"basic": 1, "bottleneck": 2}[self.block]
            found |= {f"{path}.bn{place}": block.width for place in range(1, inner + 1)}
            found[f"{path}.bn{inner + 1}"] = block.channels_out
        return found

    def projects(self, block: Block) -> bool:
        """Whether a block's shortcut has weights."""
        if self.shortcut == "C" or (self.project_first and block.unit == "layer1/0"):
            return True
        changes = block.stride > 1 or block.channels_in != block.channels_out
        return self.shortcut == "B" and changes


@dataclass(frozen=True, kw_only=True)
class FastResNetVariant(Variant):
    """A shallow, wide network that learns CIFAR in seconds."""

    family: ClassVar[str] = "ResNet-9"
    widths: tuple[int, ...] = (64, 128, 256, 512)  # of the stem and each stage
    residual: tuple[bool, ...] = (True, False, True)  # stages with a residual block
    logit_scale: float = 0.125

    @property
    def units(self) -> tuple[str, ...]:
        """Stem, then per stage a convolution with a pool and perhaps a residual block, head."""
        stages = [
            f"layer{stage}/{index}"
            for stage, extra in enumerate(self.residual, start=1)
            for index in range(1 + extra)
        ]
        return ("stem", *stages, "head")

    @property
    def halvings(self) -> int:
        """Once per stage."""
        return len(self.residual)

    @property
    def smallest_image(self) -> int:
        """Its pools round down: each needs two pixels."""
        return 2**self.halvings

    def norm_channels(self) -> dict[str, int]:
        """Every norm layer's path and channels."""
        found = {"bn1": self.widths[0]}
        for stage, extra in enumerate(self.residual, start=1):
            width = self.widths[stage]
            found[f"layer{stage}.0.bn1"] = width
            if extra:
                found |= {f"layer{stage}.1.bn1": width, f"layer{stage}.1.bn2": width}
        return found


def _cifar_resnet(block: str, blocks: int) -> ResNetVariant:
    """The paper's CIFAR network of three stages: 6n+2 layers, or 9n+2 with bottlenecks."""
    return ResNetVariant(
        block=block,
        depths=(blocks,) * 3,
        widths=(16, 32, 64),
        stem="small",
        image_size=32,
        classes=10,
        shortcut="A" if block == "basic" else "B",
    )


def _imagenet_resnet(block: str, *depths: int) -> ResNetVariant:
    """The paper's ImageNet network of four stages."""
    return ResNetVariant(
        block=block, depths=depths, widths=(64, 128, 256, 512), stem="large", image_size=224
    )


def _resnext(variant: ResNetVariant, group_width: int = 4) -> ResNetVariant:
    """The ResNeXt of the same depths, with 32 groups."""
    return replace(variant, groups=32, group_width=group_width)


_BASIC = {
    10: _imagenet_resnet("basic", 1, 1, 1, 1),
    18: _imagenet_resnet("basic", 2, 2, 2, 2),
    34: _imagenet_resnet("basic", 3, 4, 6, 3),
}
_BOTTLENECK = {
    14: _imagenet_resnet("bottleneck", 1, 1, 1, 1),
    26: _imagenet_resnet("bottleneck", 2, 2, 2, 2),
    50: _imagenet_resnet("bottleneck", 3, 4, 6, 3),
    101: _imagenet_resnet("bottleneck", 3, 4, 23, 3),
    152: _imagenet_resnet("bottleneck", 3, 8, 36, 3),
}
_CIFAR_BASIC = {6 * n + 2: _cifar_resnet("basic", n) for n in (1, 2, 3, 5, 7, 9, 18)}
_CIFAR_BOTTLENECK = {9 * n + 2: _cifar_resnet("bottleneck", n) for n in (1, 3, 4, 5, 6, 7)}

RESNETS: dict[str, Variant] = {
    **{f"resnet{size}": variant for size, variant in (_BASIC | _BOTTLENECK).items()},
    **{
        f"resnet{size}" + "_small" * (size in _BOTTLENECK): variant
        for size, variant in _CIFAR_BASIC.items()
    },
    **{
        f"resnet{size}" + "_bottleneck" * (size in _CIFAR_BASIC): variant
        for size, variant in _CIFAR_BOTTLENECK.items()
    },
    "resnet18_small": replace(_BASIC[18], stem="small", image_size=32, classes=10),
    "resnet9": FastResNetVariant(image_size=32, classes=10),
}

RESNEXTS: dict[str, Variant] = {
    **{f"resnext{size}_32x4d": _resnext(variant) for size, variant in _BOTTLENECK.items()},
    "resnext101_32x8d": _resnext(_BOTTLENECK[101], group_width=8),
    **{f"resnext{size}_32x4d": _resnext(variant) for size, variant in _CIFAR_BOTTLENECK.items()},
    "resnext29_32x4d_wide": replace(_resnext(_CIFAR_BOTTLENECK[29]), widths=(64, 128, 256)),
}
