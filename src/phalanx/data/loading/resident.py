"""Datasets of small images that are kept on the device as a whole and augmented there.

The random numbers are drawn on the host, and the pixels equal the host's, byte for byte.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.data.formats.arrays import ArraySource
from phalanx.data.formats.sources import Source
from phalanx.data.loading.loader import BatchBackend, prefetch
from phalanx.data.loading.reader import Batch, BatchRequest, InputSpec, Reader
from phalanx.kernels.shift import shift_batch, to_rgb

_MAX_FREE_FRACTION = 0.25  # of a GPU's free memory; the rest is left to the model
BLOCK = 2**15  # images whose random numbers are drawn together


def find_resident_problem(spec: InputSpec, source: object) -> str:
    """Why a dataset cannot be kept on the device; empty if it can."""
    transform = spec.transform
    if not isinstance(source, ArraySource):
        return f"{spec.data} is not a set of small images in one array"
    if source.pixels.shape[1:3] != (spec.image_size, spec.image_size) or spec.growth:
        return "its images would have to be resized, which the host does"
    if transform.color_jitter or transform.auto_augment != "none" or transform.random_erasing:
        return "--color-jitter, --auto-augment and --random-erasing are done by the host"
    return ""


def fits_on_device(sources: Sequence[Source], device: torch.device) -> bool:
    """Whether the datasets need less than a quarter of a GPU's free memory."""
    free, _ = torch.cuda.mem_get_info(device)
    arrays = [source.pixels.nbytes for source in sources if isinstance(source, ArraySource)]
    return sum(arrays) < _MAX_FREE_FRACTION * free


class _Block(NamedTuple):
    """The data that the batches of several steps are made from."""

    requests: list[BatchRequest]
    indices: NDArray[np.int64]  # of the images of all requests, concatenated
    table: NDArray[np.int32]  # the four rows for phalanx.kernels.shift, then one of labels


class ResidentBackend(BatchBackend):
    """Makes batches from a dataset on the device.

    A batch costs the host one or two calls: everything else is done for many steps at once.
    """

    needs_prefetch = False

    def __init__(self, reader: Reader, device: torch.device):
        assert isinstance(reader.source, ArraySource)
        self._reader, self._source = reader, reader.source
        self._device = device
        self._images = torch.tensor(reader.source.pixels, device=device)

    def batches(self, requests: Iterable[BatchRequest]) -> Generator[Batch, None, None]:
        """The images on the device."""
        if self._reader.split == "valid":
            for positions, *_ in requests:
                pixels = to_rgb(self._images[self._copy(positions)])
                yield Batch(pixels, self._source.labels[positions], positions, positions)
            return
        with closing(prefetch(map(self._draw_block, group_requests(requests)))) as blocks:
            for block in blocks:
                yield from self._make_batches(block)

    def _draw_block(self, requests: list[BatchRequest]) -> _Block:
        """The images of the requests, and how each is shifted and mirrored."""
        spec, transform = self._reader.spec, self._reader.transform
        assert spec.order is not None
        positions = np.concatenate([request.positions for request in requests])
        indices = spec.order.indices(positions)
        table = np.zeros((5, len(positions)), np.int32)
        table[0], table[4] = indices, self._source.labels[indices]
        if spec.transform.augment != "none":
            down, right, flip = transform.draw(spec.seed, positions, spec.order).T
            offsets = 2 * spec.transform.shift + 1
            table[1], table[2], table[3] = down * offsets, right * offsets, flip < 0.5
            table[1:3] -= spec.transform.shift
        return _Block(requests, indices, table)

    def _make_batches(self, block: _Block) -> Iterator[Batch]:
        table = self._copy(block.table)
        labels, begin = table[4].long(), 0
        reflects = self._reader.spec.transform.reflects
        for positions, *_ in block.requests:
            rows = slice(begin, begin + len(positions))
            pixels = shift_batch(self._images, table[:4, rows], reflects=reflects)
            yield Batch(pixels, labels[rows], block.indices[rows], positions)
            begin = rows.stop

    def _copy(self, values: NDArray[Any]) -> Tensor:
        host = torch.from_numpy(values)
        if self._device.type == "cuda":
            host = host.pin_memory()  # so that the copy does not wait for the device
        return host.to(self._device, non_blocking=True)


def group_requests(requests: Iterable[BatchRequest]) -> Iterator[list[BatchRequest]]:
    """The requests in groups of about BLOCK images."""
    coming = iter(requests)
    while first := next(coming, None):
        more = max(1, BLOCK // len(first.positions)) - 1
        yield [first, *islice(coming, more)]
