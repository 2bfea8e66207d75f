"""Decodes, crops and resizes JPEGs on the GPU, and adds the images that the cores have decoded.

Images, crops, flips and labels are those of a Reader. Pixels that the GPU decodes differ slightly:
its decoder rounds differently, and crops are resized as by Pillow's bilinear filter.

Worker processes open the files (opened_rows.py): they read bytes and headers, choose the crops,
which depend on sizes but not on pixels, and decode the rows that are the cores' share. A thread
here copies both from their memory, task by task; then the batch is decoded on its own stream.

What nvJPEG's hardware cannot decode, the host decodes: other formats, progressive JPEGs, unusual
colours, and truncated files, which nvJPEG would not report. If nvJPEG fails for one image, none of
the batch is decoded. All are then tried one by one, and those that fail again are reopened here
and decoded by the host, so an image counts as bad only if the host cannot decode it either.
"""

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from functools import partial
from itertools import chain, cycle, pairwise, tee
from statistics import mean
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.data.formats.decode import BadImage, EncodedImage, Image
from phalanx.data.formats.sources import Source
from phalanx.data.loading.gpu_share import is_gpu_decodable
from phalanx.data.loading.loader import BatchBackend, prefetch
from phalanx.data.loading.nvjpeg import NvJpeg, find_package
from phalanx.data.loading.opened_rows import (
    JPEG_FIELDS,
    OpenedRows,
    OpenRows,
    describe_jpeg,
    open_rows_here,
)
from phalanx.data.loading.reader import Batch, BatchRequest, Reader, open_image
from phalanx.data.orientation import TURNS, UPRIGHT
from phalanx.data.transforms.transform import TransformSpec
from phalanx.errors import ConfigError
from phalanx.kernels.crop_resize import crop_and_resize

try:
    import simplejpeg
except ImportError:  # decoding on the CPU does not need it
    simplejpeg = None

Decode = Callable[[list[Tensor]], list[Tensor]]  # JPEGs to uint8 [3, height, width] on the device
_Integers = NDArray[np.int64]
_Bytes = NDArray[np.uint8]

MAX_DECODED_BYTES = 2**30  # of images decoded at a time
_USUAL_SWITCH_S = sys.getswitchinterval()
_SWITCH_S = 1e-4  # between threads: with the usual 5 ms, a finished decode waits for a busy reader
_HOST_OPTIONS = ("color_jitter", "auto_augment", "random_erasing")
_LEFT_OUT = -1  # the size of a JPEG that is reopened instead
_TYPICAL = 16  # images, spread over a dataset
_LARGE_JPEG = 2**15  # bytes
_DECODERS = 2  # which run at the same time, each on its own batch
_BUFFERS = _DECODERS + 2  # for the files of the batch being collected and of those being decoded


class _FileBuffer:
    """Concatenated files, in memory that is reused: new memory would cost more than the copy."""

    def __init__(self) -> None:
        self._bytes: _Bytes = np.empty(0, np.uint8)
        self._used = 0

    def clear(self) -> None:
        """Remove all files, but keep the memory."""
        self._used = 0

    def append(self, files: _Bytes) -> None:
        """Append a copy of the bytes of some files."""
        end = self._used + len(files)
        if end > len(self._bytes):
            grown = np.empty(2 * end, np.uint8)
            grown[: self._used] = self._bytes[: self._used]
            self._bytes = grown
        self._bytes[self._used : end] = files
        self._used = end

    def split(self, sizes: _Integers) -> list[Tensor]:
        """The files one by one, without copying."""
        return list(torch.from_numpy(self._bytes[: self._used]).split(sizes.tolist()))


class _CollectedBatch(NamedTuple):
    """The rows of a batch, copied from the memory of the workers."""

    request: BatchRequest
    indices: _Integers
    pixel_rows: _Integers
    pixels: Tensor  # of these rows
    jpegs: NDArray[np.void]  # of JPEG_FIELDS
    files: list[Tensor]  # of the JPEGs; empty for one that will be reopened


