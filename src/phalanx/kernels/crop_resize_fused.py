"""phalanx.kernels.crop_resize in Triton: images are read in place, without copying them first."""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from phalanx.kernels.gpu import use_device


@triton.jit
def _crop_and_resize(layouts, boxes, out, size, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program (image, row) writes one row of one resized image."""
    image, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    layout, box = layouts + image * 6, boxes + image * 5
    pixels = tl.load(layout).to(tl.pointer_type(tl.uint8))
    by_channel, by_row, by_column = tl.load(layout + 1), tl.load(layout + 2), tl.load(layout + 3)
    height, width = tl.load(layout + 4).to(tl.int32), tl.load(layout + 5).to(tl.int32)
    top, left = tl.load(box), tl.load(box + 1)
    scale_y, scale_x, mirrored = tl.load(box + 2), tl.load(box + 3), tl.load(box + 4)
    radius_y, radius_x = tl.maximum(scale_y, 1.0), tl.maximum(scale_x, 1.0)

    column = tl.arange(0, COLUMNS)
    source = tl.where(mirrored > 0, size - 1 - column, column)
    centre_y = top + (row + 0.5) * scale_y
    centre_x = left + (source + 0.5) * scale_x
    first_x = tl.floor(centre_x - radius_x).to(tl.int32)
    first_y = tl.maximum(tl.floor(centre_y - radius_y).to(tl.int32), 0)
    last_y = tl.minimum(tl.ceil(centre_y + radius_y).to(tl.int32), height)
    taps = tl.ceil(2 * radius_x).to(tl.int32) + 1

    red = tl.zeros([COLUMNS], tl.float32)
    green = tl.zeros([COLUMNS], tl.float32)
    blue = tl.zeros([COLUMNS], tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    for y in range(first_y, last_y):
        weight_y = tl.maximum(1 - tl.abs(y + 0.5 - centre_y) / radius_y, 0.0)
        for tap in range(0, taps):
            x = first_x + tap
            inside = (x >= 0) & (x < width) & (column < size)
            weight = tl.maximum(1 - tl.abs(x + 0.5 - centre_x) / radius_x, 0.0) * weight_y
            weight = tl.where(inside, weight, 0.0)
            pixel = pixels + y * by_row + x * by_column
            red += weight * tl.load(pixel, mask=inside, other=0).to(tl.float32)
            green += weight * tl.load(pixel + by_channel, mask=inside, other=0).to(tl.float32)
            blue += weight * tl.load(pixel + 2 * by_channel, mask=inside, other=0).to(tl.float32)
            total += weight
    target = out + ((image * size + row) * size + column) * 3
    inside_row = column < size
    tl.store(target, (red / total + 0.5).to(tl.uint8), mask=inside_row)
    tl.store(target + 1, (green / total + 0.5).to(tl.uint8), mask=inside_row)
    tl.store(target + 2, (blue / total + 0.5).to(tl.uint8), mask=inside_row)


def crop_and_resize_fused(
    images: Sequence[Tensor], boxes: NDArray[np.float32], size: int
) -> Tensor:
    """Boxes of images, resized to [N, size, size, 3].

    boxes: top, left, vertical and horizontal scale, and whether to mirror, for each image.
    """
    device = images[0].device
    layouts = torch.tensor(
        [(image.data_ptr(), *image.stride(), *image.shape[1:]) for image in images]
    ).to(device, non_blocking=True)
    table = torch.from_numpy(boxes).to(device, non_blocking=True)
    out = images[0].new_empty((len(images), size, size, 3))
    columns = triton.next_power_of_2(size)
    with use_device(device):
        _crop_and_resize[(len(images), size)](
            layouts, table, out, size, COLUMNS=columns, num_warps=4
        )
    return out
