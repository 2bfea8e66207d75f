"""Sets of small images that lie on the device as a whole and are augmented there.

The chances are the host's and so are the pixels, byte for byte.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.data.formats.arrays import ArraySource
from phalanx.data.formats.sources import Source
from phalanx.data.loading.prefetch import read_ahead
from phalanx.data.loading.reader import Batch, InputSpec, Reader
from phalanx.data.loading.worker_pool import BatchRequest
from phalanx.data.transforms.transform import PADDING
from phalanx.kernels.shift import shift_batch, to_rgb

_SHARE_OF_FREE = 0.25  # of a GPU's memory; the rest is the model's
STRETCH = 2**15  # images whose chances are drawn together


def why_not_resident(recipe: InputSpec, source: object) -> str:
    """What keeps a set from lying on the device; empty where nothing does."""
    treatment = recipe.treatment
    if not isinstance(source, ArraySource):
        return f"{recipe.data} is not a set of small images in one array"
    if source.pixels.shape[1:3] != (recipe.image_size, recipe.image_size) or recipe.growth:
        return "its images would have to be resized, which the host does"
    if treatment.jitter or treatment.auto != "none" or treatment.erasing:
        return "--color-jitter, --auto-augment and --random-erasing are done by the host"
    return ""


def has_room(sources: Sequence[Source], device: torch.device) -> bool:
    """Whether a GPU takes the sets without a thought."""
    free, _ = torch.cuda.mem_get_info(device)
    arrays = [source.pixels.nbytes for source in sources if isinstance(source, ArraySource)]
    return sum(arrays) < _SHARE_OF_FREE * free


class _Stretch(NamedTuple):
    """What the batches of a few steps are made of."""

    wishes: list[BatchRequest]
    indices: NDArray[np.int64]  # of the images of all of them, one after the other
    places: NDArray[np.int32]  # what phalanx.kernels.shift takes, and below it the labels


class ResidentFiller:
    """Cuts batches out of a set on the device.

    A batch costs the host a call or two, because everything else is done for many steps at once.
    """

    immediate = True

    def __init__(self, reader: Reader, device: torch.device):
        assert isinstance(reader.source, ArraySource)
        self._reader, self._source = reader, reader.source
        self._device = device
        self._images = torch.tensor(reader.source.pixels, device=device)

    def batches(self, wishes: Iterable[BatchRequest]) -> Iterator[Batch]:
        """The images that were wished for, on the device."""
        if self._reader.split == "valid":
            yield from map(self._cut_scored, wishes)
            return
        with closing(read_ahead(map(self._look_up, stretches_of(wishes)))) as ahead:
            for stretch in ahead:
                yield from self._cut(stretch)

    def _look_up(self, wishes: list[BatchRequest]) -> _Stretch:
        """Which images they are, and the chances they meet."""
        recipe, transform = self._reader.recipe, self._reader.transform
        assert recipe.order is not None
        keys = np.concatenate([wish.keys for wish in wishes])
        indices = recipe.order.indices(keys)
        places = np.zeros((5, len(keys)), np.int32)
        places[0], places[4] = indices, self._source.labels[indices]
        if recipe.treatment.augment != "none":
            down, right, chance = transform.draw(recipe.seed, keys).T
            reach = 2 * PADDING + 1
            places[1], places[2], places[3] = down * reach, right * reach, chance < 0.5
            places[1:3] -= PADDING
        return _Stretch(wishes, indices, places)

    def _cut(self, stretch: _Stretch) -> Iterator[Batch]:
        whole = self._move(stretch.places)
        labels, begin = whole[4].long(), 0
        for keys, _ in stretch.wishes:
            part = slice(begin, begin + len(keys))
            pixels = shift_batch(self._images, whole[:4, part])
            yield Batch(pixels, labels[part], stretch.indices[part], keys)
            begin = part.stop

    def _cut_scored(self, wish: BatchRequest) -> Batch:
        keys = wish.keys
        pixels = to_rgb(self._images[self._move(keys)])
        return Batch(pixels, self._source.labels[keys], keys, keys)

    def _move(self, values: NDArray[Any]) -> Tensor:
        host = torch.from_numpy(values)
        if self._device.type == "cuda":
            host = host.pin_memory()  # from where the copy does not wait for the device
        return host.to(self._device, non_blocking=True)


def stretches_of(wishes: Iterable[BatchRequest]) -> Iterator[list[BatchRequest]]:
    """The wishes in portions of about STRETCH images."""
    coming = iter(wishes)
    while first := next(coming, None):
        more = max(1, STRETCH // len(first.keys)) - 1
        yield [first, *islice(coming, more)]
