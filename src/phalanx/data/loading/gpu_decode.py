"""JPEGs decoded, cut and brought to size on the GPU: the images stay there.

The same images, parts, mirrors and labels as a Reader gives, with pixels that differ a little: the
GPU's decoder rounds otherwise, and parts are resized as Pillow's bilinear filter does it.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.data.formats.decode import (
    JPEG_START,
    MAX_PIXELS,
    BadImage,
    EncodedImage,
    Image,
    Pixels,
    decode_image,
    image_shape,
)
from phalanx.data.formats.folder import FolderSource
from phalanx.data.formats.index import IndexedSource
from phalanx.data.loading.prefetch import read_ahead
from phalanx.data.loading.reader import Batch, Reader
from phalanx.data.loading.worker_pool import BatchRequest
from phalanx.data.transforms.transform import FloatPart, TransformSpec, centre_part, choose_part
from phalanx.errors import ConfigError
from phalanx.kernels.cut import cut_batch

try:
    import simplejpeg
except ImportError:  # the CPU's path does without it
    simplejpeg = None

Decode = Callable[[list[bytes]], list[Tensor]]  # JPEGs to uint8 [3, height, width] on the device
_Outcome = Tensor | Pixels | BadImage  # of decoding: on the device, on the host, or neither

MOST_BYTES = 2**30  # of images decoded at a time
_READERS = 8
_USUAL_SWITCH_S = sys.getswitchinterval()
_SWITCH_S = 1e-4  # between threads: at the usual 5 ms a finished decode waits for a busy reader
_JPEG_END = b"\xff\xd9"
_COLOURS = ("YCbCr", "Gray")
_BLANK = np.zeros((1, 1, 3), np.uint8)  # stands in for an image that is not scored
_ON_THE_HOST = {"jitter": "color-jitter", "auto": "auto-augment", "erasing": "random-erasing"}


class _Opened(NamedTuple):
    """Images that are read and not yet decoded."""

    wish: BatchRequest
    indices: NDArray[np.int64]
    draws: list[list[float]]
    images: list[Image]
    parts: list[tuple[FloatPart, bool]]  # of each image that is shown, and whether it is mirrored
    suited: list[bool]  # for the device to decode


class GpuDecoder:
    """Fills batches as its reader does, on a device; `close` ends its threads.

    The work runs on a stream of its own.
    decode: what turns JPEGs into tensors on the device, nvJPEG if not given. refused: how many
    calls of it failed, whose images were then decoded on the host.
    """

    immediate = False

    def __init__(self, reader: Reader, device: torch.device, *, decode: Decode | None = None):
        _refuse_host_work(reader.recipe.treatment, training=reader.split == "train")
        self.reader, self.device = reader, device
        self.refused = 0
        self._decode = decode or NvJpeg(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._threads = ThreadPoolExecutor(_READERS, "gpu-decode")
        sys.setswitchinterval(_SWITCH_S)

    def close(self) -> None:
        """End the threads; does nothing the second time."""
        self._threads.shutdown()
        sys.setswitchinterval(_USUAL_SWITCH_S)

    def batches(self, wishes: Iterable[BatchRequest]) -> Iterator[Batch]:
        """The images that were wished for; files are opened ahead."""
        with closing(read_ahead(map(self.prepare, wishes))) as ahead:
            yield from map(self.fill, ahead)

    def prepare(self, wish: BatchRequest) -> _Opened:
        """What is to be decoded, and which part of each image is shown; may run ahead of `fill`."""
        training = self.reader.split == "train"
        keys = wish.keys
        indices, draws = self.reader.look_up(keys) if training else (keys.copy(), [[]] * len(keys))
        images = self._open(indices)
        parts = list(map(partial(self._choose, wish.size), indices.tolist(), images, draws))
        return _Opened(wish, indices, draws, images, parts, list(map(suits_gpu, images)))

    def fill(self, opened: _Opened) -> Batch:
        """The images that were wished for, on the device, once `ready` has come."""
        if self._stream is None:
            return self._fill(opened)
        with torch.cuda.stream(self._stream):
            batch = self._fill(opened)
        return replace(batch, ready=self._stream.record_event())

    def _fill(self, opened: _Opened) -> Batch:
        size, indices = opened.wish.size, opened.indices
        done = []
        for rows in _portions(opened.images):
            tensors = self._settle(opened, rows)
            parts, flips = zip(*opened.parts[rows], strict=True)
            done.append(cut_batch(tensors, parts, flips, size=size))
        labels = np.where(indices < 0, 0, self.reader.source.labels[indices])
        return Batch(torch.cat(done) if done[1:] else done[0], labels, indices, opened.wish.keys)

    def _choose(
        self, size: int, index: int, image: Image, draws: Sequence[float]
    ) -> tuple[FloatPart, bool]:
        """The part of an image that is shown, and whether it is mirrored."""
        treatment = self.reader.recipe.treatment
        if self.reader.split == "valid":
            return centre_part(*image_shape(image), size, share=treatment.centre), False
        box = None if self.reader.boxes is None else self.reader.boxes(index)
        return choose_part(treatment, image_shape(image), box, draws)

    def _open(self, indices: NDArray[np.int64]) -> list[Image]:
        """The images, read from the disk; where one cannot be, its index changes, too."""
        bad = self.reader.findings.bad
        wanted = [index for index in indices.tolist() if index not in bad]
        opened = dict(zip(wanted, self._open_some(wanted), strict=True))
        images = []
        for row, index in enumerate(indices.tolist()):
            image = self.reader.take(index, opened[index]) if index in opened else None
            if image is None:
                indices[row], image = self._instead(index)
            images.append(image)
        return images

    def _open_some(self, indices: list[int]) -> Iterable[Image | BadImage]:
        """Files are opened by several threads; pieces of large ones are announced together."""
        source = self.reader.source
        read = self._threads.map if isinstance(source, FolderSource) else map
        if isinstance(source, IndexedSource):
            source.prefetch(indices)
        return read(self.reader.try_open, indices)

    def _instead(self, index: int) -> tuple[int, Image]:
        """What takes the place of a bad image: the next one in training, nothing when scoring."""
        return self.reader.next_readable(index) if self.reader.split == "train" else (-1, _BLANK)

    def _settle(self, opened: _Opened, rows: slice) -> list[Tensor]:
        """The pixels on the device; what was opened changes where a bad image gives way."""
        tensors = []
        for row, outcome in enumerate(self._decode_all(opened, rows), start=rows.start):
            pixels = outcome
            while isinstance(pixels, BadImage):
                self.reader.set_aside(int(opened.indices[row]), pixels)
                self._replace(opened, row)
                pixels = self._decode_one(opened.images[row])
            tensors.append(pixels if isinstance(pixels, Tensor) else self._upload(pixels))
        return tensors

    def _replace(self, opened: _Opened, row: int) -> None:
        """Put another image in the place of a bad one."""
        index, image = self._instead(int(opened.indices[row]))
        opened.indices[row], opened.images[row] = index, image
        opened.parts[row] = self._choose(opened.wish.size, index, image, opened.draws[row])

    def _decode_all(self, opened: _Opened, rows: slice) -> list[_Outcome]:
        """The pixels of each image, from the device where it can, else from the host."""
        images = opened.images[rows]
        files = {
            row: image.data
            for row, (image, suited) in enumerate(zip(images, opened.suited[rows], strict=True))
            if suited and isinstance(image, EncodedImage)
        }
        there = self._decode_there(list(files.values()))
        found: dict[int, _Outcome] = dict(zip(files, there, strict=False))
        rest = [row for row in range(len(images)) if row not in found]
        if files and not there:  # one of them was refused: each by itself tells which
            found.update((row, self._decode_one(images[row])) for row in rest)
        else:
            here = self._threads.map(_decode_here, [images[row] for row in rest])
            found.update(zip(rest, here, strict=True))
        return [found[row] for row in range(len(images))]

    def _decode_there(self, files: list[bytes]) -> list[Tensor]:
        """The images of these files; none at all where the device refuses one of them."""
        try:
            return self._decode(files) if files else []
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError:
            self.refused += 1
            return []

    def _decode_one(self, image: Image) -> _Outcome:
        """One image by itself, from the device where it can: the same whenever it is asked for."""
        if isinstance(image, EncodedImage) and suits_gpu(image):
            there = self._decode_there([image.data])
            return there[0] if there else _decode_here(image)
        return _decode_here(image)

    def _upload(self, pixels: Pixels) -> Tensor:
        writable = np.require(pixels, requirements=["C", "W"])  # torch warns about others
        return torch.from_numpy(writable).to(self.device, non_blocking=True).permute(2, 0, 1)


class NvJpeg:
    """Decodes JPEGs by nvJPEG, which torchvision brings along."""

    def __init__(self, device: torch.device):
        self._io = import_module("torchvision.io")
        self._device = device
        self._room = np.empty(0, np.uint8)  # kept: fresh memory costs more than the copy

    def __call__(self, files: list[bytes]) -> list[Tensor]:
        """The images on the device; raises RuntimeError when one cannot be decoded."""
        sizes = [len(file) for file in files]
        if sum(sizes) > len(self._room):
            self._room = np.empty(2 * sum(sizes), np.uint8)
        joined = self._room[: sum(sizes)]
        np.concatenate([np.frombuffer(file, np.uint8) for file in files], out=joined)
        # torchvision decodes on its own stream, into memory that work of ours may still be reading
        torch.cuda.current_stream(self._device).synchronize()
        parts = list(torch.from_numpy(joined).split(sizes))
        mode = self._io.ImageReadMode.RGB
        return self._io.decode_jpeg(parts, mode=mode, device=self._device)


def _portions(images: list[Image]) -> list[slice]:
    """Neighbours whose pixels fit into memory together."""
    sizes = [3 * height * width for height, width in map(image_shape, images)]
    bounds = np.flatnonzero(np.diff(np.cumsum(sizes) // MOST_BYTES)) + 1
    return [slice(*ends) for ends in pairwise([0, *bounds.tolist(), len(images)])]


def suits_gpu(image: Image) -> bool:
    """Whether nvJPEG is to decode it: a whole JPEG of a usual kind, and not too large."""
    if not isinstance(image, EncodedImage) or image.height * image.width > MAX_PIXELS:
        return False
    if not (image.data.startswith(JPEG_START) and image.data.endswith(_JPEG_END)):
        return False  # cut short perhaps, which the device would not tell
    try:
        return simplejpeg.decode_jpeg_header(image.data)[2] in _COLOURS
    except ValueError:
        return False


def _decode_here(image: Image) -> Pixels | BadImage:
    """The whole image, decoded on the host, or what is wrong with it."""
    try:
        return decode_image(image)
    except BadImage as bad:
        return bad


def _refuse_host_work(treatment: TransformSpec, *, training: bool) -> None:
    """Raise ConfigError for a treatment that only the host knows."""
    if treatment.augment != "resized-crop":
        raise ConfigError("--gpu-decode: is for photographs of any size; leave it out for this set")
    for name, option in _ON_THE_HOST.items():
        if training and getattr(treatment, name) != getattr(TransformSpec, name):
            raise ConfigError(f"--gpu-decode: --{option} runs on the CPU; leave one of them out")


def gpu_decode_problem(device: torch.device) -> str:
    """Why JPEGs cannot be decoded on this device; empty when they can."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"{device} is no CUDA device that can be used"
    if simplejpeg is None:
        return "simplejpeg is not installed"
    try:
        NvJpeg(device)([simplejpeg.encode_jpeg(np.zeros((16, 16, 3), np.uint8))])
    except (ImportError, OSError) as cause:
        return f"torchvision does not import ({cause})"
    except (RuntimeError, AttributeError) as cause:
        return f"torchvision decodes no JPEG there ({str(cause).partition(chr(10))[0]})"
    return ""
