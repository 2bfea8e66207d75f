"""ResNet and ResNeXt for large and small images, with timm's module tree and parameter names.

Also the ResNet-9 for fast training on CIFAR.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.catalog.resnets import Block, FastResNetVariant, ResNetVariant
from phalanx.models.layers import (
    Dropout,
    GlobalAvgPool,
    GlobalMaxPool,
    LayerFactory,
    Scale,
    drop_path,
    drop_path_rate,
)
from phalanx.models.units import UnitModel


def _zero_last(conv: nn.Module, norm: nn.Module) -> None:
    """Zero the weight of the last layer before the sum: of the norm, else of the convolution."""
    last = conv if isinstance(norm, nn.Identity) else norm
    nn.init.zeros_(last.get_parameter("weight"))


class BasicBlock(nn.Module):
    """3x3 (strided), 3x3, plus the shortcut."""

    def __init__(self, block: Block, variant: ResNetVariant, *, rate: float = 0.0):
        super().__init__()
        layers = LayerFactory(variant)
        self.conv1 = layers.conv(block.channels_in, block.width, 3, stride=block.stride)
        self.bn1 = layers.norm(block.width)
        self.act1 = nn.ReLU(inplace=True)
        self.conv2 = layers.conv(block.width, block.channels_out, 3)
        self.bn2 = layers.norm(block.channels_out)
        self.act2 = nn.ReLU(inplace=True)
        self.downsample = build_shortcut(block, variant)
        self.rate = rate

    def zero_init_last(self) -> None:
        """Make the residual branch start at zero, so that the block is just its shortcut."""
        _zero_last(self.conv2, self.bn2)

    def forward(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """The block's output."""
        inner = self.act1(self.bn1(self.conv1(x)))
        inner = self.bn2(self.conv2(inner))
        return self.act2(drop_path(inner, self.rate, noise) + self.downsample(x))


