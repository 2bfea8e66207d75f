"""What the fused units of an EfficientNet share: norms in training, products, gradients."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from phalanx.fused.suited import UnitNotFused, check_batch_norm, check_conv
from phalanx.mbconv.image_layout import count_rows
from phalanx.mbconv.norms import finish_norm

Kept = dict[str, Tensor]  # tensors that the backward pass needs, by name


def check_norm(norm: nn.Module) -> nn.BatchNorm2d:
    """The module, if it is a batch norm of as many channels as the kernels can load at a time."""
    checked = check_batch_norm(norm)
    if checked.num_features % 8:
        raise UnitNotFused(f"its norm has {checked.num_features} channels, no multiple of 8")
    return checked


def check_square_conv(conv: nn.Module, kernel: int | None = None) -> nn.Conv2d:
    """The module, if it is a convolution that keeps the image's size but for its stride."""
    checked = check_conv(conv)
    size, stride = checked.kernel_size[0], checked.stride[0]
    shape = (checked.kernel_size, checked.stride, checked.padding, checked.dilation)
    if shape != ((size, size), (stride, stride), (size // 2, size // 2), (1, 1)):
        raise UnitNotFused("its convolution is not square, or pads otherwise")
    if kernel is not None and (size, stride, checked.groups) != (kernel, 1, 1):
        raise UnitNotFused(f"its convolution is not a plain {kernel}x{kernel}")
    return checked


def take_statistics(norm: nn.BatchNorm2d, sums: Tensor, x: Tensor) -> Tensor:
    """The forward vectors of a norm; its running statistics are updated."""
    running = [norm.running_mean, norm.running_var, norm.num_batches_tracked]
    affine = [norm.weight.detach(), norm.bias.detach()]
    momentum = norm.momentum or 0.0
    return finish_norm(sums, affine, running, count_rows(x), norm.eps, momentum)  # type: ignore[arg-type]


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a b in float32."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _to_gradient(value: Tensor, parameter: Tensor) -> Tensor:
    """A gradient that lies in channels_last order, with the type and strides of its parameter."""
    value = value.to(parameter.dtype)
    if parameter.dim() != 4:
        return value.view(parameter.shape)
    if parameter.is_contiguous(memory_format=torch.channels_last):
        return value.contiguous().as_strided(parameter.shape, parameter.stride())
    out, inside, height, width = parameter.shape
    value = value.reshape(out, height, width, inside).permute(0, 3, 1, 2)
    return torch.empty_like(parameter).copy_(value)


def to_gradients(found: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Sequence[Tensor]:
    """Gradients in the order of the parameters they belong to."""
    return [_to_gradient(found[name], parameter) for name, parameter in parameters.items()]