class GpuDecoder(BatchBackend):
    """Makes the batches of a reader on a device.

    open_rows: opens the files; by default this process does. decode: turns JPEGs into tensors on
    the device, called by two threads at a time; by default nvJPEG does. failed_calls: how many of
    its calls failed, whose images were then tried one by one.
    """

    def __init__(
        self,
        reader: Reader,
        device: torch.device,
        *,
        open_rows: OpenRows | None = None,
        decode: Decode | None = None,
    ):
        _refuse_host_options(reader.spec.transform, training=reader.split == "train")
        self.reader, self.device = reader, device
        self.failed_calls = 0
        self._open_rows = open_rows or partial(open_rows_here, reader)
        self._nvjpegs = [NvJpeg(device) for _ in range(_DECODERS)] if decode is None else []
        self._decoders: list[Decode] = [decode] * _DECODERS if decode else [*self._nvjpegs]
        self._on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None
        self._buffers = cycle([_FileBuffer() for _ in range(_BUFFERS)])
        sys.setswitchinterval(_SWITCH_S)

    def close(self) -> None:
        """Restore the process's settings and free nvJPEG; may be called twice."""
        sys.setswitchinterval(_USUAL_SWITCH_S)
        for nvjpeg in self._nvjpegs:
            nvjpeg.close()

    def batches(self, requests: Iterable[BatchRequest]) -> Generator[Batch, None, None]:
        """The batch of each request; meanwhile, the next ones are opened and collected."""
        ahead, behind = tee(requests)
        with closing(self._open_rows(ahead)) as opened:
            collected = (self._collect(request, opened) for request in behind)
            with closing(prefetch(collected)) as ready:
                yield from self._decode_batches(ready)

    def _decode_batches(self, batches: Iterable[_CollectedBatch]) -> Generator[Batch, None, None]:
        """The decoded batches in order; the decoders take them in turn."""
        coming: deque[Future[Batch]] = deque()
        with ThreadPoolExecutor(_DECODERS, "prefetch") as threads:
            for batch, decode in zip(batches, cycle(self._decoders), strict=False):
                coming.append(threads.submit(self._decode_batch, batch, decode))
                if len(coming) == _DECODERS:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()

    def _collect(self, request: BatchRequest, opened: Iterator[OpenedRows]) -> _CollectedBatch:
        """Copy the rows of a batch, piece by piece, without work for each single image."""
        positions, size, _ = request
        of_cores = ~self.reader.find_gpu_rows(request)
        pixels, buffer = self._allocate(int(of_cores.sum()), size), next(self._buffers)
        indices, pixel_rows, jpegs = np.empty_like(positions), [], []
        start, filled = 0, 0
        buffer.clear()
        while start < len(positions):
            piece = next(opened)
            if filled + len(piece.pixels) > len(pixels):  # the workers decoded some for the GPU
                few, pixels = pixels, self._allocate(len(positions), size)
                pixels[:filled] = few[:filled]
            pixels.numpy()[filled : filled + len(piece.pixels)] = piece.pixels
            buffer.append(piece.files)
            indices[start : start + len(piece.indices)] = piece.indices
            pixel_rows.append(piece.pixel_rows + start)
            piece.jpegs["row"] += start
            jpegs.append(piece.jpegs)
            start, filled = start + len(piece.indices), filled + len(piece.pixels)
        self.reader.problems.refuse_too_many_bad(self.reader.max_bad)
        table = np.concatenate(jpegs)
        files = buffer.split(table["size"])
        self._complete_files(table, files, indices)
        rows = np.concatenate(pixel_rows)
        return _CollectedBatch(request, indices, rows, pixels[:filled], table, files)

    def _allocate(self, rows: int, size: int) -> Tensor:
        """Memory for images, pinned if the device is a GPU."""
        return torch.empty((rows, size, size, 3), dtype=torch.uint8, pin_memory=self._on_gpu)

    def _complete_files(
        self, jpegs: NDArray[np.void], files: list[Tensor], indices: _Integers
    ) -> None:
        """Read the files that did not fit; leave out images that are the cores'.

        The worker that opened one may not know that yet.
        """
        cores_only = list(self.reader.problems.cores_only)
        if cores_only:
            jpegs["size"][np.isin(indices[jpegs["row"]], cores_only)] = _LEFT_OUT
        for number in np.flatnonzero(jpegs["size"] == 0).tolist():
            image = self.reader.try_open(int(indices[jpegs["row"][number]]))
            jpegs["size"][number] = _LEFT_OUT
            if isinstance(image, EncodedImage):
                jpegs["size"][number], files[number] = len(image.data), _to_tensor(image.data)

    def _decode_batch(self, batch: _CollectedBatch, decode: Decode) -> Batch:
        """The batch on the device, to be used after its event `ready`."""
        (positions, size, _), indices = batch.request, batch.indices
        shape = len(positions), size, size, 3
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            out = torch.empty(shape, dtype=torch.uint8, device=self.device)
            refused = self._decode_jpegs(batch, out, decode)
            if len(batch.pixel_rows):
                self._write_rows(
                    batch.pixels.to(self.device, non_blocking=True), batch.pixel_rows, out
                )
            for row in refused:
                place = int(positions[row]), int(indices[row])
                indices[row], out[row] = self._decode_again(*place, size, decode)
        ready = self._stream.record_event() if self._stream else None
        return Batch(out, self.reader.find_labels(indices), indices, positions, ready)

    def _decode_jpegs(self, batch: _CollectedBatch, out: Tensor, decode: Decode) -> list[int]:
        """Write the rows that the device can decode; returns those that it cannot."""
        jpegs = batch.jpegs
        refused: list[int] = jpegs["row"][jpegs["size"] == _LEFT_OUT].tolist()
        portions = deque(_split_by_memory(jpegs))
        while portions:
            numbers = portions.popleft()
            try:
                refused += self._decode_portion(numbers, batch, out, decode)
            except torch.OutOfMemoryError:  # training has taken most of it
                if len(numbers) == 1:
                    raise
                half = len(numbers) // 2
                portions.extendleft([numbers[half:], numbers[:half]])
        return refused

    def _decode_portion(
        self, numbers: list[int], batch: _CollectedBatch, out: Tensor, decode: Decode
    ) -> list[int]:
        """Decode and write the JPEGs of these numbers; returns the rows of those it cannot."""
        jpegs = batch.jpegs[numbers]
        decoded = self._try_decode([batch.files[number] for number in numbers], decode)
        if decoded:
            self._write_rows(_crop_decoded(decoded, jpegs, batch.request.size), jpegs["row"], out)
            return []
        if len(numbers) == 1:
            return [int(jpegs["row"][0])]
        # it failed for one of them: find out which
        alone = [self._decode_portion([number], batch, out, decode) for number in numbers]
        return list(chain.from_iterable(alone))

    def _try_decode(self, files: list[Tensor], decode: Decode) -> list[Tensor]:
        """These images before cropping and turning; empty if the device fails for one of them."""
        try:
            return decode(files)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError:
            self.failed_calls += 1
            return []

    def _write_rows(self, squares: Tensor, rows: _Integers, out: Tensor) -> None:
        """Write images to rows of a batch, on the device."""
        out.index_copy_(0, torch.from_numpy(rows).to(self.device, non_blocking=True), squares)

    def _decode_again(
        self, position: int, index: int, size: int, decode: Decode
    ) -> tuple[int, Tensor]:
        """The image of a row, after the device failed for the one of that index, and its index.

        The image is reopened and decoded by the host, or replaced by another one.
        """
        reader, refused = self.reader, {index}
        (first,), (draws,) = reader.find_samples(np.array([position]))
        square = np.empty((size, size, 3), np.uint8)

        def skips(index: int, image: Image) -> bool:
            return index not in refused and reader.leaves_to_gpu(index, image)

        while True:
            image = reader.open(int(first))
            index, jpeg = reader.fill_row(int(first), image, draws, square, skips=skips)
            if not isinstance(jpeg, EncodedImage):
                return index, torch.from_numpy(square)
            facts = 0, len(jpeg.data), *describe_jpeg(reader, index, jpeg, draws, size)
            tensors = self._try_decode([_to_tensor(jpeg.data)], decode)
            if tensors:
                return index, _crop_decoded(tensors, np.array([facts], JPEG_FIELDS), size)[0]
            refused.add(index)


