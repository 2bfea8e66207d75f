"""A convolution by cuDNN and the norm behind it by kernels of our own, both ways."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx.fused.half_copies import to_half
from phalanx.fused.suited import check_batch_norm, check_conv
from phalanx.kernels.batch_norm import apply_norm_back, norm_vectors, reduce_norm


@dataclass(frozen=True)
class ConvNorm:
    """A convolution without bias and its norm."""

    conv: nn.Conv2d
    norm: nn.BatchNorm2d
    half: torch.dtype

    @property
    def parameters(self) -> list[Tensor]:
        """Weight of the convolution, weight and bias of the norm."""
        return [self.conv.weight, self.norm.weight, self.norm.bias]

    def run(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The convolution of x, the norm's vectors for it, and the 16-bit weight."""
        weight = to_half(self.conv.weight, self.half)
        a = convolve(x, weight, self.conv)
        return a, self.find_vectors(a), weight

    def find_vectors(self, a: Tensor) -> Tensor:
        """The norm's vectors for its input; running statistics are updated."""
        norm = self.norm
        assert norm.running_mean is not None and norm.running_var is not None
        assert norm.num_batches_tracked is not None and norm.momentum is not None
        running = [norm.running_mean, norm.running_var, norm.num_batches_tracked]
        return norm_vectors(a, [norm.weight, norm.bias], running, norm.eps, norm.momentum)

    def norm_back(
        self, dy: Tensor, a: Tensor, v: Tensor, activation: int, factor: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """The gradient of the norm's input from that behind its activation; of its parameters."""
        u = reduce_norm(dy, a, v, activation, factor)
        return apply_norm_back(dy, a, v, u, activation, factor), [u[0], u[1]]

    def conv_back(
        self, da: Tensor, x: Tensor, weight: Tensor, *, wanted: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the convolution's input, if wanted, and of its weight."""
        return convolve_back(da, x, weight, self.conv, wanted=wanted)


def find_conv_norm(conv: nn.Module, norm: nn.Module, half: torch.dtype) -> ConvNorm:
    """The pair, if kernels take it; else raises UnitNotFused."""
    return ConvNorm(check_conv(conv), check_batch_norm(norm), half)


def convolve(x: Tensor, weight: Tensor, conv: nn.Conv2d) -> Tensor:
    """A convolution with the shape of a module's, in channels_last memory."""
    y = torch.ops.aten.convolution(
        x, weight, None, conv.stride, conv.padding, conv.dilation, False, [0, 0], conv.groups
    )
    return y.contiguous(memory_format=torch.channels_last)


def convolve_back(
    dy: Tensor, x: Tensor, weight: Tensor, conv: nn.Conv2d, *, wanted: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of a convolution's input, if wanted, and of its weight."""
    shape = (conv.stride, conv.padding, conv.dilation, False, [0, 0], conv.groups)
    dx, dw, _ = torch.ops.aten.convolution_backward(
        dy, x, weight, None, *shape, [wanted, True, False]
    )
    return dx.contiguous(memory_format=torch.channels_last) if wanted else dx, dw
