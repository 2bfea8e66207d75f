"""ResNet-9: shallow and wide, for CIFAR in seconds."""

from torch import Tensor, nn

from phalanx.catalog.resnets import FastResNetVariant
from phalanx.models.layers import Dropout, Kit, drop_path, kit_of, path_rate
from phalanx.models.units import UnitModel


class _HalvingConv(nn.Module):
    """3x3 convolution, norm, ReLU, and a 2x2 max-pool that halves the image."""

    def __init__(self, inp: int, out: int, kit: Kit):
        super().__init__()
        self.conv1 = kit.conv(inp, out, 3)
        self.bn1 = kit.norm(out)
        self.act1 = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        """Half the edge, new channels."""
        return self.pool(self.act1(self.bn1(self.conv1(x))))


class _LateSum(nn.Module):
    """Two convolutions, each with norm and ReLU, added to the input after the last ReLU."""

    def __init__(self, width: int, kit: Kit, *, rate: float):
        super().__init__()
        self.conv1 = kit.conv(width, width, 3)
        self.bn1 = kit.norm(width)
        self.act1 = nn.ReLU(inplace=True)
        self.conv2 = kit.conv(width, width, 3)
        self.bn2 = kit.norm(width)
        self.act2 = nn.ReLU(inplace=True)
        self.rate = rate

    def forward(self, x: Tensor, chances: Tensor | None = None) -> Tensor:
        """One residual step."""
        inner = self.act1(self.bn1(self.conv1(x)))
        inner = self.act2(self.bn2(self.conv2(inner)))
        return x + drop_path(inner, self.rate, chances)


class _GlobalMax(nn.Module):
    """Largest value over height and width: one vector an image."""

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] to [N, C]."""
        return x.amax((2, 3))


class _Scale(nn.Module):
    """Multiplies by a constant: keeps the first logits small, so that training starts calmly."""

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
        kit, widths = kit_of(variant), variant.widths
        self.conv1 = kit.conv(3, widths[0], 3)
        self.bn1 = kit.norm(widths[0])
        self.act1 = nn.ReLU(inplace=True)
        self.units["stem"] = ("conv1", "bn1", "act1")
        for stage in range(1, len(widths)):
            self._hang(stage, variant, kit)
        self.global_pool = _GlobalMax()
        self.drop = Dropout(variant.dropout)
        self.fc = nn.Linear(widths[-1], num_classes, bias=False)
        self.scale = _Scale(variant.logit_scale)
        self.units["head"] = ("global_pool", "drop", "fc", "scale")
        if variant.dropout:
            self.chances["drop"] = widths[-1]

    def _hang(self, stage: int, variant: FastResNetVariant, kit: Kit) -> None:
        inp, width = variant.widths[stage - 1 : stage + 1]
        parts: list[nn.Module] = [_HalvingConv(inp, width, kit)]
        if variant.residual[stage - 1]:
            rate = path_rate(variant, stage - 1, len(variant.residual))
            parts.append(_LateSum(width, kit, rate=rate))
            if rate:
                self.chances[f"layer{stage}.1"] = 1
        self.add_module(f"layer{stage}", nn.Sequential(*parts))
        for index in range(len(parts)):
            self.units[f"layer{stage}/{index}"] = (f"layer{stage}.{index}",)
