"""The opened rows of a batch: pixels, or a JPEG with its crop for the GPU to decode.

Which rows the GPU decodes depends on their positions, and whether it can decode them on the file.
Both kinds are packed into a slot of memory, pixels first: the consumer copies two blocks and no
single images. A JPEG that does not fit into the slot is read again by the process that decodes
it, so the size of a slot affects only the speed.
"""

from collections.abc import Callable, Generator, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.data.formats.decode import EncodedImage
from phalanx.data.formats.index import IndexedSource
from phalanx.data.loading.reader import BatchRequest, Reader
from phalanx.data.transforms.transform import (
    FloatCrop,
    choose_crop_and_flip,
    find_centre_crop,
)

_Integers = NDArray[np.int64]
_Bytes = NDArray[np.uint8]

_USUAL_BYTES = 3 * 2**15  # of a typical photograph of ImageNet
_MOST_ROOM = 2**20  # bytes of a slot for each row; a JPEG that does not fit only costs time


JPEG_FIELDS = np.dtype(
    [
        ("row", np.int64),  # in the batch
        ("size", np.int64),  # in bytes; 0 if it did not fit into the slot
        ("sides", np.int64, 2),  # height and width of the upright image
        ("orientation", np.int64),  # EXIF orientation, by which it is still to be turned
        ("crop", np.float64, 4),  # top, left, height, width
        ("flip", np.bool_),
    ],
    align=True,  # torch needs the values of a column aligned
)
_JpegFacts = tuple[tuple[int, int], int, FloatCrop, bool]  # the last four fields


class SlotContents(NamedTuple):
    """The contents of a slot of memory; sent as JSON."""

    indices: list[int]  # of each row; -1 for one that is not scored
    pixel_rows: list[int]  # rows whose pixels are at the start of the slot, in this order
    jpegs: list[tuple[int, int, *_JpegFacts]]  # JPEGs whose bytes follow, in this order


class OpenedRows(NamedTuple):
    """Some rows of a batch; the arrays are overwritten when the next rows are requested."""

    indices: _Integers
    pixel_rows: _Integers
    pixels: _Bytes  # [len(pixel_rows), size, size, 3]
    jpegs: NDArray[np.void]  # of JPEG_FIELDS; rows are counted from the first of these rows
    files: _Bytes  # the bytes of the JPEGs, concatenated


OpenRows = Callable[[Iterable[BatchRequest]], Generator[OpenedRows, None, None]]


def find_row_bytes(reader: Reader) -> int:
    """The bytes of a slot for each row: enough for its pixels, or a JPEG of twice the mean size."""
    spec, source = reader.spec, reader.source
    pixels = 3 * spec.image_size**2
    if not spec.gpu_percent or not isinstance(source, IndexedSource):
        return pixels
    mean = int(source.index.sizes.clip(0).mean()) or _USUAL_BYTES  # an index may have no sizes
    return max(pixels, min(2 * mean, _MOST_ROOM))


def fill_slot(reader: Reader, request: BatchRequest, slot: _Bytes) -> SlotContents:
    """Open the images of a request, and decode those that the GPU does not decode."""
    positions, size, _ = request
    is_gpu_row = reader.find_gpu_rows(request)
    pixels = slot[: len(positions) * 3 * size * size].reshape(-1, size, size, 3)
    indices, pixel_rows = np.empty_like(positions), np.flatnonzero(~is_gpu_row).tolist()
    if pixel_rows:
        filled = reader.fill(positions[~is_gpu_row], pixels[: len(pixel_rows)])
        indices[pixel_rows] = filled.indices
    files: list[bytes] = []
    facts: list[tuple[int, _JpegFacts]] = []  # of each file: its row, and how it is cropped
    gpu_rows = np.flatnonzero(is_gpu_row).tolist()
    sampled, draws = reader.find_samples(positions[is_gpu_row]) if gpu_rows else (positions[:0], [])
    if isinstance(reader.source, IndexedSource):
        reader.source.prefetch(sampled.tolist())
    for row, sample, row_draws in zip(gpu_rows, sampled.tolist(), draws, strict=True):
        out, opened = pixels[len(pixel_rows)], reader.open(sample)
        # the host decodes it after all if the GPU cannot; a bad one is replaced by another image
        index, image = reader.fill_row(sample, opened, row_draws, out, skips=reader.leaves_to_gpu)
        indices[row] = index
        if isinstance(image, EncodedImage):
            files.append(image.data)
            facts.append((row, describe_jpeg(reader, index, image, row_draws, size)))
        else:
            pixel_rows.append(row)
    sizes = _pack_files(files, slot[len(pixel_rows) * 3 * size * size :])
    jpegs = [(row, stored, *rest) for (row, rest), stored in zip(facts, sizes, strict=True)]
    return SlotContents(indices.tolist(), pixel_rows, jpegs)


def view_slot(contents: SlotContents, size: int, slot: _Bytes) -> OpenedRows:
    """The contents of a filled slot, without copying."""
    jpegs = np.array([tuple(jpeg) for jpeg in contents.jpegs], JPEG_FIELDS)
    end = len(contents.pixel_rows) * 3 * size * size
    return OpenedRows(
        np.array(contents.indices, np.int64),
        np.array(contents.pixel_rows, np.int64),
        slot[:end].reshape(-1, size, size, 3),
        jpegs,
        slot[end : end + int(jpegs["size"].sum())],
    )


def open_rows_here(
    reader: Reader, requests: Iterable[BatchRequest]
) -> Generator[OpenedRows, None, None]:
    """The rows of each request, opened in this process on demand."""
    slot, row_bytes = np.empty(0, np.uint8), find_row_bytes(reader)
    for request in requests:
        needed = len(request.positions) * row_bytes
        slot = slot if len(slot) >= needed else np.empty(needed, np.uint8)
        yield view_slot(fill_slot(reader, request, slot), request.size, slot)


def describe_jpeg(
    reader: Reader, index: int, image: EncodedImage, draws: list[float], size: int
) -> _JpegFacts:
    """How a JPEG is to be turned, cropped and flipped: the last four of JPEG_FIELDS."""
    spec, sides, flip = reader.spec.transform, (image.height, image.width), False
    crop: FloatCrop
    if reader.split == "train":
        crop, flip = choose_crop_and_flip(spec, sides, reader.find_box(index, image), draws)
    else:
        crop = find_centre_crop(*sides, size, share=spec.eval_crop)
    return sides, image.orientation, crop, flip


def _pack_files(files: list[bytes], room: _Bytes) -> list[int]:
    """Concatenate files; returns the size of each, 0 for one that does not fit."""
    used, sizes = 0, []
    for file in files:
        size = len(file) if used + len(file) <= len(room) else 0
        room[used : used + size] = np.frombuffer(file, np.uint8, size)
        used += size
        sizes.append(size)
    return sizes
