"""The network of airbench: a whitening layer computed from images, then identity-like blocks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.catalog.airbench import AirbenchVariant
from phalanx.models.layers import Dropout, GlobalMaxPool, LayerFactory, Scale
from phalanx.models.units import UnitModel

_PATCH = 2  # side of a patch in pixels
_PATCH_VALUES = 3 * _PATCH**2
_VARIANCE_FLOOR = 5e-4  # added to variances, so that directions of tiny variance do not explode


class PatchWhitening(nn.Module):
    """Projects 2x2 patches on their principal directions, scaled to unit variance, and negated.

    The filters are buffers: `set_whitening_filters` computes them from images, and training does
    not change them. Until then they pass the pixels through.
    """

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        pixels = torch.eye(_PATCH_VALUES).view(-1, 3, _PATCH, _PATCH)
        self.register_buffer("weight", torch.cat([pixels, -pixels]))

    def forward(self, x: Tensor) -> Tensor:
        """24 channels, one pixel less in height and width."""
        return F.conv2d(x, self.weight)


class PooledConvPair(nn.Module):
    """3x3 convolution, 2x2 max-pool, norm, GELU; 3x3 convolution, norm, GELU."""

    def __init__(self, inp: int, out: int, layers: LayerFactory):
        super().__init__()
        self.conv1 = layers.conv(inp, out, 3)
        self.pool = nn.MaxPool2d(2)
        self.bn1 = layers.norm(out)
        self.act1 = nn.GELU()
        self.conv2 = layers.conv(out, out, 3)
        self.bn2 = layers.norm(out)
        self.act2 = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        """`out` channels at half the height and width."""
        inner = self.act1(self.bn1(self.pool(self.conv1(x))))
        return self.act2(self.bn2(self.conv2(inner)))


class Airbench(UnitModel):
    """Whitening, stages of two convolutions, global max-pool, linear."""

    def __init__(self, variant: AirbenchVariant, *, num_classes: int):
        super().__init__()
        layers, widths = LayerFactory(variant), variant.widths
        self.whitening = PatchWhitening()
        self.act1 = nn.GELU()
        self.units["stem"] = ("whitening", "act1")
        inputs = (2 * _PATCH_VALUES, *widths)
        for stage, width in enumerate(widths, start=1):
            self.add_block(f"layer{stage}.0", PooledConvPair(inputs[stage - 1], width, layers))
        self.global_pool = GlobalMaxPool()
        self.drop = Dropout(variant.dropout)
        self.fc = nn.Linear(widths[-1], num_classes, bias=False)
        self.scale = Scale(variant.logit_scale)
        self.units["head"] = ("global_pool", "drop", "fc", "scale")
        if variant.dropout:
            self.noise_sizes["drop"] = widths[-1]

    def init_as_identity(self) -> None:
        """Make the first outputs of each convolution its inputs; the others stay random."""
        for block in self.modules():
            if isinstance(block, PooledConvPair):
                for conv in (block.conv1, block.conv2):
                    nn.init.dirac_(conv.weight[: conv.in_channels])


def has_whitening(model: nn.Module) -> bool:
    """Whether a model has a whitening layer, which must be computed from images."""
    return any(isinstance(module, PatchWhitening) for module in model.modules())


@torch.no_grad()
def set_whitening_filters(model: nn.Module, images: Tensor) -> None:
    """Set the filters of a model's whitening layer from these images, [N, 3, H, W].

    Computed on the CPU in float64 with fixed signs, so that every device starts the same.
    """
    patches = images.cpu().double().unfold(2, _PATCH, 1).unfold(3, _PATCH, 1)
    rows = patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, _PATCH_VALUES)
    variances, directions = torch.linalg.eigh(rows.T @ rows / len(rows))
    largest = directions.abs().argmax(0, keepdim=True)
    directions *= directions.gather(0, largest).sign()
    filters = (directions / (variances + _VARIANCE_FLOOR).sqrt()).T
    filters = filters.reshape(-1, 3, _PATCH, _PATCH).flip(0)  # largest variance first
    for module in model.modules():
        if isinstance(module, PatchWhitening):
            module.weight.copy_(torch.cat([filters, -filters]))
