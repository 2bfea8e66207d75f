"""What the fused units of an EfficientNet share: norms in training, products, gradients."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from phalanx.mbconv.image_layout import count_rows
from phalanx.mbconv.norms import finish_norm

Kept = dict[str, Tensor]  # tensors that the backward pass needs, by name


def has_batch_statistics(norm: nn.Module) -> bool:
    """Whether a layer is a BatchNorm of the kind that the kernels know."""
    return (
        type(norm) is nn.BatchNorm2d
        and norm.affine
        and norm.track_running_stats
        and norm.momentum is not None
        and norm.num_features % 8 == 0
    )


def is_plain_conv(conv: nn.Module) -> bool:
    """Whether a layer is a convolution that keeps the image's size but for its stride."""
    return (
        type(conv) is nn.Conv2d
        and conv.bias is None
        and conv.dilation == (1, 1)
        and conv.kernel_size[0] == conv.kernel_size[1]
        and conv.stride[0] == conv.stride[1]
        and conv.padding == (conv.kernel_size[0] // 2,) * 2
        and conv.padding_mode == "zeros"
    )


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
