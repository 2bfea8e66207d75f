"""Images [N, C, H, W] in channels_last memory: new ones, and rows of pixels seen as images."""

import torch
from torch import Tensor


def new_image(n: int, c: int, h: int, w: int, like: Tensor) -> Tensor:
    """An empty channels_last image of that type and device."""
    empty = torch.empty((n, h, w, c), device=like.device, dtype=like.dtype)
    return empty.permute(0, 3, 1, 2)


def is_spread(x: Tensor) -> bool:
    """Whether all pixels of an image are one row in memory, as the gradient of their mean is."""
    return x.stride()[2:] == (0, 0) and x[:, :, 0, 0].is_contiguous()


def to_image(rows: Tensor, like: Tensor) -> Tensor:
    """Rows of pixels as an image with the height and width of another."""
    n, _, h, w = like.shape
    return rows.view(n, h, w, -1).permute(0, 3, 1, 2)
