"""The pieces models are made of."""

from torch import Tensor, nn


def conv(inp: int, out: int, size: int, *, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the image's size at stride 1; the norm after it has the bias."""
    return nn.Conv2d(inp, out, size, stride=stride, padding=size // 2, bias=False)


class GlobalPool(nn.Module):
    """Mean over height and width: one vector an image."""

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] to [N, C]."""
        return x.mean((2, 3))
