"""EfficientNet and EfficientNet-Lite, with timm's module tree and parameter names."""

from torch import Tensor, nn

from phalanx.catalog.efficientnets import EfficientNetVariant, InvertedBlock
from phalanx.models.layers import (
    Dropout,
    GlobalAvgPool,
    LayerFactory,
    average_over_pixels,
    drop_path,
    drop_path_rate,
)
from phalanx.models.units import UnitModel


class SqueezeExcite(nn.Module):
    """Scales each channel by a gate computed from the image's mean: 1x1, SiLU, 1x1, sigmoid."""

    def __init__(self, channels: int, squeezed: int):
        super().__init__()
        self.conv_reduce = nn.Conv2d(channels, squeezed, 1)
        self.act1 = nn.SiLU(inplace=True)
        self.conv_expand = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x with its channels scaled."""
        squeezed = self.conv_reduce(average_over_pixels(x)[:, :, None, None])
        return x * self.conv_expand(self.act1(squeezed)).sigmoid()


def _activation(variant: EfficientNetVariant) -> nn.Module:
    """SiLU, or for Lite ReLU6, which suits 8-bit hardware."""
    return nn.ReLU6(inplace=True) if variant.lite else nn.SiLU(inplace=True)


def _squeeze_excite(block: InvertedBlock) -> nn.Module:
    """The block's squeeze-and-excite; Lite has none."""
    return SqueezeExcite(block.width, block.squeeze_width) if block.squeeze_width else nn.Identity()


class DepthwiseSeparableConv(nn.Module):
    """The first stage's block: depthwise convolution, squeeze-and-excite, 1x1."""

    def __init__(self, block: InvertedBlock, variant: EfficientNetVariant, *, rate: float = 0.0):
        super().__init__()
        layers, width = LayerFactory(variant), block.width
        self.conv_dw = layers.conv(
            width, width, block.kernel, stride=block.stride, groups=block.groups
        )
        self.bn1 = layers.norm(width)
        self.act1 = _activation(variant)
        self.se = _squeeze_excite(block)
        self.conv_pw = layers.conv(width, block.channels_out, 1)
        self.bn2 = layers.norm(block.channels_out)
        self.skips, self.rate = block.skips, rate

    def forward(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """The block's output; the input is added if the shapes agree."""
        inner = self.se(self.act1(self.bn1(self.conv_dw(x))))
        inner = self.bn2(self.conv_pw(inner))
        return x + drop_path(inner, self.rate, noise) if self.skips else inner


class InvertedResidual(nn.Module):
    """1x1 expansion, depthwise convolution, squeeze-and-excite, 1x1 projection."""

    def __init__(self, block: InvertedBlock, variant: EfficientNetVariant, *, rate: float = 0.0):
        super().__init__()
        layers, width = LayerFactory(variant), block.width
        self.conv_pw = layers.conv(block.channels_in, width, 1)
        self.bn1 = layers.norm(width)
        self.act1 = _activation(variant)
        self.conv_dw = layers.conv(
            width, width, block.kernel, stride=block.stride, groups=block.groups
        )
        self.bn2 = layers.norm(width)
        self.act2 = _activation(variant)
        self.se = _squeeze_excite(block)
        self.conv_pwl = layers.conv(width, block.channels_out, 1)
        self.bn3 = layers.norm(block.channels_out)
        self.skips, self.rate = block.skips, rate

    def forward(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """The block's output; the input is added if the shapes agree."""
        inner = self.act1(self.bn1(self.conv_pw(x)))
        inner = self.se(self.act2(self.bn2(self.conv_dw(inner))))
        inner = self.bn3(self.conv_pwl(inner))
        return x + drop_path(inner, self.rate, noise) if self.skips else inner


class EfficientNet(UnitModel):
    """Stem, seven stages of inverted residual blocks, a wide 1x1, global mean pool, linear."""

    def __init__(self, variant: EfficientNetVariant, *, num_classes: int):
        super().__init__()
        layers = LayerFactory(variant)
        stride = 1 if variant.small else 2
        self.conv_stem = layers.conv(3, variant.stem_channels, 3, stride=stride)
        self.bn1 = layers.norm(variant.stem_channels)
        self.act1 = _activation(variant)
        self.units["stem"] = ("conv_stem", "bn1", "act1")
        blocks = variant.blocks
        self.blocks = nn.Sequential()
        for index, block in enumerate(blocks):
            rate = drop_path_rate(variant, index, len(blocks))
            kind = InvertedResidual if block.widens else DepthwiseSeparableConv
            path = f"blocks.{block.stage}.{block.index}"
            noise = rate > 0 and block.skips
            self.add_block(path, kind(block, variant, rate=rate), noise=noise)
        self.conv_head = layers.conv(blocks[-1].channels_out, variant.features, 1)
        self.bn2 = layers.norm(variant.features)
        self.act2 = _activation(variant)
        self.global_pool = GlobalAvgPool()
        self.drop = Dropout(variant.dropout)
        self.classifier = nn.Linear(variant.features, num_classes)
        self.units["head"] = ("conv_head", "bn2", "act2", "global_pool", "drop", "classifier")
        if variant.dropout:
            self.noise_sizes["drop"] = variant.features