class Bottleneck(nn.Module):
    """1x1 narrow, 3x3, 1x1 widen, plus the shortcut.

    The stride is on the 3x3 ("v1.5") unless the variant says otherwise: the paper has it on the
    first 1x1 ("v1"), which discards three quarters of the input unseen.
    """

    def __init__(self, block: Block, variant: ResNetVariant, *, rate: float = 0.0):
        super().__init__()
        layers = LayerFactory(variant)
        early, late = (block.stride, 1) if variant.stride_in == "1x1" else (1, block.stride)
        self.conv1 = layers.conv(block.channels_in, block.width, 1, stride=early)
        self.bn1 = layers.norm(block.width)
        self.act1 = nn.ReLU(inplace=True)
        self.conv2 = layers.conv(block.width, block.width, 3, stride=late, groups=variant.groups)
        self.bn2 = layers.norm(block.width)
        self.act2 = nn.ReLU(inplace=True)
        self.conv3 = layers.conv(block.width, block.channels_out, 1)
        self.bn3 = layers.norm(block.channels_out)
        self.act3 = nn.ReLU(inplace=True)
        self.downsample = build_shortcut(block, variant)
        self.rate = rate

    def zero_init_last(self) -> None:
        """Make the residual branch start at zero, so that the block is just its shortcut."""
        _zero_last(self.conv3, self.bn3)

    def forward(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """The block's output."""
        inner = self.act1(self.bn1(self.conv1(x)))
        inner = self.act2(self.bn2(self.conv2(inner)))
        inner = self.bn3(self.conv3(inner))
        return self.act3(drop_path(inner, self.rate, noise) + self.downsample(x))


_BLOCKS: dict[str, type[BasicBlock | Bottleneck]] = {"basic": BasicBlock, "bottleneck": Bottleneck}


class SliceAndPad(nn.Module):
    """Shortcut type A: every stride-th pixel, and zeros for new channels."""

    def __init__(self, stride: int, new_channels: int):
        super().__init__()
        self.stride, self.new_channels = stride, new_channels

    def forward(self, x: Tensor) -> Tensor:
        """The input, subsampled and padded; there are no weights."""
        if not x.requires_grad:
            thinned = x[:, :, :: self.stride, :: self.stride]
            return F.pad(thinned, (0, 0, 0, 0, 0, self.new_channels))
        # the same of an NHWC view, whose gradient is channels_last; see `average_over_pixels`
        thinned = x.permute(0, 2, 3, 1)[:, :: self.stride, :: self.stride]
        return F.pad(thinned, (0, self.new_channels)).permute(0, 3, 1, 2)


def build_shortcut(block: Block, variant: ResNetVariant) -> nn.Module:
    """A strided 1x1 if the variant projects, else the input, subsampled and padded if needed."""
    if variant.projects(block):
        layers = LayerFactory(variant)
        project = layers.conv(block.channels_in, block.channels_out, 1, stride=block.stride)
        return nn.Sequential(project, layers.norm(block.channels_out))
    if block.stride == 1 and block.channels_in == block.channels_out:
        return nn.Identity()
    return SliceAndPad(block.stride, block.channels_out - block.channels_in)


class ResNet(UnitModel):
    """Stem, stages of residual blocks, global mean pool, linear."""

    def __init__(self, variant: ResNetVariant, *, num_classes: int):
        super().__init__()
        layers, width = LayerFactory(variant), variant.stem_width
        large = variant.stem == "large"
        self.conv1 = layers.conv(3, width, 7, stride=2) if large else layers.conv(3, width, 3)
        self.bn1 = layers.norm(width)
        self.act1 = nn.ReLU(inplace=True)
        self.maxpool = layers.max_pool() if large else nn.Identity()
        self.units["stem"] = ("conv1", "bn1", "act1", "maxpool")
        blocks = variant.blocks
        for index, block in enumerate(blocks):
            rate = drop_path_rate(variant, index, len(blocks))
            module = _BLOCKS[variant.block](block, variant, rate=rate)
            self.add_block(f"layer{block.stage}.{block.index}", module, noise=rate > 0)
        self.global_pool = GlobalAvgPool()
        self.drop = Dropout(variant.dropout)
        self.fc = nn.Linear(variant.features, num_classes)
        self.units["head"] = ("global_pool", "drop", "fc")
        if variant.dropout:
            self.noise_sizes["drop"] = variant.features


# --- ResNet-9: shallow and wide, for CIFAR in seconds ---


class ConvPool(nn.Module):
    """3x3 convolution, norm, ReLU, and a 2x2 max-pool that halves the image."""

    def __init__(self, inp: int, out: int, layers: LayerFactory):
        super().__init__()
        self.conv1 = layers.conv(inp, out, 3)
        self.bn1 = layers.norm(out)
        self.act1 = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        """`out` channels at half the height and width."""
        return self.pool(self.act1(self.bn1(self.conv1(x))))


class ResidualConvPair(nn.Module):
    """Two convolutions, each with norm and ReLU; the input is added after the last ReLU."""

    def __init__(self, width: int, layers: LayerFactory, *, rate: float):
        super().__init__()
        self.conv1 = layers.conv(width, width, 3)
        self.bn1 = layers.norm(width)
        self.act1 = nn.ReLU(inplace=True)
        self.conv2 = layers.conv(width, width, 3)
        self.bn2 = layers.norm(width)
        self.act2 = nn.ReLU(inplace=True)
        self.rate = rate

    def forward(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """The block's output."""
        inner = self.act1(self.bn1(self.conv1(x)))
        inner = self.act2(self.bn2(self.conv2(inner)))
        return x + drop_path(inner, self.rate, noise)


class FastResNet(UnitModel):
    """Stem, three stages with max-pools, some with a residual block, global max-pool, linear."""

    def __init__(self, variant: FastResNetVariant, *, num_classes: int):
        super().__init__()
        layers, widths = LayerFactory(variant), variant.widths
        self.conv1 = layers.conv(3, widths[0], 3)
        self.bn1 = layers.norm(widths[0])
        self.act1 = nn.ReLU(inplace=True)
        self.units["stem"] = ("conv1", "bn1", "act1")
        for stage in range(1, len(widths)):
            width = widths[stage]
            self.add_block(f"layer{stage}.0", ConvPool(widths[stage - 1], width, layers))
            if variant.residual[stage - 1]:
                rate = drop_path_rate(variant, stage - 1, len(variant.residual))
                block = ResidualConvPair(width, layers, rate=rate)
                self.add_block(f"layer{stage}.1", block, noise=rate > 0)
        self.global_pool = GlobalMaxPool()
        self.drop = Dropout(variant.dropout)
        self.fc = nn.Linear(widths[-1], num_classes, bias=False)
        self.scale = Scale(variant.logit_scale)
        self.units["head"] = ("global_pool", "drop", "fc", "scale")
        if variant.dropout:
            self.noise_sizes["drop"] = widths[-1]
