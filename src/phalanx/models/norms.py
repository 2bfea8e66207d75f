"""Norm layers: torch's, and variants that torch does not have."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from phalanx.catalog.variant import Norm


def to_float32_or_64(x: Tensor) -> Tensor:
    """The values in float32; float64 is kept."""
    return x if x.dtype == torch.float64 else x.float()


class OnePassBatchNorm(nn.BatchNorm2d):
    """Batch norm with the variance from one pass, mean(x*x) - mean(x)**2.

    Reads the input once instead of twice; loses precision if the mean is much larger than the
    standard deviation, which is why it is not the default.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise with the batch's statistics in training, else with the running ones."""
        if not self.training:
            return super().forward(x)
        wide = to_float32_or_64(x)
        mean = wide.mean((0, 2, 3))
        variance = ((wide * wide).mean((0, 2, 3)) - mean * mean).clamp_min(0)
        self._update_running_stats(mean.detach(), variance.detach(), count=x.numel() // x.shape[1])
        scale = self.weight * torch.rsqrt(variance + self.eps)
        shift = self.bias - mean * scale
        return (wide * scale[:, None, None] + shift[:, None, None]).to(x.dtype)

    @torch.no_grad()
    def _update_running_stats(self, mean: Tensor, variance: Tensor, *, count: int) -> None:
        """Update the running statistics as torch does: with the unbiased variance."""
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None and self.momentum is not None
        self.num_batches_tracked += 1
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance * (count / max(count - 1, 1)), self.momentum)


class InterleavedGroupNorm(nn.GroupNorm):
    """Group norm whose group g consists of channels g, g+G, g+2G..., for G groups."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each image's groups."""
        rows, channels = x.shape[:2]
        grouped = to_float32_or_64(x).reshape(
            rows, channels // self.num_groups, self.num_groups, -1
        )
        variance, mean = torch.var_mean(grouped, (1, 3), correction=0, keepdim=True)
        plain = (grouped - mean) * torch.rsqrt(variance + self.eps)
        scaled = plain.view(x.shape) * self.weight[:, None, None] + self.bias[:, None, None]
        return scaled.to(x.dtype)


class FullPrecision(nn.Module):
    """Mixin for a norm: computes in float32, and returns the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """The norm's forward with autocast off."""
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.float()).to(x.dtype)


class FullBatchNorm(FullPrecision, nn.BatchNorm2d):
    """Batch norm in 32 bits."""


class FullOnePassBatchNorm(FullPrecision, OnePassBatchNorm):
    """One-pass batch norm in 32 bits."""


BATCH_NORMS = (nn.BatchNorm2d, OnePassBatchNorm, FullBatchNorm, FullOnePassBatchNorm)


class FullGroupNorm(FullPrecision, nn.GroupNorm):
    """Group norm in 32 bits."""


class FullInterleavedGroupNorm(FullPrecision, InterleavedGroupNorm):
    """Interleaved group norm in 32 bits."""


_FULL_PRECISION: dict[type[nn.Module], Callable[..., nn.Module]] = {
    nn.BatchNorm2d: FullBatchNorm,
    OnePassBatchNorm: FullOnePassBatchNorm,
    nn.GroupNorm: FullGroupNorm,
    InterleavedGroupNorm: FullInterleavedGroupNorm,
}


def build_norm(norm: Norm, channels: int) -> nn.Module:
    """A norm layer for that many channels."""
    if norm.type == "batch":
        batch = nn.BatchNorm2d if norm.stable else OnePassBatchNorm
        build = _FULL_PRECISION[batch] if norm.full_precision else batch
        return build(channels, eps=norm.eps, momentum=norm.momentum)
    if norm.type == "group":
        group = InterleavedGroupNorm if norm.interleaved else nn.GroupNorm
        build = _FULL_PRECISION[group] if norm.full_precision else group
        return build(norm.groups, channels, eps=norm.eps)
    return nn.Identity()
