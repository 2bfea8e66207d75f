"""Images in channels_last memory, [N, C, H, W], and how the work on them is cut."""

import torch
from torch import Tensor

MULTIPROCESSORS = 132  # of the GPU that the cuts are made for; others get a little more or less
_MOST_PARTS = 16


def count_rows(x: Tensor) -> int:
    """Pixels of all images: the rows of the matrix [pixels, channels] that memory holds."""
    return x.numel() // x.shape[1]


def to_rows(x: Tensor) -> Tensor:
    """An image as that matrix."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def to_image(rows: Tensor, like: Tensor) -> Tensor:
    """That matrix as an image of the height and width of another."""
    n, _, h, w = like.shape
    return rows.view(n, h, w, -1).permute(0, 3, 1, 2)


def to_channels_last(x: Tensor) -> Tensor:
    """An image in channels_last memory."""
    return x.contiguous(memory_format=torch.channels_last)


def new_image(
    like: Tensor, channels: int, height: int, width: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Room for as many images of other sizes."""
    shape = (len(like), height, width, channels)
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device).permute(0, 3, 1, 2)


def is_spread(x: Tensor) -> bool:
    """Whether all pixels of an image are one row in memory, as the gradient of their mean is."""
    return x.stride()[2:] == (0, 0) and x[:, :, 0, 0].is_contiguous()


def new_floats(*shape: int, like: Tensor) -> Tensor:
    """Room for float32 numbers."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def count_groups(rows: int, channels: int) -> int:
    """Rows of partial sums: so many programs share the rows of an image."""
    return max(1, min(MULTIPROCESSORS * 8 * 64 // channels, -(-rows // 128)))


def count_parts(images: int, pixels: int, channels: int) -> int:
    """Into how many parts an image is cut for sums by image, so that there are programs enough."""
    wanted, parts = MULTIPROCESSORS * 15, 1
    programs = images * -(-channels // 64)
    while parts * programs < wanted and parts < _MOST_PARTS and pixels >= 128 * parts:
        parts *= 2
    return parts
