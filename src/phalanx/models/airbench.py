"""The network of airbench: a first layer taken from the images, blocks that start as identities."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.catalog.airbench import AirbenchVariant
from phalanx.models.layers import Dropout, GlobalMaxPool, LayerFactory, Scale
from phalanx.models.units import UnitModel

_PATCH = 2  # pixels of a patch's side
_PATCH_VALUES = 3 * _PATCH**2
_VARIANCE_FLOOR = 5e-4  # added to a direction's variance: what hardly varies is not blown up


class PatchWhitening(nn.Module):
    """Patches of 2x2 pixels along their principal directions, each with unit variance, and negated.

    The filters are no parameters: `whiten_patches` takes them from images, and training leaves
    them. Until then they are the pixels themselves.
    """

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        pixels = torch.eye(_PATCH_VALUES).view(-1, 3, _PATCH, _PATCH)
        self.register_buffer("weight", torch.cat([pixels, -pixels]))

    def forward(self, x: Tensor) -> Tensor:
        """A pixel less in height and width, 24 channels."""
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
        """Half the edge, new channels."""
        inner = self.act1(self.bn1(self.pool(self.conv1(x))))
        return self.act2(self.bn2(self.conv2(inner)))


class Airbench(UnitModel):
    """Whitening, stages of two convolutions, largest value, linear."""

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

    def start_as_identity(self) -> None:
        """Let the first outputs of each convolution be its inputs; the others stay as drawn."""
        for block in self.modules():
            if isinstance(block, PooledConvPair):
                for conv in (block.conv1, block.conv2):
                    nn.init.dirac_(conv.weight[: conv.in_channels])


def has_whitening(model: nn.Module) -> bool:
    """Whether a model's first layer is to be taken from images."""
    return any(isinstance(module, PatchWhitening) for module in model.modules())


@torch.no_grad()
def whiten_patches(model: nn.Module, images: Tensor) -> None:
    """Give a model the filters that whiten the patches of these images, [N, 3, H, W].

    Computed on the CPU in 64 bits, and each direction's sign is fixed: every device starts alike.
    """
    patches = images.cpu().double().unfold(2, _PATCH, 1).unfold(3, _PATCH, 1)
    rows = patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, _PATCH_VALUES)
    variances, directions = torch.linalg.eigh(rows.T @ rows / len(rows))
    largest = directions.abs().argmax(0, keepdim=True)
    directions *= directions.gather(0, largest).sign()
    filters = (directions / (variances + _VARIANCE_FLOOR).sqrt()).T
    filters = filters.reshape(-1, 3, _PATCH, _PATCH).flip(0)  # what varies most comes first
    for module in model.modules():
        if isinstance(module, PatchWhitening):
            module.weight.copy_(torch.cat([filters, -filters]))
