"""EfficientNet and EfficientNet-Lite, module tree and parameter names as timm's."""

from torch import Tensor, nn

from phalanx.catalog.efficientnets import (
    EfficientNetVariant,
    InvertedBlock,
)
from phalanx.models.layers import Dropout, GlobalPool, drop_path, kit_of, path_rate
from phalanx.models.units import UnitModel


class _SqueezeExcite(nn.Module):
    """Weighs each channel by what the whole image holds: mean, narrow, widen, sigmoid."""

    def __init__(self, channels: int, squeezed: int):
        super().__init__()
        self.conv_reduce = nn.Conv2d(channels, squeezed, 1)
        self.act1 = nn.SiLU(inplace=True)
        self.conv_expand = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x, channel by channel more or less of it."""
        weight = self.conv_reduce(x.mean((2, 3), keepdim=True))
        return x * self.conv_expand(self.act1(weight)).sigmoid()


def _activation(variant: EfficientNetVariant) -> nn.Module:
    """SiLU, or the ReLU6 of Lite, which 8-bit hardware is good at."""
    return nn.ReLU6(inplace=True) if variant.lite else nn.SiLU(inplace=True)


def _squeeze_excite(block: InvertedBlock) -> nn.Module:
    """The block's channel weighing; Lite has none."""
    return (
        _SqueezeExcite(block.width, block.squeeze_width) if block.squeeze_width else nn.Identity()
    )


class SeparableBlock(nn.Module):
    """The first stage's block: filter, weigh, mix by a 1x1."""

    def __init__(self, block: InvertedBlock, variant: EfficientNetVariant, *, rate: float = 0.0):
        super().__init__()
        kit, width = kit_of(variant), block.width
        self.conv_dw = kit.conv(
            width, width, block.kernel, stride=block.stride, groups=block.groups
        )
        self.bn1 = kit.norm(width)
        self.act1 = _activation(variant)
        self.se = _squeeze_excite(block)
        self.conv_pw = kit.conv(width, block.channels_out, 1)
        self.bn2 = kit.norm(block.channels_out)
        self.skips, self.rate = block.skips, rate

    def forward(self, x: Tensor, chances: Tensor | None = None) -> Tensor:
        """One step, with the input added where shapes agree."""
        inner = self.se(self.act1(self.bn1(self.conv_dw(x))))
        inner = self.bn2(self.conv_pw(inner))
        return x + drop_path(inner, self.rate, chances) if self.skips else inner


class WideningBlock(nn.Module):
    """Widen by a 1x1, filter, weigh, narrow by a 1x1."""

    def __init__(self, block: InvertedBlock, variant: EfficientNetVariant, *, rate: float = 0.0):
        super().__init__()
        kit, width = kit_of(variant), block.width
        self.conv_pw = kit.conv(block.channels_in, width, 1)
        self.bn1 = kit.norm(width)
        self.act1 = _activation(variant)
        self.conv_dw = kit.conv(
            width, width, block.kernel, stride=block.stride, groups=block.groups
        )
        self.bn2 = kit.norm(width)
        self.act2 = _activation(variant)
        self.se = _squeeze_excite(block)
        self.conv_pwl = kit.conv(width, block.channels_out, 1)
        self.bn3 = kit.norm(block.channels_out)
        self.skips, self.rate = block.skips, rate

    def forward(self, x: Tensor, chances: Tensor | None = None) -> Tensor:
        """One step, with the input added where shapes agree."""
        inner = self.act1(self.bn1(self.conv_pw(x)))
        inner = self.se(self.act2(self.bn2(self.conv_dw(inner))))
        inner = self.bn3(self.conv_pwl(inner))
        return x + drop_path(inner, self.rate, chances) if self.skips else inner


class EfficientNet(UnitModel):
    """Stem, seven stages of inverted blocks, a wide 1x1, mean over the image, linear."""

    def __init__(self, variant: EfficientNetVariant, *, num_classes: int):
        super().__init__()
        kit = kit_of(variant)
        stride = 1 if variant.small else 2
        self.conv_stem = kit.conv(3, variant.stem_channels, 3, stride=stride)
        self.bn1 = kit.norm(variant.stem_channels)
        self.act1 = _activation(variant)
        self.units["stem"] = ("conv_stem", "bn1", "act1")
        blocks = variant.blocks
        self.blocks = nn.Sequential()
        for place, block in enumerate(blocks):
            self._hang(block, variant, rate=path_rate(variant, place, len(blocks)))
        self.conv_head = kit.conv(blocks[-1].channels_out, variant.features, 1)
        self.bn2 = kit.norm(variant.features)
        self.act2 = _activation(variant)
        self.global_pool = GlobalPool()
        self.drop = Dropout(variant.dropout)
        self.classifier = nn.Linear(variant.features, num_classes)
        head = ("conv_head", "bn2", "act2", "global_pool", "drop", "classifier")
        self.units["head"] = head
        if variant.dropout:
            self.chances["drop"] = variant.features

    def _hang(self, block: InvertedBlock, variant: EfficientNetVariant, *, rate: float) -> None:
        if block.index == 0:
            self.blocks.add_module(str(block.stage), nn.Sequential())
        kind = WideningBlock if block.widens else SeparableBlock
        stage = self.blocks.get_submodule(str(block.stage))
        stage.add_module(str(block.index), kind(block, variant, rate=rate))
        path = f"blocks.{block.stage}.{block.index}"
        self.units[block.unit] = (path,)
        if rate and block.skips:
            self.chances[path] = 1
