"""What a unit's modules must be for our kernels to replace them."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from phalanx.models.norms import (
    FullBatchNorm,
    FullGroupNorm,
    FullInterleavedGroupNorm,
    FullOnePassBatchNorm,
    InterleavedGroupNorm,
    OnePassBatchNorm,
)

_BATCH_NORMS = (nn.BatchNorm2d, OnePassBatchNorm, FullBatchNorm, FullOnePassBatchNorm)
GROUP_NORMS = (nn.GroupNorm, InterleavedGroupNorm, FullGroupNorm, FullInterleavedGroupNorm)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class UnitNotFused(Exception):
    """Why a unit keeps its modules."""


def check_modules(modules: Iterable[nn.Module], *, interpreted: bool) -> None:
    """Refuse modules with hooks or a replaced forward, off the GPU or not in channels_last."""
    for module in modules:
        for part in module.modules():
            name = type(part).__name__
            if any(getattr(part, hooks, None) for hooks in _HOOKS):
                raise UnitNotFused(f"something is hooked to its {name}")
            if "forward" in vars(part):
                raise UnitNotFused(f"the forward of its {name} was replaced")
        for weight in module.parameters():
            if not (weight.is_cuda or interpreted):
                raise UnitNotFused("it is not on a GPU")
            if weight.ndim == 4 and not weight.is_contiguous(memory_format=torch.channels_last):
                raise UnitNotFused("its weights are not channels_last in memory")


def check_batch_norm(norm: nn.Module) -> nn.BatchNorm2d:
    """The module, if it is a batch norm like torch's, over this process's images."""
    if type(norm) not in _BATCH_NORMS:
        raise UnitNotFused(f"its norm is {type(norm).__name__}")
    assert isinstance(norm, nn.BatchNorm2d)
    if not (norm.affine and norm.track_running_stats) or norm.momentum is None:
        raise UnitNotFused("its norm has no weights or no running statistics")
    return norm


def list_running_statistics(norm: nn.BatchNorm2d) -> list[Tensor]:
    """The running mean and variance of a norm that `check_batch_norm` accepted, and its count."""
    assert norm.running_mean is not None and norm.running_var is not None
    assert norm.num_batches_tracked is not None
    return [norm.running_mean, norm.running_var, norm.num_batches_tracked]


def check_conv(conv: nn.Module) -> nn.Conv2d:
    """The module, if it is a plain convolution without bias that pads with zeros."""
    if type(conv) is not nn.Conv2d:
        raise UnitNotFused(f"its convolution is {type(conv).__name__}")
    if conv.bias is not None or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
        raise UnitNotFused("its convolution has a bias or pads otherwise")
    return conv


def check_types(modules: Sequence[nn.Module], *types: type[nn.Module]) -> None:
    """Refuse modules that do not have exactly these types, in order."""
    for module, wanted in zip(modules, types, strict=False):
        if type(module) is not wanted:
            raise UnitNotFused(f"it has {type(module).__name__} for {wanted.__name__}")
    if len(modules) != len(types):
        raise UnitNotFused(f"it has {len(modules)} modules instead of {len(types)}")