def _split_by_memory(jpegs: NDArray[np.void]) -> list[list[int]]:
    """Numbers of the JPEGs to decode, grouped so that the pixels of a group fit into memory."""
    numbers = np.flatnonzero(jpegs["size"] != _LEFT_OUT)
    sizes = 3 * jpegs["sides"][numbers].prod(axis=1)
    bounds = np.flatnonzero(np.diff(np.cumsum(sizes) // MAX_DECODED_BYTES)) + 1
    parts = [slice(*ends) for ends in pairwise([0, *bounds.tolist(), len(numbers)])]
    return [numbers[part].tolist() for part in parts if len(numbers)]


def _crop_decoded(tensors: list[Tensor], jpegs: NDArray[np.void], size: int) -> Tensor:
    """The crops of decoded JPEGs, [N, size, size, 3], after turning them upright."""
    for number in np.flatnonzero(jpegs["orientation"] != UPRIGHT).tolist():
        tensors[number] = _turn_tensor(tensors[number], int(jpegs["orientation"][number]))
    return crop_and_resize(tensors, jpegs["crop"], jpegs["flip"], size=size)


def _turn_tensor(tensor: Tensor, orientation: int) -> Tensor:
    """The pixels [3, height, width] of an image, turned upright."""
    turn = TURNS[orientation]
    if turn.transpose:
        tensor = tensor.transpose(1, 2)
    return tensor.flip([1] * turn.flip_rows + [2] * turn.flip_columns).contiguous()


def _to_tensor(file: bytes) -> Tensor:
    """A copy of a file's bytes, because torch cannot share memory that is read-only."""
    return torch.from_numpy(np.frombuffer(file, np.uint8).copy())


def _refuse_host_options(spec: TransformSpec, *, training: bool) -> None:
    """Raise ConfigError for a transform that only the host can do."""
    if spec.augment != "resized-crop":
        raise ConfigError("--gpu-decode: is for photographs of any size; leave it out for this set")
    for name in _HOST_OPTIONS:
        if training and getattr(spec, name) != getattr(TransformSpec, name):
            option = name.replace("_", "-")
            raise ConfigError(f"--gpu-decode: --{option} runs on the CPU; leave one of them out")


def has_decoding_engines(device: torch.device) -> bool:
    """Whether a GPU, on which nvJPEG works, decodes with engines made for it."""
    with closing(NvJpeg(device)) as nvjpeg:
        return nvjpeg.has_engines


def find_gpu_decode_problem(device: torch.device) -> str:
    """Why JPEGs cannot be decoded on this device; empty if they can."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"{device} is not a usable CUDA device"
    if simplejpeg is None:
        return "simplejpeg is not installed"
    try:
        with closing(NvJpeg(device)) as nvjpeg:
            nvjpeg([_to_tensor(simplejpeg.encode_jpeg(np.zeros((16, 16, 3), np.uint8)))])
    except OSError as cause:
        return f"libnvjpeg, of the package {find_package()}, cannot be loaded ({cause})"
    except (RuntimeError, AttributeError) as cause:
        return f"nvJPEG cannot decode on {device} ({str(cause).partition(chr(10))[0]})"
    return ""


def holds_large_jpegs(source: Source) -> bool:
    """Whether typical images are JPEGs for the GPU, so large that the cores take long over them."""
    sizes = []
    for index in np.linspace(0, len(source) - 1, _TYPICAL).astype(int).tolist():
        with suppress(BadImage):
            image = open_image(source, index)
            if is_gpu_decodable(image):
                sizes.append(len(image.data))
    return len(sizes) > _TYPICAL // 2 and mean(sizes) >= _LARGE_JPEG
