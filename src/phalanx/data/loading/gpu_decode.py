"""JPEGs decoded, cropped and resized on the GPU: the images stay there.

The same images, crops, mirrors and labels as a Reader gives, with pixels that differ a little: the
GPU's decoder rounds otherwise, and crops are resized as Pillow's bilinear filter does it.

A batch is made in two phases, so that the disk and the GPU work at the same time. A thread opens
the files of the next batch: it reads their bytes and headers and chooses the crops, which takes
their sizes and no pixels. Then the batch is decoded, on a stream of its own.

What nvJPEG cannot do, the host does: other formats, unusual colours, and files that end early, of
which nvJPEG would say nothing. It answers for a whole batch: when it fails for one image, none is
decoded. All are then tried again one by one, and those that fail alone go to the host, so that an
image is called bad only when the host cannot decode it either.
"""

import sys
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor

from phalanx.data.formats.decode import (
    JPEG_START,
    BadImage,
    EncodedImage,
    Image,
    Pixels,
    decode_image,
    image_shape,
)
from phalanx.data.formats.folder import FolderSource
from phalanx.data.formats.index import IndexedSource
from phalanx.data.loading.loader import BatchBackend, prefetch
from phalanx.data.loading.reader import Batch, BatchRequest, Reader
from phalanx.data.orientation import TURNS, UPRIGHT
from phalanx.data.transforms.transform import (
    FloatCrop,
    TransformSpec,
    choose_crop_and_flip,
    find_centre_crop,
)
from phalanx.errors import ConfigError
from phalanx.kernels.crop_resize import crop_and_resize

try:
    import simplejpeg
except ImportError:  # the CPU's path does without it
    simplejpeg = None

Decode = Callable[[list[bytes]], list[Tensor]]  # JPEGs to uint8 [3, height, width] on the device
_Decoded = Tensor | Pixels | BadImage  # on the device, on the host, or neither

MAX_DECODED_BYTES = 2**30  # of images decoded at a time
_READERS = 8
_USUAL_SWITCH_S = sys.getswitchinterval()
_SWITCH_S = 1e-4  # between threads: at the usual 5 ms a finished decode waits for a busy reader
_JPEG_END = b"\xff\xd9"
_COLOURS = ("YCbCr", "Gray")
_BLANK = np.zeros((1, 1, 3), np.uint8)  # stands in for an image that is not scored
_HOST_OPTIONS = ("color_jitter", "auto_augment", "random_erasing")


@dataclass
class _OpenedImage:
    """An image of a batch that is read and not yet decoded."""

    index: int  # -1 for one that is not scored
    image: Image
    draws: list[float]
    crop: FloatCrop
    flip: bool
    jpeg: bytes | None  # what the device is to decode, if it can


class _OpenedBatch(NamedTuple):
    request: BatchRequest
    rows: list[_OpenedImage]


