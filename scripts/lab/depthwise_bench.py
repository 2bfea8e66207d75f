"""cuDNN's depthwise convolutions beside those of depthwise_kernels.py, at EfficientNet-B0's shapes.

Called by efficientnet_b0_step.py. For each shape: errors against float64 on a few images, then
milliseconds of cuDNN's three convolutions and of the own kernels, with the bytes' floor: each input
read once, each result written once, at the measured rate of a copy.
"""

from typing import Any

import torch
import torch.nn.functional as F
from depthwise_kernels import convolve, convolve_back
from step_kernels import device_ms
from torch import Tensor

# kernel, stride, channels, pixels of the input's side, how often
SHAPES = (
    *((3, 1, 32, 112, 1), (3, 2, 96, 112, 1), (3, 1, 144, 56, 1), (5, 2, 144, 56, 1)),
    *((5, 1, 240, 28, 1), (3, 2, 240, 28, 1), (3, 1, 480, 14, 2), (5, 1, 480, 14, 1)),
    *((5, 1, 672, 14, 2), (5, 2, 672, 14, 1), (5, 1, 1152, 7, 3), (3, 1, 1152, 7, 1)),
)


def worst(found: Tensor, wanted: Tensor) -> float:
    """The largest error over the largest value."""
    found, wanted = found.detach().double(), wanted.detach()
    return float((found - wanted).abs().max() / wanted.abs().max())


def check(kernel: int, stride: int, channels: int, side: int, dtype: torch.dtype) -> dict[str, Any]:
    """Errors of result, sums and gradients of one shape against float64, and cuDNN's."""
    torch.manual_seed(kernel + side)
    shape = (4, side, side, channels)
    x = torch.randn(shape, device="cuda").to(dtype)
    weight = (torch.randn(kernel, kernel, channels, device="cuda") / kernel).to(dtype)
    v = torch.randn(4, channels, device="cuda")
    exact = weight.double().requires_grad_()
    z = (x.double() * v[2].double() + v[3].double()).requires_grad_()
    image, pad = F.silu(z).permute(0, 3, 1, 2), kernel // 2
    taps = exact.permute(2, 0, 1)[:, None]
    y = F.conv2d(image, taps, None, stride, pad, 1, channels).permute(0, 2, 3, 1)
    dy = torch.randn(y.shape, device="cuda").to(dtype)
    dz, dw = torch.autograd.grad(y, [z, exact], dy.double())
    found, s = convolve(x, weight, v, stride)
    back, sums, dtaps = convolve_back(dy, x, weight, v, stride)
    total = torch.stack([dz.sum((0, 1, 2)), (dz * x.double()).sum((0, 1, 2))])
    squares = torch.stack([y.sum((0, 1, 2)), (y * y).sum((0, 1, 2))])
    plain = F.conv2d(image.to(dtype), taps.to(dtype), None, stride, pad, 1, channels)
    return {
        "y": worst(found, y), "cudnn_y": worst(plain.permute(0, 2, 3, 1), y),
        "y_sums": worst(s.sum(1), squares), "dx": worst(back, dz),
        "dx_sums": worst(sums.sum(1), total),
        "dw": worst(dtaps.sum(0).view(kernel, kernel, channels), dw),
    }  # fmt: skip


def vendor(a: Tensor, kernel: Tensor, dy: Tensor, stride: int) -> dict[str, Any]:
    """cuDNN's forward, data gradient and weight gradient, to be timed."""
    pad, groups = kernel.shape[-1] // 2, kernel.shape[0]

    def back(data: bool) -> Any:
        return torch.ops.aten.convolution_backward(
            dy, a, kernel, None, [stride] * 2, [pad] * 2, [1, 1], False, [0, 0], groups,
            [data, not data, False],
        )  # fmt: skip

    return {
        "forward": lambda: F.conv2d(a, kernel, None, stride, pad, 1, groups),
        "data": lambda: back(True),
        "weight": lambda: back(False),
    }


def measure(
    kernel: int, stride: int, channels: int, side: int, dtype: torch.dtype, batch: int, rate: float
) -> dict[str, Any]:
    """Milliseconds at one shape; rate in TB/s."""
    x = torch.randn(batch, side, side, channels, device="cuda").to(dtype)
    out = side // stride
    dy = torch.randn(batch, out, out, channels, device="cuda").to(dtype)
    weight = (torch.randn(kernel, kernel, channels, device="cuda") / kernel).to(dtype)
    v = torch.randn(4, channels, device="cuda")
    taps = weight.permute(2, 0, 1)[:, None].contiguous()
    wide, narrow = (t.numel() * t.element_size() / rate / 1e9 for t in (x, dy))
    row: dict[str, Any] = {"kernel": kernel, "stride": stride, "channels": channels, "px": side}
    ways = vendor(x.permute(0, 3, 1, 2), taps, dy.permute(0, 3, 1, 2), stride)
    row["cudnn"] = {name: round(device_ms(run, 3), 4) for name, run in ways.items()}
    own = {
        "forward": lambda: convolve(x, weight, None, stride),
        "joined_norm": lambda: convolve_back(dy, x, weight, v, stride),
        "data_norm": lambda: convolve_back(dy, x, weight, v, stride, (True, False)),
        "weight_norm": lambda: convolve_back(dy, x, weight, v, stride, (False, True)),
    }
    if (kernel, stride) == (3, 2):
        own["forward_norm"] = lambda: convolve(x, weight, v, stride)
    row["own"] = {name: round(device_ms(run, 3), 4) for name, run in own.items()}
    row["floor"] = {"forward": round(wide + narrow, 4), "joined_norm": round(2 * wide + narrow, 4)}
    return row
