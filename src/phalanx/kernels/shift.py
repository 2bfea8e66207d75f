"""Small images taken from a dataset on the device, each shifted and perhaps mirrored."""

import torch
from torch import Tensor

from phalanx.kernels.fused import find_fused


def shift_batch(images: Tensor, places: Tensor) -> Tensor:
    """Images of a dataset [M, H, W] or [M, H, W, 3], shifted, as [N, H, W, 3] padded with black.

    places: [4, N] whole numbers: the image's index, the row and the column of it where the result
    begins, negative where that lies outside, and whether it is mirrored first.
    """
    fused = find_fused("phalanx.kernels.shift_fused.shift_fused") if images.is_cuda else None
    return (fused or shift_reference)(images, places)


def shift_reference(images: Tensor, places: Tensor) -> Tensor:
    """`shift_batch` in torch's own operations."""
    image, top, left, mirrored = places.long().unsqueeze(2)
    height, width = images.shape[1:3]
    row = top + torch.arange(height, device=images.device)
    column = left + torch.arange(width, device=images.device)
    column = torch.where(mirrored.bool(), width - 1 - column, column)
    in_height, in_width = (row >= 0) & (row < height), (column >= 0) & (column < width)
    row, column = row.clamp(0, height - 1), column.clamp(0, width - 1)
    found = to_rgb(images[image[:, :, None], row[:, :, None], column[:, None, :]])
    return found * (in_height[:, :, None] & in_width[:, None])[..., None]


def to_rgb(images: Tensor) -> Tensor:
    """Grey images with three equal channels; colour images as they are."""
    return images if images.ndim == 4 else images[..., None].expand(*images.shape, 3)
