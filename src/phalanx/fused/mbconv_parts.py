"""Shared by the fused units of an EfficientNet: norms in training, products, gradients."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from phalanx.fused.module_checks import (
    UnitNotFused,
    check_batch_norm,
    check_conv,
    list_running_statistics,
)
from phalanx.fused.unit import ManualBackwardUnit
from phalanx.kernels.batch_norm import finish_vectors
from phalanx.kernels.image_layout import count_rows

NamedTensors = dict[str, Tensor]  # gradients, or what the backward pass needs


class SizeLimitedUnit(ManualBackwardUnit):
    """A unit whose kernels have 32-bit offsets, and whose norms need two pixels each."""

    def __init__(self, modules: Sequence[nn.Module], half: torch.dtype, conv: nn.Conv2d) -> None:
        super().__init__(modules, half)
        self._widest, self._stride = conv.out_channels, conv.stride[0]

    def __call__(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """The unit's output, computed by its modules if a batch is too large or too small."""
        rows = count_rows(x)
        if 2 * self._stride**2 <= rows and rows * self._widest < 2**31:
            return super().__call__(x, noise)
        return self._run_modules(x, noise)

    def prepare_noise(self, noise: Tensor) -> Tensor:
        """The noise itself in float32: these kernels compare it with the rate."""
        return noise.float().contiguous()


def check_norm(norm: nn.Module) -> nn.BatchNorm2d:
    """The module, if it is a batch norm with a multiple of 8 channels, as vector loads need."""
    checked = check_batch_norm(norm)
    if checked.num_features % 8:
        raise UnitNotFused(f"its norm has {checked.num_features} channels, no multiple of 8")
    return checked


def check_square_conv(conv: nn.Module, kernel: int | None = None) -> nn.Conv2d:
    """The module, if it is a square convolution that, but for its stride, keeps the size."""
    checked = check_conv(conv)
    size, stride = checked.kernel_size[0], checked.stride[0]
    shape = (checked.kernel_size, checked.stride, checked.padding, checked.dilation)
    if shape != ((size, size), (stride, stride), (size // 2, size // 2), (1, 1)):
        raise UnitNotFused("its convolution is not square, or pads otherwise")
    if kernel is not None and (size, stride, checked.groups) != (kernel, 1, 1):
        raise UnitNotFused(f"its convolution is not a plain {kernel}x{kernel}")
    return checked


def find_norm_vectors(norm: nn.BatchNorm2d, sums: Tensor, x: Tensor) -> Tensor:
    """The forward vectors of a norm; updates its running statistics."""
    running = list_running_statistics(norm)
    affine = [norm.weight.detach(), norm.bias.detach()]
    momentum = norm.momentum or 0.0
    return finish_vectors(sums, affine, running, count_rows(x), norm.eps, momentum)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a b in float32."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _to_gradient(value: Tensor, parameter: Tensor) -> Tensor:
    """A gradient in channels_last order, with the dtype and strides of its parameter."""
    value = value.to(parameter.dtype).contiguous()
    return value.as_strided(parameter.shape, parameter.stride())


def to_gradients(
    gradients: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> Sequence[Tensor]:
    """Gradients in the order of the parameters they belong to."""
    return [_to_gradient(gradients[name], parameter) for name, parameter in parameters.items()]
