"""Which images the GPU decodes: that depends on their positions and on their files."""

import re
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from phalanx.data.formats.decode import HEADER_ERRORS, JPEG_START, EncodedImage, Image
from phalanx.data.formats.sources import Split
from phalanx.plan.order import Order

try:
    import simplejpeg
except ImportError:  # reported by find_gpu_decode_problem
    simplejpeg = None

_JPEG_END = b"\xff\xd9"
_COLOURS, _SUBSAMPLINGS = ("YCbCr", "Gray"), ("444", "422", "420", "440", "Gray")
_SEGMENT = re.compile(rb"\xff+([^\xff])(..)", re.DOTALL)  # its kind and its length
_BASELINE, _SCAN = 0xC0, 0xDA  # kinds: a frame of the usual kind, and a scan


@dataclass(frozen=True)
class ImageCheck:
    """What a run knows from the pass in which the cores decode each image before the GPU may.

    since: the step from which on images have been checked. is_decided: whether it is known who
    decodes after that pass. waited: the share of its time that the GPU then waited for images; None
    if that could not be measured. cores_only: the images that stay with the cores, by index.
    """

    since: int
    is_decided: bool = False
    waited: float | None = None
    cores_only: tuple[int, ...] = ()


@dataclass(frozen=True)
class GpuShare:
    """The images of a split that the GPU decodes, if it can decode their files.

    unchecked: those left to the cores at any position. checked_until: at positions before this one,
    the cores check images.
    """

    percent: int
    unchecked: frozenset[int] = frozenset()
    checked_until: int = 0

    @classmethod
    def of_split(
        cls, split: Split, percent: int, order: Order | None, checked_since: int | None
    ) -> "GpuShare":
        """The share of one split; of images in training that must be checked first, see InputSpec.

        Images that the first pass leaves out are never checked, so they stay with the cores.
        """
        if checked_since is None:
            return cls(percent)
        if split == "valid" or order is None:
            return cls(0)
        number = order.find_next_pass(checked_since)
        until = (number + 1) * order.images * order.repeats
        return cls(percent, frozenset(order.find_dropped(number).tolist()), until)

    def find_rows(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which rows the GPU decodes: spread evenly, and the same however batches are split.

        >>> GpuShare(40).find_rows(np.arange(5)).tolist()
        [True, False, False, True, False]
        """
        return positions * self.percent % 100 < self.percent

    def takes(self, index: int, image: Image) -> TypeGuard[EncodedImage]:
        """Whether the GPU decodes this image where it is the GPU's turn."""
        return index not in self.unchecked and is_gpu_decodable(image)


def is_gpu_decodable(image: Image) -> TypeGuard[EncodedImage]:
    """Whether nvJPEG's engines can decode it: a complete baseline JPEG of a usual kind."""
    if not isinstance(image, EncodedImage) or simplejpeg is None:
        return False
    if not (image.data.startswith(JPEG_START) and image.data.endswith(_JPEG_END)):
        return False  # maybe truncated, which the device would not report
    try:
        *_, colours, subsampling = simplejpeg.decode_jpeg_header(image.data)
    except HEADER_ERRORS:
        return False
    return colours in _COLOURS and subsampling in _SUBSAMPLINGS and _is_baseline(image.data)


def _is_baseline(data: bytes) -> bool:
    """Whether a JPEG's frame is neither progressive nor of another rare kind, in a single scan."""
    place, components = len(JPEG_START), b""
    while (found := _SEGMENT.match(data, place)) is not None:
        kind, content = found[1][0], data[found.end() : found.end() + 6]
        if kind == _SCAN:
            return components != b"" and content[:1] == components
        if kind == _BASELINE:
            components = content[5:]  # their number
        place = found.end(1) + int.from_bytes(found[2], "big")
    return False
