"""A batch of JPEGs decoded and cropped without a Python object for each image: for lab scripts.

The product makes a tensor of every image and asks it for its address, which is 2 to 3 ms of Python
for a batch of 256. Here all addresses are arrays, and the sides come with the files instead of from
nvJPEG.
"""

from ctypes import c_void_p
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.data.loading.nvjpeg import _IMAGE, _RGB, NvJpeg
from phalanx.data.orientation import UPRIGHT
from phalanx.kernels.crop_resize import crop_and_resize
from phalanx.kernels.gpu import use_device


class Decoded(NamedTuple):
    """Decoded images one after the other, each of three planes."""

    flat: Tensor
    sides: NDArray[np.int64]
    starts: NDArray[np.int64]  # of each image in `flat`


def is_plain(jpegs: NDArray[np.void], files: list[Tensor]) -> bool:
    """Whether all files lie one after the other in memory, and no image is to be turned."""
    sizes = jpegs["size"]
    if not len(files) or (sizes <= 0).any() or (jpegs["orientation"] != UPRIGHT).any():
        return False
    return files[-1].data_ptr() == files[0].data_ptr() + int(sizes[:-1].sum())


def decode_arrays(nvjpeg: NvJpeg, jpegs: NDArray[np.void], files: list[Tensor]) -> Decoded:
    """The images of plain files, decoded once the current stream has come to this point."""
    sides, lengths = jpegs["sides"], jpegs["size"].astype(np.uint64)
    counts = sides.prod(axis=1)
    starts = 3 * (np.cumsum(counts) - counts)
    flat = torch.empty(int(3 * counts.sum()), dtype=torch.uint8, device=nvjpeg._device)
    images = np.zeros(len(counts), _IMAGE)
    images["channel"][:, :3] = (flat.data_ptr() + starts)[:, None] + counts[:, None] * np.arange(3)
    images["pitch"][:, :3] = sides[:, 1:]
    data = np.uint64(files[0].data_ptr()) + np.cumsum(lengths) - lengths
    arrays = [c_void_p(array.ctypes.data) for array in (data, lengths, images)]
    with nvjpeg._make_current():
        if nvjpeg._stream:
            nvjpeg._stream.wait_stream(torch.cuda.current_stream(nvjpeg._device))
        stream = c_void_p(nvjpeg._stream.cuda_stream if nvjpeg._stream else None)
        nvjpeg._call("nvjpegDecodeBatchedInitialize", nvjpeg._state, len(counts), 1, _RGB)
        try:
            nvjpeg._call("nvjpegDecodeBatched", nvjpeg._state, *arrays, stream)
        finally:
            if nvjpeg._stream:
                nvjpeg._stream.synchronize()
    return Decoded(flat, sides, starts)


def crop_arrays(
    decoded: Decoded, jpegs: NDArray[np.void], size: int, out: Tensor, *, pinned: bool
) -> None:
    """Write the crops to their rows of a batch; pinned: tables are sent from pinned memory."""
    rows = jpegs["row"]
    if not out.is_cuda:  # to try this out
        squares = crop_and_resize(split_images(decoded), jpegs["crop"], jpegs["flip"], size=size)
        out.index_copy_(0, torch.from_numpy(rows.copy()), squares)
        return
    from phalanx.kernels import crop_resize_fused

    kernel: Any = crop_resize_fused._crop_and_resize

    def send(table: NDArray[Any]) -> Tensor:
        here = torch.from_numpy(table)
        return (here.pin_memory() if pinned else here).to(out.device, non_blocking=True)

    layouts, boxes = (send(table) for table in make_tables(decoded, jpegs, size))
    is_whole = len(rows) == len(out) and bool((rows == np.arange(len(out))).all())
    squares = out if is_whole else out.new_empty((len(rows), *out.shape[1:]))
    columns = 1 << (size - 1).bit_length()
    with use_device(out.device):
        kernel[(len(rows), size)](layouts, boxes, squares, size, COLUMNS=columns, num_warps=4)
    if not is_whole:
        out.index_copy_(0, send(rows.copy()), squares)


def make_tables(
    decoded: Decoded, jpegs: NDArray[np.void], size: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The two tables of the kernel that crops: where images lie, and what to cut from them."""
    sides = decoded.sides
    layouts = np.empty((len(sides), 6), np.int64)
    layouts[:, 0] = decoded.flat.data_ptr() + decoded.starts
    layouts[:, 1], layouts[:, 2], layouts[:, 3] = sides.prod(axis=1), sides[:, 1], 1
    layouts[:, 4:] = sides
    crop = jpegs["crop"]
    parts = [crop[:, :2], crop[:, 2:] / size, jpegs["flip"][:, None]]
    return layouts, np.concatenate(parts, 1, dtype=np.float32)


def split_images(decoded: Decoded) -> list[Tensor]:
    """A tensor of each image."""
    lengths = (3 * decoded.sides.prod(axis=1)).tolist()
    parts = decoded.flat.split(lengths)
    return [part.view(3, *side) for part, side in zip(parts, decoded.sides.tolist(), strict=True)]
