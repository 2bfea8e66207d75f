"""Batch norm over several ranks: the statistics of all their micro-batches, as of one batch.

torch's SyncBatchNorm has no kernels for the CPU. This one runs on every device. It leaves what a
rank can compute alone to the kernels of plain batch norm: they are fast, and it rounds as they do.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import _disable_current_modes


def synchronise_norms(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Make every batch norm take, in training, the statistics of the batches of all ranks.

    All ranks of the group must have batches of one shape. Modules, names, weights and hooks stay as
    they were, and so does what a norm does in evaluation.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.forward = _SynchronisedForward(module, group)  # type: ignore[method-assign]


class _SynchronisedForward:
    """The forward pass of a norm whose training batch is spread over the ranks of a group."""

    def __init__(self, norm: _BatchNorm, group: dist.ProcessGroup) -> None:
        self._norm, self._group = norm, group

    def __deepcopy__(self, memo: dict[int, Any]) -> "_SynchronisedForward":
        return _SynchronisedForward(copy.deepcopy(self._norm, memo), self._group)

    def __call__(self, input: Tensor) -> Tensor:
        norm, x = self._norm, input
        if not norm.training:
            return type(norm).forward(norm, x)
        norm._check_input_dim(x)
        statistics = _find_statistics(x, self._group)
        _update_running_statistics(norm, statistics, count=_count_values(x, self._group))
        mean = statistics[0]
        weight = torch.ones_like(mean) if norm.weight is None else norm.weight.to(mean.dtype)
        bias = torch.zeros_like(mean) if norm.bias is None else norm.bias.to(mean.dtype)
        return _Normalisation.apply(x, weight, bias, statistics, norm.eps, self._group)


@torch.no_grad()
def _find_statistics(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Mean and variance of each channel over the batches of all ranks."""
    local = torch.stack(torch.batch_norm_update_stats(_widen(x), None, None, 0.0))
    means, variances = _gather(local, group).unbind(1)
    # the spread within ranks plus that between them: mean(x*x) - mean**2 would lose digits
    variance = variances.mean(0) + means.var(0, correction=0)
    return torch.stack((means.mean(0), variance))


@torch.no_grad()
def _update_running_statistics(norm: _BatchNorm, statistics: Tensor, *, count: int) -> None:
    """Update the running statistics as torch does: with the unbiased variance."""
    if norm.running_mean is None or norm.running_var is None or norm.num_batches_tracked is None:
        return
    norm.num_batches_tracked += 1
    mean, variance = statistics.to(norm.running_mean.dtype)
    # without a momentum all batches count alike; torch, too, waits for the device here
    momentum = 1 / int(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.lerp_(mean, momentum)
    norm.running_var.lerp_(variance * (count / max(count - 1, 1)), momentum)


class _Normalisation(Function):
    """Normalises with the group's mean and variance; gradients pass through both of them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        statistics: Tensor,
        eps: float,
        group: dist.ProcessGroup,
    ) -> Tensor:
        """Normalised, scaled and shifted in at least 32 bits; the type of the input is kept."""
        ctx.save_for_backward(x, weight, statistics)
        ctx.eps, ctx.group = eps, group
        mean, variance = statistics
        return F.batch_norm(_widen(x), mean, variance, weight, bias, eps=eps).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of input, weight and bias; those of the weights are this rank's part."""
        x, weight, statistics = ctx.saved_tensors
        wide, (mean, variance) = _widen(x), statistics
        inverse_std = torch.rsqrt(variance + ctx.eps)
        # as if the statistics were constants
        to_x, to_weight, to_bias = torch.ops.aten.native_batch_norm_backward(
            *(_widen(gradient), wide, weight, mean, variance, mean, inverse_std),
            *(False, ctx.eps, [True, True, True]),
        )
        # and through the statistics, which the losses of all ranks depend on
        sums = _gather(torch.stack((to_weight, to_bias)), ctx.group).sum(0)
        scale, shift = sums / _count_values(x, ctx.group) * (weight * inverse_std)
        to_x -= F.batch_norm(wide, mean, variance, scale, shift, eps=ctx.eps)
        return to_x.to(x.dtype), to_weight, to_bias, None, None, None


def _gather(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The values of each rank, in their order, so that every rank adds them up alike."""
    # hidden from recorders of operations: what came from other ranks must not be asked for again
    with _disable_current_modes():
        gathered = [torch.empty_like(values) for _ in range(group.size())]
        dist.all_gather(gathered, values, group=group)
        return torch.stack(gathered)


def _widen(x: Tensor) -> Tensor:
    """The values in 32 bits; those of 64 stay."""
    return x if x.dtype == torch.float64 else x.float()


def _count_values(x: Tensor, group: dist.ProcessGroup) -> int:
    """How many values each channel has on all ranks."""
    return x.numel() // x.shape[1] * group.size()
