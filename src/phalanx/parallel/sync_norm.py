"""Batch norm over several ranks: statistics over all their micro-batches, as over one batch.

torch's SyncBatchNorm has no CPU kernels; this one runs on every device. What a rank computes alone
is left to the kernels of plain batch norm: they are fast, and the rounding is the same.
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
    """Make every batch norm use, in training, statistics over the batches of all ranks.

    All ranks of the group must have batches of the same shape. Modules, names, weights, hooks and
    the behaviour in evaluation do not change.
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
    # the variance within ranks plus that between them: mean(x*x) - mean**2 would lose precision
    variance = variances.mean(0) + means.var(0, correction=0)
    return torch.stack((means.mean(0), variance))


@torch.no_grad()
def _update_running_statistics(norm: _BatchNorm, statistics: Tensor, *, count: int) -> None:
    """Update the running statistics as torch does: with the unbiased variance."""
    if norm.running_mean is None or norm.running_var is None or norm.num_batches_tracked is None:
        return
    norm.num_batches_tracked += 1
    mean, variance = statistics.to(norm.running_mean.dtype)
    # without momentum all batches have equal weight; torch, too, waits for the device here
    momentum = 1 / int(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.lerp_(mean, momentum)
    norm.running_var.lerp_(variance * (count / max(count - 1, 1)), momentum)


class _Normalisation(Function):
    """Normalises with the group's mean and variance; gradients flow through both of them."""

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
        """Normalise, scale and shift in at least 32 bits; the output has the input's dtype."""
        ctx.save_for_backward(x, weight, statistics)
        ctx.eps, ctx.group = eps, group
        mean, variance = statistics
        return F.batch_norm(_widen(x), mean, variance, weight, bias, eps=eps).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of input, weight and bias; those of weight and bias are this rank's part."""
        x, weight, statistics = ctx.saved_tensors
        wide, (mean, variance) = _widen(x), statistics
        inverse_std = torch.rsqrt(variance + ctx.eps)
        # as if the statistics were constants,
        to_x, to_weight, to_bias = torch.ops.aten.native_batch_norm_backward(
            *(_widen(gradient), wide, weight, mean, variance, mean, inverse_std),
            *(False, ctx.eps, [True, True, True]),
        )
        # plus the part through the statistics, on which the losses of all ranks depend
        sums = _gather(torch.stack((to_weight, to_bias)), ctx.group).sum(0)
        scale, shift = sums / _count_values(x, ctx.group) * (weight * inverse_std)
        to_x -= F.batch_norm(wide, mean, variance, scale, shift, eps=ctx.eps)
        return to_x.to(x.dtype), to_weight, to_bias, None, None, None


def _gather(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The values of all ranks in order, so that every rank adds them in the same way."""
    # hidden from the recorder of recomputation: this must not be communicated again
    with _disable_current_modes():
        gathered = [torch.empty_like(values) for _ in range(group.size())]
        dist.all_gather(gathered, values, group=group)
        return torch.stack(gathered)


def _widen(x: Tensor) -> Tensor:
    """The values in float32; float64 is kept."""
    return x if x.dtype == torch.float64 else x.float()


def _count_values(x: Tensor, group: dist.ProcessGroup) -> int:
    """The number of values per channel over all ranks."""
    return x.numel() // x.shape[1] * group.size()
