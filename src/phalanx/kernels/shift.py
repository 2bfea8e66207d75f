"""Small images taken out of a set that lies on the device, each shifted and maybe mirrored."""

import torch
from torch import Tensor

from phalanx.kernels.fused import find_fused


def shift_batch(images: Tensor, places: Tensor) -> Tensor:
    """Images of a set [M, H, W] or [M, H, W, 3], as [N, H, W, 3]; black moves in.

    places: [4, N] whole numbers: which image, how far down and right of its corner what is shown
    begins, less than nothing where that lies outside, and whether it is mirrored before.
    """
    fused = find_fused("shift_fused", "shift_fused") if images.is_cuda else None
    return (fused or shift_plain)(images, places)


def shift_plain(images: Tensor, places: Tensor) -> Tensor:
    """`shift_batch` in torch's own operations."""
    image, top, left, mirrored = places.long().unsqueeze(2)
    height, width = images.shape[1:3]
    row = top + torch.arange(height, device=images.device)
    column = left + torch.arange(width, device=images.device)
    column = torch.where(mirrored.bool(), width - 1 - column, column)
    down, across = (row >= 0) & (row < height), (column >= 0) & (column < width)
    row, column = row.clamp(0, height - 1), column.clamp(0, width - 1)
    found = in_colour(images[image[:, :, None], row[:, :, None], column[:, None, :]])
    return found * (down[:, :, None] & across[:, None])[..., None]


def in_colour(images: Tensor) -> Tensor:
    """Grey images with three equal channels."""
    return images if images.ndim == 4 else images[..., None].expand(*images.shape, 3)
