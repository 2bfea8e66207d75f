"""Images [N, C, H, W] in channels_last memory, and how work on them is split into programs."""

import torch
from torch import Tensor

MULTIPROCESSORS = 132  # of an H100 or H200; other GPUs get a little more or less work per SM
_MOST_PARTS = 16


def count_rows(x: Tensor) -> int:
    """The pixels of all images: rows of the matrix [pixels, channels] that is in memory."""
    return x.numel() // x.shape[1]


def to_rows(x: Tensor) -> Tensor:
    """Images as a matrix [pixels, channels]; [N, C] as it is."""
    return x if x.ndim == 2 else x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def to_image(rows: Tensor, like: Tensor) -> Tensor:
    """A matrix [pixels, channels] as images with the batch size, height and width of others."""
    n, _, h, w = like.shape
    return rows.view(n, h, w, -1).permute(0, 3, 1, 2)


def to_channels_last(x: Tensor) -> Tensor:
    """Images in channels_last memory."""
    return x.contiguous(memory_format=torch.channels_last)


def new_image(
    like: Tensor, channels: int, height: int, width: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Empty channels_last images: as many as in `like`, of another size."""
    shape = (len(like), height, width, channels)
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device).permute(0, 3, 1, 2)


def is_expanded(x: Tensor) -> bool:
    """Whether an image's pixels share one row (stride 0), like the gradient of mean pooling."""
    return x.stride()[2:] == (0, 0) and x[:, :, 0, 0].is_contiguous()


def new_floats(*shape: int, like: Tensor) -> Tensor:
    """An empty float32 tensor on the device of `like`."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def count_row_programs(rows: int, channels: int) -> int:
    """How many programs share the rows of images; each writes one row of partial sums."""
    return max(1, min(MULTIPROCESSORS * 8 * 64 // channels, -(-rows // 128)))


def count_parts(images: int, pixels: int, channels: int) -> int:
    """Into how many parts an image is split for per-image sums, to have enough programs."""
    wanted, parts = MULTIPROCESSORS * 15, 1
    programs = images * -(-channels // 64)
    while parts * programs < wanted and parts < _MOST_PARTS and pixels >= 128 * parts:
        parts *= 2
    return parts
