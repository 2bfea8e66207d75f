"""Parts of images of any size brought to one size, all at once, on the device they are on."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.kernels.fused import find_fused

_FloatPart = tuple[float, float, float, float]  # top, left, height, width
MOST_BYTES = 2**30  # of images being resized at a time
_PIXEL_BYTES = 3 * 4


def cut_batch(
    images: Sequence[Tensor], parts: Sequence[_FloatPart], flips: Sequence[bool], *, size: int
) -> Tensor:
    """A part of each image [3, height, width] at one size, as bytes [N, size, size, 3].

    Parts are top, left, height, width in the image's pixels, whole or not. As Pillow's bilinear
    resize of a box: averaged where it shrinks, with the pixels just outside of the part.
    """
    begins, lengths = np.split(np.array(parts, np.float64), 2, axis=1)
    scales = lengths / size
    fused = find_fused("cut_fused", "cut_fused") if images[0].is_cuda else None
    if fused is not None:
        table = np.concatenate([begins, scales, np.array(flips)[:, None]], 1, dtype=np.float32)
        return fused(images, table, size)
    return _cut_plain(images, begins, scales, flips, size=size)


def _cut_plain(
    images: Sequence[Tensor],
    begins: NDArray[np.float64],
    scales: NDArray[np.float64],
    flips: Sequence[bool],
    *,
    size: int,
) -> Tensor:
    """`cut_batch` in two matrix products for all images together."""
    sides, lengths = np.array([image.shape[1:] for image in images]), scales * size
    reach = np.maximum(scales, 1) - scales / 2  # of the filter, beyond the part
    first = np.floor(begins - reach).clip(0).astype(np.int64)
    last = np.minimum(np.ceil(begins + lengths + reach).astype(np.int64), sides)
    mirrored = np.stack([np.zeros(len(flips)), flips], axis=1)
    places = np.stack([begins - first, scales, last - first, mirrored], axis=2, dtype=np.float32)
    windows = np.concatenate([first, last], axis=1)
    out = images[0].new_empty((len(images), size, size, 3))
    for run in _runs(last - first):
        out[run] = _resize(images[run], windows[run], places[run], size)
    return out


def _runs(sides: NDArray[np.int64]) -> Iterator[slice]:
    """Neighbours that fit into memory together, each with room for the tallest and the widest."""
    start, tallest, widest = 0, 0, 0
    for row, (tall, wide) in enumerate(sides.tolist()):
        tallest, widest = max(tallest, tall), max(widest, wide)
        if row > start and (row + 1 - start) * tallest * widest * _PIXEL_BYTES > MOST_BYTES:
            yield slice(start, row)
            start, tallest, widest = row, tall, wide
    yield slice(start, len(sides))


def _resize(
    images: Sequence[Tensor],
    windows: NDArray[np.int64],
    places: NDArray[np.float32],
    size: int,
) -> Tensor:
    """Windows of images at one size [N, size, size, 3], in floats to be cut to bytes."""
    tall, wide = (windows[:, 2:] - windows[:, :2]).max(axis=0).tolist()
    padded = images[0].new_zeros((len(images), tall, 3, wide))
    for room, image, (top, left, bottom, right) in zip(
        padded.unbind(), images, windows.tolist(), strict=True
    ):
        window = image[:, top:bottom, left:right]
        room[: bottom - top, :, : right - left].copy_(window.transpose(0, 1))
    table = torch.from_numpy(places).to(padded.device, non_blocking=True)
    across = _weights(table[:, 1], wide, size).transpose(1, 2)
    narrow = torch.bmm(padded.flatten(1, 2).float(), across).view(len(images), tall, 3 * size)
    square = torch.bmm(_weights(table[:, 0], tall, size), narrow).add_(0.5)
    return square.view(len(images), size, 3, size).transpose(2, 3)


def _weights(places: Tensor, count: int, size: int) -> Tensor:
    """How much each of `count` pixels adds to each of `size`, [N, size, count]."""
    begin, scale, limit, mirrored = places[:, :, None].unbind(1)
    number = torch.arange(size, device=places.device) + 0.5
    number = torch.where(mirrored > 0, size - number, number)
    pixels = torch.arange(count, device=places.device) + 0.5
    apart = (pixels - (begin + number * scale)[:, :, None]).abs_()
    weights = apart.div_(-scale.clamp_min(1)[:, :, None]).add_(1).clamp_min_(0)
    weights.mul_((pixels < limit)[:, None])
    return weights.div_(weights.sum(2, keepdim=True))
