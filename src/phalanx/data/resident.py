"""Sets of small images that lie on the device as a whole and are augmented there.

The chances are the host's and so are the pixels, byte for byte.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.data.arrays import ArraySource
from phalanx.data.batches import Batch, Reader, Recipe
from phalanx.data.pool import Wish
from phalanx.data.sources import Source
from phalanx.data.transforms import PADDING

SHARE_OF_FREE = 0.25  # of a GPU's memory; the rest is the model's


def why_not_resident(recipe: Recipe, source: object) -> str:
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
    return sum(arrays) < SHARE_OF_FREE * free


class Looked(NamedTuple):
    """What a batch is made of."""

    keys: NDArray[np.int64]
    indices: NDArray[np.int64]
    draws: NDArray[np.float64] | None  # None where nothing is augmented


class ResidentFiller:
    """Cuts batches out of a set on the device."""

    def __init__(self, reader: Reader, device: torch.device):
        assert isinstance(reader.source, ArraySource)
        self._reader, self._source = reader, reader.source
        self._device = device
        self._images = torch.tensor(reader.source.pixels, device=device)

    def prepare(self, wish: Wish) -> Looked:
        """Which images they are, and the chances they meet."""
        if self._reader.split == "valid":
            return Looked(wish.keys, wish.keys, None)
        indices, draws = self._reader.look_up(wish.keys)
        plain = self._reader.recipe.treatment.augment == "none"
        return Looked(wish.keys, indices, None if plain else np.array(draws))

    def fill(self, looked: Looked) -> Batch:
        """The images that were wished for, on the device."""
        keys, indices, draws = looked
        if draws is None:
            pixels = in_colour(self._images[self._move(indices)])
        else:
            pixels = self._pad_cropped(indices, draws)
        ready = torch.cuda.current_stream(self._device).record_event() if pixels.is_cuda else None
        return Batch(pixels, self._source.labels[indices], indices, keys, ready)

    def _pad_cropped(self, indices: NDArray[np.int64], draws: NDArray[np.float64]) -> Tensor:
        """Twin of phalanx.data.transforms.pad_crop."""
        down, right, chance = draws.T
        places = 2 * PADDING + 1
        shifts = np.stack([indices, down * places, right * places, chance < 0.5]).astype(np.int64)
        image, top, left, flip = self._move(shifts).unsqueeze(2)
        last = self._images.shape[1] - 1
        edge = torch.arange(-PADDING, last + 1 - PADDING, device=self._device)
        row, column = top + edge, left + edge
        column = torch.where(flip.bool(), last - column, column)
        inside = ((row >= 0) & (row <= last))[:, :, None] & ((column >= 0) & (column <= last))[
            :, None
        ]
        row, column = row.clamp(0, last), column.clamp(0, last)
        found = in_colour(self._images[image[:, :, None], row[:, :, None], column[:, None, :]])
        return found * inside[..., None]

    def _move(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)


def in_colour(images: Tensor) -> Tensor:
    """Grey images with three equal channels."""
    return images if images.ndim == 4 else images[..., None].expand(*images.shape, 3)
