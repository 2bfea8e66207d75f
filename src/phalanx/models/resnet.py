"""ResNet for large and small images, module tree and parameter names as timm's."""

from torch import Tensor, nn

from phalanx.catalog.models import Block, ResNetVariant, blocks_of
from phalanx.models.layers import GlobalPool, conv
from phalanx.models.units import UnitModel


class BasicBlock(nn.Module):
    """3x3 (strided), 3x3, plus the shortcut."""

    def __init__(self, inp: int, width: int, out: int, *, stride: int):
        super().__init__()
        self.conv1 = conv(inp, width, 3, stride=stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.act1 = nn.ReLU(inplace=True)
        self.conv2 = conv(width, out, 3)
        self.bn2 = nn.BatchNorm2d(out)
        self.act2 = nn.ReLU(inplace=True)
        self.downsample = projection(inp, out, stride)

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        """The norm right before the shortcut is added."""
        return self.bn2

    def forward(self, x: Tensor) -> Tensor:
        """One residual step."""
        inner = self.act1(self.bn1(self.conv1(x)))
        inner = self.bn2(self.conv2(inner))
        return self.act2(inner + self.downsample(x))


class Bottleneck(nn.Module):
    """1x1 narrow, 3x3 (strided), 1x1 widen, plus the shortcut.

    The stride sits on the 3x3 ("v1.5"): the paper puts it on the first 1x1, which throws
    three quarters of the input away before anything looks at it.
    """

    def __init__(self, inp: int, width: int, out: int, *, stride: int):
        super().__init__()
        self.conv1 = conv(inp, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.act1 = nn.ReLU(inplace=True)
        self.conv2 = conv(width, width, 3, stride=stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.act2 = nn.ReLU(inplace=True)
        self.conv3 = conv(width, out, 1)
        self.bn3 = nn.BatchNorm2d(out)
        self.act3 = nn.ReLU(inplace=True)
        self.downsample = projection(inp, out, stride)

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        """The norm right before the shortcut is added."""
        return self.bn3

    def forward(self, x: Tensor) -> Tensor:
        """One residual step."""
        inner = self.act1(self.bn1(self.conv1(x)))
        inner = self.act2(self.bn2(self.conv2(inner)))
        inner = self.bn3(self.conv3(inner))
        return self.act3(inner + self.downsample(x))


BLOCKS: dict[str, type[BasicBlock | Bottleneck]] = {"basic": BasicBlock, "bottleneck": Bottleneck}


def projection(inp: int, out: int, stride: int) -> nn.Module:
    """The shortcut: the input itself where shapes agree, else a strided 1x1."""
    if stride == 1 and inp == out:
        return nn.Identity()
    return nn.Sequential(conv(inp, out, 1, stride=stride), nn.BatchNorm2d(out))


class ResNet(UnitModel):
    """Stem, stages of residual blocks, mean over the image, one linear layer."""

    def __init__(self, variant: ResNetVariant, *, num_classes: int):
        super().__init__()
        width = variant.stem_width
        large = variant.stem == "large"
        self.conv1 = conv(3, width, 7, stride=2) if large else conv(3, width, 3)
        self.bn1 = nn.BatchNorm2d(width)
        self.act1 = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if large else nn.Identity()
        self.units = {"stem": ("conv1", "bn1", "act1", "maxpool")}
        for block in blocks_of(variant):
            self._hang(block, variant.block)
        self.global_pool = GlobalPool()
        self.fc = nn.Linear(variant.features, num_classes)
        self.units["head"] = ("global_pool", "fc")

    def _hang(self, block: Block, kind: str) -> None:
        stage = f"layer{block.stage}"
        if block.index == 0:
            self.add_module(stage, nn.Sequential())
        module = BLOCKS[kind](
            block.channels_in, block.width, block.channels_out, stride=block.stride
        )
        self.get_submodule(stage).add_module(str(block.index), module)
        self.units[block.unit] = (f"{stage}.{block.index}",)
