"""Batch norms folded into the convolutions before them, in float64, as modules.

What is not known to be a convolution directly followed by its norm stays as it is: a plugin's own
blocks, group norms, and norms behind a pool.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn

from phalanx.models.airbench import PooledConvPair
from phalanx.models.efficientnet import DepthwiseSeparableConv, InvertedResidual
from phalanx.models.resnet import BasicBlock, Bottleneck, ConvPool, ResidualConvPair
from phalanx.models.units import UnitModel

_NORMS = (nn.BatchNorm2d, nn.GroupNorm)
_PAIRS: dict[
    type[nn.Module], tuple[tuple[str, str], ...]
] = {  # convolutions and their norms, by block
    BasicBlock: (("conv1", "bn1"), ("conv2", "bn2")),
    Bottleneck: (("conv1", "bn1"), ("conv2", "bn2"), ("conv3", "bn3")),
    ConvPool: (("conv1", "bn1"),),
    ResidualConvPair: (("conv1", "bn1"), ("conv2", "bn2")),
    DepthwiseSeparableConv: (("conv_dw", "bn1"), ("conv_pw", "bn2")),
    InvertedResidual: (("conv_pw", "bn1"), ("conv_dw", "bn2"), ("conv_pwl", "bn3")),
    PooledConvPair: (("conv2", "bn2"),),  # its first norm follows a pool
}


class _Float32Norm(nn.Module):
    """A norm that computes in 32 bits and returns its input's type."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """The norm of x, in 32 bits."""
        return self.norm(x.float()).to(x.dtype)


@torch.no_grad()
def fold_norms(model: nn.Module) -> list[str]:
    """Fold the batch norms of a model for evaluation; returns the paths of the removed norms."""
    uses = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    folded = []
    for conv_path, norm_path in _find_pairs(model):
        conv, norm = model.get_submodule(conv_path), model.get_submodule(norm_path)
        if _is_foldable(conv, norm) and uses[id(conv)] == uses[id(norm)] == 1:
            _fold_pair(conv, norm)  # type: ignore[arg-type]
            _replace(model, norm_path, nn.Identity())
            folded.append(norm_path)
    return folded


def _find_pairs(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The paths of pairs of modules of which the second takes the first's output."""
    chains = [*model.units.values()] if isinstance(model, UnitModel) else []
    for path, module in model.named_modules():
        within = f"{path}." if path else ""
        for conv, norm in _PAIRS.get(type(module), ()):
            yield f"{within}{conv}", f"{within}{norm}"
        if type(module) is nn.Sequential:
            chains.append(tuple(f"{within}{name}" for name, _ in module.named_children()))
    for chain in chains:
        yield from pairwise(chain)


def _is_foldable(conv: nn.Module, norm: nn.Module) -> bool:
    """Whether a norm's statistics are fixed, and no hook needs the value between the two."""
    if not isinstance(conv, nn.Conv2d) or not isinstance(norm, nn.BatchNorm2d):
        return False
    hooks = [module._forward_hooks or module._forward_pre_hooks for module in (conv, norm)]
    return norm.running_mean is not None and not any(hooks)


def _fold_pair(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> None:
    """Fold the norm's scale and shift into a convolution, in float64; stored in its own type."""
    assert norm.running_mean is not None and norm.running_var is not None
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    shift = -norm.running_mean.double()
    if conv.bias is not None:
        shift = shift + conv.bias.double()
    if norm.affine:
        scale = scale * norm.weight.double()
    shift = shift * scale
    if norm.affine:
        shift = shift + norm.bias.double()
    weight = conv.weight.double() * scale[:, None, None, None]
    conv.weight.copy_(weight)
    conv.bias = nn.Parameter(shift.to(conv.weight.dtype), requires_grad=False)


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def convert_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast a model's weights to 16 bits; the remaining norms compute in 32."""
    model.to(dtype)
    left = [path for path, module in model.named_modules() if isinstance(module, _NORMS)]
    for path in left:
        _replace(model, path, _Float32Norm(model.get_submodule(path).float()))
