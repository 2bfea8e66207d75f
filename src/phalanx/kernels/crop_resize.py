"""Batches of images cropped and resized to one size, on the device that holds them."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.kernels.fused import find_fused

_Box = tuple[float, float, float, float]  # top, left, height, width in the image's pixels
_MAX_BYTES = 2**30  # of images resized at a time
_PIXEL_BYTES = 3 * 4


def crop_and_resize(
    images: Sequence[Tensor],
    boxes: Sequence[_Box] | NDArray[np.float64],
    flips: Sequence[bool] | NDArray[np.bool_],
    *,
    size: int,
) -> Tensor:
    """A box of each image [3, height, width], resized: bytes [N, size, size, 3].

    Like Pillow's bilinear resize of a box: antialiased where it shrinks, with a filter that also
    reads pixels just outside the box. Boxes need not end at whole pixels.
    """
    starts, lengths = np.split(np.array(boxes, np.float64), 2, axis=1)
    scales = lengths / size
    fused = None
    if images[0].is_cuda:
        fused = find_fused("phalanx.kernels.crop_resize_fused.crop_and_resize_fused")
    if fused is not None:
        table = np.concatenate([starts, scales, np.array(flips)[:, None]], 1, dtype=np.float32)
        return fused(images, table, size)
    return _crop_and_resize(images, starts, scales, flips, size=size)


def _crop_and_resize(
    images: Sequence[Tensor],
    starts: NDArray[np.float64],
    scales: NDArray[np.float64],
    flips: Sequence[bool] | NDArray[np.bool_],
    *,
    size: int,
) -> Tensor:
    """The reference for the fused kernel: two matrix products for all images together."""
    sides, lengths = np.array([image.shape[1:] for image in images]), scales * size
    margin = np.maximum(scales, 1) - scales / 2  # how far the filter reaches beyond the box
    first = np.floor(starts - margin).clip(0).astype(np.int64)
    last = np.minimum(np.ceil(starts + lengths + margin).astype(np.int64), sides)
    mirrored = np.stack([np.zeros(len(flips)), flips], axis=1)
    axes = np.stack([starts - first, scales, last - first, mirrored], axis=2, dtype=np.float32)
    windows = np.concatenate([first, last], axis=1)
    out = images[0].new_empty((len(images), size, size, 3))
    for group in _split_to_fit(last - first):
        out[group] = _resize(images[group], windows[group], axes[group], size)
    return out


def _split_to_fit(sides: NDArray[np.int64]) -> Iterator[slice]:
    """Slices of consecutive images that fit into memory when padded to the largest sides."""
    start, tallest, widest = 0, 0, 0
    for row, (tall, wide) in enumerate(sides.tolist()):
        tallest, widest = max(tallest, tall), max(widest, wide)
        if row > start and (row + 1 - start) * tallest * widest * _PIXEL_BYTES > _MAX_BYTES:
            yield slice(start, row)
            start, tallest, widest = row, tall, wide
    yield slice(start, len(sides))


def _resize(
    images: Sequence[Tensor],
    windows: NDArray[np.int64],
    axes: NDArray[np.float32],
    size: int,
) -> Tensor:
    """Windows of images resized to [N, size, size, 3]: floats, to be truncated to bytes."""
    tall, wide = (windows[:, 2:] - windows[:, :2]).max(axis=0).tolist()
    padded = images[0].new_zeros((len(images), tall, 3, wide))
    for row, image, (top, left, bottom, right) in zip(
        padded.unbind(), images, windows.tolist(), strict=True
    ):
        window = image[:, top:bottom, left:right]
        row[: bottom - top, :, : right - left].copy_(window.transpose(0, 1))
    table = torch.from_numpy(axes).to(padded.device, non_blocking=True)
    across = _weights(table[:, 1], wide, size).transpose(1, 2)
    narrow = torch.bmm(padded.flatten(1, 2).float(), across).view(len(images), tall, 3 * size)
    square = torch.bmm(_weights(table[:, 0], tall, size), narrow).add_(0.5)
    return square.view(len(images), size, 3, size).transpose(2, 3)


def _weights(axis: Tensor, count: int, size: int) -> Tensor:
    """Filter weights of `count` source pixels for `size` target pixels: [N, size, count].

    axis [N, 4]: where the box starts, its scale, how many pixels there are, whether to mirror.
    """
    start, scale, limit, mirrored = axis[:, :, None].unbind(1)
    target = torch.arange(size, device=axis.device) + 0.5
    target = torch.where(mirrored > 0, size - target, target)
    pixels = torch.arange(count, device=axis.device) + 0.5
    distance = (pixels - (start + target * scale)[:, :, None]).abs_()
    weights = distance.div_(-scale.clamp_min(1)[:, :, None]).add_(1).clamp_min_(0)
    weights.mul_((pixels < limit)[:, None])
    return weights.div_(weights.sum(2, keepdim=True))
