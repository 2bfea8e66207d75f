"""EfficientNet: one table of seven stages, scaled in width and depth to all its sizes.

Sources: Tan and Le 2019 (B0 to B7) and the authors' EfficientNet-Lite of 2020: no
squeeze-and-excite, ReLU6, and a stem, first stage, last stage and top that do not scale.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from phalanx.catalog.variant import Variant

_CHANNEL_STEP = 8


class _Stage(NamedTuple):
    """Blocks at one resolution."""

    kernel: int
    repeats: int
    channels_out: int
    stride: int


_STAGES = (
    _Stage(3, 1, 16, 1),
    _Stage(3, 2, 24, 2),
    _Stage(5, 2, 40, 2),
    _Stage(3, 3, 80, 2),
    _Stage(5, 3, 112, 1),
    _Stage(5, 4, 192, 2),
    _Stage(3, 1, 320, 1),
)
_STEM_CHANNELS, _TOP_CHANNELS = 32, 1280


@dataclass(frozen=True)
class InvertedBlock:
    """One block: 1x1 expansion, grouped or depthwise conv, squeeze-and-excite, 1x1 projection."""

    stage: int  # from 0, as in blocks.0
    index: int  # from 0
    channels_in: int
    width: int  # expanded channels; in the first stage, the input channels
    channels_out: int
    kernel: int
    stride: int
    groups: int  # of the middle convolution
    squeeze_width: int  # hidden channels of squeeze-and-excite; 0 for none

    @property
    def unit(self) -> str:
        """The name that splits and reports use."""
        return f"blocks/{self.stage}/{self.index}"

    @property
    def widens(self) -> bool:
        """Whether it begins with a 1x1 expansion; the first stage has none."""
        return self.stage > 0

    @property
    def skips(self) -> bool:
        """Whether its input is added to its output."""
        return self.stride == 1 and self.channels_in == self.channels_out


@dataclass(frozen=True, kw_only=True)
class EfficientNetVariant(Variant):
    """One size of EfficientNet."""

    family: ClassVar[str] = "EfficientNet"
    head: str = "classifier"
    width: float
    depth: float
    lite: bool = False
    small: bool = False  # for CIFAR: the stem and the second stage keep the image's size
    expand_ratio: int = 6
    group_dim: int = 1  # channels per group of the middle convolution; 1: depthwise

    @property
    def stem_channels(self) -> int:
        """Output channels of the stem."""
        return _STEM_CHANNELS if self.lite else _round_channels(_STEM_CHANNELS * self.width)

    @property
    def features(self) -> int:
        """Input channels of the classifier."""
        return _TOP_CHANNELS if self.lite else _round_channels(_TOP_CHANNELS * self.width)

    @property
    def blocks(self) -> list[InvertedBlock]:
        """The blocks in order."""
        found = []
        channels = self.stem_channels
        for number, stage in enumerate(_STAGES):
            out = _round_channels(stage.channels_out * self.width)
            stride = 1 if self.small and number == 1 else stage.stride
            # Lite does not scale the first and the last stage
            fixed = self.lite and number in (0, len(_STAGES) - 1)
            for index in range(stage.repeats if fixed else math.ceil(stage.repeats * self.depth)):
                inner = channels * (self.expand_ratio if number else 1)
                found.append(
                    InvertedBlock(
                        stage=number,
                        index=index,
                        channels_in=channels,
                        width=inner,
                        channels_out=out,
                        kernel=stage.kernel,
                        stride=stride if index == 0 else 1,
                        groups=max(inner // self.group_dim, 1),
                        squeeze_width=0 if self.lite else max(1, channels // 4),
                    )
                )
                channels = out
        return found

    @property
    def units(self) -> tuple[str, ...]:
        """Stem, every block, head."""
        return ("stem", *(block.unit for block in self.blocks), "head")

    @property
    def halvings(self) -> int:
        """Once in the stem, except in small variants, then wherever the table says."""
        return len([b for b in self.blocks if b.stride == 2]) + (not self.small)

    def norm_channels(self) -> dict[str, int]:
        """Every norm layer's path and channels."""
        found = {"bn1": self.stem_channels}
        for block in self.blocks:
            path = f"blocks.{block.stage}.{block.index}"
            widths = [block.width] * (1 + block.widens) + [block.channels_out]
            found |= {f"{path}.bn{place}": width for place, width in enumerate(widths, start=1)}
        return found | {"bn2": self.features}


def _round_channels(channels: float) -> int:
    """The nearest multiple of eight, but at least nine tenths of the given number."""
    rounded = max(_CHANNEL_STEP, int(channels + _CHANNEL_STEP / 2) // _CHANNEL_STEP * _CHANNEL_STEP)
    return rounded + _CHANNEL_STEP if rounded < 0.9 * channels else rounded


def _row(width: float, depth: float, dropout: float, image_size: int) -> EfficientNetVariant:
    """A row of the paper's table."""
    return EfficientNetVariant(
        width=width, depth=depth, dropout=dropout, image_size=image_size, drop_path=0.2
    )


EFFICIENTNETS: dict[str, Variant] = {
    "efficientnet_b0": _row(1.0, 1.0, 0.2, 224),
    "efficientnet_b1": _row(1.0, 1.1, 0.2, 240),
    "efficientnet_b2": _row(1.1, 1.2, 0.3, 260),
    "efficientnet_b3": _row(1.2, 1.4, 0.3, 300),
    "efficientnet_b4": _row(1.4, 1.8, 0.4, 380),
    "efficientnet_b5": _row(1.6, 2.2, 0.4, 456),
    "efficientnet_b6": _row(1.8, 2.6, 0.5, 528),
    "efficientnet_b7": _row(2.0, 3.1, 0.5, 600),
    "efficientnet_cifar": replace(_row(0.5, 1.0, 0.0, 32), small=True, classes=10),
    "efficientnet_lite0": replace(_row(1.0, 1.0, 0.2, 224), lite=True),
    "efficientnet_lite1": replace(_row(1.0, 1.1, 0.2, 240), lite=True),
    "efficientnet_lite2": replace(_row(1.1, 1.2, 0.3, 260), lite=True),
}
