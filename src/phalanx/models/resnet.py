"""ResNet and ResNeXt for large and small images, module tree and parameter names as timm's."""

import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.catalog.resnets import Block, ResNetVariant
from phalanx.models.layers import Dropout, GlobalPool, Kit, drop_path, kit_of, path_rate
from phalanx.models.units import UnitModel


class ResidualBlock(nn.Module):
    """What the two kinds of block share: the shortcut, and the chance of being skipped."""

    downsample: nn.Module
    rate: float

    @property
    def last(self) -> tuple[nn.Module, nn.Module]:
        """The convolution and the norm right before the shortcut is added."""
        raise NotImplementedError


class BasicBlock(ResidualBlock):
    """3x3 (strided), 3x3, plus the shortcut."""

    def __init__(self, block: Block, variant: ResNetVariant, *, rate: float = 0.0):
        super().__init__()
        kit = kit_of(variant)
        self.conv1 = kit.conv(block.channels_in, block.width, 3, stride=block.stride)
        self.bn1 = kit.norm(block.width)
        self.act1 = nn.ReLU(inplace=True)
        self.conv2 = kit.conv(block.width, block.channels_out, 3)
        self.bn2 = kit.norm(block.channels_out)
        self.act2 = nn.ReLU(inplace=True)
        self.downsample = build_shortcut(block, variant, kit)
        self.rate = rate

    @property
    def last(self) -> tuple[nn.Module, nn.Module]:
        """The convolution and the norm right before the shortcut is added."""
        return self.conv2, self.bn2

    def forward(self, x: Tensor, chances: Tensor | None = None) -> Tensor:
        """One residual step."""
        inner = self.act1(self.bn1(self.conv1(x)))
        inner = self.bn2(self.conv2(inner))
        return self.act2(drop_path(inner, self.rate, chances) + self.downsample(x))


class Bottleneck(ResidualBlock):
    """1x1 narrow, 3x3, 1x1 widen, plus the shortcut.

    The stride sits on the 3x3 ("v1.5") unless the variant says otherwise: the paper has it on the
    first 1x1 ("v1"), which throws three quarters of the input away before anything looks at it.
    """

    def __init__(self, block: Block, variant: ResNetVariant, *, rate: float = 0.0):
        super().__init__()
        kit = kit_of(variant)
        early, late = (block.stride, 1) if variant.stride_in == "1x1" else (1, block.stride)
        self.conv1 = kit.conv(block.channels_in, block.width, 1, stride=early)
        self.bn1 = kit.norm(block.width)
        self.act1 = nn.ReLU(inplace=True)
        self.conv2 = kit.conv(block.width, block.width, 3, stride=late, groups=variant.groups)
        self.bn2 = kit.norm(block.width)
        self.act2 = nn.ReLU(inplace=True)
        self.conv3 = kit.conv(block.width, block.channels_out, 1)
        self.bn3 = kit.norm(block.channels_out)
        self.act3 = nn.ReLU(inplace=True)
        self.downsample = build_shortcut(block, variant, kit)
        self.rate = rate

    @property
    def last(self) -> tuple[nn.Module, nn.Module]:
        """The convolution and the norm right before the shortcut is added."""
        return self.conv3, self.bn3

    def forward(self, x: Tensor, chances: Tensor | None = None) -> Tensor:
        """One residual step."""
        inner = self.act1(self.bn1(self.conv1(x)))
        inner = self.act2(self.bn2(self.conv2(inner)))
        inner = self.bn3(self.conv3(inner))
        return self.act3(drop_path(inner, self.rate, chances) + self.downsample(x))


_BLOCKS: dict[str, type[BasicBlock | Bottleneck]] = {"basic": BasicBlock, "bottleneck": Bottleneck}


class _SliceAndPad(nn.Module):
    """Shortcut type A: every stride-th pixel, and zeros for the channels that are new."""

    def __init__(self, stride: int, new_channels: int):
        super().__init__()
        self.stride, self.new_channels = stride, new_channels

    def forward(self, x: Tensor) -> Tensor:
        """No weights: the input itself, thinned out and padded."""
        thinned = x[:, :, :: self.stride, :: self.stride]
        return F.pad(thinned, (0, 0, 0, 0, 0, self.new_channels))


def build_shortcut(block: Block, variant: ResNetVariant, kit: Kit) -> nn.Module:
    """A strided 1x1 where the variant projects, else the input itself, made to fit."""
    if variant.projects(block):
        project = kit.conv(block.channels_in, block.channels_out, 1, stride=block.stride)
        return nn.Sequential(project, kit.norm(block.channels_out))
    if block.stride == 1 and block.channels_in == block.channels_out:
        return nn.Identity()
    return _SliceAndPad(block.stride, block.channels_out - block.channels_in)


class ResNet(UnitModel):
    """Stem, stages of residual blocks, mean over the image, one linear layer."""

    def __init__(self, variant: ResNetVariant, *, num_classes: int):
        super().__init__()
        kit, width = kit_of(variant), variant.stem_width
        large = variant.stem == "large"
        self.conv1 = kit.conv(3, width, 7, stride=2) if large else kit.conv(3, width, 3)
        self.bn1 = kit.norm(width)
        self.act1 = nn.ReLU(inplace=True)
        self.maxpool = kit.max_pool() if large else nn.Identity()
        self.units["stem"] = ("conv1", "bn1", "act1", "maxpool")
        blocks = variant.blocks
        for place, block in enumerate(blocks):
            self._hang(block, variant, rate=path_rate(variant, place, len(blocks)))
        self.global_pool = GlobalPool()
        self.drop = Dropout(variant.dropout)
        self.fc = nn.Linear(variant.features, num_classes)
        self.units["head"] = ("global_pool", "drop", "fc")
        if variant.dropout:
            self.chances["drop"] = variant.features

    def _hang(self, block: Block, variant: ResNetVariant, *, rate: float) -> None:
        stage = f"layer{block.stage}"
        if block.index == 0:
            self.add_module(stage, nn.Sequential())
        module = _BLOCKS[variant.block](block, variant, rate=rate)
        self.get_submodule(stage).add_module(str(block.index), module)
        path = f"{stage}.{block.index}"
        self.units[block.unit] = (path,)
        if rate:
            self.chances[path] = 1