class GpuDecoder(BatchBackend):
    """Makes the batches that its reader would, on a device.

    decode: what turns JPEGs into tensors on the device, nvJPEG if not given. failed_calls: how many
    calls of it failed, whose images were then tried one by one.
    """

    def __init__(self, reader: Reader, device: torch.device, *, decode: Decode | None = None):
        _refuse_host_options(reader.spec.transform, training=reader.split == "train")
        self.reader, self.device = reader, device
        self.failed_calls = 0
        self._decode = decode or NvJpeg(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._threads = ThreadPoolExecutor(_READERS, "gpu-decode")
        sys.setswitchinterval(_SWITCH_S)

    def close(self) -> None:
        """End the threads; does nothing the second time."""
        self._threads.shutdown()
        sys.setswitchinterval(_USUAL_SWITCH_S)

    def batches(self, requests: Iterable[BatchRequest]) -> Generator[Batch, None, None]:
        """The batch of each request; files are opened ahead."""
        with closing(prefetch(map(self.open_batch, requests))) as opened:
            yield from map(self.decode_batch, opened)

    def open_batch(self, request: BatchRequest) -> _OpenedBatch:
        """The images to decode, and the crop of each; may run ahead of `decode_batch`."""
        positions, size = request
        indices, draws = self.reader.find_samples(positions)
        opened = self._open_images(indices.tolist())
        rows = [
            self._choose_crop(index, image, numbers, size)
            for (index, image), numbers in zip(opened, draws, strict=True)
        ]
        return _OpenedBatch(request, rows)

    def _open_images(self, indices: list[int]) -> list[tuple[int, Image]]:
        """Each image, or what takes its place, with its index.

        Files are opened by several threads; pieces of large ones are announced together.
        """
        reader = self.reader
        good = [index for index in indices if index not in reader.problems.bad]
        if isinstance(reader.source, IndexedSource):
            reader.source.prefetch(good)
        read = self._threads.map if isinstance(reader.source, FolderSource) else map
        opened = dict(zip(good, read(reader.try_open, good), strict=True))
        images = []
        for index in indices:
            image = reader.record(index, opened[index]) if index in opened else None
            images.append(self._find_replacement(index) if image is None else (index, image))
        return images

    def _find_replacement(self, index: int) -> tuple[int, Image]:
        """What takes the place of a bad image: the next one in training, nothing when scoring."""
        training = self.reader.split == "train"
        return self.reader.find_next_readable(index) if training else (-1, _BLANK)

    def _choose_crop(self, index: int, image: Image, draws: list[float], size: int) -> _OpenedImage:
        spec, sides, flip = self.reader.spec.transform, image_shape(image), False
        crop: FloatCrop
        if self.reader.split == "train":
            box = self.reader.find_box(index, image)
            crop, flip = choose_crop_and_flip(spec, sides, box, draws)
        else:
            crop = find_centre_crop(*sides, size, share=spec.eval_crop)
        jpeg = image.data if is_gpu_decodable(image) else None
        return _OpenedImage(index, image, draws, crop, flip, jpeg)

    def decode_batch(self, opened: _OpenedBatch) -> Batch:
        """The batch on the device, to be used once `ready` has come."""
        (positions, size), rows = opened
        done = []
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            for part in _split_by_memory(rows):
                tensors = self._decode_rows(rows, part, size)
                crops, flips = [row.crop for row in rows[part]], [row.flip for row in rows[part]]
                done.append(crop_and_resize(tensors, crops, flips, size=size))
            pixels = torch.cat(done) if len(done) > 1 else done[0]
        indices = np.array([row.index for row in rows], np.int64)
        ready = self._stream.record_event() if self._stream else None
        return Batch(pixels, self.reader.find_labels(indices), indices, positions, ready)

    def _decode_rows(self, rows: list[_OpenedImage], part: slice, size: int) -> list[Tensor]:
        """The pixels on the device; another image takes the row of one that is bad."""
        tensors = []
        for number, decoded in enumerate(self._decode_all(rows[part]), start=part.start):
            pixels = decoded
            while isinstance(pixels, BadImage):
                row = rows[number]
                self.reader.record_bad(row.index, pixels)
                index, image = self._find_replacement(row.index)
                rows[number] = self._choose_crop(index, image, row.draws, size)
                pixels = self._decode_one(rows[number])
            tensors.append(pixels if isinstance(pixels, Tensor) else self._upload(pixels))
        return tensors

    def _decode_all(self, rows: list[_OpenedImage]) -> list[_Decoded]:
        """The pixels of each image, from the device where it can, else from the host."""
        on_gpu = [row for row in rows if row.jpeg is not None]
        tensors = self._decode_on_device(on_gpu)
        if on_gpu and not tensors:  # one of them was refused: each by itself tells which
            return [self._decode_one(row) for row in rows]
        others = [row.image for row in rows if row.jpeg is None]
        on_device, on_host = iter(tensors), self._threads.map(_decode_on_host, others)
        return [next(on_host if row.jpeg is None else on_device) for row in rows]

    def _decode_one(self, row: _OpenedImage) -> _Decoded:
        """One image by itself, from the device where it can: the same whenever it is asked for."""
        tensors = [] if row.jpeg is None else self._decode_on_device([row])
        return tensors[0] if tensors else _decode_on_host(row.image)

    def _decode_on_device(self, rows: list[_OpenedImage]) -> list[Tensor]:
        """These images, turned upright; none at all where the device refuses one of them."""
        try:
            tensors = self._decode([row.jpeg for row in rows if row.jpeg]) if rows else []
            return [_turn_tensor(t, row.image) for t, row in zip(tensors, rows, strict=True)]
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError:
            self.failed_calls += 1
            return []

    def _upload(self, pixels: Pixels) -> Tensor:
        writable = np.require(pixels, requirements=["C", "W"])  # torch warns about others
        return torch.from_numpy(writable).to(self.device, non_blocking=True).permute(2, 0, 1)


class NvJpeg:
    """Decodes JPEGs by nvJPEG, which torchvision brings along."""

    def __init__(self, device: torch.device):
        self._io = import_module("torchvision.io")
        self._device = device
        self._buffer = np.empty(0, np.uint8)  # kept: fresh memory costs more than the copy

    def __call__(self, files: list[bytes]) -> list[Tensor]:
        """The images on the device; raises RuntimeError when one cannot be decoded."""
        sizes = [len(file) for file in files]
        if sum(sizes) > len(self._buffer):
            self._buffer = np.empty(2 * sum(sizes), np.uint8)
        joined = self._buffer[: sum(sizes)]
        np.concatenate([np.frombuffer(file, np.uint8) for file in files], out=joined)
        # torchvision decodes on its own stream, into memory that work of ours may still be reading
        torch.cuda.current_stream(self._device).synchronize()
        pieces = list(torch.from_numpy(joined).split(sizes))
        mode = self._io.ImageReadMode.RGB
        return self._io.decode_jpeg(pieces, mode=mode, device=self._device)


def _split_by_memory(rows: list[_OpenedImage]) -> list[slice]:
    """Neighbours whose pixels fit into memory together."""
    sizes = [3 * height * width for height, width in (image_shape(row.image) for row in rows)]
    bounds = np.flatnonzero(np.diff(np.cumsum(sizes) // MAX_DECODED_BYTES)) + 1
    return [slice(*ends) for ends in pairwise([0, *bounds.tolist(), len(rows)])]


def is_gpu_decodable(image: Image) -> TypeGuard[EncodedImage]:
    """Whether nvJPEG is to decode it: a whole JPEG of a usual kind."""
    if not isinstance(image, EncodedImage):
        return False
    if not (image.data.startswith(JPEG_START) and image.data.endswith(_JPEG_END)):
        return False  # cut short perhaps, which the device would not tell
    try:
        return simplejpeg.decode_jpeg_header(image.data)[2] in _COLOURS
    except ValueError:
        return False


def _turn_tensor(tensor: Tensor, image: Image) -> Tensor:
    """The pixels [3, height, width] of an image as they are to be shown."""
    orientation = image.orientation if isinstance(image, EncodedImage) else UPRIGHT
    if orientation == UPRIGHT:
        return tensor
    turn = TURNS[orientation]
    if turn.transpose:
        tensor = tensor.transpose(1, 2)
    return tensor.flip([1] * turn.flip_rows + [2] * turn.flip_columns).contiguous()


def _decode_on_host(image: Image) -> Pixels | BadImage:
    """The whole image, or what is wrong with it."""
    try:
        return decode_image(image)
    except BadImage as bad:
        return bad


def _refuse_host_options(spec: TransformSpec, *, training: bool) -> None:
    """Raise ConfigError for a transform that only the host can do."""
    if spec.augment != "resized-crop":
        raise ConfigError("--gpu-decode: is for photographs of any size; leave it out for this set")
    for name in _HOST_OPTIONS:
        if training and getattr(spec, name) != getattr(TransformSpec, name):
            option = name.replace("_", "-")
            raise ConfigError(f"--gpu-decode: --{option} runs on the CPU; leave one of them out")


def find_gpu_decode_problem(device: torch.device) -> str:
    """Why JPEGs cannot be decoded on this device; empty when they can."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"{device} is not a usable CUDA device"
    if simplejpeg is None:
        return "simplejpeg is not installed"
    try:
        NvJpeg(device)([simplejpeg.encode_jpeg(np.zeros((16, 16, 3), np.uint8))])
    except (ImportError, OSError) as cause:
        return f"torchvision cannot be imported ({cause})"
    except (RuntimeError, AttributeError) as cause:
        return f"torchvision cannot decode JPEG there ({str(cause).partition(chr(10))[0]})"
    return ""
