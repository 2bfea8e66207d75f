"""ResNet-9: shallow and wide, for CIFAR in seconds."""

from torch import Tensor, nn

from phalanx.catalog.resnets import FastResNetVariant
from phalanx.models.layers import Dropout, LayerFactory, drop_path, drop_path_rate
from phalanx.models.units import UnitModel


class _ConvPool(nn.Module):
    """3x3 convolution, norm, ReLU, and a 2x2 max-pool that halves the image."""

    def __init__(self, inp: int, out: int, layers: LayerFactory):
        super().__init__()
        self.conv1 = layers.conv(inp, out, 3)
        self.bn1 = layers.norm(out)
        self.act1 = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        """Half the edge, new channels."""
        return self.pool(self.act1(self.bn1(self.conv1(x))))


class _ResidualConvPair(nn.Module):
    """Two convolutions, each with norm and ReLU, added to the input after the last ReLU."""

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
        """One residual step."""
        inner = self.act1(self.bn1(self.conv1(x)))
        inner = self.act2(self.bn2(self.conv2(inner)))
        return x + drop_path(inner, self.rate, noise)


class _GlobalMaxPool(nn.Module):
    """Largest value over height and width: one vector per image."""

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] to [N, C]."""
        return x.amax((2, 3))


class _Scale(nn.Module):
    """Multiplies by a constant: keeps the first logits small, so that training starts gently."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """x times the factor."""
        return x * self.factor


class FastResNet(UnitModel):
    """Stem, three halving stages of which some have a residual block, largest value, linear."""

    def __init__(self, variant: FastResNetVariant, *, num_classes: int):
        super().__init__()
        layers, widths = LayerFactory(variant), variant.widths
        self.conv1 = layers.conv(3, widths[0], 3)
        self.bn1 = layers.norm(widths[0])
        self.act1 = nn.ReLU(inplace=True)
        self.units["stem"] = ("conv1", "bn1", "act1")
        for stage in range(1, len(widths)):
            width = widths[stage]
            self.add_block(f"layer{stage}.0", _ConvPool(widths[stage - 1], width, layers))
            if variant.residual[stage - 1]:
                rate = drop_path_rate(variant, stage - 1, len(variant.residual))
                block = _ResidualConvPair(width, layers, rate=rate)
                self.add_block(f"layer{stage}.1", block, noise=rate > 0)
        self.global_pool = _GlobalMaxPool()
        self.drop = Dropout(variant.dropout)
        self.fc = nn.Linear(widths[-1], num_classes, bias=False)
        self.scale = _Scale(variant.logit_scale)
        self.units["head"] = ("global_pool", "drop", "fc", "scale")
        if variant.dropout:
            self.noise_sizes["drop"] = widths[-1]
