"""Batches of small images from a dataset on the device, each shifted and perhaps mirrored."""

import torch
from torch import Tensor

from phalanx.kernels.fused import find_fused


def shift_batch(images: Tensor, crops: Tensor, *, reflects: bool = False) -> Tensor:
    """Images of a dataset [M, H, W] or [M, H, W, 3], shifted: [N, H, W, 3].

    Pixels from outside are black or, with `reflects`, reflections about the outermost pixels.

    crops: [4, N] integers: the image's index, its row and column at which the result begins
    (negative outside the image), and whether it is mirrored first.
    """
    fused = find_fused("phalanx.kernels.shift_fused.shift_fused") if images.is_cuda else None
    return (fused or shift_reference)(images, crops, reflects=reflects)


def shift_reference(images: Tensor, crops: Tensor, *, reflects: bool = False) -> Tensor:
    """`shift_batch` in torch's own operations."""
    image, top, left, mirrored = crops.long().unsqueeze(2)
    height, width = images.shape[1:3]
    row = top + torch.arange(height, device=images.device)
    column = left + torch.arange(width, device=images.device)
    column = torch.where(mirrored.bool(), width - 1 - column, column)
    if reflects:
        row, column = _reflect(row, height), _reflect(column, width)
    in_height, in_width = (row >= 0) & (row < height), (column >= 0) & (column < width)
    row, column = row.clamp(0, height - 1), column.clamp(0, width - 1)
    found = to_rgb(images[image[:, :, None], row[:, :, None], column[:, None, :]])
    return found * (in_height[:, :, None] & in_width[:, None])[..., None]


def _reflect(indices: Tensor, size: int) -> Tensor:
    """Indices reflected into 0..size-1, which they may exceed by less than the size."""
    return size - 1 - (size - 1 - indices.abs()).abs()


def to_rgb(images: Tensor) -> Tensor:
    """Grey images with three equal channels; colour images as they are."""
    return images if images.ndim == 4 else images[..., None].expand(*images.shape, 3)
